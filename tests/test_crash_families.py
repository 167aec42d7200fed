"""The crashes that every engine with draft heads has had once: a head's dtype, context, vocabulary or rotary base that
differs from its target's, and rows that only pad a batch. Each test fails on the code that one writes first."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from slipstream.base.config import DraftSection, GrowthSection, ModelSection
from slipstream.drafting import Drafter, create
from slipstream.drafting.heads.block import BlockNetwork
from slipstream.drafting.heads.block_checkpoint import read_block_head
from slipstream.drafting.heads.checkpoint import read_head
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.neural import NeuralDrafter
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.loading import load_model
from slipstream.engine.runner import ModelRunner
from slipstream.protocol.messages import Features, Open
from slipstream.protocol.requests import Piece, Request, Sampling
from tests.block_folder import block_tensors, speculators_block_config, write_block_folder
from tests.eagle_folder import (
    eagle2_config,
    eagle2_tensors,
    eagle_config,
    eagle_tensors,
    write_eagle2_folder,
    write_eagle_folder,
)
from tests.growth_rules import best_paths, scored_paths
from tests.pair import drafting, grpc_link, local_link, target
from tests.tiny import write_tiny_model
from tests.written import WrittenBlock, WrittenEagle3

LONG = 8192
BLOCK = speculators_block_config(aux_hidden_state_layer_ids=[0, 1, 1])  # of a target with two layers
INPUTS = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [-1, 0, 0]}  # of a target with two layers
Tensor = torch.Tensor


@pytest.fixture(scope="module")
def long_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("crashes") / "target", max_position_embeddings=LONG)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads that were trained for 2048 tokens, in the dtypes that they are published in."""
    root = tmp_path_factory.mktemp("crashes")
    config = eagle_config(eagle_config=INPUTS)
    return {"eagle3": write_eagle_folder(root / "eagle3", config, halves(eagle_tensors(config))),
            "eagle2": write_eagle2_folder(root / "eagle2", None, halves(eagle2_tensors(eagle2_config()))),
            "block": write_block_folder(root / "block", BLOCK, halves(block_tensors(BLOCK)))}


def halves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.half() if t.is_floating_point() else t for name, t in tensors.items()}


def drafter(heads: dict[str, Path], kind: str, target_folder: Path, dtype: str, slots: int = 2500) -> Drafter:
    section = DraftSection(drafter=kind, model=str(heads[kind]), dtype=dtype,
                           growth=GrowthSection(num_steps=3, topk=2, num_draft_tokens=5))
    return create(section, ModelSection(path=str(target_folder)), slots)


def tokens_of(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "block"])
@pytest.mark.parametrize(("target_dtype", "draft_dtype"), [
    ("bfloat16", "float32"), ("float32", "bfloat16"), ("float64", "float16")])
async def test_a_head_of_another_dtype_drafts(long_target: Path, heads: dict[str, Path], kind: str, target_dtype: str,
                                              draft_dtype: str) -> None:
    """Naive code joins the target's rows with its own embeddings, or reads one number's bytes as another's."""
    request = Request("1", tuple(b"the cat sat on the mat. the cat"), Sampling(), 24)
    made = drafter(heads, kind, long_target, draft_dtype)
    async with target(long_target, dtype=target_dtype) as rig, drafting(made) as peers, grpc_link(rig, peers):
        pieces = await rig.answer(request)
        assert len(tokens_of(pieces)) == 24
        assert sum(piece.drafted for piece in pieces) > 24, "the head went silent"
        assert rig.count("invalid_growths_total") == rig.count("drafter_lost_total") == 0
        await rig.check()


def test_rows_of_another_dtype_keep_their_numbers(long_target: Path, heads: dict[str, Path]) -> None:
    head = read_head(heads["eagle3"], long_target)
    states = torch.randn(5, 3 * 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    network = EagleNetwork(head, "bfloat16", torch.device("cpu"), 8)
    (rows,) = network.read([Features(1, 0, states.view(torch.uint8).numpy().tobytes(), 5, "bfloat16")])
    wanted = states.float() @ head.tensors["fc.weight"].bfloat16().float().T
    assert torch.allclose(rows.float(), wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "block"])
@pytest.mark.parametrize("length", [2040, 3000])
async def test_a_context_beyond_the_heads_keeps_speculating(long_target: Path, heads: dict[str, Path], kind: str,
                                                            length: int) -> None:
    """Naive code indexes a table of 2048 rotary rows, or falls silent there; one prompt crosses it in mid-answer."""
    rng = np.random.default_rng(4)
    request = Request("1", tuple(rng.integers(0, 256, length).tolist()), Sampling(), 24)
    made = drafter(heads, kind, long_target, "float64", slots=2048 + 16)  # a window's worth, not a prompt's
    assert made.max_context == 2048
    async with target(long_target, slots=LONG, prefix_cache=False) as rig:
        plain = await rig.answer(request)
        async with drafting(made) as peers, local_link(rig, peers):
            pieces = await rig.answer(request)
            assert rig.count("invalid_growths_total") == 0
        assert tokens_of(pieces) == tokens_of(plain)
        assert not any(piece.drafted for piece in plain)
        # The first rounds pass while the window is caught up with; the last one has room for a single token.
        drafted = [piece.drafted for piece in pieces]
        assert all(drafted[-10:-1]), drafted
        await rig.check()


