"""What a device computes is right, whatever the company. ``make gpu`` runs this with ``--device cuda``; on a CPU shapes
are small, torch's pages stand in FlashInfer's place, and the function itself in a graph's.

The reference is the same model in float64 on the CPU, its weights rounded to bfloat16 as in all that is compared: a
difference is arithmetic alone. A graph's is the same step without, and that of two devices is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu.shapes import LLAMA_8B, SMALL, TINY, Fields, config_of, decoder_shapes, random_tensors, write_folder
from bench.gpu.stage import StageOptions, capture_of, device_race, fused_operations, paged_attention
from bench.inputs import choice_rows, zipf_logits
from slipstream.base.config import ModelSection
from slipstream.choosing.sampling import choose
from slipstream.engine.attention import TorchAttention
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.decoder import Decoder
from slipstream.engine.fp8 import gpu_product, reference_product, rounded, with_fp8
from slipstream.engine.graphs import GraphedDecoder
from slipstream.engine.loading import graphed, load_model
from slipstream.engine.model import CausalModel
from slipstream.engine.ops import races
from slipstream.engine.ops.fused import (
    ROUNDINGS,
    compared,
    operations_for,
    rounded_rows,
    rounding_for,
    triton_rounding,
)
from slipstream.engine.ops.layer import TORCH
from slipstream.engine.ranks import ranked_model
from slipstream.protocol.requests import Sampling
from tests.on_device import CONTEXT, LENGTHS, TREES, Spoiling, Subject, mixed, relative, scripted, sweep
from tests.test_device_races import Specified

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LIMITS = {"float32": 1e-4, "bfloat16": 1e-1}
REFERENCE = torch.device("cpu")
KERNEL_LIMIT, LONGEST = 1e-2, 8192  # context of the kernel's rows
RANKS = 2
SLOTS, PADDING = 2000, 128  # rows that fill up a graph take the last ones
MOST_ROWS = 64
FUSED: dict[str, Fields] = {
    "8B": LLAMA_8B,
    "8B with norms of q and k": LLAMA_8B | {"model_type": "qwen3"},
    "heads of 64": SMALL,
    "heads of 96": SMALL | {"hidden_size": 480, "intermediate_size": 1000, "head_dim": 96, "num_attention_heads": 5,
                            "num_key_value_heads": 1},
}
PRODUCTS = (("qkv", 6144, 4096), ("gate and up", 28672, 4096), ("down", 4096, 14336))  # of an 8B Llama
WIDTHS = (16, 4096, 14_336, 28_672)
COLUMNS = {"of a model": (128_256, 1), "of a head": (32_000, 4)}  # how many, and tokens to each
FP8_LIMIT = 5e-2  # sums of a GPU's fp8 are rounded on the way
FP8_GRAPH_LIMIT = 3e-1  # one bit of bfloat16 takes some numbers to the next of e4m3, which is up to an eighth away


def told(what: str, value: float, unit: str) -> None:
    """A line that ``make gpu`` puts into its table."""
    print(f"\n= {what} | {value:.3g} | {unit}")


def full(device: torch.device) -> bool:
    return device.type == "cuda"


def fields_of(device: torch.device) -> Fields:
    return SMALL if full(device) else TINY


def sizes_of(device: torch.device) -> Sequence[int]:
    return range(1, MOST_ROWS + 1) if full(device) else (1, 2, 5, 8)


def subject_of(fields: Fields, dtype: torch.dtype, device: torch.device, slots: int) -> Subject:
    config = config_of(fields)
    tensors = random_tensors(decoder_shapes(config), torch.bfloat16, REFERENCE)
    ops = operations_for("auto", config, dtype, device)
    return Subject.of(Decoder(config, tensors, dtype, device, ops), slots)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_those_of_float64(device: torch.device, dtype: str) -> None:
    slots, fields = 2 * (sum(LENGTHS) + sum(TREES)), fields_of(device)
    right = subject_of(fields, torch.float64, REFERENCE, slots)
    subject = subject_of(fields, DTYPES[dtype], device, slots)
    for kind, builder in scripted(right.model.config.vocab_size, slots):
        reference, found = right.logits(builder), subject.logits(builder)
        error = relative(found, reference)
        same = float((found.argmax(1) == reference.argmax(1)).double().mean())
        told(f"{dtype} {kind}: largest error", float(error.max()), "rms")
        told(f"{dtype} {kind}: mean error", float(error.mean()), "rms")
        told(f"{dtype} {kind}: rows with the same best token", same, "share")
        assert float(error.max()) <= LIMITS[dtype]


@pytest.mark.parametrize("kind", ["sessions", "nodes"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_heed_its_company(device: torch.device, dtype: str, kind: str) -> None:
    subject = subject_of(fields_of(device), DTYPES[dtype], device, (CONTEXT + 1) * MOST_ROWS)
    rows = list(sweep(subject, kind, sizes_of(device)))
    alone = rows[0][0]
    errors = [float(relative(row, alone).max()) for row, _ in rows]
    told(f"{dtype}, with other {kind}: largest change of a row", max(errors), "rms")
    told(f"{dtype}, with other {kind}: bit for bit as alone", sum(e == 0 for e in errors), f"of {len(rows)}")
    assert max(errors) <= LIMITS[dtype]
    assert all(int(row.argmax()) == int(alone.argmax()) for row, _ in rows), "another best token than alone"
    assert all(again for _, again in rows), "other bits when run again"


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (9, 3), (32, 8), (16, 2)])  # groups of 1, 3, 4 and 8
def test_attention_over_pages_is_that_of_float64(device: torch.device, heads: int, kv_heads: int) -> None:
    """Of random batches, over the same bfloat16 numbers."""
    longest = LONGEST if full(device) else 64
    for head_dim in (64, 128) if full(device) else (16,):
        config = config_of(fields_of(device) | {"head_dim": head_dim, "num_attention_heads": heads,
                                                "num_key_value_heads": kv_heads})
        slots, worst, attention = 6 * longest + 200, 0.0, paged_attention(StageOptions(device), config)
        for seed in range(3):
            rng = np.random.default_rng(seed)
            batch = mixed(rng, slots, longest).build()
            kv = torch.full((slots, 2, kv_heads, head_dim), torch.nan, dtype=torch.bfloat16)
            known = rng.standard_normal((len(batch.kv_slots), *kv.shape[1:]), np.float32)
            kv[batch.kv_slots] = torch.from_numpy(known).bfloat16()
            q = torch.from_numpy(rng.standard_normal((batch.num_rows, heads, head_dim), np.float32)).bfloat16()
            right = TorchAttention(config, torch.float64).plan(batch)(q.double(), kv.double())
            there = ForwardBatch(batch.host, batch.q_indptr, batch.kv_indptr, batch.begins, batch.mask_lens,
                                 device)
            found = attention.plan(there)(q.to(device), kv.to(device)).to("cpu", torch.float64)
            distance = (found - right).norm(dim=1) / right.norm(dim=1)
            worst = max(worst, float(distance.nan_to_num_(nan=torch.inf).max()))
        told(f"{heads} heads on {kv_heads} of {head_dim}: largest error of a row", worst, "rms")
        assert worst <= KERNEL_LIMIT


@pytest.mark.parametrize(("kind", "in_8_bits"), [("sessions", False), ("nodes", False), ("nodes", True)])
def test_a_graph_computes_what_it_captured(device: torch.device, kind: str, in_8_bits: bool) -> None:
    config, options = config_of(fields_of(device)), StageOptions(device)
    attention, slots = paged_attention(options, config), (CONTEXT + 1) * MOST_ROWS
    tensors = random_tensors(decoder_shapes(config), torch.bfloat16, REFERENCE)
    ops = operations_for("auto", config, torch.bfloat16, device)
    model = Decoder(config, tensors, torch.bfloat16, device, ops, attention)
    if in_8_bits:
        with_fp8(model, rounding_for("auto", config, device))
    captured = GraphedDecoder(model, attention, capture_of(options))
    pairs = list(zip(sweep(Subject.of(Spoiling(captured), slots + captured.spare_slots), kind, sizes_of(device)),
                     sweep(Subject.of(model, slots), kind, sizes_of(device)), strict=True))
    worst = max(float(relative(found, right).max()) for (found, _), (right, _) in pairs)
    told(f"graph{' in 8 bits' * in_8_bits} against none, with other {kind}: largest change of a row", worst, "rms")
    assert worst <= (FP8_GRAPH_LIMIT if in_8_bits else LIMITS["bfloat16"])
    assert all(again for (_, again), _ in pairs), "other bits when replayed"


@pytest.mark.parametrize("shape", FUSED)
def test_fused_operations_are_torchs(device: torch.device, shape: str) -> None:
    """Of a row's largest number, in steps of bfloat16 there; what is not written where torch writes is infinite."""
    config, operations, largest = config_of(FUSED[shape] if full(device) else TINY), fused_operations(device), 0.0
    for rows in (1, 9, 64, 4096) if full(device) else (1, 9):
        for _, found, right in compared(operations, config, torch.bfloat16, device, rows):
            wide = right.float().nan_to_num(0.0)
            step = torch.finfo(torch.bfloat16).eps * wide.abs().amax(-1, keepdim=True).clamp(min=1e-30)
            off = (found.float().nan_to_num(0.0) - wide).abs() / step
            largest = max(largest, float(off.masked_fill(found.isnan() != right.isnan(), torch.inf).max()))
    told(f"fused, {shape}: largest difference", largest, "roundings")
    assert largest <= ROUNDINGS


