"""``python -m bench.traffic.worst``: what the worst legal requests to a router cost everybody else.

Behind the router is a target that computes nothing. A stream runs and ``/live`` is asked without end, while a body of
2 MiB or with a hostile grammar comes over HTTP or gRPC, or ``--together`` of them, one kind after the other. Told for
each kind: how long the stream waited for a token beyond its step, and ``/live`` for its answer, at worst; the answer to
the body, and when all of them had theirs; and, of a further time, what the router's memory grew by meanwhile.
The first row has a short body: it is what this machine does to them. Client and services share the cores, and others
may add to it but never take away: the best of ``--times`` counts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from contextlib import suppress
from typing import Any

import psutil

from bench.completions import MAX_LINE, Connection, chunks
from bench.report import Row, finished, number, write
from bench.traffic.grammars import asked
from bench.traffic.routing import LONG, Rig, routed
from slipstream.base.errors import SlipstreamError
from slipstream.cli.process import kept_up
from slipstream.protocol.chat import (
    MAX_BEGUN,
    MAX_BODY_BYTES,
    MAX_ITEMS,
    MAX_STOPS,
    MAX_TOOLS,
    Begun,
    ChatOptions,
    Message,
)
from slipstream.protocol.requests import MAX_SCORES, MAX_TOP_LOGPROBS
from slipstream.wire.channel import INFERENCE_SERVICE, open_channel
from slipstream.wire.inference import encode_chat, encode_complete
from slipstream.wire.status import translated

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GRPC_CHAT, GRPC_COMPLETE = f"/{INFERENCE_SERVICE}/Chat", f"/{INFERENCE_SERVICE}/Complete"
MESSAGES, OPTIONS, BIASES, STOPS = 2, 3, 9, 11  # numbers of fields in inference.proto
MARK = "<|im_end|>"
HELLO = '"messages":[{"role":"user","content":"a"}],'
GOAL_MS, GRAMMAR_MS = 250, 100
STEP_MS = 10.0  # of the target
TIMES = ("stream_ms", "live_ms", "answered_ms")
SETTLE_S = 0.3


def bodies() -> dict[str, tuple[str, bytes]]:
    """Each kind: where it is sent, and what."""
    part = '{"type":"text","text":"a"}'
    whole = (MAX_BODY_BYTES - 60 * MAX_ITEMS) // MAX_ITEMS  # characters of one message of so many
    return {
        "a prompt of words": (COMPLETIONS, _filled('"prompt":"', "what a reader reads for a while ", '"')),
        "a prompt of digits": (COMPLETIONS, _filled('"prompt":"', "7", '"')),
        "a prompt of marks": (COMPLETIONS, _filled('"prompt":"', MARK, '"')),
        "a prompt of token ids": (COMPLETIONS, _filled('"prompt":[', "7,", "7]")),
        "100 prompts": (COMPLETIONS, _body({"prompt": ["7" * ((MAX_BODY_BYTES - 1000) // 100)] * 100})),
        "as many prompts as fit": (COMPLETIONS, _filled('"prompt":[', '"a",', '"a"]')),
        "as many lists as fit": (COMPLETIONS, _filled('"prompt":[', "[7],", "[7]]")),
        "a message of words": (CHAT, _filled('"messages":[{"role":"user","content":"', "what a reader reads ", '"}]')),
        "a message of digits": (CHAT, _filled('"messages":[{"role":"user","content":"', "7", '"}]')),
        "a message of marks": (CHAT, _filled('"messages":[{"role":"user","content":"', MARK, '"}]')),
        f"{MAX_ITEMS} messages": (CHAT, _body({"messages": [{"role": "user", "content": "7" * whole}] * MAX_ITEMS})),
        f"{MAX_ITEMS} messages of marks": (CHAT, _body({"messages": [
            {"role": "user", "content": MARK * (whole // len(MARK))}] * MAX_ITEMS})),
        f"{MAX_ITEMS} parts": (CHAT, _body({"messages": [{"role": "user", "content": [
            {"type": "text", "text": "7" * whole}] * MAX_ITEMS}]})),
        "as many messages as fit": (CHAT, _filled('"messages":[', '{"role":"user","content":""},', "{}]")),
        "as many parts as fit": (CHAT, _filled('"messages":[{"role":"user","content":[', part + ",", part + "]}]")),
        "as many keys as fit": (CHAT, _keys("")),
        "as many keys of a message as fit": (CHAT, _keys('"messages":[{', "}]")),
        "as many biases as fit": (CHAT, _keys('"logit_bias":{', "}")),
        "empty lists that nobody reads": (CHAT, _filled('"metadata":[', "[],", "[]]")),
        "nested lists that nobody reads": (CHAT, _filled('"metadata":[', "[[[[[[]]]]]],", "[]]")),
    }


def others() -> dict[str, tuple[str, bytes]]:
    """Tools, what a template is given, and other dialects."""
    part = '{"type":"text","text":"a"}'
    return {
        "as many keys as fit for a template": (CHAT, _keys('"messages":[{"role":"user","content":"a"}],'
                                                           '"chat_template_kwargs":{"x":{', "}}")),
        "as many tools as fit": (CHAT, _filled(HELLO + '"tools":[', '{"type":"function","function":{"name":"a"}},',
                                               "{}]")),
        "tools of long words": (CHAT, _body({"messages": [{"role": "user", "content": "a"}], "tools": [
            {"type": "function", "function": {"name": f"f{i}", "description": "what a reader reads " * 700}}
            for i in range(MAX_TOOLS)]})),
        "a past of calls": (CHAT, _filled('"messages":[{"role":"assistant","tool_calls":[', '{"function":{"name":"a",'
                                          '"arguments":"{}"}},', "{}]}]")),
        "arguments of lists": (CHAT, _filled('"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"a",'
                                             '"arguments":"[', "[],", '[]]"}}]}]')),
        "stop strings of one letter": (COMPLETIONS, _body({"prompt": "a", "stop": [
            "a" * 1000 + f"{i:02}" for i in range(MAX_STOPS)], "max_tokens": 400})),
        "as many messages of Anthropic's as fit": ("/v1/messages", _filled(
            '"messages":[', '{"role":"user","content":""},', "{}]")),
        "as many blocks of Anthropic's as fit": ("/v1/messages", _filled(
            '"messages":[{"role":"user","content":[', part + ",", part + "]}]")),
        "as many items of a response as fit": ("/v1/responses", _filled('"input":[', '{"role":"user","content":""},',
                                                                        "{}]")),
        "token ids to spell": ("/detokenize", _filled('"tokens":[', "7,", "7]")),
        "words to count": ("/tokenize", _filled('"prompt":"', "what a reader reads for a while ", '"')),
    }


def scored() -> dict[str, tuple[str, bytes]]:
    """Prompts of which as much is told as may be."""
    def ids(entries: int, answers: int = 1) -> list[int]:
        return [7] * min(MAX_SCORES // (entries * answers), 65_000)  # the context holds a few more

    echoed = {"max_tokens": 1, "echo": True}
    return {
        "scores: an echo": (COMPLETIONS, _body({"prompt": ids(1 + 3), "logprobs": 3, **echoed})),
        "scores: an echo with many alternatives": (COMPLETIONS, _body({
            "prompt": ids(1 + MAX_TOP_LOGPROBS), "logprobs": MAX_TOP_LOGPROBS, **echoed})),
        "scores: an echo in a stream": (COMPLETIONS, _body({
            "prompt": ids(1 + 3), "logprobs": 3, "stream": True, **echoed})),
        "scores: echoes of 4 answers": (COMPLETIONS, _body({"prompt": ids(1, 4), "logprobs": 0, "n": 4, **echoed})),
        "scores: 64 echoes": (COMPLETIONS, _body({"prompt": [ids(1, 64)] * 64, "logprobs": 0, **echoed})),
        "scores: a prompt": (COMPLETIONS, _body({"prompt": ids(1 + 3), "prompt_logprobs": 3})),
        "scores: an echo and a prompt": (COMPLETIONS, _body({
            "prompt": ids(1 + 3), "logprobs": 3, "prompt_logprobs": 3, **echoed})),
        "gRPC: scores of an echo": (GRPC_COMPLETE, encode_complete(
            "timed", "7" * len(ids(1 + 3)), ChatOptions(max_tokens=1, echo=True, top_logprobs=3))),
    }


def calls() -> dict[str, tuple[str, bytes]]:
    """The same over gRPC, and what only protobuf can say: any number of fields of a few bytes."""
    room, few = MAX_BODY_BYTES - 100, ChatOptions(max_tokens=1)
    words = "what a reader reads for a while " * (room // 32)
    turns = (Message("user", "7" * (room // MAX_ITEMS - 20)),) * MAX_ITEMS
    begun = ChatOptions(max_tokens=1 << 30, begun=Begun("0" * 32, (7,) * MAX_BEGUN))
    return {
        "gRPC: a prompt of words": (GRPC_COMPLETE, encode_complete("timed", words, few)),
        "gRPC: a prompt of digits": (GRPC_COMPLETE, encode_complete("timed", "7" * room, few)),
        "gRPC: a prompt of marks": (GRPC_COMPLETE, encode_complete("timed", MARK * (room // len(MARK)), few)),
        "gRPC: a message of words": (GRPC_CHAT, encode_chat("timed", (Message("user", words),), few)),
        f"gRPC: {MAX_ITEMS} messages": (GRPC_CHAT, encode_chat("timed", turns, few)),
        "gRPC: as many messages as fit": (GRPC_CHAT, _fields(MESSAGES)),
        "gRPC: options again and again": (GRPC_CHAT, _fields(OPTIONS)),
        "gRPC: as many stop strings as fit": (GRPC_COMPLETE, _field(OPTIONS, _fields(STOPS))),
        "gRPC: as many biases as fit": (GRPC_COMPLETE, _field(OPTIONS, _fields(BIASES))),
        "gRPC: as many begun tokens as may be": (GRPC_COMPLETE, encode_complete("timed", "a", begun)),
        "gRPC: as many unknown fields as fit": (GRPC_COMPLETE, _fields(1000)),
    }


def _fields(number: int) -> bytes:
    """An empty field of that number, as often as fits."""
    field = _field(number, b"")
    return field * ((MAX_BODY_BYTES - 100) // len(field))


def _field(number: int, content: bytes) -> bytes:
    """As protobuf writes it: number and kind, length, content."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    return (bytes([value & 127 | 128]) + _varint(value >> 7)) if value > 127 else bytes([value])


