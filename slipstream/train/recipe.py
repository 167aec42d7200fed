"""The settings of one training, and how its time is divided.

Rules:
1. Most of the time goes to generation: for a small head, more data is better than more epochs.
2. Times are those of all runs on a folder together, so an interrupted run is resumed, and a run with more ``minutes``
   continues where one with fewer ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slipstream.base.config import Dtype
from slipstream.base.errors import ConfigError
from slipstream.train.generate import Limits
from slipstream.train.shards import ANSWER, QUESTION

GENERATE_SHARE = 0.6
TRAIN_SHARE = 0.35  # the rest is loading and evaluation


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings. 0 is no limit in ``minutes``, ``tokens`` and ``steps``; without minutes, tokens (or prompts) and
    steps must be given. ``generate`` or ``train`` False leaves that stage out."""

    minutes: float = 10.0
    tokens: int = 0  # of conversations to make, given text included
    steps: int = 0  # of the optimiser
    generate: bool = True
    train: bool = True
    prompts: Path | None = None
    batch: int = 0  # conversations at a time; 0: 64 on a CPU, 512 on a GPU
    limits: Limits = field(default_factory=Limits)
    draft_vocab: int = 8192
    unroll: int = 3
    learning_rate: float = 1.5e-3
    rows_per_step: int = 2048
    learn_questions: bool = True  # what the target asks is its own text too
    dtype: Dtype = "bfloat16"  # of the target while it generates, and of the exported head
    device: str = "cpu"
    processes: int = 1  # that generate and train together, one thread each; more than one on a CPU only
    save_every_s: float = 60.0
    seed: int = 0
    kind: Literal["eagle3", "dspark"] = "eagle3"
    begin: Path | None = None  # a head of this kind to begin with; None: the target's last layers
    layers: int = 1  # of an EAGLE-3 head
    mean: bool = False  # export the mean of the weights of ``begin`` and of the trained ones

    def __post_init__(self) -> None:
        if self.minutes <= 0 and ((self.generate and self.tokens <= 0 and self.prompts is None)
                                  or (self.train and self.steps <= 0)):
            raise ConfigError("--minutes: without a time limit give --tokens and --steps, or nothing would end it")
        if self.prompts is not None and not self.generate:
            raise ConfigError("--prompts: with --no-generate nothing is asked; leave one of them out")
        if self.kind == "dspark" and self.layers != 1:
            raise ConfigError("--layers: of EAGLE-3 heads alone")
        if self.mean and self.begin is None:
            raise ConfigError("--mean: it is of the head that --begin names and of what it has learnt; add --begin")
        if not 1 <= self.unroll <= 16:
            raise ConfigError(f"--unroll: expected 1 to 16 steps, found {self.unroll}")

    @property
    def conversations_at_once(self) -> int:
        return self.batch or (512 if self.device.startswith("cuda") else 64)

    @property
    def learnt_roles(self) -> tuple[int, ...]:
        return (ANSWER, QUESTION) if self.learn_questions else (ANSWER,)

    def identity(self) -> dict[str, Any]:
        """The settings that a resumed training must share with its checkpoint."""
        names = ("layers", "unroll", "draft_vocab", "learning_rate", "rows_per_step", "learn_questions", "seed")
        return {name: getattr(self, name) for name in names} | {"begin": str(self.begin)}

    def generate_seconds(self) -> float:
        """The seconds for generation; infinite without a time limit."""
        if self.minutes <= 0:
            return float("inf")
        return self.minutes * 60 * (GENERATE_SHARE if self.train else 1.0)

    def train_seconds(self, generated_s: float) -> float:
        """The seconds for training, after generation took ``generated_s``: time that it did not use is added. Infinite
        without a time limit."""
        if self.minutes <= 0:
            return float("inf")
        share = TRAIN_SHARE + (0.0 if self.generate else GENERATE_SHARE)
        return max(share * self.minutes * 60, (GENERATE_SHARE + TRAIN_SHARE) * self.minutes * 60 - generated_s)
