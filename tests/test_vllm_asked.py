"""What a request becomes in vLLM's words: every field passes, goes another way that is named, or is refused by name."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from slipstream.base.errors import InvalidRequest
from slipstream.grammar.compiling import SPACE
from slipstream.protocol.grammar import JSON_OBJECT, Grammar
from slipstream.protocol.requests import Request, Sampling
from target_service.vllm_start import params_of
from target_service.vllm_words import FIELD_OF, Bounds, can_resume, check, field_of, parameters, structured

ASKED = Request("r", (5, 6, 7), Sampling(temperature=0.5, stop_token_ids=(2,)), 12)
OTHERWISE: dict[str, Any] = {
    "temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.5,
    "repetition_penalty": 1.5, "logit_bias": ((3, 1.0),), "min_tokens": 2, "max_tokens": 9, "stop_token_ids": (2, 4),
    "seed": 77, "top_logprobs": 3, "grammar": JSON_OBJECT, "prompt_logprobs": 0, "allowed_token_ids": (3,),
    "bad_words": ((3, 4),)}
PARAMETERS = {field: field for field in OTHERWISE} | {field: parameter for parameter, field in FIELD_OF.items()}
GO_OTHERWISE = {
    "request_id": "the request's name", "tokens": "the prompt", "namespace": "the prompt's cache_salt",
    "answered": "tokens of the prompt, less in max_tokens and min_tokens", "identity": "compared before",
    "speculate": "extra_args; a switch is told to the workers", "trace": "extra_args, for the draft's span",
    "sampling": "its fields stand here"}
REFUSED: dict[str, Any] = {"logprobs_mode": "processed"}
FIELDS = (*PARAMETERS, *GO_OTHERWISE, *REFUSED)
BOUNDS = Bounds(bad_words=2, bad_tokens=4, scored=3)


def asked(field: str, value: Any) -> Request:
    if field in {one.name for one in fields(Sampling)}:
        return replace(ASKED, sampling=replace(ASKED.sampling, **{field: value}))
    return replace(ASKED, **{field: value})


def test_every_field_of_a_request_has_its_way() -> None:
    assert sorted(FIELDS) == sorted({one.name for one in (*fields(Request), *fields(Sampling))}), "one way each"


@pytest.mark.parametrize("field", PARAMETERS)
def test_a_field_changes_its_parameter_and_no_other(field: str) -> None:
    plain = parameters(ASKED, keyed=False)
    changed = parameters(asked(field, OTHERWISE[field]), keyed=False)
    different = {name for name in plain if plain[name] != changed[name]}
    assert different - {"ignore_eos"} == {PARAMETERS[field]}, "ignore_eos stands for the end of a grammar"


@pytest.mark.parametrize(("request_", "drafted", "keyed", "field"), [
    (asked("min_p", 0.1), True, True, "min_p"), (asked("logit_bias", ((3, 1.0),)), True, True, "logit_bias"),
    (replace(asked("min_tokens", 2), grammar=JSON_OBJECT), False, False, "min_tokens"),
    (ASKED.after((7,)), True, False, "answered"), (asked("presence_penalty", 0.5).after((7,)), True, True, "answered"),
    (replace(ASKED, grammar=JSON_OBJECT).after((7,)), True, True, "answered"),
    (asked("bad_words", ((3, 4),)).after((7,)), True, True, "answered"),
    (asked("bad_words", ((3,), (4,), (5,))), False, False, "bad_words"),
    (asked("bad_words", ((3, 4, 5), (6, 7))), False, False, "bad_words"),
    (replace(ASKED, tokens=(5, 6, 7, 8), prompt_logprobs=0), False, False, "prompt_logprobs"),
    (replace(ASKED, allowed_token_ids=(3, 4), bad_words=((3,), (3, 4))), True, True, "allowed_token_ids"),
    (replace(asked("min_tokens", 2), allowed_token_ids=(2, 3), bad_words=((3,),)), True, True, "allowed_token_ids"),
    *((asked(field, value), False, False, field) for field, value in REFUSED.items()),
])
def test_what_vllm_has_no_way_for_is_refused_by_field(request_: Request, drafted: bool, keyed: bool,
                                                      field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(request_, drafted, keyed, BOUNDS)
    assert refused.value.field == field and field in FIELDS


def test_vllm_makes_one_token_at_least_and_is_asked_for_no_more_before_an_end() -> None:
    given = parameters(asked("max_tokens", 0), keyed=False)
    assert (given["max_tokens"], given["min_tokens"]) == (1, 0)
    given = parameters(asked("min_tokens", 99), keyed=False)
    assert (given["max_tokens"], given["min_tokens"]) == (12, 12)
    endless = replace(ASKED, sampling=Sampling(min_tokens=9))
    assert parameters(endless, keyed=False)["min_tokens"] == 0, "nothing is forbidden"


class TheirParams:
    """As vLLM's SamplingParams: whatever its tokenizer ends with is forbidden before ``min_tokens``, too."""

    def __init__(self, stop_token_ids: list[int], ignore_eos: bool, **_: Any) -> None:
        self.ignore_eos, self.forbidden = ignore_eos, set(stop_token_ids)

    def update_from_generation_config(self, config: dict[str, Any], eos: int) -> None:
        self.forbidden |= {config["eos_token_id"], eos}


