from __future__ import annotations

import itertools
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from router_service.text.tokens import TextCodec
from slipstream.base.config import ModelSection
from slipstream.base.errors import CapacityError, ModelError
from slipstream.drafting.heads.target_checkpoint import TargetCheckpoint
from slipstream.engine.attention import TorchAttention
from slipstream.engine.batch import BatchBuilder, rows_batch
from slipstream.engine.decoder import Decoder, Split
from slipstream.engine.device import cores, default_slots, limited_memory
from slipstream.engine.kv import KVPool
from slipstream.engine.loading import load_model
from slipstream.engine.model import ModelConfig, dtype_of, load_tensors, parse_config, tensor_names
from slipstream.engine.ops.layer import TORCH, DecoderLayer, LayerWeights, Linear, Rope, Step, linear, rms_norm
from slipstream.engine.runner import ModelRunner
from slipstream.models.folder import load_tokenizer
from tests.sequences import NOTHING, run, run_tree
from tests.tiny import EOS, KINDS, VOCAB, store_as_the_head, tiny_config, tiny_tensors, write_tiny_model
from tests.trees import random_tree

TEXT = list(b"A draft tree is a tree of draft tokens.")


@pytest.fixture(params=KINDS)
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> ModelRunner:
    return ModelRunner(load_model(write_tiny_model(tmp_path, request.param), ModelSection(dtype="float64")), 512)


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def test_chunks_and_steps_give_what_one_prefill_gives(runner: ModelRunner) -> None:
    whole, _ = run(runner, TEXT)
    slots, rows = NOTHING, []
    for chunk in (TEXT[:5], TEXT[5:6], TEXT[6:30], *([token] for token in TEXT[30:])):
        logits, slots = run(runner, chunk, slots)
        rows.append(logits)
    assert far(torch.cat(rows), whole) < 1e-12


def test_every_path_of_a_tree_gives_what_it_gives_alone(runner: ModelRunner) -> None:
    for seed in range(3):
        tree = random_tree(np.random.default_rng(seed), 12, base=len(TEXT), vocab=VOCAB)
        context = run(runner, TEXT[:-1])[1]
        logits, slots = run_tree(runner, tree, context)
        runner.slots.free(slots)
        for node in range(len(tree)):
            path = tree.path(node)
            alone, behind = run(runner, [tree.tokens[at] for at in path], context)
            assert far(logits[path], alone) < 1e-12, f"seed {seed} node {node}"
            runner.slots.free(behind[len(context):])


def test_an_accepted_path_is_context_without_moving(runner: ModelRunner) -> None:
    tree = random_tree(np.random.default_rng(4), 10, base=len(TEXT), vocab=VOCAB)
    context = run(runner, TEXT[:-1])[1]
    slots = run_tree(runner, tree, context)[1]
    path = tree.path(len(tree) - 1)
    after, _ = run(runner, [65, 66], np.concatenate([context, slots[path]]))
    expected, _ = run(runner, [*TEXT[:-1], *[tree.tokens[at] for at in path], 65, 66])
    assert far(after, expected[-2:]) < 1e-12


def test_segments_of_one_batch_do_not_see_each_other(runner: ModelRunner) -> None:
    builder, texts = BatchBuilder(), (TEXT, TEXT[3:17], TEXT[20:], TEXT[9:21])
    for text in texts:
        builder.add(text, range(len(text)), runner.slots.alloc(len(text)).tolist(), NOTHING, logits="last")
    together = runner.forward(builder.build())
    alone = torch.cat([run(runner, text)[0][-1:] for text in texts])
    assert together.shape == (4, VOCAB) and far(together, alone) < 1e-12


def test_taps_follow_the_convention_and_are_read_by_slot(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, ModelSection(dtype="float64"))
    assert isinstance(model, Decoder)
    runner = ModelRunner(model, 128)
    runner.set_taps((0, 1, 2))
    logits, slots = run(runner, TEXT)
    rows = runner.features(slots)
    assert rows.shape == (len(TEXT), 3 * 48)
    entering, middle, final = rows.view(-1, 3, 48).unbind(1)
    assert torch.equal(entering, model._embedding[TEXT])
    assert far(model.logits(final), logits) < 1e-12
    assert far(middle, entering) > 0.1 and far(middle, final) > 0.1
    assert torch.equal(runner.features(slots[[7, 3]]), rows[[7, 3]])
    runner.set_taps(())
    assert runner.taps == ()
    run(runner, TEXT)


