"""PromptLookup: what a text foretells, how far it is believed, and what it does in a running target."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.base.config import PolicySection
from slipstream.decision.beliefs import Beliefs, StepCosts
from slipstream.decision.decide import Round, RoundInputs
from slipstream.decision.policy import SpeculationPolicy
from slipstream.drafting.ngram import ORDERS, NgramDrafter
from slipstream.following.following import MAX_HELD_COMMITS
from slipstream.protocol.grammar import Grammar
from slipstream.protocol.messages import Commit, DraftBound, Faults, Peer, PeerEvents
from slipstream.protocol.requests import Piece, Request, Sampling
from slipstream.protocol.session import Doubt, PromptLookup
from tests.pair import STUBBORN, drafting, local_link, target
from tests.tiny import EOS, write_tiny_model

COSTS = {1: 8e-3, 2: 8e-3, 8: 9.4e-3, 16: 12.8e-3, 64: 34e-3}


def test_a_chain_follows_the_longest_match_and_its_chances_fall() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4, 1, 2, 3, 4])
    tokens, chances = lookup.chain(4)
    assert tokens == [5, 6, 7, 8]  # 1 2 3 4 beats the newer 3 4
    assert chances == pytest.approx([4 / 6, 4 / 6 * 5 / 7, 4 / 6 * 5 / 7 * 6 / 8, 4 / 6 * 5 / 7 * 6 / 8 * 7 / 9])
    assert PromptLookup([1, 2, 3]).chain(4) == ([], [])


def test_a_chain_goes_on_with_its_own_beginning() -> None:
    assert PromptLookup([7, 1, 2, 1, 2]).chain(5)[0] == [1, 2, 1, 2, 1]


def test_what_is_forced_comes_first_and_is_doubted_where_others_spell_it() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    agree, chances = lookup.chain(4, [4, 5])
    assert agree == [4, 5, 6, 7], "the text goes on behind it"
    assert chances == pytest.approx([0.95, 0.95, 0.95 * 5 / 7, 0.95 * 5 / 7 * 6 / 8])
    assert lookup.chain(4, [4, 9]) == ([4, 9], [0.95, 0.95]) and lookup.chain(1, [4, 9])[0] == [4]
    assert lookup.chain(0, [4, 9]) == lookup.chain(-1, [4, 9]) == ([], [])
    for _ in range(30):
        lookup.chain(4, [4, 9])
        lookup.commit([4, 8])
    assert lookup.chain(4, [4, 9])[1][0] < 0.4
    for _ in range(60):
        lookup.chain(4, [4, 9])
        lookup.commit([4])
    assert lookup.chain(4, [4, 9])[1][0] > 0.8


@pytest.mark.parametrize("right", [0.3, 0.6, 0.9])
def test_the_doubt_is_what_the_text_shows(right: float) -> None:
    """Each block of 40 repeats the one before it, but for tokens that are new by chance."""
    rng, text, new = random.Random(7), list(range(40)), 1000
    lookup, doubts = PromptLookup(text), []
    for _ in range(4000):
        token = text[-40]
        if rng.random() > right:
            token, new = new, new + 1
        text.append(token)
        lookup.commit([token])
        doubts.append(lookup.doubt)
    met = [length for length in range(2, 33) for _ in range(round(1000 * right**length))]
    told = sum(length / (length + sum(doubts) / len(doubts)) for length in met) / len(met)
    assert told == pytest.approx(right, abs=0.12), (right, told)


def test_a_commit_shows_what_was_right_up_to_the_first_wrong_token() -> None:
    right, wrong = PromptLookup([1, 2, 3, 1, 2, 3]), PromptLookup([1, 2, 3, 1, 2, 3])
    right.commit([1, 2, 9])  # a match of three tokens, which had become five
    wrong.commit([9, 2, 3])
    num_correct, wrong_length = 6.0, 12.0  # assumed at the start
    assert wrong.doubt == pytest.approx((0.97 * wrong_length + 3) / (0.97 * num_correct))
    for correct, length in ((1, 0), (1, 0), (0, 5)):
        num_correct, wrong_length = 0.97 * num_correct + correct, 0.97 * wrong_length + length
    assert right.doubt == pytest.approx(wrong_length / num_correct)


def test_what_went_wrong_is_doubted_and_forgiven() -> None:
    loop = [1, 2, 3, 4, 5, 6]
    lookup = PromptLookup(loop * 3)
    first = lookup.doubt
    for new in range(100, 106):
        lookup.commit([new])
        lookup.commit(loop)
    doubted = lookup.doubt
    for _ in range(40):
        lookup.commit(loop)
    assert doubted > first > lookup.doubt


def policy_of(exchange_s: float | None = None, most: int = 16) -> SpeculationPolicy:
    beliefs = Beliefs(StepCosts(COSTS))
    if exchange_s is not None:
        beliefs.latency.observe(exchange_s)
    return SpeculationPolicy(PolicySection(max_nodes=most), beliefs)


def looked_up(policy: SpeculationPolicy, chances: list[float], followed: bool = False, others: int = 0) -> int:
    return policy.decide(RoundInputs(others, followed, chances)).lookup


def test_as_many_are_verified_as_pay() -> None:
    alone = policy_of()
    assert looked_up(alone, []) == 0
    assert looked_up(alone, [0.9**n for n in range(1, 17)]) >= 8
    assert looked_up(alone, [0.05]) == 1  # a second row is free here
    assert looked_up(alone, [0.3, 0.09, 0.027]) < 3
    assert looked_up(alone, [0.3], others=31) == 0


def test_a_text_begins_with_what_others_of_its_kind_have_shown() -> None:
    known, rng = Doubt(), np.random.default_rng(0)
    for _ in range(20):
        lookup = PromptLookup([1, 2, 3], known)
        for token in rng.integers(0, 8, 40).tolist():  # matches that mean nothing
            lookup.commit([token])
    late = PromptLookup([1, 2, 3, 4, 1, 2, 3], known)
    assert PromptLookup([1, 2, 3]).doubt == 2.0 < 4.0 < late.doubt
    assert late.chain(1)[1][0] < 0.45 < PromptLookup([1, 2, 3, 4, 1, 2, 3]).chain(1)[1][0]
    known.num_correct = 0.0
    assert PromptLookup([1], known).doubt == 16.0, "and can learn better soon"


def test_a_drafter_is_asked_where_its_tree_is_worth_the_wait() -> None:
    chances = [0.4, 0.16]
    assert looked_up(policy_of(exchange_s=50e-3), chances, True) == 2
    assert looked_up(policy_of(exchange_s=1e-4), chances, True) == 0
    assert looked_up(policy_of(exchange_s=1e-4), [0.95**n for n in range(1, 17)], True) > 8


def test_sessions_of_one_step_see_what_the_others_look_up() -> None:
    """A few rows are nearly free; behind them each costs all."""
    beliefs = Beliefs(StepCosts({1: 10e-3, 8: 11e-3, 10: 11.2e-3, 12: 13.5e-3, 16: 16e-3, 64: 40e-3}))
    policies = [SpeculationPolicy(PolicySection(), beliefs) for _ in range(8)]
    seen = RoundInputs(7, False, [0.25, 0.05])
    assert policies[0].decide(seen).lookup == 1
    assert all(one.decide(seen).lookup == 1 for one in policies), "each for itself"
    together = SpeculationPolicy.decide_step([(one, seen) for one in policies])
    assert [decision.lookup for decision in together] == [1, 1, 0, 0, 0, 0, 0, 0]


def test_nobody_is_asked_while_the_text_s_own_chain_is_verified() -> None:
    decision = policy_of(exchange_s=50e-3).decide(RoundInputs(0, True, [0.9, 0.8]))
    assert decision.lookup == 2 and decision.why == "prompt lookup"
    assert not decision.num_wanted and decision.wait_s == 0.0 and decision.follow


def test_not_where_a_drafter_is_on_probe_but_where_none_is_allowed() -> None:
    policy = policy_of()
    assert looked_up(policy, [0.9]) == 1
    policy.forbid(1.0)
    assert looked_up(policy, [0.9]) == 1 and policy.decide(RoundInputs(0, True, [0.9])).num_wanted == 0
    policy.allow(2.0)
    assert policy.probing and looked_up(policy, [0.9], followed=True) == 0
    assert looked_up(policy, [0.9]) == 1, "nobody is there to be tried"
    assert looked_up(policy_of(most=0), [0.9]) == 0


def test_its_rounds_say_nothing_about_the_drafter() -> None:
    policy = policy_of()
    before = policy.decide(RoundInputs(followed=True)).verify
    assert looked_up(policy, [0.95**n for n in range(1, 17)], True)
    for _ in range(50):
        policy.observe(1.0, Round(8, 0, verify_s=9.4e-3, wait_s=0.0, rows=9, lookup=True))
    assert policy.decide(RoundInputs(followed=True)).verify == before and policy.gain == 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("lookup") / "target")


def asked(number: int, speculate: bool = True, max_tokens: int = 40) -> Request:
    prompt = b"one two three one two three one two three " * (1 + number)
    bias = tuple((token, 3.0) for token in prompt[:14])  # so that the tiny model's text repeats itself
    return Request(f"{number}", tuple(prompt), Sampling(logit_bias=bias), max_tokens, speculate=speculate)


def tokens_of(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


async def test_without_any_drafter_a_repeating_text_is_drafted_from_itself(folder: Path) -> None:
    async with target(folder) as rig:
        plain = await asyncio.gather(*(rig.answer(asked(n)) for n in range(3)))
    async with target(folder, prompt_lookup=True) as rig:
        answers = await asyncio.gather(*(rig.answer(asked(n)) for n in range(3)))
        refused = await rig.answer(asked(0, speculate=False))
        await rig.check()
    assert [tokens_of(pieces) for pieces in answers] == [tokens_of(pieces) for pieces in plain]
    assert tokens_of(refused) == tokens_of(plain[0]) and not any(piece.drafted for piece in refused)
    assert sum(piece.accepted for pieces in answers for piece in pieces) > 20
    assert all(sum(len(piece.tokens) for piece in pieces) == 40 for pieces in answers)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=5)], ids=["greedy", "sampled"])
async def test_what_a_grammar_forces_is_verified_without_a_drafter(folder: Path, sampling: Sampling) -> None:
    schema = {"type": "object", "properties": {"full_name": {"enum": ["Anna", "Tom"]}, "married": {"type": "boolean"}},
              "required": ["full_name", "married"], "additionalProperties": False}
    request = Request("r", tuple(b"Who?"), replace(sampling, stop_token_ids=(EOS,)), 99,
                      grammar=Grammar("json_schema", json.dumps(schema)))
    async with target(folder, prompt_lookup=True) as rig:
        plain = await rig.answer(replace(request, speculate=False))
        answer = await rig.answer(request)
        await rig.check()
    assert tokens_of(answer) == tokens_of(plain) and not any(piece.drafted for piece in plain)
    assert len(answer) < len(plain) / 2, (len(answer), len(plain))


class Overheard:
    """A draft worker, and the frames that reach it."""

    def __init__(self, peers: PeerEvents) -> None:
        self.peers, self.frames = peers, list[list[DraftBound]]()
        self.peer_up, self.peer_down, self.inbox_full = peers.peer_up, peers.peer_down, peers.inbox_full

    def received(self, peer: Peer, items: list[DraftBound], faults: Faults) -> None:
        self.frames.append(items)
        self.peers.received(peer, items, faults)


def ngrams() -> NgramDrafter:
    return NgramDrafter(256, orders=(1, *ORDERS))


async def test_a_drafter_is_not_woken_for_commits_that_ask_for_nothing(folder: Path) -> None:
    async with target(folder, STUBBORN, prompt_lookup=True) as rig, drafting(ngrams()) as peers:
        heard = Overheard(peers)
        async with local_link(rig, heard):
            await rig.answer(asked(1, max_tokens=60))
    commits = [[item for item in frame if isinstance(item, Commit)] for frame in heard.frames]
    assert sum(map(len, commits)) > sum(map(bool, commits)), "each commit came alone"
    for frame, told in zip(heard.frames, commits, strict=True):
        asks = any(commit.wanted for commit in told) or len(told) < len(frame)  # or it brings something else
        assert asks or len(told) >= MAX_HELD_COMMITS, told


async def test_beside_a_drafter_it_is_counted_apart_and_asks_nobody(folder: Path) -> None:
    async with (target(folder, STUBBORN, prompt_lookup=True) as rig, drafting(ngrams()) as peers,
                local_link(rig, peers)):
        pieces = await rig.answer(asked(1, max_tokens=60))
        outcomes = {line.split('outcome="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
                    for line in rig.metrics.registry.page("")[1].decode().splitlines()
                    if line.startswith("slipstream_rounds_total{")}
    drafted = sum(piece.drafted > 0 for piece in pieces)
    assert outcomes["prompt_lookup"] > 0 and outcomes["prompt_lookup"] + outcomes["used"] == drafted
    assert rig.count("drafter_tokens_total") < sum(piece.drafted + piece.accepted for piece in pieces)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=5)], ids=["greedy", "sampled"])
async def test_a_router_that_takes_the_drafters_away_leaves_the_lookup_and_the_text(folder: Path,
                                                                                    sampling: Sampling) -> None:
    request = replace(asked(1, max_tokens=60), sampling=replace(sampling, logit_bias=asked(1).sampling.logit_bias))
    async with target(folder) as rig:
        plain = await rig.answer(request)
    async with (target(folder, STUBBORN, prompt_lookup=True) as rig, drafting(ngrams()) as peers,
                local_link(rig, peers)):
        answer = rig.service.submit(request)
        answer.set_speculation(False)
        pieces = [piece async for piece in answer]
        await rig.check()
    assert tokens_of(pieces) == tokens_of(plain)
    assert any(piece.drafted for piece in pieces if piece.state == "plain"), "what the text foretold"
