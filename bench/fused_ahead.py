"""``python -m bench.fused_ahead``: the fused kernels compiled for an H100 where none is, and what they take of it.

Triton's wheel brings all that this needs, ptxas and cuobjdump included. A kernel that spills registers, or is not
compiled, is an error. It knows nothing about whether kernels are right or fast.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.engine.fused import HEAD_BLOCK, PART_BLOCK, block, warps

WIDTHS = (64, 576, 4096, 8192, 16384)  # of the residual stream
INNER = (96, 1536, 14336)  # of the MLP
HEAD_DIMS = (64, 96, 128)
HEADS, KV_HEADS, EPS = 32, 8, 1e-5
DTYPES = {"bfloat16": "*bf16", "float16": "*fp16"}
CAPABILITY, WARP = 90, 32


@dataclass(frozen=True, slots=True)
class Compiled:
    name: str
    dtype: str
    sizes: str
    warps: int
    registers: int
    spilled: int  # bytes


def wanted() -> Iterator[tuple[str, dict[str, Any], int]]:
    """Kernels by name, with their constants (None: a tensor that is not there) and warps."""
    for width in WIDTHS:
        yield "add_norm", {"WIDTH": width, "EPS": EPS, "BLOCK": block(width)}, warps(width)
    for size in HEAD_DIMS:
        sizes = {"HEADS": HEADS, "KV_HEADS": KV_HEADS, "SIZE": size, "EPS": EPS, "HEAD_BLOCK": HEAD_BLOCK,
                 "SIZE_BLOCK": block(size)}
        yield "place", {"q_norm": None, "k_norm": None, "NORMED": False, **sizes}, 4
        yield "place", {"NORMED": True, **sizes}, 4
    for width in INNER:
        yield "silu_mul", {"WIDTH": width, "BLOCK": PART_BLOCK}, 4


def compiled(name: str, pointer: str, constants: dict[str, Any], num_warps: int) -> bytes:
    """The machine code of one kernel. Raises what Triton raises."""
    kernels, compiler, backend = (importlib.import_module(module) for module in (
        "slipstream.engine.fused_kernels", "triton.compiler", "triton.backends.compiler"))
    kernel = vars(kernels)[name]
    signature = {argument: "constexpr" if argument in constants else "*i64" if argument == "slots" else pointer
                 for argument in kernel.arg_names}
    places = {argument: (place,) for place, argument in enumerate(kernel.arg_names)}
    aligned = {places[argument]: [["tt.divisibility", 16]] for argument, kind in signature.items() if kind == pointer}
    source = compiler.ASTSource(kernel, signature, {places[key]: value for key, value in constants.items()}, aligned)
    done = compiler.compile(source, target=backend.GPUTarget("cuda", CAPABILITY, WARP),
                            options={"num_warps": num_warps})
    code: bytes = done.asm["cubin"]
    return code


def taken(code: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of local memory, where spilled ones go."""
    tool = Path(importlib.import_module("triton").__file__ or "").parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack, local = (int(re.findall(rf"{word}:(\d+)", told.stdout)[0]) for word in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def run() -> Iterator[Compiled]:
    for dtype, pointer in DTYPES.items():
        for name, constants, num_warps in wanted():
            registers, spilled = taken(compiled(name, pointer, constants, num_warps))
            sizes = ", ".join(f"{key} {value}" for key, value in constants.items()
                              if key in ("WIDTH", "SIZE", "NORMED"))
            yield Compiled(name, dtype, sizes, num_warps, registers, spilled)


def main() -> int:
    if importlib.util.find_spec("triton") is None:
        print("Triton is not installed: make triton")
        return 1
    found = []
    for kernel in run():
        found.append(kernel)
        print(f"{kernel.name:<10} {kernel.dtype:<10} {kernel.sizes:<24} {kernel.warps:>2} warps {kernel.registers:>4} "
              f"registers {kernel.spilled} bytes spilled", flush=True)
    spilled = sum(kernel.spilled for kernel in found)
    print(f"{len(found)} kernels compiled for sm_{CAPABILITY}a; most registers "
          f"{max(kernel.registers for kernel in found)}, spilled bytes {spilled}")
    return int(spilled > 0)


if __name__ == "__main__":
    sys.exit(main())
