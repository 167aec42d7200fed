"""A dashboard as a picture: its panels in their places, drawn from the answers of a Prometheus, as SVG.

It is a picture of the data, not of Grafana: lines instead of gauges, no colours of its own for values. It knows nothing
about where the points come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from deploy.dashboards.panels import COLUMNS, Dashboard, Panel

CELL, LINE, HEAD = 50, 22, 34  # pixels: a 24th of the width, a unit of height, above the first row
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 34  # around the lines of a panel
COLOURS = ("#1f5fa8", "#2f8f5b", "#b8860b", "#a83279", "#6b4fa0", "#777777", "#c0392b", "#148f8f")
LETTER = 5.6  # the width of one, about

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A panel with its curves: legend, and points (seconds, value)."""

    panel: Panel
    curves: tuple[tuple[str, Points], ...]


def picture(board: Dashboard, drawn: Sequence[Drawn]) -> str:
    """An SVG of ``board``; ``drawn`` are its panels in order. All share one axis of time."""
    moments = [at for one in drawn for _, points in one.curves for at, _ in points]
    span = (min(moments, default=0.0), max(moments, default=1.0))
    parts: list[str] = []
    waiting = iter(drawn)
    bottom = 0
    for one, x, y in board.placed():
        if isinstance(one, Panel):
            parts += _panel(next(waiting), x * CELL, HEAD + y * LINE, span)
            bottom = max(bottom, y + one.height)
        else:
            parts.append(f'<text x="8" y="{HEAD + y * LINE + 15}" font-size="13" font-weight="bold">'
                         f'{escape(one.title)}</text>')
    width, height = COLUMNS * CELL, HEAD + bottom * LINE + 8
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="11" fill="#333">\n<rect width="100%" height="100%" fill="#fff"/>\n'
            f'<text x="8" y="22" font-size="16" font-weight="bold">Slipstream / {escape(board.title)}</text>\n'
            + "\n".join(parts) + "\n</svg>\n")


def _panel(one: Drawn, x: float, y: float, span: tuple[float, float]) -> Iterator[str]:
    panel, width, height = one.panel, one.panel.width * CELL - 6, one.panel.height * LINE - 6
    unit = f"({panel.unit})" if panel.unit != "none" else ""
    yield f'<g transform="translate({x + 3},{y + 3})">'
    yield f'<rect width="{width}" height="{height}" fill="none" stroke="#ddd" rx="3"/>'
    yield f'<text x="8" y="16">{escape(panel.title)}<tspan dx="4" fill="#999">{escape(unit)}</tspan></text>'
    values = [value for _, points in one.curves for _, value in points]
    low, high = min([*values, panel.minimum or 0.0]), max([*values, 0.0])
    high = high if high > low else low + 1.0
    bottom, right = height - BOTTOM, width - RIGHT
    for tick in range(3):
        at = bottom - tick / 2 * (bottom - TOP)
        yield f'<line x1="{LEFT}" x2="{right}" y1="{at:.0f}" y2="{at:.0f}" stroke="#eee"/>'
        yield (f'<text x="{LEFT - 5}" y="{at + 4:.0f}" text-anchor="end" fill="#777" font-size="10">'
               f'{low + tick / 2 * (high - low):.3g}</text>')
    across = (span[1] - span[0]) or 1.0
    named: float = LEFT
    for number, (legend, points) in enumerate(one.curves):
        colour = COLOURS[number % len(COLOURS)]
        places = " ".join(f"{LEFT + (at - span[0]) / across * (right - LEFT):.1f},"
                          f"{bottom - (value - low) / (high - low) * (bottom - TOP):.1f}" for at, value in points)
        yield f'<polyline fill="none" stroke="{colour}" stroke-width="1.4" points="{places}"/>'
        said = f"{legend} {points[-1][1]:.3g}"
        if named + LETTER * len(said) < right:
            yield f'<text x="{named:.0f}" y="{height - 12}" fill="{colour}" font-size="10">{escape(said)}</text>'
        named += LETTER * len(said) + 8
    yield "</g>"
