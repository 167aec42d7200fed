"""What the rows of ``make bench`` say: a verdict for each goal, and a page with versions and memory.

It knows nothing about how they were measured.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from bench.completions import Answered
from bench.report import Row, commit, device
from bench.systems import llama_server
from slipstream.base.errors import ConfigError

Results = dict[tuple[str, int, str], list[Answered]]  # (system, batch, set)
PACKAGES = ("torch", "transformers", "grpcio", "numpy")


@dataclass(frozen=True, slots=True)
class Goal:
    """``system`` should reach so many times ``other``."""

    system: str
    other: str
    batch: int
    set: str
    least: float


GOALS = (
    Goal("slipstream-default", "slipstream-plain", 1, "mt_bench", 1.3),
    Goal("slipstream-default", "slipstream-plain", 1, "copy", 1.9),
    Goal("slipstream-default", "transformers-plain", 1, "mt_bench", 2.5),
    Goal("slipstream-default", "transformers-plain", 1, "copy", 2.5),
    Goal("slipstream-plain", "llamacpp-plain", 1, "mt_bench", 0.9),
    Goal("slipstream-plain", "llamacpp-plain", 1, "copy", 0.9),
    *(Goal("slipstream-default", "slipstream-plain", batch, set_, 1.0)
      for batch in (4, 16) for set_ in ("mt_bench", "copy")),
)


def speed(answer: Answered, batch: int) -> float:
    """Tokens a second: of decoding, and of a whole batch from the first request to the last token."""
    return answer.tokens_per_s if batch == 1 else answer.end_to_end


def ratio(results: Results, system: str, other: str, batch: int, set_: str) -> float:
    """The median over questions (or runs) of ``system``'s speed by ``other``'s; 0 where one is missing."""
    both = zip(results.get((system, batch, set_), ()), results.get((other, batch, set_), ()), strict=False)
    pairs = [(speed(mine, batch), speed(theirs, batch)) for mine, theirs in both]
    ratios = [mine / theirs for mine, theirs in pairs if mine and theirs]
    return statistics.median(ratios) if ratios else 0.0


def verdicts(results: Results) -> list[str]:
    """One line a goal."""
    lines = []
    for goal in GOALS:
        got = ratio(results, goal.system, goal.other, goal.batch, goal.set)
        word = "not measured" if not got else f"{got:.2f} ×, {'reached' if got >= goal.least else 'MISSED'}"
        lines.append(f"{goal.system} by {goal.other}, batch {goal.batch}, {goal.set}: goal {goal.least:g} ×: {word}")
    return lines


def report(rows: Sequence[Row], lines: Sequence[str], memory: Mapping[str, Mapping[str, float]], peers: Path,
           folder: Path) -> Path:
    """Write ``peers.md`` to ``folder``; returns the page."""
    page = folder / "peers.md"
    page.write_text("\n".join([
        f"{device()}, {platform.platform()}, commit {commit()}; {', '.join(versions(peers))}", "", *table(rows), "",
        *(f"- {line}" for line in lines), "", "Memory, MiB resident after all of it (mapped files included):", "",
        *(f"- {name}: {', '.join(f'{part} {mib:.0f}' for part, mib in parts.items())}"
          for name, parts in memory.items()), ""]), encoding="utf-8")
    return page


def table(rows: Sequence[Row]) -> list[str]:
    """As Markdown."""
    def text(value: object) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    names = [name for name in rows[0] if name != "precision"]
    return ["| " + " | ".join(name.replace("_", " ") for name in names) + " |", "|---" * len(names) + "|",
            *("| " + " | ".join(text(row[name]) for name in names) + " |" for row in rows)]


def versions(peers: Path) -> list[str]:
    """Of what took part."""
    mine = [f"{name} {version(name)}" for name in PACKAGES]
    try:
        told = subprocess.run([llama_server(peers), "--version"], capture_output=True, text=True, check=False)
    except ConfigError:
        return mine
    said = [line.removeprefix("version: ") for line in (told.stderr + told.stdout).splitlines()
            if line.startswith("version: ")]
    return mine + [f"llama.cpp {line}" for line in said]
