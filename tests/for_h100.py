"""``python -m tests.for_h100``: the fused kernels compiled for a GPU that need not be there. What it prints last is how
many there were, and that none keeps numbers of a row outside of its registers."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.engine.fp8 import LARGEST, SMALLEST_SCALE
from slipstream.engine.ops import fused_kernels
from slipstream.engine.ops.fused import HEAD_BLOCK, PART_BLOCK, block, warps

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {"slots": "*i64", "scales": "*fp32"}  # the others are those of the model's numbers
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def wanted() -> Iterator[tuple[str, dict[str, Any], int]]:
    """Kernels by name, with their constants and warps."""
    for width in (4096, 14_336):
        yield "add_norm", {"WIDTH": width, "EPS": 1e-5, "BLOCK": block(width)}, warps(width)
        yield "silu_mul", {"WIDTH": width, "BLOCK": PART_BLOCK}, 4
        yield "rounded", {"WIDTH": width, "MOST": LARGEST, "LEAST": SMALLEST_SCALE, "BLOCK": block(width)}, warps(width)
    for size in (64, 128):
        yield "rotate_and_store", {"HEADS": 32, "KV_HEADS": 8, "SIZE": size, "NORMED": True, "EPS": 1e-5,
                                   "HEAD_BLOCK": HEAD_BLOCK, "SIZE_BLOCK": block(size)}, 4


def spilled(name: str, constants: dict[str, Any], num_warps: int) -> int:
    """Bytes of local memory of a thread. Raises what Triton raises."""
    kernel = vars(fused_kernels)[name]
    kinds = POINTERS | ({"out": "*fp8e4nv"} if name == "rounded" else {})
    signature = {key: "constexpr" if key in constants else kinds.get(key, "*bf16") for key in kernel.arg_names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values())
               if kind.startswith("*") and kind != POINTERS["slots"]}
    done = triton.compile(ASTSource(kernel, signature, constants, aligned), TARGET, {"num_warps": num_warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        told = subprocess.run([TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return sum(int(re.findall(rf"{word}:(\d+)", told.stdout)[0]) for word in ("STACK", "LOCAL"))


def main() -> None:
    found = [(name, constants, spilled(name, constants, num_warps)) for name, constants, num_warps in wanted()]
    assert not any(count for *_, count in found), found
    print(f"{len(found)} kernels compiled")


if __name__ == "__main__":
    main()
