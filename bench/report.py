"""What a benchmark leaves: a table for people, and its rows as JSON in ``build/bench/NAME.json``."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from slipstream.base.errors import SlipstreamError
from slipstream.cli.terminal import print_error
from slipstream.engine.native.compiled_kernels import processor

FOLDER = Path("build/bench")

Cell = str | float | int | bool
Row = Mapping[str, Cell]


def number(row: Row, name: str) -> float:
    value = row[name]
    assert isinstance(value, int | float)
    return float(value)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """For a ``main``: an error of ours ends the process with its sentence."""
    try:
        yield
    except SlipstreamError as error:
        print_error(error)
        sys.exit(1)


def device() -> str:
    """The machine in words: cores and instruction set, or the GPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    tiles = " and AMX" if "amx_tile" in processor() else ""
    return f"{os.cpu_count()} cores {platform.machine()} ({torch.backends.cpu.get_cpu_capability()}{tiles})"


def commit() -> str:
    """The commit that runs, with a plus sign when files differ from it."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True,
                              check=True).stdout.strip()
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if dirty.stdout.strip() else "")


def write(name: str, rows: Sequence[Row], title: str, folder: Path = FOLDER) -> Path:
    """Print ``rows`` as a table and write them; returns the file."""
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    path = save(name, rows, folder)
    print(f"rows in {path}; {device()}, commit {commit()}")
    return path


def save(name: str, rows: Sequence[Row], folder: Path = FOLDER) -> Path:
    """Write ``rows`` alone; returns the file, which is whole at any time."""
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps({"device": device(), "commit": commit(), "command": " ".join(sys.argv),
                                 "torch": torch.__version__, "date": datetime.now(UTC).isoformat(timespec="seconds"),
                                 "rows": list(rows)}, indent=1))
    fresh.replace(path)
    return path
