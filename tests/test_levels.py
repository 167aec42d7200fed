"""Trees whose levels grow at once are those that grow level by level, whatever comes between."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from slipstream.base.config import GrowthSection
from slipstream.choosing.noise import noise
from slipstream.drafting.graph import SESSIONS, GraphBackend, spare_slots
from slipstream.drafting.heads.checkpoint import EagleHead, read_head
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.neural import NeuralDrafter
from slipstream.engine.attention import PagedAttention, TorchAttention
from slipstream.engine.graphs import Capture, CudaCapture, Replay, capture_eager
from slipstream.engine.native.draft import Grown, Seed
from slipstream.engine.ops.races import MOST, ROW_PARAMS, DeviceRace
from slipstream.protocol.messages import Growth
from slipstream.protocol.requests import Sampling
from tests.both import MIXED, Both
from tests.eagle_folder import write_eagle_folder
from tests.pretended import GPU, pretended
from tests.test_pretended import LaunchedPages
from tests.tiny import VOCAB, write_tiny_model

CPU = torch.device("cpu")
FILTERED, NARROW = Sampling(temperature=0.8, top_p=0.9, seed=4), Sampling(temperature=0.8, top_k=3, seed=4)
SHAPES = [(4, 4), (2, 3), (1, 5), (3, 2)]  # topk, num_steps


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> EagleHead:
    folder = tmp_path_factory.mktemp("levels")
    return read_head(write_eagle_folder(folder / "head"), write_tiny_model(folder / "target", num_hidden_layers=8))


class Drawing(DeviceRace):
    """In torch's words."""

    def _best(self, logits: torch.Tensor, asked: torch.Tensor | None, sums: torch.Tensor | None, rows: int, most: int,
              wanted: int, noised: bool = True, held: int = MOST) -> torch.Tensor:
        assert noised and asked is not None and asked.shape == (rows, ROW_PARAMS)
        keys, places, heats = asked.unbind(1)[:3]
        ids = torch.arange(self.width) if self.vocabulary is None else self.vocabulary
        scores = logits[places].double() / heats.contiguous().view(torch.float64)[:, None] + noise(keys, ids[None])
        best, columns = scores.sort(dim=1, descending=True, stable=True)
        shares = torch.log_softmax(best[:, :most], 1)[:, :wanted].float().double()
        return torch.stack((ids[columns[:, :wanted]], shares.contiguous().view(torch.int64)))


class NothingAtOnce:
    """A ``TreeBackend`` that leaves trees to the specification, with all rows as in graphs."""

    max_batch, prunes = 1, False

    def reshape(self, topk: int, levels: int) -> None:
        pass

    def supports(self, rows: int, levels: int, topk: int, sampling: Sampling | None) -> bool:
        return False

    def grow_trees(self, seeds: Sequence[Seed], topk: int, alone: bool = False) -> Grown:
        raise AssertionError("it supports nothing")


class AtOnce(Both):
    """A drafter that grows at once, and another that does not."""

    def __init__(self, head: EagleHead, topk: int, steps: int, capture: Capture = capture_eager,
                 slots: int = 900, pages: PagedAttention | None = None, device: torch.device = CPU,
                 drawing: bool = False) -> None:
        race = Drawing(None, len(head.vocabulary), head.vocabulary) if drawing else None
        growth = GrowthSection(num_steps=steps, topk=topk, num_draft_tokens=12)
        networks = [EagleNetwork(head, "float64", device, slots, spare_slots=spare, race=race)
                    for spare in (spare_slots(topk, steps - 1), 0)]
        self.at_once = GraphBackend(networks[0], pages or TorchAttention(head.config, torch.float64), topk,
                                   steps - 1, capture)
        super().__init__([NeuralDrafter("eagle3", networks[0], growth, 20, backend=self.at_once),
                          NeuralDrafter("eagle3", networks[1], growth, 20, backend=NothingAtOnce())],
                         networks[0].features.width, torch.float64, 1e-9)

    def grow(self, sessions: list[int], budgets: Sequence[int] = (), steps: int = 0) -> list[Growth]:
        for loop in self.at_once.graphs():
            for buffer in loop.buffers():
                buffer.fill_(torch.nan if buffer.is_floating_point() else 1 << 20)
        return super().grow(sessions, budgets, steps)


