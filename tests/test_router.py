"""The HTTP surface over real uvicorn, spoken to by the unmodified openai client; the public gRPC beside it."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.fleet import free_port
from router_service import app
from slipstream.base.errors import CapacityError, InvalidRequest
from slipstream.protocol.chat import MAX_BODY_BYTES
from slipstream.protocol.grammar import JSON_OBJECT, Grammar
from slipstream.protocol.requests import Request
from slipstream.wire.client import AsyncClient
from tests.echo import CONTEXT, EchoAnswer, EchoTarget
from tests.loop import eventually
from tests.routing import CHAT, COMPLETIONS, HELLO, events, routing
from tests.tiny import EOS

PROMPT = "0123456789"


def expected(seed: int, length: int, num_prompt: int = len(PROMPT)) -> str:
    return " ".join([str(num_prompt), f"s{seed}", *(f"w{i}" for i in range(200))])[:length]


async def test_chat_whole(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        raw = await r.openai.chat.completions.with_raw_response.create(model="tiny", messages=HELLO, seed=7)
        answer = raw.parse()
        assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id.startswith("chatcmpl-")
        choice = answer.choices[0]
        assert choice.message.role == "assistant" and choice.finish_reason == "stop"
        text = choice.message.content or ""
        prompt_tokens = int(text.split()[0])
        assert text == expected(7, 40, prompt_tokens)
        usage = answer.usage
        assert usage and usage.prompt_tokens == prompt_tokens and usage.completion_tokens == 41
        assert usage.total_tokens == prompt_tokens + 41
        details = usage.completion_tokens_details
        assert details and details.accepted_prediction_tokens == 30
        assert details.rejected_prediction_tokens == 10
        assert usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens == prompt_tokens // 2
        extension = answer.model_extra and answer.model_extra["slipstream"]
        assert extension == {"rounds": 11, "acceptance_length": round(41 / 11, 4), "drafted_tokens": 40,
                             "lossy": False}
        assert raw.headers["x-slipstream-mode"] == "speculative" and len(raw.headers["x-request-id"]) == 32


async def test_ends_that_a_model_names_and_does_not_have_are_not_asked_for(tiny_folder: Path, tmp_path: Path) -> None:
    folder, target = tmp_path / "cut", EchoTarget()
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 128009]}')
    async with routing(folder, target) as r:
        assert (await r.post(CHAT, messages=HELLO)).status_code == 200
    assert target.requests[-1].sampling.stop_token_ids == (257,)


async def test_chat_stream(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        stream = await r.openai.chat.completions.create(
            model="tiny", messages=HELLO, seed=7, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == expected(7, 40, int(text.split()[0]))
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
        assert not chunks[-1].choices and chunks[-1].usage and chunks[-1].usage.completion_tokens == 41
        assert {chunk.id for chunk in chunks} == {chunks[0].id}
        raw = await r.post(CHAT, messages=HELLO, stream=True)
        assert raw.headers["content-type"].startswith("text/event-stream")
        assert all(event["choices"] for event in events(raw.text)), "no usage chunk that nobody asked for"


async def test_an_answer_does_not_depend_on_how_it_was_made(tiny_folder: Path) -> None:
    """Stop strings, limits and usage are the same for plain decoding and for commits of any size."""
    asked: dict[str, Any] = {"prompt": PROMPT, "seed": 3, "max_tokens": 60}
    cases: list[dict[str, Any]] = [
        {}, {"stop": ["w5"]}, {"stop": [" w", "zz"]}, {"stop": "w10 w"}, {"max_tokens": 7}, {"min_tokens": 3},
        {"stop": ["w1"], "min_tokens": 12}, {"stop": ["w1 w", "s3"], "min_tokens": 5}]
    target = EchoTarget()
    async with routing(tiny_folder, target) as r:
        for extra in cases:
            answers = set()
            for accepted in (0, 1, 3, 6):
                target.accepted = accepted
                whole = (await r.post(COMPLETIONS, **{**asked, **extra})).json()
                streamed = events((await r.post(COMPLETIONS, stream=True, **{**asked, **extra})).text)
                text = "".join(event["choices"][0]["text"] for event in streamed)
                assert text == whole["choices"][0]["text"]
                finish = streamed[-1]["choices"][0]["finish_reason"]
                answers.add((text, whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"], finish))
            assert len(answers) == 1, (extra, answers)
            assert text == expected(3, len(text))


async def test_stop_cuts_exactly(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        whole = (await r.post(COMPLETIONS, prompt=PROMPT, seed=3, max_tokens=60, stop=[" w2", "w3"])).json()
        choice = whole["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("10 s3 w0 w1", "stop")
        assert whole["usage"]["completion_tokens"] == len("10 s3 w0 w1 w2")
        for most, cut in ((10, "10 s3 w0 "), (11, "10 s3 w0 w1 w2 "), (13, "10 s3 w0 w1 w2 ")):
            late = (await r.post(COMPLETIONS, prompt=PROMPT, seed=3, max_tokens=60, stop=["w1", "w3", "0"],
                                 min_tokens=most)).json()
            assert late["choices"][0]["text"] == cut, "what is complete by then ends nothing"


async def test_completions_of_all_prompt_kinds(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        ids = list(PROMPT.encode())
        for prompt, count in ((PROMPT, 1), ([PROMPT, PROMPT + "x"], 2), (ids, 1), ([ids, [*ids, 1]], 2)):
            answer = await r.openai.completions.create(model="tiny", prompt=prompt, seed=5, max_tokens=20)
            assert [c.index for c in answer.choices] == list(range(count))
            assert [c.text for c in answer.choices] == [expected(5, 20, 10 + i) for i in range(count)]
            assert answer.usage and answer.usage.prompt_tokens == sum(10 + i for i in range(count))
        assert len((await r.openai.completions.create(model="tiny", prompt=PROMPT)).choices[0].text) == 16


class Watched(EchoTarget):
    """Counts who runs already when another one begins."""

    def submit(self, request: Request) -> EchoAnswer:
        self.besides = max(getattr(self, "besides", 0), len(self.running))
        return super().submit(request)


async def test_more_prompts_than_answers_may_run_are_answered_in_turn(tiny_folder: Path) -> None:
    """Evaluators send hundreds at once."""
    target = Watched(pause_s=0.001)
    async with routing(tiny_folder, target, max_in_flight=4) as r:
        prompts = [PROMPT + "x" * i for i in range(21)]
        texts = [expected(5, 20, 10 + i) for i in range(21)]
        batch = asyncio.create_task(r.post(COMPLETIONS, prompt=prompts, seed=5, max_tokens=20))
        single = asyncio.create_task(r.post(COMPLETIONS, prompt=PROMPT, seed=5, max_tokens=20))
        assert (await single).json()["choices"][0]["text"] == texts[0] and not batch.done(), "others have their half"
        whole = (await batch).json()
        assert [choice["text"] for choice in whole["choices"]] == texts
        assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (420, 420)
        assert target.besides <= 2
        target.besides = 0
        chunks = events((await r.post(COMPLETIONS, prompt=prompts, seed=5, max_tokens=20, stream=True)).text)
        assert ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i)
                for i in range(21)] == texts
        assert target.besides == 1, "half of the places"
        await eventually(lambda: not r.service.gateway.admission.in_flight)
        assert await r.codes() == {200: 3}
        many = await r.post(COMPLETIONS, prompt=["x"] * 1025)
        assert many.status_code == 400 and many.json()["error"]["param"] == "prompt"
        assert "1025 answers, 1 a prompt; one request may ask for 1024" in many.json()["error"]["message"]
        target.fail_after, target.error = 0, CapacityError("full")
        assert (await r.post(COMPLETIONS, prompt=prompts)).status_code == 429
        await eventually(lambda: not target.running and not r.service.gateway.admission.in_flight)


async def test_choices_have_their_own_seeds(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        asked: dict[str, Any] = {"prompt": [PROMPT, PROMPT], "n": 3, "seed": 2**64 - 1, "max_tokens": 12}
        texts = [c["text"] for c in (await r.post(COMPLETIONS, **asked)).json()["choices"]]
        seeds = [2**64 - 1, 0, 1]
        assert texts == [expected(seed, 12) for seed in seeds] * 2
        chunks = events((await r.post(COMPLETIONS, stream=True, **asked)).text)
        for index in range(6):
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert "".join(c["text"] for c in mine) == texts[index] and mine[-1]["finish_reason"] == "length"
        random = {(await r.post(COMPLETIONS, prompt=PROMPT)).json()["choices"][0]["text"] for _ in range(5)}
        assert len(random) == 5, "absent seeds differ"
        batch = (await r.post(COMPLETIONS, prompt=[PROMPT] * 4, n=2, max_tokens=30)).json()["choices"]
        assert len({choice["text"] for choice in batch}) == 8, "of each prompt of a batch, too"
        group = (await r.post(COMPLETIONS, prompt=PROMPT, n=128, seed=5, max_tokens=12)).json()["choices"]
        assert [choice["text"] for choice in group] == [expected(5 + i, 12) for i in range(128)], "as trainers ask"


async def test_logprobs_in_both_formats(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        chat = await r.openai.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2,
                                                      max_tokens=9)
        content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
        assert content and len(content) == 9
        assert "".join(entry.token for entry in content) == chat.choices[0].message.content
        assert content[0].bytes == list(content[0].token.encode()) and len(content[0].top_logprobs) == 2
        assert content[0].logprob == content[0].top_logprobs[0].logprob == -0.5
        text = await r.openai.completions.create(model="tiny", prompt=PROMPT, logprobs=2, max_tokens=9)
        found = text.choices[0].logprobs
        assert found and found.tokens and found.text_offset == list(range(9)) and found.token_logprobs == [-0.5] * 9
        assert "".join(found.tokens) == text.choices[0].text and found.top_logprobs and len(found.top_logprobs[0]) == 2
        streamed = events((await r.post(COMPLETIONS, prompt=PROMPT, logprobs=0, max_tokens=9, stream=True)).text)
        offsets = [o for chunk in streamed for o in chunk["choices"][0]["logprobs"]["text_offset"]]
        assert offsets == list(range(9))


async def test_options_reach_the_target(tiny_folder: Path) -> None:
    target = EchoTarget()
    async with routing(tiny_folder, target) as r:
        await r.openai.chat.completions.create(
            model="tiny", messages=HELLO, temperature=0.5, top_p=0.9, presence_penalty=1, frequency_penalty=-1,
            logit_bias={"65": 5}, max_completion_tokens=9, extra_body={
                "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
                "speculate": False})
        sampling = target.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 20, 0.1)
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
        assert sampling.logit_bias == ((65, 5.0),) and sampling.min_tokens == 2 and sampling.stop_token_ids == ()
        assert target.requests[0].max_tokens == 9 and target.requests[0].speculate is False
        plain = await r.post(CHAT, messages=HELLO)
        request = target.requests[1]
        assert request.sampling.temperature == 1.0 and request.sampling.stop_token_ids == (257,)
        assert request.max_tokens == CONTEXT - len(request.tokens) and request.speculate
        assert plain.headers["x-slipstream-mode"] == "speculative"
        await r.post(CHAT, messages=HELLO, temperature=0.5, top_p=0)
        assert target.requests[-1].sampling.greedy, "as OpenAI's API has it"
        refused = await r.post(CHAT, messages=HELLO, speculate=False)
        assert refused.headers["x-slipstream-mode"] == "plain"
        assert refused.json()["slipstream"]["acceptance_length"] == 1.0


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
BOUND: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}, "guided_json": None, "structured_outputs": {"json_object": False}}, None),
    ({"response_format": {"type": "json_object"}}, JSON_OBJECT),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
     Grammar("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}}}')),
    ({"structured_outputs": {"json": '{"type": "null"}', "disable_fallback": True}},
     Grammar("json_schema", '{"type": "null"}')),
    ({"structured_outputs": {"json_object": True}}, JSON_OBJECT),
    ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
    ({"guided_choice": ["ja", "né"]}, Grammar("choice", '["ja","né"]')),
    ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
]


async def test_every_field_that_binds_an_answer_becomes_one_grammar(tiny_folder: Path) -> None:
    target = EchoTarget()
    target.takes = ("grammar",)
    async with routing(tiny_folder, target) as r:
        for fields, grammar in BOUND:
            assert (await r.post(CHAT, messages=HELLO, **fields)).status_code == 200
            assert target.requests[-1].grammar == grammar, fields
            if grammar is not None:
                async with AsyncClient(f"127.0.0.1:{r.service.grpc_port}") as client:
                    assert [delta async for delta in client.complete("x", grammar=grammar)]
                assert target.requests[-1].grammar == grammar
        async with AsyncClient(f"127.0.0.1:{r.service.grpc_port}") as client:
            with pytest.raises(InvalidRequest, match="JSON"):
                await anext(client.complete("x", grammar=Grammar("choice", '["a\n"]')))


REFUSED: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (CHAT, {"model": "other"}, 404, "model", "model_not_found"),
    (CHAT, {"model": 1}, 400, "model", "invalid_value"),
    (CHAT, {"max_completion_tokens": 9999}, 400, "max_completion_tokens", "context_length_exceeded"),
    (CHAT, {"max_completion_tokens": 0}, 400, "max_completion_tokens", "unsupported_parameter"),
    (CHAT, {"messages": []}, 400, "messages", "invalid_value"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", "missing_required_parameter"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}, 400,
     "messages[0].content[0]", "unsupported_parameter"),
    (CHAT, {"messages": [{"role": "function", "content": "x"}]}, 400, "messages[0].role", "unsupported_parameter"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools[0].function", "invalid_value"),
    (CHAT, {"functions": [{"name": "f"}]}, 400, "functions", "unsupported_parameter"),
    (CHAT, {"response_format": {"type": "json_object"}}, 400, "response_format", "unsupported_parameter"),
    (CHAT, {"response_format": {"type": "xml"}}, 400, "response_format.type", "invalid_value"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, 400,
     "response_format.json_schema.schema", "invalid_value"),
    (CHAT, {"response_format": "json"}, 400, "response_format", "invalid_value"),
    (CHAT, {"response_format": {"type": "json_object"}, "guided_regex": "a"}, 400, "guided_regex", "invalid_value"),
    (CHAT, {"structured_outputs": {"json": {}, "regex": "a"}}, 400, "structured_outputs", "invalid_value"),
    (CHAT, {"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, 400,
     "structured_outputs.whitespace_pattern", "unsupported_parameter"),
    (CHAT, {"structured_outputs": {"structural_tag": {}}}, 400, "structured_outputs.structural_tag",
     "unsupported_parameter"),
    (CHAT, {"guided_json": 1}, 400, "guided_json", "invalid_value"),
    (CHAT, {"guided_regex": ""}, 400, "guided_regex", "invalid_value"),
    (CHAT, {"guided_grammar": "x" * (64 << 10) + "x"}, 400, "guided_grammar", "invalid_value"),
    (COMPLETIONS, {"prompt": "x", "guided_choice": []}, 400, "guided_choice", "invalid_value"),
    (COMPLETIONS, {"prompt": "x", "guided_choice": ["a", ""]}, 400, "guided_choice", "invalid_value"),
    (CHAT, {"stop_token_ids": [260]}, 400, "stop_token_ids", "invalid_value"),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": []}, 400, "allowed_token_ids", "invalid_value"),
    (CHAT, {"temperature": -1}, 400, "temperature", "invalid_value"),
    (CHAT, {"temperature": "1"}, 400, "temperature", "invalid_value"),
    (CHAT, {"top_p": -0.1}, 400, "top_p", "invalid_value"),
    *((CHAT, {name: value}, 400, name, "invalid_value") for name, value in {
        "temperature": 101, "top_p": 1.1, "min_p": 1.1, "top_k": 1 << 31, "presence_penalty": 2.1,
        "frequency_penalty": -2.1, "repetition_penalty": 0}.items()),
    (CHAT, {"n": 129}, 400, "n", "invalid_value"),
    (CHAT, {"n": 0}, 400, "n", "invalid_value"),
    (CHAT, {"stop": ["a"] * 33}, 400, "stop", "invalid_value"),
    (CHAT, {"stop": "a" * 1025}, 400, "stop[0]", "invalid_value"),
    (CHAT, {"top_logprobs": 3}, 400, "top_logprobs", "invalid_value"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "invalid_value"),
    (CHAT, {"logprobs": True, "top_logprobs": 20, "max_tokens": 1 << 15, "n": 8}, 400, "max_tokens", "invalid_value"),
    (CHAT, {"logit_bias": {"x": 1}}, 400, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"260": 1}}, 400, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {str(i): 1 for i in range(301)}}, 400, "logit_bias", "invalid_value"),
    (CHAT, {"max_tokens": -1}, 400, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": CONTEXT + 1}, 400, "max_tokens", "context_length_exceeded"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * CONTEXT}]}, 400, "messages", "context_length_exceeded"),
    (CHAT, {"seed": 1 << 64}, 400, "seed", "invalid_value"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [260]}, 400, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": ["x", ""]}, 400, "prompt[1]", "invalid_value"),
    (COMPLETIONS, {"prompt": [[1], [2], [260]]}, 400, "prompt[2]", "invalid_value"),
    (COMPLETIONS, {"prompt": ["x", "x" * CONTEXT * 9]}, 400, "prompt[1]", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": ["x", "x" * CONTEXT]}, 400, "prompt[1]", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": [1 << 70]}, 400, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [1] * CONTEXT}, 400, "prompt", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2}, 400, "best_of", "unsupported_parameter"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, 400, "suffix", "unsupported_parameter"),
    (COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 1}, 400, "echo", "unsupported_parameter"),
    (COMPLETIONS, {"prompt": ["x"] * 1025}, 400, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": ["x"] * 513, "n": 2}, 400, "n", "invalid_value"),
]


async def test_what_is_refused_and_how(tiny_folder: Path) -> None:
    target = EchoTarget()
    async with routing(tiny_folder, target) as r:
        for path, extra, status, param, code in REFUSED:
            body = {"model": "tiny", **({"messages": HELLO} if path == CHAT else {"prompt": "x"}), **extra}
            # the ids beyond 64 bits are what JSON allows and Python sends
            response = await r.http.post(path, content=json.dumps(body))
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["code"]) == (status, param, code), (extra, error)
            assert error["type"] == "invalid_request_error" and error["message"]
        assert not target.requests
        with pytest.raises(openai.NotFoundError):
            await r.openai.chat.completions.create(model="other", messages=HELLO)
        with pytest.raises(openai.BadRequestError) as caught:
            await r.openai.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=21)
        assert caught.value.param == "top_logprobs" and caught.value.code == "invalid_value"


async def test_defaults_that_clients_send_are_fine(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        chat = await r.post(CHAT, messages=[
            {"role": "developer", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": "yes", "tool_calls": None, "refusal": None, "name": None},
            {"role": "user", "content": "more"}], tools=[], tool_choice=None, response_format={"type": "text"},
            user="u", metadata={"a": "b"}, store=False, n=1, logprobs=False, stream_options=None, temperature=1,
            verbosity="medium", prediction={"type": "content", "content": "so"})
        assert chat.status_code == 200, chat.text
        text = await r.post(COMPLETIONS, prompt="x", best_of=1, echo=False, suffix=None, logprobs=None, temperature=0.0)
        assert text.status_code == 200, text.text


async def test_unknown_fields_are_named_in_a_header_or_refused(tiny_folder: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        for _ in range(2):
            taken = await r.post(CHAT, messages=HELLO, temprature=1, my_own="secret")
            assert taken.status_code == 200 and taken.headers["x-slipstream-ignored"] == "my_own, temprature"
        assert "x-slipstream-ignored" not in (await r.post(CHAT, messages=HELLO)).headers
    told = capsys.readouterr()
    assert (told.out + told.err).count("my_own") == 1 and "secret" not in told.out + told.err
    async with routing(tiny_folder, EchoTarget(), strict=True) as r:
        error = (await r.post(CHAT, messages=HELLO, temprature=1)).json()["error"]
        assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
        assert "did you mean 'temperature'" in error["message"]


async def test_each_endpoint_takes_the_others_word_for_log_probabilities(tiny_folder: Path) -> None:
    """As vLLM does: SkyRL asks completions for true, Agent Lightning chats for 1."""
    async with routing(tiny_folder, EchoTarget()) as r:
        for path, asked in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": PROMPT})):
            answers = [await r.post(path, **asked, seed=3, logprobs=word) for word in (1, True, None, False)]
            one, true, none, false = [answer.json()["choices"][0]["logprobs"] for answer in answers]
            assert one and one == true and none is false is None
        for word in (0, 1.0):
            told = (await r.post(CHAT, messages=HELLO, logprobs=word)).json()["choices"][0]["logprobs"]
            assert (told is not None) == bool(word)
        assert (await r.post(CHAT, messages=HELLO, logprobs=2)).json()["error"]["param"] == "logprobs"


async def test_loose_clients_and_those_of_vllm_are_served(tiny_folder: Path) -> None:
    target = EchoTarget()
    async with routing(tiny_folder, target) as r:
        asked = {"messages": HELLO, "seed": 7.0, "n": 1.0, "stop": "", "max_tokens": 12.0}
        answer = await r.http.post(CHAT, json=asked)  # without a model
        assert answer.status_code == 200 and answer.json()["model"] == "tiny"
        text = answer.json()["choices"][0]["message"]["content"]
        five = ["\nclass", "\ndef", "\n#", "\nif", "w1" + "x" * 1000]
        assert (await r.post(CHAT, **{**asked, "stop": five})).json()["choices"][0]["message"]["content"] == text
        whole = (await r.post(COMPLETIONS, prompt=PROMPT, seed=3, stop="w1", include_stop_str_in_output=True)).json()
        assert whole["choices"][0]["text"] == "10 s3 w0 w1"
        await r.post(COMPLETIONS, prompt=PROMPT, seed=3, stop_token_ids=[ord("w")])
        assert target.requests[-1].sampling.stop_token_ids == (257, ord("w"))
        named = (await r.post(COMPLETIONS, prompt=PROMPT, request_id="my-1")).json()
        assert named["id"] == "cmpl-my-1"
        for path, body in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": HELLO})):
            for seed in (-1, -1.0):  # as vLLM and llama.cpp have it: applications that cannot leave it out
                await r.post(path, **body, seed=seed)
        async with AsyncClient(f"127.0.0.1:{r.service.grpc_port}") as client:
            assert [delta async for delta in client.complete(PROMPT, seed=-1)]
        assert len({request.sampling.seed for request in target.requests[-5:]} - {(1 << 64) - 1}) == 5
        for salt in ("a", "b", "a", ""):
            await r.post(COMPLETIONS, prompt=PROMPT, cache_salt=salt)
        spaces = [request.namespace for request in target.requests[-4:]]
        assert spaces[0] == spaces[2] and len(set(spaces)) == 3


async def test_token_ids_are_told(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        for path, asked in ((COMPLETIONS, {"prompt": [PROMPT, PROMPT + "x"], "n": 2}), (CHAT, {"messages": HELLO})):
            asked |= {"seed": 3, "max_tokens": 9, "return_token_ids": True}
            whole = (await r.post(path, **asked)).json()
            chunks = events((await r.post(path, stream=True, **asked)).text)
            for choice in whole["choices"]:
                told = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
                text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
                assert bytes(choice["token_ids"]).decode() == text
                assert [i for chunk in told for i in chunk.get("token_ids", ())] == choice["token_ids"]
                prompts = [chunk["prompt_token_ids"] for chunk in told if "prompt_token_ids" in chunk]
                assert path == CHAT or prompts == [choice["prompt_token_ids"]]
            if path == CHAT:
                assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
                assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
            else:
                assert [bytes(c["prompt_token_ids"]).decode() for c in whole["choices"]] == [
                    PROMPT, PROMPT, PROMPT + "x", PROMPT + "x"]


@pytest.mark.parametrize(("says", "stop", "text", "told"), [
    ("hello", None, "hello", [*b"hello", EOS]), ("one, two, three", ", th", "one, two", list(b"one, two, th")),
    ("one, two", [", t"], "one", list(b"one, t"))])
async def test_who_trains_is_told_each_token_that_was_said(tiny_folder: Path, says: str, stop: object, text: str,
                                                           told: list[int]) -> None:
    """As many as are counted, each with its log probability: the one that ends an answer, and a stop string's."""
    target = EchoTarget()
    target.says = says
    async with routing(tiny_folder, target) as r:
        for path, asked in ((COMPLETIONS, {"prompt": PROMPT, "logprobs": 1}),
                            (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 1})):
            asked |= {"max_tokens": 40, **({"stop": stop} if stop else {})}
            plain = (await r.post(path, **asked)).json()["choices"][0]
            asked |= {"return_token_ids": True}
            whole = (await r.post(path, **asked)).json()
            (choice,) = whole["choices"]
            assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == text
            assert choice["token_ids"] == told and whole["usage"]["completion_tokens"] == len(told)
            chunks = events((await r.post(path, stream=True, **asked)).text)
            assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())] == told
            for entries, count in ((choice["logprobs"], len(told)), (plain["logprobs"], len(text))):
                assert len(entries["token_logprobs" if path == COMPLETIONS else "content"]) == count


