"""Keys and whose they are: what one tenant can learn of another, and what a file of keys may say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router_service.tenants import ANYONE, ApiKeys
from slipstream.base.errors import ConfigError
from slipstream.client import AsyncClient
from slipstream.wire.server import GrpcServer
from slipstream.wire.target import TargetClient, TargetServicer
from tests.pair import WIRE, Rig, target
from tests.routing import COMPLETIONS, Routing, routing

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
        async with asyncio.timeout(10):
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
    keys = ApiKeys.load(str(file))
    of: dict[str, Any] = {key: keys.tenant(key) for key in ("plain", "other", "one", "two", "three")}
    assert keys.tenant("four") is None and keys.tenant("") is None
    alice = of["one"]
    assert alice == of["two"]
    assert (alice.name, alice.weight, alice.requests, alice.tokens_per_minute) == ("alice", 2.5, 4, 1000)
    assert of["plain"].id != of["other"].id and of["plain"].name == of["other"].name == "unnamed"
    assert len({tenant.namespace for tenant in of.values()}) == 3 and of["three"].namespace == of["one"].namespace
    assert all(word not in repr([keys, *of.values()]) for word in ("plain", "other", "two", "three"))
    assert ApiKeys.load("").tenant("whatever") == ANYONE and ANYONE.namespace == ""


def test_a_namespace_is_the_same_for_all_routers_and_follows_from_no_name(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = ApiKeys.load(str(written(tmp_path, "one name=alice", "zero"))).tenant("one")
    again = ApiKeys.load(str(written(tmp_path / "other", "zero", "one name=alice"))).tenant("one")
    other = ApiKeys.load(str(written(tmp_path, "two name=alice"))).tenant("two")
    assert first == again and other is not None and first is not None and first.namespace != other.namespace


@pytest.mark.parametrize(("line", "problem"), [
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
        ApiKeys.load(str(written(tmp_path, "first name=alice", line)))
    assert problem in str(raised.value) and "hush" not in str(raised.value)
