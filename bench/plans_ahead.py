"""``python -m bench.plans_ahead``: may a captured launch be replayed for any batch? FlashInfer's own planner is asked,
where no GPU is.

Rules:
1. What runs is what ``make gpu-bundle ARGS=--flashinfer`` packed: FlashInfer's Python, and the library that it compiled
   for an H100. The CUDA runtime below it is one that knows an H100's numbers, copies what it is told to copy and counts
   launches.
2. A plan that asks for another launch than its size's first is an error, and so is one that does not name each piece
   of work exactly once.

It knows nothing about what kernels compute.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.exactness import random_words
from bench.gpu_bundle import FOLDER
from bench.gpu_kernels import ARCHITECTURE
from bench.shapes import LLAMA_8B, config_of
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.flashinfer import FixedFlashInfer, FlashInferAttention
from slipstream.engine.graphs import NOTHING, Size, padded, sizes
from slipstream.engine.model import ModelConfig
from slipstream.engine.pages import PagePlan, PageTensors, plan_pages

CPU, PLANS = torch.device("cpu"), 5
SHAPES = ((32, 8, 128), (64, 8, 128), (32, 32, 128), (9, 3, 64), (16, 2, 64))  # query heads, KV heads, their size
LONGEST, ENTRIES, SPARE = 1 << 14, 1 << 21, range(128)
# Attributes: multiprocessors, shared memory of one and of a block, compute capability.
RUNTIME = r"""
#include <string.h>
typedef struct { unsigned x, y, z; } dim3;
typedef struct { dim3 grid, block; size_t shared; void *stream, *attributes; unsigned count; } config;
static int launches;
static unsigned long shape;
static int launched(dim3 grid) { launches++; shape = shape * 1000003 + grid.x * 4096ul + grid.z; return 0; }
int seen(unsigned long *out) { int all = launches; *out = shape; launches = 0; shape = 0; return all; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return 0; }
int cudaDeviceGetAttribute(int *value, int name, int device) {
  *value = name == 16 ? 132 : name == 81 ? 233472 : name == 97 ? 232448 : name == 75 ? 9 : 0;
  return 0;
}
int cudaFuncSetAttribute(const void *kernel, int name, int value) { return value > 232448; }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  memcpy(to, from, size);
  return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int size, size_t shared,
                                                           unsigned flags) { *blocks = 8; return 0; }
int cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, void *stream) {
  return launched(grid);
}
int __cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, void *stream) {
  return launched(grid);
}
int cudaLaunchKernelExC(const config *c, const void *kernel, void **args) { return launched(c->grid); }
const char *cudaGetErrorName(int error) { return "none"; }
const char *cudaGetErrorString(int error) { return "none"; }
int __cudaGetKernel(void **out, const void *kernel) { *out = (void *)kernel; return 0; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) { return 0; }
int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) { return 0; }
void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **handle, const char *f, char *d, const char *n, int l, void *a, void *b, void *c,
                            void *e, int *w) {}
