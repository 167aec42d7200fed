"""Self-generation: the target generates conversations, many at a time, and its states are kept.

Rules:
1. Continuous batching: every step computes the pending tokens of all running conversations in one ``ForwardBatch``,
   up to STEP_ROWS; when a conversation ends, the next plan begins.
2. All conversations share the KV of the text before the first question.
3. A conversation's slots are reserved for its greatest length, so it never runs out of slots.
4. When generation is stopped, unfinished conversations are kept as they are: their tokens are as good as others.

It knows nothing about files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.base.errors import CapacityError
from slipstream.choosing.sampling import greatest
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.runner import ModelRunner
from slipstream.train.dialogue import LONG_OPENERS, LONG_QUESTION, OPENERS, Plan, Prompt, Turns
from slipstream.train.shards import ANSWER, GIVEN, QUESTION, Conversation

STEP_ROWS = 1024  # rows of one forward, at most; long given prompts are computed in chunks
SHORTEST_QUESTION = 2  # a question that ends within so many tokens ends the conversation


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in tokens. A conversation with a longer given turn than ``max_prompt`` is left out."""

    max_prompt: int = 1024
    max_question: int = 128
    max_answer: int = 256


@dataclass(slots=True)
class Talk:
    """One running conversation."""

    plan: Plan
    slots: NDArray[np.int64]  # reserved for its tokens after the shared ones
    tokens: list[int]
    roles: list[int]
    done: int  # tokens whose KV is computed
    greedy: dict[int, int] = field(default_factory=dict)  # index of a token -> the likeliest token after it
    turn: int = 0
    asking: bool = False  # the target is writing a question
    spoken: int = 0  # tokens of the current question or answer

    def say(self, tokens: Sequence[int], role: int) -> None:
        self.tokens.extend(tokens)
        self.roles.extend([role] * len(tokens))


class Generator:
    """Runs plans on a runner. Its taps must be the head's layers and the final state, in this order."""

    def __init__(self, runner: ModelRunner, turns: Turns, plans: Iterator[Plan], batch: int, limits: Limits,
                 seed: int) -> None:
        self._runner, self._turns, self._plans = runner, turns, plans
        self._batch, self._limits = batch, limits
        self._eos = frozenset(runner.config.eos_token_ids)
        self._dice = torch.Generator(runner.model.device).manual_seed(seed)
        self._to_answer, self._to_question = turns.encode(turns.to_answer), turns.encode(turns.to_question)
        self._opening = turns.encode(turns.opening)
        self._talks: list[Talk] = []
        self._waiting: Plan | None = None  # the next plan, for which there are no free slots yet
        self._shared = self._share(self._opening[:-1])

    @property
    def running(self) -> bool:
        """Whether another ``step`` has anything to compute; it begins plans that fit."""
        self._admit()
        return bool(self._talks)

    @property
    def num_running(self) -> int:
        """How many tokens the running conversations have."""
        return sum(len(talk.tokens) for talk in self._talks)

    def step(self) -> list[Conversation]:
        """One forward. Returns the conversations that ended."""
        self._admit()
        builder, ready = BatchBuilder(), list[Talk]()
        room = STEP_ROWS
        for talk in self._talks:
            count = min(len(talk.tokens) - talk.done, room)
            if count == 0:
                continue
            self._add(builder, talk, count)
            room -= count
            if talk.done == len(talk.tokens):
                ready.append(talk)
        logits = self._runner.forward(builder.build(self._runner.model.device))
        if not ready:
            return []
        greedy, chosen = choose(logits, [self._temperature(talk) for talk in ready], self._dice)
        ended = [talk for talk, best, token in zip(ready, greedy, chosen, strict=True)
                 if self._advance(talk, best, token)]
        return [kept for talk in ended if (kept := self._end(talk)) is not None]

    def stop(self) -> list[Conversation]:
        """End all conversations where they are."""
        return [kept for talk in list(self._talks) if (kept := self._end(talk)) is not None]

    def _share(self, tokens: list[int]) -> NDArray[np.int64]:
        slots = self._runner.slots.alloc(len(tokens))
        if tokens:
            builder = BatchBuilder()
            builder.add(tokens, range(len(tokens)), slots.tolist(), np.zeros(0, np.int64), logits="none")
            self._runner.forward(builder.build(self._runner.model.device))
        return slots

    def _admit(self) -> None:
        while len(self._talks) < self._batch:
            plan = self._waiting or next(self._plans, None)
            self._waiting = None
            if plan is None:
                return
            size = self._size(plan)
            if size == 0:
                continue
            try:
                slots = self._runner.slots.alloc(size)
            except CapacityError:
                if not self._talks:
                    raise
                self._waiting = plan
                return
            self._talks.append(self._begin(plan, slots))

    def _size(self, plan: Plan) -> int:
        """The most slots that a conversation may need; 0: it is too long and is left out."""
        size = 1 + len(self._turns.encode(plan.opener))
        for question in plan.questions:
            given = len(self._turns.said(question)) if question is not None else 0
            if given > self._limits.max_prompt:
                return 0
            size += (given or self._most_asked(plan)) + self._limits.max_answer
            size += len(self._to_answer) + len(self._to_question)
        return size if size + len(self._shared) <= self._runner.config.max_context else 0

    def _most_asked(self, plan: Plan) -> int:
        return plan.max_question or self._limits.max_question

    def _begin(self, plan: Plan, slots: NDArray[np.int64]) -> Talk:
        talk = Talk(plan, slots, list(self._opening), [GIVEN] * len(self._opening), len(self._shared))
        if not self._turns.plain or plan.questions[0] is not None:  # without turns nobody asks, but a prompt is given
            self._ask(talk, self._turns.encode(plan.opener))
        if not talk.tokens:  # the template writes nothing before what a user says
            talk.say(self._turns.encode("\n"), GIVEN)
        return talk

    def _ask(self, talk: Talk, opener: Sequence[int] = ()) -> None:
        question = talk.plan.questions[talk.turn]
        talk.spoken, talk.asking = 0, question is None
        if question is None:
            talk.say(opener, GIVEN)
        else:
            talk.say([*self._turns.said(question), *self._to_answer], GIVEN)

    def _add(self, builder: BatchBuilder, talk: Talk, count: int) -> None:
        shared = len(self._shared)
        own = talk.done - shared
        last = talk.done + count == len(talk.tokens)
        builder.add(talk.tokens[talk.done:talk.done + count], range(talk.done, talk.done + count),
                    talk.slots[own:own + count].tolist(), np.concatenate([self._shared, talk.slots[:own]]),
                    logits="last" if last else "none")
        talk.done += count

    def _temperature(self, talk: Talk) -> float:
        return talk.plan.question_temperature if talk.asking else talk.plan.temperature

    def _advance(self, talk: Talk, best: int, token: int) -> bool:
        """Append the next token. Returns whether the conversation is over. best: the likeliest token there."""
        talk.greedy[len(talk.tokens) - 1] = best
        over = token in self._eos
        talk.spoken += 1
        if talk.asking:
            return self._asked(talk, token, over)
        talk.say([token], ANSWER)
        if not over and talk.spoken < self._limits.max_answer:
            return False
        talk.turn += 1
        if talk.turn == len(talk.plan.questions):
            return True
        follow = self._to_question
        talk.say(follow[1:] if over and follow[:1] == [token] else follow, GIVEN)
        self._ask(talk)
        return False

    def _asked(self, talk: Talk, token: int, over: bool) -> bool:
        if over and talk.spoken <= SHORTEST_QUESTION:
            return True
        if not over:
            talk.say([token], QUESTION)
        if over or talk.spoken >= self._most_asked(talk.plan):
            talk.say(self._to_answer, GIVEN)
            talk.asking, talk.spoken = False, 0
        return False

    def _end(self, talk: Talk) -> Conversation | None:
        """Remove a running conversation and return it; None if it has no answer."""
        self._talks.remove(talk)
        count = talk.done
        states = self._runner.features(np.concatenate([self._shared, talk.slots[:count - len(self._shared)]]))
        self._runner.slots.free(talk.slots)
        kept = min(len(talk.tokens), count + 1)  # the newest token was chosen, but not computed
        roles = np.array(talk.roles[:kept], np.uint8)
        if not (roles == ANSWER).any():
            return None
        rows = np.zeros((kept, states.shape[1]), np.uint16)
        rows[:count] = states.to(torch.bfloat16).cpu().view(torch.uint16).numpy()
        greedy = np.array([talk.greedy.get(i, -1) for i in range(kept)], np.int32)
        return Conversation(talk.plan.number, talk.plan.held_out, talk.plan.temperature,
                            np.array(talk.tokens[:kept], np.int32), roles, greedy, rows)


