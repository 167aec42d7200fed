"""Every drafter over a random population of sessions: all growth is valid, and every slot comes back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_service.assembly import rehearse
from draft_service.worker import DraftWorker
from slipstream.base.config import DraftSection, ModelSection
from slipstream.base.errors import ConfigError, ModelError
from slipstream.drafting import Drafter, create
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.neural import NeuralDrafter
from slipstream.drafting.tree import DraftContext
from slipstream.protocol.messages import Commit, DraftBound, Features, Growth, Open, TargetBound
from slipstream.protocol.requests import Sampling
from tests.block_folder import speculators_block_config, write_block_folder
from tests.eagle_folder import eagle_config, write_eagle2_folder, write_eagle_folder
from tests.growth_rules import GrowthLedger
from tests.mtp_folder import mtp_config, write_mtp_target
from tests.tiny import VOCAB, write_tiny_model

Make = Callable[..., Drafter]
WINDOWS = (2048, 40)  # tokens of a model's context
KINDS = ("ngram", "standalone", "eagle3", "mtp")
MAPS = Path("/proc/self/maps")
NATIVE = eagle_config(hidden_size=64, intermediate_size=176, num_attention_heads=2)  # what our kernels compute


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("drafters")
    target = ModelSection(path=str(write_tiny_model(folder / "target", num_hidden_layers=8)))
    made: dict[tuple[str, int], Path] = {}
    for window in (*WINDOWS, 8):
        room, place = {"max_position_embeddings": window}, folder / str(window)
        made["mimo", window] = write_mtp_target(place / "mimo", mtp_config("mimo", num_nextn_predict_layers=2, **room))
        made["standalone", window] = write_tiny_model(place / "draft", noise=0.1, **room)
        made["eagle3", window] = write_eagle_folder(place / "head", eagle_config(**room))

    def make(knobs: dict[str, object], window: int = WINDOWS[0], num_slots: int = 0) -> Drafter:
        kind = str(knobs["drafter"])
        section = {"model": str(made.get((kind, window), "")), "dtype": "float32", **knobs}
        model = ModelSection(path=str(made["mimo", window])) if kind == "mtp" else target
        return create(DraftSection.model_validate(section), model, num_slots)

    return make


class Population:
    """Sessions that come, go, repeat themselves and fall behind, told to a drafter as a target would."""

    def __init__(self, drafter: Drafter, seed: int) -> None:
        self.drafter, self.rng = drafter, random.Random(seed)
        self.ledgers: dict[int, GrowthLedger] = {}
        self.noise = np.random.default_rng(seed)
        self.num_nodes = 0

    def states(self, session: int, start: int, count: int) -> Features | None:
        spec = self.drafter.features
        if spec is None or count <= 0:
            return None
        rows = self.noise.standard_normal((count, spec.width)).astype(np.float32)
        return Features(session, start, rows.tobytes(), count, "float32")

    def text(self, count: int) -> list[int]:
        start = self.rng.randrange(VOCAB)
        return [(start + i * i % 7) % VOCAB for i in range(count)]

    def open(self) -> None:
        session = self.rng.randrange(12)
        tokens = self.text(self.rng.choice([1, 2, 5, 20, 90]))
        sampling = self.rng.choice([Sampling(), Sampling(temperature=1.0, top_k=3, seed=session),
                                    Sampling(temperature=0.7, frequency_penalty=0.5, seed=session)])
        refused = self.drafter.open([Open(session, np.array(tokens, np.int32), 1, sampling)])
        assert refused == ([session] if session not in self.ledgers and len(self.ledgers) >= 5 else [])
        if refused:
            return
        used = self.ledgers[session].used if session in self.ledgers else set[int]()
        self.ledgers[session] = GrowthLedger(tokens)
        self.ledgers[session].used = used
        begin = self.rng.choice([0, 0, 0, len(tokens) // 2])
        chunks = [self.states(session, begin, (len(tokens) - 1 - begin) // 2)]
        sent = begin + (chunks[0].num_rows if chunks[0] is not None else 0)
        chunks.append(self.states(session, sent, len(tokens) - 1 - sent))
        self.drafter.absorb([chunk for chunk in chunks if chunk is not None and self.rng.random() < 0.9])

    def commit(self) -> None:
        commits, states = [], []
        for session in self.chosen():
            ledger = self.ledgers[session]
            nodes = self.rng.randrange(len(ledger.tree))
            new = [*[ledger.tree.tokens[at] for at in ledger.tree.path(nodes)[1:]], self.rng.randrange(4)]
            base = len(ledger.tokens)
            states.append(self.states(session, base - 1, len(new)) if self.rng.random() < 0.95 else None)
            commits.append(Commit(session, base, np.array(new, np.int32)))
            ledger.commit(new)
        late = Commit(77, 5, np.array([1], np.int32))
        self.drafter.commit([*commits, late])
        self.drafter.absorb([rows for rows in states if rows is not None])

    def grow(self) -> None:
        sessions = self.chosen()
        budgets = [self.rng.choice([0, 1, 3, 8, 63]) for _ in sessions]
        growths = self.drafter.grow([*sessions, 77], [*budgets, 4])
        assert [growth.session for growth in growths] == sessions
        for growth, budget in zip(growths, budgets, strict=True):
            self.ledgers[growth.session].take(growth, budget, VOCAB)
            self.num_nodes += len(growth.ids)

    def close(self) -> None:
        gone = [session for session in self.ledgers if self.rng.random() < 0.3]
        self.drafter.close([*gone, 77])
        for session in gone:
            del self.ledgers[session]

    def chosen(self) -> list[int]:
        return [session for session in self.ledgers if self.rng.random() < 0.7]


class Target:
    """Of a draft worker."""

    name = "target"

    def __init__(self) -> None:
        self.heard: list[TargetBound] = []

    def send(self, items: Sequence[TargetBound]) -> None:
        self.heard.extend(items)

    def refuse(self, reason: str) -> None:
        raise AssertionError(reason)


@pytest.mark.parametrize("sessions", [(1,), (1, 2)], ids=["alone", "beside another"])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_long_text_is_read_between_two_commits(make: Make, kind: str, sessions: tuple[int, ...]) -> None:
    """A growth reads a part of it, so that other sessions need not wait. An idle draft left the rest to the next
    commits: a text of thousands of tokens was decoded plainly for many rounds."""
    drafter = make({"drafter": kind, "growth": {"topk": 2, "num_steps": 3, "num_draft_tokens": 8}}, num_slots=4000)
    worker = DraftWorker(drafter, "", 30.0, clock=lambda: 100.0)
    population, peer = Population(drafter, 0), Target()
    tokens, size = [int(token) for token in population.noise.integers(0, VOCAB, 1902)], 1900

    def say(*items: DraftBound | None) -> list[int]:
        """Nodes of each growth that answers."""
        worker.received(peer, [item for item in items if item is not None], ())
        for _ in range(9):
            worker.turn(block=False)
            if worker.wait_s is None:
                heard, peer.heard = peer.heard, []
                return [len(item.ids) for item in heard if isinstance(item, Growth)]
        raise AssertionError("it goes on for nothing")

    opens = [Open(session, np.array(tokens[:size], np.int32), size, Sampling(), 8) for session in sessions]
    assert say(*opens) == [0] * len(sessions)
    for session in sessions:
        assert say(population.states(session, 0, 1000), population.states(session, 1000, size - 1001)) == []
    for base in (size, size + 1):
        grown = say(*(Commit(session, base, np.array(tokens[base : base + 1], np.int32),
                             population.states(session, base - 1, 1), 8) for session in sessions))
        assert len(grown) == len(sessions), "one answer for each commit"
    assert all(grown)


@pytest.mark.parametrize("kind", KINDS[2:])
def test_a_text_that_is_only_followed_takes_no_more_than_a_window_of_states(make: Make, kind: str) -> None:
    """A target may want no drafts for a while, or never."""
    drafter = make({"drafter": kind}, WINDOWS[1], num_slots=200)
    assert isinstance(drafter, NeuralDrafter)
    population, size = Population(drafter, 0), 90
    drafter.open([Open(1, np.array(population.text(size), np.int32), 1, Sampling())])
    for start in range(0, size + 60, 10):
        if start >= size:
            drafter.commit([Commit(1, start, np.arange(10, dtype=np.int32))])
        states = population.states(1, max(0, start - 1), 10)
        assert states is not None
        drafter.absorb([states])
        assert drafter._contexts[1].num_inputs <= WINDOWS[1]
    assert len(drafter.grow([1], [4])[0].ids) == 4


@pytest.mark.parametrize("kind", KINDS[1:])
def test_however_many_sessions_commit_at_once_all_draft(make: Make, kind: str) -> None:
    """One forward reads a bounded number of rows. Sessions beyond it drafted nothing, had more to read the next time,
    and so were left out again."""
    drafter = make({"drafter": kind, "growth": {"topk": 1, "num_steps": 2, "num_draft_tokens": 2}}, num_slots=8000)
    population, sessions = Population(drafter, 0), range(1, 141)
    drafter.open([Open(session, np.array([1, 2, session], np.int32), 1, Sampling()) for session in sessions])
    drafter.absorb([rows for session in sessions if (rows := population.states(session, 0, 2)) is not None])
    for base in range(3, 15, 4):
        growths = drafter.grow(sessions, [2] * len(sessions))
        assert all(len(growth.ids) for growth in growths), f"{base} tokens"
        drafter.commit([Commit(session, base, np.array([3, 4, 5, session], np.int32)) for session in sessions])
        drafter.absorb([rows for session in sessions if (rows := population.states(session, base - 1, 4)) is not None])


@pytest.mark.parametrize(("lengths", "slots"), [([50] * 4, 260), ([250] * 3, 600), ([900, 90, 90], 700)],
                         ids=["texts that grow", "prompts", "a long one"])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_sessions_with_more_text_than_there_are_slots_all_draft(make: Make, kind: str, lengths: list[int], slots: int
                                                                ) -> None:
    """From the first full pool on nobody drafted at all: each kept the slots of what it had read, and none got another
    one, until answers ended."""
    shape = {"topk": 2, "num_steps": 3, "num_draft_tokens": 8}
    drafter = make({"drafter": kind, "growth": shape}, num_slots=slots)
    population = Population(drafter, 0)
    texts = {session: [int(token) for token in population.noise.integers(0, VOCAB, length + 30)]
             for session, length in enumerate(lengths)}
    drafter.open([Open(session, np.array(text[:-30], np.int32), 1, Sampling()) for session, text in texts.items()])
    drafter.absorb([rows for session, text in texts.items()
                    if (rows := population.states(session, 0, len(text) - 31)) is not None])
    nodes = 0
    for turn in range(30):
        growths = drafter.grow(list(texts), [8] * len(texts))
        if turn >= 1:
            assert all(len(growth.ids) for growth in growths), f"turn {turn}"
            nodes += sum(len(growth.ids) for growth in growths)
        bases = {session: len(text) - 30 + turn for session, text in texts.items()}
        drafter.commit([Commit(session, base, np.array(texts[session][base : base + 1], np.int32))
                        for session, base in bases.items()])
        drafter.absorb([rows for session, base in bases.items()
                        if (rows := population.states(session, base - 1, 1)) is not None])
    assert nodes > 0.97 * 29 * 8 * len(texts), "room is made for trees, too"
    drafter.close(list(texts))
    assert isinstance(drafter, NeuralDrafter)
    drafter.slots.check([])


def test_many_sessions_give_slots_up_without_a_look_at_all_of_them_for_each(make: Make,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of 300 sessions took a seventh longer: for each of those that gave some up, all were measured again."""
    looked, num_rows = [0], DraftContext.num_rows.fget

    def measured(context: DraftContext) -> int:
        looked[0] += 1
        return num_rows(context)  # type: ignore[misc]

    monkeypatch.setattr(DraftContext, "num_rows", property(measured))
    drafter = make({"drafter": "standalone"}, num_slots=6000)
    drafter.open([Open(session, np.full(60, session, np.int32), 1, Sampling()) for session in range(100)])
    for _ in range(20):
        drafter.read(range(100))
    drafter.open([Open(100, np.arange(600, dtype=np.int32) % VOCAB, 1, Sampling())])
    looked[0] = 0
    drafter.read([100])
    assert 100 <= looked[0] <= 250