@pytest.mark.parametrize(("request_", "forbidden"), [(asked("stop_token_ids", (7,)), {7}),
                                                     (replace(ASKED, grammar=JSON_OBJECT), {2, 0})])
def test_ends_that_are_ignored_are_not_forbidden(request_: Request, forbidden: set[int],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = SimpleNamespace(SamplingParams=TheirParams, RequestOutputKind=SimpleNamespace(DELTA=0),
                             StructuredOutputsParams=dict)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(sampling_params=theirs))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", theirs)
    made = params_of()(**parameters(request_, keyed=False))
    made.update_from_generation_config({"eos_token_id": 0}, 2)
    assert made.forbidden == forbidden


@pytest.mark.parametrize(("seed", "keyed", "given"), [(5, False, 5), (2**63 - 1, False, 2**63 - 1), (2**63, False, 0),
                                                      (2**64 - 1, False, 2**63 - 1), (2**64 - 1, True, 2**64 - 1)])
def test_a_seed_is_one_that_vllm_can_hold(seed: int, keyed: bool, given: int) -> None:
    assert parameters(asked("seed", seed), keyed=keyed)["seed"] == given


def test_where_some_allowed_token_is_left_wherever_the_answer_is_nothing_is_refused() -> None:
    for request in (replace(ASKED, allowed_token_ids=(2, 3), bad_words=((3,),)),  # it may end
                    replace(asked("min_tokens", 2), allowed_token_ids=(3, 4), bad_words=((4, 3),)),
                    asked("bad_words", ((3,), (3, 4, 5)))):
        given = parameters(request, keyed=True)
        assert given["bad_words"] == [list(word) for word in request.bad_words]


@pytest.mark.parametrize(("vocab_size", "rows", "most"), [(49_152, 2048, None), (128_256, 2048, None),
                                                          (128_256, 8192, 2093), (256_000, 1024, None)])
def test_a_prompt_is_scored_within_a_gibibyte(vocab_size: int, rows: int, most: int | None) -> None:
    assert Bounds.scores(vocab_size, rows) == most


def test_what_goes_on_elsewhere_is_what_is_taken_from_there() -> None:
    for request in (ASKED, asked("presence_penalty", 0.5), asked("temperature", 0.0), asked("grammar", JSON_OBJECT),
                    asked("bad_words", ((3,), (4,))), asked("bad_words", ((3, 4),)),
                    asked("allowed_token_ids", (3, 4)), asked("prompt_logprobs", 2)):
        for keyed in (True, False):
            with nullcontext() if can_resume(request, keyed) else pytest.raises(InvalidRequest, match="another target"):
                check(request.after((7,)), True, keyed, BOUNDS)


