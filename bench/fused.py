"""Stage ``fused`` of ``make gpu``: the fused operations of layers against torch's, and a layer with and without them.

Rules:
1. Without Triton on a GPU the stage fails, and says why; in a rehearsal torch's operations stand in their place.
2. Layers are timed in one graph, as they are served, without attention: what it takes has nothing to do with them.

It knows nothing about whole models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from bench.paged import capture_of
from bench.shapes import LLAMA_8B, SMALL, TINY, Fields, config_of, decoder_shapes, random_tensors
from bench.stage import Finding, Given, device_work, free, seconds
from slipstream.engine.model import ModelConfig
from slipstream.engine.ops.fused import ROUNDINGS, compared, missing, triton_operations
from slipstream.engine.ops.layer import DecoderLayer, LayerOps, LayerWeights, Step, linear
from slipstream.engine.ops.rope import Rope
from slipstream.engine.ops.specification import TORCH, Operations

ROWS, MANY_ROWS = (1, 9, 64), 4096
LAYERS = 16  # of one graph: what its start takes is shared among them
SHAPES: dict[str, Fields] = {
    "8B": LLAMA_8B,
    "8B with norms of q and k": LLAMA_8B | {"model_type": "qwen3"},
    "heads of 64": SMALL,
    "heads of 96": SMALL | {"hidden_size": 480, "intermediate_size": 1000, "head_dim": 96, "num_attention_heads": 5,
                            "num_key_value_heads": 1},
}


def fused_stage(given: Given) -> Iterator[Finding]:
    operations = _operations(given)
    for name, fields in SHAPES.items() if given.full else (("tiny", TINY),):
        for rows in (*ROWS, MANY_ROWS) if given.full else (1, 9):
            yield from _differences(f"{name}, {rows} rows", operations, config_of(fields), given, rows)
        free()
    config = config_of(LLAMA_8B if given.full else TINY)
    for rows in ROWS:
        took = {}
        for name, ops in (("torch's", TORCH), ("fused", operations)):
            run, what = layers_in_graph(config, ops, given, rows), f"a layer of {rows} rows, {name} operations"
            took[name] = seconds(run, given.device, given.repeats) / LAYERS
            yield Finding(what, 1e6 * took[name], "us")
            busy_s, kernels = device_work(run, given.device)
            if kernels:
                yield Finding(f"{what}: device computes", 1e6 * busy_s / LAYERS, "us")
                yield Finding(f"{what}: kernels", kernels / LAYERS)
            free()
        yield Finding(f"a layer of {rows} rows, fused by torch's", took["fused"] / took["torch's"], "ratio", "< 1")


def _operations(given: Given) -> Operations:
    if given.device.type != "cuda":
        return TORCH
    if reason := missing(config_of(LLAMA_8B), torch.bfloat16, given.device):
        raise RuntimeError(f"fused operations: {reason}")
    return triton_operations()


@torch.inference_mode()
def _differences(what: str, operations: Operations, config: ModelConfig, given: Given,
                 rows: int) -> Iterator[Finding]:
    """Of a row's largest number, in steps of bfloat16 there; what is not written where torch writes is infinite."""
    largest, different, count = 0.0, 0, 0
    for _, found, right in compared(operations, config, torch.bfloat16, given.device, rows):
        wide = right.float().nan_to_num(0.0)
        roof = torch.finfo(torch.bfloat16).eps * wide.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        off = (found.float().nan_to_num(0.0) - wide).abs() / roof
        off = off.masked_fill(found.isnan() != right.isnan(), torch.inf)
        largest = max(largest, float(off.max()))
        different += int((off != 0).sum())
        count += off.numel()
    yield Finding(f"{what}: largest difference", largest, "roundings", f"<= {ROUNDINGS}")
    yield Finding(f"{what}: numbers that differ", different, f"of {count}")


def layers_in_graph(config: ModelConfig, ops: LayerOps, given: Given, rows: int) -> Callable[[], object]:
    """``LAYERS`` layers of random weights on random rows; each reads weights that no cache holds."""
    single = replace(config, num_layers=1)
    tensors = random_tensors({name: shape for name, shape in decoder_shapes(single).items() if ".layers." in name},
                             torch.bfloat16, given.device)
    layer = DecoderLayer(LayerWeights.read(single, tensors, "model.layers.0", linear), ops)
    kv = torch.zeros(rows, 2, config.num_kv_heads, config.head_dim, dtype=torch.bfloat16, device=given.device)
    states = torch.randn(rows, config.hidden_size, dtype=torch.bfloat16, device=given.device)
    places = torch.arange(rows, device=given.device)
    step = Step(places, places, Rope(config, torch.bfloat16, given.device), lambda q, kv: q.reshape(rows, -1))

    @torch.inference_mode()
    def run() -> None:
        x = states
        for _ in range(LAYERS):
            x = layer(x, step, kv)

    kept = (run, capture_of(given)(run))  # a graph holds none of the tensors that it reads
    return lambda: kept[1]()
