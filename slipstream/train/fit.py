"""Training: epochs over the shards, Muon and AdamW with a cosine schedule, checkpoints (one a minute by default), and
agreement on held-out conversations.

Rules:
1. The order of an epoch is a pure function of (seed, epoch), so a resumed run takes the batches that come next.
2. Progress is the share of the allowed steps or of the allowed time that is used, whichever is larger; the learning
   rate follows it. Time and steps of earlier runs count.
3. Weights are float32; products are bfloat16 under autocast if that is faster on this device (measured once).
4. A step whose loss or gradient is not finite is skipped, as it would make all weights NaN; so is one without a row to
   learn. After a whole epoch (and more than VAIN steps) of skipped steps training ends with an error.

It knows nothing about generation or drafting.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from slipstream.base.errors import ConfigError
from slipstream.engine.runner import threads
from slipstream.train.anchors import Blocks, blocks_of, learn
from slipstream.train.checkpoint import Checkpoint
from slipstream.train.crew import Crew, Part
from slipstream.train.head import Head
from slipstream.train.optimizer import Optimizer
from slipstream.train.recipe import Recipe
from slipstream.train.shards import ANSWER, Conversation
from slipstream.train.unroll import Rows, Unrolled, rows_of, unroll

WARMUP_STEPS = 30
FLOOR = 0.02  # of the learning rate, at the end
VALIDATION = 16  # held-out conversations whose agreement is computed at each checkpoint
MAX_GRADIENT = 0.5
SMOOTH = 0.95  # the weight of older steps in the reported loss and agreement
DRAWN = 1000  # see ``distil.Lesson``
VAIN = 16  # so many skipped steps in a row are allowed, even if an epoch is shorter


@dataclass(frozen=True, slots=True)
class Point:
    """One entry of the history: the state of training at a step."""

    step: int
    seconds: float
    loss: float
    agreement: tuple[float, ...]  # on training rows, by unrolled step, among the tokens that the loss used
    held_out: tuple[float, ...]  # on held-out rows; empty when there are none


@dataclass(slots=True)
class Progress:
    """The progress of a training, which a checkpoint's state stores."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # the number of the epoch's next batch
    seconds: float = 0.0
    rows: int = 0
    loss: float = 0.0  # smoothed
    agreement: list[float] = field(default_factory=list)  # smoothed, by unrolled step
    history: list[Point] = field(default_factory=list)


