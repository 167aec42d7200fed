"""Chooses the operations between a layer's products, and the rounding to fp8: our own Triton kernels on a GPU that has
Triton, else torch's.

Rules:
1. The choice is made once, before anything is served, and logged. The setting ``kernels: torch`` forces torch's.
2. Before our kernels are used, their results on a few rows of the model's dimensions are compared with torch's: in
   another process (``proof``), then in this one. A failure, or a difference above rounding (for the rounding to fp8:
   any different bit), is logged as a warning, and torch's are used: no answer depends on an untested GPU.
3. The trial also compiles the kernels. Later launches compile and measure nothing, so they can be captured.

It knows nothing about batches or attention.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from slipstream.base.errors import first_line
from slipstream.engine.fp8 import LARGEST, SMALLEST_SCALE, Rounding
from slipstream.engine.fp8 import rounded as torch_rounded
from slipstream.engine.fp8_blocks import E4M3
from slipstream.engine.model import ModelConfig
from slipstream.engine.ops.layer import TORCH, Heads, Operations, Rope, Step
from slipstream.engine.proof import Proof, rejection_reason
from slipstream.observe.log import logger

DTYPES = (torch.bfloat16, torch.float16)
MOST_WIDTH = 16_384  # numbers of a row: one block must hold it
HEAD_BLOCK = 4  # heads of one program
PART_BLOCK = 1024  # numbers of a row that one program of silu_mul computes
TRIAL_ROWS, SPARE_SLOTS = (1, 5), 11  # row counts of the trial; slots that the kernels must not write
ROUNDINGS = 2  # allowed difference in units of rounding of the row's largest number


def unsupported_reason(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Why our kernels cannot be used here, in words; empty: they can be tried."""
    if device.type == "cuda" and dtype not in DTYPES:
        return f"they are for bfloat16 and float16, and this model is {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda" and config.hidden_size > MOST_WIDTH:
        return f"their rows have at most {MOST_WIDTH} numbers, and this model's {config.hidden_size}"
    return triton_unsupported_reason(device)


def triton_unsupported_reason(device: torch.device) -> str:
    """Why nothing in Triton runs on this device, in words; empty: it can be tried."""
    if device.type != "cuda":
        return f"they are for CUDA devices, and this one is '{device}'"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (a torch for CUDA brings it)"
    if device.index is not None and device.index != torch.cuda.current_device():
        return f"Triton launches on the process's current device, and this one is '{device}'"
    return ""


def operations_for(choice: str, config: ModelConfig, dtype: torch.dtype, device: torch.device,
                   proof: Proof = rejection_reason) -> Operations:
    """The operations that serve. choice: as in ``ModelSection.kernels``; config: of the layers, or of a rank's part of
    them."""
    def run_trial() -> str:
        return proof("operations", config, dtype, device) or difference(triton_operations(), config, dtype, device)

    serve = kernels_serve(choice, device, "operations in layers", unsupported_reason(config, dtype, device), run_trial)
    return triton_operations() if serve else TORCH


def rounding_for(choice: str, config: ModelConfig, device: torch.device, proof: Proof = rejection_reason) -> Rounding:
    """As ``operations_for``, for the function that rounds bfloat16 to e4m3."""
    def run_trial() -> str:
        return (proof("rounding", config, torch.bfloat16, device)
                or rounding_difference(triton_rounding(), config, device))

    serve = kernels_serve(choice, device, "rounding to 8 bits", unsupported_reason(config, torch.bfloat16, device),
                          run_trial)
    return triton_rounding() if serve else torch_rounded


def kernels_serve(choice: str, device: torch.device, what: str, reason: str, run_trial: Callable[[], str]) -> bool:
    """Whether our kernels serve; it logs the answer, except on a CPU, where they never do. what: their name in the log;
    reason: why they cannot be tried, "" if they can; run_trial: returns how they differ, "" if they do not."""
    if choice == "torch" or device.type != "cuda":
        return False
    log = logger("engine")
    if reason:
        log.info(f"torch's {what}", reason=reason)
        return False
    try:
        reason = run_trial()
    except Exception as error:  # compilers and drivers fail in their own ways
        reason = first_line(error)
    if reason:
        log.warning(f"torch's {what}: slower", reason=reason)
        return False
    log.info(f"kernels of our own: {what}")
    return True


def triton_operations() -> Operations:
    """Our kernels as operations of a layer. Raises ImportError if Triton is not installed."""
    fused = _Fused()
    return Operations(fused.add_norm, fused.rotate_and_store, fused.silu_mul, "fused")


def triton_rounding() -> Rounding:
    """Our kernel that rounds to e4m3. Raises ImportError if Triton is not installed."""
    return _Fused().rounded


