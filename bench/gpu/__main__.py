"""``make gpu``: the pieces, one after the other, and a table of what they found.

Each piece is a process of its own with its own limit (``piece``), so one that dies costs its own rows; it is run once
more with the first of what it measures. Numbers come as they are found: each is a line of ``gpu.jsonl`` in the folder
``--out`` at once, ``gpu.json`` there is complete after each piece, and a table of all stands at the end. All of it is
made for ten minutes of a GPU and needs no network. ``--device cpu --rehearse`` runs every line of it anywhere, on
shapes so small that the numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.gpu.piece import Died, Piece, found_by, prepare
from bench.gpu.stage import Finding, Given
from bench.gpu.stages import PIECES, STAGES
from bench.report import Row, exit_on_error, save, write
from slipstream.engine.model import device_of
from slipstream.models.folder import KNOWN
from slipstream.models.folder import prepare as prepare_model

LIMIT_S = 570.0
LOST = ("DIED", "FAILED")  # what a row is called that stands for a piece's end


def run(pieces: Sequence[Piece], given: Given, out: Path, limit_s: float) -> list[Row]:
    """The rows of all pieces. limit_s: of all of them; what does not come to its turn has a row that says so."""
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    prepare(pieces)
    began_s = time.perf_counter()
    with (out / "gpu.jsonl").open("w", encoding="utf-8") as lines:
        for piece in pieces:
            at_s = time.perf_counter() - began_s
            print(f"-- {piece.name}, {at_s:.0f} s after the start", flush=True)
            for finding in _tried(piece, given, limit_s - at_s):
                rows.append(_row(piece.name, finding))
                at_s = time.perf_counter() - began_s
                lines.write(json.dumps({"at_s": round(at_s, 2), **rows[-1]}) + "\n")
                lines.flush()
                print("  ", *(value for value in rows[-1].values() if value != ""), flush=True)
            save("gpu", rows, out)
    return rows


def _tried(piece: Piece, given: Given, left_s: float) -> Iterator[Finding]:
    """Once, and after a death once more, for less."""
    limit_s = min(piece.limit_s, left_s)
    if limit_s <= 0.0:
        yield Finding("not run", "the time was over")
        return
    for narrow, again, least_s in ((False, "", limit_s), (True, "once more: ", limit_s / 2)):
        try:
            for found in found_by(piece, replace(given, shape=piece.shape, narrow=narrow), least_s):
                yield replace(found, what=again + found.what)
            return
        except Died as death:
            yield Finding("DIED" if death.on_device else "FAILED", f"{again}{death}")
            if not death.on_device:
                return


def _row(stage: str, found: Finding) -> Row:
    value = found.value
    if isinstance(value, float):
        value = f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return {"stage": stage, "what": found.what, "value": value, "unit": found.unit, "expected": found.expected}


@exit_on_error()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=" ".join(STAGES), help="names with spaces between; else all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", help="a folder or a known name for answers; else random")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of all pieces together")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes: does it run?")
    options = parser.parse_args(arguments)
    names = options.stages.split()
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"no stage {unknown[0]}; there are {', '.join(STAGES)}")
    model = prepare_model(options.model) if options.model in KNOWN else Path(options.model) if options.model else None
    given = Given(device_of(options.device), not options.rehearse, model, options.repeats)
    rows = run([piece for piece in PIECES if piece.stage in names], given, options.out, options.limit_s)
    title = "a rehearsal: these numbers mean nothing" if options.rehearse else "the engine on one device"
    write("gpu", rows, title, options.out)
    return int(any(row["what"] in LOST for row in rows))


if __name__ == "__main__":
    sys.exit(main())
