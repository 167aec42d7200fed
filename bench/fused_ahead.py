"""``python -m bench.fused_ahead``: the fused kernels compiled for an H100 where none is, and what they take of it.

Rules:
1. Triton is told that there is an H100, and the engine's own launches are stopped before the device: what is compiled
   is what would run. Triton's wheel brings all that this needs, ptxas and cuobjdump included.
2. A kernel that spills registers is an error, and so is one that is compiled anew for other numbers of rows.

It knows nothing about whether kernels are right or fast.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.shapes import TINY, config_of
from slipstream.engine.fused import DTYPES, MOST_WIDTH, compared, operations_of
from slipstream.engine.model import ModelConfig

CPU, ROWS = torch.device("cpu"), (1, 5, 64)
CAPABILITY, WARP = 90, 32
# Width of the residual stream and of the MLP, heads, KV heads, their size, whether q and k are normed.
SHAPES = ((576, 1536, 9, 3, 64, False), (1000, 2500, 10, 2, 96, False), (4096, 14336, 32, 8, 128, False),
          (4096, 12288, 32, 8, 128, True), (960, 96, 15, 5, 64, True), (8192, 28672, 64, 8, 96, True),
          (MOST_WIDTH, 3, 128, 8, 128, False))


class AheadDriver:
    """What Triton asks a device, answered for one that is elsewhere."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", CAPABILITY, WARP)


class Stopped:
    """A kernel whose launches end when it is compiled."""

    def __init__(self, kernel: Any, found: dict[str, bytes]) -> None:
        self._kernel, self._found = kernel, found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **options: Any) -> None:
            done = self._kernel.warmup(*given, grid=grid, **options)
            self._found[f"{self._kernel.__name__} {done.hash}"] = done.asm["cubin"]

        return launch


class StoppedKernels:
    """Those of ``fused_kernels``."""

    def __init__(self) -> None:
        kernels = importlib.import_module("slipstream.engine.fused_kernels")
        self.found: dict[str, bytes] = {}  # machine code by name and hash
        self.add_norm, self.place, self.silu_mul = (
            Stopped(kernel, self.found) for kernel in (kernels.add_norm, kernels.place, kernels.silu_mul))


@dataclass(frozen=True, slots=True)
class Compiled:
    kernel: str
    registers: int
    spilled: int  # bytes


def configs() -> Iterator[ModelConfig]:
    for hidden, inner, heads, kv_heads, size, normed in SHAPES:
        yield replace(config_of(TINY), hidden_size=hidden, intermediate_size=inner, num_heads=heads,
                      num_kv_heads=kv_heads, head_dim=size, qk_norm=normed)


def compiled(config: ModelConfig, dtype: torch.dtype) -> list[Compiled]:
    """The kernels of layers of such measures. Raises what Triton raises."""
    kernels = StoppedKernels()
    for rows in ROWS:
        list(compared(operations_of(kernels), config, dtype, CPU, rows))
    return [Compiled(name.partition(" ")[0], *taken(code)) for name, code in kernels.found.items()]


def taken(code: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of local memory, where spilled ones go."""
    tool = Path(importlib.import_module("triton").__file__ or "").parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack, local = (int(re.findall(rf"{word}:(\d+)", told.stdout)[0]) for word in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def main() -> int:
    if importlib.util.find_spec("triton") is None:
        print("Triton is not installed: make triton")
        return 1
    importlib.import_module("triton.runtime").driver.set_active(AheadDriver())
    found, anew = [], 0
    for config in configs():
        for dtype in DTYPES:
            kernels = compiled(config, dtype)
            anew += len(kernels) - 3
            found += kernels
            told = ", ".join(f"{each.kernel} {each.registers}" + f" ({each.spilled} bytes spilled)" * (each.spilled > 0)
                             for each in kernels)
            print(f"{str(dtype).removeprefix('torch.'):<9} hidden {config.hidden_size}, MLP "
                  f"{config.intermediate_size}, {config.num_heads} and {config.num_kv_heads} heads of {config.head_dim}"
                  f"{', normed' * config.qk_norm}; registers: {told}", flush=True)
    spilled = sum(each.spilled for each in found)
    print(f"{len(found)} kernels compiled for sm_{CAPABILITY}a, {anew} of them anew for other rows; most registers "
          f"{max(each.registers for each in found)}, spilled bytes {spilled}")
    return int(spilled > 0 or anew > 0)


if __name__ == "__main__":
    sys.exit(main())