async def test_usage_in_every_chunk(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        told = events((await r.post(CHAT, messages=HELLO, stream=True, max_tokens=30, stream_options={
            "include_usage": True, "continuous_usage_stats": True})).text)
        counts = [chunk["usage"]["completion_tokens"] for chunk in told]
        assert counts == sorted(counts) and (counts[0], counts[-1]) == (0, 30) and len(counts) > 5
        assert len({chunk["usage"]["prompt_tokens"] for chunk in told}) == 1
        told = events((await r.post(COMPLETIONS, prompt=[PROMPT, PROMPT + "x"], n=2, stream=True, max_tokens=30,
                                    stream_options={"include_usage": True, "continuous_usage_stats": True})).text)
        last = {chunk["choices"][0]["index"]: chunk["usage"] for chunk in told[:-1]}
        assert {number: (usage["prompt_tokens"], usage["completion_tokens"]) for number, usage in last.items()} == {
            0: (10, 30), 1: (10, 30), 2: (11, 30), 3: (11, 30)}, "each of its own answer"
        assert (told[-1]["usage"]["prompt_tokens"], told[-1]["usage"]["completion_tokens"]) == (21, 120)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/messages", "/v1/responses"])
async def test_a_stream_is_lines_also_to_those_who_end_them_where_unicode_does(tiny_folder: Path, path: str) -> None:
    target = EchoTarget()
    target.says = "a\u2028b\u2029c\x85d\u2019"
    asked = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": PROMPT}, "/v1/messages": {"messages": HELLO},
             "/v1/responses": {"input": "Hi"}}[path]
    most = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    async with routing(tiny_folder, target) as r:
        answer = await r.post(path, **asked, stream=True, **{most: 40})
        lines = [line for line in answer.text.splitlines() if line and not line.startswith("event: ")]
        assert lines and all(line.startswith("data: ") for line in lines)
        told = json.dumps([json.loads(line[6:]) for line in lines if line != "data: [DONE]"])
        assert "\\u2028" in told and "\\u2029" in told and "\\u0085" in told and "\\u2019" in told