def test_the_heads_own_context_is_its_window(tmp_path: Path, long_target: Path) -> None:
    """Beyond it a head drafts from its newest rows, at their own positions, and holds no more than a window of them."""
    config = eagle_config(eagle_config=INPUTS, max_position_embeddings=64)
    tokens, states = text(200, 5)
    of = eagle3(long_target, write_eagle_folder(tmp_path, config), 64)
    opened(of, 1, tokens, states)
    first = len(tokens) - 64 // 2
    children = partial(WrittenEagle3().children, tokens=tokens, states=states[first - 1:], topk=2, first=first)
    found, wanted = scored_paths(of.grow([1], [6])[0]), best_paths(children, 2, 3, 6)
    assert found == pytest.approx(wanted, abs=1e-5)


def message(session: int, start: int, states: Tensor) -> Features:
    return Features(session, start, states.numpy().tobytes(), len(states), "float64")


def eagle3(target_folder: Path, folder: Path, num_slots: int = 600) -> NeuralDrafter:
    network = EagleNetwork(read_head(folder, target_folder), "float64", torch.device("cpu"), num_slots)
    return NeuralDrafter("eagle3", network, GrowthSection(num_steps=3, topk=2, num_draft_tokens=6), 8)


def opened(of: NeuralDrafter, session: int, tokens: list[int], states: Tensor) -> None:
    of.open([Open(session, np.array(tokens, np.int32), len(tokens), Sampling())])
    of.absorb([message(session, 0, states)])


