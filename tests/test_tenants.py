"""Keys and whose they are: what one tenant can learn of another, and what a file of keys may say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path
from typing import Any

import httpx
import pytest

from router_service import connection, tenants
from router_service.tenants import ANYONE, ApiKeys
from slipstream.base.errors import (
    CapacityError,
    ConfigError,
    InvalidRequest,
    QuotaExceeded,
    SlipstreamError,
    Unavailable,
)
from slipstream.cli.host import first_key
from slipstream.client import AsyncClient
from slipstream.observe.vitals import background_tasks
from slipstream.protocol.chat import PartialAnswer
from slipstream.protocol.requests import Request, Sampling
from slipstream.wire.server import GrpcServer
from slipstream.wire.target import TargetClient, TargetServicer
from tests.echo import EchoTarget
from tests.loop import eventually
from tests.opcodes import opcodes
from tests.pair import WIRE, Rig, target
from tests.routing import CHAT, COMPLETIONS, HELLO, Routing, routing

pytestmark = pytest.mark.usefixtures("servers_end")

SECRET = "4711"
LETTER = "The code of the vault, which nobody else may know, is "


@dataclass(frozen=True)
class Cost:
    """What a request tells of itself, and what it made the target do, which is all that a clock could tell."""

    cached: int
    rows: float


@dataclass
class House:
    """The real router before the real target, over gRPC."""

    rig: Rig
    router: Routing

    async def ask(self, key: str, prompt: str) -> Cost:
        """One request, alone."""
        before = self.rig.count("step_rows_sum")
        answer = await self.router.http.post(
            COMPLETIONS, headers={"authorization": f"Bearer {key}"},
            json={"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        async with asyncio.timeout(60):
            while (info := await self.rig.service.info()).sessions_running or info.sessions_waiting:
                await asyncio.sleep(0.001)
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Cost(cached, self.rig.count("step_rows_sum") - before)

    async def differences(self, key: str, digits: str = "0123456789") -> Mapping[int, set[Cost]]:
        """What each next digit of the secret costs ``key``, which knows all before it: of more than one cost, one
        tells the right digit."""
        found: dict[int, set[Cost]] = {}
        for place in range(len(SECRET)):
            known = LETTER + SECRET[:place]
            await self.ask(key, known)
            found[place] = {await self.ask(key, f"{known}{digit}?") for digit in digits}
        return found


@asynccontextmanager
async def house(folder: Path, keys: Path) -> AsyncIterator[House]:
    async with AsyncExitStack() as opened:
        rig = await opened.enter_async_context(target(folder, slots=4096))
        server = GrpcServer("127.0.0.1:0", WIRE, [TargetServicer(rig.service)])
        client = TargetClient(f"127.0.0.1:{await server.start()}")
        opened.push_async_callback(server.drain, 0.1)
        opened.push_async_callback(client.aclose)
        yield House(rig, await opened.enter_async_context(
            routing(folder, client, model_name="tiny", api_keys_file=str(keys))))


def written(folder: Path, *lines: str) -> Path:
    file = folder / "keys"
    file.write_text("\n".join(lines))
    return file


async def test_nothing_that_one_key_asks_tells_what_another_has_asked(tiny_folder: Path, tmp_path: Path) -> None:
    keys = written(tmp_path, "key-of-a", "key-of-b", "key-of-c name=c", "new-key-of-c name=c",
                   "key-of-d name=d cache=team", "key-of-e name=e cache=team")
    async with house(tiny_folder, keys) as all_:
        mine = await all_.ask("key-of-a", LETTER + SECRET)
        assert mine.cached == 0
        for place, costs in (await all_.differences("key-of-b")).items():
            assert len(costs) == 1, f"digit {place} of the secret can be read: {costs}"
        again = await all_.ask("key-of-a", LETTER + SECRET)
        assert again.cached == len(LETTER + SECRET) - 1 and again.rows < mine.rows, "who asked has it"
        await all_.ask("key-of-c", LETTER)
        assert (await all_.ask("new-key-of-c", LETTER)).cached == len(LETTER) - 1, "keys of one name are one tenant"
        await all_.ask("key-of-d", LETTER + SECRET)
        assert (await all_.ask("key-of-e", LETTER + SECRET)).cached == len(LETTER + SECRET) - 1, "as their lines say"
        assert (await all_.ask("new-key-of-c", LETTER + SECRET)).cached == len(LETTER), "and no other"
        await all_.rig.check()


async def test_grpc_has_the_namespaces_of_http(tiny_folder: Path, tmp_path: Path) -> None:
    async with house(tiny_folder, written(tmp_path, "key-of-a", "key-of-b")) as all_:
        await all_.ask("key-of-a", LETTER)
        cached = {}
        for key in ("key-of-a", "key-of-b"):
            async with AsyncClient(f"127.0.0.1:{all_.router.service.grpc_port}", api_key=key) as client:
                deltas = [delta async for delta in client.complete(LETTER, max_tokens=1, ignore_eos=True)]
                assert deltas[-1].usage is not None
                cached[key] = deltas[-1].usage.cached_tokens
        assert cached == {"key-of-a": len(LETTER) - 1, "key-of-b": 0}


def test_a_file_says_whose_keys_are_and_what_they_may_have(tmp_path: Path) -> None:
    file = written(tmp_path, "# comments count no more", "", "plain", "other",
                   "one name=alice weight=2.5 requests=4 tokens_per_minute=1000",
                   "two name=alice weight=2.5 requests=4 tokens_per_minute=1000", "three name=bob cache=alice")
    keys = ApiKeys(file)
    of: dict[str, Any] = {key: keys.tenant(key) for key in ("plain", "other", "one", "two", "three")}
    assert keys.tenant("four") is None and keys.tenant("") is None
    alice = of["one"]
    assert alice == of["two"]
    assert (alice.name, alice.weight, alice.requests, alice.tokens_per_minute) == ("alice", 2.5, 4, 1000)
    assert of["plain"].id != of["other"].id and of["plain"].name == of["other"].name == "unnamed"
    assert len({tenant.namespace for tenant in of.values()}) == 3 and of["three"].namespace == of["one"].namespace
    assert all(word not in repr([keys, *of.values()]) for word in ("plain", "other", "two", "three"))
    assert ANYONE.namespace == "" and ANYONE.id == ""


def test_what_an_editor_puts_before_a_file_is_no_part_of_its_first_key(tmp_path: Path) -> None:
    """Those of Windows put a byte order mark there, which nobody sees."""
    file = tmp_path / "keys"
    file.write_text("first name=alice\nsecond\n", encoding="utf-8-sig")
    keys = ApiKeys(file)
    assert keys.tenant("first") is not None and keys.tenant("second") is not None
    assert first_key(file) == "first"
    helm_test = run_path(str(Path(__file__).parent.parent / "deploy/helm/slipstream/files/ask.py"))
    assert helm_test["first_key"](str(file)) == "first"


def test_a_namespace_is_the_same_for_all_routers_and_follows_from_no_name(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = ApiKeys(written(tmp_path, "one name=alice", "zero")).tenant("one")
    again = ApiKeys(written(tmp_path / "other", "zero", "one name=alice")).tenant("one")
    other = ApiKeys(written(tmp_path, "two name=alice")).tenant("two")
    assert first == again and other is not None and first is not None and first.namespace != other.namespace


@pytest.mark.parametrize(("line", "problem"), [
    ("name=hush weight=2", "line 2: has no key"),  # as where a variable for it was empty
    ("hush-key hush-word", "line 2: after the key come fields"),
    ("hush-key hush=word", "line 2: after the key come fields"),
    ("hush-key name=a name=b", "line 2: after the key come fields"),
    ("hush-key name=a/hush", "line 2: name: "),
    ("hush-key weight=0", "line 2: weight: "),
    ("hush-key weight=nan", "line 2: weight: "),
    ("hush-key requests=-1", "line 2: requests: "),
    ("hush-key tokens_per_minute=hush", "line 2: tokens_per_minute: "),
    ("hush-key name=alice weight=2", "line 2: gives name alice other fields than line 1"),
    ("first name=bob", "line 2: the same key stands above with other fields"),
])
def test_a_mistake_in_a_line_is_named_and_the_line_is_not_shown(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ApiKeys(written(tmp_path, "first name=alice", line))
    assert problem in str(raised.value) and "hush" not in str(raised.value)


async def test_one_key_s_quota_and_queue_are_its_own_and_refusals_are_counted_by_name(tiny_folder: Path,
                                                                                       tmp_path: Path) -> None:
    keys = written(tmp_path, "key-of-a name=a", "key-of-b name=b tokens_per_minute=10", "key-of-c name=c")
    echo = EchoTarget(stall_after=1)
    async with routing(tiny_folder, echo, api_keys_file=str(keys), max_in_flight=2) as r:
        async def ask(key: str) -> httpx.Response:
            return await r.http.post(CHAT, json={"model": "tiny", "messages": HELLO},
                                     headers={"authorization": f"Bearer {key}"})

        running = [asyncio.ensure_future(ask("key-of-a")) for _ in range(2)]
        await eventually(lambda: len(echo.running) == 2)
        flood = [asyncio.ensure_future(ask("key-of-a")) for _ in range(5)]
        refused = await next(asyncio.as_completed(flood))
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "overloaded_error"
        beside = asyncio.ensure_future(ask("key-of-b"))
        admission = r.service.gateway.admission
        await eventually(lambda: admission.queued == 5)
        echo.stall_after = -1
        running[0].cancel()
        assert (await beside).status_code == 200, "though another's requests fill the places and the queue"
        used_up = await ask("key-of-b")
        assert used_up.status_code == 429 and 1 <= int(used_up.headers["retry-after"]) <= 60
        assert used_up.json()["error"]["type"] == "rate_limit_error"
        assert used_up.json()["error"]["code"] == "rate_limit_exceeded"
        for task in (running[1], *flood):
            task.cancel()
        await eventually(lambda: admission.in_flight == admission.queued == 0)
        page = [line for line in (await r.metrics()).splitlines() if line.startswith("slipstream_requests_refused_tot")]
        page = [line for line in page if 'tenant="others"' not in line]  # which nobody is
        assert len(page) == 2 and all("key-of" not in line for line in page)
        assert any('reason="queue"' in line and 'tenant="a"' in line for line in page)
        assert any('reason="tokens"' in line and 'tenant="b"' in line for line in page)


async def test_large_bodies_of_one_key_that_wait_shut_no_other_s_out(tiny_folder: Path, tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_BODIES_BYTES", 100_000)
    keys, echo = written(tmp_path, "key-of-a name=a", "key-of-b name=b"), EchoTarget(hang=True)
    echo.context = 1 << 20
    async with routing(tiny_folder, echo, api_keys_file=str(keys), max_in_flight=1) as r:
        async def ask(key: str, length: int) -> httpx.Response:
            return await r.http.post(COMPLETIONS, json={"prompt": "x" * length},
                                     headers={"authorization": f"Bearer {key}"})

        waiting = [asyncio.ensure_future(ask("key-of-a", 48_000)) for _ in range(2)]
        await eventually(lambda: r.service.gateway.admission.queued == 1)
        waiting.append(asyncio.ensure_future(ask("key-of-b", 10_000)))
        await eventually(lambda: r.service.gateway.admission.queued == 2)
        for one in waiting:
            one.cancel()


async def test_tokens_that_a_client_says_it_has_are_taken_from_its_quota(tiny_folder: Path, tmp_path: Path) -> None:
    """A target computes them like a prompt; free, a prompt could be sent as the beginning of its answer."""
    keys, echo = written(tmp_path, "key-of-a name=a tokens_per_minute=30"), EchoTarget()
    assert echo.identity is not None
    echo.says = "a long text that is to be gone on with, and its end"
    begun = PartialAnswer(echo.identity.tag, tuple(echo.says[:40].encode()))
    async with (routing(tiny_folder, echo, api_keys_file=str(keys)) as r,
                AsyncClient(f"127.0.0.1:{r.service.grpc_port}", api_key="key-of-a") as client):
        assert [delta async for delta in client.complete("a", max_tokens=41, begun=begun)]
        with pytest.raises(QuotaExceeded):
            await anext(aiter(client.complete("a", max_tokens=41, begun=begun)))


@pytest.mark.parametrize(("error", "status"), [(CapacityError("full"), 429), (Unavailable("gone"), 503)])
async def test_what_no_target_takes_is_not_taken_from_a_quota(error: SlipstreamError, status: int, tiny_folder: Path,
                                                              tmp_path: Path) -> None:
    """Two tries at a full target used up a key's minute, and nothing was answered."""
    keys, echo = written(tmp_path, "key-of-a name=a tokens_per_minute=20"), EchoTarget(fail_after=0, error=error)
    async with routing(tiny_folder, echo, api_keys_file=str(keys)) as r:
        r.http.headers["authorization"] = "Bearer key-of-a"
        for _ in range(3):
            refused = await r.post(COMPLETIONS, prompt="x" * 30)
            assert refused.status_code == status and refused.json()["error"]["code"] != "rate_limit_exceeded"
        echo.fail_after = None
        assert (await r.post(COMPLETIONS, prompt="x" * 30)).status_code == 200
        assert (await r.post(COMPLETIONS, prompt="x" * 30)).json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("header", ["Bearer {}", "{}"])
