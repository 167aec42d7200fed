"""A soak: requests for minutes, of every kind and every end; what a process holds must not grow with them.

Memory, open files and threads of router, target and draft are looked at after each part of the requests. A line is laid
through what the later parts say: caches fill in the first ones. Memory swings by itself, so the fewer requests there
are, the more one must leave behind to be seen; what that is, is told. Real processes on timed devices.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from string import ascii_lowercase

import httpx
import psutil
import pytest
from tokenizers import Tokenizer

from bench.fleet import Process, free_port, running, service
from bench.timed import timed_services
from slipstream.models.folder import load_tokenizer, resolve
from slipstream.simulate.timed import STREAMS, SYMBOLS, VOCAB, Timing
from slipstream.wire.client import AsyncClient
from tests.scraped import scraped

TIMING = Timing(step_s=0.001, draft_s=0.0002, seed=3)
AT_ONCE = 8
PARTS, SETTLING = 12, 4  # parts of the requests, and how many of them fill caches
MOST_BYTES = 256  # of memory that a request may leave behind: a leaked request is kilobytes
SWING_BYTES = 16 << 20  # by which a process rises and falls in a soak of any length: allocators return memory in lumps
FIRST = 36  # stream of a timed target: from here on the default tokenizer has whole characters for its tokens
WORDS = 40_000  # that nobody has said before: they fill the tokenizer's memory


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds that nobody else has."""

    kb: float
    files: float
    threads: float

    @staticmethod
    def by(process: Process) -> Held:
        found = psutil.Process(process.pid)
        return Held(found.memory_full_info().uss / 1024, found.num_fds(), found.num_threads())


def slope(values: Sequence[float], requests: Sequence[float]) -> float:
    """By how much each request raises them (least squares)."""
    return statistics.linear_regression(requests, values).slope


@pytest.mark.timeout(0)
async def test_what_is_held_does_not_grow(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    count = request.config.getoption("--requests")

    def told(text: str) -> None:
        with capsys.disabled():
            print(text, end="", file=sys.stderr, flush=True)

    started = time.monotonic()
    held, made = await soaked(count, told)
    an_hour = count * 3600 / (time.monotonic() - started)
    growth = {name: {what: slope([getattr(one, what) for one in seen[SETTLING:]], made[SETTLING:])
                     for what in ("kb", "files", "threads")} for name, seen in held.items()}
    most = max(MOST_BYTES, SWING_BYTES / (made[-1] - made[SETTLING]))
    told(f"\na thousand requests leave behind: {told_of(growth)}; at {an_hour:.0f} requests an hour; "
         f"seen is what each leaves behind from {most:.0f} bytes on\n")
    for name, slopes in growth.items():
        assert 1024 * slopes["kb"] < most, f"{name} keeps {1024 * slopes['kb']:.0f} bytes of each request"
        assert held[name][-1].files <= held[name][SETTLING].files + AT_ONCE, f"{name} keeps files open"
        assert held[name][-1].threads <= held[name][SETTLING].threads + AT_ONCE, f"{name} keeps threads"


def told_of(growth: dict[str, dict[str, float]]) -> str:
    return "; ".join(f"{name} {1000 * s['kb']:.0f} kB, {1000 * s['files']:.1f} files, {1000 * s['threads']:.1f} threads"
                     for name, s in growth.items())


async def soaked(count: int, told: Callable[[str], None]) -> tuple[dict[str, list[Held]], list[float]]:
    """What each process held after each part, and how many requests had been made by then."""
    random = Random(1)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        timed = await stack.enter_async_context(timed_services(TIMING, settings=("log.level=warning",)))
        grpc = free_port()
        router = service("router", "soak-router", folder, (f"router.grpc_listen=127.0.0.1:{grpc}", "log.level=error",
                                                           f"router.targets=['{timed.targets[0].address}']"))
        await stack.enter_async_context(running(router))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{router.address}", timeout=60.0))
        caller = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{grpc}"))
        processes = {"router": router, "target": timed.targets[0], "draft": timed.drafts[0]}
        held: dict[str, list[Held]] = {name: [] for name in processes}
        made, words = list[float](), unheard(random)
        for part in range(1, PARTS + 1):
            turns = iter(range(count // PARTS))
            await asyncio.gather(*(ask_in_turn(turns, http, caller, random, words) for _ in range(AT_ONCE)))
            await asyncio.sleep(1.0)
            made.append(part * (count // PARTS))
            for name, process in processes.items():
                held[name].append(Held.by(process))
            now = ", ".join(f"{name} {seen[-1].kb / 1024:.1f} MB" for name, seen in held.items())
            told(f"\n{made[-1]:.0f} of {count} requests: {now}")
        info = await timed.clients[0].info()
        assert info.sessions_running + info.sessions_waiting == 0, "answers that nobody reads"
        assert await scraped(timed.drafts[0].metrics_port, "sessions_open") == 0, "sessions that nobody closed"
    return held, made


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve("smollm2-135m"))


@cache
def starts() -> tuple[str, ...]:
    """Texts of one token each, of as many streams as have one: an answer is of its prompt's last token's stream."""
    found: dict[int, str] = {}
    for token in range(FIRST * SYMBOLS, STREAMS * SYMBOLS):
        text = tokenizer().decode([token])
        if text.strip() and tokenizer().encode(text, add_special_tokens=False).ids == [token]:
            found.setdefault(token // SYMBOLS, text)
    return tuple(found.values())


def unheard(random: Random) -> list[str]:
    """Words whose tokens a timed target has."""
    made = [f" {''.join(random.choices(ascii_lowercase, k=5))}" for _ in range(WORDS)]
    return [word for word, found in zip(made, tokenizer().encode_batch(made), strict=True) if max(found.ids) < VOCAB]


async def ask_in_turn(turns: Iterator[int], http: httpx.AsyncClient, caller: AsyncClient, random: Random,
                      words: list[str]) -> None:
    """One request after the other: read whole, left in the midst, wrong, or over gRPC."""
    for _ in turns:
        start, kind = random.choice(starts()), random.choice(("whole", "stream", "left", "wrong", "grpc", "chat"))
        said = "".join(random.choices(words, k=30)) + "\n" + start
        body = {"model": "timed", "prompt": said, "max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
        match kind:
            case "whole":
                assert (await http.post("/v1/completions", json=body)).status_code == 200
            case "wrong":
                assert (await http.post("/v1/completions", json={**body, "top_p": -1})).status_code == 400
            case "chat":
                del body["prompt"]
                body["messages"] = [{"role": "user", "content": "hello"}]
                await http.post("/v1/chat/completions", json=body)
            case "grpc":
                async for _ in caller.complete(said, model="timed", max_tokens=20, ignore_eos=True):
                    pass
            case _:
                body |= {"stream": True, "max_tokens": 100}
                async with http.stream("POST", "/v1/completions", json=body) as events:
                    async for _ in events.aiter_lines():
                        if kind == "left":
                            break
