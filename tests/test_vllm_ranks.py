"""Which rank of vLLM's engine speaks with drafts, and what the others do, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from slipstream_vllm.remote import speaks

from slipstream.base.errors import ConfigError


def parallel(rank: int, tensor: int = 1, stages: int = 1, prefill: int = 1, backend: str = "mp") -> Any:
    """As much of ``ParallelConfig`` as is read."""
    return SimpleNamespace(rank=rank, world_size=tensor * stages * prefill, tensor_parallel_size=tensor,
                           prefill_context_parallel_size=prefill, distributed_executor_backend=backend)


@pytest.mark.parametrize(("tensor", "stages", "prefill", "speaker"), [
    (1, 1, 1, 0), (2, 1, 1, 0), (8, 4, 1, 24), (1, 3, 1, 2), (2, 2, 2, 4)])
def test_the_rank_whose_proposals_vllm_takes_speaks(tensor: int, stages: int, prefill: int, speaker: int) -> None:
    ranks = range(tensor * stages * prefill)
    assert [rank for rank in ranks if speaks(parallel(rank, tensor, stages, prefill))] == [speaker]


def test_ranks_that_schedule_for_themselves_are_refused() -> None:
    with pytest.raises(ConfigError, match="external_launcher"):
        speaks(parallel(1, 2, backend="external_launcher"))
    assert speaks(parallel(0, backend="external_launcher")), "one rank has nobody to part from"
