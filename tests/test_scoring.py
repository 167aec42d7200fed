"""Prompts are scored as transformers scores them; what else is asked of choices is the same with drafts."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import tracemalloc
from array import array
from collections.abc import AsyncIterator
from collections.abc import Sequence as Tokens
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM

from router_service.dialects.chat import ChatReply
from router_service.dialects.openai import MAX_ANSWER_SCORES
from router_service.dialects.prompts import BATCH_TOKENS, Prompts, logprob_columns
from router_service.text.deltas import TextDelta
from router_service.text.tokens import Completion, Detokenizer, TextCodec
from slipstream.base.config import TargetSection
from slipstream.base.errors import Unavailable
from slipstream.choosing.logits import survivors
from slipstream.choosing.permitted import Permitted
from slipstream.choosing.sampling import ChoiceRows, choose, log_probabilities
from slipstream.choosing.scores import ScoredRows, chosen_logprobs
from slipstream.client import AsyncClient
from slipstream.decision.beliefs import StepCosts
from slipstream.following.following import Following
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.requests import (
    MAX_SCORES,
    LogprobsMode,
    Piece,
    PromptScores,
    Request,
    Sampling,
    TokenLogprob,
)
from slipstream.protocol.tree import MAX_HELD, MAX_NODES, DraftTree
from target_service.sequence import Sequence
from target_service.step import Limits
from tests.echo import EchoTarget
from tests.pair import Rig, target
from tests.routing import CHAT, COMPLETIONS, HELLO, Routing, events, routing
from tests.test_lossless import MAX_TOKENS, PROMPTS, folders, joined, tokens_of
from tests.tiny import EOS, VOCAB, write_tiny_model

__all__ = ["folders"]
TEXT = "the cat sat on the mat. the cat sat on the hat, and then it went: 1 2 3"
FEW = Limits(16, 32, 24)  # so that a prompt takes several steps


@pytest.fixture(scope="module")
def right(folders: dict[str, Path]) -> torch.Tensor:
    """[T, V]: log probabilities by transformers of what follows each byte of the text."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folders["target"], dtype=torch.float64)
    with torch.no_grad():
        found: torch.Tensor = torch.log_softmax(model(torch.tensor([list(TEXT.encode())])).logits[0], -1)
    return found


def scores_of(pieces: list[Piece]) -> PromptScores:
    parts = [piece.prompt for piece in pieces if piece.prompt is not None]
    assert [part.start for part in parts] == [1 + sum(len(p.logprobs) for p in parts[:i]) for i in range(len(parts))]
    return PromptScores(1, *(tuple(value for part in parts for value in getattr(part, name))
                             for name in ("logprobs", "ranks", "top_ids", "top_logprobs")))


def asked(**fields: Any) -> Request:
    return Request("1", tuple(TEXT.encode()), Sampling(), **({"max_tokens": 4, "prompt_logprobs": 2} | fields))


def check(scores: PromptScores, right: torch.Tensor) -> None:
    tokens, rows = list(TEXT.encode())[1:], right[:-1]
    own = rows.gather(1, torch.tensor(tokens)[:, None])
    np.testing.assert_allclose(scores.logprobs, own[:, 0], atol=1e-5)  # transformers' norms are in float32
    assert list(scores.ranks) == ((rows > own).sum(1) + 1).tolist()
    assert list(scores.top_ids) == rows.topk(2).indices.flatten().tolist() and scores.width == 2


async def test_a_prompt_is_scored_in_chunks_as_transformers_scores_it(folders: dict[str, Path],
                                                                      right: torch.Tensor) -> None:
    async with target(folders["target"], limits=FEW) as rig:
        plain = await rig.answer(asked(prompt_logprobs=None))
        cached = await rig.answer(asked())  # all of it is in the prefix cache
        alone = await rig.answer(asked(max_tokens=0))
        nothing = await rig.answer(asked(max_tokens=0, prompt_logprobs=None))
        one = await rig.answer(replace(asked(max_tokens=0), tokens=(5,)))
        follows = await rig.answer(asked(prompt_logprobs=None))
        await rig.check()
    assert tokens_of(cached) == tokens_of(plain) and cached[0].cached_tokens == 0
    assert sum(piece.prompt is not None for piece in cached) > 3, "it came in one chunk"
    check(scores_of(cached), right)
    assert scores_of(alone) == scores_of(cached) and alone[-1] == alone[-1]._replace(tokens=(), finish="length")
    assert [piece.finish for piece in nothing] == [piece.finish for piece in one] == ["length"]
    # A prompt that needs no step says how much of it was cached, too.
    assert nothing[0].cached_tokens == follows[0].cached_tokens == len(TEXT) - 1