async def test_a_key_of_other_letters_opens_too(header: str, tiny_folder: Path, tmp_path: Path) -> None:
    keys, key = tmp_path / "keys", "schlüssel-∑"
    keys.write_text(f"{key}\n", encoding="utf-8")
    name = "authorization" if " " in header else "x-api-key"
    async with routing(tiny_folder, EchoTarget(), api_keys_file=str(keys)) as r:
        for shown, status in ((header.format(key).encode(), 200), (header.format("schlüssel").encode("latin-1"), 401)):
            answer = await r.http.get("/v1/models", headers=[(name.encode(), shown)])
            assert answer.status_code == status


def test_a_question_costs_the_same_however_many_keys_there_are(tmp_path: Path) -> None:
    """Of ten thousand each request, probe and refusal compared all of them on the event loop: half a millisecond."""
    def cost(count: int, key: str) -> int:
        keys = ApiKeys(written(tmp_path, *(f"key-{i}" for i in range(count))))
        assert (keys.tenant(key) is None) == (key == "another")
        return opcodes(lambda: keys.tenant(key))

    for key in ("key-0", "another"):
        assert cost(500, key) == cost(5, key)


async def test_streams_go_on_while_keys_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand of them took a tenth of a second of the event loop."""
    keys, threads, own_read = ApiKeys(written(tmp_path, "old")), set[int](), tenants._read_keys

    def reads(file: Path) -> Any:
        threads.add(threading.get_ident())
        return own_read(file)

    monkeypatch.setattr(tenants, "_read_keys", reads)
    async with background_tasks(keys.reload_on_change(0.001)):
        written(tmp_path, "new-key")
        await eventually(lambda: keys.tenant("new-key") is not None)
    assert threads and threading.get_ident() not in threads


async def test_who_has_no_key_is_counted(tiny_folder: Path, tmp_path: Path) -> None:
    """Keys that were replaced wrongly look like no traffic otherwise."""
    keys = written(tmp_path, "key-of-a name=a")
    counted = 'request_errors_total{model="echo",service="router",type="authentication_error"} '
    async with (routing(tiny_folder, EchoTarget(), api_keys_file=str(keys), model_name="echo") as r,
                AsyncClient(f"127.0.0.1:{r.service.grpc_port}", api_key="another") as client):
        assert f"{counted}0.0" in await r.metrics()
        assert (await r.http.get("/health")).status_code == 200, "a probe needs none"
        assert (await r.post(CHAT, messages=HELLO)).status_code == 401
        with pytest.raises(InvalidRequest, match="key"):
            await client.models()
        assert f"{counted}2.0" in await r.metrics()


async def test_a_target_without_room_is_told_with_a_time_and_counted(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget(fail_after=0, error=CapacityError("full", 7.2))) as r:
        refused = await r.post(CHAT, messages=HELLO)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) == 8
        assert 'reason="target",service="router",tenant="anyone"' in await r.metrics()


async def test_who_salts_what_is_kept_is_one_all_the_same(tiny_folder: Path, tmp_path: Path) -> None:
    keys, echo = written(tmp_path, "first name=alice", "second name=bob"), EchoTarget()
    async with routing(tiny_folder, echo, api_keys_file=str(keys)) as r:
        for key, salt in (("first", ""), ("first", "a"), ("first", "b"), ("second", "a")):
            await r.http.post(COMPLETIONS, headers={"authorization": f"Bearer {key}"},
                              json={"prompt": "w", "max_tokens": 1, "cache_salt": salt})
    alice, *salted, bob = echo.requests
    assert len({request.namespace for request in echo.requests}) == 4
    assert {request.owner for request in salted} == {alice.owner} != {bob.owner}


@pytest.mark.parametrize("namespaces", [["a"] * 12, [f"a-{number}" for number in range(12)]], ids=["one", "salted"])
@pytest.mark.parametrize(("slots", "settings"), [(2048, {"max_sessions": 2}), (160, {})])
async def test_in_a_target_too_who_asks_for_much_does_not_stand_before_others(
        tiny_folder: Path, slots: int, settings: dict[str, Any], namespaces: list[str]) -> None:
    over: list[str] = []
    async with target(tiny_folder, slots=slots, prefix_cache=False, **settings) as rig:
        async def ask(number: int, namespace: str) -> None:
            tokens = tuple(range(number, number + 40))
            await rig.answer(Request(f"{number}", tokens, Sampling(), 6, namespace=namespace))
            over.append(namespace)

        await asyncio.gather(*map(ask, range(12), namespaces), ask(50, "b"))
        await rig.check()
    assert over.index("b") <= 3, f"in turn, so no later than the second turn of two: {over}"
