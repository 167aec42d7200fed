"""The router when things go wrong: clients that leave, queues that fill, targets that fail, keys that are missing."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from router_service.admission import MAX_WAITING_PER_PLACE
from router_service.app import GETS, MODEL, POSTS, Gate
from router_service.dialects.chat import ChatBody, ChatReply
from router_service.dialects.completions import CompletionBody
from router_service.dialects.messages import MessagesReply
from router_service.dialects.openai import Plan
from router_service.front import GatewayFront
from router_service.listener import HttpListener
from router_service.tenants import ANYONE, ApiKeys
from router_service.text.tokens import LONG_TEXT, Detokenizer
from slipstream.base.config import RouterSection, WireSection
from slipstream.base.errors import CapacityError, InvalidRequest, ModelError, SlipstreamError, Unavailable
from slipstream.client import AsyncClient
from slipstream.observe.metrics import RouterMetrics
from slipstream.protocol.chat import ChatOptions, Message
from tests.echo import EchoTarget
from tests.loop import eventually
from tests.routing import CHAT, COMPLETIONS, HELLO, events, routing


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_the_target(tiny_folder: Path, stream: bool) -> None:
    target = EchoTarget(stall_after=2)
    async with routing(tiny_folder, target) as r:
        reading = asyncio.ensure_future(r.post(CHAT, messages=HELLO, stream=stream, n=3))
        await eventually(lambda: len(target.running) == 3)
        reading.cancel()
        await eventually(lambda: not target.running)
        await eventually(lambda: r.service.gateway.admission.in_flight == 0)
        page = await r.metrics()
        assert 'slipstream_requests_total{code="499",endpoint="chat"' in page


async def test_going_away_before_the_first_token(tiny_folder: Path) -> None:
    target = EchoTarget(hang=True)
    async with routing(tiny_folder, target) as r:
        reading = asyncio.ensure_future(r.post(CHAT, messages=HELLO, stream=True))
        await eventually(lambda: len(target.running) == 1)
        reading.cancel()
        await eventually(lambda: not target.running and not r.service.gateway.admission.in_flight)


async def test_who_goes_away_is_counted_wherever_he_waited(tiny_folder: Path) -> None:
    target = EchoTarget(hang=True)
    async with routing(tiny_folder, target, max_in_flight=1) as r:
        admission = r.service.gateway.admission
        running = asyncio.ensure_future(r.post(CHAT, messages=HELLO))
        await eventually(lambda: len(target.running) == 1)
        queued = asyncio.ensure_future(r.post(CHAT, messages=HELLO))
        await eventually(lambda: admission.queued == 1)
        queued.cancel()
        await eventually(lambda: admission.queued == 0)
        running.cancel()
        await eventually(lambda: admission.in_flight == 0)
        assert await r.codes() == {499: 2}
        assert 'request_errors_total{model="target",service="router",type="cancelled"} 2.0' in await r.metrics()


async def test_what_nobody_foresaw_is_counted_once(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The alert on errors looks there."""
    def broken(*_: Any) -> Any:
        raise RuntimeError("a secret")

    async with routing(tiny_folder, EchoTarget()) as r:
        front, hello = GatewayFront(r.service.gateway, ANYONE), (Message("user", "hello"),)
        for kind, name in ((GatewayFront, "_markup"), (ChatReply, "_fields_of"), (MessagesReply, "events")):
            monkeypatch.setattr(kind, name, broken)
        assert (await r.post("/v1/messages", messages=HELLO, max_tokens=4)).status_code == 500
        streamed = events((await r.post(CHAT, messages=HELLO, stream=True)).text)
        assert streamed[-1]["error"]["type"] == "server_error"
        with pytest.raises(RuntimeError):
            await anext(front.chat("tiny", hello, ChatOptions()))
        monkeypatch.setattr(r.service.gateway, "plan_chat", broken)
        assert (await r.post(CHAT, messages=HELLO)).status_code == 500
        with pytest.raises(RuntimeError):
            await anext(front.chat("tiny", hello, ChatOptions()))
        await eventually(lambda: not r.service.gateway.admission.in_flight)
        assert await r.codes() == {500: 5}
        assert 'request_errors_total{model="target",service="router",type="server_error"} 5.0' in await r.metrics()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("moments", range(1, 4))