def _body(fields: dict[str, object]) -> bytes:
    return json.dumps({"model": "timed", "max_tokens": 1, **fields}, separators=(",", ":")).encode()


def _filled(begin: str, unit: str, end: str) -> bytes:
    """A body in which ``unit`` comes as often as fits."""
    head, tail = '{"model":"timed","max_tokens":1,' + begin, end + "}"
    return (head + unit * ((MAX_BODY_BYTES - len(head) - len(tail)) // len(unit)) + tail).encode()


def _keys(begin: str, end: str = "") -> bytes:
    names = ",".join(f'"{i:06}":1' for i in range((MAX_BODY_BYTES - 200) // 11))
    return ('{"model":"timed",' + begin + names + end + "}").encode()


async def exchange(connection: Connection, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """(status, body) of an answer; in its chunks where it does not tell its length."""
    reader, writer = connection
    writer.write(f"{head} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode())
    writer.write(body)
    told = (await reader.readuntil(b"\r\n\r\n")).lower()
    status, length = int(told.split(b" ", 2)[1]), told.partition(b"content-length:")[2].split(b"\r\n", 1)[0]
    if length:
        return status, await reader.readexactly(int(length))
    return status, b"".join([chunk async for chunk in chunks(reader)])


async def probe(port: int, waits_s: list[float]) -> None:
    """Ask ``/live`` until cancelled; how long each answer took."""
    connection = await asyncio.open_connection("127.0.0.1", port)
    while True:
        began_s = time.perf_counter()
        await exchange(connection, "GET /live")
        waits_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(0.005)


async def send(port: int, path: str, body: bytes) -> str:
    """The answer in a few words."""
    connection = await asyncio.open_connection("127.0.0.1", port, limit=MAX_LINE)
    status, answer = await exchange(connection, f"POST {path}", body)
    connection[1].close()
    return str(status) if status == 200 else f"{status} {json.loads(answer)['error']['message'][:90]}"


async def call(address: str, method: str, body: bytes) -> str:
    """The answer in a few words."""
    channel = open_channel(address, None)
    try:
        with translated("the router"):
            ask: Any = channel.unary_stream(method)
            async for _ in ask(body):
                pass
    except SlipstreamError as error:
        return f"{type(error).__name__} {str(error)[:90]}"
    finally:
        await channel.close()
    return "whole"


async def one(rig: Rig, name: str, path: str, body: bytes, at_once: int) -> Row:
    port, came, waits_s = int(rig.router.address.rpartition(":")[2]), list[float](), list[float]()
    async with kept_up(rig.ways["router, HTTP"](0, LONG, came), probe(port, waits_s)):
        await asyncio.sleep(SETTLE_S)
        probed, began_s = len(waits_s), time.perf_counter()
        answers = await asyncio.gather(*(call(rig.grpc, path, body) if INFERENCE_SERVICE in path else
                                         send(port, path, body) for _ in range(at_once)))
        took_s = time.perf_counter() - began_s
        await asyncio.sleep(2 * SETTLE_S)
    gaps_s = [after - before for before, after in itertools.pairwise([*came, time.perf_counter()]) if after > began_s]
    return {"body": name, "stream_ms": 1e3 * max(gaps_s) - STEP_MS, "live_ms": 1e3 * max(waits_s[probed:]),
            "answered_ms": 1e3 * took_s, "answers": "; ".join(sorted(set(answers)))}


async def grown(rig: Rig, name: str, path: str, body: bytes, at_once: int) -> float:
    """MiB that the router and its processes take meanwhile, at most. To look at them takes time."""
    sizes = [memory(rig.router.pid)]

    async def weigh() -> None:
        while True:
            sizes.append(await asyncio.to_thread(memory, rig.router.pid))
            await asyncio.sleep(0.005)

    async with kept_up(weigh()):
        await one(rig, name, path, body, at_once)
    return max(sizes) - sizes[0]


def memory(pid: int) -> float:
    """MiB of a process and of those that it started; what they share counts once."""
    total = 0.0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                total += one.memory_full_info().pss / 2**20
    return total


async def measure(only: str, together: int, times: int) -> list[Row]:
    rows: list[Row] = []
    *turns, last = [kinds(only, turn) for turn in range(times + 1)]
    async with routed(STEP_MS, bound=True) as rig:
        for name in turns[0]:
            tried = [await one(rig, name, *turn[name], together) for turn in turns]
            rows.append({**tried[0], **{column: min(number(row, column) for row in tried) for column in TIMES},
                         "grown_mib": await grown(rig, name, *last[name], together)})
            print(f"{name}: {waited_ms(rows[-1]):.0f} ms", flush=True)
    return rows


def kinds(only: str, turn: int) -> dict[str, tuple[str, bytes]]:
    """A short body, and all with ``only`` in their names: where each is sent, and what."""
    bound = {f"grammar: {name}": (CHAT if "messages" in fields else COMPLETIONS, _body(fields))
             for name, fields in asked(turn).items()}
    hostile = {**bodies(), **others(), **calls(), **scored(), **bound}
    return {"a short one": (COMPLETIONS, _body({"prompt": "a"})),
            **{name: kind for name, kind in hostile.items() if only in name}}


def waited_ms(row: Row) -> float:
    return max(number(row, "stream_ms"), number(row, "live_ms"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kinds with this in their names, as gRPC")
    parser.add_argument("--together", type=int, default=1, help="bodies of a kind at once")
    parser.add_argument("--times", type=int, default=3)
    arguments = parser.parse_args()
    rows = finished(measure(arguments.only, arguments.together, arguments.times))
    write("worst", rows, f"bench.traffic.worst: bodies of one kind, {arguments.together} at once")
    print(f"at worst a stream or /live waited {max(map(waited_ms, rows[1:])):.0f} ms (goal {GOAL_MS})")
    refused = [row for row in rows if str(row["body"]).startswith("grammar") and str(row["answers"]).startswith("400")]
    if refused:
        took_ms, name = max((number(row, "answered_ms"), row["body"]) for row in refused)
        print(f"{len(refused)} grammars were refused, within {took_ms:.0f} ms (goal {GRAMMAR_MS}; {name}); the router "
              f"grew by {max(number(row, 'grown_mib') for row in refused):.0f} MiB at most meanwhile")


if __name__ == "__main__":
    main()