@pytest.mark.parametrize("fate", ["colocated", "late"])
async def test_scores_are_the_same_with_drafts_and_beside_others(fate: str, folders: dict[str, Path],
                                                                 right: torch.Tensor) -> None:
    async with target(folders["target"], limits=FEW) as rig:
        expected = await rig.answer(asked(top_logprobs=1, max_tokens=24))
    async with target(folders["target"], limits=FEW, slots=400, prefix_cache=False) as rig, \
            joined(rig, "noisy", fate, folders):
        others = [asked(prompt_logprobs=None, max_tokens=60) for _ in range(3)]
        wanted = asked(top_logprobs=1, max_tokens=24)
        found = await asyncio.gather(*(rig.answer(request) for request in [*others, wanted, wanted]))
        await rig.check()
    for pieces in found[3:]:
        assert tokens_of(pieces) == tokens_of(expected)
        np.testing.assert_allclose(scores_of(pieces).logprobs, scores_of(expected).logprobs, atol=1e-9)
        check(scores_of(pieces), right)
    assert sum(piece.accepted for pieces in found for piece in pieces) > 0


@pytest.mark.parametrize("others", [0, 3])
async def test_on_the_kernels_a_greedy_answer_has_its_prompt_scored(others: int, tmp_path: Path) -> None:
    """Alone, and in steps where others want the argmax and nothing else."""
    folder = write_tiny_model(tmp_path, hidden_size=64, intermediate_size=176, head_dim=32)
    async with target(folder, dtype="bfloat16", exact=True, limits=FEW) as rig:
        plain = await rig.answer(asked(prompt_logprobs=None))
        beside = [asked(prompt_logprobs=None, max_tokens=30) for _ in range(others)]
        found = await asyncio.gather(*(rig.answer(request) for request in [*beside, asked()]))
        await rig.check()
    assert tokens_of(found[-1]) == tokens_of(plain)
    assert len(scores_of(found[-1]).logprobs) == len(TEXT) - 1


async def test_an_answer_that_is_put_back_is_scored_once(folders: dict[str, Path], right: torch.Tensor) -> None:
    """So few slots that answers push each other out, in the midst of their prompts, too."""
    async with target(folders["target"], limits=FEW, slots=240) as rig:
        found = await asyncio.gather(*(rig.answer(asked(max_tokens=80)) for _ in range(4)))
        assert rig.count("preemptions_total") > 0
        await rig.check()
    for pieces in found:
        check(scores_of(pieces), right)


RULES: dict[str, dict[str, Any]] = {
    "allowed": {"allowed_token_ids": tuple(range(97, 123))},
    "bad words": {"bad_words": ((73,), (53, 69), (69, 163, 247), (69, 163, 23), (EOS,))},  # it would say them
    "both, with an end": {"allowed_token_ids": (*range(97, 110), EOS), "bad_words": ((97, 97), (98, 98), (97, 98))},
}
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=5, min_tokens=9, stop_token_ids=(EOS,)),
             Sampling(temperature=1.0, seed=6, repetition_penalty=1.1))


def holds(tokens: list[int], words: tuple[tuple[int, ...], ...]) -> bool:
    return any(tuple(tokens[at : at + len(word)]) == word for word in words for at in range(len(tokens)))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["pairs", "all"])
@pytest.mark.parametrize("name", RULES)
async def test_forbidden_tokens_are_never_said_and_drafts_change_nothing(name: str, every: bool,
                                                                         folders: dict[str, Path]) -> None:
    """Every prompt, way to sample and way to tell with every other one, by pairs, or all three."""
    modes = ("raw", "tempered", "processed")
    wanted = [Request(f"{a}{b}{c}", tuple(prompt), sampling, MAX_TOKENS, top_logprobs=2, logprobs_mode=mode,
                      **RULES[name])
              for a, prompt in enumerate(PROMPTS) for b, sampling in enumerate(SAMPLINGS)
              for c, mode in enumerate(modes) if every or (a + b + c) % len(modes) == 0]

    async def answered(rig: Rig, requests: list[Request]) -> list[list[Piece]]:
        return await asyncio.gather(*(rig.answer(request) for request in requests))

    async with target(folders["target"]) as rig:
        expected = await answered(rig, wanted)
        free = await answered(rig, [replace(request, allowed_token_ids=(), bad_words=()) for request in wanted])
    accepted = 0
    for fate in ("colocated", "late"):
        async with target(folders["target"]) as rig, joined(rig, "noisy", fate, folders):
            begun = [request.after(tokens_of(plain)[:2]) if fate == "late" and len(tokens_of(plain)) > 2 else request
                     for request, plain in zip(wanted, expected, strict=True)]
            for request, plain, found in zip(begun, expected, await answered(rig, begun), strict=True):
                assert list(request.tokens[len(request.tokens) - request.answered :]) + tokens_of(found) == (
                    tokens_of(plain))
                told = [entry for piece in plain for entry in piece.logprobs][request.answered :]
                again = [entry for piece in found for entry in piece.logprobs]
                np.testing.assert_allclose([e.logprob for e in again], [e.logprob for e in told], atol=1e-9)
                accepted += sum(piece.accepted for piece in found)
    assert accepted > 0
    said = [tokens_of(pieces) for pieces in expected]
    assert not any(holds(tokens, RULES[name].get("bad_words", ())) for tokens in said)
    allowed = RULES[name].get("allowed_token_ids", range(VOCAB))
    assert all(set(tokens) <= {*allowed, EOS} for tokens in said)
    assert said != [tokens_of(pieces) for pieces in free], "the rules forbade nothing"


