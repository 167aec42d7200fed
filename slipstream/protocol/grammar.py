"""A grammar: what an answer is bound to, as a client wrote it.

Rules:
1. Each token keeps a constrained answer a prefix of some text that the grammar allows. Where the grammar allows nothing
   more, the answer ends.
2. What a source may cost is bounded by its size here and by limits where it is compiled (``slipstream.grammar``).

It knows nothing about tokenizers or how grammars are compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from slipstream.base.errors import InvalidRequest

Kind = Literal["json_schema", "regex", "choice", "lark", "ebnf"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_SOURCE = 64 << 10  # bytes


@dataclass(frozen=True, slots=True)
class Grammar:
    """``source``: a JSON schema, a regular expression, a JSON list of texts, Lark's notation, or GBNF's."""

    kind: Kind
    source: str = field(repr=False)

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        if self.kind not in KINDS:
            raise InvalidRequest("grammar", f"{self.kind!r} is no kind of grammar; known: {', '.join(KINDS)}")
        if not self.source:
            raise InvalidRequest("grammar", "is empty")
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest("grammar", f"not Unicode text: a lone surrogate at character {error.start}") from None
        if size > MAX_SOURCE:
            raise InvalidRequest("grammar", f"is larger than {MAX_SOURCE} bytes")


JSON_OBJECT = Grammar("json_schema", '{"type":"object"}')
