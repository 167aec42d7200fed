"""Which attention a decoder uses: torch's over gathered slots, or a kernel over pages.

Rules:
1. An attention is asked once a forward for what attends in every layer of it.
2. A *fixed* attention is planned again and again for one number of rows and segments: what it reads stays where it is,
   so that a captured graph may hold it. One call writes all of it.
3. FlashInfer's is taken where it is importable, knows dtype and head size and passes a trial, torch's elsewhere.

It knows nothing about layers or weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch

from slipstream.engine.attention import attend, attend_pages, plan_attention
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.model import ModelConfig
from slipstream.engine.pages import PagePlan, PageTensors, plan_pages, write_pages

Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # q [T, Q, D], one layer's kv [S, 2, G, D] -> [T, Q * D]


class Attention(Protocol):
    def plan(self, batch: ForwardBatch) -> Attend:
        """What attends in each layer of one forward of ``batch``."""
        ...


class FixedAttention(Protocol):
    """An attention for one number of rows and segments."""

    def write(self, plan: PagePlan) -> bool:
        """Take another batch of this size, over all of what is read. False: it cannot run as it was captured."""
        ...

    def __call__(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """As ``Attend``."""
        ...

    def buffers(self) -> Iterator[torch.Tensor]:
        """All that stays where it is."""
        ...


class PagedAttention(Attention, Protocol):
    def fixed(self, pages: PageTensors, apart: bool = False) -> FixedAttention:
        """For batches of as many rows and segments as ``pages`` has, and at most as many KV entries. apart: others are
        planned before it runs."""
        ...


class TorchAttention:
    """Over gathered slots; see ``attention``. As a paged one it is slow: what kernels are held against."""

    __slots__ = ("_config", "_dtype")

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype

    def plan(self, batch: ForwardBatch) -> Attend:
        config = self._config
        plan = plan_attention(plan_pages(batch, config.sliding_window), config.group, self._dtype, batch.tokens.device)
        return partial(attend, plan=plan, scale=config.head_dim**-0.5)

    def fixed(self, pages: PageTensors, apart: bool = False) -> FixedAttention:
        return FixedTorch(pages, self._config.head_dim**-0.5)


class FixedTorch:
    __slots__ = ("_pages", "_scale")

    def __init__(self, pages: PageTensors, scale: float) -> None:
        self._pages, self._scale = pages, scale

    def write(self, plan: PagePlan) -> bool:
        write_pages(self._pages, plan)
        return True

    def __call__(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return attend_pages(q, kv, self._pages, self._scale)

    def buffers(self) -> Iterator[torch.Tensor]:
        yield from self._pages