async def test_who_is_cancelled_while_all_is_freed_leaves_nothing_behind(tiny_folder: Path, n: int,
                                                                        moments: int) -> None:
    """As a request is whose client leaves in the moment in which its answer fails or is over."""
    target = EchoTarget(stall_after=2)
    async with routing(tiny_folder, target) as r:
        gateway = r.service.gateway
        asked = gateway.plan_completion(CompletionBody(prompt="hello", n=n))
        run = await gateway.start(asked, ANYONE)
        await eventually(lambda: len(target.running) == n)
        closing = asyncio.ensure_future(run.aclose())
        for _ in range(moments):
            await asyncio.sleep(0)
        closing.cancel()
        for _ in range(200):
            await asyncio.sleep(0)
        assert not target.running and not gateway.admission.in_flight


async def test_the_queue_is_bounded(tiny_folder: Path) -> None:
    target = EchoTarget(stall_after=1)
    async with routing(tiny_folder, target, max_in_flight=2) as r:
        admission = r.service.gateway.admission
        running = [asyncio.ensure_future(r.post(CHAT, messages=HELLO)) for _ in range(2)]
        await eventually(lambda: len(target.running) == 2)
        queued = [asyncio.ensure_future(r.post(CHAT, messages=HELLO)) for _ in range(2 * MAX_WAITING_PER_PLACE)]
        await eventually(lambda: admission.queued == len(queued))
        refused = await r.post(CHAT, messages=HELLO)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "overloaded_error"
        assert "answers here: 2 run and 4 wait, of 2 and 4 (router.max_in_flight)" in refused.json()["error"]["message"]
        with pytest.raises(openai.RateLimitError):
            await r.openai.chat.completions.create(model="tiny", messages=HELLO)
        target.stall_after = -1
        running[0].cancel()
        codes = {answer.status_code for answer in await asyncio.gather(*queued)}
        assert codes == {200}, "who waited is let in when one leaves"
        running[1].cancel()
        await eventually(lambda: admission.in_flight == 0 and admission.queued == 0)


