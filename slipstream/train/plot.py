"""Curves of a training as SVG: the loss above, the agreement with the target below, over steps.

It knows nothing about where the points come from; it is plain text, without a plotting library.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.train.fit import Point

WIDTH, HEIGHT, LEFT, TOP, GAP = 640, 220, 56, 28, 64
COLOURS = ("#1f5fa8", "#2f8f5b", "#b8860b", "#a83279", "#6b4fa0", "#777777")
LINE = '<polyline fill="none" stroke="{colour}" stroke-width="1.6"{dash} points="{points}"/>'
TEXT = '<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{colour}>{text}</text>'

Curve = tuple[str, str, bool, list[tuple[float, float]]]  # label, colour, dashed, points


def curves(history: Sequence[Point]) -> str:
    """An SVG picture of ``history``."""
    loss: list[Curve] = [("training", COLOURS[0], False, [(p.step, p.loss) for p in history])]
    depth = max((len(p.agreement) for p in history), default=0)
    agreement: list[Curve] = []
    for k in range(depth):
        colour = COLOURS[k % len(COLOURS)]
        agreement.append((f"draft token {k + 1}", colour, False,
                          [(p.step, p.held_out[k]) for p in history if len(p.held_out) > k]))
        agreement.append(("", colour, True, [(p.step, p.agreement[k]) for p in history if len(p.agreement) > k]))
    high = max((p.loss for p in history[1:] or history), default=1.0)
    panels = [*_panel(0, "loss", loss, high), *_panel(1, "agreement with the target's likeliest token "
                                                      "(solid: held out, dashed: training)", agreement, 1.0)]
    height = 2 * (HEIGHT + GAP) + TOP
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
            'font-family="sans-serif" font-size="11" fill="#444">\n<rect width="100%" height="100%" fill="#fff"/>\n'
            + "\n".join(panels) + "\n</svg>\n")


def _panel(row: int, title: str, lines: Sequence[Curve], high: float) -> list[str]:
    top, right = TOP + row * (HEIGHT + GAP), WIDTH - 16
    last = max((x for *_, points in lines for x, _ in points), default=1.0) or 1.0
    drawn = [TEXT.format(x=LEFT, y=top - 10, anchor="start", colour="", text=title)]
    for tick in range(5):
        y = top + HEIGHT - tick / 4 * HEIGHT
        drawn.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
        drawn.append(TEXT.format(x=LEFT - 6, y=y + 4, anchor="end", colour="", text=f"{high * tick / 4:.2f}"))
        drawn.append(TEXT.format(x=LEFT + tick / 4 * (right - LEFT), y=top + HEIGHT + 16, anchor="middle", colour="",
                                 text=f"{last * tick / 4:.0f}"))
    drawn.append(TEXT.format(x=(LEFT + right) / 2, y=top + HEIGHT + 30, anchor="middle", colour="", text="step"))
    named = 0
    for label, colour, dashed, points in lines:
        places = " ".join(f"{LEFT + x / last * (right - LEFT):.1f},{top + HEIGHT * (1 - min(y, high) / high):.1f}"
                          for x, y in points)
        drawn.append(LINE.format(colour=colour, dash=' stroke-dasharray="3 3"' if dashed else "", points=places))
        if label:
            drawn.append(TEXT.format(x=right, y=top + 12 + 14 * named, anchor="end", colour=f' fill="{colour}"',
                                     text=label))
            named += 1
    return drawn
