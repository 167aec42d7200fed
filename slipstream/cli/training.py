"""``slipstream train-head``: turns its options into a job, shows progress, and prints the result.

It knows nothing about how heads are made.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shlex import quote

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from slipstream.cli.terminal import plain_table
from slipstream.models.folder import default_root, folder_name, resolve
from slipstream.train.fit import Progress as Training
from slipstream.train.recipe import Recipe
from slipstream.train.shards import Totals
from slipstream.train.stages import DRAFTERS, Job, make_head

LINE_EVERY_S = 20.0
MAX_PROCESSES = 4  # a step has 2,000 rows or more; a share below 500 would be mostly overhead


def run(target: str, out: Path | None, work: Path | None, data: tuple[Path, ...], recipe: Recipe, threads: int,
        console: Console) -> None:
    """Train a head and print its acceptance. Raises ConfigError, ModelError."""
    if threads:
        torch.set_num_threads(threads)
    device = recipe.device or ("cuda" if torch.cuda.is_available() else "cpu")
    processes = min(torch.get_num_threads(), MAX_PROCESSES) if device == "cpu" else 1
    folder = resolve(target)
    name = folder_name(folder)
    recipe = replace(recipe, device=device, processes=processes)
    work = work or default_root().parent / "train" / name
    out = (out or Path(f"{name}-{recipe.kind}-trained")).resolve()  # "." has no name to write beside
    job = Job(folder, name, out, work.resolve(), data, recipe)
    try:
        with _progress_bars(console) as watcher:
            acceptances = make_head(job, watcher)
    except KeyboardInterrupt:
        console.print(f"interrupted: what is whole in {job.work} is kept, and the same command goes on with it",
                      markup=False, soft_wrap=True)
        raise
    if acceptances:
        rows = [(shape, f"{a.length:.2f}", " / ".join(f"{share:.2f}" for share in a.by_depth))
                for shape, a in acceptances.items()]
        console.print(plain_table(("draft", "tokens a target step", "acceptance by depth"), rows))
    if recipe.train:
        console.print(f"the head: {job.out}\nserve it:  slipstream run --set draft.drafter={DRAFTERS[recipe.kind]} "
                      f"--set draft.model={quote(str(job.out))} --set model.path={quote(target)}", markup=False,
                      soft_wrap=True)


class Bars:
    """A ``stages.Watcher`` that draws one bar a stage; where there is no terminal, a line now and then."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress, self._console = progress, console
        self._tasks: dict[str, TaskID] = {}
        self._first_reports: dict[str, tuple[float, float]] = {}  # stage -> (seconds, tokens)
        self._last_line_s = 0.0

    def collecting(self, totals: Totals, share: float) -> None:
        rate = self._rate("generating", totals.seconds, totals.tokens)
        self._show("generating", share, f"{totals.tokens:,} tokens, {rate:,.0f} a second")

    def training(self, progress: Training, share: float) -> None:
        rate = self._rate("training", progress.seconds, progress.rows)
        agreement = " ".join(f"{value:.2f}" for value in progress.agreement)
        self._show("training", share, f"step {progress.step}, {rate:,.0f} tokens a second, loss {progress.loss:.2f}, "
                   f"agreement {agreement}")

    def log(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _rate(self, stage: str, seconds: float, tokens: float) -> float:
        first_s, first_tokens = self._first_reports.setdefault(stage, (seconds, tokens))
        return (tokens - first_tokens) / max(seconds - first_s, 1e-9)

    def _show(self, stage: str, share: float, text: str) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=1.0, text="")
        self._progress.update(self._tasks[stage], completed=share, text=text)
        if not self._console.is_terminal and time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            self.log(f"{stage} {share:.1%}: {text}")


@contextmanager
def _progress_bars(console: Console) -> Iterator[Bars]:
    columns = (TextColumn("{task.description}"), BarColumn(24), TimeRemainingColumn(),
               TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=console) as progress:
        yield Bars(progress, console)