class _Fused:
    """The launches of ``fused_kernels``. Each allocates its results and does not wait for the GPU."""

    __slots__ = ("_kernels",)

    def __init__(self) -> None:
        self._kernels: Any = importlib.import_module("slipstream.engine.ops.fused_kernels")

    def add_norm(self, x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        x, added = x.contiguous(), added.contiguous()
        total, normed = torch.empty_like(x), torch.empty_like(x)
        rows, width = x.shape
        self._kernels.add_norm[(rows,)](x, added, weight, total, normed, width, eps, block(width),
                                        num_warps=warps(width))
        return total, normed

    def rotate_and_store(self, rows: torch.Tensor, heads: Heads, step: Step, kv: torch.Tensor) -> torch.Tensor:
        count, every, size = rows.shape
        assert kv.is_contiguous() and every == heads.queries + 2 * heads.kv
        queries = rows.new_empty(count, heads.queries, size)
        self._kernels.rotate_and_store[(count, -(-every // HEAD_BLOCK))](
            rows.contiguous(), step.cos, step.sin, step.slots, heads.q_norm, heads.k_norm, queries, kv, heads.queries,
            heads.kv, size, heads.q_norm is not None, heads.eps, HEAD_BLOCK, block(size))
        return queries

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self._kernels.silu_mul[(rows, -(-width // PART_BLOCK))](gate_up, out, width, PART_BLOCK)
        return out

    def rounded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.contiguous()
        rows, width = x.shape
        out, scales = torch.empty_like(x, dtype=E4M3), x.new_empty(rows, 1, dtype=torch.float32)
        self._kernels.rounded[(rows,)](x, out, scales, width, LARGEST, SMALLEST_SCALE, block(width),
                                       num_warps=warps(width))
        return out, scales


def block(width: int) -> int:
    """The smallest power of two that is at least ``width``."""
    return 1 << (width - 1).bit_length()


def warps(width: int) -> int:
    """How many warps a program has that holds a row of ``width`` numbers: each thread has at most 32 of them, up to
    ``MOST_WIDTH``."""
    return min(16, max(4, block(width) // 512))


@torch.inference_mode()
def difference(operations: Operations, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """How these operations differ from torch's on random rows of a layer of ``config``, in words; empty: they do
    not."""
    for rows in TRIAL_ROWS:
        for what, actual, expected in compared(operations, config, dtype, device, rows):
            wide = expected.float().nan_to_num(0.0)
            allowed = ROUNDINGS * torch.finfo(dtype).eps * wide.abs().amax(-1, keepdim=True)
            unwritten = actual.isnan().ne(expected.isnan()).any()
            far = (actual.float().nan_to_num(0.0) - wide).abs() > allowed
            if bool(unwritten | far.any()):
                return f"{what} of {rows} rows are not what torch computes"
    return ""


def compared(operations: Operations, config: ModelConfig, dtype: torch.dtype, device: torch.device,
             rows: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """For each result on ``rows`` random rows: its name, the value of ``operations``, and torch's. KV slots that must
    not be written hold NaN in both."""
    rng = torch.Generator().manual_seed(rows)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(device, dtype)

    x, added, weight = noise(rows, config.hidden_size), noise(rows, config.hidden_size), noise(config.hidden_size)
    added_up = [ops.add_norm(x, added, weight, config.norm_eps) for ops in (operations, TORCH)]
    yield from zip(("sums", "norms"), *added_up, strict=True)
    gate_up = 4 * noise(rows, 2 * config.intermediate_size)
    yield "activations", operations.silu_mul(gate_up.clone()), TORCH.silu_mul(gate_up)
    kv_heads, size = config.num_kv_heads, config.head_dim
    qkv = noise(rows, config.num_heads + 2 * kv_heads, size)
    q_norm, k_norm = (noise(size), noise(size)) if config.qk_norm else (None, None)
    heads = Heads(config.num_heads, kv_heads, size, q_norm, k_norm, config.norm_eps)
    slots = torch.randperm(SPARE_SLOTS + rows, generator=rng)[:rows].to(device)
    step = Step(100 * torch.arange(rows, device=device), slots, Rope(config, dtype, device), lambda q, _kv: q)
    pools = [torch.full((SPARE_SLOTS + rows, 2, kv_heads, size), torch.nan, dtype=dtype, device=device) for _ in "ab"]
    actual, expected = (ops.rotate_and_store(qkv.clone(), heads, step, kv)
                        for ops, kv in zip((operations, TORCH), pools, strict=True))
    yield "queries", actual, expected
    yield "KV", pools[0], pools[1]


@torch.inference_mode()
def rounding_difference(rounding: Rounding, config: ModelConfig, device: torch.device) -> str:
    """As ``difference``, for rounding: rows of each width that a decoder's layers multiply; all bits must be equal."""
    for width in sorted({config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size}):
        for what, actual, expected in rounded_rows(rounding, width, device):
            if not torch.equal(actual, expected):
                return f"{what} of {width} columns are not what torch computes"
    return ""


def rounded_rows(rounding: Rounding, width: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor,
                                                                                         torch.Tensor]]:
    """For the numbers and the scales of some rows: their name, the bits of ``rounding``, and those of torch's. Rows are
    random, from very small to very large numbers; one of zeros; and two of numbers halfway between two of e4m3."""
    rng = torch.Generator().manual_seed(width)
    rows = torch.randn((9, width), generator=rng) * torch.logspace(-38, 36, 9)[:, None]
    rows[1] = 0
    halves = torch.arange(-LARGEST, LARGEST + 1).repeat(-(-width // 897))[:width]
    halves[0] = LARGEST
    x = torch.cat((rows, halves[None], halves[None] / 2**13)).to(device, torch.bfloat16)
    x[-1, 0] = LARGEST
    for (actual, actual_scale), (expected, expected_scale) in zip(
            map(rounding, (x, x[3:4])), map(torch_rounded, (x, x[3:4])), strict=True):
        yield "numbers", actual.view(torch.uint8), expected.view(torch.uint8)
        yield "scales", actual_scale.view(torch.int32), expected_scale.view(torch.int32)