def text(length: int, seed: int) -> tuple[list[int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (length,), generator=generator).tolist()
    return tokens, torch.randn(length - 1, 3 * 48, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("reading", ["differences as ids", "unmapped", "fed back unmapped"])
def test_draft_ids_are_mapped_and_fed_back_as_the_targets(tmp_path: Path, long_target: Path, reading: str) -> None:
    """``d2t`` holds differences, and below the root a child is embedded by its target id. Wrong readings give trees."""
    tensors = eagle_tensors(eagle_config())
    tokens, states = text(9, 3)
    of = eagle3(long_target, write_eagle_folder(tmp_path, eagle_config(eagle_config=INPUTS), tensors))
    opened(of, 1, tokens, states)
    right, naive = WrittenEagle3(tensors=tensors), WrittenEagle3(tensors=tensors)
    naive.ids = tensors["d2t"] if reading == "differences as ids" else torch.arange(len(right.ids))
    wrong, wanted = (best_paths(partial(head.children, tokens=tokens, states=states, topk=2), 2, 3, 6)
                     for head in (naive, right))
    if reading == "fed back unmapped":
        wrong = {tuple(right.ids[list(path)].tolist()): score for path, score in wrong.items()}
    found = scored_paths(of.grow([1], [6])[0])
    assert found == pytest.approx(wanted, abs=1e-5)
    assert found.keys() != wrong.keys(), "this text would not have told"


@pytest.mark.parametrize("reading", ["differences as ids", "unmapped", "W2 by target ids"])
def test_a_blocks_draft_ids_are_mapped_and_its_biases_too(tmp_path: Path, long_target: Path, reading: str) -> None:
    """W1 has the target's tokens, W2 the draft's: a parent is looked up by one id, its children by others."""
    tensors = block_tensors(BLOCK)
    tokens = text(9, 3)[0]
    states = torch.randn(8, 3 * 48, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    network = BlockNetwork(read_block_head(write_block_folder(tmp_path, BLOCK, tensors), long_target), "float64",
                           torch.device("cpu"), 100)
    of = NeuralDrafter("block", network, GrowthSection(num_steps=3, topk=2, num_draft_tokens=6), 8)
    opened(of, 1, tokens, states)
    embedding = load_file(long_target / "model.safetensors")["model.embed_tokens.weight"]
    right, naive = (WrittenBlock(BLOCK, tensors, True, embedding) for _ in range(2))
    if reading == "W2 by target ids":
        w2 = naive.weight["markov_head.markov_w2.weight"]
        naive.weight["markov_head.markov_w2.weight"] = w2[right.ids.clamp(max=len(w2) - 1)]
    else:
        naive.ids = tensors["d2t"] if reading == "differences as ids" else torch.arange(len(right.ids))
    wrong, wanted = (best_paths(partial(head.children, tokens=tokens, states=states, topk=2), 2, 3, 6)
                     for head in (naive, right))
    found = scored_paths(of.grow([1], [6])[0])
    assert found == pytest.approx(wanted, abs=1e-5)
    assert found.keys() != wrong.keys(), "this text would not have told"


def test_a_theta_of_its_own_is_used_and_warned_of(tmp_path: Path) -> None:
    """A head keeps the rotary base that it was trained with; without a word it is 10000, never the target's."""
    folder = write_tiny_model(tmp_path / "target", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    tokens, states = text(60, 8)
    for name, theta, written in (("own", 80000.0, 80000.0), ("none", None, 10000.0), ("same", 500000.0, 500000.0)):
        config = eagle_config(eagle_config=INPUTS, rope_theta=theta)
        with capture_logs() as logs:
            of = eagle3(folder, write_eagle_folder(tmp_path / name, config))
        warned = [log for log in logs if log["log_level"] == "warning"]
        assert len(warned) == (theta != 500000.0), name
        if warned:
            assert (warned[0]["head"], warned[0]["target"]) == (written, 500000.0)
            assert "rope_theta" in warned[0]["event"] and str(tmp_path / name) in warned[0]["file"]
        opened(of, 1, tokens, states)
        head = WrittenEagle3(eagle_config(rope_theta=written))
        wanted = best_paths(partial(head.children, tokens=tokens, states=states, topk=2), 2, 3, 6)
        found = scored_paths(of.grow([1], [6])[0])
        assert found.keys() == wanted.keys() and found == pytest.approx(wanted, abs=1e-5), name


SIZES = ((1, 40, False), (5, 33, True), (3, 60, False), (8, 2, True), (1, 63, True), (7, 35, True), (6, 0, False))


def segments(builder: BatchBuilder, only: int | None = None) -> list[range]:
    """Segments of unequal sizes (rows, context, whether the rows are a tree): all of them, or one. Slot 0 and every
    third slot belong to nobody."""
    free = iter([slot for slot in range(1, 1000) if slot % 3])
    rows = []
    for number, (size, context, is_tree) in enumerate(SIZES):
        slots = np.array([next(free) for _ in range(context + size)], np.int64)
        words = [(1 << i) | 1 for i in range(size)] if is_tree else None
        if only is None or only == number:
            tokens = [(7 * number + i) % 250 for i in range(size)]
            positions = [context + (i > 0 if is_tree else i) for i in range(size)]
            rows.append(builder.add(tokens, positions, slots[context:].tolist(), slots[:context], words,
                                    size if is_tree else 0))
    return rows


def context_of(runner: ModelRunner) -> Tensor:
    """The pool poisoned but for the contexts, whose numbers are the same for every runner. Returns what it holds."""
    builder = BatchBuilder()
    segments(builder)
    batch = builder.build()
    known = sorted(set(batch.kv_slots.tolist()) - set(batch.slots.tolist()))
    runner.pool.kv.fill_(torch.nan)
    generator = torch.Generator().manual_seed(9)
    shape = (len(runner.pool.kv), len(known), *runner.pool.kv.shape[2:])
    runner.pool.kv[:, known] = torch.randn(shape, generator=generator, dtype=torch.float64)
    return runner.pool.kv.clone()


def test_padding_rows_neither_write_nor_read(long_target: Path) -> None:
    """Segments padded to the longest among them: each equals itself alone, and no foreign slot was read or written."""
    model = load_model(long_target, ModelSection(dtype="float64"))
    together, alone = ModelRunner(model, 1000), ModelRunner(model, 1000)
    before, builder = context_of(together), BatchBuilder()
    rows = segments(builder)
    batch = builder.build()
    assert len({len(r) for r in rows}) < len(rows), "segments that share a call"
    logits = together.forward(batch)
    assert torch.isfinite(logits).all(), "a slot of nobody was read"
    for number, own in enumerate(rows):
        context_of(alone)
        single = BatchBuilder()
        segments(single, only=number)
        expected = alone.forward(single.build())
        assert torch.allclose(logits[own.start:own.stop], expected, rtol=0, atol=1e-12), SIZES[number]
    others = sorted(set(range(1000)) - set(batch.slots.tolist()))
    assert torch.equal(together.pool.kv[:, others].nan_to_num(7.5), before[:, others].nan_to_num(7.5))


def test_a_head_drafts_for_unequal_sessions_as_for_each_alone(long_target: Path, heads: dict[str, Path]) -> None:
    texts = {session: text(length, session) for session, length in enumerate((9, 30, 2, 31, 12, 64, 3), 1)}
    together = eagle3(long_target, heads["eagle3"])
    for session, (tokens, states) in texts.items():
        opened(together, session, tokens, states)
    growths = together.grow(list(texts), [6] * len(texts))
    for growth, (session, (tokens, states)) in zip(growths, texts.items(), strict=True):
        alone = eagle3(long_target, heads["eagle3"])
        opened(alone, session, tokens, states)
        (expected,) = alone.grow([session], [6])
        assert growth.tokens.tolist() == expected.tokens.tolist() and len(growth.ids) == 6
        assert growth.scores.tolist() == pytest.approx(expected.scores.tolist(), abs=1e-6)
    together.close(list(texts))
    together.slots.check([])
