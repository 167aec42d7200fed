"""The standalone drafter against its own model run plainly: the same trees, whatever was cached, kept or slid away."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from draft_service.worker import DraftWorker
from slipstream.base.config import DraftSection, GrowthSection, ModelSection
from slipstream.base.errors import ConfigError, ModelError
from slipstream.choosing.logits import TokenHistory
from slipstream.choosing.sampling import ChoiceRows, rank
from slipstream.drafting import create
from slipstream.drafting.neural import NeuralDrafter
from slipstream.drafting.standalone import StandaloneNetwork
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.loading import load_model
from slipstream.engine.runner import ModelRunner
from slipstream.models.folder import tokenizer_hash
from slipstream.protocol.messages import Commit, Growth, Open
from slipstream.protocol.requests import Request, Sampling
from tests.growth_rules import GrowthLedger, assert_same, best_paths, scored_paths
from tests.pair import local_link_to, target
from tests.tiny import VOCAB, write_tiny_model
from tests.written import WrittenPard

CHAIN = {"num_steps": 4, "topk": 1, "num_draft_tokens": 4}  # where a test says nothing else


def runner(folder: Path, num_slots: int = 600) -> ModelRunner:
    return ModelRunner(load_model(folder, ModelSection(dtype="float64")), num_slots)


def drafter(folder: Path, num_slots: int = 600, max_sessions: int = 8, max_context: int = 0,
            **growth: int) -> NeuralDrafter:
    return NeuralDrafter("standalone", StandaloneNetwork(runner(folder, num_slots)),
                         GrowthSection.model_validate(CHAIN | growth), max_sessions, max_context)


def opening(session: int, tokens: Sequence[int], sampling: Sampling | None = None) -> Open:
    return Open(session, np.array(tokens, np.int32), min(4, len(tokens)), sampling or Sampling())


def commit(session: int, base: int, tokens: Sequence[int]) -> Commit:
    return Commit(session, base, np.array(tokens, np.int32))


class Plain:
    """The draft model run without any cache, as the oracle."""

    def __init__(self, folder: Path) -> None:
        self.runner = runner(folder)

    def children(self, path: tuple[int, ...], tokens: Sequence[int], topk: int, sampling: Sampling,
                 seen: int | None = None) -> tuple[list[int], list[float]]:
        """Ranked children of ``path`` below ``tokens``; seen: how many of the last tokens the model sees."""
        text = [*tokens[-(seen or len(tokens)):], *path]
        slots = self.runner.slots.alloc(len(text))
        builder = BatchBuilder()
        builder.add(text, range(len(text)), slots.tolist(), np.zeros(0, np.int64), logits="last")
        logits = self.runner.forward(builder.build())
        self.runner.slots.free(slots)
        history = TokenHistory.of(sampling, tokens[:4])
        if history is not None:
            history.append(tokens[4:])
        rows = ChoiceRows(sampling, range(1), [len(tokens) + len(path)], [len(tokens) - 4 + len(path)], history, [path])
        ids, scores = rank(logits, rows, topk)
        return ids[0].tolist(), scores[0].tolist()


def grow(of: NeuralDrafter, session: int, budget: int) -> Growth:
    (growth,) = of.grow([session], [budget])
    return growth


SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=11),
             Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4, seed=12),
             Sampling(min_tokens=11, stop_token_ids=tuple(range(0, VOCAB, 5)))]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "penalties", "min_tokens"])
@pytest.mark.parametrize(("topk", "steps", "nodes"), [(1, 4, 4), (3, 3, 7)])
def test_trees_are_those_of_the_plain_model(tiny_draft_folder: Path, sampling: Sampling, topk: int, steps: int,
                                            nodes: int) -> None:
    rng = random.Random(5)
    plain = Plain(tiny_draft_folder)
    of = drafter(tiny_draft_folder, topk=topk, num_steps=steps, num_draft_tokens=nodes)
    tokens = [rng.randrange(VOCAB) for _ in range(12)]
    of.open([opening(1, tokens, sampling)])
    for turn in range(5):
        growth = grow(of, 1, 63)
        wanted = best_paths(partial(plain.children, tokens=tokens, topk=topk, sampling=sampling), topk, steps,
                            nodes)
        assert_same(growth, wanted, f"turn {turn}")
        # Follow the tree for a while, so that drafted KV is kept, and leave it at the end.
        longest = max(scored_paths(growth), key=len)[:turn]
        new = [*longest, rng.randrange(VOCAB)]
        of.commit([commit(1, len(tokens), new)])
        tokens += new
    of.close([1])
    of.slots.check([])


def test_accepted_rows_are_not_computed_again(tiny_draft_folder: Path) -> None:
    of = drafter(tiny_draft_folder, num_steps=4, num_draft_tokens=4)
    of.open([opening(1, range(20))])
    chain = grow(of, 1, 4).tokens.tolist()
    free = of.slots.num_free
    assert free == 600 - 20 - 3  # the deepest level costs no forward
    of.commit([commit(1, 20, [*chain[:3], 7])])
    assert of.slots.num_free == free  # three nodes became true
    grow(of, 1, 1)
    assert of.slots.num_free == free - 1  # the bonus token alone was computed


def test_growth_ahead_is_kept_below_a_commit(tiny_draft_folder: Path) -> None:
    """A level at a time, deeper than one ancestor word reaches; what survives a commit is what the model would say."""
    plain, of = Plain(tiny_draft_folder), drafter(tiny_draft_folder, 1500, topk=2, num_steps=3, num_draft_tokens=8)
    tokens = list(range(30, 42))
    ledger = GrowthLedger(tokens)
    of.open([opening(1, tokens)])
    for turn in range(3):
        for _ in range(12):
            free = of.slots.num_free
            ledger.take(of.grow([1], [40], 1)[0], 40, VOCAB)
            assert free - of.slots.num_free <= 20, "a node is computed for each two that are sent"
            free = of.slots.num_free
        assert len(ledger.tree) > 140, "64 computed nodes have no more than 129 children and a root"
        for node in (3, len(ledger.tree) // 2, len(ledger.tree) - 1):
            path = [ledger.tree.tokens[at] for at in ledger.tree.path(node)[1:]]
            score = 0.0
            for depth, token in enumerate(path):
                ids, scores = plain.children(tuple(path[:depth]), tokens, 2, Sampling())
                score += scores[ids.index(token)]
            assert ledger.tree.scores[node] == pytest.approx(score, abs=1e-5), (turn, node)
        best = ledger.tree.best(3)
        new = [best.tokens[at] for at in best.path(len(best) - 1)[1:]]
        of.commit([commit(1, len(tokens), new)])
        ledger.commit(new)
        tokens += new
        assert len(ledger.tree) > 1 and of.slots.num_free > free, "its siblings' slots came free"
    of.close([1])
    of.slots.check([])


def test_a_tree_that_grows_ahead_ends_with_the_window(tiny_draft_folder: Path) -> None:
    """No row stands behind the last position that the model knows."""
    of, window = drafter(tiny_draft_folder, max_context=40), 40
    of.open([opening(1, range(30))])
    for _ in range(20):
        of.grow([1], [9], 1)
    assert 30 - 1 + max(of.tree(1).depths[node] for node in of.tree(1).computed) == window - 1


def test_growing_on_at_the_same_base(tiny_draft_folder: Path) -> None:
    of = drafter(tiny_draft_folder, num_steps=2, num_draft_tokens=6, topk=2)
    tokens = list(range(30, 42))
    ledger = GrowthLedger(tokens)
    of.open([opening(1, tokens)])
    for _ in range(6):
        ledger.take(grow(of, 1, 6), 6, VOCAB)
    assert len(ledger.tree) > 20
    deepest = max(range(len(ledger.tree)), key=lambda n: len(ledger.tree.path(n)))
    assert len(ledger.tree.path(deepest)) - 1 > 4
    plain = Plain(tiny_draft_folder)
    path = [ledger.tree.tokens[at] for at in ledger.tree.path(deepest)[1:]]
    score = 0.0
    for depth, token in enumerate(path):
        ids, scores = plain.children(tuple(path[:depth]), tokens, 2, Sampling())
        score += scores[ids.index(token)]
    assert ledger.tree.scores[deepest] == pytest.approx(score, abs=1e-5)


def test_sessions_of_a_batch_do_not_touch_each_other(tiny_draft_folder: Path) -> None:
    texts = {n: [(n * 37 + i * 11) % VOCAB for i in range(3 + 9 * n)] for n in range(5)}
    together = drafter(tiny_draft_folder, topk=2, num_steps=3, num_draft_tokens=6)
    together.open([opening(n, text) for n, text in texts.items()])
    growths = together.grow(list(texts), [6, 5, 4, 3, 2])
    for growth, budget in zip(growths, [6, 5, 4, 3, 2], strict=True):
        alone = drafter(tiny_draft_folder, topk=2, num_steps=3, num_draft_tokens=6)
        alone.open([opening(growth.session, texts[growth.session])])
        assert_same(growth, scored_paths(grow(alone, growth.session, budget)), growth.session)


@pytest.mark.parametrize("length", [10, 45, 200])
def test_a_long_session_slides(tiny_draft_folder: Path, length: int) -> None:
    rng = random.Random(length)
    window, steps = 40, 3
    plain = Plain(tiny_draft_folder)
    of = drafter(tiny_draft_folder, num_slots=48, max_context=window, num_steps=steps, num_draft_tokens=3)
    tokens, start = [rng.randrange(VOCAB) for _ in range(length)], 0
    of.open([opening(1, tokens)])
    for turn in range(30):
        growth = grow(of, 1, 3)
        if len(tokens) + steps - start > window:
            start = len(tokens) - window // 2
        seen = len(tokens) - start
        wanted = best_paths(partial(plain.children, tokens=tokens, topk=1, sampling=Sampling(), seen=seen), 1,
                            steps, 3)
        assert_same(growth, wanted, f"turn {turn}, {len(tokens)} tokens")
        new = [*growth.tokens[:turn % 3].tolist(), rng.randrange(VOCAB)]
        of.commit([commit(1, len(tokens), new)])
        tokens += new


def test_a_long_prompt_is_computed_in_chunks(tiny_draft_folder: Path) -> None:
    of = drafter(tiny_draft_folder, num_slots=2000)
    of.open([opening(1, [n % VOCAB for n in range(1200)]), opening(2, range(40))])
    sizes = [[len(growth.ids) for growth in of.grow([1, 2], [4, 4])] for _ in range(3)]
    assert sizes[0] == [0, 4] and sizes[2][0] == 4


def test_a_text_that_is_read_takes_no_more_than_a_window(tiny_draft_folder: Path) -> None:
    """Nobody grows what lies before it, and in a pool of few slots others would have none."""
    of = drafter(tiny_draft_folder, max_context=40)
    of.open([opening(1, [n % VOCAB for n in range(300)])])
    assert of.read([1]) == [] and of.slots.num_slots - of.slots.num_free <= 40
    assert len(grow(of, 1, 4).ids) == 4


def test_a_token_beyond_its_vocabulary_is_read_as_the_last_one(tiny_draft_folder: Path) -> None:
    """Targets with more padding have some, and a client may write them into a prompt."""
    found = []
    for token in (VOCAB - 1, VOCAB, VOCAB + 500):
        of = drafter(tiny_draft_folder)
        of.open([opening(1, [1, token, 2])])
        grow(of, 1, 1)
        of.commit([commit(1, 3, [token])])
        found.append(scored_paths(grow(of, 1, 4)))
    assert found[0] == found[1] == found[2]


def test_without_slots_nothing_grows_and_nothing_breaks(tiny_draft_folder: Path) -> None:
    of = drafter(tiny_draft_folder, num_slots=24)
    of.open([opening(1, range(20)), opening(2, range(20))])
    assert of.read([1, 2]) == [2] and of.read([1, 2]) == [], "and nobody asks again and again"
    growths = {growth.session: len(growth.ids) for growth in of.grow([1, 2], [4, 4])}
    assert sorted(growths.values()) == [0, 4]
    fed = next(session for session, count in growths.items() if count)
    of.close([fed])
    assert len(grow(of, 3 - fed, 4).ids) == 4
    of.close([3 - fed])
    of.slots.check([])


def test_budgets_and_room(tiny_draft_folder: Path) -> None:
    of = drafter(tiny_draft_folder, max_sessions=1)
    assert of.open([opening(1, range(5)), opening(2, range(5))]) == [2]
    assert of.grow([2, 9], [4, 4]) == []
    assert len(grow(of, 1, 0).ids) == 0 and len(grow(of, 1, 2).ids) == 2
    of.commit([commit(2, 5, [1])])
    of.close([2, 9])


def test_a_window_too_small_for_a_tree_is_refused(tiny_draft_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft\.growth\.num_steps"):
        drafter(tiny_draft_folder, max_context=6, num_steps=4)


def test_the_noise_is_shared_with_a_target_that_samples(tiny_draft_folder: Path) -> None:
    # A drafter that is the target proposes at every node exactly what the target will sample there.
    sampling = Sampling(temperature=1.0, seed=99)
    of, plain = drafter(tiny_draft_folder, num_steps=4, num_draft_tokens=4), Plain(tiny_draft_folder)
    tokens = list(range(60, 70))
    of.open([opening(1, tokens, sampling)])
    chain = grow(of, 1, 4).tokens.tolist()
    for depth, token in enumerate(chain):
        assert plain.children(tuple(chain[:depth]), tokens, 1, sampling)[0] == [token]
    assert len(set(chain)) > 1


@pytest.mark.parametrize(("topk", "steps", "nodes"), [(1, 4, 4), (3, 3, 20)])
def test_masks_are_filled_in_one_pass(tmp_path: Path, topk: int, steps: int, nodes: int) -> None:
    """PARD: what a commit leaves is computed with its own tokens, never with masks."""
    folder = write_tiny_model(tmp_path, pard_token=258)
    config = json.loads((folder / "config.json").read_text())
    straight = WrittenPard(config, load_file(folder / "model.safetensors"), steps - 1)
    of = created(folder, topk, steps, nodes)
    tokens, rng = list(range(30, 37)), random.Random(2)
    of.open([opening(1, tokens)])
    for turn in range(3):
        (growth,) = of.grow([1], [63])
        wanted = best_paths(partial(straight.children, tokens=tokens, topk=topk), topk, steps, nodes)
        assert_same(growth, wanted, turn)
        (more,) = of.grow([1], [9], steps=1)  # ahead, as far as the masks reach
        assert len(more.ids) <= 9
        new = [*max(scored_paths(growth), key=len)[: turn + 1], rng.randrange(VOCAB)]
        of.commit([commit(1, len(tokens), new)])
        tokens += new
    of.close([1])
    of.slots.check([])


def created(folder: Path, topk: int, steps: int, nodes: int, dtype: Literal["float64", "bfloat16"] = "float64"
            ) -> NeuralDrafter:
    section = DraftSection(drafter="standalone", model=str(folder), dtype=dtype, growth=GrowthSection(
        num_steps=steps, topk=topk, num_draft_tokens=nodes))
    of = create(section, ModelSection(path=str(folder)), 600)
    assert isinstance(of, NeuralDrafter)
    return of


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_many_sessions_with_masks_draft_as_each_alone(tmp_path: Path, dtype: Literal["float64", "bfloat16"]) -> None:
    """On torch and on our kernels."""
    folder = write_tiny_model(tmp_path, pard_token=258, hidden_size=64, intermediate_size=176, head_dim=32)
    together, texts = created(folder, 2, 3, 6, dtype), {n: list(range(n, 2 * n + 3)) for n in range(1, 12)}
    together.open([opening(n, text) for n, text in texts.items()])
    for growth, (n, text) in zip(together.grow(list(texts), [6] * len(texts)), texts.items(), strict=True):
        alone = created(folder, 2, 3, 6, dtype)
        alone.open([opening(n, text)])
        (expected,) = alone.grow([n], [6])
        assert growth.tokens.tolist() == expected.tokens.tolist() and len(growth.ids) == 6
        assert growth.scores.tolist() == pytest.approx(expected.scores.tolist(), abs=1e-6)


def test_a_mask_outside_the_vocabulary_is_refused_by_its_field(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pard_token: expected a number from 0 to 259, found 260"):
        created(write_tiny_model(tmp_path, pard_token=VOCAB), 2, 3, 6)
    for said in ({"pard2": True}, {"spd_type": "pard2"}):
        with pytest.raises(ModelError, match="pard2: such a model reads the target's states"):
            created(write_tiny_model(tmp_path, pard_token=258, **said), 2, 3, 6)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "penalties", "min_tokens"])
@pytest.mark.parametrize("pard", [False, True], ids=["", "pard"])
def test_padding_is_never_drafted(tmp_path: Path, sampling: Sampling, pard: bool) -> None:
    """Rows behind the tokenizer's last token, here the loudest of all: no target need have them."""
    folder = write_tiny_model(tmp_path, vocab=VOCAB + 60, **{"pard_token": 258} if pard else {})
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][VOCAB:] *= 30
    save_file(tensors, folder / "model.safetensors")
    growth = GrowthSection(num_steps=4, topk=4, num_draft_tokens=32)
    of = create(DraftSection(drafter="standalone", model=str(folder), dtype="float64", growth=growth),
                ModelSection(), 600)
    of.open([opening(1, list(b"the cat"), sampling)])
    assert (found := grow(of, 1, 32).tokens.tolist()) and max(found) < VOCAB


