"""Bars as SVG: groups of them side by side, one colour a series, a number on each. It knows nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#2f6fab", "#e8a33d", "#3f8f5f", "#9cc3e6", "#b33a3a")
LEFT, BAR, GAP, LABEL, WIDE = 180, 15, 12, 60, 620


def bars(title: str, series: Mapping[str, Sequence[float]], groups: Sequence[str]) -> str:
    """Horizontal bars: ``series[name][i]`` belongs to ``groups[i]``; 0 draws none."""
    most = max((value for values in series.values() for value in values), default=1.0) or 1.0
    parts = [f'<text x="8" y="18" font-weight="bold">{escape(title)}</text>']
    for number, name in enumerate(series):
        x = LEFT + 150 * number
        parts.append(f'<rect x="{x}" y="28" width="12" height="12" fill="{COLOURS[number % len(COLOURS)]}"/>'
                     f'<text x="{x + 16}" y="38">{escape(name)}</text>')
    y = 54
    for place, group in enumerate(groups):
        parts.append(f'<text x="8" y="{y + BAR}">{escape(group)}</text>')
        for number, values in enumerate(series.values()):
            if values[place]:
                width = WIDE * values[place] / most
                parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" '
                             f'fill="{COLOURS[number % len(COLOURS)]}"/>'
                             f'<text x="{LEFT + width + 4:.1f}" y="{y + BAR - 4}">{values[place]:.4g}</text>')
            y += BAR
        y += GAP
    body = "\n".join(parts)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDE + LABEL + 40} {y + 8}" '
            'font-family="sans-serif" font-size="11">\n'
            f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n')
