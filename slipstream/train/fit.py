"""Training: epochs over the shards, Muon and AdamW with a cosine schedule, checkpoints (one a minute by default), and
agreement on held-out conversations.

Rules:
1. The order of an epoch is a pure function of (seed, epoch), so a resumed run takes the batches that come next.
2. Progress is the share of the allowed steps or of the allowed time that is used, whichever is larger; the learning
   rate follows it. Time and steps of earlier runs count.
3. Weights are float32; products are bfloat16 under autocast if that is faster on this device (measured once).
4. A step whose loss or gradient is not finite is skipped, as it would make all weights NaN; so is one without a row to
   learn. After a whole epoch (and more than MAX_SKIPPED steps) of skipped steps training ends with an error.

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
from slipstream.engine.device import threads
from slipstream.train.anchors import Blocks, block_loss, blocks_of
from slipstream.train.checkpoint import Checkpoint
from slipstream.train.data_parallel import StepResult, WorkerGroup
from slipstream.train.head import Head
from slipstream.train.optimizer import Optimizer
from slipstream.train.recipe import Recipe
from slipstream.train.shards import ANSWER, Conversation
from slipstream.train.unroll import LossResult, Rows, rows_of, unroll

WARMUP_STEPS = 30
MIN_RATE = 0.02  # of the learning rate, at the end
NUM_VALIDATION = 16  # held-out conversations whose agreement is computed at each checkpoint
MAX_GRADIENT = 0.5
SMOOTHING = 0.95  # the weight of older steps in the reported loss and agreement
NUM_SAMPLED = 1000  # see ``distil.LossInputs``
MAX_SKIPPED = 16  # so many skipped steps in a row are allowed, even if an epoch is shorter


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
        self._rng = random.Random(recipe.seed)
        validation = self._rows(held_out[:NUM_VALIDATION], (ANSWER,)) if held_out else None
        self._held_out = validation if validation is not None and validation.num_loss_rows else None
        self._optimizer = Optimizer(head.tensors, recipe.learning_rate)
        self._device = head.embedding.device
        use_bfloat16 = bfloat16_is_faster(self._device, head.config.hidden_size)
        self._dtype = torch.bfloat16 if use_bfloat16 else torch.float32
        self._sizes = [len(c.tokens) for c in training]
        self._workers = WorkerGroup(head.tensors, self._compute, recipe.processes)
        self._num_skipped = 0  # skipped steps since the last one that changed the weights

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
        while (share := self._share_done(seconds)) < 1.0:
            for batch in self._remaining_batches():
                self._step(batch, share)
                now = time.monotonic()
                self.progress.seconds = before + now - began
                share = self._share_done(seconds)
                report(self.progress, min(1.0, share))
                if now - saved >= self.recipe.save_every_s:
                    self.checkpoint()
                    saved = time.monotonic()
                if share >= 1.0:
                    break
        self.checkpoint()

    def checkpoint(self) -> None:
        """Add a point to the history, and save a checkpoint."""
        progress = self.progress
        if not progress.history or progress.history[-1].step != progress.step:
            progress.history.append(Point(progress.step, progress.seconds, progress.loss, tuple(progress.agreement),
                                          self._validate()))
        state: dict[str, Any] = asdict(progress)
        self._save(progress.step, Checkpoint(dict(self.head.tensors), self._optimizer.moments(), state))

    def _share_done(self, seconds: float) -> float:
        steps = self.progress.step / self.recipe.steps if self.recipe.steps else 0.0
        return max(steps, self.progress.seconds / seconds)

    def _remaining_batches(self) -> Sequence[Sequence[int]]:
        """The batches that are left of this epoch; if there are none, those of the next one."""
        batches = self._batches(self.progress.epoch)[self.progress.batch:]
        if not batches:
            self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
            batches = self._batches(self.progress.epoch)
        return batches

    def _batches(self, epoch: int) -> list[list[int]]:
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
        progress = self.progress
        progress.batch += 1
        result = self._workers.run(batch, [self._sizes[index] for index in batch])
        size = float(torch.nn.utils.clip_grad_norm_(list(self.head.tensors.values()), MAX_GRADIENT))
        if result.weight == 0 or not math.isfinite(size + result.loss):
            self._skip_step(result)
            return
        self._num_skipped = 0
        with threads(max(self.recipe.processes, torch.get_num_threads())):  # the others wait meanwhile
            self._optimizer.step(rate(progress.step, share))
        smoothing = SMOOTHING if progress.step else 0.0
        progress.loss = smoothing * progress.loss + (1 - smoothing) * result.loss
        before = progress.agreement or result.agreement
        progress.agreement = [smoothing * old + (1 - smoothing) * new
                              for old, new in zip(before, result.agreement, strict=True)]
        progress.step += 1
        progress.rows += result.rows

    def _skip_step(self, result: StepResult) -> None:
        self._num_skipped += 1
        if self._num_skipped > MAX_SKIPPED and self._num_skipped > len(self._batches(self.progress.epoch)):
            reason = ("--draft-vocab: no token of what is learnt is in it" if result.weight == 0 else
                      "--learning-rate: losses and gradients are no numbers any more; give a lower one")
            raise ConfigError(f"{reason}. {self._num_skipped} steps in a row taught nothing; the checkpoint before is "
                              "kept")

    def _compute(self, batch: Sequence[int]) -> StepResult:
        """Compute the gradients of some conversations, loss and agreement. batch: indices of conversations."""
        for tensor in self.head.tensors.values():
            tensor.grad = None
        if not batch:
            return StepResult(0, 0, 0.0, ())
        rows = self._rows([self._training[index] for index in batch], self.recipe.learnt_roles)
        if rows.num_loss_rows == 0:
            return StepResult(rows.num_rows, 0, 0.0, ())
        result = self._loss(rows)
        result.loss.backward()  # type: ignore[no-untyped-call]
        return StepResult(rows.num_rows, rows.num_loss_rows, float(result.loss.detach()), tuple(result.agreement))

    def _rows(self, conversations: Sequence[Conversation], roles: Sequence[int]) -> Rows | Blocks:
        if self.head.mask_token is not None:
            return blocks_of(conversations, self.head, roles, self._rng)
        return rows_of(conversations, self.head, roles)

    def _loss(self, rows: Rows | Blocks) -> LossResult:
        num_sampled = NUM_SAMPLED if torch.is_grad_enabled() else 0
        if isinstance(rows, Blocks):
            return block_loss(self.head, rows, self._dtype, num_sampled)
        return unroll(self.head, rows, self.recipe.unroll, self._dtype, num_sampled)

    @torch.no_grad()
    def _validate(self) -> tuple[float, ...]:
        if self._held_out is None:
            return ()
        return self._loss(self._held_out).agreement


def rate(step: int, share: float) -> float:
    """The learning rate, relative to its peak, at ``step`` when ``share`` of the training is done."""
    cosine = MIN_RATE + (1 - MIN_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return min(1.0, (step + 1) / WARMUP_STEPS) * cosine


def bfloat16_is_faster(device: torch.device, hidden: int) -> bool:
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