async def test_a_draft_with_less_padding_reads_what_it_has_no_row_for(tmp_path: Path) -> None:
    """The target's padding is in its prompt, its answer, its bias and its stop tokens."""
    padded = write_tiny_model(tmp_path / "target", vocab=VOCAB + 60)
    folder = write_tiny_model(tmp_path / "draft", noise=0.05)
    growth = GrowthSection(num_steps=4, topk=2, num_draft_tokens=8)
    made = create(DraftSection(drafter="standalone", model=str(folder), dtype="float64", growth=growth),
                  ModelSection(), 600)
    sampling = Sampling(temperature=1.0, seed=3, repetition_penalty=1.1, min_tokens=4, stop_token_ids=(VOCAB + 9,),
                        logit_bias=tuple((VOCAB + i, 3.0) for i in range(60)))
    request = Request("1", (*b"the cat", VOCAB + 1, VOCAB + 59, *b"the cat"), sampling, 40)
    async with target(padded) as rig:
        plain = [token for piece in await rig.answer(request) for token in piece.tokens]
        hello = replace(rig.hello, tokenizer_hash=tokenizer_hash(folder))
        worker = DraftWorker(made, tokenizer_hash(folder), 30.0)
        worker.start()
        with local_link_to(hello, rig.worker.following, worker) as link:
            assert not link.status().problem
            pieces = await rig.answer(request)
        await asyncio.to_thread(worker.stop)
    assert [token for piece in pieces for token in piece.tokens] == plain and max(plain) >= VOCAB
    assert sum(piece.drafted for piece in pieces) > 8
