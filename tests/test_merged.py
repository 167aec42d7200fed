"""Two drafters, one tree: what each adds, when the head is left out, when it is asked again, and that nothing leaks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from slipstream.base.config import DraftSection, GrowthSection, ModelSection, NgramSection
from slipstream.base.errors import ConfigError
from slipstream.drafting import create
from slipstream.drafting.merged import MergedDrafter
from slipstream.drafting.network import Network, Output
from slipstream.drafting.neural import NeuralDrafter
from slipstream.drafting.ngram import NgramDrafter
from slipstream.drafting.standalone import StandaloneNetwork
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.runner import ModelRunner
from slipstream.engine.weights import load_model
from slipstream.protocol.messages import Commit, Features, FeatureSpec, Open, Sampling
from tests.eagle_folder import write_eagle_folder
from tests.growth_rules import GrowthLedger, scored_paths
from tests.test_drafters import Population
from tests.tiny import VOCAB, write_tiny_model

STANZA = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]


class Counted:
    """A network that counts its forwards and their rows."""

    lag = 0
    keeps = True
    hidden_size = 0
    features: FeatureSpec | None = None

    def __init__(self, network: Network) -> None:
        self._network = network
        self.vocab_size, self.vocabulary = network.vocab_size, network.vocabulary
        self.max_context, self.slots, self.device = network.max_context, network.slots, network.device
        self.forwards = 0
        self.rows = 0

    def read(self, features: Sequence[Features]) -> list[torch.Tensor]:
        return self._network.read(features)

    def forward(self, batch: ForwardBatch) -> Output:
        self.forwards += 1
        self.rows += batch.num_rows
        return self._network.forward(batch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("merged")
    return {"target": str(write_tiny_model(folder / "target", num_hidden_layers=8)),
            "standalone": str(write_tiny_model(folder / "draft", noise=0.1)),
            "eagle3": str(write_eagle_folder(folder / "head"))}


def neural(folders: dict[str, str], **growth: int) -> tuple[NeuralDrafter, Counted]:
    network = Counted(StandaloneNetwork(ModelRunner(load_model(folders["standalone"], "float64"), 600)))
    shape = GrowthSection.model_validate({"num_steps": 3, "topk": 2, "num_draft_tokens": 6, **growth})
    return NeuralDrafter("standalone", network, shape, 4), network


def merged(folders: dict[str, str], trust_match: int = 6, **growth: int) -> tuple[MergedDrafter, Counted]:
    head, network = neural(folders, **growth)
    return MergedDrafter(head, NgramDrafter(NgramSection(), 4, head.trees), trust_match), network


def opening(tokens: list[int], session: int = 1) -> list[Open]:
    return [Open(session, np.array(tokens, np.int32), 1, Sampling())]


def commit(drafter: MergedDrafter | NeuralDrafter, ledger: GrowthLedger, tokens: list[int]) -> None:
    drafter.commit([Commit(1, len(ledger.tokens), np.array(tokens, np.int32))])
    ledger.commit(tokens)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("slots", "topk", "trust_match"), [(2000, 1, 2), (2000, 4, 5), (150, 3, 3)])
@pytest.mark.parametrize("kind", ["standalone", "eagle3"])
def test_growth_is_valid_and_slots_come_back(folders: dict[str, str], kind: str, slots: int, topk: int,
                                             trust_match: int, seed: int) -> None:
    section = DraftSection.model_validate({
        "drafter": kind, "model": folders[kind], "combine_ngram": True, "dtype": "float32", "slots": slots,
        "max_sessions": 5, "growth": {"topk": topk, "num_steps": 3, "num_draft_tokens": 10},
        "ngram": {"min_match": 1, "trust_match": trust_match}})
    drafter = create(section, ModelSection(path=folders["target"]))
    assert isinstance(drafter, MergedDrafter)
    population = Population(drafter, seed)
    for _ in range(120):
        what = population.rng.choices([population.open, population.commit, population.grow, population.close],
                                      [3, 6, 8, 1])[0]
        what()
    assert population.num_nodes > 40, f"seed {seed}"
    drafter.close(list(population.ledgers))
    drafter.neural.slots.check([])


def test_the_best_of_both_are_sent(folders: dict[str, str]) -> None:
    """A short match: the tree is the best of the head's candidates and of the index's, and holds some of each."""
    text = [*STANZA[:4], 7, 9, 11, *STANZA[2:4]]
    head, _ = neural(folders, num_draft_tokens=40)
    index = NgramDrafter(NgramSection(), 4)
    drafter, network = merged(folders, num_draft_tokens=10)
    scores: dict[tuple[int, ...], float] = {}
    for alone in (head, index):
        alone.open(opening(text))
        for path, score in scored_paths(alone.grow([1], [40])[0]).items():
            scores[path] = max(score, scores.get(path, score))
    drafter.open(opening(text))
    (growth,) = drafter.grow([1], [10])
    paths = scored_paths(growth)
    assert network.forwards > 0 and len(paths) == 10
    assert (7,) in paths and (7, 9) in paths, "the index continues 42 43"
    assert any(path[0] != 7 for path in paths), "the head has something of its own"
    best = sorted(scores.values(), reverse=True)[:10]
    np.testing.assert_allclose(sorted(paths.values(), reverse=True), best, atol=1e-6)


def test_a_repeating_text_leaves_the_head_out_and_it_catches_up(folders: dict[str, str]) -> None:
    drafter, network = merged(folders)
    head, _ = neural(folders)
    text = [*STANZA, 5, 6, *STANZA[:7]]
    ledger, mirror = GrowthLedger(text), GrowthLedger(text)
    drafter.open(opening(text))
    head.open(opening(text))
    (growth,) = drafter.grow([1], [16])
    ledger.take(growth, 16, VOCAB)
    assert network.forwards == 0
    assert tuple(STANZA[7:]) in scored_paths(growth) and len(growth.ids) > 6, "n-gram nodes have the whole budget"
    for tokens in ([47, 48, 49], [90, 91]):
        commit(drafter, ledger, tokens)
        commit(head, mirror, tokens)
    (growth,) = drafter.grow([1], [6])
    ledger.take(growth, 6, VOCAB)
    assert network.rows >= len(ledger.tokens), "all that was passed over is computed now"
    assert scored_paths(growth) == scored_paths(head.grow([1], [6])[0]), "as if it had never been left out"


def test_distrust_after_misses_and_trust_after_hits(folders: dict[str, str]) -> None:
    drafter, network = merged(folders)
    ledger = GrowthLedger([*STANZA, 1, *STANZA])
    drafter.open(opening(ledger.tokens))

    def asked() -> bool:
        """Whether the head's forwards ran for the newest token."""
        before = network.forwards
        (growth,) = drafter.grow([1], [8])
        ledger.take(growth, 8, VOCAB)
        return network.forwards > before

    assert not asked()
    for follower in (2, 3):  # each stanza goes on otherwise than the one before
        commit(drafter, ledger, [follower, *STANZA])
    assert asked(), "long matches were wrong twice"
    commit(drafter, ledger, [3, *STANZA])  # what the newest stanza foretold, and on
    assert not asked(), "and then right again"
    drafter.close([1])
    drafter.neural.slots.check([])


