"""A trace as a picture: ``python -m bench.picture OUT.svg [TRACE.json …]``; one panel a trace, one line a row of it.

Without a trace, serial rounds and growth ahead are simulated and drawn one below the other. Spans are bars, messages on
the wire are lines between them. It reads Chrome's format (``slipstream.observe.trace``) and knows nothing else.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from slipstream.observe.trace import merge
from slipstream.simulate.simulation import Deployment, of_schedule, simulate

LEFT, WIDE, LINE, TOP = 110, 960, 26, 40
COLOURS = {"verify": "#2f6fab", "round": "#9cc3e6", "wait": "#e8a33d", "tree": "#3f8f5f", "level": "#8cc9a1"}
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Panel:
    """One trace: what lies between ``from_us`` and ``from_us + us`` of it."""

    title: str
    events: Sequence[Event]
    from_us: float
    us: float

    def rows(self) -> dict[tuple[int, int], str]:
        """(pid, tid) -> "process: row", in the order of their names."""
        name = {e["pid"]: e["args"]["name"] for e in self.events if e["name"] == "process_name"}
        rows = {(e["pid"], e["tid"]): f"{name[e['pid']]}: {e['args']['name']}" for e in self.events
                if e["name"] == "thread_name"}
        return dict(sorted(rows.items(), key=lambda row: row[1], reverse=True))

    def x(self, ts: float) -> float:
        return LEFT + WIDE * min(1.0, max(0.0, (ts - self.from_us) / self.us))

    def inside(self, ts: float) -> bool:
        return self.from_us <= ts <= self.from_us + self.us

    def draw(self, top: float) -> list[str]:
        """SVG elements, from ``top`` downwards."""
        place = {row: top + 22 + LINE * number for number, row in enumerate(self.rows())}
        parts = [f'<text x="8" y="{top + 10}" font-weight="bold">{escape(self.title)}</text>']
        parts += [f'<text x="8" y="{place[row] + 14}">{escape(name)}</text>' for row, name in self.rows().items()]
        for event in self.events:
            if event["ph"] == "X" and self.inside(event["ts"]):
                left, right = self.x(event["ts"]), self.x(event["ts"] + event["dur"])
                parts.append(f'<rect x="{left:.1f}" y="{place[(event["pid"], event["tid"])]}" height="18" width="'
                             f'{max(0.8, right - left - 0.6):.1f}" fill="{COLOURS.get(event["name"], "#999")}"/>')
        return parts + self._messages(place)

    def _messages(self, place: dict[tuple[int, int], float]) -> list[str]:
        left = {e["id"]: e for e in self.events if e["ph"] == "s"}
        parts = []
        for came in self.events:
            went = left.get(came.get("id")) if came["ph"] == "f" else None
            if went is not None and self.inside(went["ts"]) and self.inside(came["ts"]):
                begin, end = place[(went["pid"], went["tid"])] + 9, place[(came["pid"], came["tid"])] + 9
                colour = "#b33" if went["name"] == "commit" else "#555"
                parts.append(f'<line x1="{self.x(went["ts"]):.1f}" y1="{begin}" x2="{self.x(came["ts"]):.1f}" '
                             f'y2="{end}" stroke="{colour}" stroke-width="0.7"/>')
        return parts


def picture(panels: Sequence[Panel]) -> str:
    """All panels, one below the other, with the legend and the time at the foot."""
    top, parts = TOP, []
    for panel in panels:
        parts += panel.draw(top)
        top += LINE * len(panel.rows()) + 40
    legend = [f'<rect x="{LEFT + 90 * n}" y="8" width="12" height="12" fill="{colour}"/>'
              f'<text x="{LEFT + 16 + 90 * n}" y="18">{name}</text>'
              for n, (name, colour) in enumerate(COLOURS.items())]
    length = f"{panels[0].us / 1e3:.0f} ms from left to right; red: commit, grey: growth"
    foot = f'<text x="{LEFT}" y="{top}">{length}</text>'
    body = "\n".join([*legend, *parts, foot])
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDE + 20} {top + 14}" '
            'font-family="sans-serif" font-size="11">\n'
            f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n')


def panel(file: Path, title: str, ms: float) -> Panel:
    """The ``ms`` in the middle of a trace."""
    events = json.loads(file.read_text())["traceEvents"]
    times = sorted(e["ts"] for e in events if "ts" in e)
    return Panel(title, events, times[len(times) // 2], 1e3 * ms)


def simulated(ms: float) -> list[Panel]:
    panels = []
    for schedule in ("serial", "run-ahead"):
        with tempfile.TemporaryDirectory() as folder:
            deployment = of_schedule(schedule, Deployment(rtt_s=0.005, traces=folder))
            simulate(deployment, 0.6, 0.2)
            merge([Path(folder, "target"), Path(folder, "draft")], Path(folder, "both"))
            panels.append(panel(Path(folder, "both"), f"{schedule}: step 20 ms, tree 5 ms, round trip 5 ms", ms))
    return panels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("traces", type=Path, nargs="*")
    parser.add_argument("--ms", type=float, default=160.0, help="how much of each is drawn")
    arguments = parser.parse_args()
    panels = [panel(file, file.stem, arguments.ms) for file in arguments.traces] or simulated(arguments.ms)
    arguments.out.write_text(picture(panels))


if __name__ == "__main__":
    main()
