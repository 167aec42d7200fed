"""Trees that grow whole on the CPU kernels are those that grow level by level, whatever comes between."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.base.config import GrowthSection
from slipstream.choosing.sampling import ChoiceRows, rank
from slipstream.drafting.heads.checkpoint import EagleHead, read_head
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.neural import NeuralDrafter, TreeBackend
from slipstream.engine.batch import rows_batch
from slipstream.engine.native.compiled_kernels import kernels
from slipstream.engine.native.draft import CHILD, Grown, Seed
from slipstream.engine.native.program import BatchFrame, Frame, Program, Team
from slipstream.protocol.messages import Commit, Features
from slipstream.protocol.requests import Sampling
from tests.both import MIXED, Both
from tests.eagle_folder import eagle_config, eagle_tensors, write_eagle_folder
from tests.tiny import VOCAB, write_tiny_model

CPU = torch.device("cpu")
SHAPES = [(4, 3), (4, 4), (2, 3), (1, 5), (3, 2), (5, 1)]  # topk, num_steps
SAMPLED = (Sampling(temperature=1.0, seed=5), Sampling(temperature=0.7, top_p=0.9, seed=1 << 63),
           Sampling(temperature=1.5, top_k=6, seed=7), Sampling(temperature=0.3, min_p=0.1, seed=8))
ADJUSTED = (Sampling(repetition_penalty=1.3), Sampling(frequency_penalty=0.5, presence_penalty=-0.7),
            Sampling(logit_bias=((70, 1.5), (101, -100.0))), Sampling(min_tokens=12, stop_token_ids=(*range(60, 120),)),
            Sampling(temperature=0.8, top_p=0.8, repetition_penalty=1.2, seed=9),
            Sampling(temperature=1.0, presence_penalty=0.6, min_tokens=12, stop_token_ids=(*range(60, 120),), seed=10))


@pytest.fixture(scope="module", params=[1, 2], ids=["one layer", "two layers"])
def head(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> EagleHead:
    folder = tmp_path_factory.mktemp("whole")
    config = eagle_config(hidden_size=64, num_attention_heads=2, num_key_value_heads=1,
                          num_hidden_layers=request.param)
    return read_head(write_eagle_folder(folder / "head", config, eagle_tensors(config)),
                     write_tiny_model(folder / "target", num_hidden_layers=8))


@dataclass(slots=True)
class Watched:
    """A network's trees, counted, and changed on the way where a test wants it."""

    backend: TreeBackend
    change: Callable[[Grown], Grown] = lambda grown: grown
    calls: list[int] = field(default_factory=list)  # seeds of each
    alone: list[bool] = field(default_factory=list)  # whether each was told so
    max_batch: int = 8
    prunes: bool = True

    def reshape(self, topk: int, levels: int) -> None:
        pass

    def supports(self, rows: int, levels: int, topk: int, sampling: Sampling | None) -> bool:
        return self.backend.supports(rows, levels, topk, sampling)

    def grow_trees(self, seeds: Sequence[Seed], topk: int, alone: bool = False) -> Grown:
        self.calls.append(len(seeds))
        self.alone.append(alone)
        return self.change(self.backend.grow_trees(seeds, topk, alone))


class WholeTrees(Both):
    """A drafter that grows whole trees, and another that does not."""

    def __init__(self, head: EagleHead, topk: int, steps: int, slots: int = 900,
                 change: Callable[[Grown], Grown] = lambda grown: grown, whole: bool = False) -> None:
        growth = GrowthSection(num_steps=steps, topk=topk, num_draft_tokens=12)
        networks = [EagleNetwork(head, "bfloat16", CPU, slots, kernels="native", to_int8=whole, cores=3)
                    for _ in range(2)]
        assert networks[0].native is not None
        self.watched = Watched(networks[0].native, change)
        super().__init__([NeuralDrafter("eagle3", networks[0], growth, 20, backend=self.watched),
                          NeuralDrafter("eagle3", networks[1], growth, 20)],
                         networks[0].features.width, torch.bfloat16, 1e-5)