@pytest.mark.parametrize("columns", WIDTHS)
def test_rounding_to_8_bits_is_torchs(device: torch.device, columns: int) -> None:
    differ, rounding = 0, rounded if fused_operations(device) is TORCH else triton_rounding()
    for _, found, right in rounded_rows(rounding, columns if full(device) else 64, device):
        differ += int((found != right).sum())
    told(f"rounding to 8 bits, {columns} columns: other bits", differ, "numbers")
    assert not differ


def race_of(device: torch.device, whose: str) -> races.DeviceRace | Specified:
    width, each = COLUMNS[whose] if full(device) else (300, COLUMNS[whose][1])
    vocabulary = None if each == 1 else each * torch.arange(width, device=device) + 1
    return device_race(device, width, vocabulary) or Specified(width, vocabulary)


@pytest.mark.parametrize("whose", COLUMNS)
def test_kernels_choose_what_torch_does(device: torch.device, whose: str) -> None:
    race = race_of(device, whose)
    for rows in (1, 9, 64) if full(device) else (1, 9):
        for what, found, right in races.compared(race, device, rows):
            off = float((found - right).abs().nan_to_num(nan=torch.inf).max())
            told(f"{what}, {rows} rows {whose}: largest difference", off, "")
            assert off <= races.NEAR


