"""Whether calls and reasoning are told apart from the other words of an answer, and what does it: the same for all
surfaces.

It knows nothing about how answers are written.
"""

from __future__ import annotations

from collections.abc import Sequence

from router_service.dialects.openai import Options
from router_service.text.marks import BARE, Style
from router_service.text.markup import Markup, Named
from router_service.text.tokens import TextCodec


def told_apart(options: Options, style: Style) -> bool:
    """Where a grammar binds an answer from its first character on, only calls that it forces are."""
    if options.grammar is not None:
        return options.parsed and options.use is not None and options.use.forced
    return options.parsed and (style.thoughts is not None or (options.use is not None and options.use.offered))


def markups_of(codec: TextCodec, options: Options, prompt: Sequence[int], count: int) -> list[Markup | Named]:
    """What tells calls and reasoning apart in so many answers to ``prompt``; [] where nobody asks for it."""
    if not told_apart(options, codec.style):
        return []
    use = options.use if options.use is not None and options.use.offered else None
    if use is not None and use.named:
        return [Named(use.choice) for _ in range(count)]
    if use is not None and use.forced:
        return [Markup(BARE, use.schemas, bound=True) for _ in range(count)]
    most = None if use is None or use.parallel else 1
    return [Markup(codec.style, {} if use is None else use.schemas, codec.thinks(prompt), most) for _ in range(count)]
