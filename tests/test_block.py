"""Block drafters against heads written out straight in float64, and the folders that are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipstream.base.config import GrowthSection
from slipstream.base.errors import ModelError
from slipstream.choosing.noise import noise, row_keys
from slipstream.drafting.heads.block import BlockNetwork
from slipstream.drafting.heads.block_checkpoint import read_block_head
from slipstream.drafting.neural import NeuralDrafter
from slipstream.engine.batch import BatchBuilder
from slipstream.protocol.messages import Commit, Features, Growth, Open
from slipstream.protocol.requests import Sampling
from tests.block_folder import (
    BLOCK,
    IDS,
    MASK,
    block_tensors,
    deepspec_config,
    speculators_block_config,
    write_block_folder,
    zlab_config,
)
from tests.growth_rules import GrowthLedger, assert_same, best_paths, scored_paths
from tests.tiny import VOCAB, write_tiny_model
from tests.written import WrittenBlock

WIDTH = 5 * 48
Tensor = torch.Tensor
LAYOUTS = {
    "z-lab": (zlab_config(), False),
    "deepspec": (deepspec_config(), True),
    "deepspec gated": (deepspec_config(markov_head_type="gated", confidence_head_with_markov=False), True),
    "deepspec rnn": (deepspec_config(markov_head_type="rnn"), True),
    "deepspec from behind the anchor": (deepspec_config(sample_from_anchor=False), False),
    "speculators dflash": (speculators_block_config("dflash"), False),
    "speculators dspark": (speculators_block_config(), True),
    "speculators gated behind": (speculators_block_config(markov_head_type="gated", sample_from_anchor=False), False),
    "speculators rnn behind": (speculators_block_config(markov_head_type="rnn", sample_from_anchor=False), False),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("block") / "target", num_hidden_layers=8)


def written(config: Mapping[str, Any], from_anchor: bool, target: Path,
            tensors: Mapping[str, Tensor] | None = None) -> WrittenBlock:
    lent = load_file(target / "model.safetensors")
    return WrittenBlock(config, block_tensors(config) if tensors is None else tensors, from_anchor,
                        lent["model.embed_tokens.weight"], lent["lm_head.weight"])


def drafter(folder: Path, target: Path, num_slots: int = 600, **growth: int) -> NeuralDrafter:
    network = BlockNetwork(read_block_head(folder, target), "float64", torch.device("cpu"), num_slots)
    return NeuralDrafter("block", network, GrowthSection.model_validate(
        {"num_steps": 4, "topk": 3, "num_draft_tokens": 12} | growth), 16)


def states_of(count: int, seed: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def message(session: int, start: int, states: Tensor) -> Features:
    return Features(session, start, states.numpy().tobytes(), len(states), "float64")


def opened(of: NeuralDrafter, session: int, tokens: Sequence[int], states: Tensor,
           sampling: Sampling | None = None) -> None:
    of.open([Open(session, np.array(tokens, np.int32), min(4, len(tokens)), sampling or Sampling())])
    of.absorb([message(session, 0, states)])


def grow(of: NeuralDrafter, budget: int = 63) -> Growth:
    (growth,) = of.grow([1], [budget])
    return growth


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trees_equal_the_head_written_out(tmp_path: Path, target: Path, layout: str) -> None:
    config, from_anchor = LAYOUTS[layout]
    of, straight = drafter(write_block_folder(tmp_path, config), target), written(config, from_anchor, target)
    rng, tokens, states = random.Random(3), list(range(20, 26)), states_of(40, seed=2)
    of.open([Open(1, np.array(tokens, np.int32), 4, Sampling())])
    assert len(grow(of).ids) == 0  # no states yet
    of.absorb([message(1, 0, states[:3])])
    assert len(grow(of).ids) == 0  # not all of them
    of.absorb([message(1, 3, states[3:5])])
    for turn in range(3):
        growth = grow(of)
        children = partial(straight.children, tokens=tokens, states=states[: len(tokens) - 1], topk=3)
        wanted = best_paths(children, 3, 4, 12)
        assert_same(growth, wanted, turn)
        assert max(map(len, wanted)) <= (BLOCK if from_anchor else BLOCK - 1)
        new = [*max(scored_paths(growth), key=len)[:turn], rng.randrange(VOCAB)]
        base = len(tokens)
        of.commit([Commit(1, base, np.array(new, np.int32))])
        of.absorb([message(1, base - 1, states[base - 1:][: len(new)])])
        tokens += new
    of.close([1])
    of.slots.check([])


def sliding(*layers: bool, window: int | None = 64) -> dict[str, Any]:
    return {"layer_types": [("full_attention", "sliding_attention")[slides] for slides in layers],
            "sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}


def slid(*layers: bool, kind: str = "dflash", **changes: Any) -> dict[str, Any]:
    """As speculators trains heads unless it is told otherwise."""
    config = speculators_block_config(kind, **changes)
    return config | {"transformer_layer_config": config["transformer_layer_config"] | sliding(*layers)}


NESTED = zlab_config()["dflash_config"]
SLIDING = {
    "all": slid(True, True), "some": slid(False, True, kind="dspark"),
    "all, and ahead": slid(True, True, sliding_window_non_causal=True),
    "some, and ahead": slid(True, False, kind="dspark", sliding_window_non_causal=True),
    "z-lab": zlab_config(**sliding(True, False)),
    "z-lab ahead": zlab_config(**sliding(True, True, window=None), is_causal=False,
                               dflash_config=NESTED | {"swa_window_size": 66})}


@pytest.mark.parametrize("name", SLIDING)
def test_layers_that_slide_see_a_window_and_none_of_the_block_behind_them(tmp_path: Path, target: Path,
                                                                          name: str) -> None:
    config = SLIDING[name]
    of = drafter(write_block_folder(tmp_path, config), target)
    straight, tokens, states = written(config, "markov_rank" in config, target), list(range(90)), states_of(89, seed=4)
    opened(of, 1, tokens, states)
    children = partial(straight.children, tokens=tokens, states=states, topk=3)
    assert_same(grow(of), best_paths(children, 3, 4, 12))
    right = straight.slots(tokens[-1], states)
    straight.kinds = ["full_attention"] * 2
    whole = straight.slots(tokens[-1], states)
    assert min(float((a - b).abs().max()) for a, b in zip(right, whole, strict=True)) > 0.01  # the window shows


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_siblings_have_children_of_their_own(tmp_path: Path, target: Path, kind: str) -> None:
    """And a tree that took the slots' marginals for every parent would be another."""
    config = speculators_block_config(markov_head_type=kind)
    of = drafter(write_block_folder(tmp_path, config), target, num_draft_tokens=39)  # every node
    straight, tokens, states = written(config, True, target), list(range(40, 50)), states_of(9, seed=4)
    opened(of, 1, tokens, states)
    paths = scored_paths(grow(of))
    below = {path[0]: sorted(other[1] for other in paths if len(other) == 2 and other[0] == path[0])
             for path in paths if len(path) == 1}
    kept = [tuple(children) for children in below.values() if children]
    assert len(kept) == 3 and len(set(kept)) > 1, below
    straight.config["markov_rank"] = straight.config["enable_confidence_head"] = 0
    assert set(best_paths(partial(straight.children, tokens=tokens, states=states, topk=3), 3, 4, 39)) != set(paths)


