"""The CPU kernels: as near to float64 as torch's bfloat16, one order of sums, and what happens where there are none."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from psutil import Process

from slipstream.base.config import ModelSection
from slipstream.base.errors import ModelError
from slipstream.choosing.sampling import GREEDY, ChoiceRows, Draws, choose
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.int8 import rounded
from slipstream.engine.kv import KVPool
from slipstream.engine.loading import load_model
from slipstream.engine.model import parse_config
from slipstream.engine.native import compiled_kernels, native_or
from slipstream.engine.native.compiled_kernels import SOURCE, X86, build, file_name, kernels, kinds_of, processor
from slipstream.engine.native.decoder import NativeDecoder
from slipstream.engine.native.program import (
    BatchFrame,
    Frame,
    NativeHead,
    NativeLinear,
    Packed,
    Program,
    RopeTable,
    Screen,
    Team,
    draw_records,
)
from slipstream.engine.ops.layer import Heads, Linear, Rope
from slipstream.engine.runner import FeatureWriter, ModelRunner
from slipstream.protocol.messages import FeatureSpec, Projection
from slipstream.protocol.requests import Sampling
from slipstream.protocol.tree import DraftTree, walk
from tests.sequences import run, run_tree
from tests.tiny import VOCAB, tiny_config, write_tiny_model
from tests.trees import lucky_tree, random_shape, random_tree

SHAPE = {"hidden_size": 64, "intermediate_size": 176, "head_dim": 32}
TEXT = list(b"What a row computes is known from its own path alone, and from nothing else that happens to be there.")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}), "window": ("mistral", {"sliding_window": 70}), "biases": ("qwen2", {}),
    "norms": ("qwen3", {}), "tied, large groups": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 10,
                                                             "num_key_value_heads": 2, "head_dim": 96})}


# Flags of all kinds of processors whose instructions this one has, whoever made it, the compiler's default last.
ABLE = [flags for needed, flags in X86 if needed - {"AuthenticAMD"} <= processor()] + [()]


def named(flags: tuple[str, ...]) -> str:
    return " ".join(flag.removeprefix("-m").removeprefix("arch=") for flag in flags) or "any processor"


@pytest.fixture(scope="module", params=KINDS)
def runners(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRunner]:
    kind, changes = KINDS[request.param]
    folder = write_tiny_model(tmp_path_factory.mktemp("native"), kind, **{**SHAPE, **changes})
    models = {"native": load_model(folder, ModelSection(kernels="native")),
              "torch": load_model(folder, ModelSection(kernels="torch")),
              "exact": load_model(folder, ModelSection(dtype="float64"))}
    assert isinstance(models["native"], NativeDecoder)
    found = {name: ModelRunner(model, 512) for name, model in models.items()}
    for runner in found.values():
        runner.set_taps((0, 1, 2))
        runner.pool.kv.fill_(torch.nan)  # nothing is read that was not written
    return found


def error(of: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference, in units of the exact values' own."""
    return float((of.double() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())


def test_prompts_trees_and_features_are_as_near_to_float64_as_torch_is(runners: dict[str, ModelRunner]) -> None:
    logits: dict[str, torch.Tensor] = {}
    features: dict[str, torch.Tensor] = {}
    for name, runner in runners.items():
        whole, context = run(runner, TEXT)
        tree = random_tree(np.random.default_rng(3), 30, base=len(TEXT) + 1, vocab=VOCAB)
        logits[name] = torch.cat((whole, run_tree(runner, tree, context)[0]))
        features[name] = runner.features(context)
        runner.slots.free(context)
    for of in (logits, features):
        ours, theirs = (error(of[name], of["exact"].double()) for name in ("native", "torch"))
        assert ours < max(1.2 * theirs, 4e-3), f"native {ours:.1e}, torch {theirs:.1e}"


def test_states_of_a_layer_that_is_asked_for_twice_are_there_twice(runners: dict[str, ModelRunner]) -> None:
    """From a forward with scores and from one without."""
    runner, found = runners["native"], []
    for taps in ((1, 2), (1, 2, 1, 2)):
        runner.set_taps(taps)
        slots = runner.slots.alloc(3)
        builder = BatchBuilder()
        builder.add([1, 2, 3], range(3), slots.tolist(), np.zeros(0, np.int64))
        batch = builder.build()
        _, tapped = runner.model.forward(batch, runner.pool, taps)
        runner.logits_and_best(batch)
        assert tapped is not None
        found.append((tapped, runner.features(slots).clone()))
        runner.slots.free(slots)
    runner.set_taps((0, 1, 2))
    for once, twice in zip(*found, strict=True):
        assert torch.equal(twice, torch.cat((once, once), 1))


def test_rows_that_are_joined_on_their_way_are_those_that_are_joined_when_they_are_read(
        runners: dict[str, ModelRunner]) -> None:
    """Bit for bit, from a forward with scores and from one without; and they take no more memory than they have to."""
    runner, weight = runners["native"], torch.randn(64, 192, generator=torch.Generator().manual_seed(2)).bfloat16()
    content = weight.view(torch.uint8).numpy().tobytes()
    by = Projection(64, 192, "bfloat16", sha256(content).digest(), content)
    joined, raw = FeatureSpec((0, 1, 2), 64, "bfloat16", by), FeatureSpec((0, 1, 2), 192, "bfloat16")
    found, slots = list[bytes](), runner.slots.alloc(len(TEXT))
    builder = BatchBuilder()
    builder.add(TEXT, range(len(TEXT)), slots.tolist(), np.zeros(0, np.int64), logits="last")
    batch = builder.build()
    try:
        for spec, width in ((joined, 64), (raw, 192)):
            rows = runner.keep_features(spec)
            assert runner.features(slots).shape[1] == width
            assert runner.features_from(slots) == len(TEXT), "older rows are forgotten"
            runner.logits_and_best(batch, GREEDY)
            found.append(runner.feature_bytes(slots, rows))
            runner.keep_features(spec)
            assert runner.features_from(slots) == 0, "they are kept as before"
            runner.forward(batch)
            assert runner.feature_bytes(slots, rows) == found[-1]
        assert FeatureWriter(joined, runner.linear)(runner.features(slots)) == found[0]
        runner.keep_features(joined)
        for _ in range(2):  # a prompt that is scored, between two steps
            runner.logits_and_best(batch, GREEDY)
            runner.states(batch)
        assert isinstance(runner.model, NativeDecoder)
        held = {(taps.join is not None, scores) for taps, scores, _ in runner.model._prepared}
        assert held >= {(False, False), (True, True)}
        normed = replace(joined, projection=replace(by, norm_width=64, weights=content + content[:384]))
        runner.keep_features(normed)
        assert runner.features(slots).shape[1] == 192, "what norms stand before is joined when it is read"
    finally:
        runner.slots.free(slots)
        runner.set_taps((0, 1, 2))


def test_scored_says_what_forward_and_logits_say_bit_for_bit(runners: dict[str, ModelRunner]) -> None:
    runner = runners["native"]
    _, context = run(runner, TEXT)
    batches, held = [], [context]
    for seed, most in enumerate((1, 9, 30, 150)):
        builder, own = BatchBuilder(), runner.slots.alloc(64)
        held.append(own)
        tree = random_tree(np.random.default_rng(seed), min(most, 30), base=len(TEXT) + 1, vocab=VOCAB)
        builder.add(tree.tokens, [tree.base - 1 + level for level in tree.levels()],
                    own[: len(tree)].tolist(), context, tree.ancestors(), len(tree))
        if most > 30:  # prompts beside it, one with a last row that counts and more rows than buffers have
            more = runner.slots.alloc(90)
            held.append(more)
            builder.add(TEXT[:40], range(40), more[:40].tolist(), np.zeros(0, np.int64), logits="none")
            builder.add(TEXT[:50], range(50), more[40:].tolist(), np.zeros(0, np.int64), logits="last")
        batches.append(builder.build())
    for batch in batches:
        logits, features = runner.forward(batch), runner.features(batch.host.slots)
        runner.pool.kv[:, batch.slots] = torch.nan
        again, best = runner.logits_and_best(batch)
        assert torch.equal(again, logits) and best == logits.argmax(1).tolist(), batch.num_rows
        assert runner.logits_and_best(batch, GREEDY)[1] == best, batch.num_rows
        assert torch.equal(runner.features(batch.host.slots), features), batch.num_rows
    runner.slots.free(np.concatenate(held))


@pytest.mark.parametrize("width", [1, 15, 16, 1024, 1033, 5000])
def test_the_best_of_a_row_is_torchs_argmax(width: int) -> None:
    dice = torch.Generator().manual_seed(width)
    rows = torch.randint(-40, 40, (12, width), generator=dice).float()  # many equals
    rows[1] = -torch.inf
    rows[2, width // 2:] = torch.nan
    rows[3, -1] = torch.inf
    rows[4] = torch.nan
    rows[5] = -rows[5].abs() * 0.0
    best, program = torch.empty(12, dtype=torch.int64), Program(Team(kernels(), 2))
    program.best(rows, best)
    program.run(BatchFrame(Frame(rows=12, num_picked=12)))
    assert best.tolist() == rows.argmax(1).tolist()


def states(rows: int, inner: int, dice: torch.Generator) -> torch.Tensor:
    """Of all sizes, with some inputs far above the others; the last four: zero, tiny, and two that hold no number."""
    made = torch.randn(rows, inner, generator=dice) * torch.logspace(-3, 3, rows)[:, None]
    made[:, :: inner // 4] *= 30
    made[-4], made[-3], made[-2, 1], made[-1, 0] = 0.0, 1e-38, torch.nan, torch.inf
    return made.to(torch.bfloat16)


@pytest.mark.parametrize("flags", ABLE, ids=named)
@pytest.mark.parametrize("inner", [96, 128])
@pytest.mark.parametrize("width", [1, 40, 1024, 4999])
def test_the_best_that_is_screened_is_the_best_of_all(width: int, inner: int, flags: tuple[str, ...]) -> None:
    dice, rows = torch.Generator().manual_seed(width), 24
    sizes = torch.logspace(-2, 2, width)[torch.randperm(width, generator=dice), None]
    weight = torch.randn(width, inner, generator=dice) * sizes
    weight[width // 2 :: 7] = weight[width // 3].clone()  # equals, and near ones
    weight[width // 2 + 1 :: 9] = weight[width // 3] * (1 + 2 ** -8)
    x, logits = states(rows, inner, dice), torch.empty(rows, width)
    team = Team(kernels(flags), 2)
    packed = Packed(team, weight)
    screen = Screen.of(team, packed)
    assert screen is not None
    best, program = torch.empty(2, rows, dtype=torch.int64), Program(team)
    program.product(x, packed, logits)
    program.best(logits, best[0])
    program.choose(x, packed, screen, best[1])
    program.run(BatchFrame(Frame(rows=rows, num_picked=rows)))
    assert best[1].tolist() == best[0].tolist()


def drawn(samplings: list[Sampling], positions: list[int]) -> BatchFrame:
    """The frame of rows without a tree."""
    rows = len(samplings)
    records = draw_records(Draws(samplings, positions, [1] * rows))
    return BatchFrame(Frame(rows=rows, num_picked=rows, draws=records.buffer_info()[0], num_draws=rows), records)


@pytest.mark.parametrize("flags", ABLE, ids=named)
@pytest.mark.parametrize("width", [1, 40, 1024, 4999])
def test_what_is_drawn_of_a_screened_head_is_drawn_of_all_its_logits(width: int, flags: tuple[str, ...]) -> None:
    dice, rows, inner = torch.Generator().manual_seed(width), 48, 96
    weight = torch.randn(width, inner, generator=dice) / 3  # logits of some 3
    weight[width // 2 :: 7] = weight[width // 3].clone()
    team = Team(kernels(flags), 2)
    packed, x, logits = Packed(team, weight), states(rows, inner, dice), torch.empty(rows, width)
    screen = Screen.of(team, packed)
    assert screen is not None
    heats = [(0.0, 0.1, 1.0, 4.0, 50.0, 1e-9)[row % 6] for row in range(rows)]
    seeds, positions = [row * 2**58 + row for row in range(rows)], list(range(1000, 1000 + rows))
    best, program = torch.empty(rows, dtype=torch.int64), Program(team)
    program.product(x, packed, logits)
    program.choose(x, packed, screen, best)
    sampled = [Sampling(temperature=heat, seed=seed) for heat, seed in zip(heats, seeds, strict=True)]
    program.run(drawn(sampled, positions))
    alone = [ChoiceRows(sampling, range(row, row + 1), (positions[row],), (0,), None, ((),))
             for row, sampling in enumerate(sampled)]
    right = choose(logits, alone)
    for row, token in enumerate(best.tolist()):
        able = heats[row] != 1e-9 and row < rows - 4 and bool((logits[row].abs() < 1e6).all())
        assert token == (right[row] if able or not heats[row] else -1), (row, heats[row])


@pytest.mark.parametrize("flags", ABLE, ids=named)
def test_a_walk_through_screened_trees_chooses_what_all_logits_say(flags: tuple[str, ...]) -> None:
    dice, rng, nodes, lengths = torch.Generator().manual_seed(1), np.random.default_rng(1), 12, list[int]()
    samplings = [Sampling(temperature=heat, seed=7 + place, top_p=0.9 if place % 3 else 1.0)
                 for place, heat in enumerate((0.0, 0.7, 1.0, 0.2, 0.0, 1.0))]
    team, rows = Team(kernels(flags), 2), nodes * len(samplings)
    weight, x = filtered_rows(1200, rows, 96, dice)
    packed, logits, best = Packed(team, weight), torch.empty(rows, 1200), torch.empty(rows, dtype=torch.int64)
    screen, program = Screen.of(team, packed), Program(team)
    assert screen is not None
    program.product(x, packed, logits)
    program.choose(x, packed, screen, best)
    shapes = [random_shape(rng, nodes) for _ in samplings]
    program.run(BatchFrame(Frame(rows=rows, num_picked=rows)))
    right = choose(logits, [ChoiceRows(sampling, range(first, first + nodes), [50 + level for level in shape.levels()],
                                       [0] * nodes, None, [()] * nodes)
                            for sampling, shape, first in zip(samplings, shapes, range(0, rows, nodes), strict=True)])
    trees = [lucky_tree(shape, right[first : first + nodes]) for shape, first in zip(shapes, range(0, rows, nodes),
                                                                                    strict=True)]
    records = draw_records(Draws(samplings, [50] * len(trees), [nodes] * len(trees)))
    told = [np.array([number for tree in trees for number in numbers(tree)])
            for numbers in (DraftTree.ancestors, lambda tree: tree.tokens)]
    program.run(BatchFrame(Frame(rows=rows, num_picked=rows, words=told[0].ctypes.data, tokens=told[1].ctypes.data,
                                 draws=records.buffer_info()[0], num_draws=len(trees)), records))
    for place, tree in enumerate(trees):
        cut = slice(place * nodes, (place + 1) * nodes)
        found, expected = walk(tree, best.tolist()[cut]).tokens, walk(tree, right[cut]).tokens
        if found[-1] == -1:  # not certain: the walk ends there
            found, expected = found[:-1], expected[: len(found) - 1]
        assert found == expected, samplings[place]
        lengths.append(len(found))
    assert sum(lengths) >= 12 and max(lengths) >= 4


FILTERS: tuple[dict[str, float], ...] = (
    {"top_p": 0.9}, {"top_k": 20, "top_p": 0.8}, {"top_k": 5}, {"min_p": 0.05}, {"top_p": 0.5, "min_p": 0.3},
    {"top_k": 5000, "top_p": 0.99}, {"top_p": 1e-6}, {"top_k": 1}, {"top_k": 40, "min_p": 0.1, "top_p": 0.95})


def filtered_rows(width: int, rows: int, inner: int, dice: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A head and states; some rows' logits are peaked, some flat."""
    weight = torch.randn(width, inner, generator=dice) / 3
    weight[width // 2 :: 7] = weight[width // 3].clone()  # equals
    sizes = torch.tensor([0.1, 0.5, 1.0, 2.0])[torch.arange(rows) % 4, None]
    x = torch.randn(rows, inner, generator=dice) * sizes
    # most states are near a token's weights, as those of a trained model
    x[::3] += sizes[::3] * 2 * weight[torch.randint(width, (len(x[::3]),), generator=dice)]
    return weight, x.to(torch.bfloat16)


@pytest.mark.parametrize("flags", ABLE, ids=named)
@pytest.mark.parametrize("width", [1, 40, 1024, 4999])
def test_what_is_drawn_of_a_screened_head_is_filtered_as_all_its_logits_are(width: int, flags: tuple[str, ...]) -> None:
    dice, rows, inner, sure = torch.Generator().manual_seed(width), 96, 96, 0
    team = Team(kernels(flags), 2)
    weight, x = filtered_rows(width, rows, inner, dice)
    packed, logits = Packed(team, weight), torch.empty(rows, width)
    screen = Screen.of(team, packed)
    assert screen is not None
    best, program, positions = torch.empty(rows, dtype=torch.int64), Program(team), list(range(50, 50 + rows))
    program.product(x, packed, logits)
    program.choose(x, packed, screen, best)
    for place, filters in enumerate(FILTERS):
        heat = (0.7, 1.0, 0.2)[place % 3]
        samplings = [Sampling(temperature=heat, seed=row + 1000 * place, **filters) for row in range(rows)]
        program.run(drawn(samplings, positions))
        right = choose(logits, [ChoiceRows(sampling, range(row, row + 1), (positions[row],), (0,), None, ((),))
                                for row, sampling in enumerate(samplings)])
        found = best.tolist()
        assert [token for token in found if token >= 0] == [
            token for token, other in zip(right, found, strict=True) if other >= 0], filters
        sure += sum(token >= 0 for token in found)
    assert sure >= rows * len(FILTERS) * 0.5


def test_a_step_tells_what_it_draws_and_all_logits_where_it_cannot(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeHead, "_passes_trial", lambda self, screen: True)  # though it saves nothing
    model = load_model(write_tiny_model(tmp_path, "llama", **SHAPE), ModelSection(kernels="native"))
    runner, builder = ModelRunner(model, 64), BatchBuilder()
    builder.add(range(1, 9), range(8), range(8), np.zeros(0, np.int64))
    batch, places = builder.build(), range(1, 9)
    logits = runner.logits_and_best(batch)[0].clone()
    for heats in ([0.7] * 8, [0.0, 1.0] * 4, [1.0] * 7 + [1e-9]):
        draws = Draws([Sampling(temperature=heat, seed=7) for heat in heats], places, [1] * 8)
        rows = [ChoiceRows(Sampling(temperature=heat, seed=7), range(row, row + 1), (places[row],), (0,), None, ((),))
                for row, heat in enumerate(heats)]
        told, found = runner.logits_and_best(batch, draws)
        if heats[-1] == 1e-9:
            assert found is None and torch.equal(told, logits)
        else:
            assert found == choose(logits, rows) and not len(told)


def test_a_screen_that_leaves_most_sampled_steps_to_all_logits_rests(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeHead, "_passes_trial", lambda self, screen: True)
    model = load_model(write_tiny_model(tmp_path, "llama", **SHAPE), ModelSection(kernels="native"))
    runner, builder = ModelRunner(model, 64), BatchBuilder()
    builder.add(range(1, 9), range(8), range(8), np.zeros(0, np.int64))
    batch = builder.build()

    def screened(heat: float, steps: int) -> int:
        draws = Draws([Sampling(temperature=heat)] * 8, range(8), [1] * 8)
        return sum(runner.logits_and_best(batch, draws)[1] is not None for _ in range(steps))

    monkeypatch.setattr(NativeHead, "screen", property(lambda self: tried.append(0) or made))  # counts its uses
    made, tried = Screen.of(runner.model._head._team, runner.model._head.packed), list[int]()
    assert screened(1e-9, 100) == 0  # the specification has to choose
    assert len(tried) < 40
    assert screened(1.0, 100) > 20  # tried again, it is of use again
    assert runner.logits_and_best(batch, GREEDY)[1] is not None


@pytest.mark.parametrize("flags", ABLE, ids=named)
@pytest.mark.parametrize("size", [1e-15, 1e-25, 1e-38])
def test_the_best_is_found_among_numbers_that_are_hardly_any(size: float, flags: tuple[str, ...]) -> None:
    dice, rows, team = torch.Generator().manual_seed(1), 24, Team(kernels(flags), 2)
    head = NativeHead(team, torch.randn(999, 96, generator=dice) * size)
    x = (torch.randn(rows, 96, generator=dice) * min(1e-40 / size, 1)).to(torch.bfloat16)
    best, program, screen = torch.empty(rows, dtype=torch.int64), Program(team), Screen.of(team, head.packed)
    assert screen is not None
    program.choose(x, head.packed, screen, best)
    program.run(BatchFrame(Frame(rows=rows, num_picked=rows)))
    assert best.tolist() == head(x).argmax(1).tolist()


def test_a_head_that_holds_no_number_is_not_screened() -> None:
    weight = torch.randn(64, 32)
    weight[40, 3] = torch.inf
    team = Team(kernels(), 1)
    assert Screen.of(team, Packed(team, weight)) is None
    assert Screen.of(team, Packed(team, rounded(weight.nan_to_num(posinf=1.0)))) is None  # whole numbers already


def test_a_token_beyond_the_vocabulary_is_never_looked_up(runners: dict[str, ModelRunner]) -> None:
    for token in (-1, VOCAB):
        builder = BatchBuilder()
        builder.add([token], [0], [0], np.zeros(0, np.int64))
        with pytest.raises(AssertionError):
            runners["native"].logits_and_best(builder.build())


def test_a_linear_on_the_kernels_is_torchs_to_rounding() -> None:
    dice = torch.Generator().manual_seed(5)
    weight, x = torch.randn(48, 130, generator=dice).bfloat16(), torch.randn(150, 130, generator=dice).bfloat16()
    native, plain = NativeLinear(Team(kernels(), 2), weight), Linear(weight)
    whole = native(x).clone()
    assert error(whole, x.double() @ weight.double().T) < 3e-3
    assert float((whole.float() - plain(x).float()).abs().max()) <= 2 ** -7 * float(whole.float().abs().max())
    for count in (1, 3, 64):
        assert torch.equal(native(x[:count]), whole[:count])


def test_rotary_rows_of_the_table_are_those_of_single_positions() -> None:
    config = parse_config(tiny_config("llama", **SHAPE), "tiny")
    table, rope = RopeTable(config), Rope(config, torch.float32, torch.device("cpu"))
    table.ensure(5000)
    for positions in ([0], [4097], list(range(77, 88)), [9000, 3]):
        cos, sin = rope.rows(torch.tensor(positions))
        assert torch.equal(table.cos[positions], cos) and torch.equal(table.sin[positions], sin)


@pytest.mark.parametrize("flags", ABLE, ids=named)
@pytest.mark.parametrize("inner", [46, 96])  # 96: whole tiles
def test_a_products_rows_are_the_same_bits_for_any_company_and_threads(inner: int, flags: tuple[str, ...]) -> None:
    dice, built = torch.Generator().manual_seed(7), kernels(flags)
    weight, rows = torch.randn(75, inner, generator=dice), torch.randn(53, inner, generator=dice).to(torch.bfloat16)
    whole = rounded(weight)
    for given, exact in ((weight, weight.to(torch.bfloat16).double()),
                         (whole, whole.numbers.double() * whole.scales.double()[:, None])):
        together = NativeHead(Team(built, 1), given)(rows)
        # Where four bytes are multiplied at once, what whole numbers weigh has 15 bits.
        assert error(together, rows.double() @ exact.T) < (1e-4 if given is whole and "-mavx512vnni" in flags else 1e-5)
        for threads in (1, 2, 3):
            head = NativeHead(Team(built, threads), given)
            assert head(rows[:0]).shape == (0, 75)
            for count in range(1, len(rows) + 1):
                assert torch.equal(head(rows[-count:]), together[-count:]), f"{count} rows, {threads} threads"


@pytest.mark.parametrize("flags", ABLE, ids=named)
def test_other_processors_compute_the_same_to_rounding(flags: tuple[str, ...]) -> None:
    results = [everything(Team(found, 2)) for found in (kernels(), kernels(flags))]
    for ours, theirs in zip(*results, strict=True):
        assert error(theirs, ours.double()) < 4e-3


@pytest.mark.skipif(shutil.which("g++") is None, reason="GCC's own names")
def test_gcc_11_builds_them() -> None:
    """It has no __builtin_shufflevector, and Ubuntu 22.04 has no later one; torch computed there."""
    older = kernels(("-U__GNUC__", "-D__GNUC__=11", "-D__builtin_shufflevector=none_here"))
    for ours, theirs in zip(everything(Team(kernels(()), 2)), everything(Team(older, 2)), strict=True):
        assert torch.equal(ours, theirs)


def everything(team: Team) -> list[torch.Tensor]:
    """What each operation makes of the same numbers."""
    dice = torch.Generator().manual_seed(1)
    rows, heads, kv_heads, size = 11, 4, 2, 32
    x = torch.randn(rows, (heads + 2 * kv_heads) * size, generator=dice)
    pool = KVPool(1, rows, kv_heads, size, torch.bfloat16)
    builder = BatchBuilder()
    builder.add([0] * rows, range(rows), range(rows), np.zeros(0, np.int64))
    angles = torch.randn(rows, 1, size, generator=dice)
    normed, queries, attended = (torch.empty(rows, width, dtype=torch.bfloat16) for width in (x.shape[1], 128, 128))
    weight, gates = torch.randn(70, 128, generator=dice), torch.randn(64, 128, generator=dice)
    product, gated = torch.ones(rows, 70), torch.empty(rows, 32, dtype=torch.bfloat16)
    q_norm, k_norm = torch.rand(size, generator=dice), torch.rand(size, generator=dice)
    program = Program(team)
    program.norm(x, torch.rand(x.shape[1], generator=dice), 1e-5, normed)
    shape = Heads(heads, kv_heads, size, q_norm, k_norm, 1e-5)
    program.rotate_and_store(x, shape, 0, queries)
    program.attention(queries, shape, 0, attended)
    program.product(attended, Packed(team, weight, torch.rand(70, generator=dice)), product, add=True)
    program.product(attended, Packed(team, gates, silu=True), gated)
    program.run(BatchFrame.of(builder.build(), pool, angles.cos(), angles.sin()))
    return [normed, pool.kv, attended, product, gated]


@pytest.mark.parametrize("flags", ABLE, ids=named)
def test_attention_is_the_same_bits_for_any_company_and_threads(flags: tuple[str, ...]) -> None:
    """Of nodes of a tree behind a long context, and of plain steps down their paths: chunks, and who takes them."""
    shape, built = Heads(10, 2, 96, None, None, 1e-5), kernels(flags)
    dice = torch.Generator().manual_seed(9)
    pool = KVPool(2, 900, 2, 96, torch.bfloat16)
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=dice))
    place = torch.randperm(900, generator=dice).numpy()
    for length in (1, 100, 127, 128, 250, 800):  # 250: the tree goes on from one chunk into the next
        context, own = place[:length], place[length : length + 62]
        tree = random_tree(np.random.default_rng(length), 30, base=length + 1, vocab=VOCAB)
        chain = [(2 << i) - 1 for i in range(len(own))]
        words = chain if length == 100 else tree.ancestors()
        own = own[: len(words)]
        queries = torch.randn(len(own), 960, generator=dice).bfloat16()
        builder = BatchBuilder()
        builder.add([0] * len(own), range(len(own)), own.tolist(), context, words, len(own))
        together = [attended(Team(built, threads), builder.build(), pool, queries, shape) for threads in (1, 2)]
        assert torch.equal(*together)
        for row, word in enumerate(words):
            path = np.array([slot for i, slot in enumerate(own) if word >> i & 1])
            seen = np.concatenate((context, path))
            plain = BatchBuilder()
            plain.add([0], [0], seen[-1:].tolist(), seen[:-1])
            for threads in (1, 3):
                alone = attended(Team(built, threads), plain.build(), pool, queries[row : row + 1], shape)
                assert torch.equal(alone[0], together[0][row]), f"{length} entries, row {row}, {threads} threads"
            k, v = pool.kv[1, seen].double().repeat_interleave(5, 2).unbind(1)
            weights = (torch.einsum("hd,nhd->hn", queries[row].double().view(10, 96), k) / 96 ** 0.5).softmax(1)
            assert error(together[0][row], torch.einsum("hn,nhd->hd", weights, v).reshape(-1)) < 3e-3


@pytest.mark.parametrize("flags", ABLE, ids=named)
def test_attention_of_a_prompts_rows_is_that_of_single_ones(flags: tuple[str, ...]) -> None:
    """With prompts of others beside it, and heads in groups smaller and larger than a block of rows."""
    dice, built = torch.Generator().manual_seed(10), kernels(flags)
    pool = KVPool(2, 700, 2, 32, torch.bfloat16)
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=dice))
    place = torch.randperm(700, generator=dice).numpy()
    for heads in (2, 6, 40):
        shape, builder, prompts = Heads(heads, 2, 32, None, None, 1e-5), BatchBuilder(), ((0, 150), (100, 45), (250, 3))
        parts, taken = list[np.ndarray[Any, np.dtype[np.int64]]](), 0
        for known, rows in prompts:
            parts.append(place[taken : taken + known + rows])
            taken += known + rows
            builder.add([0] * rows, range(rows), parts[-1][known:].tolist(), parts[-1][:known])
        queries = torch.randn(198, heads * 32, generator=dice).bfloat16()
        together = [attended(Team(built, threads), builder.build(), pool, queries, shape) for threads in (1, 2)]
        assert torch.equal(*together)
        first = 0
        for (known, rows), entries in zip(prompts, parts, strict=True):
            for row in range(rows):
                plain, seen = BatchBuilder(), entries[: known + row + 1]
                plain.add([0], [0], seen[-1:].tolist(), seen[:-1])
                alone = attended(Team(built, 1), plain.build(), pool, queries[first + row : first + row + 1], shape)
                assert torch.equal(alone[0], together[0][first + row]), f"{heads} heads, {known} known, row {row}"
            first += rows


def test_what_threads_share_of_long_contexts_has_a_bound() -> None:
    """A few rows behind half a million tokens took more than weights: what each row knew of each chunk of them."""
    dice, shape, context = torch.Generator().manual_seed(11), Heads(64, 2, 32, None, None, 1e-5), 4096 * 128
    pool = KVPool(2, 300, 2, 32, torch.bfloat16)
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=dice))
    builder, entries = BatchBuilder(), np.random.default_rng(11).integers(300, size=context)
    builder.add([0] * 4, range(4), [0, 1, 2, 3], entries)
    queries, batch = torch.randn(4, 2048, generator=dice).bfloat16(), builder.build()
    team, process = Team(kernels(), 2), Process()
    before = process.memory_info().rss
    together = attended(team, batch, pool, queries, shape)
    assert process.memory_info().rss - before < 2 * 64 << 20
    assert torch.equal(together, attended(Team(kernels(), 1), batch, pool, queries, shape))


def attended(team: Team, batch: ForwardBatch, pool: KVPool, queries: torch.Tensor, shape: Heads) -> torch.Tensor:
    out, program, none = torch.empty_like(queries), Program(team), torch.empty(0)
    program.attention(queries, shape, 1, out)
    for _ in range(2):  # the second time finds what the first one left
        program.run(BatchFrame.of(batch, pool, none, none))
    return out


def test_calls_from_several_threads_wait_for_one_another() -> None:
    team = Team(kernels(), 2)
    weights = torch.randn(4, 96, 64, generator=torch.Generator().manual_seed(2))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    heads = [NativeHead(team, weight) for weight in weights]
    expected = [head(x) for head in heads]
    wrong: list[int] = []

    def call(which: int) -> None:
        wrong.extend(which for _ in range(200) if not torch.equal(heads[which](x), expected[which]))

    threads = [threading.Thread(target=call, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_product_of_nan_and_infinity_says_so() -> None:
    head = NativeHead(Team(kernels(), 1), torch.ones(32, 2))
    rows = torch.tensor([[torch.nan, 1], [torch.inf, 1], [1, 1]]).to(torch.bfloat16)
    out = head(rows)[:, 0]
    assert out.isnan().tolist() == [True, False, False] and float(out[1]) == torch.inf and float(out[2]) == 2


def test_without_a_compiler_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelError, match=r"no C\+\+ compiler"):
        build((), tmp_path / "kernels.so")
    assert not list(tmp_path.iterdir())

    def missing(team: Team) -> str:
        raise ModelError("no C++ compiler was found")

    cpu = torch.device("cpu")
    assert native_or("auto", torch.bfloat16, cpu, "model", missing, lambda: "torch") == "torch"
    with pytest.raises(ModelError, match="no C"):
        native_or("native", torch.bfloat16, cpu, "model", missing, lambda: "torch")


def test_a_compiler_that_does_not_know_a_processor_builds_for_a_lesser_one(monkeypatch: pytest.MonkeyPatch) -> None:
    best, *others = kinds_of(processor()) if ABLE != [()] else [("-march=here",), ()]
    missing, tried = SOURCE.with_name("none.so"), list[tuple[str, ...]]()
    kernels(others[0])  # it is there

    def refuse(flags: tuple[str, ...], path: Path) -> None:
        tried.append(flags)
        raise ModelError(f"no {' '.join(flags)}")

    monkeypatch.setattr(compiled_kernels, "kinds_of", lambda _: [best, *others])
    monkeypatch.setattr(compiled_kernels, "build", refuse)
    named = {best: missing.name, others[0]: file_name(others[0])}
    monkeypatch.setattr(compiled_kernels, "file_name", lambda flags: named[flags])
    assert kernels.__wrapped__().flags == others[0] and tried == [best]
    monkeypatch.setattr(compiled_kernels, "file_name", lambda flags: missing.name)
    with pytest.raises(ModelError, match=f"no {best[0]}"):
        kernels.__wrapped__()


def test_a_source_that_does_not_build_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="could not build"):
        build(("-march=no-such-thing",), tmp_path / "kernels.so")
    assert not list(tmp_path.iterdir())


def test_the_kernels_are_for_bfloat16_on_a_cpu_alone(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.float64, torch.float16):
        assert native_or("auto", dtype, cpu, "model", lambda team: "native", lambda: "torch") == "torch"
        with pytest.raises(ModelError, match="bfloat16"):
            native_or("native", dtype, cpu, "model", lambda team: "native", lambda: "torch")
    odd = write_tiny_model(tmp_path)
    assert not isinstance(load_model(odd, ModelSection()), NativeDecoder)
    with pytest.raises(ModelError, match="head_dim that is a multiple of 32, and it is 12"):
        load_model(odd, ModelSection(kernels="native"))


def test_a_processor_gets_the_flags_that_it_knows() -> None:
    assert kinds_of(X86[0][0] | {"sse"})[0] == X86[0][1]
    for needed, flags in X86:
        assert kinds_of(needed)[0] == flags
    assert kinds_of({"avx2", "fma"}) == [()]
    assert len({file_name(flags) for _, flags in X86}) == len(X86)


def test_a_head_whose_screen_leaves_too_much_has_none() -> None:
    dice, team = torch.Generator().manual_seed(1), Team(kernels(), 2)
    weight = torch.randn(4096, 576, generator=dice)
    weight[:, :4] *= 30  # inputs that few states use, and all weights are rounded by
    for made, screened in ((weight, False), (torch.randn(16384, 576, generator=dice), True)):
        assert (NativeHead(team, made).screen is not None) is screened


def test_weights_beyond_what_sums_hold_are_not_screened() -> None:
    weight = torch.randn(64, 64)
    weight[3, 5] = 1e35
    team = Team(kernels(), 1)
    assert Screen.of(team, Packed(team, weight)) is None
