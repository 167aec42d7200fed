"""What a grammar may cost, whoever sends it: what is too much is refused by name, and nothing else suffers."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from numpy.typing import NDArray

from slipstream.base.errors import CapacityError, InvalidRequest, ModelError, Unavailable
from slipstream.base.fair_executor import FairExecutor
from slipstream.base.offload import ChildProcess
from slipstream.grammar.compiling import Vocabulary
from slipstream.grammar.matcher import StopTokens
from slipstream.grammar.trial import CPU_S, MAX_WAITING_EACH, TOO_COSTLY, Trial, Trials, allowed_s
from slipstream.models.folder import load_tokenizer
from slipstream.protocol.grammar import Grammar
from slipstream.protocol.requests import Request, Sampling
from slipstream.protocol.tree import DraftTree
from tests.pair import target
from tests.routing import CHAT, HELLO, routing
from tests.tiny import EOS, VOCAB, tiny_tokenizer
from tests.trees import child

DEEP = {"$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1200)}
        | {"d1200": {"type": "null"}}, "$ref": "#/$defs/d0"}
COSTLY = {  # what ends a process, or keeps one busy for seconds, where nobody looks after it
    "a thread's stack": Grammar("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1} \"b\"\n" for i in range(3900))
                                + 'r3900: "a"'),
    "quadratic": Grammar("regex", ".?" * 3000),
    "names": Grammar("lark", "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(60)) + 'T60: "a"'),
    "deep schema": Grammar("json_schema", json.dumps(DEEP)),
    "many properties": Grammar("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(2500)}})),
}
WRONG = {
    "recursive": Grammar("json_schema", '{"$ref": "#"}'),
    "unknown keyword": Grammar("json_schema", '{"uniqueItems": true, "type": "array"}'),
    "a format": Grammar("json_schema", '{"format": "regex"}'),
    "names": Grammar("json_schema", '{"propertyNames": {"minLength": 2}}'),
    "no regex": Grammar("regex", "(("), "empty": Grammar("regex", "[^\\x00-\\U0010FFFF]"),
    "nested": Grammar("json_schema", '{"items":' * 2000 + "{}" + "}" * 2000),
    "no rule": Grammar("ebnf", "root ::= other"), "no end": Grammar("ebnf", 'root ::= "a'),
    "deep ebnf": Grammar("ebnf", f"root ::= {'(' * 9000}'a'{')' * 9000}"),
    "rounded bounds": Grammar("json_schema", f'{{"type": "integer", "minimum": {2**62 + 1}, "maximum": {2**62 + 9}}}'),
    "no 64 bits": Grammar("json_schema", '{"type": "integer", "minimum": 1e30, "maximum": 1e31}'),
    "a rounded constant": Grammar("json_schema", f'{{"enum": [1, {2**53 + 1}]}}'),
    "no number": Grammar("json_schema", '{"const": NaN}'),
    "half a character": Grammar("json_schema", r'{"const": "\ud800"}'),
    "no lark": Grammar("lark", "start: other"), "no token": Grammar("lark", "start: <|none|>"),
    "alternatives that overlap": Grammar("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'),
    "alternatives that nothing need tell apart": Grammar("json_schema", json.dumps({"oneOf": [
        {"type": "object", "properties": {"kind": {"const": kind}}} for kind in ("cat", "dog")]})),
    "alternatives of which one has no mark": Grammar("json_schema", json.dumps({"discriminator": {"propertyName": "a"},
        "oneOf": [{"type": "object", "properties": {"a": {"const": 1}}}, {"type": "object", "properties": {"b": {}},
                                                                         "additionalProperties": False}]})),
    "alternatives of another document": Grammar("json_schema", json.dumps({"$defs": {"a": {"type": "null"}}, "items": {
        "$id": "b", "$defs": {"a": {"type": "string"}}, "oneOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}})),
}
FINE = {
    "recursive": Grammar("json_schema", '{"type": "array", "items": {"$ref": "#"}}'),
    "exponential elsewhere": Grammar("regex", "(a|b)*a(a|b){1000}"), "nested stars": Grammar("regex", "((a+)+)+b"),
    "special token": Grammar("lark", 'start: "a" <|im_start|>'),
    "64 bits": Grammar("json_schema", f'{{"type": "integer", "minimum": 0, "maximum": {2**64 - 1}}}'),
    "a schema's words as names": Grammar("json_schema", '{"properties": {"const": {"enum": [{"minimum": 2}]}}, '
                                         f'"default": {{"minimum": {2**62 + 1}}}}}'),
    "millions": Grammar("json_schema", '{"type": "number", "exclusiveMinimum": -1e9, "maximum": 1.5e9}'),
    "200 properties": Grammar("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"}
                                                                         for i in range(200)}})),
}

EBNF = 'root ::= "sum " term ("+" term)*\nterm ::= [0-9]{1,3} | "(" term ")"\n'
SHORT = [Grammar("ebnf", EBNF), Grammar("choice", '["the cat", "the cat sat", "a dog"]'),
         Grammar("regex", "[a-e]+(-[0-9]{2}){1,2}"),
         Grammar("lark", 'start: sum\nsum: sum "+" term | term\nterm: /[0-9A]{1,3}/ | "(" sum ")"'),
         Grammar("json_schema", '{"type": "array", "items": {"enum": ["one", "two"]}, "maxItems": 3}')]


@pytest.fixture(scope="module")
def trial(tiny_folder: Path) -> Iterator[Trial]:
    trial = Trial(tiny_folder)
    yield trial
    trial.close()


@pytest.mark.parametrize("grammar", [*COSTLY.values(), *WRONG.values()], ids=[*COSTLY, *WRONG])
def test_what_is_wrong_or_costs_too_much_is_refused(grammar: Grammar, trial: Trial) -> None:
    with pytest.raises(InvalidRequest) as refused:
        trial.check(grammar)
    assert refused.value.field == "grammar" and len(refused.value.message) < 400
    trial.check(Grammar("regex", "[a-z]+"))
    assert not trial.has_passed(grammar)


@pytest.mark.parametrize("grammar", FINE.values(), ids=FINE)
def test_what_only_looks_dear_is_taken(grammar: Grammar, trial: Trial) -> None:
    assert not trial.has_passed(grammar)
    trial.check(grammar)
    assert trial.has_passed(grammar), "it need not wait for others again"


def test_a_trial_takes_no_more_than_it_is_given(tiny_folder: Path) -> None:
    trial = Trial(tiny_folder, cpu_s=0.001)
    properties = {f"p{i}": {"type": "string"} for i in range(600)}  # 30 ms: a system may count in ticks of several
    with pytest.raises(InvalidRequest, match="more work"):
        trial.check(Grammar("json_schema", json.dumps({"properties": properties})))
    trial.close()


def test_a_long_source_may_take_longer() -> None:
    """Eighty forced tools take 0.08 s of a fast core, and twice that of others."""
    tools = Grammar("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(1500)}}))
    assert 3 * CPU_S < allowed_s(tools, CPU_S) < 0.3
    assert allowed_s(Grammar("regex", ".?" * 64), CPU_S) < 0.1


def test_what_took_too_much_is_tried_again(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large schema that was met in a slow moment was refused until the process ended."""
    grammar = Grammar("regex", "[p-r]+")
    with monkeypatch.context() as slow:
        slow.setattr(trial, "_ask", lambda _: TOO_COSTLY)
        with pytest.raises(InvalidRequest, match="more work"):
            trial.check(grammar)
    trial.check(grammar)


