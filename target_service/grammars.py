"""Grammars: what answers are bound to, compiled beside the engine thread and the event loop.

Rules:
1. One grammar is compiled at a time, in a thread of its own, which lets others run; namespaces take turns. It is tried
   before: who asks a target may be no router. Where another engine compiles it, it is tried alone.
2. Every answer has a compilation of its own: what llguidance builds while an answer goes on counts against a limit, and
   an answer must not end early because of another one's.

It knows nothing about engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from slipstream.grammar.compiling import Vocabulary
from slipstream.grammar.matcher import Ends, Matcher
from slipstream.grammar.trial import Trial
from slipstream.grammar.turns import Turns
from slipstream.protocol.grammar import Grammar
from slipstream.protocol.requests import Request

T = TypeVar("T")


class Trials:
    """Of one model's grammars. Make it anywhere, use it on one event loop."""

    def __init__(self, trial: Trial) -> None:
        self._trial, self._turns = trial, Turns()

    async def warm(self) -> None:
        """Have the process for trials ready."""
        await asyncio.to_thread(self._trial.wait)

    def check(self, grammar: Grammar, namespace: str = "") -> asyncio.Future[None]:
        """It may fail with InvalidRequest. Raises CapacityError."""
        return self.after(grammar, namespace, lambda: None)

    def after(self, grammar: Grammar, namespace: str, work: Callable[[], T]) -> asyncio.Future[T]:
        """``work``, in its turn, when ``grammar`` has been tried. Raises CapacityError."""
        return self._turns.run(namespace, partial(self._tried, grammar, namespace, work))

    def _tried(self, grammar: Grammar, namespace: str, work: Callable[[], T]) -> T:
        self._trial.check(grammar, namespace)
        return work()


class Grammars:
    """Of one model, for our own engine. Make it anywhere, use it on one event loop."""

    def __init__(self, vocabulary: Vocabulary, trial: Trial) -> None:
        self._vocabulary, self._trials = vocabulary, Trials(trial)

    async def warm(self) -> None:
        """Have the process for trials ready."""
        await self._trials.warm()

    def compile(self, request: Request) -> asyncio.Future[Matcher]:
        """A matcher that stands where ``request`` goes on; it may fail with InvalidRequest. Raises CapacityError."""
        assert request.grammar is not None
        sampling = request.sampling
        ends = Ends(sampling.stop_token_ids, sampling.min_tokens)
        answered = request.tokens[len(request.tokens) - request.answered :]
        return self._trials.after(request.grammar, request.namespace,
                                  partial(self._vocabulary.compile, request.grammar, ends, answered))
