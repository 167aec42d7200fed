"""Grammars: what answers are bound to, compiled beside the engine thread and the event loop.

Rules:
1. One grammar is compiled at a time, in a thread of its own, which lets others run. It is tried before: who asks a
   target may be no router.
2. Every answer has a compilation of its own: what llguidance builds while an answer goes on counts against a limit, and
   an answer must not end early because of another one's.

It knows nothing about engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from slipstream.base.errors import CapacityError
from slipstream.grammar.compiling import Vocabulary
from slipstream.grammar.matcher import Ends, Matcher
from slipstream.grammar.trial import Trial
from slipstream.protocol.grammar import Grammar
from slipstream.protocol.requests import Request

MAX_WAITING = 64


class Grammars:
    """Of one model. Make it anywhere, use it on one event loop."""

    def __init__(self, vocabulary: Vocabulary, trial: Trial) -> None:
        self._vocabulary, self._trial = vocabulary, trial
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._waiting = 0

    def compile(self, request: Request) -> asyncio.Future[Matcher]:
        """A matcher that stands where ``request`` goes on; it may fail with InvalidRequest. Raises CapacityError."""
        if self._waiting >= MAX_WAITING:
            raise CapacityError(f"{self._waiting} grammars wait to be compiled already")
        assert request.grammar is not None
        sampling = request.sampling
        ends = Ends(sampling.stop_token_ids, sampling.min_tokens)
        answered = request.tokens[len(request.tokens) - request.answered :]
        self._waiting += 1
        made = asyncio.wrap_future(self._thread.submit(self._compile, request.grammar, ends, answered))
        made.add_done_callback(self._left)
        return made

    def _compile(self, grammar: Grammar, ends: Ends, answered: Sequence[int]) -> Matcher:
        self._trial.check(grammar)
        return self._vocabulary.compile(grammar, ends, answered)

    def _left(self, _: asyncio.Future[Matcher]) -> None:
        self._waiting -= 1