@pytest.mark.parametrize(("topk", "steps"), SHAPES)
def test_trees_are_those_that_grow_level_by_level(head: EagleHead, topk: int, steps: int) -> None:
    both = WholeTrees(head, topk, steps)
    for session, length in enumerate((9, 16, 2, 17, 4), start=1):
        both.open(session, length)
    growths = both.grow([1, 2, 3, 4, 5])
    assert all(len(growth.tokens) == min(12, topk + (steps - 1) * topk * topk) for growth in growths)
    assert both.watched.calls == [5]
    both.commit(2, [*growths[1].tokens[:1].tolist(), 7])
    both.commit(4, [9])
    both.grow([2, 4])
    both.grow([2, 4])  # deeper, from what is there
    assert both.watched.calls == [5, 2]
    both.close()


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(), *SAMPLED, *ADJUSTED], ids=[
    "greedy", "sampled", "top_p", "top_k", "min_p", "repetition", "frequency", "bias", "min_tokens", "all", "early"])
def test_the_kernels_choose_the_rows_that_the_tree_chooses(head: EagleHead, equal: bool, sampling: Sampling,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would grow on level by level, and nothing but time would tell. equal: so are the logits of two tokens."""
    columns = 4 * head.tensors["lm_head.weight"]  # of less doubt, so trees are deeper
    if equal:
        columns = columns[torch.arange(len(columns)) // 2 * 2]
    both = WholeTrees(replace(head, tensors={**head.tensors, "lm_head.weight": columns}), 4, 3)
    for session in range(1, 13):
        both.open(session, 9 + session % 8, sampling)
    with monkeypatch.context() as patched:
        patched.setattr(both.drafters[0], "_grow_level", None)
        both.grow(list(range(1, 13)), list(range(1, 13)))
    assert both.watched.calls == [8, 4]
    both.close()


def test_a_tree_goes_on_from_rows_beside_which_others_were_left_out(head: EagleHead) -> None:
    columns, sessions = 4 * head.tensors["lm_head.weight"], list(range(1, 13))
    both = WholeTrees(replace(head, tensors={**head.tensors, "lm_head.weight": columns}), 4, 3)
    for length in range(3, 11):
        for session in sessions:
            both.open(session, length)
        both.grow(sessions, [6, 7, 8, 9, 10, 11] * 2)
        both.grow(sessions)
    both.close()


@pytest.mark.parametrize(("topk", "steps"), SHAPES)
def test_sampled_trees_are_those_that_grow_level_by_level(head: EagleHead, topk: int, steps: int) -> None:
    """Beside greedy ones, in the same call, again and again further on in the text."""
    both = WholeTrees(head, topk, steps)
    for session, sampling in enumerate((SAMPLED[0], Sampling(), *SAMPLED[1:]), start=1):
        both.open(session, 7 + session, sampling)
    for turn in range(4):
        for growth in both.grow([1, 2, 3, 4, 5], [12, 12, 12, 2, 12]):
            both.commit(growth.session, [*growth.tokens[: turn % 3].tolist(), turn])
    assert both.watched.calls == [5] * 4
    both.close()


@pytest.mark.parametrize(("topk", "steps"), SHAPES)
def test_trees_under_penalties_and_bias_are_those_that_grow_level_by_level(head: EagleHead, topk: int,
                                                                           steps: int) -> None:
    """Beside others, in the same call; further on in the text more is penalised, and answers may end."""
    both = WholeTrees(head, topk, steps)
    for session, sampling in enumerate((ADJUSTED[0], Sampling(), *ADJUSTED[1:], SAMPLED[1]), start=1):
        both.open(session, 7 + session, sampling)
    for turn in range(5):
        for growth in both.grow([*range(1, 9)], [12, 12, 12, 2, 12, 12, 12, 12]):
            both.commit(growth.session, [*growth.tokens[: turn % 3].tolist(), 70 + turn % 2])
    assert both.watched.calls == [8] * 5
    both.close()


@pytest.mark.parametrize("certain", [(0, 0), (1, 0), (0, 2), (3, 1)])
def test_levels_that_are_not_certain_are_grown_one_by_one(head: EagleHead, certain: tuple[int, int]) -> None:
    def change(grown: Grown) -> Grown:
        """The first two sessions' deeper levels are nonsense."""
        known, tokens = grown.known_levels.copy(), grown.tokens.copy()
        for place, levels in enumerate(certain[: len(known)]):
            known[place], tokens[place, 1 + (levels - 1) * 3 if levels else 0 :] = levels, 1
        return replace(grown, known_levels=known, tokens=tokens)

    both = WholeTrees(head, 3, 4, change=change)
    for session, sampling in enumerate((*SAMPLED, Sampling()), start=1):
        both.open(session, 9 + session, sampling)
    growths = both.grow([1, 2, 3, 4, 5])
    assert both.watched.calls == [5] and all(len(growth.tokens) == 12 for growth in growths if growth.session != 4)
    both.commit(1, [*growths[0].tokens[:2].tolist(), 7])
    both.grow([1, 2])
    both.close()


def test_a_tree_goes_on_from_its_own_states_after_others_of_its_shape(head: EagleHead) -> None:
    both = WholeTrees(head, 3, 3)
    for session, length in ((1, 9), (2, 14)):
        both.open(session, length)
    for _ in range(2):
        both.grow([1], [5])
        both.grow([2], [12])
    assert both.watched.calls == [1, 1]
    both.close()


def test_a_session_that_is_alone_has_all_cores(head: EagleHead) -> None:
    both = WholeTrees(head, 3, 3)
    for session in (1, 2):
        both.open(session, 9)
        both.grow([session])
    assert both.watched.alone == [True, False]
    both.close()


def test_sessions_that_want_few_levels_share_the_call(head: EagleHead) -> None:
    both = WholeTrees(head, 3, 4)
    for session in range(1, 10):
        both.open(session, 5 + session)
    both.grow(list(range(1, 10)), [1, 12, 2, 0, 3, 12, 2, 1, 12])
    assert both.watched.calls == [8]
    both.close()


@pytest.mark.parametrize("change", [{}, {"sliding_window": 6}, {"max_context": 24}], ids=str)
@pytest.mark.parametrize(("residual", "whole"), [(False, True), (True, False)], ids=["int8", "another residual"])
def test_a_population_of_sessions_notices_nothing(head: EagleHead, change: dict[str, int], residual: bool,
                                                  whole: bool) -> None:
    rng = random.Random(len(str(change)) + residual)
    changed = replace(head, config=replace(head.config, **change), norm_before_residual=residual,
                      norm_output=residual)
    both = WholeTrees(changed, 3, 4, whole=whole)
    for _ in range(40):
        if rng.random() < 0.4 or not both.bases:
            both.open(rng.randrange(1, 12), rng.randrange(2, 24), rng.choice(MIXED))
        chosen = rng.sample(sorted(both.bases), rng.randrange(1, len(both.bases) + 1))
        budgets = [rng.choice([12, 12, 12, 3, 0]) for _ in chosen]
        for growth in both.grow(chosen, budgets, int(rng.random() < 0.08)):
            if rng.random() < 0.7:
                path = growth.tokens[: rng.randrange(3)].tolist() if len(growth.tokens) else []
                both.commit(growth.session, [*path, rng.randrange(VOCAB)])
    assert len(both.watched.calls) > 10, "nothing was tested"
    both.close()


def test_states_behind_the_norm_are_torchs(head: EagleHead) -> None:
    """EAGLE-3.1: what the kernels hand on is the state after the final norm."""
    generator, found = torch.Generator().manual_seed(1), dict[str, torch.Tensor]()
    states = torch.randn(5, head.config.hidden_size, generator=generator).bfloat16()
    for kind in ("native", "torch"):
        network = EagleNetwork(replace(head, norm_output=True), "bfloat16", CPU, 8, kernels=kind)
        out = network.forward(rows_batch(network.slots.alloc(5), CPU, states))
        assert out.states is not None
        found[kind] = out.states.float()
    assert torch.allclose(found["native"], found["torch"], rtol=0.05, atol=0.05)
    assert 0.5 < float(found["native"].pow(2).mean()) < 2, "not normed"


@pytest.mark.parametrize("sessions", [1, 6])
def test_where_other_rows_were_chosen_the_tree_goes_on_level_by_level(head: EagleHead, sessions: int) -> None:
    def change(grown: Grown) -> Grown:
        picks = grown.picks.copy()
        picks[0, 2] = picks[0, 2, ::-1]
        return replace(grown, picks=picks)

    both = WholeTrees(head, 4, 4, change=change)
    for session in range(1, sessions + 1):
        both.open(session, 9 + session)
    both.grow(list(range(1, sessions + 1)))
    assert both.watched.calls == [sessions]
    both.close()


@pytest.mark.parametrize("others", [0, 5])
def test_states_that_are_no_numbers_grow_nothing(head: EagleHead, others: int) -> None:
    """And the trees of others, which grew in the same call, are whole."""
    both = WholeTrees(head, 4, 4)
    for session in range(1, others + 2):
        both.open(session, 12)
    rows = torch.full((1, both.width), torch.nan, dtype=torch.bfloat16)
    features = Features(1, 11, rows.view(torch.uint8).numpy().tobytes(), 1, "bfloat16")
    for drafter in both.drafters:
        drafter.commit([Commit(1, 12, np.array([3], np.int32))])
        drafter.absorb([features])
    growths = both.grow(list(range(1, others + 2)))
    assert [len(growth.tokens) for growth in growths] == [0, *[12] * others] and both.watched.calls == [1 + others]
    both.close()


def test_too_few_slots_for_a_whole_tree_are_enough_for_a_level(head: EagleHead) -> None:
    both = WholeTrees(head, 4, 4, slots=11 + 8)
    both.open(1, 12)
    (growth,) = both.grow([1])
    assert len(growth.tokens) == 12 and both.watched.calls == []
    both.close()


def test_a_vocabulary_smaller_than_a_nodes_children_grows_level_by_level(tmp_path: Path) -> None:
    config = eagle_config(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, draft_vocab_size=3)
    both = WholeTrees(read_head(write_eagle_folder(tmp_path / "head", config, eagle_tensors(config)),
                                write_tiny_model(tmp_path / "target", num_hidden_layers=8)), 4, 2)
    both.open(1, 9)
    (growth,) = both.grow([1])
    assert len(growth.tokens) == 12 and both.watched.calls == []
    both.close()


@pytest.mark.parametrize("columns", [5, 64, 1037])
@pytest.mark.parametrize("steps", [0, 3])
def test_the_best_of_a_row_are_those_of_the_specification(columns: int, steps: int) -> None:
    """steps: logits are rounded to so many, so that there are equals."""
    dice, k = torch.Generator().manual_seed(columns), 5
    padded = torch.full((9, -(-columns // 16) * 16), -torch.inf)
    logits = padded[:, :columns]
    logits.copy_(4 * torch.randn(9, columns, generator=dice))
    if steps:
        logits.round_().div_(steps)
    for vocabulary in (None, torch.randperm(3 * columns, generator=dice)[:columns]):
        best, program = torch.empty(9, 2 * k, dtype=torch.int64), Program(Team(kernels(), 2))
        program.rank(logits, vocabulary, best)
        program.run(BatchFrame(Frame(9)))
        found = best.numpy().view(CHILD)
        choice = ChoiceRows(Sampling(), range(9), [0] * 9, [0] * 9, None, [()] * 9)
        tokens, scores = rank(logits, choice, k, vocabulary)
        if not steps:
            assert found["token"].tolist() == tokens.tolist()
        else:  # the specification looks at a few equals beyond what is asked for, and no further
            ids = torch.arange(columns) if vocabulary is None else vocabulary
            for row, own in zip(found["token"].tolist(), logits.tolist(), strict=True):
                assert row == [token for _, token in sorted(zip((-x for x in own), ids.tolist(), strict=True))][:k]
        assert np.allclose(found["score"], scores.numpy(), rtol=0, atol=1e-5)
