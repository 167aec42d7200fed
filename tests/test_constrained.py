"""An answer that is bound to a grammar is the plain one, token for token, and keeps to its grammar.

Every kind of grammar, every drafter and fate of ``test_lossless``, greedy and sampled, in float64.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.base.errors import InvalidRequest
from slipstream.grammar.compiling import Vocabulary
from slipstream.grammar.matcher import StopTokens
from slipstream.models.folder import load_tokenizer
from slipstream.protocol.grammar import Grammar
from slipstream.protocol.requests import Piece, Request, Sampling
from slipstream.protocol.tree import DraftTree
from tests.bound import BATCH, Bench, bench, is_wrong, swept
from tests.grammars import MAKERS, made
from tests.pair import HASTY, STUBBORN, drafting, local_link, target
from tests.test_lossless import DRAFTERS, FATES, drafter, folders, joined, tokens_of
from tests.tiny import EOS, VOCAB, tiny_tokenizer

__all__ = ["folders"]

MAX_TOKENS = 32
SCHEMAS = {
    "object": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6},
                                                "age": {"type": "integer", "minimum": 0, "maximum": 120}},
               "required": ["name", "age"], "additionalProperties": False},
    "array": {"type": "array", "items": {"enum": ["one", "two", "three"]}, "minItems": 2, "maxItems": 4},
    "choice of shapes": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-c]{2,5}$"}]},
    "tree": {"$defs": {"node": {"type": "object", "properties": {"c": {"type": "array", "maxItems": 2,
                                                                     "items": {"$ref": "#/$defs/node"}}},
                                "additionalProperties": False}}, "$ref": "#/$defs/node"},
}
GRAMMARS = {
    **{name: Grammar("json_schema", json.dumps(schema)) for name, schema in SCHEMAS.items()},
    "any object": Grammar("json_schema", '{"type":"object"}'),
    "regex": Grammar("regex", "[a-e]+(-[0-9]{2}){1,3}"),
    "choice": Grammar("choice", '["the cat", "the cat sat", "a dog", "né\\"e"]'),
    "lark": Grammar("lark", 'start: sum\nsum: sum "+" term | term\nterm: NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,3}/'),
}
SAMPLINGS = {
    "greedy": Sampling(stop_token_ids=(EOS,)),
    "T1.0": Sampling(temperature=1.0, top_p=0.95, seed=12, stop_token_ids=(EOS,)),
    "penalties": Sampling(temperature=0.8, seed=13, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.1,
                          min_tokens=8, stop_token_ids=(EOS,), logit_bias=((65, 2.0),)),
}
PROMPT = tuple(b"one two three one two three one")


def text_of(pieces: list[Piece]) -> str:
    return bytes(token for token in tokens_of(pieces) if token != EOS).decode()


def requests(sampling: Sampling) -> list[Request]:
    return [Request(name, PROMPT, sampling, MAX_TOKENS, grammar=grammar) for name, grammar in GRAMMARS.items()]


@pytest.fixture(scope="module")
async def plain(folders: dict[str, Path]) -> dict[str, list[list[Piece]]]:
    async with target(folders["target"]) as rig:
        return {name: await asyncio.gather(*(rig.answer(request) for request in requests(sampling)))
                for name, sampling in SAMPLINGS.items()}


@pytest.fixture(scope="module")
def vocabulary(folders: dict[str, Path]) -> Vocabulary:
    return Vocabulary(load_tokenizer(folders["target"]), VOCAB)


def keeps_to(grammar: Grammar, tokens: list[int], finish: str, vocabulary: Vocabulary) -> bool:
    """Whether every token is allowed by one that saw the whole answer and nothing else."""
    matcher = vocabulary.compile(grammar, StopTokens((EOS,)))
    said = tokens[:-1] if tokens[-1] == EOS else tokens
    return matcher.commit(said) == len(said) and (tokens[-1] != EOS or finish == "stop")


async def test_plain_answers_keep_to_their_grammars(plain: dict[str, list[list[Piece]]],
                                                    vocabulary: Vocabulary) -> None:
    for name, answers in plain.items():
        for (kind, grammar), pieces in zip(GRAMMARS.items(), answers, strict=True):
            assert keeps_to(grammar, tokens_of(pieces), pieces[-1].finish, vocabulary), (name, kind)
            if pieces[-1].finish == "stop" and grammar.kind == "json_schema":
                json.loads(text_of(pieces))
    done = [text_of(pieces) for pieces in plain["greedy"] if pieces[-1].finish == "stop"]
    assert len(done) >= 5, "so few answers end that nothing was tested"
    assert text_of(plain["greedy"][list(GRAMMARS).index("choice")]) in json.loads(GRAMMARS["choice"].source)
    assert re.fullmatch(GRAMMARS["regex"].source, text_of(plain["T1.0"][list(GRAMMARS).index("regex")]))


ALWAYS = {("noisy", "colocated"), ("ngram", "late"), ("eagle3", "ahead"), ("hostile", "colocated"), ("noisy", "killed")}


@pytest.mark.parametrize(("kind", "fate"), [
    pytest.param(kind, fate, marks=() if (kind, fate) in ALWAYS else pytest.mark.long)
    for kind in DRAFTERS for fate in FATES])
async def test_drafts_change_no_constrained_answer(kind: str, fate: str, folders: dict[str, Path],
                                                   plain: dict[str, list[list[Piece]]]) -> None:
    policy = HASTY if fate in ("late", "lost") else STUBBORN
    accepted = 0
    async with (target(folders["target"], policy, prompt_lookup=fate in ("colocated", "killed")) as rig,
                joined(rig, kind, fate, folders)):
        for name, sampling in SAMPLINGS.items():
            answers = await asyncio.gather(*(rig.answer(request) for request in requests(sampling)))
            for grammar, expected, pieces in zip(GRAMMARS, plain[name], answers, strict=True):
                assert tokens_of(pieces) == tokens_of(expected), (kind, fate, name, grammar)
                assert pieces[-1].finish == expected[-1].finish
                accepted += sum(piece.accepted for piece in pieces)
        await rig.check()
    # A random block head says one chain a round, which is hardly ever right.
    assert accepted > 0 or kind in ("hostile", "block") or fate in ("late", "lost"), "no draft token was ever of use"


@pytest.mark.parametrize("moved_after", [pytest.param(1, marks=pytest.mark.long), 4])
async def test_an_answer_that_moves_goes_on_as_it_would_have(moved_after: int, folders: dict[str, Path],
                                                             plain: dict[str, list[list[Piece]]]) -> None:
    """Another target has nothing of it but its tokens."""
    async with (target(folders["target"]) as rig, drafting(drafter("noisy", folders)) as peers,
                local_link(rig, peers)):
        for name, sampling in SAMPLINGS.items():
            whole = [(request, tokens) for request, tokens in zip(requests(sampling), map(tokens_of, plain[name]),
                                                                  strict=True) if len(tokens) > moved_after]
            answers = await asyncio.gather(*(rig.answer(request.after(tokens[:moved_after]))
                                             for request, tokens in whole))
            for (request, tokens), pieces in zip(whole, answers, strict=True):
                assert tokens[:moved_after] + tokens_of(pieces) == tokens, (name, request)


async def test_answers_that_push_each_other_out_keep_their_place(folders: dict[str, Path],
                                                                 plain: dict[str, list[list[Piece]]]) -> None:
    async with (target(folders["target"], slots=145, prefix_cache=False) as rig,
                drafting(drafter("noisy", folders)) as peers, local_link(rig, peers)):
        answers = await asyncio.gather(*(rig.answer(request) for request in requests(SAMPLINGS["T1.0"])))
        assert [tokens_of(pieces) for pieces in answers] == [tokens_of(pieces) for pieces in plain["T1.0"]]
        assert rig.count("preemptions_total") > 0, "the slots sufficed, so nothing was tested"


@pytest.mark.parametrize(("changes", "field"), [
    ({"grammar": Grammar("regex", "(")}, "grammar"),
    ({"grammar": Grammar("json_schema", '{"type": 1}')}, "grammar"),
    ({"grammar": Grammar("choice", "[1]")}, "grammar"),
    ({"grammar": Grammar("lark", "start: <|no such token|>")}, "grammar"),
    ({"grammar": Grammar("json_schema", '{"$ref": "#"}')}, "grammar"),
    ({"sampling": Sampling()}, "stop_token_ids"),
    ({"sampling": Sampling(stop_token_ids=(EOS, VOCAB + 99))}, "stop_token_ids"),
    ({"tokens": (*PROMPT, 120), "answered": 1}, "answered"),
])
async def test_what_cannot_be_bound_is_refused_by_name(changes: dict[str, Any], field: str,
                                                       folders: dict[str, Path]) -> None:
    request = replace(Request("r", PROMPT, SAMPLINGS["greedy"], 8, grammar=GRAMMARS["lark"]), **changes)
    async with target(folders["target"]) as rig:
        assert "grammar" in (await rig.service.info()).takes
        with pytest.raises(InvalidRequest) as refused:
            await rig.answer(request)
        assert refused.value.field == field
        assert len(tokens_of(await rig.answer(replace(request, grammar=None, tokens=PROMPT, answered=0,
                                                          sampling=SAMPLINGS["greedy"])))) == 8


BATCHES = 168  # of 60: 10,080 answers
QUICK = {0, 22}  # of a drafter that knows the answers: drafted, and moved


@pytest.fixture(scope="module", params=("float64", "bfloat16"))
async def on(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with bench("", request.param) as found:
        yield found


@pytest.mark.parametrize("batch", [pytest.param(batch, marks=() if batch in QUICK else pytest.mark.long)
                                   for batch in range(BATCHES)])
async def test_ten_thousand_constrained_answers_are_the_plain_ones(batch: int, on: Bench) -> None:
    """``python -m tests.bound`` prints the counts, with ``--dtype bfloat16`` those of the CPU kernels."""
    rows = await swept(on, batch)
    assert len(rows) == BATCH and not [row for row in rows if is_wrong(row)]
    assert sum(row["accepted"] for row in rows) > BATCH or batch not in QUICK, "hardly a draft was of use"


@pytest.mark.parametrize("kind", MAKERS)
def test_what_fits_no_grammar_is_told(kind: str) -> None:
    for seed in range(20):
        bound = made(kind, np.random.default_rng(seed))
        for text in ("}", '{"a": [1}', "((1)", "1+", '{"nobody": 1}' if kind != "any object" else "[]"):
            with suppress(ValueError):  # no JSON
                assert not bound.fits(text), (bound.grammar.source, text)


@pytest.mark.parametrize(("kind", "text"), [
    ("lark", "1"), ("lark", "((12))"), ("ebnf", "(1)"), ("any object", '{"a": {}}'), ("tools", '{}'), ("choice", "x")])
def test_what_fits_a_grammar_is_told(kind: str, text: str) -> None:
    assert any(made(kind, np.random.default_rng(seed)).fits(text) for seed in range(40))


def test_what_has_too_many_readings_ends_without_being_read_again() -> None:
    """It was begun afresh, in vain: a second of work behind 150 tokens, which all other answers waited for."""
    tokenizer = tiny_tokenizer(("aa", "aaaa", 8 * "a", 16 * "a"))
    vocabulary, grammar = Vocabulary(tokenizer, tokenizer.get_vocab_size()), Grammar(
        "lark", 'start: e\ne: e e e | e e | "a" | "b"')
    plain, drafted = (vocabulary.compile(grammar, StopTokens((EOS,))) for _ in range(2))
    begun, known = list[int](), frozenset({0})
    for matcher in (plain, drafted):
        matcher._new_matcher = begun.append  # type: ignore[assignment]
    while known:
        ids = range(31)
        tree = DraftTree(1, [0, *30 * b"a"], [at - 1 for at in ids], [*ids], [-float(at) for at in ids])
        right, known = plain.masks(DraftTree.root_only(1, 0))
        masks, also = drafted.masks(tree)
        assert (masks[0] == right[0]).all() and (0 in also) == (0 in known)
        assert plain.commit(b"a") == drafted.commit(b"a") == bool(known)
    assert not begun and "Too many items" in plain.problem