void __cudaRegisterVar(void **handle, char *h, char *d, const char *n, int e, size_t s, int c, int g) {}
"""


def batch_of(dice: np.random.Generator, size: Size) -> ForwardBatch:
    """Steps, chunks and trees behind any contexts, that a graph of this size takes."""
    while True:
        segments = int(dice.integers(1, size.segments + 1))
        builder, taken = BatchBuilder(), 0
        for _ in range(segments):
            rows, context = int(dice.integers(1, size.rows // segments + 1)), int(LONGEST ** dice.random())
            words = random_words(dice, rows) if 1 < rows <= 64 and dice.random() < 0.5 else None
            builder.add([0] * rows, [0] * rows, list(range(taken + context, taken + context + rows)),
                        np.arange(taken, taken + context), words, rows if words else 0)
            taken += context + rows
        if size.takes(len(builder.tokens), segments):
            return builder.build()


class Planned:
    """One size of graph, planned by FlashInfer for one batch after the other."""

    def __init__(self, attention: FlashInferAttention, config: ModelConfig, size: Size, runtime: Any) -> None:
        self._config, self._size, self._runtime = config, size, runtime
        pages = PageTensors.empty(size.rows, size.segments, ENTRIES, CPU)
        self._workspace = attention.workspace
        fixed = attention.fixed(pages)
        assert isinstance(fixed, FixedFlashInfer)
        self._fixed = fixed
        self._q = torch.zeros(size.rows, config.num_heads, config.head_dim, dtype=torch.bfloat16)
        self._kv = torch.zeros(1, 2, config.num_kv_heads, config.head_dim, dtype=torch.bfloat16)

    def __call__(self, batch: ForwardBatch) -> tuple[bool, int, int]:
        """Whether FlashInfer has its first launch again, how many kernels there are, and of what shape."""
        plan, shape = plan_pages(padded(batch, self._size, SPARE)), ctypes.c_ulong()
        again = self._fixed.write(plan)
        self._runtime.seen(ctypes.byref(shape))
        self._fixed(self._q, self._kv)
        count: int = self._runtime.seen(ctypes.byref(shape))
        self._check(plan)
        return again, count, shape.value

    def _check(self, plan: PagePlan) -> None:
        launch = self._fixed.launch
        blocks, tile = launch[0], launch[3]
        requests, tiles, chunks = (self._ints(at, blocks) for at in launch[4:7])
        valid = self._workspace.numpy()[launch[12] : launch[12] + blocks] > 0
        (chunk,) = self._ints(launch[9], 1).tolist()
        found = list(zip(requests[valid].tolist(), tiles[valid].tolist(), chunks[valid].tolist(), strict=True))
        rows, entries = np.diff(plan.q_indptr) * self._config.group, np.diff(plan.kv_indptr)
        wanted = {(r, a, b) for r in range(len(rows)) for a in range(-(-int(rows[r]) // tile))
                  for b in range(-(-int(entries[r]) // chunk))}
        if len(found) != len(wanted) or set(found) != wanted:
            raise SystemExit(f"{self._size}: the plan names {len(set(found) & wanted)} of {len(wanted)} pieces of work")

    def _ints(self, at: int, count: int) -> np.ndarray:
        return self._workspace.numpy()[at : at + 4 * count].view(np.int32)


def asked(runtime: Any) -> Iterator[str]:
    for heads, kv_heads, head_dim in SHAPES:
        config = config_of(LLAMA_8B | {"num_attention_heads": heads, "num_key_value_heads": kv_heads,
                                       "head_dim": head_dim})
        attention, plans = FlashInferAttention(config, torch.bfloat16, CPU), 0
        for size in sizes():
            planned, dice = Planned(attention, config, size, runtime), np.random.default_rng(size.rows)
            _, *first = planned(NOTHING)
            for _ in range(PLANS):
                again, *launches = planned(batch_of(dice, size))
                if not again or launches != first:
                    raise SystemExit(f"{heads} heads on {kv_heads} of {head_dim}, {size}: another launch")
                plans += 1
        yield (f"{heads} heads on {kv_heads} of {head_dim}: {plans} plans for {len(sizes())} sizes of graph, each with "
               "the launch of its size's first")


def on_cpu() -> None:
    """FlashInfer without a GPU: nothing is pinned, and the device is what the runtime says."""
    plain = torch.empty
    vars(torch)["empty"] = lambda *size, pin_memory=False, **words: plain(*size, **words)
    vars(importlib.import_module("flashinfer.prefill"))["device_support_pdl"] = lambda device: True


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plans_ahead", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", type=Path, help="a CUDA runtime that counts; else one is made, and this started on it")
    options = parser.parse_args(arguments)
    if options.on:
        runtime = ctypes.CDLL(str(options.on), mode=ctypes.RTLD_GLOBAL)
        on_cpu()
        for line in asked(runtime):
            print(line, flush=True)
        return
    archive, builder = FOLDER / "flashinfer.tar.gz", FOLDER.with_name("gpu-kernels").resolve()
    if not archive.exists() or not builder.exists():
        raise SystemExit("make gpu-bundle ARGS=--flashinfer makes what this asks")
    with tempfile.TemporaryDirectory() as place, tarfile.open(archive) as packed:
        packed.extractall(place, filter="data")
        library, versions = Path(place) / "libcudart.so.13", Path(place) / "versions"
        versions.write_text("libcudart.so.13 { global: *; };")
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(library),
                        f"-Wl,-soname,{library.name}", f"-Wl,--version-script={versions}"], input=RUNTIME.encode(),
                       check=True)
        world = ["FLASHINFER_DISABLE_JIT=1", f"FLASHINFER_CUDA_ARCH_LIST={ARCHITECTURE}",
                 f"FLASHINFER_WORKSPACE_BASE={place}", f"PYTHONPATH={Path.cwd()}:{place}:{builder}"]
        subprocess.run(["env", *world, sys.executable, "-m", "bench.plans_ahead", "--on", str(library)], check=True)


if __name__ == "__main__":
    main()
