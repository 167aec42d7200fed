"""A real router on free ports of this machine, over targets of the test's choice."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
from openai import AsyncOpenAI

from router_service.service import RouterService
from router_service.text.tokens import ChatTemplate
from slipstream.base.config import Config, PolicySection
from slipstream.base.offload import ChildProcess
from slipstream.protocol.requests import Backend

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]
READS = {"accept": "text/event-stream"}


class Routing:
    """A running router and ways to reach it."""

    def __init__(self, service: RouterService) -> None:
        self.service = service
        self.base = f"http://127.0.0.1:{service.http_port}"
        # Not to verify: nothing is encrypted here, and to load the authorities takes longer than most tests.
        self.http = httpx.AsyncClient(base_url=self.base, timeout=60, verify=False)

    @cached_property
    def openai(self) -> AsyncOpenAI:
        """Made for those who ask it: it loads the authorities."""
        return AsyncOpenAI(base_url=f"{self.base}/v1", api_key="none", max_retries=0)

    async def close(self) -> None:
        if "openai" in vars(self):
            await self.openai.close()
        await self.http.aclose()

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": "tiny", **body})

    async def metrics(self) -> str:
        return (await self.http.get(f"http://127.0.0.1:{self.service.metrics_port}/metrics")).text

    async def codes(self) -> Counter[int]:
        """How many requests ended with each."""
        counted = Counter[int]()
        for code, count in re.findall(r'^slipstream_requests_total{code="(\d+)".* (.+)$', await self.metrics(), re.M):
            counted[int(code)] += int(float(count))
        return counted


RENDERING: dict[str, tuple[ChildProcess, bool]] = {}  # with what its first template was told: whether it takes tools
START = ChatTemplate._start_process


def rendering(template: ChatTemplate) -> ChildProcess:
    """The process that renders it, for one router after the other: to start one takes longer than most tests."""
    opening = json.dumps(template._config)
    if opening not in RENDERING or RENDERING[opening][0].ended:
        RENDERING[opening] = START(template), template.takes_tools
        if len(RENDERING) > 4:  # most templates are of one test
            del RENDERING[next(iter(RENDERING))]
    process, template.takes_tools = RENDERING[opening]
    return process


@asynccontextmanager
async def routing(folder: Path, *targets: Backend, policy: PolicySection | None = None,
                  **section: Any) -> AsyncIterator[Routing]:
    """A router of ``section``'s settings, drained at the end."""
    ports = {"listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0"}
    config = Config.model_validate({"model": {"path": str(folder)}, "router": {**ports, **section},
                                    "target": {"policy": policy or PolicySection()}})
    with patch.object(ChatTemplate, "_start_process", rendering):
        service = RouterService(config, {f"t{i}": target for i, target in enumerate(targets)})
    await service.start()
    found = Routing(service)
    try:
        yield found
    finally:
        await found.close()
        with patch.object(ChatTemplate, "close"):
            await service.drain(0.0)


def events(text: str) -> list[Any]:
    """The data of a server-sent stream; asserts its form."""
    blocks = blocks_of(text)
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def blocks_of(text: str) -> list[str]:
    """The events of a server-sent stream, without the comments of one that was silent for long."""
    assert text.endswith("\n\n")
    return re.sub(r"^:\n", "", text, flags=re.MULTILINE).removesuffix("\n\n").split("\n\n")


@dataclass(frozen=True, slots=True)
class Event:
    """One whole event: its id, and what its data say."""

    id: str
    data: str


class Reader:
    """Makes events of lines: whole ones alone, so that what a break left of one does not count, nor its id."""

    def __init__(self) -> None:
        self._id = self._data = ""

    def take(self, line: str) -> Event | None:
        name, _, value = line.partition(": ")
        if name == "id":
            self._id = value
        elif name == "data":
            self._data = value
        elif not line and self._data:
            event, self._data = Event(self._id, self._data), ""
            return event
        return None


async def stream(client: httpx.AsyncClient, url: str, body: dict[str, Any],
                 headers: dict[str, str]) -> AsyncIterator[Event]:
    """Whole events as they come."""
    reader = Reader()
    async with client.stream("POST", url, json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if (event := reader.take(line)) is not None:
                yield event