async def test_a_broken_stream_is_logged_under_the_request_s_id(tiny_folder: Path,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    async with routing(tiny_folder, EchoTarget(fail_after=2, error=Unavailable("gone"))) as r:
        answer = await r.http.post(CHAT, json={"model": "tiny", "messages": HELLO, "stream": True},
                                   headers={"x-request-id": "mine-7"})
    assert answer.headers["x-request-id"] == "mine-7"
    said = capsys.readouterr()
    line = next(line for line in (said.out + said.err).splitlines() if "stream broken" in line)
    assert "mine-7" in line and events(answer.text)[0]["id"].removeprefix("chatcmpl-") in line


async def test_an_error_of_ours_is_logged_under_the_request_s_id_with_its_place(
        tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with routing(tiny_folder, EchoTarget(fail_after=0, error=ModelError("no such tensor"))) as r:
        answer = await r.http.post(CHAT, json={"model": "tiny", "messages": HELLO}, headers={"x-request-id": "mine-8"})
    assert answer.status_code == 500
    said = capsys.readouterr()
    line = next(line for line in (said.out + said.err).splitlines() if "request failed" in line)
    assert "mine-8" in line and "ModelError" in line and "balance.py" in line


@pytest.mark.parametrize("way", ["whole", "stream", "grpc"])
async def test_a_bug_is_logged_by_its_place_and_without_what_a_user_wrote(
        way: str, tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    push, left = Detokenizer.push, iter(range(3))

    def odd(self: Detokenizer, token: int) -> str:
        if next(left, None) is None:
            raise ValueError("no number: 'my secret'")
        return push(self, token)

    monkeypatch.setattr(Detokenizer, "push", odd)
    async with routing(tiny_folder, EchoTarget(pause_s=0.02)) as r:
        if way == "grpc":
            async with AsyncClient(f"127.0.0.1:{r.service.grpc_port}") as client:
                with pytest.raises(SlipstreamError):
                    _ = [delta async for delta in client.complete("hello", max_tokens=8)]
        else:
            await r.post(CHAT, messages=HELLO, max_tokens=8, stream=way == "stream")
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "request failed" in line]
    assert lines and all("ValueError" in line and " odd'" in line for line in lines), "that client asks again"
    assert "my secret" not in said.out + said.err


async def test_answers_of_one_request_that_wait_for_their_turn_are_no_slow_first_tokens(tiny_folder: Path) -> None:
    """Of a list of prompts the last ones begin minutes after their arrival, and somebody was woken for it."""
    async with routing(tiny_folder, EchoTarget(), max_in_flight=1) as r:
        assert (await r.post(COMPLETIONS, prompt="hello", n=8)).status_code == 200
        page = await r.metrics()
    (count,) = re.findall(r"^slipstream_time_to_first_token_seconds_count{.*} (\S+)$", page, re.MULTILINE)
    assert float(count) == 1


async def test_what_cannot_be_read_is_counted_over_grpc_as_over_http(tiny_folder: Path) -> None:
    async with (routing(tiny_folder, EchoTarget()) as r,
                grpc.aio.insecure_channel(f"127.0.0.1:{r.service.grpc_port}") as channel):
        assert (await r.http.post(CHAT, content=b"{")).status_code == 400
        call = channel.stream_stream("/slipstream.v1.InferenceService/Chat")()
        await call.write(b"\xff\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await r.codes())[400] == 2


async def test_targets_that_fail(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget(fail_after=0, error=Unavailable("gone"))) as r:
        refused = await r.post(CHAT, messages=HELLO, stream=True)
        assert refused.status_code == 503, "before the first token: a status"
        assert refused.json()["error"]["message"] == "the target did not take the request; try again soon"
    async with routing(tiny_folder, EchoTarget(fail_after=0, error=CapacityError("full", 7.2))) as r:
        assert (await r.post(CHAT, messages=HELLO)).headers["retry-after"] == "8"
    async with routing(tiny_folder, EchoTarget(fail_after=0, error=InvalidRequest("tokens", "no"))) as r:
        assert (await r.post(CHAT, messages=HELLO)).status_code == 400
    async with routing(tiny_folder, EchoTarget(fail_after=2, error=Unavailable("gone"))) as r:
        assert (await r.post(CHAT, messages=HELLO)).status_code == 503
        broken = events((await r.post(CHAT, messages=HELLO, stream=True)).text)
        assert broken[-1]["error"]["type"] == "service_unavailable", "after it: an event, then [DONE]"
        assert broken[-1]["error"]["message"] == "the target was lost before the answer's end; ask again"
        with pytest.raises(openai.APIError):
            stream = await r.openai.chat.completions.create(model="tiny", messages=HELLO, stream=True)
            _ = [chunk async for chunk in stream]
        assert 'slipstream_requests_total{code="503",endpoint="chat"' in await r.metrics()
    async with routing(tiny_folder, EchoTarget(hang=True), request_timeout_s=0.2) as r:
        late = await r.post(CHAT, messages=HELLO)
        assert late.status_code == 504 and late.headers["x-should-retry"] == "false"
        assert "ask for fewer tokens" in late.json()["error"]["message"]


async def test_a_text_that_waits_to_be_read_takes_no_longer_either(tiny_folder: Path) -> None:
    held = threading.Event()
    async with routing(tiny_folder, EchoTarget(), request_timeout_s=0.2) as r:
        gateway = r.service.gateway
        reading = asyncio.create_task(gateway.lanes.run(LONG_TEXT + 1, held.wait))
        try:
            late = await r.http.post(COMPLETIONS, json={"prompt": "a" * (LONG_TEXT + 1)}, timeout=20)
        finally:
            held.set()
        assert late.status_code == 504 and gateway.admission.in_flight == 0
        assert await reading and (await r.codes())[504] == 1


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
async def test_who_only_counts_and_goes_away_leaves_its_place(tiny_folder: Path, path: str) -> None:
    held, text = threading.Event(), "a" * (LONG_TEXT + 1)
    async with routing(tiny_folder, EchoTarget()) as r:
        gateway = r.service.gateway
        reading = asyncio.create_task(gateway.lanes.run(LONG_TEXT + 1, held.wait))
        try:
            counting = asyncio.create_task(r.post(path, messages=[{"role": "user", "content": text}]))
            await eventually(lambda: gateway.admission.in_flight == 1)
            counting.cancel()
            await eventually(lambda: gateway.admission.in_flight == 0)
        finally:
            held.set()
        assert await reading


@pytest.mark.parametrize("first", [True, False])
async def test_what_one_of_the_engines_honours_is_asked_of_that_one(tiny_folder: Path, first: bool) -> None:
    plain, able = EchoTarget(), EchoTarget()
    able.takes = ("allowed_token_ids",)
    async with routing(tiny_folder, *((able, plain) if first else (plain, able))) as r:
        for _ in range(4):
            assert (await r.post(CHAT, messages=HELLO, allowed_token_ids=[65])).status_code == 200
        assert len(able.requests) == 4
        refused = await r.post(CHAT, messages=HELLO, bad_words=["x"])
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "bad_words"


async def test_another_target_takes_over(tiny_folder: Path) -> None:
    dead, alive = EchoTarget(fail_after=0, error=Unavailable("gone")), EchoTarget()
    async with routing(tiny_folder, dead, alive) as r:
        for _ in range(10):
            assert (await r.post(CHAT, messages=HELLO)).status_code == 200
        assert len(alive.requests) == 10


async def test_what_is_cached_of_an_answer_is_not_of_its_prompt(tiny_folder: Path) -> None:
    """The target that goes on with it is sent both."""
    dead, alive = EchoTarget(end=400, fail_after=80, error=Unavailable("gone")), EchoTarget(end=400)
    alive.waiting = 100
    async with routing(tiny_folder, dead, alive) as r:
        told = (await r.post("/v1/messages", messages=HELLO, max_tokens=400)).json()["usage"]
        first, second = dead.requests[0], alive.requests[0]
        assert len(second.tokens) // 2 > len(first.tokens), "the second one finds more than the prompt"
        assert told["cache_read_input_tokens"] == len(first.tokens) // 2
        assert told["input_tokens"] + told["cache_read_input_tokens"] == len(first.tokens)


async def test_every_route_needs_a_key(tiny_folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# two of them\nfirst-key\n\nsecond-key\n")
    async with routing(tiny_folder, EchoTarget(), api_keys_file=str(keys)) as r:
        schema = (await r.http.get("/openapi.json", headers={"authorization": "Bearer first-key"})).json()
        paths = [path.replace("{model_id}", "tiny") for path in schema["paths"]]
        assert {*POSTS, *GETS, "/v1/models/tiny"} - {MODEL, "/openapi.json"} == set(paths)
        for path in [*paths, "/openapi.json", "/nothing", "//live", "/live/", "/health/../v1/models"]:
            for method, shown in (("GET", ""), ("POST", ""), ("GET", "Bearer wrong"), ("POST", "Basic first-key")):
                response = await r.http.request(method, r.base + path, headers={"authorization": shown})
                free = path in ("/live", "/ready", "/health", "/ping", "/")
                assert (response.status_code == 401) != free, (method, path, response.status_code)
                assert free or response.json()["error"]["type"] == "authentication_error"
        for key in ("first-key", "second-key"):
            client = openai.AsyncOpenAI(base_url=f"{r.base}/v1", api_key=key, max_retries=0)
            assert (await client.chat.completions.create(model="tiny", messages=HELLO)).choices
            await client.close()


async def test_a_load_balancer_that_knows_no_page_finds_it_healthy(tiny_folder: Path, tmp_path: Path) -> None:
    """Azure's, Google's and Amazon's ask for "/" unless they are told another, show no key, and take 200 alone."""
    keys = tmp_path / "keys"
    keys.write_text("first-key\n")
    async with routing(tiny_folder, EchoTarget(), api_keys_file=str(keys)) as r:
        page = await r.http.get("/", headers={"authorization": ""})
        assert page.status_code == 200 and page.json() == {"status": "ready"}, "a stranger is not told the release"
    async with routing(tiny_folder, api_keys_file=str(keys)) as r:
        assert (await r.http.get("/", headers={"authorization": ""})).status_code == 503


async def test_the_schema_is_whole(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        schema = (await r.http.get("/openapi.json")).json()
        asked = schema["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert asked["properties"].keys() >= {"messages", "temperature", "tools"}
        refs = set(re.findall(r'"\$ref": "([^"]*)"', json.dumps(schema)))
        assert refs
        for ref in refs:
            part = schema
            for name in ref.removeprefix("#/").split("/"):
                part = part[name]


async def test_the_schema_is_made_once(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        first = (await r.http.get("/openapi.json")).raise_for_status()
        monkeypatch.setattr(ChatBody, "model_json_schema", None)  # milliseconds of the event loop
        assert (await r.http.get("/openapi.json")).json() == first.json()


@pytest.mark.parametrize(("method", "path", "allow"), [
    ("GET", CHAT, "POST, OPTIONS"), ("DELETE", CHAT, "POST, OPTIONS"), ("POST", "/health", "GET, HEAD, OPTIONS"),
    ("PUT", "/v1/models/tiny", "GET, HEAD, OPTIONS")])
async def test_a_page_says_which_methods_it_takes(method: str, path: str, allow: str, tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        answer = await r.http.request(method, path)
        assert answer.status_code == 405 and answer.headers["allow"] == allow


async def test_drain_finishes_what_runs(tiny_folder: Path) -> None:
    target = EchoTarget(pause_s=0.02)
    async with routing(tiny_folder, target) as r:
        running = asyncio.ensure_future(r.post(CHAT, messages=HELLO))
        await eventually(lambda: len(target.running) == 1)
        r.service.gateway.leave()
        r.service.gateway.admission.close()
        assert (await r.http.get("/health")).status_code == 503 and (await r.http.get("/live")).status_code == 200
        refused = await r.post(CHAT, messages=HELLO)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert (await running).json()["choices"][0]["finish_reason"] == "stop"


async def test_a_router_that_leaves_moves_its_clients_and_fails_none(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget(pause_s=0.002)) as r, httpx.AsyncClient(timeout=60) as late:
        codes, closed = [], asyncio.Event()

        async def ask() -> None:
            async with httpx.AsyncClient(timeout=60) as http:
                while not closed.is_set():
                    answer = await http.post(f"{r.base}{CHAT}", json={"model": "tiny", "messages": HELLO})
                    codes.append(answer.status_code)
                    if answer.headers.get("connection") == "close":
                        return  # a client's next request would open a new connection, to another router

        await late.get(f"{r.base}/live")
        asking = [asyncio.create_task(ask()) for _ in range(3)]
        await eventually(lambda: len(codes) > 6)
        draining = asyncio.create_task(r.service.drain(60))
        await asyncio.wait_for(asyncio.gather(*asking), 60)
        answer = await late.post(f"{r.base}{CHAT}", json={"model": "tiny", "messages": HELLO})
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        async with httpx.AsyncClient() as new:
            with pytest.raises(httpx.ConnectError):
                await new.get(f"{r.base}/live")
        await asyncio.wait_for(draining, 60)
        assert set(codes) == {200}, codes


async def test_keys_are_taken_again_when_their_file_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # As Kubernetes does it: the file is a link into a folder that is a link, which turns.
    for folder, lines in (("one", "old-key\n"), ("two", "old-key\nnew-key\n"), ("three", "new-key\n"),
                          ("bad", "# no\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "api-keys").write_text(lines)
    data, file = tmp_path / "data", tmp_path / "api-keys"
    file.symlink_to(data / "api-keys")

    def turn(folder: str) -> None:
        (tmp_path / "fresh").symlink_to(folder)
        (tmp_path / "fresh").rename(data)

    turn("one")
    keys = ApiKeys(file)
    following = asyncio.create_task(keys.reload_on_change(interval_s=0.01))
    assert keys.tenant("old-key") and not keys.tenant("new-key")
    turn("two")
    await eventually(lambda: keys.tenant("new-key"))
    assert keys.tenant("old-key")
    turn("three")
    await eventually(lambda: not keys.tenant("old-key"))
    for mistake in ("bad", "nowhere"):
        turn(mistake)
        await asyncio.sleep(0.05)
        assert keys.tenant("new-key") and not keys.tenant("old-key") and not keys.tenant("")
    turn("one")
    await eventually(lambda: keys.tenant("old-key"))
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    said = capsys.readouterr()
    assert "-key" not in (said.out + said.err).replace("api-keys", "") and "keys read again" in said.out + said.err


class BrokenGateway:
    """Meets what nobody foresaw, whatever it is asked."""

    leaving = False
    strict = False

    @property
    def ready(self) -> bool:
        raise RuntimeError("a secret")

    @property
    def lanes(self) -> BrokenGateway:
        return self

    async def wait_to_parse(self, size: int) -> None:
        """Nobody else reads."""

    def plan_chat(self, body: ChatBody) -> Plan:
        raise RuntimeError("a secret")

    def failed(self, endpoint: str, error: BaseException) -> None:
        """Nobody looks at the count."""


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("POST", CHAT)])
async def test_what_nobody_foresaw_is_a_plain_500(method: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    gateway: Any = BrokenGateway()
    listener = HttpListener(Gate(gateway, None), RouterSection(listen="127.0.0.1:0"), WireSection(),
                            RouterMetrics("tiny"))
    await listener.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.port}") as client:
        asked = {"model": "tiny", "messages": HELLO} if method == "POST" else None
        answer = await client.request(method, path, json=asked, headers={"x-request-id": "mine"})
    await listener.close()
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert answer.headers["x-request-id"] == "mine" and "secret" not in answer.text
    logged = capsys.readouterr()
    assert "RuntimeError" in logged.out + logged.err and "secret" not in logged.out + logged.err