def test_above_the_longest_match_the_head_is_never_left_out(folders: dict[str, str]) -> None:
    drafter, network = merged(folders, trust_match=99)
    drafter.open(opening(STANZA * 6))
    drafter.grow([1], [8])
    assert network.forwards > 0


def test_what_a_merged_drafter_declares(folders: dict[str, str]) -> None:
    model = ModelSection(path=folders["target"])
    section = DraftSection(drafter="eagle3", model=folders["eagle3"], combine_ngram=True, max_sessions=3, slots=100)
    drafter, head = create(section, model), create(section.model_copy(update={"combine_ngram": False}), model)
    assert drafter.name == "eagle3+ngram" and drafter.features == head.features is not None
    assert (drafter.vocab_size, drafter.hidden_size, drafter.max_context, drafter.max_sessions) == (
        head.vocab_size, head.hidden_size, head.max_context, 3)
    with pytest.raises(ConfigError, match=r"draft\.combine_ngram"):
        create(DraftSection(drafter="ngram", combine_ngram=True), model)


def test_no_room_is_said_once_and_holds_nothing(folders: dict[str, str]) -> None:
    drafter, _ = merged(folders)
    opens = [message for session in range(6) for message in opening(STANZA * 2, session)]
    assert drafter.open(opens) == [4, 5]
    assert [growth.session for growth in drafter.grow(range(6), [4] * 6)] == [0, 1, 2, 3]
    assert drafter.open(opening([1, 2, 3], 0)) == []  # begun again: ids go on
    drafter.close(range(6))
    drafter.neural.slots.check([])
