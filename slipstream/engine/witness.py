"""``python -m slipstream.engine.witness QUESTION DEVICE``: runs kernels that this GPU may never have run, and
prints how they differ from torch's.

It is started by ``proof``, which reads the line; it loads no model and answers nobody else.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from slipstream.base.errors import in_a_line
from slipstream.engine.attention import disagreement
from slipstream.engine.flashinfer import FlashInferAttention
from slipstream.engine.model import ModelConfig, RopeScaling, dtype_of
from slipstream.engine.ops.fused import difference, triton_operations
from slipstream.engine.proof import SAID


def seen(question: dict[str, Any], device: torch.device) -> str:
    """Where the kernels differ, in words; empty: nowhere."""
    scaling = question["config"].pop("rope_scaling")
    config = ModelConfig(**question["config"], rope_scaling=scaling and RopeScaling(**scaling))
    dtype = dtype_of(question["dtype"])
    try:
        if question["what"] == "attention":
            return disagreement(FlashInferAttention(config, dtype, device), config, dtype, device)
        return difference(triton_operations(), config, dtype, device)
    except Exception as error:  # compilers, loaders and launches fail in their own ways
        return in_a_line(error)


def main() -> None:
    question, device = json.loads(sys.argv[1]), torch.device(sys.argv[2])
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    print(SAID + json.dumps(seen(question, device)), flush=True)


if __name__ == "__main__":
    main()
