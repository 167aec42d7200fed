"""A streamed answer over HTTP is picked up where it stopped: by any router, from the last id that came, exactly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk

from bench.fleet import free_port
from router_service.event_id import HEADER, EventIds, Origin, ResumePoint, parse_event_id
from router_service.text.deltas import AnswerToken, TextDelta
from slipstream.base.errors import InvalidRequest
from slipstream.protocol.identity import Identity
from tests.echo import EchoTarget, answer_bytes
from tests.loop import eventually
from tests.routing import CHAT, COMPLETIONS, HELLO, READS, Event, Reader, Routing, routing
from tests.test_picked_up import two
from tests_chaos.relay import Relay

HELD = {"path": CHAT, "messages": HELLO}
ORIGIN = Origin("ab" * 16, 1_700_000_000, 7, "cd" * 16)


async def asked(router: Routing, body: dict[str, Any], last: str = "") -> list[Event]:
    """The events of a stream that goes on behind ``last``."""
    headers = {"last-event-id": last} if last else READS
    path, fields = body["path"], {name: value for name, value in body.items() if name != "path"}
    answer = await router.http.post(path, json={"model": "tiny", "stream": True, **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    reader = Reader()
    return [event for line in answer.text.split("\n") if (event := reader.take(line)) is not None]


def told(events: list[Event]) -> dict[str, Any]:
    """What a client makes of the chunks: all of them have to agree on whose they are."""
    assert events[-1].data == "[DONE]"
    chunks = [json.loads(event.data) for event in events[:-1]]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1, chunks
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    entries: list[Any] = []
    for choice in choices:
        columns = choice["logprobs"] or {}
        entries += columns["content"] if "content" in columns else list(zip(*columns.values(), strict=True))
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return {"text": "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices),
            "logprobs": entries, "finish": [c["finish_reason"] for c in choices if c["finish_reason"]],
            "openings": sum("role" in choice.get("delta", {}) for choice in choices),
            "usage": [(u["prompt_tokens"], u["completion_tokens"], u["completion_tokens_details"]) for u in usage[-1:]],
            "prompts": [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c],
            "token_ids": [token for c in choices for token in c.get("token_ids", ())],
            "head": (chunks[0]["id"], chunks[0]["created"])}


BODIES = {
    "chat": HELD | {"max_tokens": 30},
    "seed": HELD | {"max_tokens": 30, "seed": -5},
    "greedy": {"path": COMPLETIONS, "prompt": "hello", "max_tokens": 30, "temperature": 0},
    "stop across cuts": HELD | {"max_tokens": 60, "stop": ["w3 w4 w5"]},
    "stop that never comes": HELD | {"max_tokens": 30, "stop": ["w2 w3 X", " w4 w"]},
    "logprobs": HELD | {"max_tokens": 20, "logprobs": True, "top_logprobs": 2, "stop": "w9"},
    "offsets": {"path": COMPLETIONS, "prompt": "hello", "max_tokens": 20, "logprobs": 1},
    "usage": HELD | {"max_tokens": 30, "stream_options": {"include_usage": True}},
    "token ids": {"path": COMPLETIONS, "prompt": "hello", "max_tokens": 20, "return_token_ids": True,
                  "request_id": "mine", "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "all that counts from the start": HELD | {
        "max_tokens": 30, "min_tokens": 20, "presence_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": {"65": 2},
        "top_k": 9, "ignore_eos": True},
}


async def test_an_answer_goes_on_from_every_id(tiny_folder: Path) -> None:
    """At another router; the target is asked for the very same answer."""
    async with two(tiny_folder, target := EchoTarget(end=50, accepted=2)) as (one, other, _):
        for name, body in BODIES.items():
            target.requests.clear()
            whole = await asked(one, body)
            for cut, event in enumerate(whole[:-1], start=1):
                assert len(f"id: {event.id}\n") == 81  # as the page says
                rest = await asked(other, body, event.id)
                assert told(whole[:cut] + rest) == told(whole), (name, cut)
                first, again = target.requests[0], target.requests[-1]
                assert again == replace(first, request_id=again.request_id, trace=again.trace)
            assert len(target.requests) > 5


async def test_it_can_break_again_and_again(tiny_folder: Path) -> None:
    body = BODIES["chat"]
    async with two(tiny_folder, EchoTarget(end=50)) as (one, other, _):
        seen, routers = (await asked(one, body))[:2], (other, one)
        whole = await asked(one, body, seen[0].id)
        for number in range(3):
            seen += (await asked(routers[number % 2], body, seen[-1].id))[:2]
        seen += await asked(one, body, seen[-1].id)
        assert told(seen)["text"] == told(whole)["text"]


async def test_who_does_not_ask_for_ids_gets_none(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as router:
        for body in ({"prompt": "hello", "stream": True}, {"prompt": "hello", "stream": True, "n": 2}):
            headers = READS if "n" in body else {}  # of several answers no id can tell where they are
            answer = await router.http.post(COMPLETIONS, json={"model": "tiny", **body}, headers=headers)
            assert answer.status_code == 200 and "id: " not in answer.text and "\n:" not in answer.text


async def test_what_would_not_be_the_same_again_has_no_ids(tiny_folder: Path) -> None:
    lossy, exact = EchoTarget(), EchoTarget()
    lossy.lossy = True
    async with routing(tiny_folder, lossy) as router, routing(tiny_folder, exact) as other:
        assert {event.id for event in await asked(router, BODIES["chat"])} == {""}
        assert {event.id for event in await asked(router, BODIES["greedy"])} != {""}
        last = (await asked(other, BODIES["chat"]))[5].id
        answer = await router.http.post(CHAT, json={"model": "tiny", "stream": True, "messages": HELLO},
                                        headers={"last-event-id": last})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == HEADER


async def test_what_is_no_id_of_the_request_is_refused_by_name(tiny_folder: Path) -> None:
    """Before anybody is asked to compute."""
    async with routing(tiny_folder, target := EchoTarget(end=50)) as router:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 30, "stream": True, "seed": 5}
        last = (await asked(router, {"path": COMPLETIONS, **body}))[5].id
        for changes, header, param in [
                *(({}, wrong, HEADER) for wrong in ("0", last[:-1], last + "A", "\u00e9" * 76, last * 99, "=" * 76)),
                *((change, last, HEADER) for change in (
                    {"stream": False}, {"n": 2}, {"prompt": ["a", "b"]}, {"seed": 1}, {"max_tokens": 3})),
                ({"prompt": ""}, last, "prompt"), ({"model": "other"}, last, "model")]:
            answer = await router.http.post(COMPLETIONS, json={**body, **changes},
                                            headers={"last-event-id": header.encode()})
            assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param, (changes, header)
        other = await router.http.post("/v1/responses", json={"model": "tiny", "input": "hello", "stream": True},
                                       headers={"last-event-id": last})
        assert other.status_code == 400 and HEADER in other.text, "a dialect whose events have none"
    assert len(target.requests) == 1


async def test_another_answer_is_never_joined(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget(end=12)) as router:
        body = {"path": COMPLETIONS, "prompt": "hello", "max_tokens": 30, "ignore_eos": True, "temperature": 0}
        last = (await asked(router, body))[-2].id
        for changes in ({"prompt": "hallo"}, {"prompt": "hello!"}, {"ignore_eos": None}):
            *_, error, done = await asked(router, body | changes, last)
            problem = json.loads(error.data)["error"]
            assert (problem["param"], problem["type"]) == (HEADER, "invalid_request_error") and done.data == "[DONE]"
        await eventually(lambda: not router.service.gateway.admission.in_flight)
        assert await router.codes() == {200: 1, 400: 3}, "each is counted once"


async def test_another_model_does_not_go_on(tiny_folder: Path) -> None:
    target = EchoTarget(end=50)
    async with two(tiny_folder, target) as (one, other, _):
        last = (await asked(one, BODIES["greedy"]))[5].id
        target.identity = Identity("other", "float32", "none", "echo")
        for _ in range(2):  # before the router has heard of it, and after
            answer = await other.http.post(COMPLETIONS, headers={"last-event-id": last}, json={
                "model": "tiny", "prompt": "hello", "max_tokens": 30, "temperature": 0, "stream": True})
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_changed"
        assert not any(request.identity == target.identity for request in target.requests)


async def test_of_two_models_the_one_goes_on_that_began(tiny_folder: Path) -> None:
    old, new = EchoTarget(end=50), EchoTarget(end=50)
    new.identity = Identity("other", "float32", "none", "echo")
    async with routing(tiny_folder, old) as one, routing(tiny_folder, new, old) as other:
        events = await asked(one, BODIES["greedy"])
        for _ in range(4):
            await asked(other, BODIES["greedy"], events[5].id)
    assert not new.requests and len(old.requests) == 5


async def test_a_key_goes_on_with_its_own_answers_alone(tiny_folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-of-a name=a\nkey-of-b name=b\n")
    target = EchoTarget(end=50)
    async with two(tiny_folder, target, api_keys_file=str(keys)) as (one, other, _):
        one.http.headers["authorization"] = "Bearer key-of-a"
        last = (await asked(one, BODIES["seed"]))[5].id
        for key, mine in (("key-of-a", True), ("key-of-b", False)):
            other.http.headers["authorization"] = f"Bearer {key}"
            rest = await asked(other, BODIES["seed"], last)
            assert ("error" not in rest[0].data) is mine
    assert len({request.namespace for request in target.requests}) == 2


def test_what_was_told_is_left_out_in_the_middle_of_characters_and_commits() -> None:
    text = "a\u2211b\u20ac"
    tokens = [AnswerToken(byte, "", False) for byte in text.encode()]
    ends = {len(text[: i + 1].encode()) - 1: char for i, char in enumerate(text)}
    tokens = [token._replace(text=ends.get(i, "")) for i, token in enumerate(tokens)]
    assert "".join(token.text for token in tokens) == text
    for cut in range(len(tokens) + 1):
        before = EventIds(ORIGIN, 9)
        id_ = before.after(TextDelta("", tuple(tokens[:cut])))
        for size in (1, 2, 3, len(tokens)):
            after, news, finish = EventIds(ORIGIN, 9, parse_event_id(id_)), "", ""
            for start in range(0, len(tokens), size):
                part = tuple(tokens[start : start + size])
                over = start + size >= len(tokens)
                delta = TextDelta("".join(t.text for t in part) + "\ufffd" * over, part, "length" if over else "")
                if after.catching_up:
                    _, delta = after.split(delta)
                final = after.after(delta)
                news, finish = news + delta.text, finish + delta.finish
            assert news == "".join(token.text for token in tokens[cut:]) + "\ufffd" and finish == "length"
            assert final == EventIds(ORIGIN, 9).after(TextDelta("", tuple(tokens), "length"))


@pytest.mark.parametrize("wrong", [
    {"tokens": 3}, {"check": 1}, {"finished": True}, {"tokens": 9}, {"finished": True, "tokens": 1}], ids=str)
def test_whatever_does_not_agree_is_an_error(wrong: dict[str, Any]) -> None:
    tokens = tuple(AnswerToken(token, "x") for token in range(4))
    ids = EventIds(ORIGIN, 9)
    reached = parse_event_id(ids.after(TextDelta("xx", tokens[:2])))
    assert reached == ResumePoint(ORIGIN, 2, False, reached.check)
    again = EventIds(ORIGIN, 9, reached._replace(**wrong))
    with pytest.raises(InvalidRequest, match=r"^Last-Event-ID: "):
        again.split(TextDelta("xxxx", tokens, "stop"))


async def test_the_openai_client_can_do_it(tiny_folder: Path) -> None:
    seen, last = "", ""
    async with two(tiny_folder, target := EchoTarget(end=50, accepted=0)) as (one, other, _):
        for router in (one, other):
            headers, reader = {"Last-Event-ID": last} if last else {"Accept": "text/event-stream"}, Reader()
            async with router.openai.chat.completions.with_streaming_response.create(
                    model="tiny", messages=HELLO, max_tokens=30, stream=True, extra_headers=headers) as answer:
                async for line in answer.iter_lines():
                    if (event := reader.take(line)) is None or event.data == "[DONE]":
                        continue
                    chunk = ChatCompletionChunk.model_validate_json(event.data)
                    seen, last = seen + (chunk.choices[0].delta.content or ""), event.id
                    if router is one and len(seen) == 7:
                        break
    assert seen == bytes(answer_bytes(target.requests[0])[:30]).decode() and len(target.requests) == 2


def shown() -> Callable[[str, dict[str, Any]], str]:
    """The client that the page has."""
    text = (Path(__file__).parent.parent / "docs" / "API.md").read_text(encoding="utf-8")
    code, names = text.split("## A stream that breaks")[1].split("```python")[1].split("```")[0], dict[str, Any]()
    exec("import httpx, json, time" + code, names)
    whole: Callable[[str, dict[str, Any]], str] = names["whole"]
    return whole


async def test_the_page_shows_how(tiny_folder: Path) -> None:
    target, relay = EchoTarget(end=50, accepted=0, stall_after=5), Relay(free_port())
    async with two(tiny_folder, target) as (one, other, _):
        relay.to = one.service.http_port
        await relay.start()
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 30, "stream": True}
        reading = asyncio.create_task(asyncio.to_thread(shown(), f"http://{relay.address}{COMPLETIONS}", body))
        await eventually(lambda: target.stalled == 1)
        target.stall_after = -1
        relay.cut(other.service.http_port)
        assert await reading == bytes(answer_bytes(target.requests[0])[:30]).decode()
        await relay.close()
    assert len(target.requests) == 2 and target.requests[0].sampling == target.requests[1].sampling