def test_a_choice_by_kernels_does_not_heed_its_company(device: torch.device) -> None:
    """Sampled rows as a model's, each alone and among others, some of which kernels leave."""
    race, count = race_of(device, "of a model"), MOST_ROWS if full(device) else 6
    logits = zipf_logits(count, race.width).to(device)
    logits[1, 7], logits[2] = torch.nan, -torch.inf
    drawn, filtered = (choice_rows(Sampling(temperature=0.8, top_p=top_p, seed=5), count // 2, 2)[part]
                       for part, top_p in enumerate((1.0, 0.9)))
    together = choose(logits, [drawn, filtered], None, race)
    assert together == choose(logits, [drawn, filtered]) and together[2] == 0
    for row in drawn.rows:
        alone = replace(drawn.part(slice(row, row + 1)), rows=range(1))
        assert choose(logits[row : row + 1], [alone], None, race) == together[row : row + 1]


def test_children_by_kernels_can_be_captured(device: torch.device) -> None:
    race, rows, k = race_of(device, "of a head"), 8, 8
    logits, ids = torch.zeros(rows, race.width, device=device), torch.zeros(rows, k, dtype=torch.int64, device=device)
    replay = capture_of(StageOptions(device))(lambda: ids.copy_(race.children(logits, k)[0]))
    for seed in range(3):
        logits.copy_(zipf_logits(rows, race.width, seed))
        replay()
        assert torch.equal(ids, races.children(logits, k, race.vocabulary)[0])


@pytest.mark.parametrize(("name", "rows", "columns"), PRODUCTS)
def test_products_in_8_bits_are_their_specification(device: torch.device, name: str, rows: int, columns: int) -> None:
    rows, columns = (rows, columns) if full(device) else (48, 32)
    rng = torch.Generator(device).manual_seed(0)

    def numbers(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rounded(torch.randn(count, columns, dtype=torch.bfloat16, device=device, generator=rng))

    weight = numbers(rows)
    for count in (1, 64):
        x = numbers(count)
        right = reference_product(*(part.cpu() for part in (*x, *weight))).float()
        off = (gpu_product(*x, *weight).cpu().float() - right).abs() / right.square().mean(1, keepdim=True).sqrt()
        worst = float(off.nan_to_num_(nan=torch.inf).max())
        told(f"fp8, {name}, {count} rows: largest error", worst, "rms")
        assert worst <= FP8_LIMIT


def test_a_model_of_transformers_is_on_a_device_what_it_is_on_a_cpu(device: torch.device, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder, worst = write_folder(tmp_path, fields_of(device)), 0.0
    subjects = [Subject.of(load_model(folder, ModelSection(engine="hf", dtype="float32", device=place)), SLOTS)
                for place in ("cpu", device.type)]
    for _, builder in scripted(subjects[0].model.config.vocab_size, SLOTS):
        right, found = (subject.logits(builder) for subject in subjects)
        worst = max(worst, float(relative(found, right).max()))
    told("engine hf, float32: largest error", worst, "rms")
    assert worst <= LIMITS["float32"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_devices_compute_what_one_does(device: torch.device, dtype: str, tmp_path: Path) -> None:
    if full(device) and torch.cuda.device_count() < RANKS:
        pytest.skip(f"{RANKS} GPUs are needed")
    folder = write_folder(tmp_path, fields_of(device))
    one = graphed(load_model(folder, ModelSection(dtype=dtype, device=device.type)))
    two = ranked_model(folder, ModelSection(dtype=dtype, device=device.type, tensor_parallel=RANKS))

    def logits(model: CausalModel) -> list[torch.Tensor]:
        subject = Subject.of(model, SLOTS + PADDING)
        return [subject.logits(batch) for _, batch in scripted(model.config.vocab_size, SLOTS)]

    try:
        worst = max(float(relative(found, right).max()) for found, right in zip(logits(two), logits(one), strict=True))
    finally:
        two.close()
    told(f"{RANKS} devices, {dtype}: largest error of a row", worst, "rms")
    assert worst <= LIMITS[dtype]


def test_a_row_that_reads_foreign_slots_is_seen() -> None:
    subject = subject_of(TINY, torch.float32, REFERENCE, SLOTS)
    (_, prefill), (_, decode), _ = list(scripted(subject.model.config.vocab_size, SLOTS))
    subject.logits(prefill)
    assert not bool(subject.logits(decode).isnan().any())
    decode.kv_slots[0] = decode.kv_slots[0].copy()
    decode.kv_slots[0][0] = next(s for s in range(SLOTS) if bool(subject.pool.kv[0, s].isnan().any()))
    assert bool(subject.logits(decode)[0].isnan().all())


def test_a_row_that_heeds_its_company_is_seen() -> None:
    class Heeding(Decoder):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().logits(hidden) + len(hidden)

    config = config_of(TINY)
    tensors = random_tensors(decoder_shapes(config), torch.float32, REFERENCE)
    model = Heeding(config, tensors, torch.float32, REFERENCE)
    subject = replace(subject_of(TINY, torch.float32, REFERENCE, SLOTS), model=model)
    alone, together = (row for row, _ in sweep(subject, "nodes", (1, 4)))
    assert float((together - alone).abs().max()) > 1
