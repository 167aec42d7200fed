"""``main QUESTION DEVICE``: runs kernels that this GPU may never have run, and prints how they differ from torch's.

``proof`` starts it and reads its line. It loads no model.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from slipstream.base.errors import first_line
from slipstream.engine.attention import disagreement
from slipstream.engine.flashinfer import FlashInferAttention
from slipstream.engine.model import ModelConfig, RopeScaling, dtype_of
from slipstream.engine.ops.fused import difference, rounding_difference, triton_operations, triton_rounding
from slipstream.engine.ops.races import trial
from slipstream.engine.proof import VERDICT_PREFIX

DEVICE_ERRORS = ("CUDA error", "Triton Error [CUDA]", "illegal memory access", "out of memory")


def examine(question: dict[str, Any], device: torch.device) -> str:
    """How the kernels differ from torch's, or how the device failed, in words; empty: neither. Raises what compilers
    and loaders raise."""
    scaling = question["config"].pop("rope_scaling")
    config = ModelConfig(**question["config"], rope_scaling=scaling and RopeScaling(**scaling))
    dtype = dtype_of(question["dtype"])
    try:
        if question["what"] == "attention":
            return disagreement(FlashInferAttention(config, dtype, device), config, dtype, device)
        if question["what"] == "rounding":
            return rounding_difference(triton_rounding(), config, device)
        if question["what"] == "choosing":
            return trial(config.vocab_size, device)
        return difference(triton_operations(), config, dtype, device)
    except RuntimeError as error:
        if any(word in str(error) for word in DEVICE_ERRORS):
            return first_line(error)
        raise


def main() -> None:
    question, device = json.loads(sys.argv[1]), torch.device(sys.argv[2])
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    try:
        verdict = examine(question, device)
    except Exception as error:  # they fail in their own ways
        sys.exit(first_line(error))
    print(VERDICT_PREFIX + json.dumps(verdict), flush=True)