def test_text_that_is_read_between_growths_does_not_make_the_next_tree_as_small_as_the_last_one(make: Make) -> None:
    drafter = make({"drafter": "standalone"})
    drafter.open([Open(1, np.arange(9, dtype=np.int32), 1, Sampling())])
    drafter.grow([1], [1])
    drafter.commit([Commit(1, 9, np.array([7], np.int32))])
    drafter.read([1])
    (growth,) = drafter.grow([1], [8])
    assert len(growth.ids) == 8


def test_what_is_sent_does_not_depend_on_rows_that_are_left_out(make: Make) -> None:
    """Whatever came before: nodes that the target has already, text that was read, trees that grew ahead."""
    rng, growth = random.Random(3), {"num_steps": 3, "topk": 3, "num_draft_tokens": 12}
    drafters = [make({"drafter": "standalone", "growth": growth}) for _ in range(2)]
    drafters[1]._prunes = False  # type: ignore[attr-defined]
    base, kept = 0, 0
    for turn in range(200):
        if turn % 20 == 0:  # it opens again
            sampling, base = Sampling(seed=turn, temperature=turn % 40 / 20, frequency_penalty=turn % 60 / 100), 9
            opened = Open(1, np.array([rng.randrange(VOCAB) for _ in range(9)], np.int32), 1, sampling)
            for drafter in drafters:
                drafter.open([opened])
        if rng.random() < 0.3:
            for drafter in drafters:
                drafter.read([1])
        budget, ahead, tree = rng.randrange(1, 13), turn % 20 > 14, drafters[0].tree(1)
        for steps in (rng.randrange(3) if tree.ahead else 2, rng.choice((1, 2))) if ahead else (0,):
            (found,), (right,) = (drafter.grow([1], [budget], steps) for drafter in drafters)
            for name in ("ids", "parents", "tokens", "scores"):
                assert np.allclose(getattr(found, name), getattr(right, name)), f"turn {turn}"
        path = tree.path(rng.choice([node for node, node_id in enumerate(tree.ids) if node_id] or [-1]))
        tokens = path if path and rng.random() < 0.7 else [*path, rng.randrange(VOCAB)]
        for drafter in drafters:
            drafter.commit([Commit(1, base, np.array(tokens, np.int32))])
        base += len(tokens)
        kept += not ahead and tree.num_sent > 0
    assert kept > 10, "the target had no nodes of a new tree"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.parametrize(("slots", "topk", "window"), [(2000, 1, WINDOWS[0]), (2000, 4, WINDOWS[0]),
                                                        (150, 3, WINDOWS[1])])
