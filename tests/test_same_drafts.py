"""Whatever happened to a session, its drafter has the states of its text and proposes what it would propose for that
text at once. Answers are right whatever a drafter reads, so nobody else would see a mistake.

A target and a draft in one thread: prompts that the prefix cache has, chunks, answers that are put back or cancelled or
forbid drafts, grammars, log probabilities, prompt lookup, several turns, growth that comes late, a link
that breaks. Each row of states and each tree is compared with those of a session that is opened with the whole text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draft_service.worker import DraftWorker
from slipstream.base.config import DraftSection, ModelSection, TargetSection
from slipstream.decision.beliefs import StepCosts
from slipstream.drafting import create
from slipstream.drafting.neural import NeuralDrafter
from slipstream.drafting.tree import GrowingTree
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.loading import load_model
from slipstream.engine.runner import ModelRunner
from slipstream.grammar.compiling import Vocabulary
from slipstream.grammar.matcher import StopTokens
from slipstream.models.folder import load_tokenizer
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.grammar import Grammar
from slipstream.protocol.messages import PROTOCOL_VERSION, Features, Growth, Open, TargetHello
from slipstream.protocol.requests import Piece, Request, Sampling
from slipstream.wire.local import LocalLink
from target_service import step
from target_service.loop import TargetWorker
from target_service.service import deliver
from target_service.step import Limits
from tests.block_folder import speculators_block_config, write_block_folder
from tests.eagle_folder import speculators_config, speculators_tensors, write_eagle_folder
from tests.mtp_folder import mtp_config, write_mtp_target
from tests.pair import STUBBORN
from tests.test_lossless import drafter, model_folders
from tests.tiny import EOS, VOCAB

GRAMMAR = Grammar("regex", "([a-z]{3} [0-9]{2}, ){2,9}")
SAMPLINGS = (Sampling(), Sampling(temperature=1.0, seed=5), Sampling(temperature=0.8, top_p=0.9, seed=6),
             Sampling(frequency_penalty=0.5, logit_bias=((65, 2.0),)),
             Sampling(temperature=0.8, seed=13, presence_penalty=1.0, repetition_penalty=1.1, min_tokens=8,
                      stop_token_ids=(7, 32, 101, 116)))
BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": {"kind": "dflash"}, "gated": {"markov_head_type": "gated", "sample_from_anchor": False},
    "rnn": {"markov_head_type": "rnn"}}
Scored = dict[tuple[int, ...], float]


def scored(tree: GrowingTree) -> Scored:
    """The paths that were proposed since the last commit, with their scores; those that the target held before and
    that were not proposed again are no news."""
    old = set(tree._sent_children.values())
    for node, parent in enumerate(tree.parents):
        if parent in old:
            old.add(node)
    return {tuple(tree.path(node)): tree.scores[node] for node in range(len(tree.tokens)) if node not in old}


class Compared:
    """A drafter that is compared with another one, which hears of each text for the first time."""

    def __init__(self, make: Callable[[], NeuralDrafter], runner: ModelRunner, runs_ahead: bool) -> None:
        self.drafter, self.fresh, self.runner, self.runs_ahead = make(), make(), runner, runs_ahead
        self.spec = self.drafter.features
        self.known: dict[tuple[int, ...], bytes] = {}
        self.opened: dict[int, Open] = {}
        self.num_rows = self.num_trees = 0
        self.first_rows: dict[int, int] = {}  # of each session

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def text(self, session: int) -> list[int]:
        return self.drafter._contexts[session].tokens

    def states(self, text: Sequence[int]) -> bytes:
        """The rows of ``text`` without its newest token, computed at once."""
        assert self.spec is not None
        if (key := tuple(text)) in self.known:
            return self.known[key]
        writer, slots = self.runner.keep_features(self.spec), self.runner.slots.alloc(len(text) - 1)
        builder = BatchBuilder()
        builder.add(text[:-1], range(len(text) - 1), slots.tolist(), np.zeros(0, np.int64), logits="last")
        self.runner.forward(builder.build())
        self.known[key] = self.runner.feature_bytes(slots, writer)
        self.runner.slots.free(slots)
        return self.known[key]

    def open(self, opens: Sequence[Open]) -> list[int]:
        self.opened |= {message.session: message for message in opens}
        return self.drafter.open(opens)

    def absorb(self, features: Sequence[Features]) -> None:
        for message in features:
            text, end = self.text(message.session), message.start + message.num_rows
            assert end < len(text), "of a token that the draft knows"
            size, rows = len(message.rows) // message.num_rows, self.states(text)
            expected = np.frombuffer(rows[message.start * size : end * size])
            np.testing.assert_allclose(np.frombuffer(message.rows), expected, atol=1e-5)
            self.num_rows += message.num_rows
            self.first_rows.setdefault(message.session, message.start)
        self.drafter.absorb(features)

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        growths = self.drafter.grow(ids, budgets, steps)
        for session, budget in zip(ids, budgets, strict=True):
            tree = self.drafter.tree(session)
            if budget and tree.begun:
                self.num_trees += 1
                grown, whole = scored(tree), self.at_once(session, budget)
                common = sorted(whole.keys() & grown.keys())
                # Ahead of the target another part of the same tree is grown.
                assert common and (self.runs_ahead or grown.keys() == whole.keys())
                assert [grown[path] for path in common] == pytest.approx([whole[path] for path in common], abs=1e-4)
        return growths

    def at_once(self, session: int, budget: int) -> Scored:
        text = self.text(session)
        self.fresh.open([replace(self.opened[session], tokens=np.array(text, np.int32))])
        if self.spec is not None and len(text) > 1:
            self.fresh.absorb([Features(session, 0, self.states(text), len(text) - 1, self.spec.dtype)])
        self.fresh.grow([session], [budget])
        whole = scored(self.fresh.tree(session))
        self.fresh.close([session])
        return whole


def obliging(chooses: Callable[..., Any], rng: random.Random) -> Callable[..., Any]:
    """A target that often takes a draft token, so that trees are re-rooted at all depths."""
    def choose(runner: ModelRunner, trees: step.Trees, levels: Sequence[list[int]], *args: Any) -> Any:
        choices, first = [*(chosen := chooses(runner, trees, levels, *args))[0]], 0
        for (_, tree), level in zip(trees, levels, strict=True):
            for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
                choices[first + parent] = token if rng.random() < 0.4 else choices[first + parent]
            first += len(level)
        return choices, *chosen[1:]

    return choose


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("same")
    blocks = {name: write_block_folder(root / name, speculators_block_config(
        aux_hidden_state_layer_ids=[0, 1, 1], target_hidden_size=48, **changes)) for name, changes in BLOCKS.items()}
    fc_norm = speculators_config(eagle_aux_hidden_state_layer_ids=[0, 1, 1], fc_norm=True, norm_output=True)
    return model_folders(root) | blocks | {
        "fc_norm": write_eagle_folder(root / "fc_norm", fc_norm, speculators_tensors(fc_norm)),
        "mtp": write_mtp_target(root / "mtp", mtp_config("mimo", num_nextn_predict_layers=2))}


def pair(kind: str, run_ahead: int, folders: dict[str, Path], clock: Callable[[], float], lookup: bool = False
         ) -> tuple[TargetWorker, DraftWorker, LocalLink, Compared]:
    """A target with few slots and small steps, a draft, and their link, which is down."""
    folder = folders["mtp" if kind == "mtp" else "target"]
    model, growth = load_model(folder, ModelSection(dtype="float64")), {"num_steps": 4, "topk": 2}
    mtp = DraftSection.model_validate({"drafter": "mtp", "dtype": "float64", "growth": growth})

    def make() -> Any:
        if kind == "mtp":
            return create(mtp, ModelSection(path=str(folder), dtype="float64"), 2048)
        name = "block" if kind in BLOCKS else {"fc_norm": "eagle3"}.get(kind, kind)
        return drafter(name, folders if name == kind else folders | {name: folders[kind]})

    compared = Compared(make, ModelRunner(model, 256), run_ahead > 0)
    draft = DraftWorker(compared, "", 30.0, run_ahead, clock=clock)
    target = TargetWorker(ModelRunner(model, 150), TargetSection(policy=STUBBORN, slots=150, prompt_lookup=lookup),
                          StepCosts({1: 1e-2, 64: 2e-2}), TargetMetrics("tiny"), deliver, clock,
                          limits=Limits(4, 48, 16))
    shape = model.config
    hello = TargetHello(PROTOCOL_VERSION, 0, "tiny", shape.vocab_size, "", shape.hidden_size, shape.num_layers,
                        shape.max_context)
    return target, draft, LocalLink(hello, target.following, draft), compared


def ask(target: TargetWorker, first: int, texts: list[list[int]], rng: random.Random, vocabulary: Vocabulary) -> None:
    """Some answers that begin like others, or go on behind them."""
    prompt, answered = (text := rng.choice(texts))[: rng.randint(3, min(60, len(text)))], rng.choice([0, 0, 2])
    sampling, most = replace(rng.choice(SAMPLINGS), seed=first), answered + rng.choice([1, 9, 30])
    for number in range(first, first + rng.choice([1, 1, 2])):
        request = Request("", prompt, sampling, most, rng.choice([None, 2]), answered=answered,
                          prompt_logprobs=rng.choice([None, None, 1]))
        rule = vocabulary.compile(GRAMMAR, StopTokens((EOS,))) if not answered and rng.random() < 0.3 else None
        texts.append([*prompt])
        target.add_request(number, request, partial(write, texts[-1]), rule)


def write(text: list[int], piece: Piece | Exception) -> None:
    """Append what an answer says."""
    text += piece.tokens if isinstance(piece, Piece) else ()


@pytest.mark.parametrize(("kind", "run_ahead", "lookup"), [
    *((kind, 0, False) for kind in ("standalone", "pard", "mapped", "eagle3", "fc_norm", "mtp", "block", *BLOCKS)),
    ("standalone", 24, False), ("eagle3", 24, False), ("rnn", 24, False), ("standalone", 0, True), ("eagle3", 24, True),
    ("dflash", 0, True)])
def test_a_drafter_proposes_what_it_would_for_the_text_at_once(
        kind: str, run_ahead: int, lookup: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    rng, now_s = random.Random(run_ahead), [0.0]
    monkeypatch.setattr(step, "_choose", obliging(step._choose, rng))
    target, draft, link, compared = pair(kind, run_ahead, folders, lambda: now_s[0], lookup)
    events: list[Callable[[int], None]] = [target.cancel, lambda number: target.set_speculation(number, False),
                                           lambda number: target.set_speculation(number, True)]
    vocabulary = Vocabulary(load_tokenizer(folders["target"]), VOCAB)
    texts = [[rng.randrange(VOCAB) for _ in range(50)] for _ in range(2)]
    link.restore()
    for turn in range(60):
        if turn % 4 == 0:
            ask(target, 100 * turn, texts, rng, vocabulary)
        if rng.random() < 0.1:
            rng.choice(events)(400 * rng.randrange(turn // 4 + 1))
        if rng.random() < 0.03:
            link.cut()
        elif turn % 3 == 0:
            link.restore()
        for _ in range(rng.choice([0, 1, 1, 2])):
            draft.turn(block=False)
        target.poll()
        now_s[0] += 0.004
    assert compared.num_trees > 20 and (compared.spec is None or compared.num_rows > 100)


def test_a_prompt_that_was_read_before_the_first_draft_came_has_its_states_once_it_is_asked_again(
        folders: dict[str, Path]) -> None:
    target, draft, link, compared = pair("eagle3", 0, folders, lambda: 0.0)
    cached = dict[int, int]()

    def note(piece: Piece | Exception, number: int) -> None:
        assert isinstance(piece, Piece)
        cached.setdefault(number, piece.cached_tokens)

    for number in range(3):  # the first answer goes on meanwhile, and holds the prompt in the prefix cache
        target.add_request(number, Request("", list(range(40)), Sampling(), (60, 4, 4)[number], speculate=number > 0),
                           partial(note, number=number))
        for _ in range(12):
            target.poll()
            draft.turn(block=False)
        link.restore()
    assert compared.first_rows == {1: 0, 2: 0}
    assert cached == {0: 0, 1: 0, 2: 39}, "it is computed once more, and no more"
