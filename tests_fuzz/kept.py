"""The inputs that are kept: one file a door, a line an input, in base64. Each reaches code that no other one does."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"
MOST, MOST_BYTES = 400, 4096  # inputs of a door, and bytes of one: the corpus is read by every run of the tests


def read(door: str) -> list[bytes]:
    file = FOLDER / f"{door}.txt"
    return [b64decode(line) for line in file.read_text().splitlines()] if file.is_file() else []


def write(door: str, inputs: Iterable[bytes]) -> int:
    """Keep the shortest of ``inputs``. Returns how many."""
    shortest = sorted({data for data in inputs if len(data) <= MOST_BYTES}, key=lambda data: (len(data), data))[:MOST]
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{door}.txt").write_text("".join(b64encode(data).decode() + "\n" for data in shortest))
    return len(shortest)