def test_masks_of_a_tree_are_those_of_its_paths() -> None:
    """Against a naive oracle over random trees and answers."""
    dice = np.random.default_rng(3)
    for _ in range(200):
        words = [tuple(map(int, dice.integers(4, size=dice.integers(1, 4)))) for _ in range(4)]
        allowed = tuple(map(int, dice.choice(6, size=dice.integers(3, 7), replace=False)))
        said = list(map(int, dice.integers(4, size=dice.integers(0, 4))))
        permitted = Permitted(allowed, words, (5,), 3, said, 40)
        tree = DraftTree.root_only(9, 0)
        for node in range(1, 8):
            parent = -9 if len(tree) == 1 else tree.ids[dice.integers(len(tree))]
            tree = tree.append([node], [parent], [int(dice.integers(6))], [-1.0])
        masks, known = permitted.masks(tree)
        assert known == frozenset(range(len(tree)))
        for node in range(len(tree)):
            text = [*said, *[tree.tokens[at] for at in tree.path(node)[1:]]]
            open_ = {token for token in allowed if not any(
                tuple([*text, token][-len(word) :]) == word for word in words)}
            open_ -= {5} if len(text) < 3 else set()
            bits = np.unpackbits(masks[node].view(np.uint8), bitorder="little")
            assert set(np.flatnonzero(bits).tolist()) == (open_ or {5}), (words, allowed, text)
        kept = permitted.allowed_nodes(tree)
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            bits = np.unpackbits(masks[parent].view(np.uint8), bitorder="little")
            assert (node in kept) == (parent in kept and bool(bits[tree.tokens[node]]))


