"""What an answer has to be: one token after the other, each from the whole text before it.

Rules:
1. No engine, draft, cache, session or wire has a part in it: a token is the law's logits, what the request makes of
   them (``choosing``), and what its grammar allows.
2. How it is written is asked of a calm router, whose only target this is. It tells all tokens at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import torch

from slipstream.choosing.logits import TokenHistory
from slipstream.choosing.permitted import Permitted
from slipstream.choosing.sampling import ChoiceRows, choose
from slipstream.choosing.scores import ScoredRows, chosen_logprobs, prompt_scores
from slipstream.grammar.matcher import Matcher, StopTokens
from slipstream.protocol.identity import Identity
from slipstream.protocol.requests import NEEDS, Finish, Piece, Request, TargetInfo
from slipstream.protocol.tree import DraftTree
from slipstream.simulate.timed import STREAMS, SYMBOLS, VOCAB, Device, Timing
from tests_chaos.model import ScriptedLaw, WordyModel, vocabulary

CONTEXT = 4096


class Reference:
    """A ``Backend``: the answers of the weights of ``timing``."""

    def __init__(self, timing: Timing) -> None:
        self._model = WordyModel(timing, Device())
        streams, places = np.arange(STREAMS) * SYMBOLS, np.arange(CONTEXT)
        following = ScriptedLaw(timing).following(*np.broadcast_arrays(streams, places[:, None]))
        self._following = following.astype(np.float32)  # by place and stream

    def submit(self, request: Request) -> Whole:
        return Whole(self, request)

    async def info(self) -> TargetInfo:
        return TargetInfo("timed", VOCAB, CONTEXT, "", 0, 0, False, takes=NEEDS,
                          identity=Identity("calm", "float32", "none", "law"))

    def row(self, token: int, position: int) -> torch.Tensor:
        """[1, V]: logits of what stands behind ``token`` at ``position``."""
        return self._model.logits(torch.tensor([[self._following[position, token // SYMBOLS]]]))

    def scores(self, request: Request) -> Piece:
        """Of its prompt."""
        before = np.array(request.tokens[:-1])
        states = torch.from_numpy(self._following[np.arange(len(before)), before // SYMBOLS])[:, None]
        assert request.prompt_logprobs is not None
        return Piece((), prompt=prompt_scores(states, self._model.logits, request.tokens[1:], 1,
                                              request.prompt_logprobs))


class Whole:
    """One answer, a token at a time."""

    def __init__(self, reference: Reference, request: Request) -> None:
        self._reference = reference
        self._request = replace(request, grammar=None)
        self._rule: Matcher | Permitted | None = None  # without one, top-p counts in float32, as in a target
        if request.allowed_token_ids or request.bad_words:
            self._rule = Permitted.of(request, VOCAB)
        if request.grammar is not None:
            ends = StopTokens(request.sampling.stop_token_ids, request.sampling.min_tokens)
            self._rule = vocabulary().compile(request.grammar, ends)
        assert not request.answered

    def set_speculation(self, allowed: bool) -> None:
        pass

    async def aclose(self) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[Piece]:
        request = self._request
        if request.prompt_logprobs is not None and len(request.tokens) > 1:
            yield self._reference.scores(request)
        history = TokenHistory.of(request.sampling, request.tokens)
        newest, whole = request.tokens[-1], Piece((), finish="" if request.max_tokens else "length", state="plain")
        while not whole.finish:
            piece = self._next(newest, len(whole.tokens), history)
            whole = whole._replace(tokens=whole.tokens + piece.tokens, logprobs=whole.logprobs + piece.logprobs,
                                   finish=piece.finish)
            if history is not None:
                history.append(piece.tokens)
            newest = whole.tokens[-1] if whole.tokens else newest
        yield whole

    def _next(self, newest: int, count: int, history: TokenHistory | None) -> Piece:
        request, rule = self._request, self._rule
        position = len(request.tokens) + count
        logits = self._reference.row(newest, position - 1)
        allowed = None if rule is None else rule.masks(DraftTree.root_only(position, newest))[0]
        rows = ChoiceRows(request.sampling, range(1), [position], [count], history, [()], allowed)
        tokens = tuple(choose(logits, [rows]))
        finish: Finish = ("stop" if tokens[0] in request.sampling.stop_token_ids
                          else "length" if count + 1 == request.max_tokens else "")
        logged = () if request.top_logprobs is None else tuple(
            chosen_logprobs(logits, [ScoredRows(rows, [0], tokens, request.top_logprobs, request.logprobs_mode)])[0])
        if rule is not None:
            known = rule.commit(() if finish == "stop" else tokens)
            if rule.ended:
                tokens, finish = tokens[:known], "stop"
        return Piece(tokens, logprobs=logged[: len(tokens)], finish=finish, state="plain")
