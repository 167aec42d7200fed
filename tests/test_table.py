"""Batches over a table of slots against batches that list their contexts, over random populations: the same plan and
the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.base.config import ModelSection
from slipstream.engine.attention import TorchAttention, plan_pages
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.decoder import Decoder
from slipstream.engine.graphs import GraphedDecoder, Size, capture_eager, padded, sizes
from slipstream.engine.kv import FIRST_ROWS, FIRST_WIDTH, Row, SlotTable
from slipstream.engine.loading import load_model
from slipstream.engine.mirror import Mirror
from slipstream.engine.orders import ForwardOrder, decode_order, encode_order
from slipstream.engine.runner import ModelRunner
from tests.tiny import VOCAB, write_tiny_model
from tests.trees import random_tree

SHAPE = {"hidden_size": 64, "intermediate_size": 176, "head_dim": 32}
CPU, SLOTS, SPARE = torch.device("cpu"), 900, 40
SIZES = sizes((16, 32, 64, 128), (5, 9, 17))


@dataclass
class Session:
    """``slots``: those of its row, as a list of its own. The first ``borrowed`` are another's."""

    row: Row
    slots: list[int]
    borrowed: int


class Population:
    """Sessions that are begun behind a prefix that all share, prefilled, verified, and put back."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        self.runner, self.dice = runner, np.random.default_rng(seed)
        self.sessions: list[Session] = []
        self.accept: list[tuple[Session, list[int], list[int]]] = []  # of the last step: nodes that are kept
        self.prefix = self.open(0)

    def open(self, shared: int) -> Session:
        row = self.runner.table.add_row(int(self.dice.integers(200, 1500)))
        slots = self.prefix.slots[:shared] if shared else []
        row.write(0, slots)
        self.sessions.append(Session(row, list(slots), len(slots)))
        return self.sessions[-1]

    def close(self, session: Session) -> None:
        self.runner.slots.free(np.array(session.slots[session.borrowed :], np.int64))
        self.runner.table.free_row(session.row)
        self.sessions.remove(session)

    def change(self) -> None:
        if len(self.sessions) < 12:
            self.open(int(self.dice.integers(len(self.prefix.slots) + 1)))
        if len(self.sessions) > 3 and self.dice.integers(3) == 0:
            self.close(self.sessions[int(self.dice.integers(1, len(self.sessions)))])

    def step(self) -> tuple[ForwardBatch, ForwardBatch]:
        """A step of some of them, listed and over the table; what it computes is accepted in part."""
        by_list, by_row = BatchBuilder(), BatchBuilder()
        self.accept = []
        for session in self.sessions:
            if self.dice.integers(3) == 0 and session is not self.prefix:
                continue
            tree = random_tree(self.dice, int(self.dice.integers(1, 9)), vocab=VOCAB)
            rows, start = len(tree), len(session.slots)
            own, words = self.runner.slots.alloc(rows).tolist(), tree.ancestors() if rows > 2 else None
            depths = tree.levels() if words else list(range(rows))
            positions, masked = [start + depth for depth in depths], rows if words else 0
            by_list.add(tree.tokens, positions, own, np.array(session.slots, np.int64), words, masked)
            by_row.add_row(tree.tokens, positions, own, session.row, start, words, masked)
            kept = tree.path(int(self.dice.integers(rows))) if words else list(range(rows))
            self.accept.append((session, own, kept))
        return by_list.build(), by_row.build()

    def commit(self) -> None:
        for session, own, kept in self.accept:
            start = len(session.slots)
            session.slots += [own[node] for node in kept]
            session.row.write(start, session.slots[start:])
            self.runner.slots.free([slot for node, slot in enumerate(own) if node not in kept])


def test_trees_of_a_step_are_segments_added_one_by_one() -> None:
    dice, table = np.random.default_rng(3), SlotTable()
    for counts in ([1], [1, 1], [64], [2, 1, 9, 64, 1, 33]):
        trees = [(random_tree(dice, size, vocab=VOCAB), table.add_row(200), int(dice.integers(1, 90)))
                 for size in counts]
        slots = dice.permutation(1000)[: sum(counts) + 2].tolist()
        found, right = BatchBuilder(), BatchBuilder()
        for builder in (found, right):  # behind a prompt's rows
            builder.add_row([1, 2], [5, 6], slots[:2], table.add_row(9), 5, logits="none")
        levels, first = found.add_trees(trees, slots[2:]), 2
        for (tree, row, length), depths in zip(trees, levels, strict=True):
            plain, own = len(tree) == 1, slots[first : first + len(tree)]
            assert depths == tree.levels()
            right.add_row(tree.tokens, [tree.base - 1 + depth for depth in depths], own, row, length,
                          None if plain else tree.ancestors(), 0 if plain else len(tree))
            first += len(tree)
        same(right.build(), found.build(), 0)


@pytest.mark.parametrize(("kind", "changes", "section"), [
    ("llama", {}, ModelSection(kernels="native")), ("mistral", {"sliding_window": 70}, ModelSection(kernels="native")),
    ("llama", {}, ModelSection(dtype="float64")), ("mistral", {"sliding_window": 70}, ModelSection(kernels="torch"))])
def test_a_population_over_a_table_is_the_one_that_lists(tmp_path: Path, kind: str, changes: dict[str, int],
                                                         section: ModelSection) -> None:
    model = load_model(write_tiny_model(tmp_path, kind, **{**SHAPE, **changes}), section)
    runner = ModelRunner(model, SLOTS, SPARE)
    population = Population(runner, 7)
    for _ in range(25):
        population.change()
        right, found = population.step()
        same(right, found, changes.get("sliding_window", 0))
        assert torch.equal(runner.forward(found).clone(), runner.forward(right))
        population.commit()
    for session in list(population.sessions):
        assert session.row.slots[: len(session.slots)].tolist() == session.slots
        population.close(session)
    assert runner.table.num_used_rows == 0 and runner.slots.num_free == SLOTS


def test_captured_steps_over_a_table_are_steps_that_list(tmp_path: Path) -> None:
    section = ModelSection(dtype="float64")
    decoder = load_model(write_tiny_model(tmp_path, "mistral", **{**SHAPE, "sliding_window": 70}), section)
    assert isinstance(decoder, Decoder)
    graphed = GraphedDecoder(decoder, TorchAttention(decoder.config, torch.float64), capture_eager, SIZES)
    runner = ModelRunner(graphed, SLOTS, graphed.spare_slots)
    runner.pool.kv.fill_(torch.nan)  # nothing is read that was not written
    population = Population(runner, 11)
    for _ in range(25):
        population.change()
        right, found = population.step()
        for buffer in graphed.buffers():
            with torch.inference_mode():
                buffer.fill_(torch.nan if buffer.is_floating_point() else 1 << 30)
        hidden, _ = graphed.forward(found, runner.pool)
        assert torch.allclose(hidden, decoder.forward(right, runner.pool)[0], atol=1e-9)
        population.commit()
    assert graphed.num_graphs > 2


def test_a_mirror_is_sent_what_is_new_and_lists_what_the_host_would() -> None:
    table = SlotTable(range(900, 940))
    mirror, dice = Mirror(table, CPU), np.random.default_rng(3)
    rows = [(table.add_row(3000), 2000), (table.add_row(3000), 500)]
    for row, length in rows:
        row.write(0, dice.integers(900, size=length))
    unknown = []
    for turn in range(6):
        builder = BatchBuilder()
        for row, length in rows:
            builder.add_row([1], [length + turn], [int(dice.integers(900))], row, length + turn)
        plan, indices = plan_pages(builder.build()), torch.full((4000,), -1, dtype=torch.int32)
        if turn == 3:
            rows[0][0].write(1900, dice.integers(900, size=7))  # as another's prefix
        unknown.append(sum(length + turn + 1 - int(table.synced[row.number]) for row, length in rows))
        mirror.send(np.zeros(3, np.int64), plan, indices)
        total = len(plan.indices)
        assert indices[:total].tolist() == plan.indices.tolist() and bool((indices[total:] == plan.indices[-1]).all())
        if turn == 4:
            table.add_row(9000)  # it grows
    assert unknown == [2502, 2, 2, 1 + 104, 2, 2512]


def test_a_mirror_that_failed_half_way_begins_anew() -> None:
    table = SlotTable(range(900, 940))
    mirror, dice, row = Mirror(table, CPU), np.random.default_rng(4), table.add_row(3000)
    row.write(0, dice.integers(900, size=500))
    for length in (500, 520, 530):
        row.write(length - 20, dice.integers(900, size=20))
        builder = BatchBuilder()
        builder.add_row([1], [length], [int(dice.integers(900))], row, length)
        plan, indices = plan_pages(builder.build()), torch.full((600,), -1, dtype=torch.int32)
        if length == 520:
            with pytest.raises(ValueError):  # before anything was copied, as where a device is full
                mirror.send(np.zeros((3, 1), np.int64), plan, indices)
        else:
            mirror.send(np.zeros(3, np.int64), plan, indices)
            assert indices[: length + 1].tolist() == plan.indices.tolist()


def test_slots_that_are_given_as_lists_are_not_joined_again() -> None:
    builder = BatchBuilder()
    for first in (0, 10):
        builder.add([1], [9], [first + 9], np.arange(first, first + 9))
    batch = builder.build()
    assert np.shares_memory(batch.flat_kv_slots, batch.host.kv_slots)
    assert plan_pages(batch).indices.tolist() == [*range(20)]


def same(right: ForwardBatch, found: ForwardBatch, window: int) -> None:
    """The numbers of both, as they are, padded, and as they reach another rank."""
    spare = range(SLOTS, SLOTS + SPARE)
    size = Size(right.num_rows + 30, len(right.mask_lens) + 9)
    sent = decode_order(encode_order(ForwardOrder(0, SLOTS, (), found)), CPU)
    assert isinstance(sent, ForwardOrder)
    for one, other in ((right, found), (padded(right, size, spare), padded(found, size, spare)), (right, sent.batch)):
        assert (one.q_indptr, one.kv_indptr, one.mask_lens) == (other.q_indptr, other.kv_indptr, other.mask_lens)
        for name in ("tokens", "positions", "slots", "words", "logit_rows", "kv_slots"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        plans = plan_pages(one, window), plan_pages(other, window)
        for name in ("q_indptr", "kv_indptr", "indices", "firsts", "limits", "words"):
            assert np.array_equal(*(getattr(plan, name) for plan in plans)), name


def test_rows_keep_what_they_hold_when_the_table_grows() -> None:
    table = SlotTable(range(900, 940))
    rows = [table.add_row(10) for _ in range(FIRST_ROWS - 1)]
    for row in rows:
        row.slots[:3] = row.number
    wide, last = table.add_row(5 * FIRST_WIDTH), table.add_row(2)
    assert len({row.number for row in (*rows, wide, last)}) == FIRST_ROWS + 1 == table.num_used_rows
    assert len(wide.slots) == table.width == 5 * FIRST_WIDTH
    assert [row.slots[:3].tolist() for row in rows] == [[row.number] * 3 for row in rows]
    assert Row(table, 0).slots[:40].tolist() == list(range(900, 940))
    table.free_row(wide)
    with pytest.raises(AssertionError, match="twice"):
        table.free_row(wide)


def test_a_batch_is_of_one_table_or_of_none() -> None:
    row, other = SlotTable().add_row(5), SlotTable().add_row(5)
    builder = BatchBuilder()
    builder.add_row([1], [0], [3], row, 0)
    with pytest.raises(AssertionError):
        builder.add_row([1], [0], [4], other, 0)
    with pytest.raises(AssertionError):
        builder.add([1], [0], [4], np.zeros(0, np.int64))