def test_what_one_namespace_tried_tells_another_nothing(trial: Trial) -> None:
    grammar = Grammar("regex", "[x-z]+")
    trial.check(grammar, "one")
    assert trial.has_passed(grammar, "one") and not trial.has_passed(grammar, "other")


async def test_many_grammars_of_one_hold_up_anothers_by_one() -> None:
    executor, order, held = FairExecutor("grammars", 0.1, "too many", MAX_WAITING_EACH), list[str](), threading.Event()
    first = executor.submit("a", held.wait)
    flood = [executor.submit("a", partial(order.append, f"a{i}")) for i in range(MAX_WAITING_EACH)]
    with pytest.raises(CapacityError) as refused:
        executor.submit("a", held.wait)
    assert refused.value.retry_after_s > 0
    gone, kept = executor.submit("b", partial(order.append, "gone")), executor.submit("b", partial(order.append, "b"))
    gone.cancel()
    held.set()
    await asyncio.gather(first, *flood, kept)
    assert order.index("b") <= 2 and "gone" not in order and len(order) == MAX_WAITING_EACH + 1
    with pytest.raises(ZeroDivisionError):
        await executor.submit("a", lambda: 1 // 0)
    executor.close()


async def test_a_target_binds_all_answers_of_one_request(tiny_folder: Path) -> None:
    """A completion of many prompts has many: it was refused each time, whatever room there was for it."""
    grammar = Grammar("choice", '["a", "b"]')
    request = Request("r", tuple(b"the cat"), Sampling(stop_token_ids=(EOS,)), 4, grammar=grammar)
    async with target(tiny_folder) as rig:
        for answer in [rig.service.submit(request) for _ in range(MAX_WAITING_EACH + 2)]:
            assert [piece.finish async for piece in answer][-1] == "stop"


def test_a_process_for_trials_is_ready_before_and_begun_again(tiny_folder: Path) -> None:
    trial = Trial(tiny_folder)
    for source in ("a", "b"):
        trial.warm().join()
        child = trial.child
        assert child is not None and not child.ended
        trial.check(Grammar("regex", source))
        assert trial.child is child, "it was begun for the grammar"
        child.kill()
    trial.close()


async def test_a_service_has_waited_for_the_process_when_it_is_warm(tiny_folder: Path) -> None:
    trial = Trial(tiny_folder)
    await Trials(trial).warm()
    assert trial.child is not None and not trial.child.ended
    child = trial.child
    trial.check(Grammar("regex", "a"))
    assert trial.child is child
    trial.close()


def test_a_process_that_is_killed_while_it_begins_is_no_fault_of_the_model(
        tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(tiny_folder)
    with monkeypatch.context() as killed:
        killed.setattr(ChildProcess, "ask", lambda child, line: child.kill())
        with pytest.raises(Unavailable, match="has ended"):
            trial.check(Grammar("regex", "a"))
    trial.check(Grammar("regex", "a"))
    trial.close()


def test_a_tokenizer_that_is_none_is_told_each_time(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    trial = Trial(tmp_path)
    for source in ("a", "b"):
        with pytest.raises(ModelError, match="grammars cannot use it"):
            trial.check(Grammar("regex", source))


def test_a_process_for_trials_has_one_thread_on_any_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of numpy's map 40 MB each: where cores are many, nothing was left for grammars."""
    (tmp_path / "threads.py").write_text("import os, numpy\n\ndef main():\n    input()\n"
                                         "    print(len(os.listdir('/proc/self/task')))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    child = ChildProcess("threads")
    assert child.ask(b"") == 1
    child.kill()


def test_a_process_may_be_ended_while_it_is_asked_and_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a router that is stopped while it starts."""
    (tmp_path / "mute.py").write_text("import time\n\ndef main():\n    time.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(20):
        child = ChildProcess("mute")
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(child.ask, b"who is there")
            child.kill()
            assert answer.result(60) is None and child.ended
        assert child.ask(b"and now") is None


async def test_a_client_is_told_which_field_and_the_router_goes_on(tiny_folder: Path) -> None:
    """A megabyte of schema, an exploding regex, a schema that is nothing but itself."""
    big = {"type": "object", "properties": {f"{i:070}": {"type": "string"} for i in range(10_000)}}
    asked: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": big}}},
         "response_format.json_schema.schema"),
        ({"guided_regex": COSTLY["quadratic"].source}, "guided_regex"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs"),
        ({"guided_grammar": COSTLY["a thread's stack"].source}, "guided_grammar"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
    ]
    async with target(tiny_folder, slots=4096) as rig, routing(tiny_folder, rig.service) as r:
        summed = await r.post(CHAT, messages=HELLO, guided_grammar=EBNF, max_tokens=6)
        assert summed.json()["choices"][0]["message"]["content"].startswith("sum ")
        choice = await r.post(CHAT, messages=HELLO, guided_choice=["yes", "no"])
        assert choice.json()["choices"][0]["message"]["content"] in ("yes", "no")
        lark = 'start: x\nx[capture]: "yes" | "no"'  # guidance sends it by vLLM's older name and by the newer one
        twice = await r.post(CHAT, messages=HELLO, guided_grammar=lark, structured_outputs={"grammar": lark})
        assert twice.status_code == 200 and twice.json()["choices"][0]["message"]["content"] in ("yes", "no")
        for fields, named in asked:
            refused, served = await asyncio.gather(r.post(CHAT, messages=HELLO, **fields),
                                                   r.post(CHAT, messages=HELLO, max_tokens=2))
            assert refused.status_code == 400 and refused.json()["error"]["param"] == named, refused.text
            assert served.status_code == 200


def test_one_answer_leaves_nothing_of_its_grammar_to_another(tiny_folder: Path) -> None:
    """llguidance counts what all copies of a matcher have built: of two answers, one would have ended the other."""
    vocabulary = Vocabulary(load_tokenizer(tiny_folder), VOCAB)
    dear = Grammar("regex", ".*(a.{800}b|b.{800}c).*")

    def said(most: int) -> int:
        """Tokens until the answer has built all that one may."""
        matcher, letters = vocabulary.compile(dear, StopTokens((EOS,))), random.Random(3)
        for count in range(most):
            _, known = matcher.masks(DraftTree.root_only(1, 0))
            if not known:
                return count
            matcher.commit([letters.choice(b"ab")])
        return most

    assert said(10_000) == said(10_000) < 10_000


def chain(base: int, tokens: Sequence[int]) -> DraftTree:
    """Of one draft, below the newest token."""
    ids = range(len(tokens) + 1)
    return DraftTree(base, [0, *tokens], [at - 1 for at in ids], [*ids], [-float(at) for at in ids])


def allowed(mask: NDArray[np.uint32]) -> list[int]:
    """Tokens."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


class Said:
    """An answer, and what may follow it by a matcher that has seen nothing else."""

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar, ends: StopTokens) -> None:
        self._vocabulary, self._grammar, self._ends = vocabulary, grammar, ends
        self.tokens: list[int] = []

    def then(self, path: list[int]) -> list[int]:
        """Behind a path below the answer; nothing where that cannot be, or has ended by a token."""
        matcher, whole = self._vocabulary.compile(self._grammar, self._ends), self.tokens + path
        if matcher.commit(whole) < len(whole) or not set(path).isdisjoint(self._ends.tokens):
            return []
        return allowed(matcher.masks(DraftTree.root_only(1, 0))[0][0])


def drafted(dice: np.random.Generator, said: Said) -> DraftTree:
    """What could follow, ends, and what nobody can say."""
    tree = DraftTree.root_only(len(said.tokens) + 1, 0)
    for _ in range(int(dice.integers(8))):
        parent, kind = int(dice.integers(len(tree))), dice.random()
        good = said.then([tree.tokens[at] for at in tree.path(parent)[1:]])
        token = int(dice.choice(good)) if good and kind < 0.7 else EOS if kind < 0.85 else int(dice.integers(VOCAB))
        if child(tree, parent, token) is None:
            tree = DraftTree(tree.base, [*tree.tokens, token], [*tree.parents, parent],
                             [*tree.ids, len(tree)], [*tree.scores, 0.0])
    return tree


def test_masks_of_trees_are_those_of_matchers_that_saw_each_path_alone(tiny_folder: Path) -> None:
    """Over random answers: visited, rolled back, committed, begun again from their tokens, ended in the midst."""
    vocabulary, dice = Vocabulary(load_tokenizer(tiny_folder), VOCAB), np.random.default_rng(5)
    ended = 0
    for turn in range(24):
        grammar = SHORT[turn % len(SHORT)]
        ends = StopTokens((EOS, 65)[: 1 + turn // 4 % 2], int(dice.choice([0, 5, 1000])))
        matcher, said = vocabulary.compile(grammar, ends), Said(vocabulary, grammar, ends)
        for _ in range(10):
            tree = drafted(dice, said)
            tree = tree.select(matcher.allowed_nodes(tree)) if dice.random() < 0.5 else tree
            masks, known = matcher.masks(tree)
            for node in range(len(tree)):
                right = said.then([tree.tokens[at] for at in tree.path(node)[1:]])
                assert (allowed(masks[node]) if node in known else []) == right, (grammar, said.tokens, tree)
            node = int(dice.choice(sorted(known)))
            new = [*[tree.tokens[at] for at in tree.path(node)[1:]], int(dice.choice(allowed(masks[node])))]
            over = new[-1] in ends.tokens
            said.tokens += new[: matcher.commit(new[:-1] if over else new)]
            if over or matcher.ended:
                ended += 1
                break
            if dice.random() < 0.2:
                matcher = vocabulary.compile(grammar, ends, said.tokens)
    assert ended > 5


def test_what_a_grammar_forces_keeps_to_it_and_asking_changes_nothing(tiny_folder: Path) -> None:
    vocabulary, dice = Vocabulary(load_tokenizer(tiny_folder), VOCAB), np.random.default_rng(7)
    forced = behind = 0
    counts = Grammar("lark", 'start: list "END"\nlist[max_tokens=3]: /[a-f]+/')
    for grammar in (*SHORT, Grammar("choice", '["one way", "one wa\u00e9"]'), counts):
        asked, other = (vocabulary.compile(grammar, StopTokens((EOS,))) for _ in range(2))
        assert asked.allows_anything() and other.allows_anything()
        for _ in range(12):
            told = [*asked.forced()]
            assert not (told and grammar is counts), "it cannot be rolled back"
            forced += len(told)
            tree = chain(1, told)
            masks, known = asked.masks(tree)
            assert len(known) == len(tree), "each of them may be chosen"
            right = other.masks(DraftTree.root_only(1, 0))[0][0]
            assert (masks[0] == right).all()
            token = told[0] if told else int(dice.choice(allowed(right)))
            if told := [*asked.forced_behind([token])]:
                assert grammar is not counts
                behind += len(told)
                assert len(asked.allowed_nodes(chain(1, [token, *told]))) == 2 + len(told)
                assert (asked.masks(DraftTree.root_only(1, 0))[0][0] == right).all()
            if token == EOS:
                break
            assert asked.commit([token]) == other.commit([token])
            if asked.ended:
                break
    assert forced > 20 and behind > 10


@pytest.mark.parametrize(("ebnf", "text", "fits"), [
    (r'"\u0041BC"', "ABC", True), (r'"\u0041BC"', "\u41bc", False),
    (r'"\u00e9\U0001F600" [\u0000-\u0020]', "é😀\n", True), (r'"\\u0041"', r"\u0041", True),
    (r'"\uD83D\uDE00"', "😀", True), (r'[\u4e00-\u9fff] "\u005c"', "一\\", True),
    (r"[^&&<]", "&", False), (r"[^&&<]", "x", True), (r"[a~~&&]+", "&~a", True), (r"[+--]+", "+,-", True),
    (r'"a&&b--]"', "a&&b--]", True)])
def test_what_an_ebnf_spells_by_numbers_or_in_classes_is_what_it_says(ebnf: str, text: str, fits: bool,
                                                                      tiny_folder: Path) -> None:
    matcher = Vocabulary(load_tokenizer(tiny_folder), VOCAB).compile(Grammar("ebnf", f"root ::= {ebnf}"),
                                                                     StopTokens((EOS,)))
    whole = matcher.commit([*text.encode()]) == len(text.encode())
    assert (whole and EOS in allowed(matcher.masks(DraftTree.root_only(1, 0))[0][0])) == fits


@pytest.mark.parametrize("regex", [r"\d{2}", r"[\d/]+", r"(\d|[^\D])*", "^[0-9]/?[0-9]$"])
def test_digits_of_a_regex_are_those_of_numbers(regex: str, tiny_folder: Path) -> None:
    """A model wrote \U0001fbf8 where a phone number was asked for."""
    matcher = Vocabulary(load_tokenizer(tiny_folder), VOCAB).compile(Grammar("regex", regex), StopTokens((EOS,)))
    assert set(allowed(matcher.masks(DraftTree.root_only(1, 0))[0][0])) - {EOS} <= {*b"0123456789/"}
    assert matcher.commit([*b"42"]) == 2


@pytest.mark.parametrize(("changes", "text", "fits"), [
    ({}, '{"a": "x"', False), ({}, r'{"\u0061": "x"', False), ({}, r'{"b\n": "\t"', True),
    ({"additionalProperties": {"type": "string"}}, r'{"\u0061": "x"', False),
    ({"properties": {}, "patternProperties": {"^a": {"type": "integer"}}}, r'{"\u0061b": "x"', False),
    ({"properties": {"c": {"properties": {"a": {"type": "integer"}}}}}, r'{"c": {"\u0061": "x"', False),
    ({"additionalProperties": False, "properties": {"a": {"type": "string"}}}, r'{"a": "\u001b"', True),
    ({"properties": {"a": {"const": "x\x1b"}}}, r'{"a": "x\u001b"', True),
    ({"properties": {"a": {"const": "x\x7f"}}, "required": ["a"]}, r'{"a": "x\u007f"', True),
    ({"properties": {"a": {"type": "string", "pattern": r"^\u{1b}$"}}, "required": ["a"]}, r'{"a": "\u001b"', True)])
def test_a_name_that_is_spelt_otherwise_has_no_other_value(changes: dict[str, Any], text: str, fits: bool,
                                                           tiny_folder: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **changes}
    matcher = Vocabulary(load_tokenizer(tiny_folder), VOCAB).compile(Grammar("json_schema", json.dumps(schema)),
                                                                    StopTokens((EOS,)))
    assert (matcher.commit([*text.encode()]) == len(text)) == fits


@pytest.mark.parametrize(("schema", "text", "fits"), [
    ({"type": "string", "format": "path"}, '"/tmp"', True), ({"type": "string", "format": "path"}, "1", False),
    ({"type": "string", "format": "base64", "pattern": "^a+$"}, '"b"', False),
    ({"type": "string", "format": "date"}, '"/tmp"', False),
    ({"const": {"format": "path"}}, '{"format": "path"}', True),
    ({"type": "object", "properties": {"format": {"const": "path"}}}, '{"format": 1', False),
    ({"type": "object", "properties": {"a": {"$ref": "#", "deprecated": True, "x-order": 1}}}, '{"a": {"a"', True),
    ({"$schema": "http://json-schema.org/schema#", "type": "integer"}, "1", True),
    ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}, '{"a": 1}',
     True), ({"type": "object", "propertyNames": {}, "additionalProperties": {"type": "integer"}}, '{"a": "b"', False)])
def test_what_a_schema_notes_for_its_readers_is_no_reason_to_refuse_it(schema: Any, text: str, fits: bool,
                                                                       tiny_folder: Path) -> None:
    """What Pydantic writes of a path, a password or bytes got 400, what Zod writes of every record, GenSON of all."""
    matcher = Vocabulary(load_tokenizer(tiny_folder), VOCAB).compile(Grammar("json_schema", json.dumps(schema)),
                                                                    StopTokens((EOS,)))
    assert (matcher.commit([*text.encode()]) == len(text)) == fits


NO_OTHER = {"type": "object", "additionalProperties": {"not": {}}, "properties": {"a": {"type": "null"}}}
HALF: Any = {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}}
ZOD_TIME = {"type": "string", "format": "time", "pattern": "^[0-2][0-9]:[0-5][0-9](:[0-5][0-9])?$"}


@pytest.mark.parametrize(("schema", "text", "fits"), [
    ({"format": "date"}, '"2024-02-29"', True), ({"format": "date"}, '"2000-02-29"', True),
    ({"format": "date"}, '"2023-02-29', False), ({"format": "date"}, '"1900-02-29', False),
    ({"format": "date"}, '"2023-12-31"', True), ({"format": "time"}, '"23:59:6', False),
    ({"format": "date-time"}, '"2023-10-31t23:59:59.5+02:00"', True),
    ({"format": "date-time"}, '"2023-10-31T23:59:6', False), ({"format": "date-time"}, '"2023-02-29', False),
    (ZOD_TIME, '"12:30"', True), (ZOD_TIME, '"12:30Z', False),
    (HALF, "[0.001, 0.5]", True), (HALF, "[0]", False), ({"items": {**HALF["items"], "maximum": 1}}, "[1]", True),
    ({"type": "array", "items": {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}}, "[-0]", False),
    ({"$defs": {"Maß [cm]": {"type": "integer"}}, "$ref": "#/$defs/Maß [cm]"}, "12", True),
    ({"type": "string", "maxLength": 2.0}, '"12"', True), ({"type": "string", "maxLength": 2.0}, '"123', False),
    (NO_OTHER, '{"a": null}', True), (NO_OTHER, '{"b', False)])
def test_what_llguidance_takes_otherwise_is_what_the_schema_says(schema: Any, text: str, fits: bool,
                                                                 tiny_folder: Path) -> None:
    """A 29th of February in any year and a 60th second of any minute came, which no client reads as a date."""
    matcher = Vocabulary(load_tokenizer(tiny_folder), VOCAB).compile(Grammar("json_schema", json.dumps(schema)),
                                                                    StopTokens((EOS,)))
    assert (matcher.commit([*text.encode()]) == len(text)) == fits


PET = {"$defs": {kind: {"type": "object", "properties": {"kind": {"const": kind, "default": kind}, "of": {"$ref": "#"}}}
                 for kind in ("cat", "dog")},
       "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "null"}],
       "discriminator": {"propertyName": "kind"}}
SHUT = {"oneOf": [{"type": "object", "properties": {name: {"$ref": "#"}}, "required": [name],
                   "additionalProperties": False} for name in "ab"]}
LISTED = {"$defs": {"one": {"enum": [1, 2.5]}}, "oneOf": [{"$ref": "#/$defs/one"}, {"const": 3}, {"type": "string"}]}


@pytest.mark.parametrize(("schema", "text", "fits"), [
    (PET, '{"kind": "dog", "of": {"kind": "cat", "of": null}}', True), (PET, '{"of": null}', False),
    (PET, '{"kind": "cow"', False), (SHUT, '{"a": {"b": {"a"', True), (SHUT, '{"a": {}', False),
    (LISTED, "2.5", True), (LISTED, "3", True), (LISTED, '"3"', True), (LISTED, "4", False)])
def test_alternatives_that_exclude_each_other_are_told_apart(schema: Any, text: str, fits: bool,
                                                             tiny_folder: Path) -> None:
    """What Pydantic writes of models that a field with a default tells apart, and OpenAPI of a reference or null, got
    400, and so did all that was recursive."""
    matcher = Vocabulary(load_tokenizer(tiny_folder), VOCAB).compile(Grammar("json_schema", json.dumps(schema)),
                                                                    StopTokens((EOS,)))
    assert (matcher.commit([*text.encode()]) == len(text)) == fits


def test_a_token_that_a_model_lacks_is_neither_allowed_nor_forced() -> None:
    """Its tokenizer has more, as Gemma 3's has one of images: a draft of it would be outside of the embedding."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens(["<image>"])
    matcher = Vocabulary(tokenizer, VOCAB).compile(Grammar("lark", 'start: "ab" <image> "y"'), StopTokens((EOS,)))
    assert matcher.forced() == [97, 98] and matcher.commit([97]) == 1 and matcher.forced() == [98]
    assert matcher.commit([98]) == 1 and matcher.forced() == []
    assert allowed(matcher.masks(DraftTree.root_only(3, 0))[0][0]) == [EOS], "nothing else is left"


def test_a_draft_of_what_a_tokenizer_lacks_breaks_nothing() -> None:
    """A model mostly has more tokens, which are padding: a draft, or a prompt, may hold them."""
    matcher = Vocabulary(tiny_tokenizer(), VOCAB + 60).compile(Grammar("regex", "[a-z]{9}"), StopTokens((EOS,)))
    for token in range(VOCAB, VOCAB + 60):
        tree = DraftTree(3, [0, token, 97, 98], [-1, 0, 0, 2], [0, 1, 2, 3], [0.0, -1.0, -2.0, -3.0])
        assert matcher.allowed_nodes(tree) == [0, 2, 3] and matcher.masks(tree)[1] == {0, 2, 3}, token


@pytest.mark.parametrize(("grammar", "said"), [
    (Grammar("choice", '["a<|im_end|>b"]'), list(b"a<|im_end|>b")),
    (Grammar("json_schema", '{"const": "<|pad|>"}'), list(b'"<|pad|>"')),
    (Grammar("lark", 'start: "<|im_start|>" <|im_start|> "<|unk|>"'), [*b"<|im_start|>", 256, *b"<|unk|>"])])
def test_the_text_of_a_special_token_is_spelt_as_text(grammar: Grammar, said: list[int]) -> None:
    """The token itself was forced, by which the grammar does not go on: the answer ended in its midst."""
    matcher = Vocabulary(tiny_tokenizer(), VOCAB).compile(grammar, StopTokens((EOS,)))
    assert matcher.allows_anything()
    for at, token in enumerate(said):
        assert allowed(matcher.masks(DraftTree.root_only(1, 0))[0][0]) == [token]
        forced = [*matcher.forced()]
        assert forced == said[at : at + len(forced)]
        assert matcher.commit([token]) == 1
    assert matcher.ended


@pytest.mark.parametrize("answer", range(20))
def test_what_drafts_have_walked_changes_no_mask(answer: int) -> None:
    """With tokens that close several rules of a recursive grammar at once."""
    tokenizer, dice = tiny_tokenizer(("))", "((", "+(", ")+")), np.random.default_rng(answer)
    recursive = 'root ::= term (sign term)*\nsign ::= "+" | "*"\nterm ::= [0-9]{1,3} | "(" root ")"\n'
    vocabulary, ends = Vocabulary(tokenizer, tokenizer.get_vocab_size()), StopTokens((EOS,))
    drafted, plain = (vocabulary.compile(Grammar("ebnf", recursive), ends) for _ in range(2))
    said = list[int]()
    for _ in range(40):
        right = plain.masks(DraftTree.root_only(1, 0))[0][0]
        choices = allowed(right)
        tokens = [0, *dice.choice(choices, 2).tolist(), *dice.integers(40, 60, 2).tolist()]
        tree = DraftTree(1, tokens, [-1, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0.0, -1.0, -2.0, -3.0, -4.0])
        masks, known = drafted.masks(tree)
        assert (masks[0] == right).all()
        for node in known - {0}:
            path = [tree.tokens[at] for at in tree.path(node)[1:]]
            fresh = vocabulary.compile(Grammar("ebnf", recursive), ends, [*said, *path])
            assert (masks[node] == fresh.masks(DraftTree.root_only(1, 0))[0][0]).all()
        token = int(dice.choice([choice for choice in choices if choice != EOS]))
        assert drafted.commit([token]) == plain.commit([token]) == 1
        said.append(token)


class Counted:
    """A matcher of llguidance's, and how often it was asked for what is forced."""

    def __init__(self, of: LLMatcher) -> None:
        self._of, self.asked = of, 0

    def compute_ff_tokens(self) -> list[int]:
        self.asked += 1
        return self._of.compute_ff_tokens()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


@pytest.mark.parametrize("spelt", ["as told", "otherwise"])
def test_what_is_forced_is_asked_for_once_however_long_it_is(tiny_folder: Path, spelt: str) -> None:
    vocabulary = Vocabulary(load_tokenizer(tiny_folder), VOCAB)
    text = "the answer to the question is " * 400
    matcher = vocabulary.compile(Grammar("choice", json.dumps([text])), StopTokens((EOS,)))
    assert matcher.allows_anything()
    matcher._matcher = counted = Counted(matcher._matcher)
    said, whole = 0, [*text.encode()]
    for turn in range(200):
        told = [*matcher.forced()]
        assert told == (whole[said:][:64] if spelt == "as told" or not turn else [])
        if spelt == "otherwise" and not turn:
            matcher._pending_forced[-1] = VOCAB  # as if another token had spelt it: here each byte has one
        new = whole[said : said + 1 + turn % 5]
        assert matcher.commit(new) == len(new)
        said += len(new)
    assert counted.asked == 1


def test_long_text_behind_drafts_is_looked_for_once(tiny_folder: Path) -> None:
    """A draft could have it looked for at each token, for an answer that never goes there."""
    vocabulary, text = Vocabulary(load_tokenizer(tiny_folder), VOCAB), "the answer to the question is " * 400
    matcher = vocabulary.compile(Grammar("lark", f'start: /x*/ ("ab" | "b{text}")'), StopTokens((EOS,)))
    assert matcher.forced_behind(b"xa") == [*b"b"] == matcher.forced_behind(b"a")
    assert matcher.forced_behind(b"xb") == [*text.encode()][:64]
    assert not matcher.forced_behind(b"xb") and not matcher.forced_behind(b"a")
    assert matcher.commit(b"xb") == 2 and matcher.forced() == [*text.encode()][:64]


def test_what_drafts_make_a_grammar_build_ends_no_answer(tiny_folder: Path) -> None:
    """A draft goes, as often as it is let, where the grammar explodes; the answer never does."""
    vocabulary = Vocabulary(load_tokenizer(tiny_folder), VOCAB)
    matcher = vocabulary.compile(Grammar("lark", 'start: /a*/ "b" T\nT: /(x+y+){0,999}x+/ & /(.|\\n){0,20000}/'),
                                 StopTokens((EOS,), 90))
    plain = vocabulary.compile(Grammar("lark", "start: /a*/ \"b\""), StopTokens((EOS,), 90))
    for said in range(20):
        tree = chain(said + 1, [*b"b" + 25 * b"xy"])
        kept = matcher.allowed_nodes(tree)
        masks, known = matcher.masks(tree.select(kept))
        assert 0 in known, (said, matcher.problem)
        assert masks[0].tolist() == plain.masks(DraftTree.root_only(said + 1, 0))[0][0].tolist()
        assert matcher.commit([97]) == plain.commit([97]) == 1
    assert kept == [0], "it was let until the end, so nothing was tested"


@pytest.mark.parametrize("bound", [{"maxLength": 100_000}, {"pattern": "^[a-z]{1,100000}$"}], ids=str)
def test_a_long_text_that_a_schema_counts_is_said_and_goes_on_elsewhere(bound: dict[str, Any],
                                                                       tiny_folder: Path) -> None:
    """It ended with an error behind 7,500 characters, then 16,700: its lexer has a state of its own for each."""
    vocabulary, grammar = Vocabulary(load_tokenizer(tiny_folder), VOCAB), Grammar("json_schema", json.dumps(bound))
    matcher, text = vocabulary.compile(grammar, StopTokens((EOS,))), [*b'"', *25_000 * b"a"]
    for base, token in enumerate(text, 1):
        masks, known = matcher.masks(DraftTree.root_only(base, 0))
        assert known and token in allowed(masks[0]), (base, matcher.problem)
        assert matcher.commit([token]) == 1
    elsewhere = vocabulary.compile(grammar, StopTokens((EOS,)), text)
    assert (elsewhere.masks(DraftTree.root_only(1, 0))[0] == matcher.masks(DraftTree.root_only(1, 0))[0]).all()


@pytest.mark.parametrize("lark", [
    'start: T "b"? list{0,2}\nlist[max_tokens=3]: /Sa-f]+/\nT: "a".."f"', 'start: a "x"\na[stop="e"]: /[a-f]+/',
    'start: a "x"\na[stop="e", max_tokens=2]: /[a-f]+/'])
def test_a_grammar_that_counts_tokens_goes_on_alike_with_drafts_and_after_a_break(lark: str, tiny_folder: Path) -> None:
    vocabulary, grammar = Vocabulary(load_tokenizer(tiny_folder), VOCAB), Grammar("lark", lark)
    for seed in range(4):
        dice, said = np.random.default_rng(seed), list[int]()
        plain, drafted = (vocabulary.compile(grammar, StopTokens((EOS,))) for _ in range(2))
        for base in range(1, 12):
            right = allowed(plain.masks(DraftTree.root_only(base, 0))[0][0])
            tree = chain(base, [right[-1], right[0], 83])
            again = vocabulary.compile(grammar, StopTokens((EOS,)), said)
            for matcher in (drafted, again):
                masks, known = matcher.masks(tree.select(matcher.allowed_nodes(tree)))
                assert 0 in known and allowed(masks[0]) == right, (said, matcher.problem)
            said.append(int(dice.choice(right)))
            if said[-1] == EOS or not (plain.commit(said[-1:]) and drafted.commit(said[-1:])) or plain.ended:
                break
        assert len(said) > 1 and not drafted.problem