def tokens_at_most(turns: Turns, limits: Limits) -> int:
    """The most tokens of a conversation in which the target asks one question (without opener) and answers it."""
    around = (turns.opening, turns.to_answer, turns.to_question)
    return sum(len(turns.encode(text)) for text in around) + limits.max_question + limits.max_answer


def slots_at_most(turns: Turns, limits: Limits, prompts: Sequence[Prompt] | None) -> int:
    """The most slots that any planned conversation can need."""
    around = sum(len(turns.encode(text)) for text in (turns.to_answer, turns.to_question))
    asked, count, opener = max(limits.max_question, LONG_QUESTION), 2, 0
    if prompts is not None:
        asked, count = max(limits.max_question, limits.max_prompt), max(len(prompt.turns) for prompt in prompts)
    else:
        opener = max(len(turns.encode(text)) for text in (*OPENERS, *LONG_OPENERS))
    return 1 + len(turns.encode(turns.opening)) + opener + count * (asked + limits.max_answer + around)


@torch.inference_mode()
def choose(logits: torch.Tensor, temperatures: Sequence[float],
           dice: torch.Generator) -> tuple[list[int], list[int]]:
    """The likeliest token of each row of ``logits`` [R, V], and a sampled one at each row's temperature (0: the same).

    It samples by inverting the cumulative sum in float32: several times as fast as keyed noise over a whole vocabulary,
    and no drafter has to draw the same sample.
    """
    best, hot = greatest(logits), [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if not hot:
        return best, best
    heat = torch.tensor([temperatures[row] for row in hot], dtype=logits.dtype, device=logits.device)[:, None]
    mass = logits[hot].div_(heat).softmax(1).cumsum(1)
    drawn = torch.rand(len(hot), 1, generator=dice, device=logits.device) * mass[:, -1:]
    tokens = torch.searchsorted(mass, drawn.to(mass.dtype)).clamp_(max=logits.shape[1] - 1)[:, 0].tolist()
    chosen = list(best)
    for row, token in zip(hot, tokens, strict=True):
        chosen[row] = int(token)
    return best, chosen
