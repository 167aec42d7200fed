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
from slipstream.train.dialogue import LONG_OPENERS, LONG_QUESTION, OPENERS, Plan, Prompt, TurnTemplate
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
class ActiveConversation:
    """One running conversation."""

    plan: Plan
    slots: NDArray[np.int64]  # reserved for its tokens after the shared ones
    tokens: list[int]
    roles: list[int]
    num_computed: int  # tokens whose KV is computed
    greedy: dict[int, int] = field(default_factory=dict)  # index of a token -> the likeliest token after it
    turn: int = 0
    writing_question: bool = False  # the target is writing a question
    turn_tokens: int = 0  # tokens of the current question or answer

    def append(self, tokens: Sequence[int], role: int) -> None:
        self.tokens.extend(tokens)
        self.roles.extend([role] * len(tokens))


class Generator:
    """Runs plans on a runner. Its taps must be the head's layers and the final state, in this order."""

    def __init__(self, runner: ModelRunner, template: TurnTemplate, plans: Iterator[Plan], batch: int, limits: Limits,
                 seed: int) -> None:
        self._runner, self._template, self._plans = runner, template, plans
        self._batch, self._limits = batch, limits
        self._eos = frozenset(runner.config.eos_token_ids)
        self._rng = torch.Generator(runner.model.device).manual_seed(seed)
        self._to_answer, self._to_question = template.encode(template.to_answer), template.encode(template.to_question)
        self._opening = template.encode(template.opening)
        self._active: list[ActiveConversation] = []
        self._next_plan: Plan | None = None  # a plan for which there are no free slots yet
        self._shared_slots = self._compute_shared(self._opening[:-1])

    @property
    def has_work(self) -> bool:
        """Whether another ``step`` has anything to compute; it begins plans that fit."""
        self._admit()
        return bool(self._active)

    @property
    def num_active_tokens(self) -> int:
        """How many tokens the running conversations have."""
        return sum(len(active.tokens) for active in self._active)

    def step(self) -> list[Conversation]:
        """One forward. Returns the conversations that ended."""
        self._admit()
        builder, ready = BatchBuilder(), list[ActiveConversation]()
        free_rows = STEP_ROWS
        for active in self._active:
            count = min(len(active.tokens) - active.num_computed, free_rows)
            if count == 0:
                continue
            self._add(builder, active, count)
            free_rows -= count
            if active.num_computed == len(active.tokens):
                ready.append(active)
        logits = self._runner.forward(builder.build(self._runner.model.device))
        if not ready:
            return []
        greedy, chosen = choose(logits, [self._temperature(active) for active in ready], self._rng)
        ended = [active for active, best, token in zip(ready, greedy, chosen, strict=True)
                 if self._advance(active, best, token)]
        return [finished for active in ended if (finished := self._finish(active)) is not None]

    def stop(self) -> list[Conversation]:
        """End all conversations where they are."""
        return [finished for active in list(self._active) if (finished := self._finish(active)) is not None]

    def _compute_shared(self, tokens: list[int]) -> NDArray[np.int64]:
        slots = self._runner.slots.alloc(len(tokens))
        if tokens:
            builder = BatchBuilder()
            builder.add(tokens, range(len(tokens)), slots.tolist(), np.zeros(0, np.int64), logits="none")
            self._runner.forward(builder.build(self._runner.model.device))
        return slots

    def _admit(self) -> None:
        while len(self._active) < self._batch:
            plan = self._next_plan or next(self._plans, None)
            self._next_plan = None
            if plan is None:
                return
            size = self._max_slots(plan)
            if size == 0:
                continue
            try:
                slots = self._runner.slots.alloc(size)
            except CapacityError:
                if not self._active:
                    raise
                self._next_plan = plan
                return
            self._active.append(self._start(plan, slots))

    def _max_slots(self, plan: Plan) -> int:
        """The most slots that a conversation may need; 0: it is too long and is left out."""
        size = 1 + len(self._template.encode(plan.opener))
        for question in plan.questions:
            given = len(self._template.encode_user_text(question)) if question is not None else 0
            if given > self._limits.max_prompt:
                return 0
            size += (given or self._max_question(plan)) + self._limits.max_answer
            size += len(self._to_answer) + len(self._to_question)
        return size if size + len(self._shared_slots) <= self._runner.config.max_context else 0

    def _max_question(self, plan: Plan) -> int:
        return plan.max_question or self._limits.max_question

    def _start(self, plan: Plan, slots: NDArray[np.int64]) -> ActiveConversation:
        roles = [GIVEN] * len(self._opening)
        active = ActiveConversation(plan, slots, list(self._opening), roles, len(self._shared_slots))
        # Without a chat template the target writes no question, but a prompt may be given.
        if not self._template.no_chat_template or plan.questions[0] is not None:
            self._start_question(active, self._template.encode(plan.opener))
        if not active.tokens:  # the template writes nothing before what a user says
            active.append(self._template.encode("\n"), GIVEN)
        return active

    def _start_question(self, active: ActiveConversation, opener: Sequence[int] = ()) -> None:
        question = active.plan.questions[active.turn]
        active.turn_tokens, active.writing_question = 0, question is None
        if question is None:
            active.append(opener, GIVEN)
        else:
            active.append([*self._template.encode_user_text(question), *self._to_answer], GIVEN)

    def _add(self, builder: BatchBuilder, active: ActiveConversation, count: int) -> None:
        first, end = active.num_computed, active.num_computed + count
        own = first - len(self._shared_slots)
        builder.add(active.tokens[first:end], range(first, end), active.slots[own:own + count].tolist(),
                    np.concatenate([self._shared_slots, active.slots[:own]]),
                    logits="last" if end == len(active.tokens) else "none")
        active.num_computed = end

    def _temperature(self, active: ActiveConversation) -> float:
        return active.plan.question_temperature if active.writing_question else active.plan.temperature

    def _advance(self, active: ActiveConversation, best: int, token: int) -> bool:
        """Append the next token. Returns whether the conversation is over. best: the likeliest token there."""
        active.greedy[len(active.tokens) - 1] = best
        ended = token in self._eos
        active.turn_tokens += 1
        if active.writing_question:
            return self._advance_question(active, token, ended)
        active.append([token], ANSWER)
        if not ended and active.turn_tokens < self._limits.max_answer:
            return False
        active.turn += 1
        if active.turn == len(active.plan.questions):
            return True
        markup = self._to_question
        active.append(markup[1:] if ended and markup[:1] == [token] else markup, GIVEN)
        self._start_question(active)
        return False

    def _advance_question(self, active: ActiveConversation, token: int, ended: bool) -> bool:
        if ended and active.turn_tokens <= SHORTEST_QUESTION:
            return True
        if not ended:
            active.append([token], QUESTION)
        if ended or active.turn_tokens >= self._max_question(active.plan):
            active.append(self._to_answer, GIVEN)
            active.writing_question, active.turn_tokens = False, 0
        return False

    def _finish(self, active: ActiveConversation) -> Conversation | None:
        """Remove a running conversation and return it; None if it has no answer."""
        self._active.remove(active)
        count = active.num_computed
        own_slots = active.slots[:count - len(self._shared_slots)]
        states = self._runner.features(np.concatenate([self._shared_slots, own_slots]))
        self._runner.slots.free(active.slots)
        length = min(len(active.tokens), count + 1)  # the newest token was chosen, but not computed
        roles = np.array(active.roles[:length], np.uint8)
        if not (roles == ANSWER).any():
            return None
        rows = np.zeros((length, states.shape[1]), np.uint16)
        rows[:count] = states.to(torch.bfloat16).cpu().view(torch.uint16).numpy()
        greedy = np.array([active.greedy.get(i, -1) for i in range(length)], np.int32)
        return Conversation(active.plan.number, active.plan.held_out, active.plan.temperature,
                            np.array(active.tokens[:length], np.int32), roles, greedy, rows)