class Watched:
    """Operations that know how many of the states that they gave are still there."""

    name = "watched"

    def __init__(self) -> None:
        self.given, self.most = list[weakref.ref[torch.Tensor]](), 0

    def before_attention(self, layer: LayerWeights[Linear], read: torch.Tensor, step: Step,
                         kv: torch.Tensor) -> torch.Tensor:
        return TORCH.before_attention(layer, read, step, kv)

    def after_attention(self, layer: LayerWeights[Linear], x: torch.Tensor, attended: torch.Tensor,
                        norm: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out, normed = TORCH.after_attention(layer, x, attended, norm)
        self.given.append(weakref.ref(out))
        self.most = max(self.most, sum(state() is not None for state in self.given))
        return out, normed


@pytest.mark.parametrize(("taps", "kept"), [((), 0), ((1, 3), 2), ((4, 8), 1)])
def test_a_step_keeps_no_states_that_nobody_reads(tmp_path: Path, taps: tuple[int, ...], kept: int) -> None:
    folder, ops = write_tiny_model(tmp_path, num_hidden_layers=8), Watched()
    config = ModelConfig.from_folder(folder)
    model = Decoder(config, load_tensors(folder), torch.float32, torch.device("cpu"), ops)
    builder = BatchBuilder()
    builder.add(TEXT, range(len(TEXT)), range(len(TEXT)), NOTHING)
    model.forward(builder.build(), KVPool(8, 64, config.num_kv_heads, config.head_dim, torch.float32), taps)
    assert ops.most == kept + 2, "what a layer reads, and what it gives"


def test_every_sum_is_one_operation_with_the_norm_behind_it(tiny_folder: Path) -> None:
    sums = []

    def add_norm(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        sums.append(weight)
        return TORCH.add_norm(x, added, weight, eps)

    config, tensors = ModelConfig.from_folder(tiny_folder), load_tensors(tiny_folder)
    model = Decoder(config, tensors, torch.float32, torch.device("cpu"), replace(TORCH, add_norm=add_norm))
    pool = KVPool(2, 64, config.num_kv_heads, config.head_dim, torch.float32)
    model.forward(rows_batch(np.arange(5), torch.device("cpu")), pool)
    names = [f"layers.{i}.{norm}" for i in range(2) for norm in ("input_layernorm", "post_attention_layernorm")]
    wanted = [tensors[f"model.{name}.weight"] for name in (*names[1:], "norm")]
    assert all(torch.equal(found, right) for found, right in zip(sums, wanted, strict=True))


def test_a_layer_may_read_a_wider_input(tiny_folder: Path) -> None:
    config = ModelConfig.from_folder(tiny_folder)
    tensors = {name: t.double() for name, t in load_tensors(tiny_folder).items()}
    wide = dict(tensors)
    for name in "qkv":
        key = f"model.layers.0.self_attn.{name}_proj.weight"
        wide[key] = torch.cat((tensors[key], tensors[key]), -1)
    builder = BatchBuilder()
    builder.add(TEXT, range(len(TEXT)), range(len(TEXT)), NOTHING)
    batch = builder.build()
    step = Step.of(batch, Rope(config, torch.float64, torch.device("cpu")), TorchAttention(config, torch.float64))
    pool = KVPool(2, 64, 2, 12, torch.float64)
    x = torch.randn(len(TEXT), 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    narrow = LayerWeights.from_tensors(config, tensors, "model.layers.0", linear)
    wide_layer = DecoderLayer(LayerWeights.from_tensors(config, wide, "model.layers.0", linear, 96, False), TORCH)
    narrow_layer = DecoderLayer(narrow, TORCH)
    normed = narrow_layer.norm_input(x)
    expected, _ = narrow_layer(x, normed, step, pool.kv[0])
    assert narrow.norm is not None and torch.equal(normed, rms_norm(x, narrow.norm, config.norm_eps))
    halves = torch.cat((normed * 0.25, normed * 0.75), -1)
    found, same = wide_layer(x, halves, step, pool.kv[1])
    assert far(found, expected) < 1e-12 and same is found
    _, behind = wide_layer(x, halves, step, pool.kv[1], narrow.post_norm)
    assert torch.equal(behind, rms_norm(found, narrow.post_norm, config.norm_eps))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 1.5)])