@pytest.mark.parametrize("layout", ["deepspec", "speculators dflash"])
def test_the_other_alignment_gives_other_trees(tmp_path: Path, target: Path, layout: str) -> None:
    config, from_anchor = LAYOUTS[layout]
    tokens, states = list(range(40, 50)), states_of(9, seed=4)
    found = []
    for name, flag in (("right", from_anchor), ("wrong", not from_anchor)):
        of = drafter(write_block_folder(tmp_path / name, config | {"sample_from_anchor": flag}), target)
        opened(of, 1, tokens, states)
        found.append(set(scored_paths(grow(of))))
    assert found[0] != found[1]


@pytest.mark.parametrize("candidates", [6, VOCAB])
def test_few_candidates_are_shares_of_the_whole_vocabulary(tmp_path: Path, target: Path, candidates: int,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Or all of it: their shares may then add up to a little more than one."""
    monkeypatch.setattr("slipstream.drafting.neural.CANDIDATES", candidates)
    config = speculators_block_config()
    of, straight = drafter(write_block_folder(tmp_path, config), target), written(config, True, target)
    tokens, states = list(range(60, 70)), states_of(9, seed=5)
    opened(of, 1, tokens, states)
    children = partial(straight.children, tokens=tokens, states=states, topk=3, candidates=candidates)
    assert_same(grow(of), best_paths(children, 3, 4, 12))


@pytest.mark.parametrize("config", [speculators_block_config(markov_head_type="rnn"), zlab_config()],
                         ids=["rnn", "dflash"])
def test_sessions_together_draft_as_each_alone(tmp_path: Path, target: Path, config: dict[str, Any]) -> None:
    folder = write_block_folder(tmp_path, config)
    texts = {session: (list(range(session, session + length)), states_of(length - 1, session))
             for session, length in enumerate((9, 30, 2, 31, 12, 64, 3, 20, 7, 8, 9), 1)}
    kinds = [Sampling(), Sampling(temperature=0.8, seed=1), Sampling(temperature=0.7, top_k=5, seed=2),
             Sampling(temperature=1.0, top_p=0.5, min_p=0.1, seed=3),
             Sampling(temperature=1e-6, seed=4, presence_penalty=0.5)]
    samplings = {session: kinds[session % 5] for session in texts}
    together = drafter(folder, target)
    for session, (tokens, states) in texts.items():
        opened(together, session, tokens, states, samplings[session])
    growths = together.grow(list(texts), [12] * len(texts))
    for growth, (session, (tokens, states)) in zip(growths, texts.items(), strict=True):
        alone = drafter(folder, target)
        opened(alone, session, tokens, states, samplings[session])
        (expected,) = alone.grow([session], [12])
        assert growth.tokens.tolist() == expected.tokens.tolist() and len(growth.ids) >= 3
        assert growth.scores.tolist() == pytest.approx(expected.scores.tolist(), abs=1e-6)
    together.close(list(texts))
    together.slots.check([])


def test_sampled_trees_begin_with_what_the_shared_noise_chooses(tmp_path: Path, target: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Below every node the first child is the argmax of the conditional logits over T, plus the noise of its place."""
    monkeypatch.setattr("slipstream.drafting.neural.CANDIDATES", VOCAB)
    config, temperature = deepspec_config(enable_confidence_head=False), 0.9
    of, straight = drafter(write_block_folder(tmp_path, config), target), written(config, True, target)
    tokens, states = list(range(60, 70)), states_of(9, seed=6)
    opened(of, 1, tokens, states, Sampling(temperature=temperature, seed=77))
    paths = scored_paths(grow(of))
    slots = straight.slots(tokens[-1], states)
    for path in [(), *(path for path in paths if len(path) < 3)]:
        children = [other[-1] for other in paths if other[:-1] == path]
        if children:
            logits = straight.lm_head @ slots[len(path)]
            logits = logits + straight.bias(slots, [tokens[-1], *path], len(path))
            key = row_keys([77], [len(tokens) + len(path)], torch.device("cpu"))
            wanted = logits / temperature + noise(key, torch.arange(VOCAB)[None])[0]
            assert children[0] == int(wanted.argmax()), path  # nodes come best first


def test_a_temperature_near_zero_draws_what_greed_takes(tmp_path: Path, target: Path) -> None:
    """The token before a slot counts there as it does in the target: it counted for less below a thousandth."""
    folder, chains = write_block_folder(tmp_path, speculators_block_config()), list[list[list[int]]]()
    for temperature in (0.0, 1e-5):
        of, sampling = drafter(folder, target, topk=1, num_draft_tokens=4), Sampling(temperature=temperature, seed=3)
        chains.append([])
        for seed in range(6):
            opened(of, 1, list(range(seed, seed + 10)), states_of(9, seed), sampling)
            chains[-1].append(grow(of).tokens.tolist())
    assert chains[0] == chains[1] and {*map(len, chains[0])} == {4}


@pytest.mark.parametrize("layers", [{}, sliding(True, True)], ids=["full", "sliding"])
def test_the_cpu_kernels_are_as_near_to_float64_as_torch_is(tmp_path: Path, layers: dict[str, Any]) -> None:
    """Logits and states of several blocks at once, over contexts that were kept in parts."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    lender = write_tiny_model(tmp_path / "target", num_hidden_layers=8, **shape)
    config = speculators_block_config()
    config |= {"transformer_layer_config": config["transformer_layer_config"] | shape | layers,
               "target_hidden_size": 64}
    head = read_block_head(write_block_folder(tmp_path / "head", config), lender)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, dtype in (("native", "bfloat16"), ("torch", "bfloat16"), ("exact", "float64")):
        network = BlockNetwork(head, dtype, torch.device("cpu"), 200, kernels=name if name == "native" else "torch")
        assert (network.race is None) == (name != "native")
        kept: list[list[int]] = [[], [], []]
        for lengths in ((40, 1, 25), (3, 2, 60)):  # more rows than buffers begin with
            builder, rows = BatchBuilder(), []
            for session, count in enumerate(lengths):
                before = kept[session]
                slots = network.slots.alloc(count)
                tokens = [(7 * session + 3 * place) % 90 for place in range(len(before), len(before) + count)]
                builder.add(tokens, range(len(before), len(before) + count), slots.tolist(),
                            np.array(before, np.int64))
                before += slots.tolist()
                dice = torch.Generator().manual_seed(100 * session + len(before))
                rows.append(torch.randn(count, 64, generator=dice).to(torch.bfloat16))
            batch = builder.build(network.device)
            out = network.forward(replace(batch, features=torch.cat(rows).to(network.read.dtype)))
        assert out.block is not None and out.block.states is not None
        found[name] = out.logits.double(), out.block.states.double()
    for native, torchs, exact in zip(*(found[name] for name in ("native", "torch", "exact")), strict=True):
        ours, theirs = (float((of - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())
                        for of in (native, torchs))
        assert ours < max(1.2 * theirs, 4e-3), f"native {ours:.1e}, torch {theirs:.1e}"


def test_a_tree_grows_ahead_inside_its_block_and_begins_anew_below_a_commit(tmp_path: Path, target: Path) -> None:
    of = drafter(write_block_folder(tmp_path, speculators_block_config()), target, num_draft_tokens=6)
    tokens, states = list(range(60, 70)), states_of(40, seed=7)
    opened(of, 1, tokens, states[:9])
    ledger = GrowthLedger(tokens)
    first = grow(of, 6)
    ledger.take(first, 6, VOCAB)
    grown = 0
    for _ in range(6):
        (more,) = of.grow([1], [20], steps=2)
        ledger.take(more, 20, VOCAB)
        grown += len(more.ids)
    assert grown > 6
    new = [*max(scored_paths(first), key=len)[:2], 5]
    of.commit([Commit(1, len(tokens), np.array(new, np.int32))])
    of.absorb([message(1, 9, states[9:12])])
    ledger.commit(new)
    ledger.take(grow(of, 6), 6, VOCAB)


@pytest.mark.parametrize("grown", [True, False], ids=["grown", "at once"])
@pytest.mark.parametrize("gap", [(0, 7), (5, 9), (5, 400), (70, 75)])
def test_a_token_whose_state_never_comes_is_not_there(tmp_path: Path, target: Path, gap: tuple[int, int],
                                                      grown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in its place either: a key of zeros would take a share of what a block sees. What came before it stays, also
    where no growth was asked for meanwhile and it is more than one forward reads."""
    monkeypatch.setattr("slipstream.drafting.neural.PREFILL_ROWS", 32)
    config, (begin, end) = speculators_block_config(), gap
    of, straight = drafter(write_block_folder(tmp_path, config), target), written(config, True, target)
    tokens, states = [20 + i % 50 for i in range(end + 6)], states_of(end + 7, seed=8)
    states[begin:end] = float("nan")
    of.open([Open(1, np.array(tokens, np.int32), 4, Sampling())])
    if begin:
        of.absorb([message(1, 0, states[:begin])])
    assert not grown or len(grow(of).ids) == 0
    of.absorb([message(1, end, states[end : end + 5])])
    for turn in range(2):
        children = partial(straight.children, tokens=tokens, states=states[: len(tokens) - 1], topk=3)
        assert_same(grow(of), best_paths(children, 3, 4, 12), turn)
        of.commit([Commit(1, len(tokens), np.array([9], np.int32))])
        of.absorb([message(1, end + 5, states[end + 5 : end + 6])])
        tokens.append(9)
    of.close([1])
    of.slots.check([])


REFUSED = [
    (speculators_block_config(speculators_model_type="eagle3"), "speculators_model_type: expected dflash or dspark"),
    (zlab_config(architectures=["DFlash2DraftModel"]), "architectures: expected DFlashDraftModel or"),
    (zlab_config(dflash_config=[1]), "dflash_config: expected an object, found list"),
    (zlab_config(dflash_config={"mask_token_id": 259}), "target_layer_ids: expected 1 to 64 layer numbers, found None"),
    (zlab_config(dflash_config={"mask_token_id": 259, "target_layer_ids": [0, 8]}), "target_layer_ids: .*8 layers"),
    (zlab_config(dflash_config={"mask_token_id": 260, "target_layer_ids": [0]}), "mask_token_id: .* 0 to 259"),
    (zlab_config(dflash_config={"target_layer_ids": [0]}), "mask_token_id: .* found None"),
    (zlab_config(block_size=1), "block_size: expected a number from 2 to 64, found 1"),
    (zlab_config(block_size=1 << 20), "block_size: expected a number from 2 to 64"),
    (zlab_config(num_target_layers=9), "num_target_layers: the head was made for 9 layers, the target has 8"),
    (zlab_config(num_hidden_layers=17), "num_hidden_layers: expected 1 to 16, found 17"),
    (zlab_config(vocab_size=300), "vocab_size: the head was made for 300 tokens"),
    (zlab_config(layer_types=["sliding_attention"] * 2), "sliding_window: expected a number from 64"),
    (zlab_config(layer_types=["sliding_attention"]), "layer_types: expected full_attention or sliding_attention"),
    (zlab_config(layer_types=["full_attention", "linear_attention"]), "layer_types: .*linear_attention"),
    (zlab_config(model_type="mistral", sliding_window=64), "sliding_window: no layer slides by layer_types"),
    (zlab_config(dflash_config={"causal": True, "mask_token_id": 259, "target_layer_ids": [0]}), "causal: .*True"),
    (zlab_config(logit_scale=0.5), "logit_scale: heads with 0.5 are not supported"),
    (zlab_config(final_logit_softcapping=30.0), "final_logit_softcapping: heads with 30.0"),
    (zlab_config(is_neox_style=False), "is_neox_style: heads with False"),
    (zlab_config(add_swa_attention_sink_bias=True), "add_swa_attention_sink_bias: heads with True"),
    (zlab_config(**sliding(False, True, window=63)), "sliding_window: expected a number from 64 .* found 63"),
    (slid(True, True, sliding_window_non_causal="no"), "sliding_window_non_causal: expected true or false"),
    (zlab_config(projector_type="domino"), "projector_type: heads with 'domino' are not supported"),
    (zlab_config(markov_rank=8), "sample_from_anchor: it is missing"),
    (deepspec_config(markov_head_type="fir"), "markov_head_type: expected vanilla, gated, rnn, found 'fir'"),
    (deepspec_config(markov_rank=1 << 20), "markov_rank: expected a number from 0 to 16384"),
    (deepspec_config(markov_rank=0), "confidence_head_with_markov: it needs a markov_rank above 0"),
    (deepspec_config(sample_from_anchor="yes"), "sample_from_anchor: expected true or false, found 'yes'"),
    (zlab_config(query_zero_predicts_next=1), "query_zero_predicts_next: expected true or false, found 1"),
    (deepspec_config(sample_from_anchor=True, query_zero_predicts_next=False),
     "query_zero_predicts_next: False, but sample_from_anchor, which means the same, is True"),
    (deepspec_config(target_hidden_size=64), "target_hidden_size: the head was made for 64, the target has 48"),
    (speculators_block_config(aux_hidden_state_layer_ids=[0] * 65), "aux_hidden_state_layer_ids: expected 1 to 64"),
    (speculators_block_config(aux_hidden_state_layer_ids=[4, 6, 8]), "layer_ids: .*8 layers, before the final norm"),
    (speculators_block_config(aux_hidden_state_layer_ids=[9]), "aux_hidden_state_layer_ids: .*8 layers"),
    (speculators_block_config(sample_from_anchor=None, speculators_config=None), "sample_from_anchor: it is missing"),
]


@pytest.mark.parametrize(("config", "match"), REFUSED, ids=range(len(REFUSED)))
def test_a_folder_is_refused_by_the_field_that_is_wrong(tmp_path: Path, target: Path, config: dict[str, Any],
                                                         match: str) -> None:
    """Before a tensor is read: the folder has none."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=match):
        read_block_head(tmp_path, target)


@pytest.mark.parametrize(("config", "wanted"), [
    (zlab_config(), False), (deepspec_config(), True), (deepspec_config(sample_from_anchor=False), False),
    (zlab_config(markov_rank=8, markov_head_type="vanilla", sample_from_anchor=True), True),
    (speculators_block_config("dflash", sample_from_anchor=None), False),
    (speculators_block_config(sample_from_anchor=None), True),
    (speculators_block_config(sample_from_anchor=None, speculators_config={
        "proposal_methods": [{"speculative_tokens": BLOCK - 1}]}), False),
    (zlab_config(query_zero_predicts_next=True), True), (deepspec_config(query_zero_predicts_next=False), False),
    (zlab_config(dflash_config={"mask_token_id": MASK, "target_layer_ids": IDS, "query_zero_predicts_next": True,
                                "sample_from_anchor": True}), True)], ids=range(10))
def test_what_a_slot_predicts_is_read_or_follows(tmp_path: Path, target: Path, config: dict[str, Any],
                                                 wanted: bool) -> None:
    assert read_block_head(write_block_folder(tmp_path, config), target).from_anchor is wanted


def test_a_head_of_dspark_is_read_as_specforge_writes_it(tmp_path: Path, target: Path) -> None:
    """All of its own in ``dflash_config``, nothing of what a slot predicts: it is trained on the token behind it."""
    own = {"attention_mode": "gqa", "confidence_head_alpha": 1.0, "confidence_head_with_markov": True,
           "enable_confidence_head": True, "markov_head_type": "vanilla", "markov_rank": 8, "mask_token_id": MASK,
           "projector_type": "dspark", "target_layer_ids": IDS}
    config = zlab_config(architectures=["DSparkDraftModel"], dflash_config=own, target_hidden_size=None)
    head = read_block_head(write_block_folder(tmp_path, config, block_tensors(config | own)), target)
    assert (head.from_anchor, head.markov, head.markov_rank, head.reach) == (True, "vanilla", 8, BLOCK)
    assert head.confidence and head.confidence_with_markov


def test_a_field_that_is_null_says_nothing(tmp_path: Path, target: Path) -> None:
    """As in all of a config: a library writes null for what a head has not."""
    head = read_block_head(write_block_folder(tmp_path, deepspec_config(dflash_config=None)), target)
    assert head.mask_token == MASK and head.block_size == BLOCK


def test_layers_are_named_by_output_or_by_input(tmp_path: Path, target: Path) -> None:
    for config in (zlab_config(), deepspec_config(), speculators_block_config()):
        assert read_block_head(write_block_folder(tmp_path, config), target).taps == (1, 2, 4, 5, 7)


@pytest.mark.parametrize("name", [name for name in block_tensors(speculators_block_config(markov_head_type="rnn"))
                                  if name not in ("t2d", "confidence_head.proj.bias")])
def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path: Path, target: Path, name: str) -> None:
    config = speculators_block_config(markov_head_type="rnn")
    tensors = block_tensors(config)
    whole = tensors.pop(name)
    if name != "lm_head.weight":
        with pytest.raises(ModelError, match=name):
            read_block_head(write_block_folder(tmp_path, config, tensors), target)
    with pytest.raises(ModelError, match=f"{name} has shape .* expected"):
        read_block_head(write_block_folder(tmp_path, config, tensors | {name: whole[:-1].clone()}), target)


def test_a_tensor_that_nothing_reads_is_refused(tmp_path: Path, target: Path) -> None:
    config = zlab_config()
    tensors = block_tensors(config) | {"layers.0.conv.weight": torch.ones(2)}
    with pytest.raises(ModelError, match=r"tensor layers\.0\.conv\.weight is no part of the head"):
        read_block_head(write_block_folder(tmp_path, config, tensors), target)