def max_tokens(template: TurnTemplate, limits: Limits) -> int:
    """The most tokens of a conversation in which the target asks one question (without opener) and answers it."""
    markup = (template.opening, template.to_answer, template.to_question)
    return sum(len(template.encode(text)) for text in markup) + limits.max_question + limits.max_answer


def max_slots(template: TurnTemplate, limits: Limits, prompts: Sequence[Prompt] | None) -> int:
    """The most slots that any planned conversation can need."""
    markup = sum(len(template.encode(text)) for text in (template.to_answer, template.to_question))
    max_question, count, opener = max(limits.max_question, LONG_QUESTION), 2, 0
    if prompts is not None:
        max_question, count = max(limits.max_question, limits.max_prompt), max(len(prompt.turns) for prompt in prompts)
    else:
        opener = max(len(template.encode(text)) for text in (*OPENERS, *LONG_OPENERS))
    return 1 + len(template.encode(template.opening)) + opener + count * (max_question + limits.max_answer + markup)


@torch.inference_mode()
def choose(logits: torch.Tensor, temperatures: Sequence[float],
           rng: torch.Generator) -> tuple[list[int], list[int]]:
    """The likeliest token of each row of ``logits`` [R, V], and a sampled one at each row's temperature (0: the same).

    It samples by inverting the cumulative sum in float32: several times as fast as keyed noise over a whole vocabulary,
    and no drafter has to draw the same sample.
    """
    best, sampled_rows = greatest(logits), [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if not sampled_rows:
        return best, best
    heat = torch.tensor([temperatures[row] for row in sampled_rows], dtype=logits.dtype, device=logits.device)
    cumulative = logits[sampled_rows].div_(heat[:, None]).softmax(1).cumsum(1)
    drawn = torch.rand(len(sampled_rows), 1, generator=rng, device=logits.device) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, drawn.to(cumulative.dtype)).clamp_(max=logits.shape[1] - 1)[:, 0].tolist()
    chosen = list(best)
    for row, token in zip(sampled_rows, tokens, strict=True):
        chosen[row] = int(token)
    return best, chosen