async def test_prompts_are_cut_at_their_beginning(tiny_folder: Path) -> None:
    target = EchoTarget()
    async with routing(tiny_folder, target) as r:
        long = PROMPT * CONTEXT
        assert (await r.post(COMPLETIONS, prompt=long)).status_code == 400
        for most in (CONTEXT, CONTEXT - 1, CONTEXT - 8):
            await r.post(COMPLETIONS, prompt=PROMPT * 2, truncate_prompt_tokens=-1, max_tokens=most)
            assert bytes([*target.requests[-1].tokens]).decode() == PROMPT * 2, "all of it fits"
        for last, left, most in ((4, 4, 7), (-1, CONTEXT - 7, 7), (CONTEXT - 7, CONTEXT - 7, 7),
                                 (-1, CONTEXT - 1, CONTEXT - 2)):
            cut = await r.post(COMPLETIONS, prompt=long, truncate_prompt_tokens=last, max_tokens=most)
            assert cut.status_code == 200
            assert bytes([*target.requests[-1].tokens]).decode() == long[-left:]
        for path, asked in ((COMPLETIONS, {"prompt": long}), (CHAT, {"messages": HELLO})):
            for last in (0, -2):
                refused = await r.post(path, **asked, truncate_prompt_tokens=last)
                assert refused.status_code == 400
                assert refused.json()["error"]["param"] == "truncate_prompt_tokens", "none would be left"