class Counted:
    """Captures, and counts replays."""

    def __init__(self) -> None:
        self.made, self.replayed = 0, 0

    def __call__(self, run: Callable[[], None]) -> Replay:
        run()
        self.made += 1

        def replay() -> None:
            self.replayed += 1
            run()

        return replay


@pytest.mark.parametrize(("topk", "steps"), SHAPES)
def test_trees_are_those_that_grow_level_by_level(head: EagleHead, topk: int, steps: int) -> None:
    capture = Counted()
    both = AtOnce(head, topk, steps, capture)
    for session, length in enumerate((9, 30, 2, 17, 41), start=1):
        both.open(session, length)
    growths = both.grow([1, 2, 3, 4, 5])
    assert all(len(growth.tokens) == min(12, topk + (steps - 1) * topk * topk) for growth in growths)
    assert capture.made == 1 == capture.replayed
    both.commit(2, [*growths[1].tokens[:1].tolist(), 7])
    both.commit(4, [9])
    both.grow([2, 4])
    assert capture.made == 2 == capture.replayed
    both.close()


@pytest.mark.parametrize("drawing", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_a_population_of_sessions_notices_nothing(head: EagleHead, seed: int, drawing: bool) -> None:
    capture, rng = Counted(), random.Random(seed)
    both = AtOnce(head, 3, 4, capture, drawing=drawing)
    for _ in range(40):
        kind = rng.random()
        if kind < 0.3 or not both.bases:
            both.open(rng.randrange(1, 12), rng.randrange(2, 40), rng.choice((*MIXED, NARROW)))
        chosen = rng.sample(sorted(both.bases), rng.randrange(1, len(both.bases) + 1))
        growths = both.grow(chosen, [rng.choice([12, 12, 12, 3, 0])] * len(chosen), rng.choice([0, 0, 0, 1]))
        for growth in growths:
            if rng.random() < 0.7:
                path = growth.tokens[: rng.randrange(3)].tolist() if len(growth.tokens) else []
                both.commit(growth.session, [*path, rng.randrange(VOCAB)])
                if rng.random() < 0.3:
                    both.commit(growth.session, [rng.randrange(VOCAB)], with_states=rng.random() < 0.3)
    assert capture.replayed > 5, f"seed {seed}: nothing was tested"
    both.close()


def test_fewer_levels_than_a_graph_has_are_grown_by_it(head: EagleHead) -> None:
    capture = Counted()
    both = AtOnce(head, 4, 4, capture)
    for session in (1, 2, 3):
        both.open(session, 20)
    growths = both.grow([1, 2, 3], [2, 12, 1])
    assert [len(growth.tokens) for growth in growths] == [2, 12, 1] and capture.replayed == 1
    both.commit(1, [growths[0].tokens[0].item(), 7])
    both.grow([1], [12])
    assert capture.replayed == 2
    both.close()


def test_each_shape_that_is_tried_has_graphs_of_its_own(head: EagleHead) -> None:
    """As one that was asked for at the start: else what is tuned is not what will be served."""
    capture = Counted()
    both = AtOnce(head, 4, 4, capture)
    for made, (topk, steps) in enumerate([(2, 3), (4, 2), (2, 3), (1, 4), (4, 4)], start=1):
        for drafter in both.drafters:
            drafter.reshape(GrowthSection(num_steps=steps, topk=topk, num_draft_tokens=4))
        both.open(1, 20)
        both.grow([1], [4])
        assert capture.replayed == made, (topk, steps)
        both.close()
    for drafter in both.drafters:  # of the root's children alone, and of more than there are slots for
        drafter.reshape(GrowthSection(num_steps=1, topk=4, num_draft_tokens=4))
    both.open(1, 20)
    both.grow([1], [4])
    for drafter in both.drafters:
        drafter.reshape(GrowthSection(num_steps=4, topk=5, num_draft_tokens=4))
    both.open(1, 20)
    both.grow([1], [4])
    assert capture.replayed == 5 and capture.made == 4
    both.close()


def test_drawn_and_greedy_sessions_grow_at_once_too(head: EagleHead) -> None:
    capture = Counted()
    both = AtOnce(head, 3, 4, capture, drawing=True)
    for session, sampling in enumerate((MIXED[2], MIXED[0], MIXED[2], NARROW), start=1):
        both.open(session, 9 + session, sampling)
    both.grow([1, 2, 3])
    assert capture.made == 2 == capture.replayed
    both.grow([4])
    assert capture.replayed == 2, "what few tokens are left is ranked where filters are known"
    both.close()


def test_filters_that_leave_much_are_not_asked_in_a_graph(head: EagleHead) -> None:
    trees = []
    for sampling in (FILTERED, replace(FILTERED, top_p=1.0)):
        both = AtOnce(head, 3, 4, drawing=True)
        both.open(1, 12, sampling)
        (growth,) = both.drafters[0].grow([1], [12])
        trees.append((growth.tokens.tolist(), growth.parents.tolist()))
        assert len(both.at_once.graphs()) == 1
    assert trees[0] == trees[1]


def test_where_the_device_chose_other_rows_the_tree_goes_on_level_by_level(head: EagleHead) -> None:
    both: list[AtOnce] = []

    def capture(run: Callable[[], None]) -> Replay:
        run()

        def replay() -> None:
            run()
            picks = list(both[0].at_once.graphs()[0].buffers())[3]
            picks[:, 2] = picks[:, 2].flip(-1)  # of the third level's rows

        return replay

    both.append(AtOnce(head, 4, 4, capture))
    both[0].open(1, 20)
    both[0].grow([1])
    both[0].close()


def test_what_cannot_be_captured_grows_level_by_level(head: EagleHead) -> None:
    def capture(run: Callable[[], None]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    both = AtOnce(head, 4, 4, capture)
    both.open(1, 20)
    both.grow([1])
    assert not both.at_once.graphs() and both.at_once.warm() == 0
    both.close()


def test_too_few_slots_for_a_whole_tree_are_enough_for_a_level(head: EagleHead) -> None:
    capture = Counted()
    both = AtOnce(head, 4, 4, capture, slots=19 + 8)
    both.open(1, 20)
    (growth,) = both.grow([1])
    assert len(growth.tokens) == 12 and capture.replayed == 0
    both.close()


def test_loops_are_made_at_the_start_for_a_few_numbers_of_sessions(head: EagleHead) -> None:
    capture = Counted()
    assert AtOnce(head, 2, 3, capture).at_once.warm() == len(SESSIONS) == capture.made


def test_a_tree_that_no_word_holds_has_no_loop() -> None:
    assert spare_slots(8, 9) == 0 == spare_slots(4, 0) and spare_slots(4, 2) == SESSIONS[-1] * (4 + 4 * 2) + 1


def test_trees_at_once_on_a_gpu_in_name(head: EagleHead) -> None:
    """A captured tree is replayed as it was recorded: nothing of it is Python's to decide again."""
    with pretended() as gpu:
        both = AtOnce(head, 3, 4, CudaCapture(GPU), pages=LaunchedPages(head.config, gpu), device=GPU)
        assert both.at_once.warm() == len(gpu.graphs) > 1
        for session, length in enumerate((9, 30, 2), start=1):
            both.open(session, length)
        for turn in range(3):
            growths = both.grow([1, 2, 3][: 1 + turn])
            for session, growth in enumerate(growths, start=1):
                both.commit(session, [*growth.tokens[:1].tolist(), 7])
        both.close()