def test_lower_precision_stays_close(tiny_folder: Path, dtype: str, tolerance: float) -> None:
    exact, _ = run(ModelRunner(load_model(tiny_folder, ModelSection(dtype="float64")), 64), TEXT)
    low, _ = run(ModelRunner(load_model(tiny_folder, ModelSection(dtype=dtype)), 64), TEXT)
    assert low.dtype == torch.float32
    assert far(low.double(), exact) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_linear_equals_plain(dtype: torch.dtype, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 24, generator=generator).to(dtype)
    bias = torch.randn(40, generator=generator).to(dtype) if with_bias else None
    for rows in (1, 3, 17):
        x = torch.randn(rows, 24, generator=generator).to(dtype)
        assert far(Linear(weight, bias)(x).double(), F.linear(x, weight, bias).double()) < 40 * torch.finfo(dtype).eps


def test_a_linear_is_not_packed_where_onednn_refuses_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> NoReturn:
        raise RuntimeError("bf16 path needs the cpu support avx512bw")

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refused)
    weight, x = torch.randn(40, 24).bfloat16(), torch.randn(3, 24).bfloat16()
    assert torch.equal(Linear(weight)(x), F.linear(x, weight))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_chunk_that_wants_no_logits_gets_none(tiny_folder: Path, dtype: str) -> None:
    runner = ModelRunner(load_model(tiny_folder, ModelSection(dtype=dtype)), 64)
    builder = BatchBuilder()
    builder.add(TEXT, range(len(TEXT)), runner.slots.alloc(len(TEXT)).tolist(), NOTHING, logits="none")
    assert runner.forward(builder.build()).shape == (0, VOCAB)


def test_profile_measures_and_frees(tiny_folder: Path) -> None:
    runner = ModelRunner(load_model(tiny_folder, ModelSection(dtype="float32")), 140)
    costs, read_s = runner.profile((1, 4, 8, 64))
    assert list(costs) == [1, 4, 8] and all(seconds > 0 for seconds in costs.values())
    assert read_s == 0.0, "no long text has room"
    runner.slots.check([])


def test_a_slow_moment_makes_no_row_count_a_bargain(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def seconds(_: ModelRunner, slots: NDArray[np.int64], count: int) -> float:
        return count * (5.0 if 6 <= next(calls) < 12 else 1.0)

    monkeypatch.setattr(ModelRunner, "_time_step", seconds)
    runner = ModelRunner(load_model(tiny_folder, ModelSection(dtype="float32")), 200)
    assert runner.profile((1, 4, 8))[0] == {1: 1.0, 4: 4.0, 8: 8.0}


@pytest.mark.parametrize(("step_s", "turns"), [(0.001, 6), (0.5, 4), (60.0, 2)])
def test_a_slow_model_is_measured_less_often(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, step_s: float,
                                             turns: int) -> None:
    now_s, counts = [0.0], list[int]()

    def seconds(_: ModelRunner, slots: NDArray[np.int64], count: int) -> float:
        now_s[0] += step_s
        counts.append(count)
        return step_s

    monkeypatch.setattr(ModelRunner, "_time_step", seconds)
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])
    model = load_model(tiny_folder, ModelSection(dtype="float32"))
    costs, _ = ModelRunner(model, 2048).profile((1, 4, 8))
    assert costs == dict.fromkeys((1, 4, 8), step_s) and counts.count(4) == turns