async def test_bodies_and_paths_that_are_none(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        for content, status, code in ((b"{", 400, "invalid_json"), (b"[1]", 400, "invalid_value"),
                                      (b"", 400, "invalid_json"),
                                      (b"x" * (MAX_BODY_BYTES + 1), 413, "request_too_large"),
                                      (b"[" * 2000, 400, "invalid_json"), (b'{"model": "\xff"}', 400, "invalid_json")):
            response = await r.http.post(CHAT, content=content)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code), content[:20]
        marked = await r.http.post(CHAT, content=b"\xef\xbb\xbf" + json.dumps({"messages": HELLO}).encode())
        assert marked.status_code == 200, "as curl sends a file that PowerShell wrote"
        body = gzip.compress(json.dumps({"messages": HELLO}).encode())
        packed = await r.http.post(CHAT, content=body, headers={"content-encoding": "gzip"})
        assert packed.status_code == 400 and "is encoded as 'gzip'" in packed.text, "that it is no JSON helps nobody"
        for method, path, status in (("GET", "/nothing", 404), ("GET", CHAT, 405), ("POST", "/v1/models", 405),
                                     ("GET", "/v1/models/other", 404), ("GET", "/docs", 404)):
            response = await r.http.request(method, path)
            assert response.status_code == status and response.json()["error"]["message"], path
        for method, path in (("POST", CHAT), ("GET", "/health"), ("POST", "/v1/messages")):
            response = await r.http.request(method, f"{path}/")
            assert response.status_code == 404 and f"did you mean {path}?" in response.text, "no redirect to plain HTTP"
        huge = await r.http.get("/live", headers={"x-large": "x" * 40_000})
        assert huge.status_code == 431