def test_a_rule_is_asked_about_no_more_nodes_than_can_be_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that runs ahead has the target hold many times as many, and each costs a mask."""
    following = Following(TargetSection(drafts=()), StepCosts({1: 0.01}), TargetMetrics("tiny"))
    request = Request("r", (1, 2), Sampling(), 100, bad_words=((1, 5),))
    one = Sequence.begin(1, request, lambda piece: None, following, None, Permitted.of(request, VOCAB))
    held = range(1, MAX_HELD)
    one.followed.side.tree = one.followed.side.tree.append(held, [-2] * len(held), held, [-0.01 * i for i in held])
    asked, kept = list[DraftTree](), Permitted.allowed_nodes

    def seen(rule: Permitted, tree: DraftTree) -> list[int]:
        asked.append(tree)
        return kept(rule, tree)

    monkeypatch.setattr(Permitted, "allowed_nodes", seen)
    assert len(one.tree_to_verify(17)) == 17 and [len(tree) for tree in asked] == [MAX_NODES]
    assert len(one.followed.side.tree) == MAX_HELD, "what the target holds for later stays"


class Forcing(Permitted):
    """A rule that forces 7, 8, 9 behind 5."""

    def forced_behind(self, path: Tokens[int]) -> Tokens[int]:
        return (7, 8, 9) if path and path[-1] == 5 else ()


@pytest.mark.parametrize(("lookup", "left", "rows", "tokens", "parents"), [
    (True, 100, 7, [2, 5, 6, 7, 8, 9], [-1, 0, 0, 1, 3, 4]), (True, 100, 4, [2, 5, 7, 8], [-1, 0, 1, 2]),
    (True, 3, 7, [2, 5, 6, 7], [-1, 0, 0, 1]), (True, 2, 7, [2, 5, 6], [-1, 0, 0]),
    (False, 100, 7, [2, 5, 6], [-1, 0, 0])])
def test_what_a_rule_forces_behind_drafts_is_verified_with_them(lookup: bool, left: int, rows: int, tokens: list[int],
                                                                parents: list[int]) -> None:
    """Before less likely drafts, and never behind the last token that may come."""
    following = Following(TargetSection(drafts=(), prompt_lookup=lookup), StepCosts({1: 0.01}), TargetMetrics("tiny"))
    one = Sequence.begin(1, Request("r", (1, 2), Sampling(), left), lambda piece: None, following, None,
                         Forcing((), [(4,)], (), 0, (), VOCAB))
    held = one.followed.side.tree.append([1, 2, 3], [-2, -2, -2], [5, 4, 6], [-0.1, -0.2, -3.0])
    one.followed.side.tree = held
    tree = one.tree_to_verify(rows)
    assert (tree.tokens, tree.parents) == (tokens, parents)
    assert one.followed.side.tree is held, "what the target holds stays"


@pytest.mark.parametrize("mode", ["raw", "tempered", "processed"])
def test_the_modes_of_log_probabilities_are_what_they_say(mode: LogprobsMode) -> None:
    logits = torch.randn(3, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(temperature=0.5, top_k=4, logit_bias=((3, 2.0),))
    session = ChoiceRows(sampling, range(1, 3), [5, 6], [0, 1], None, [[], []])
    row = logits[2].clone()
    if mode != "raw":
        row[3] += 2.0
        row /= 0.5
    if mode == "processed":
        row[row < row.topk(4).values[-1]] = -math.inf
    law = torch.log_softmax(row, 0)
    token = int(law.argmax())
    ((told,),) = chosen_logprobs(logits, [ScoredRows(session, [1], [token], 6, mode)])
    assert told.logprob == pytest.approx(float(law[token]), abs=1e-12)
    assert len(told.top) == (4 if mode == "processed" else 6)
    assert all(logged == pytest.approx(float(law[i]), abs=1e-12) for i, logged in told.top)


def test_rows_that_only_filters_change_share_their_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a trainer's group. A row with thousands of survivors widens the search for the others, and changes none."""
    generator, width = torch.Generator().manual_seed(3), 64 * 64
    logits = torch.randn(9, width, generator=generator) * torch.tensor([[0.1], [2.0], [4.0]] * 3)
    samplings = [Sampling(temperature=0.8, top_p=0.9), Sampling(temperature=1.0, top_k=100), Sampling(top_p=0.9),
                 Sampling(temperature=1.2, min_p=0.01), Sampling(temperature=1.0, top_p=0.95, top_k=20),
                 Sampling(temperature=1.0, top_p=0.9, seed=1)] * 2
    sessions = [ChoiceRows(sampling, range(row, row + 1), [4], [0], None, [()])
                for row, sampling in enumerate(samplings[:9])]
    tokens = choose(logits, sessions)
    asked = [ScoredRows(session, [0], [token], 0, "processed") for session, token in zip(sessions, tokens, strict=True)]
    passes = list[int]()

    def counted(rows: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        passes.append(len(rows))
        return survivors(rows, *args)

    monkeypatch.setattr("slipstream.choosing.scores.survivors", counted)
    together = chosen_logprobs(logits, asked)
    assert passes == [7], "all but the greedy ones, at once"
    for session, token, (told,) in zip(sessions, tokens, together, strict=True):
        law = (torch.log_softmax(logits[list(session.rows)].double(), 1) if session.sampling.greedy
               else log_probabilities(logits, session))
        assert told == TokenLogprob(float(law[0, token]))


@pytest.mark.parametrize("width", [20, 64 * 64])  # the best of wide rows are found block by block
def test_log_probabilities_of_a_session_do_not_depend_on_those_beside_it(width: int) -> None:
    logits = torch.randn(12, width, generator=torch.Generator().manual_seed(2))
    samplings = [Sampling(), Sampling(temperature=0.7, seed=1), Sampling(temperature=1.0, top_p=0.8),
                 Sampling(logit_bias=((3, 1.5),))]
    asked = [ScoredRows(ChoiceRows(sampling, range(3 * i, 3 * i + 3), [4] * 3, [0] * 3, None, [()] * 3), [0, 2],
                        [7, i], top, mode)
             for mode in ("raw", "tempered", "processed") for top in (0, 3) for i, sampling in enumerate(samplings)]
    together = chosen_logprobs(logits, asked)
    assert together == [chosen_logprobs(logits, [one])[0] for one in asked]
    for one, told in zip(asked, together, strict=True):
        if one.mode == "raw":
            law = torch.log_softmax(logits[one.rows()].double(), 1)
            assert [token.logprob for token in told] == [law[0, 7].item(), law[1, one.tokens[1]].item()]
            assert [[i for i, _ in token.top] for token in told] == law.topk(one.top).indices.tolist()


@pytest.fixture
async def routed(folders: dict[str, Path]) -> AsyncIterator[Routing]:
    async with target(folders["target"], limits=FEW) as rig, routing(folders["target"], rig.service) as found:
        yield found


async def test_clients_get_prompts_and_scores_in_the_shapes_they_know(routed: Routing, right: torch.Tensor) -> None:
    own = right[:-1].gather(1, torch.tensor(list(TEXT.encode())[1:])[:, None])[:, 0].numpy()
    asked = {"prompt": [TEXT, TEXT], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0,
             "prompt_logprobs": 2}
    body = (await routed.post(COMPLETIONS, **asked)).json()
    ids = (await routed.post(COMPLETIONS, **asked | {"prompt": list(TEXT.encode())})).json()
    for choice in [*body["choices"], *ids["choices"]]:
        columns = choice["logprobs"]
        assert choice["text"].startswith(TEXT) and len(columns["tokens"]) == len(TEXT) + 1
        assert columns["tokens"][:-1] == list(TEXT) and columns["text_offset"] == list(range(len(TEXT) + 1))
        assert columns["token_logprobs"][0] is None and columns["top_logprobs"][0] is None
        np.testing.assert_allclose(columns["token_logprobs"][1:-1], own, atol=1e-5)
        for token, value, top in [*zip(*(columns[name] for name in ("tokens", "token_logprobs", "top_logprobs")),
                                       strict=True)][1:]:
            assert top[token] == value and len(top) <= 2, "the likeliest one, and the one that stands there"
        first, second = choice["prompt_logprobs"][:2]
        assert first is None and len(choice["prompt_logprobs"]) == len(TEXT)
        entry = second[str(TEXT.encode()[1])]
        assert entry["decoded_token"] == TEXT[1] and entry["logprob"] == columns["token_logprobs"][1]
        assert entry["rank"] == 1 + int((right[0] > right[0, TEXT.encode()[1]]).sum())
        assert sorted(value["rank"] for value in second.values())[:2] == [1, 2]
    only = (await routed.post(COMPLETIONS, **asked | {"max_tokens": 0, "prompt": TEXT})).json()["choices"][0]
    assert only["text"] == TEXT and only["finish_reason"] == "length" and len(only["logprobs"]["tokens"]) == len(TEXT)
    streamed = events((await routed.post(COMPLETIONS, **asked | {"stream": True, "prompt": TEXT})).text)
    whole = body["choices"][0]
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == whole["text"]
    joined = [value for chunk in streamed for value in chunk["choices"][0]["logprobs"]["token_logprobs"]]
    assert joined[0] is None  # float64 on torch: sums of other rows beside it differ in the last bit
    np.testing.assert_allclose(joined[1:], whole["logprobs"]["token_logprobs"][1:], atol=1e-12)
    ended = (await routed.post(COMPLETIONS, **asked | {"prompt": TEXT, "logit_bias": {str(EOS): 100}})).json()
    assert ended["choices"][0]["text"] == TEXT and ended["choices"][0]["finish_reason"] == "stop"
    assert len(ended["choices"][0]["logprobs"]["token_logprobs"]) == len(TEXT) + 1, "lm-eval takes the last one off"
    chat = (await routed.post(CHAT, messages=HELLO, prompt_logprobs=0, max_tokens=2)).json()
    assert chat["prompt_logprobs"][0] is None and len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("path", "body", "scored"), [(CHAT, {"messages": HELLO}, [0, None, None]),
                                                      (COMPLETIONS, {"prompt": TEXT}, [0, 0, 0])])