@pytest.mark.parametrize("kind", KINDS)
def test_growth_is_valid_and_slots_come_back(make: Make, kind: str, slots: int, topk: int, window: int,
                                             seed: int) -> None:
    drafter = make({"drafter": kind, "max_sessions": 5,
                    "growth": {"topk": topk, "num_steps": 3, "num_draft_tokens": 10}}, window, slots)
    population = Population(drafter, seed)
    for _ in range(120):
        what = population.rng.choices([population.open, population.commit, population.grow, population.close],
                                      [3, 6, 8, 1])[0]
        what()
    assert population.num_nodes > 40, f"seed {seed}"
    drafter.close(list(population.ledgers))
    if isinstance(drafter, NeuralDrafter):
        drafter.slots.check([])


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_drafter_declares(make: Make, kind: str) -> None:
    drafter = make({"drafter": kind, "max_sessions": 3}, num_slots=100)
    assert drafter.name == kind and drafter.max_sessions == 3 and drafter.max_context > 0
    assert 1 <= drafter.max_nodes <= 63
    assert drafter.vocab_size == (0 if kind == "ngram" else VOCAB)
    assert (drafter.features is not None) == (kind in ("eagle3", "mtp")) == (drafter.hidden_size > 0)


@pytest.mark.parametrize("window", [*WINDOWS, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rehearsal_drafts_and_leaves_nothing(make: Make, kind: str, window: int, monkeypatch: pytest.MonkeyPatch
                                               ) -> None:
    drafter, grown = make({"drafter": kind, "max_sessions": 1}, window, num_slots=300), list[int]()
    grow = drafter.grow

    def counted(ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        growths = grow(ids, budgets, steps)
        grown.extend(len(growth.ids) for growth in growths)
        return growths

    monkeypatch.setattr(type(drafter), "grow", lambda _, *asked: counted(*asked))
    rehearse(drafter, 8)
    assert (sum(grown) > 8) == (kind != "ngram"), "its text repeats nothing"
    if isinstance(drafter, NeuralDrafter):
        drafter.slots.check([])


def test_a_drafter_without_a_model_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft\.model"):
        create(DraftSection(drafter="eagle3"), ModelSection())
    with pytest.raises(ModelError, match=r"config\.json"):
        create(DraftSection(drafter="standalone", model=str(tmp_path)), ModelSection())


@pytest.mark.skipif(not MAPS.exists(), reason="needs /proc")
@pytest.mark.parametrize("kind", ["standalone", "eagle2", "eagle3", "native", "block", "nextn", "mtp"])
def test_no_draft_reads_the_files_of_head_and_target_once_it_is_loaded(tmp_path: Path, kind: str) -> None:
    """Who writes into a mapped file changes what is computed, and who makes it shorter ends the process."""
    mtp = {"nextn": "deepseek_v3", "mtp": "mimo"}.get(kind)
    target = (write_mtp_target(tmp_path / "target", mtp_config(mtp)) if mtp else
              write_tiny_model(tmp_path / "target", num_hidden_layers=8, hidden_size=48))
    write = {"standalone": write_tiny_model, "eagle2": write_eagle2_folder, "eagle3": write_eagle_folder,
             "native": lambda folder: write_eagle_folder(folder, NATIVE),
             "block": lambda folder: write_block_folder(folder, speculators_block_config())}.get(kind)
    head = write(tmp_path / "head") if write else Path()
    dtype = "bfloat16" if kind == "native" else "float32"
    for file in tmp_path.rglob("*.safetensors"):
        save_file({name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
                   for name, tensor in load_file(file).items()}, file)
    drafter = {"nextn": "mtp", "native": "eagle3"}.get(kind, kind)
    section = {"drafter": drafter, "model": str(head) if write else "", "dtype": dtype}
    made = create(DraftSection.model_validate(section), ModelSection(path=str(target)), 64)
    assert isinstance(made, NeuralDrafter)
    assert kind != "native" or (isinstance(made.network, EagleNetwork) and made.network.native is not None)
    assert str(tmp_path) not in MAPS.read_text()