def test_a_profile_says_what_a_row_takes_longer_behind_a_long_text(tiny_folder: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(_: ModelRunner, slots: NDArray[np.int64], count: int) -> float:
        return 1.0 + 0.1 * count + (1e-3 + 1e-4 * (count - 1)) * (len(slots) - count)

    monkeypatch.setattr(ModelRunner, "_time_step", seconds)
    costs, read_s = ModelRunner(load_model(tiny_folder, ModelSection(dtype="float32")), 2048).profile((1, 4))
    assert list(costs) == [1, 4] and read_s == pytest.approx(1e-4)


@pytest.mark.parametrize(("name", "section"), [
    ("model.layers.1.mlp.up_proj.weight", ModelSection(dtype="float32")),
    ("lm_head.weight", ModelSection(dtype="float64", engine="hf")),
    ("model.layers.0.self_attn.v_proj.weight", ModelSection(dtype="bfloat16"))])
def test_a_model_that_gives_no_numbers_does_not_start(tmp_path: Path, name: str, section: ModelSection) -> None:
    folder = write_tiny_model(tmp_path, hidden_size=64, head_dim=32)
    tensors = load_file(folder / "model.safetensors")
    tensors[name][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"logits are NaN.*its tensors hold NaN"):
        ModelRunner(load_model(folder, section), 400).profile((1,))


def test_weights_that_the_dtype_cannot_hold_do_not_start(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1e6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ModelRunner(load_model(folder, ModelSection(dtype="float32")), 400).profile((1,))
    with pytest.raises(ModelError, match=r"numbers that float16 \(model\.dtype\) cannot hold"):
        ModelRunner(load_model(folder, ModelSection(dtype="float16")), 400).profile((1,))


def test_slots_are_sized_by_sessions_and_memory(tiny_folder: Path) -> None:
    config = ModelConfig.from_folder(tiny_folder)
    assert default_slots(config, torch.float32, 4, max_context=100) == 400
    assert default_slots(config, torch.float32, 3) == 3 * 1024, "few answers use the whole context"
    assert default_slots(config, torch.float32, 1) == 2048, "but each may"
    assert default_slots(config, torch.float32, 10**9, share=0.0) == 1024


def test_a_container_has_less_than_its_machine(tmp_path: Path) -> None:
    assert limited_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("4000\n")
    (tmp_path / "memory.current").write_text("1700\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 500\nactive_file 100\nshmem 90\n")
    assert limited_memory(tmp_path) == (4000 - 1100, 4000)
    (tmp_path / "memory.max").write_text("max\n")
    assert limited_memory(tmp_path) is None
    usable = cores(tmp_path)
    for quota, least in (("150000", 1), ("50000", 1), ("max", usable), (f"{(usable + 7) * 100000}", usable)):
        (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
        assert cores(tmp_path) == least


def test_a_container_of_an_older_system_has_less_than_its_machine_too(tmp_path: Path) -> None:
    """Control groups of version 1, as on many nodes before Kubernetes 1.31."""
    def write(**files: str) -> None:
        for name, text in files.items():
            kind = name.partition("_")[0]
            (tmp_path / kind).mkdir(exist_ok=True)
            (tmp_path / kind / name.replace("_", ".", 1)).write_text(text + "\n")

    write(memory_limit_in_bytes="4000", memory_usage_in_bytes="1700",
          memory_stat="inactive_file 7\ntotal_rss 1000\ntotal_inactive_file 500\ntotal_active_file 100")
    assert limited_memory(tmp_path) == (4000 - 1100, 4000)
    write(memory_limit_in_bytes="9223372036854771712")
    assert limited_memory(tmp_path) is None
    usable = cores(tmp_path)
    for quota, least in (("150000", 1), ("50000", 1), ("-1", usable), (f"{(usable + 7) * 100000}", usable)):
        write(cpu_cfs_quota_us=quota, cpu_cfs_period_us="100000")
        assert cores(tmp_path) == least


def test_a_full_pool_says_so(tiny_folder: Path) -> None:
    with pytest.raises(CapacityError, match="KV slots"):
        run(ModelRunner(load_model(tiny_folder, ModelSection(dtype="float32")), 8), TEXT)


def test_end_tokens_are_those_that_end_a_router_s_answers(tmp_path: Path) -> None:
    """The tokenizer's, too: train-head and tune took text behind the end of a turn for the answer."""
    folder = write_tiny_model(tmp_path, eos_token_id=[7, 9])
    for said, wanted in (({"eos_token_id": [3, 5]}, (3, 5, EOS)), ({}, (7, 9, EOS))):
        (folder / "generation_config.json").write_text(json.dumps(said))
        assert ModelConfig.from_folder(folder).eos_token_ids == TextCodec(folder).stop_token_ids == wanted
    (folder / "tokenizer.json").unlink()
    assert ModelConfig.from_folder(folder).eos_token_ids == (7, 9)


@pytest.mark.parametrize("ids", [-1, [5, 10**30], [True], ["7"], {"id": 7}, 1 << 24])
def test_end_tokens_that_no_vocabulary_has_are_refused(tmp_path: Path, ids: object) -> None:
    folder = write_tiny_model(tmp_path, eos_token_id=ids)
    with pytest.raises(ModelError, match=r"config\.json: eos_token_id: expected token ids"):
        ModelConfig.from_folder(folder)


def test_rope_fields_of_old_and_new_configs() -> None:
    new = parse_config(tiny_config(rope_parameters={"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}), "c")
    old = tiny_config(rope_theta=5.0, rope_scaling={"type": "linear", "factor": 2.0})
    del old["rope_parameters"]
    assert parse_config(old, "c") == new
    assert new.rope_theta == 5.0 and new.rope_scaling is not None and new.rope_scaling.factor == 2.0


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(("changes", "context"), [
    ({}, 4096), ({"factor": 1.5}, 2048), ({"factor": 1e11}, 1 << 24), ({"rope_type": "linear"}, 2048)])
@pytest.mark.parametrize("engine", ["decoder", "hf"])
def test_yarn_makes_room_for_what_it_stretches_positions_to(tmp_path: Path, engine: Literal["decoder", "hf"],
                                                            changes: dict[str, Any], context: int) -> None:
    """As it is written into a config.json by hand: Qwen's cards say nothing of max_position_embeddings."""
    rope = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024} | changes
    folder = write_tiny_model(tmp_path, "qwen3", rope_parameters=rope, max_position_embeddings=2048)
    model = load_model(folder, ModelSection(dtype="float32", engine=engine))
    assert model.config.max_context == context


@pytest.mark.parametrize("changes", [
    {"rope_parameters": YARN | {"rope_theta": 5e5}, "rope_scaling": YARN, "rope_theta": 5e5},
    {"rope_parameters": YARN | {"rope_theta": 5e5}, "rope_scaling": None},
    {"rope_parameters": {}, "rope_scaling": YARN, "rope_theta": 5e5},
    {"rope_parameters": YARN | {"rope_theta": 5e5}, "original_max_position_embeddings": 256},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5},
     "original_max_position_embeddings": 256},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 5e5}, "max_position_embeddings": 99}])
def test_positions_turn_as_in_transformers(changes: dict[str, Any]) -> None:
    raw = tiny_config("qwen3", **changes)
    config: Any = AutoConfig.for_model(**json.loads(json.dumps(raw)))
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float64), torch.arange(99)[None])
    ours = Rope(parse_config(raw, "c"), torch.float64, torch.device("cpu")).rows(torch.arange(99))
    assert far(ours[0][:, 0], theirs[0][0]) < 1e-4  # angles of up to 99 in float32