async def test_a_prompt_is_scored_for_those_choices_alone_that_return_it(
        routed: Routing, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any],
        scored: list[int | None]) -> None:
    asked, balancer = list[int | None](), routed.service.gateway.balancer
    submit = balancer.submit
    monkeypatch.setattr(balancer, "submit", lambda request: (asked.append(request.prompt_logprobs), submit(request))[1])
    answered = (await routed.post(path, n=3, prompt_logprobs=0, max_tokens=2, **body)).json()
    told = [answered] if path == CHAT else answered["choices"]
    assert asked == scored and all(len(each["prompt_logprobs"]) == answered["usage"]["prompt_tokens"] for each in told)


async def test_log_probabilities_name_tokens_by_their_ids_where_trainers_ask(routed: Routing) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "return_token_ids": True}
    named = {"return_tokens_as_token_ids": True}
    body = {**asked, "prompt": TEXT, "echo": True, "logprobs": 20}
    texts, ids = [(await routed.post(COMPLETIONS, **body, **more)).json()["choices"][0] for more in ({}, named)]
    columns = ids["logprobs"]
    assert columns["tokens"] == [f"token_id:{i}" for i in [*ids["prompt_token_ids"], *ids["token_ids"]]]
    for token, value, top in zip(columns["tokens"][1:], columns["token_logprobs"][1:], columns["top_logprobs"][1:],
                                 strict=True):
        assert top[token] == value and len(top) >= 20, "bytes that are no text are not one"
        assert all(name.removeprefix("token_id:").isdecimal() for name in top)
    assert columns["text_offset"] == texts["logprobs"]["text_offset"] and ids["text"] == texts["text"]
    body = {**asked, "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    texts, ids = [(await routed.post(CHAT, **body, **more)).json()["choices"][0] for more in ({}, named)]
    for by_text, by_id, i in zip(texts["logprobs"]["content"], ids["logprobs"]["content"], ids["token_ids"],
                                 strict=True):
        assert by_id["token"] == f"token_id:{i}" and by_id["bytes"] == by_text["bytes"]
        assert by_id["token"] in [likely["token"] for likely in by_id["top_logprobs"]]
    del body["return_token_ids"]
    ended = (await routed.post(CHAT, **body, **named, logit_bias={str(EOS): 100})).json()["choices"][0]
    assert [entry["token"] for entry in ended["logprobs"]["content"]] == [f"token_id:{EOS}"]


async def test_a_stop_token_is_part_of_the_text_where_what_stops_is(
        routed: Routing, folders: dict[str, Path]) -> None:
    asked: dict[str, Any] = {"prompt": TEXT, "temperature": 0, "max_tokens": 12, "return_token_ids": True,
                             "skip_special_tokens": False}
    kept = {"include_stop_str_in_output": True}

    async def said(**more: Any) -> tuple[str, list[int]]:
        choice = (await routed.post(COMPLETIONS, **asked, **more)).json()["choices"][0]
        return choice["text"], choice["token_ids"]

    free, ids = await said()
    letter = next(letter for letter in reversed(free) if letter.isascii())
    end = ids.index(ord(letter))
    before, after = await said(stop_token_ids=[ord(letter)]), await said(stop_token_ids=[ord(letter)], **kept)
    assert before[1] == after[1] == ids[: end + 1] and after[0] == before[0] + letter
    mark = TextCodec(folders["target"]).specials[EOS]
    ended = {"logit_bias": {str(EOS): 100}}
    assert await said(**ended) == ("", [EOS]) and await said(**ended, **kept) == (mark, [EOS])
    asked["skip_special_tokens"] = True
    assert await said(**ended, **kept) == ("", [EOS])


async def test_a_streamed_prompt_is_told_whole_where_a_stop_string_may_begin_the_answer(routed: Routing) -> None:
    asked = {"prompt": TEXT, "echo": True, "logprobs": 0, "max_tokens": 4, "temperature": 0, "prompt_logprobs": 0}
    free = (await routed.post(COMPLETIONS, **asked)).json()["choices"][0]
    stop = free["text"].removeprefix(TEXT)[0] + "\x00"
    streamed = [chunk["choices"][0] for chunk in events(
        (await routed.post(COMPLETIONS, **asked, stop=stop, stream=True)).text)]
    assert "".join(choice["text"] for choice in streamed) == free["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        told = [value for choice in streamed for value in choice["logprobs"][name]]
        assert len(told) == len(free["logprobs"][name]), name
    assert len(streamed[0]["prompt_logprobs"]) == len(TEXT)


async def test_what_is_asked_of_choices_is_heard_over_http_and_grpc(routed: Routing) -> None:
    said = (await routed.post(COMPLETIONS, prompt=TEXT, allowed_token_ids=[97, 98], max_tokens=9)).json()
    assert set(said["choices"][0]["text"]) <= {"a", "b"}
    free = (await routed.post(COMPLETIONS, prompt=TEXT, temperature=0, max_tokens=20)).json()["choices"][0]["text"]
    word = next(letter for letter in free[1:] if letter.isascii() and letter.isalnum())
    bound = (await routed.post(COMPLETIONS, prompt=TEXT, temperature=0, max_tokens=20, bad_words=[word])).json()
    assert word in free and word not in bound["choices"][0]["text"]
    async with AsyncClient(f"127.0.0.1:{routed.service.grpc_port}") as client:
        deltas = [delta async for delta in client.complete(TEXT, max_tokens=3, temperature=0.0, echo=True,
                                                           top_logprobs=2, bad_words=(word,))]
    prompt = [token for delta in deltas for token in delta.prompt]
    assert [token.id for token in prompt] == list(TEXT.encode()) and prompt[0].logprob is None
    assert all(token.logprob is not None and token.rank >= 1 and len(token.top) == 2 for token in prompt[1:])
    assert "".join(delta.text for delta in deltas).startswith(TEXT)


@pytest.mark.parametrize("spans", [[], [(1, 3)], [(1, 3), (4, 9)], [(2, 9)], [(1, 9), (9, 12)]], ids=str)
async def test_scores_of_other_tokens_than_the_prompts_are_refused(spans: list[tuple[int, int]],
                                                                   folders: dict[str, Path]) -> None:
    """From a target that does not keep its word; those that stand right are taken."""
    async def told(spans: list[tuple[int, int]]) -> TextDelta:
        async def answer() -> AsyncIterator[Piece]:
            for start, end in spans:
                yield Piece((), prompt=PromptScores(start, (-1.0,) * (end - start), (1,) * (end - start)))
            yield Piece((65,), finish="length")

        given: Any = answer()
        request = replace(asked(prompt_logprobs=0), tokens=tuple(range(65, 74)))
        return await anext(Completion(request, given, Detokenizer(TextCodec(folders["target"])), [], VOCAB))

    assert (await told([(1, 4), (4, 9)])).prompt == tuple(
        PromptScores(start, array("d", [-1.0] * count), array("i", [1] * count), array("i"), array("d"))
        for start, count in ((1, 3), (4, 5)))
    with pytest.raises(Unavailable, match="scores of other tokens"):
        await told(spans)


async def test_scores_of_a_prompt_take_little_until_they_are_told(folders: dict[str, Path]) -> None:
    """As objects a million, as one request may have, took 68 MB, and they wait for the whole answer."""
    async def answer() -> AsyncIterator[Piece]:
        for start in range(1, 2001, 100):
            top = [300 + start + i for i in range(2000)]
            yield Piece((), prompt=PromptScores(start, tuple(-1.0 / i for i in top[:100]), tuple(top[:100]), tuple(top),
                                                tuple(-1.0 / i for i in top)))
        yield Piece((65,), finish="length")

    given: Any = answer()
    request = replace(asked(prompt_logprobs=20), tokens=(65,) * 2001)
    completion = Completion(request, given, Detokenizer(TextCodec(folders["target"])), [], VOCAB)
    tracemalloc.start()
    delta = await anext(completion)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 16 * 21 * 2000, taken / (21 * 2000)
    assert delta.prompt[1].part(102, 103).tops(1) == [[(421, -1.0 / 421)]]


@pytest.mark.parametrize("count", [1, 2, BATCH_TOKENS, BATCH_TOKENS + 1, BATCH_TOKENS + 2, 3 * BATCH_TOKENS])
def test_scores_that_are_written_in_parts_are_those_of_one(count: int, folders: dict[str, Path]) -> None:
    rng, codec = np.random.default_rng(count), TextCodec(folders["target"])
    tokens = rng.integers(1, 128, count).tolist()
    own, ranks = (-rng.random(count)).tolist(), rng.integers(1, 9, count).tolist()
    top = [[(int(i), float(-rng.random())) for i in rng.choice(128, 2, replace=False)] for _ in tokens]
    ends = sorted({1, count, *rng.integers(1, count + 1, 2).tolist()})
    parts = [PromptScores(first, tuple(own[first:end]), tuple(ranks[first:end]),
                          tuple(i for row in top[first:end] for i, _ in row),
                          tuple(value for row in top[first:end] for _, value in row))
             for first, end in itertools.pairwise(ends)]
    prompts = Prompts(codec, [tokens], 1, ("".join(map(chr, tokens)),), 1, 2)
    texts = [codec.token_text(token) for token in tokens]
    rows = [*prompts.rows(0, parts, 1), [(97, -1.0, 0, ())]]
    columns = logprob_columns(codec.token_text, rows, [*prompts.offsets(0), count])
    assert orjson.loads(orjson.dumps(columns)) == {
        "tokens": [*texts, "a"], "token_logprobs": [None, *own[1:], -1.0],
        "top_logprobs": [None, *({text: value} | {codec.token_text(row[0][0]): row[0][1]}
                                 for text, value, row in zip(texts[1:], own[1:], top[1:], strict=True)), {"a": -1.0}],
        "text_offset": [*range(count), count]}
    entries = orjson.loads(orjson.dumps(prompts.prompt_logprobs(0, parts)))
    assert entries[0] is None and [entry[str(token)]["rank"] for entry, token in zip(
        entries[1:], tokens[1:], strict=True)] == [
            next((place for place, (i, _) in enumerate(row, 1) if i == token), rank)
            for token, rank, row in zip(tokens[1:], ranks[1:], top[1:], strict=True)]
    told = list(prompts.scored(parts))
    assert [token.id for part in told for token in part] == tokens and max(map(len, told)) <= BATCH_TOKENS + 1


async def test_where_no_prompt_is_told_none_is_scored(routed: Routing) -> None:
    for path, body in (("/v1/messages", {"messages": HELLO, "max_tokens": 2}),
                       ("/v1/responses", {"input": "hello", "max_output_tokens": 2})):
        assert (await routed.post(path, **body)).status_code == 200
        refused = await routed.post(path, prompt_logprobs=0, **body)
        assert refused.status_code == 400 and "prompt_logprobs: is told by" in refused.json()["error"]["message"]


async def test_what_is_told_of_an_answer_is_bounded_before_and_written_beside_the_loop(
        tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, threads, whole = EchoTarget(end=200), list[str](), ChatReply.body
    target.context = 1 << 17

    def watched(reply: ChatReply, answers: Any, usage: Any) -> Any:
        threads.append(threading.current_thread().name.partition("_")[0])
        return whole(reply, answers, usage)

    monkeypatch.setattr(ChatReply, "body", watched)
    asked: dict[str, Any] = {"messages": HELLO, "logprobs": True, "top_logprobs": 20}
    async with routing(tiny_folder, target) as routed:
        answer = await routed.post(CHAT, max_tokens=1 << 15, **asked)
        assert len(answer.json()["choices"][0]["logprobs"]["content"]) == 200
        assert (await routed.post(CHAT, messages=HELLO, max_tokens=9)).status_code == 200
        assert (await routed.post(CHAT, n=5, **asked)).status_code == 200
        assert threads == ["short-texts", "MainThread", "long-texts"]
        assert target.requests[-1].max_tokens == MAX_ANSWER_SCORES // (5 * 21), "what the context leaves is too much"
        refused = await routed.post(CHAT, n=8, max_tokens=1 << 15, **asked)
        assert refused.status_code == 400 and "fewer tokens, answers or alternatives" in refused.text


@pytest.mark.parametrize(("fields", "named"), [
    ({"prompt": ["x" * 500] * 30, "echo": True, "logprobs": 20}, "echo"),
    ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt": "x", "logprobs_mode": "raw_logits"},
                                                                  "logprobs_mode"),
    ({"prompt": "x", "allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
    ({"prompt": "x", "allowed_token_ids": [1], "guided_choice": ["a"]}, "allowed_token_ids"),
    ({"prompt": "x", "bad_words": ["a" * 40]}, "bad_words[0]"),
    ({"prompt": "x", "bad_words": ["a"] * 129}, "bad_words"),
    ({"prompt": "x", "allowed_token_ids": [97], "bad_words": ["a"]}, "bad_words"),
])
async def test_what_asks_for_too_much_is_refused_by_name(fields: dict[str, Any], named: str, routed: Routing) -> None:
    assert MAX_SCORES < 500 * 30 * 21
    refused = await routed.post(COMPLETIONS, **fields)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == named, refused.text


class Begun:
    """An Answer whose first target went away while it told the scores of the prompt."""

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for scores in (PromptScores(1, [-1.0], [1]), PromptScores(1, [-2.0], [1]), PromptScores(2, [-3.0], [1])):
            yield Piece((), prompt=scores)
        yield Piece((65,))
        yield Piece((), finish="stop")

    def set_speculation(self, allowed: bool) -> None:
        pass

    async def aclose(self) -> None:
        pass


async def test_scores_that_begin_again_at_another_target_are_told_once(tiny_folder: Path) -> None:
    request = Request("r", (1, 2, 3), Sampling(), 5, prompt_logprobs=0)
    completion = Completion(request, Begun(), Detokenizer(TextCodec(tiny_folder)), [], 260)
    deltas = [delta async for delta in completion]
    assert [list(part.logprobs) for part in deltas[0].prompt] == [[-2.0], [-3.0]] and deltas[0].text == "A"
    assert completion.tally.rounds == 1, "the end alone is none"
