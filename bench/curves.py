"""The sweep as a picture: ``python -m bench.curves OUT.svg`` draws ``build/bench/network.json``, tokens a second over
the round trip, a panel for each drafter's time and batch, a line for each schedule.

It knows nothing about how rows were measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from bench.report import FOLDER, Row

COLOURS = {"plain": "#777777", "colocated": "#b8860b", "serial": "#1f5fa8", "run-ahead": "#2f8f5b"}
WIDE, HIGH, LEFT, TOP, GAP = 220, 150, 48, 46, 56
Lines = dict[str, list[tuple[float, float]]]  # schedule -> (round trip, tokens a second)


def lines_of(rows: Sequence[Row], draft_ms: float, batch: int) -> Lines:
    """What one panel shows. Plain decoding knows no drafter, and plain and colocated know no round trip."""
    rtts = sorted({float(str(row["rtt_ms"])) for row in rows})
    lines: Lines = {}
    for row in rows:
        schedule, speed = str(row["schedule"]), float(str(row["tokens_per_s"]))
        if row["batch"] != batch or (row["draft_ms"] != draft_ms and schedule != "plain"):
            continue
        for rtt_ms in rtts if schedule in ("plain", "colocated") else [float(str(row["rtt_ms"]))]:
            lines.setdefault(schedule, []).append((rtt_ms, speed))
    return {schedule: sorted(lines[schedule]) for schedule in COLOURS if schedule in lines}


def panel(left: float, top: float, title: str, lines: Lines) -> list[str]:
    """SVG elements. Round trips stand side by side, whatever lies between them."""
    rtts = sorted({rtt_ms for points in lines.values() for rtt_ms, _ in points})
    high = 1.1 * max(speed for points in lines.values() for _, speed in points)
    drawn = [f'<text x="{left}" y="{top - 8}" font-weight="bold">{title}</text>']
    for tick in range(5):
        y = top + HIGH * (1 - tick / 4)
        drawn.append(f'<line x1="{left}" x2="{left + WIDE}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        drawn.append(f'<text x="{left - 5}" y="{y + 4}" text-anchor="end">{high * tick / 4:.0f}</text>')

    def x(rtt_ms: float) -> float:
        return left + WIDE * (rtts.index(rtt_ms) + 0.5) / len(rtts)

    drawn += [f'<text x="{x(rtt_ms)}" y="{top + HIGH + 15}" text-anchor="middle">{rtt_ms:g}</text>' for rtt_ms in rtts]
    for schedule, points in lines.items():
        places = " ".join(f"{x(rtt_ms):.1f},{top + HIGH * (1 - speed / high):.1f}" for rtt_ms, speed in points)
        drawn.append(f'<polyline fill="none" stroke="{COLOURS[schedule]}" stroke-width="2" points="{places}"/>')
    return drawn


def picture(rows: Sequence[Row], acceptance: str) -> str:
    """A row of panels for each batch, a column for each drafter."""
    kept = [row for row in rows if row["acceptance"] == acceptance]
    drafts = sorted({float(str(row["draft_ms"])) for row in kept})
    batches = sorted({int(str(row["batch"])) for row in kept})
    parts = [f'<rect x="{LEFT + 110 * place}" y="8" width="12" height="12" fill="{colour}"/>'
             f'<text x="{LEFT + 16 + 110 * place}" y="18">{schedule}</text>'
             for place, (schedule, colour) in enumerate(COLOURS.items())]
    for row, batch in enumerate(batches):
        for column, draft_ms in enumerate(drafts):
            title = f"tree {draft_ms:g} ms, {batch} stream{'s' if batch > 1 else ''}"
            parts += panel(LEFT + column * (WIDE + GAP), TOP + row * (HIGH + GAP), title,
                           lines_of(kept, draft_ms, batch))
    width, height = LEFT + len(drafts) * (WIDE + GAP), TOP + len(batches) * (HIGH + GAP) + 10
    parts.append(f'<text x="{LEFT}" y="{height - 8}">tokens a second over the round trip in ms</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            'font-size="11" fill="#333">\n<rect width="100%" height="100%" fill="white"/>\n'
            + "\n".join(parts) + "\n</svg>\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=Path, default=FOLDER / "network.json")
    parser.add_argument("--acceptance", default="0.75 0.12 0.05")
    arguments = parser.parse_args()
    arguments.out.write_text(picture(json.loads(arguments.rows.read_text())["rows"], arguments.acceptance))


if __name__ == "__main__":
    main()