async def test_a_body_that_takes_too_long_is_refused(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_TIMEOUT_S", 0.1)
    async with routing(tiny_folder, EchoTarget()) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.service.http_port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode())
        assert b" 400 " in await reader.readline()
        assert b'"body: did not arrive within 0.1 s"' in await reader.readuntil(b"}}")
        writer.close()


async def test_models_health_version_and_request_ids(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        assert [model.id async for model in r.openai.models.list()] == ["tiny"]
        assert (await r.openai.models.retrieve("tiny")).owned_by == "slipstream"
        assert (await r.http.get("/health")).status_code == 200 == (await r.http.get("/live")).status_code
        assert "version" in (await r.http.get("/version")).json()
        shown = await r.http.get("/version", headers={"x-request-id": "abc-1"})
        assert shown.headers["x-request-id"] == "abc-1"
        forged = await r.http.get("/version", headers={"x-request-id": "a b" * 100})
        assert len(forged.headers["x-request-id"]) == 32
    async with routing(tiny_folder, EchoTarget(), model_name="brand") as r:
        assert [model.id async for model in r.openai.models.list()] == ["brand"]
        unnamed = await r.post(CHAT, messages=HELLO, model="")  # clients whose box was left empty; vLLM takes it, too
        assert unnamed.status_code == 200 and unnamed.json()["model"] == "brand", unnamed.text
    async with routing(tiny_folder) as r:
        assert (await r.http.get("/health")).status_code == 503
        assert (await r.http.get("/live")).status_code == 200
        response = await r.post(CHAT, messages=HELLO)
        assert response.status_code == 503 and response.headers["retry-after"] == "1"


async def test_grpc_gives_the_same_answers(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        client = AsyncClient(f"127.0.0.1:{r.service.grpc_port}")
        try:
            assert await client.models() == ["tiny"]
            http = (await r.post(CHAT, messages=HELLO, seed=7, stop=["w7"])).json()
            deltas = [delta async for delta in client.chat("hello", seed=7, stop=["w7"])]
            assert "".join(delta.text for delta in deltas) == http["choices"][0]["message"]["content"]
            tokens = [token for delta in deltas for token in delta.tokens]
            assert "".join(token.text for token in tokens) == http["choices"][0]["message"]["content"]
            assert any(token.drafted for token in tokens) and not tokens[0].drafted
            usage = deltas[-1].usage
            assert usage and usage.completion_tokens == http["usage"]["completion_tokens"]
            assert deltas[-1].finish == "stop"
            with pytest.raises(InvalidRequest) as caught:
                _ = [d async for d in client.chat("hello", temperature=-1.0)]
            assert caught.value.field == "temperature"
        finally:
            await client.aclose()


async def test_metrics_tell_and_logs_do_not(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "my-very-secret-words"
    async with routing(tiny_folder, EchoTarget()) as r:
        await r.post(CHAT, messages=[{"role": "user", "content": secret}])
        await r.post(CHAT, messages=[{"role": "user", "content": secret}], stream=True)
        await r.post(CHAT, messages=[{"role": "user", "content": secret}], tools=[secret])
        page = await r.metrics()
        assert 'slipstream_requests_total{code="200",endpoint="chat",mode="speculative",model="target"' in page
        assert 'request_errors_total{model="target",service="router",type="invalid_request_error"} 1.0' in page
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_acceptance_ratio",
                     "prompt_tokens_total", "generation_tokens_total", "targets_ready", "build_info"):
            assert f"slipstream_{name}" in page
        assert secret not in page and page.count("\n") < 2000
        base = f"http://127.0.0.1:{r.service.metrics_port}"
        assert (await r.http.get(f"{base}/ready")).status_code == 200
        assert (await r.http.get(f"{base}/other")).status_code == 404
    captured = capsys.readouterr()
    assert secret not in captured.out + captured.err


async def test_many_at_once_all_end(tiny_folder: Path) -> None:
    targets = [EchoTarget(pause_s=0.001) for _ in range(2)]
    async with routing(tiny_folder, *targets, max_in_flight=16) as r:
        answers: list[httpx.Response] = await asyncio.gather(*(
            r.post(COMPLETIONS, prompt=PROMPT, seed=i, max_tokens=20, stream=i % 2 == 0) for i in range(40)))
        assert [a.status_code for a in answers] == [200] * 40
        assert r.service.gateway.admission.in_flight == 0 and not any(t.running for t in targets)


async def test_the_pages_that_the_documents_name_are_there(tiny_folder: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "API.md").read_text(encoding="utf-8")
    rows = re.findall(r"^- (`GET [^:]*):", page, re.MULTILINE)
    paths = [path.removeprefix("GET ") for row in rows for path in re.findall(r"`([^`]+)`", row)]
    assert {"/v1/models", "/health", "/live"} <= set(paths)
    async with routing(tiny_folder, EchoTarget()) as r:
        codes = {path: (await r.http.get(path.replace("NAME", "tiny"))).status_code for path in paths}
        lost = await r.http.get("/v1/chat")
        assert lost.status_code == 404 and CHAT in lost.json()["error"]["message"]
        wrong = await r.http.get(CHAT)
        assert wrong.status_code == 405 and "POST" in wrong.json()["error"]["message"]
    assert codes.pop("/metrics") == 404, "it has a port of its own here"
    assert set(codes.values()) == {200}, codes


async def test_what_is_measured_is_a_page_of_the_api_where_both_have_one_port(tiny_folder: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with routing(tiny_folder, EchoTarget(), listen=listen, metrics_listen=listen) as r:
        assert (await r.http.get("/ready")).status_code == 200 and r.service.metrics_port == r.service.http_port
        answer = await r.openai.completions.create(model="tiny", prompt="hello", max_tokens=9)
        told = answer.usage
        assert told is not None and told.completion_tokens_details is not None
        page = (await r.http.get("/metrics")).text
        counts = {family.name: {tuple(sample.labels.values()): sample.value for sample in family.samples}
                  for family in text_string_to_metric_families(page) if family.name.startswith("vllm:spec_decode_num_")}
        accepted = told.completion_tokens_details.accepted_prediction_tokens
        assert accepted, "this target's drafts are taken"
        assert sum(counts["vllm:spec_decode_num_accepted_tokens"].values()) == accepted
        assert sum(counts["vllm:spec_decode_num_accepted_tokens_per_pos"].values()) == accepted
        assert sum(counts["vllm:spec_decode_num_drafts"].values()) == 2, "after a first step without"
        assert sum(counts["vllm:spec_decode_num_draft_tokens"].values()) == 8 > accepted
        assert "slipstream_requests_total" in page
        older = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}  # Prometheus 2
        assert "\nvllm:spec_decode_num_drafts_total{" in (await r.http.get("/metrics", headers=older)).text
    async with routing(tiny_folder, EchoTarget()) as r:
        assert (await r.http.get("/metrics")).status_code == 404 and "vllm:" not in await r.metrics()


async def test_pages_of_other_origins_ask_and_read_where_a_key_is_asked_for(tiny_folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-mine\n")
    theirs, ours = {"origin": "https://app.example"}, {"origin": "http://localhost:3000"}
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    allowed = "access-control-allow-origin"
    async with routing(tiny_folder, EchoTarget(), api_keys_file=str(keys)) as r:
        before = await r.http.options(CHAT, headers=theirs | asks)
        assert before.status_code == 204 and before.headers[allowed] == theirs["origin"]
        assert "POST" in before.headers["access-control-allow-methods"]
        assert before.headers["access-control-allow-headers"] == asks["access-control-request-headers"]
        refused = await r.http.post(CHAT, json={}, headers=theirs)
        assert refused.status_code == 401 and refused.headers[allowed] == theirs["origin"], "its page may read why"
        shown = {"authorization": "Bearer a-key-of-mine"}
        assert (await r.http.post(CHAT, json={"messages": HELLO}, headers=theirs | shown)).status_code == 200
    target = EchoTarget()
    async with routing(tiny_folder, target) as r:
        for origin in (theirs["origin"], "http://localhost.evil.example", "http://127.0.0.1:3000.example", "null",
                       "http://evil-localhost", "http://evil.example/.localhost"):
            for answer in (await r.http.options(CHAT, headers=asks | {"origin": origin}),
                           await r.http.get("/v1/models", headers={"origin": origin})):
                assert answer.is_success and allowed not in answer.headers, origin
            for kind in ("application/json", "text/plain"):  # a browser asks nobody before it sends the second
                sent = await r.http.post(CHAT, content=json.dumps({"messages": HELLO}), headers={
                    "origin": origin, "content-type": kind})
                assert sent.status_code == 403 and "API keys" in sent.json()["error"]["message"], origin
        assert not target.requests
        for origin in (ours["origin"], "http://tauri.localhost", "vscode-webview://editor", "app://obsidian.md"):
            assert (await r.http.post(CHAT, json={"messages": HELLO}, headers={"origin": origin})).status_code == 200
            for answer in (await r.http.options(CHAT, headers=asks | {"origin": origin}),
                           await r.http.get("/v1/models", headers={"origin": origin})):
                assert answer.headers[allowed] == origin, "else its browser shows it nothing, and asks for nothing"
        assert (await r.http.options("/v1/models")).headers["allow"] == "GET, HEAD, OPTIONS"
        for page in ("/v1/models", "/health", "/openapi.json", "/load", "/version"):
            assert (await r.http.head(page)).status_code == 200, page
