"""Everything joined: the unmodified openai client, the router, gRPC, the target, gRPC, the draft; on the tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream.base.config import DraftSection, GrowthSection, ModelSection
from slipstream.client import AsyncClient
from slipstream.drafting import create
from slipstream.wire.server import GrpcServer
from slipstream.wire.target import TargetClient, TargetServicer
from tests.pair import STUBBORN, WIRE, Rig, drafting, grpc_link, target
from tests.routing import HELLO, Routing, routing

pytestmark = pytest.mark.usefixtures("servers_end")


@dataclass
class Stack:
    rig: Rig
    router: Routing

    async def slots_come_back(self) -> None:
        async with asyncio.timeout(60):
            while (info := await self.rig.service.info()).sessions_running or info.sessions_waiting:
                await asyncio.sleep(0.01)
        await self.rig.check()
        assert self.rig.worker.num_free_slots == self.rig.runner.slots.num_slots


@asynccontextmanager
async def stack(folder: Path, draft_folder: Path) -> AsyncIterator[Stack]:
    """The services on free loopback ports; the drafter is the target with a little noise."""
    section = DraftSection(drafter="standalone", model=str(draft_folder), dtype="float64",
                           growth=GrowthSection(num_steps=4, topk=2, num_draft_tokens=8))
    async with AsyncExitStack() as opened:
        rig = await opened.enter_async_context(target(folder, STUBBORN, slots=4096))
        drafter = create(section, ModelSection(path=str(folder), dtype="float64"), 4096)
        peers = await opened.enter_async_context(drafting(drafter))
        await opened.enter_async_context(grpc_link(rig, peers))
        server = GrpcServer("127.0.0.1:0", WIRE, [TargetServicer(rig.service)])
        client = TargetClient(f"127.0.0.1:{await server.start()}")
        opened.push_async_callback(server.drain, 0.1)
        opened.push_async_callback(client.aclose)
        yield Stack(rig, await opened.enter_async_context(routing(folder, client, policy=STUBBORN, model_name="tiny")))


def content(answer: Any) -> str:
    return str(answer.choices[0].message.content)


async def test_speculation_shows_in_the_usage_and_not_in_the_text(tiny_folder: Path, tiny_draft_folder: Path) -> None:
    async with stack(tiny_folder, tiny_draft_folder) as all_:
        ask = all_.router.openai.chat.completions
        for temperature in (0.0, 0.8):
            wanted: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 48, "seed": 4,
                                      "temperature": temperature}
            drafted = await ask.create(**wanted)
            plain = await ask.create(**wanted, extra_body={"speculate": False})
            assert content(drafted) == content(plain)
            details = drafted.usage.completion_tokens_details
            assert details.accepted_prediction_tokens > 0
            assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
            told, none = (answer.metrics["speculative_decoding"] for answer in (drafted, plain))
            histogram = told["acceptance_histogram"]
            assert told["num_spec_steps"] == sum(histogram) > 0 and len(histogram) == told["num_spec_tokens"] + 1 > 1
            assert told["num_accepted_draft_tokens"] == sum(i * count for i, count in enumerate(histogram))
            assert told["num_accepted_draft_tokens"] >= details.accepted_prediction_tokens, "an end may cut the last"
            assert (none["acceptance_histogram"], none["num_spec_steps"], none["num_spec_tokens"]) == ([0], 0, 0)
            text = ""
            async for chunk in await ask.create(**wanted, stream=True):
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            assert text == content(drafted)
        await all_.slots_come_back()


async def test_grpc_and_http_give_the_same_answer(tiny_folder: Path, tiny_draft_folder: Path) -> None:
    async with stack(tiny_folder, tiny_draft_folder) as all_:
        http = await all_.router.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=32, seed=9)
        client = AsyncClient(f"127.0.0.1:{all_.router.service.grpc_port}")
        deltas = [delta async for delta in client.chat("hello", max_tokens=32, seed=9)]
        assert "".join(delta.text for delta in deltas) == content(http)
        assert any(token.drafted for delta in deltas for token in delta.tokens)
        assert deltas[-1].usage is not None and deltas[-1].usage.completion_tokens == http.usage.completion_tokens
        await client.aclose()


async def test_a_client_that_disconnects_frees_its_slots(tiny_folder: Path, tiny_draft_folder: Path) -> None:
    async with stack(tiny_folder, tiny_draft_folder) as all_:
        stream = await all_.router.openai.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
        async for _ in stream:
            break
        await stream.close()
        await all_.slots_come_back()
        assert all_.rig.count("bonus_tokens_total") < 1500


async def test_many_streams_with_choices_and_stops(tiny_folder: Path, tiny_draft_folder: Path) -> None:
    async with stack(tiny_folder, tiny_draft_folder) as all_:
        ask = all_.router.openai.chat.completions
        answers = await asyncio.gather(*(
            ask.create(model="tiny", messages=HELLO, max_tokens=24, n=2, seed=i, stop=["\n\n"]) for i in range(16)))
        assert all(len(answer.choices) == 2 for answer in answers)
        assert all(choice.finish_reason in ("stop", "length") for answer in answers for choice in answer.choices)
        await all_.slots_come_back()