@pytest.mark.parametrize(("said", "factor"), [
    ({}, 1.1386294361119891), ({"attn_factor": 0.8782488562869419}, 1.0), ({"attention_factor": 0.9}, 0.9)])
def test_yarn_scales_attention_as_it_is_published(said: dict[str, float], factor: float) -> None:
    """The second is DeepSeek-R1-0528-Qwen3-8B."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, **said}
    config = parse_config(tiny_config("qwen3", rope_parameters=None, rope_scaling=rope, rope_theta=1e6), "c")
    assert config.rope_scaling is not None and config.rope_scaling.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("changes", [{"beta_slow": 5e-324, "beta_fast": 9e11}, {"beta_fast": 5e-324}, {"factor": 1e11},
                                     {"rope_theta": 1.0000000001}, {"original_max_position_embeddings": 1}])
def test_yarn_of_any_numbers_turns_by_numbers(changes: dict[str, float]) -> None:
    config = parse_config(tiny_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, **changes}), "c")
    cos, sin = Rope(config, torch.float64, torch.device("cpu")).rows(torch.arange(99))
    assert bool(cos.isfinite().all()) and bool(sin.isfinite().all())


@pytest.mark.parametrize(("changes", "message"), [
    ({"model_type": "gpt2"}, "model_type: 'gpt2' is not one of"),
    ({"model_type": ["llama"]}, r"model_type: \['llama'\] is not one of"),
    ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
    ({"hidden_size": "48"}, "hidden_size: expected a number"),
    ({"vocab_size": None}, "vocab_size: expected a number"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"rms_norm_eps": -1}, "rms_norm_eps: expected a positive number"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type: 'longrope' is not supported"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type: 'yarn' is not supported"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, "factor: expected a positive number"),
    ({"rope_parameters": {"rope_type": "yarn", "mscale": -1, "mscale_all_dim": 1}}, "mscale: expected a positive"),
    ({"rope_scaling": YARN}, "rope_scaling: it says other positions than rope_parameters"),
    ({"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}}, "rope_scaling: it says other positions"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
     "rope_parameters: full_attention: positions for each kind of layer are not supported"),
    ({"rope_parameters": None, "rope_theta": 0}, "rope_theta: expected a positive number, found 0"),
    ({"original_max_position_embeddings": "1", "rope_parameters": YARN}, "original_max_position_embeddings: expected"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial_rotary_factor: 0.25 is not"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false"),
])
def test_a_config_that_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"folder/config.json: .*{message}"):
        parse_config(tiny_config(**changes), "folder/config.json")


def test_an_embedding_model_made_of_a_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is_causal: False is not supported"):
        load_model(write_tiny_model(tmp_path / "decoder", "qwen2", is_causal=False), ModelSection())
    with pytest.raises(ModelError, match="a prompt differs"):
        load_model(tmp_path / "decoder", ModelSection(engine="hf"))


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        load_model(tmp_path, ModelSection())
    folder = write_tiny_model(tmp_path)
    with pytest.raises(ModelError, match="dtype 'int3' is not known"):
        dtype_of("int3")
    with pytest.raises(ModelError, match="device 'abacus' is not known; write cpu, or cuda"):
        load_model(folder, ModelSection(device="abacus"))
    with pytest.raises(ModelError, match="device 'meta' cannot be used here"):  # it gives memory, and computes nothing
        load_model(folder, ModelSection(device="meta"))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "layers.1.mlp.up" not in name}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"^{folder}: tensor model.layers.1.mlp.up_proj.weight is missing"):
        load_model(folder, ModelSection())
    save_file(tensors | {"model.norm.weight": torch.ones(47)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(47,\), expected \(48,\)"):
        load_model(folder, ModelSection())
    (folder / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ModelError, match="not readable as safetensors"):
        load_model(folder, ModelSection())


def test_a_model_of_pickles_is_told_how_to_be_converted(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle, .*save_file"):
        load_model(folder, ModelSection())


def test_a_clone_without_git_lfs_is_told_what_it_lacks(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (folder / "model.safetensors").write_text(pointer)
    with pytest.raises(ModelError, match=r"model\.safetensors: .*run 'git lfs pull' in "):
        load_model(folder, ModelSection())
    (folder / "tokenizer.json").write_text(pointer)
    for read in (load_tokenizer, ModelConfig.from_folder):
        with pytest.raises(ModelError, match=r"tokenizer\.json: .*run 'git lfs pull' in "):
            read(folder)


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    whole = load_tensors(folder)
    halves = (dict(list(whole.items())[:9]), dict(list(whole.items())[9:]))
    (folder / "model.safetensors").unlink()
    for i, half in enumerate(halves):
        save_file(half, folder / f"shard-{i}.safetensors")
    index = {name: f"shard-{i}.safetensors" for i, half in enumerate(halves) for name in half}
    where = folder / "model.safetensors.index.json"
    where.write_text(json.dumps({"weight_map": index}))
    assert all(torch.equal(t, whole[name]) for name, t in load_tensors(folder).items())
    name = next(iter(halves[0]))
    save_file(halves[1] | {name: torch.zeros(3)}, folder / "shard-1.safetensors")
    assert torch.equal(load_tensors(folder)[name], whole[name]), "an older shard holds another of that name"
    where.write_text(json.dumps({"weight_map": index | {"lost.weight": "shard-0.safetensors"}}))
    with pytest.raises(ModelError, match=r"lost\.weight is in the index"):
        load_tensors(folder)
    where.write_text(json.dumps({"weight_map": {"x": "../shard-0.safetensors"}}))
    with pytest.raises(ModelError, match="not the name of a file"):
        load_tensors(folder)
    where.write_text(json.dumps({"weight_map": {"x": "x" * 5000}}))
    with pytest.raises(ModelError, match=r"not readable as safetensors: .*too long|no such file"):
        load_tensors(folder)


def test_shards_without_their_index_are_read_as_vllm_reads_them(tmp_path: Path) -> None:
    """``hf download --include '*.safetensors'`` leaves it out: that there is no model.safetensors helped nobody."""
    folder = write_tiny_model(tmp_path)
    whole = load_tensors(folder)
    save_file(dict(list(whole.items())[:9]), folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors").rename(folder / "old.safetensors")
    with pytest.raises(ModelError, match=r"tensor .* is missing"):
        load_model(folder, ModelSection())
    save_file(dict(list(whole.items())[9:]), folder / "model-00002-of-00002.safetensors")
    assert tensor_names(folder) == whole.keys()
    assert all(torch.equal(t, whole[name]) for name, t in load_tensors(folder).items())
    load_model(folder, ModelSection())


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    tied = load_model(write_tiny_model(tmp_path, tie_word_embeddings=True), ModelSection(dtype="float64"))
    assert isinstance(tied, Decoder)
    rows = tied._embedding[[3, 5]]
    assert far(tied.logits(rows), rows @ tied._embedding.T) < 1e-12


@pytest.mark.parametrize("engine", ["decoder", "hf"])
def test_a_tied_embedding_may_be_stored_as_the_head(tmp_path: Path, engine: Literal["decoder", "hf"]) -> None:
    folder = write_tiny_model(tmp_path, tie_word_embeddings=True)

    def logits() -> torch.Tensor:
        return run(ModelRunner(load_model(folder, ModelSection(dtype="float64", engine=engine)), 64), TEXT)[0]

    usual = logits()
    store_as_the_head(folder)
    assert torch.equal(logits(), usual)
    lent, embedding = TargetCheckpoint.of(folder), load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(lent.embedding(48), embedding) and torch.equal(lent.lm_head(), embedding)


def test_an_embedding_that_is_not_tied_is_missed(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight is missing"):
        load_model(folder, ModelSection(dtype="float64"))
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight is missing"):
        TargetCheckpoint.of(folder).embedding(48)


def test_a_window_hides_what_is_older(tmp_path: Path) -> None:
    config = tiny_config("mistral", sliding_window=64, num_hidden_layers=1)
    assert "lm_head.weight" in tiny_tensors(config)
    folder = write_tiny_model(tmp_path, "mistral", sliding_window=64, num_hidden_layers=1)
    runner = ModelRunner(load_model(folder, ModelSection(dtype="float64")), 512)
    text = np.random.default_rng(0).integers(VOCAB, size=100).tolist()
    last = run(runner, text)[0][-1]
    assert far(run(runner, [5] * 36 + text[36:])[0][-1], last) < 1e-12
    assert far(run(runner, [5] * 37 + text[37:])[0][-1], last) > 1e-6


def test_what_a_layer_is_merged_of_is_gone_before_the_next(tiny_folder: Path) -> None:
    """A device that holds most of its memory's worth of weights has no room for what they were made of."""
    placed: list[tuple[str, weakref.ref[torch.Tensor]]] = []
    beside: set[str] = set()

    class Stored(torch.Tensor):
        name = ""

        def to(self, *where: Any, **how: Any) -> torch.Tensor:
            layer = ".".join(self.name.split(".")[:3]) + "."
            beside.update(other for other, of in placed
                          if of() is not None and "q_proj" in other and layer not in other)
            copy = self.as_subclass(torch.Tensor).to(*where, **how)
            placed.append((self.name, weakref.ref(copy)))
            return copy

    def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
        stored = tensor.as_subclass(Stored)
        stored.name = name
        return stored

    Decoder(ModelConfig.from_folder(tiny_folder), load_tensors(tiny_folder), torch.float64, torch.device("cpu"),
            split=Split(part))
    assert sum("q_proj" in name for name, _ in placed) > 1 and not beside


def test_a_device_is_given_nothing_that_a_decoder_does_not_read(tmp_path: Path) -> None:
    """Layers for a draft, a head that the embedding stands for: gigabytes, beside a model that just fits."""
    tensors = load_tensors(write_tiny_model(tmp_path, tie_word_embeddings=True))
    names = ("lm_head.weight", "model.mtp_layers.0.input_proj.weight")
    more = dict.fromkeys(names, tensors["model.embed_tokens.weight"])
    placed = set[str]()

    def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
        placed.add(name)
        return tensor

    Decoder(ModelConfig.from_folder(tmp_path), tensors | more, torch.float64, torch.device("cpu"), split=Split(part))
    assert placed == set(tensors)
