"""``engine.py`` where vLLM 0.32's fault on CPUs is mended (issue 55005: parameters of sampled requests do not reach the
rows of their draft tokens), and drafts of sampled requests are verified there by vLLM's own rejection sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import vllm.v1.sample.rejection_sampler as upstream
from engine import main
from slipstream_vllm import adapter_0_32


def spread(values: torch.Tensor, ends: torch.Tensor, count: int, replace_from: int = 0,
           replace_to: int = 0) -> torch.Tensor:
    """A request's value for each of its rows."""
    rows = values.repeat_interleave(torch.diff(ends.long(), prepend=torch.zeros(1, dtype=torch.int64)))
    assert len(rows) == count
    return rows if replace_from == replace_to else torch.where(rows == replace_from, replace_to, rows)


if __name__ == "__main__":
    rows_of = adapter_0_32.rows_of

    def drafted(*batch: Any) -> Any:
        return [replace(row, can_verify=True) for row in rows_of(*batch)]

    upstream.expand_batch_to_tokens = spread
    adapter_0_32.rows_of = drafted
    main()