class Training:
    """One head, its optimiser and its progress. ``save`` writes a checkpoint."""

    def __init__(self, head: Head, recipe: Recipe, training: Sequence[Conversation], held_out: Sequence[Conversation],
                 save: Callable[[int, Checkpoint], None]) -> None:
        self.head, self.recipe, self.progress = head, recipe, Progress()
        self._training, self._save = training, save
        self._dice = random.Random(recipe.seed)
        judged = self._rows(held_out[:VALIDATION], (ANSWER,)) if held_out else None
        self._held_out = judged if judged is not None and judged.num_wanted else None
        self._optimizer = Optimizer(head.tensors, recipe.learning_rate)
        self._device = head.embedding.device
        half = half_is_faster(self._device, head.config.hidden_size)
        self._dtype = torch.bfloat16 if half else torch.float32
        self._sizes = [min(len(c.tokens), recipe.max_rows) for c in training]
        self._crew = Crew(head.tensors, self._compute, recipe.processes)
        self._vain = 0  # skipped steps since the last one that changed the weights

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from ``checkpoint``."""
        with torch.no_grad():
            for name, tensor in self.head.tensors.items():
                tensor.copy_(checkpoint.tensors[name])
        self._optimizer.load(checkpoint.optimizer)
        state = dict(checkpoint.state)
        history = [Point(p["step"], p["seconds"], p["loss"], tuple(p["agreement"]), tuple(p["held_out"]))
                   for p in state.pop("history")]
        self.progress = Progress(**state, history=history)

    def run(self, seconds: float, report: Callable[[Progress, float], None]) -> None:
        """Train until the recipe's steps or ``seconds`` (of all runs) are used up. report: called after each step with
        the progress and the share that is done. Raises ConfigError if nothing is learnt (rule 4)."""
        began = saved = time.monotonic()
        before = self.progress.seconds
        while (share := self._share(seconds)) < 1.0:
            for batch in self._rest_of_epoch():
                self._step(batch, share)
                now = time.monotonic()
                self.progress.seconds = before + now - began
                share = self._share(seconds)
                report(self.progress, min(1.0, share))
                if now - saved >= self.recipe.save_every_s:
                    self.checkpoint()
                    saved = time.monotonic()
                if share >= 1.0:
                    break
        self.checkpoint()

    def checkpoint(self) -> None:
        """Add a point to the history, and save a checkpoint."""
        now = self.progress
        if not now.history or now.history[-1].step != now.step:
            now.history.append(Point(now.step, now.seconds, now.loss, tuple(now.agreement), self._validate()))
        state: dict[str, Any] = asdict(now)
        self._save(now.step, Checkpoint(dict(self.head.tensors), self._optimizer.moments(), state))

    def _share(self, seconds: float) -> float:
        steps = self.progress.step / self.recipe.steps if self.recipe.steps else 0.0
        return max(steps, self.progress.seconds / seconds)

    def _rest_of_epoch(self) -> Sequence[Sequence[int]]:
        """The batches that are left of this epoch; if there are none, those of the next one."""
        left = self._epoch(self.progress.epoch)[self.progress.batch:]
        if not left:
            self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
            left = self._epoch(self.progress.epoch)
        return left

    def _epoch(self, epoch: int) -> list[list[int]]:
        order = list(range(len(self._training)))
        random.Random(f"{self.recipe.seed}/{epoch}").shuffle(order)
        batches: list[list[int]] = [[]]
        size = 0
        for index in order:
            if batches[-1] and size + self._sizes[index] > self.recipe.rows_per_step:
                batches.append([])
                size = 0
            batches[-1].append(index)
            size += self._sizes[index]
        return batches

    def _step(self, batch: Sequence[int], share: float) -> None:
        now = self.progress
        now.batch += 1
        part = self._crew.run(batch, [self._sizes[index] for index in batch])
        size = float(torch.nn.utils.clip_grad_norm_(list(self.head.tensors.values()), MAX_GRADIENT))
        if part.weight == 0 or not math.isfinite(size + part.loss):
            self._miss(part)
            return
        self._vain = 0
        with threads(max(self.recipe.processes, torch.get_num_threads())):  # the others wait meanwhile
            self._optimizer.step(rate(now.step, share))
        keep = SMOOTH if now.step else 0.0
        now.loss = keep * now.loss + (1 - keep) * part.loss
        now.agreement = [keep * old + (1 - keep) * new
                         for old, new in zip(now.agreement or part.agreement, part.agreement, strict=True)]
        now.step += 1
        now.rows += part.rows

    def _miss(self, part: Part) -> None:
        self._vain += 1
        if self._vain > VAIN and self._vain > len(self._epoch(self.progress.epoch)):
            why = ("--draft-vocab: no token of what is learnt is in it" if part.weight == 0 else
                   "--learning-rate: losses and gradients are no numbers any more; give a lower one")
            raise ConfigError(f"{why}. {self._vain} steps in a row taught nothing; the checkpoint before is kept")

    def _compute(self, batch: Sequence[int]) -> Part:
        """Compute the gradients of some conversations, loss and agreement. batch: indices of conversations."""
        for tensor in self.head.tensors.values():
            tensor.grad = None
        if not batch:
            return Part(0, 0, 0.0, ())
        rows = self._rows([self._training[index] for index in batch], self.recipe.learnt_roles)
        if rows.num_wanted == 0:
            return Part(rows.num_rows, 0, 0.0, ())
        unrolled = self._learn(rows)
        unrolled.loss.backward()  # type: ignore[no-untyped-call]
        return Part(rows.num_rows, rows.num_wanted, float(unrolled.loss.detach()), tuple(unrolled.agreement))

    def _rows(self, conversations: Sequence[Conversation], roles: Sequence[int]) -> Rows | Blocks:
        if self.head.mask_token is not None:
            return blocks_of(conversations, self.head, self.recipe.max_rows, roles, self._dice)
        return rows_of(conversations, self.head, self.recipe.max_rows, roles)

    def _learn(self, rows: Rows | Blocks) -> Unrolled:
        drawn = DRAWN if torch.is_grad_enabled() else 0
        if isinstance(rows, Blocks):
            return learn(self.head, rows, self._dtype, drawn)
        return unroll(self.head, rows, self.recipe.unroll, self._dtype, drawn)

    @torch.no_grad()
    def _validate(self) -> tuple[float, ...]:
        if self._held_out is None:
            return ()
        return self._learn(self._held_out).agreement


def rate(step: int, share: float) -> float:
    """The learning rate, relative to its peak, at ``step`` when ``share`` of the training is done."""
    cosine = FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return min(1.0, (step + 1) / WARMUP_STEPS) * cosine


def half_is_faster(device: torch.device, hidden: int) -> bool:
    """Whether this device multiplies bfloat16 faster than float32, both cast from float32 as autocast does."""
    x, w = torch.randn(512, 4 * hidden, device=device), torch.randn(4 * hidden, 4 * hidden, device=device)

    def seconds(dtype: torch.dtype) -> float:
        times = []
        for _ in range(4):
            began = time.perf_counter()
            float(F.linear(x.to(dtype), w.to(dtype)).sum())
            times.append(time.perf_counter() - began)
        return min(times[1:])

    return seconds(torch.bfloat16) < seconds(torch.float32)
