"""Ranks of one engine: which of them speaks with drafts.

Rules:
1. vLLM's scheduler takes the proposals of one rank, the first of the last pipeline stage, and hands them to all ranks
   with the next step. So that rank alone drafts, the others propose nothing, and nothing has to be broadcast.
2. Where each rank has a scheduler of its own (``external_launcher``), drafts that come a moment later on one of them
   would part them: that is refused.

Stages of a pipeline before the last have no proposer. It knows nothing about drafts.
"""

from __future__ import annotations

from typing import Any

from slipstream.base.errors import ConfigError


def speaks(parallel: Any) -> bool:
    """Whether the rank that ``parallel`` (vLLM's ``ParallelConfig``) describes is the one. Raises ConfigError."""
    if parallel.world_size > 1 and parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError("distributed_executor_backend: external_launcher runs a scheduler in each rank, which remote "
                          "drafts would part; use mp or ray")
    last = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    return bool(parallel.rank == parallel.world_size - last)