@pytest.mark.parametrize(("grammar", "found"), [
    (Grammar("regex", "[0-9]+"), {"regex": "[0-9]+"}), (Grammar("choice", '["yes", "no"]'), {"choice": ["yes", "no"]}),
    (Grammar("lark", 'start: "a"'), {"grammar": 'start: "a"'}),
    (JSON_OBJECT, {"json": {"type": "object", "x-guidance": {"whitespace_pattern": SPACE}}}),
    (Grammar("json_schema", '{"x-guidance": {"lenient": true, "whitespace_pattern": "x"}}'),
     {"json": {"x-guidance": {"lenient": True, "whitespace_pattern": SPACE}}}),
])
def test_grammars_are_structured_outputs_of_the_same_kind(grammar: Grammar, found: dict[str, Any]) -> None:
    assert structured(grammar) == found
    bound = parameters(replace(ASKED, grammar=grammar), keyed=True)
    assert bound["structured_outputs"] == found and not bound["ignore_eos"]


@pytest.mark.parametrize(("grammar", "text", "fits"), [
    (Grammar("ebnf", r'root ::= "\u0041BC"'), "ABC", True), (Grammar("ebnf", r'root ::= "\u0041BC"'), "\u41bc", False),
    (Grammar("ebnf", "root ::= [^&&<]"), "&", False), (Grammar("ebnf", r'root ::= "&&\x41" [\x41]'), "&&AA", True),
    (Grammar("lark", 'start[max_tokens=9]: "a"'), "a", True),  # it would be taken for an EBNF
    (Grammar("json_schema", '{"properties": {"a": {"type": "integer"}}}'), r'{"\u0061": "x"}', False),
    (Grammar("json_schema", '{"properties": {"a": {"type": "integer"}}}'), r'{"\n": "x"}', True),
    (Grammar("json_schema", '{"properties": {"a": {"const": "\\u001b"}}}'), r'{"a": "\u001b"}', True),
    (Grammar("json_schema", '{"propertyNames": {"type": "string"}, "format": "path"}'), '{"a": "b"}', True)])
def test_a_grammar_means_there_what_it_means_here(grammar: Grammar, text: str, fits: bool) -> None:
    """Read as vLLM's guidance backend reads it, which has an older llguidance: that one knows no bytes in texts."""
    ((key, content),) = structured(grammar).items()
    assert key == "json" or r"\x" not in content
    read = (LLMatcher.grammar_from_json_schema(content, defaults={"whitespace_flexible": True}) if key == "json"
            else grammar_from(key, content))
    matcher = LLMatcher(LLTokenizer("byte"), read, log_level=0)
    taken = matcher.try_consume_tokens([*text.encode()])
    assert (taken == len(text.encode()) and matcher.is_accepting()) == fits, matcher.get_error()


@pytest.mark.parametrize("source", ["root ::= (", "root ::= other", 'root ::= start\nstart ::= "a"'])
def test_what_is_no_ebnf_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="is no EBNF"):
        structured(Grammar("ebnf", source))


@pytest.mark.parametrize("source", ["[", "[" * 60_000, "3", '["a"]'])
def test_what_is_no_schema_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        structured(Grammar("json_schema", source))
    assert refused.value.field == "grammar"


def test_what_vllm_refuses_bears_the_field_that_it_came_from() -> None:
    bound = replace(ASKED, grammar=Grammar("json_schema", json.dumps({"type": "object"})))
    assert field_of("logprobs", ASKED) == "top_logprobs" and field_of("top_k", bound) == "top_k"
    assert (field_of(None, ASKED), field_of(None, bound)) == ("request", "grammar")
    assert field_of("prompt", bound) == "prompt", "what is no parameter bears its own name"
