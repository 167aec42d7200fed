"""Grammars: what answers are bound to, compiled beside the engine thread and the event loop.

Rules:
1. A grammar is compiled in the turn in which it was tried, in the same thread, which lets others run. It is tried here
   too: who asks a target may be no router.
2. Every answer has a compilation of its own: what llguidance builds while an answer goes on counts against a limit, and
   an answer must not end early because of another one's.

It knows nothing about engines.
"""

from __future__ import annotations

import asyncio
from functools import partial

from slipstream.grammar.compiling import Vocabulary
from slipstream.grammar.matcher import Ends, Matcher
from slipstream.grammar.trial import Trial, Trials
from slipstream.protocol.requests import Request


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
