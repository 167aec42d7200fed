"""An answer as blocks of thinking, text and calls, in the order in which a model wrote them: what the dialects share
that write answers so.

It knows nothing about how a dialect writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from router_service.text.calls import CALL_ID_LENGTH, CallDelta, new_call_id
from router_service.text.deltas import TextDelta
from router_service.text.markup import Markup, NamedCall, TextPart, finish_reason

Kind = Literal["reasoning", "text", "call"]
What = Literal["begin", "add", "end"]


@dataclass(slots=True)
class Block:
    """``name``, ``call_id`` and ``namespace`` are a call's. ``cut``: it broke off."""

    index: int
    kind: Kind
    name: str = ""
    id: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)
    cut: bool = False
    namespace: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all events of an answer share. ``markup`` separates calls and reasoning; None: all is text.
    ``request_fields``: those of its request that the answer repeats."""

    answer_id: str
    created: int
    model: str
    markup: Markup | NamedCall | None
    request_fields: Mapping[str, Any] = field(default_factory=dict, repr=False)
    return_reasoning: bool = True


def strip_id_prefix(given: Any, prefix: str) -> Any:
    """The id of a call in the history, as templates take it: without the ``prefix`` of a dialect, if we made the id."""
    ours = isinstance(given, str) and given.startswith(prefix) and len(given) == len(prefix) + CALL_ID_LENGTH
    return given.removeprefix(prefix) if ours else given


def event_of(name: str, fields: Mapping[str, Any]) -> bytes:
    """A server-sent event that bears its ``name`` twice."""
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps({"type": name, **fields}) + b"\n\n"


class Blocks:
    """The blocks of one answer. ``finish``: why it ended."""

    def __init__(self, answer_id: str, markup: Markup | NamedCall | None, return_reasoning: bool = True) -> None:
        self.finish = ""
        self.all: list[Block] = []
        self._answer_id = answer_id
        self._markup = markup
        self._tell_reasoning = return_reasoning
        self._open = False

    def push_delta(self, delta: TextDelta) -> Iterator[tuple[What, Block, str]]:
        """The changes of blocks by ``delta``; the text is the added part."""
        for part in self._parts(delta):
            if isinstance(part, TextPart):
                if part.kind != "reasoning" or self._tell_reasoning:
                    yield from self._add_text(part.kind, part.text)
                continue
            if part.name:
                yield from self._begin("call", part.name)
            yield from self._add(part.arguments)
        if delta.finish:
            calls_complete = self._markup is not None and self._markup.calls_complete
            self.finish = finish_reason(delta.finish, self._markup)
            if self._open:
                last = self.all[-1]
                last.cut = not calls_complete if last.kind == "call" else delta.finish == "length"
            yield from self._end()

    def break_off(self) -> None:
        """Nothing more comes, though the answer is not over."""
        if self._open:
            self.all[-1].cut = True

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._markup is None else self._markup.reasoning_tokens

    def _parts(self, delta: TextDelta) -> list[TextPart | CallDelta]:
        if self._markup is None:
            return [TextPart("text", delta.text)] if delta.text else []
        return self._markup.push_delta(delta).all

    def _add_text(self, kind: Kind, text: str) -> Iterator[tuple[What, Block, str]]:
        if not self._open or self.all[-1].kind != kind:
            text = text.lstrip() if kind == "text" and self.all else text
            if text:
                yield from self._begin(kind)
        yield from self._add(text)

    def _begin(self, kind: Kind, name: str = "") -> Iterator[tuple[What, Block, str]]:
        yield from self._end()
        index = len(self.all)
        self.all.append(Block(index, kind, name, f"{self._answer_id}_{index}", new_call_id() if kind == "call" else ""))
        self._open = True
        yield "begin", self.all[-1], ""

    def _add(self, text: str) -> Iterator[tuple[What, Block, str]]:
        if text:
            self.all[-1].pieces.append(text)
            yield "add", self.all[-1], text

    def _end(self) -> Iterator[tuple[What, Block, str]]:
        if self._open:
            self._open = False
            yield "end", self.all[-1], ""
