"""What a request costs is bounded before it is paid, and what it costs is paid beside the event loop."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from router_service.dialects.chat import ChatBody, ChatReply
from router_service.dialects.completions import CompletionBody, TextReply
from router_service.dialects.openai import MAX_CONTAINERS, MAX_DEPTH, MESSAGE_CHARS, Job, Options, Plan, parse
from router_service.dialects.tools import ToolUse
from router_service.tenants import Tenant
from router_service.text.deltas import AnswerToken, CollectedAnswer, TextDelta
from router_service.text.files import max_token_chars
from router_service.text.marks import Style
from router_service.text.tokens import (
    ASSISTANT,
    BRIEF_TEXT,
    LARGE_BODY,
    LONG_TEXT,
    MAX_TEXTS,
    Lanes,
    Messages,
    TextCodec,
    Turn,
)
from slipstream.base.errors import CapacityError, InvalidRequest, TooLarge
from slipstream.observe.vitals import LAG_EVERY_S, background_tasks, watch_lag
from slipstream.protocol.chat import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORD_STRINGS,
    MAX_BODY_BYTES,
    MAX_ITEMS,
    MAX_STOPS,
    ChatOptions,
    Message,
    Usage,
)
from slipstream.protocol.requests import MAX_LOGIT_BIASES, Sampling, TokenLogprob
from slipstream.v1 import inference_pb2
from slipstream.wire.inference import decode_chat, decode_complete, encode_chat
from tests.echo import CONTEXT, EchoTarget
from tests.loop import eventually
from tests.routing import CHAT, COMPLETIONS, HELLO, routing
from tests.test_tokens import byte_fallback, byte_level, write_folder

LONG = "a long text, " * (LONG_TEXT // 4)


class WatchedCodec(TextCodec):
    """Remembers which threads it worked in."""

    __slots__ = ("threads",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.threads: list[int] = []

    def encode(self, text: str, room: int | None = None, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.get_ident())
        return super().encode(text, room, add_special_tokens)

    def chat(self, messages: Messages, turn: Turn = ASSISTANT, room: int | None = None) -> list[int]:
        self.threads.append(threading.get_ident())
        return super().chat(messages, turn, room)


async def test_who_is_refused_for_want_of_room_has_not_been_tokenized(tiny_folder: Path) -> None:
    target = EchoTarget()
    async with routing(tiny_folder, target, max_in_flight=1) as r:
        gateway = r.service.gateway
        codec = gateway.codec = WatchedCodec(tiny_folder)
        place = await gateway.admission.enter(Tenant(), 1)
        waiting = [asyncio.create_task(r.post(CHAT, messages=HELLO)),
                   asyncio.create_task(r.post(COMPLETIONS, prompt="x"))]
        await eventually(lambda: gateway.admission.queued == 2)
        for path, asked in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
            assert (await r.post(path, **asked)).status_code == 429
        assert (await r.post(COMPLETIONS, prompt=["x"] * 1025)).json()["error"]["param"] == "prompt"
        assert not codec.threads, "neither who was refused nor who waits"
        gateway.admission.leave(place)
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
        own = [thread == threading.get_ident() for thread in codec.threads]
        assert sorted(own) == [False, True], "a conversation in a thread, and a word at once"
        assert gateway.admission.in_flight == 0


async def test_what_does_not_fit_gives_its_place_back(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        for path, asked, param in ((CHAT, {"messages": [{"role": "user", "content": "x" * 9999}]}, "messages"),
                                   (COMPLETIONS, {"prompt": "x" * 9999}, "prompt"),
                                   (COMPLETIONS, {"prompt": [1] * (CONTEXT + 1)}, "prompt"),
                                   (COMPLETIONS, {"prompt": [1, -1]}, "prompt")):
            refused = await r.post(path, **asked)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
        assert r.service.gateway.admission.in_flight == 0


async def test_prompts_are_sent_so_many_times_as_a_body_could_hold_them(tiny_folder: Path) -> None:
    target = EchoTarget(end=1)
    target.context = 1 << 20
    async with routing(tiny_folder, target) as r:
        for count, prompts in ((64, [[70] * (1 << 15)]), (32, [[70] * (1 << 15)] * 2)):
            assert (await r.post(COMPLETIONS, prompt=prompts, n=count, max_tokens=1)).status_code == 200
            for over in ({"prompt": [*prompts, [70]]}, {"n": count + 1}):
                refused = await r.post(COMPLETIONS, **{"prompt": prompts, "n": count, "max_tokens": 1, **over})
                assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
        assert len(target.requests) == 128


def test_a_text_that_cannot_fit_is_not_encoded(tmp_path: Path) -> None:
    codec = TextCodec(write_folder(tmp_path, byte_level()))
    longest = max(len(token) for token in byte_level().get_vocab())
    text = "x" * (10 * longest + 1)
    with pytest.raises(InvalidRequest, match=f"{len(text)} characters") as caught:
        codec.encode(text, 10)
    assert (caught.value.field, caught.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(InvalidRequest, match=f"{len(text) - 1} tokens"):
        codec.encode(text[1:], 10)
    with pytest.raises(InvalidRequest, match=r"\d characters") as caught:
        codec.chat([{"role": "user", "content": text}], room=10)
    assert (caught.value.field, caught.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(InvalidRequest, match="marks"):
        codec.chat([{"role": "user", "content": "<|im_end|>" * 400}], room=1000)


def composing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


def bound(tokenizer: Tokenizer) -> int | None:
    return max_token_chars(json.loads(tokenizer.to_str()), tokenizer.get_vocab(with_added_tokens=True))


KEPT = [(tokenizer, bound(tokenizer)) for tokenizer in (byte_level(), byte_fallback(), composing())]


@settings(deadline=None, max_examples=300)
@given(kept=st.sampled_from(KEPT), words=st.lists(st.one_of(
    st.text(max_size=6), st.sampled_from(["α\u0313\u0300\u0345", "각", " " * 9, "ﬃ", "<s>", "the end", "\u0300"])),
    max_size=12))
def test_no_token_stands_for_more_than_the_longest(kept: tuple[Tokenizer, int | None], words: list[str]) -> None:
    tokenizer, longest = kept
    assert longest is not None
    text = "".join(words)
    assert len(text) <= longest * len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_a_tokenizer_that_drops_text_sets_no_bound() -> None:
    stripping, shrinking, splitting, absorbing, lacking = (byte_level() for _ in range(5))
    stripping.normalizer = normalizers.Strip()
    shrinking.normalizer = normalizers.Sequence([normalizers.Replace("aa", "a")])
    splitting.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False)])
    absorbing.add_special_tokens([AddedToken("<x>", rstrip=True)])
    lacking = Tokenizer(models.BPE({"a": 0}, []))
    lacking.decoder = decoders.ByteLevel()
    assert [bound(each) for each in (stripping, shrinking, splitting, absorbing, lacking)] == [None] * 5


def test_a_folder_cannot_have_prompts_cut(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    assert len(TextCodec(write_folder(tmp_path, tokenizer)).encode("x" * 5)) == 5


async def test_the_loop_turns_while_a_text_is_encoded(tiny_folder: Path) -> None:
    """However fast the machine is: the longest that the loop stands is compared with the whole encoding. It may stand
    for another reason, but not each time."""
    codec, lanes = TextCodec(tiny_folder), Lanes()
    text = "what the tokenizer reads for a while " * 30_000

    def encode() -> tuple[int, float]:
        begun_s = time.perf_counter()
        return len(codec.encode(text)), time.perf_counter() - begun_s

    async def stands() -> float:
        """The part of the time in which the loop stands at a stretch."""
        turned_s, stood_s = time.perf_counter(), 0.0
        encoding = asyncio.create_task(lanes.run(len(text), encode))
        while not encoding.done():
            await asyncio.sleep(0)
            before_s, turned_s = turned_s, time.perf_counter()
            stood_s = max(stood_s, turned_s - before_s)
        num_tokens, took_s = await encoding
        assert num_tokens > 30_000
        return stood_s / took_s

    parts = [await stands()]
    while parts[-1] > 0.5 and len(parts) < 5:
        parts.append(await stands())
    assert parts[-1] < 0.5, f"it kept the interpreter: {parts}"
    lanes.close()


def test_all_that_a_conversation_says_makes_it_long() -> None:
    def size(*messages: dict[str, Any]) -> int:
        return Plan("chat", "tiny", Options(Sampling()), messages=messages).size

    turn = {"role": "assistant", "content": ""}
    call = {"type": "function", "function": {"name": "f", "arguments": "x" * LONG_TEXT}}
    for more in ({"reasoning_content": LONG}, {"name": LONG}, {"tool_call_id": LONG}, {"tool_calls": [call]}):
        assert size(turn | more) > LONG_TEXT, more.keys()
    assert size(*[turn] * (LONG_TEXT // MESSAGE_CHARS)) > LONG_TEXT, "marks are work, too"
    assert size(turn) < 2 * MESSAGE_CHARS


def test_words_that_are_to_be_spelt_make_a_brief_prompt_long() -> None:
    """128 of them beside a prompt of one character held the event loop for five milliseconds."""
    for words, brief in (((), True), (("bad",) * 4, True), (("x" * MAX_BAD_WORD_CHARS,) * MAX_BAD_WORD_STRINGS, False)):
        asked = Plan("completions", "tiny", Options(Sampling(), bad_words=words), prompts=["x"])
        assert (asked.size <= BRIEF_TEXT) == brief and asked.size <= LONG_TEXT


@pytest.mark.parametrize("use", [None, ToolUse(({"function": {"name": "now"}},), "now", True)])
def test_a_whole_answer_costs_as_much_for_each_of_its_deltas(use: ToolUse | None) -> None:
    """Of 128 thousand the last was joined to a megabyte, as each before it, for seconds."""
    class Counted(str):
        """Knows to how much it is appended."""

        seen = 0

        def __radd__(self, other: str) -> Counted:
            Counted.seen += len(other)
            return Counted(str(other) + str(self))

        def __add__(self, other: str) -> Counted:
            Counted.seen += len(self)
            return Counted(str(self) + str(other))

    codec: Any = SimpleNamespace(style=Style(), token_text=str)
    options = Options(Sampling(), parse_markup=True, tool_use=use)
    reply = ChatReply("a", 0, Job("chat", "tiny", ((1,),), (1000,), options, 260), codec, "")
    deltas = [TextDelta(Counted("word ")) for _ in range(1000)]
    message = reply.body([deltas], Usage(1, 1000))["choices"][0]["message"]
    told = message["tool_calls"][0]["function"]["arguments"] if use else message["content"]
    assert told == "word " * 1000 and Counted.seen <= len(told)


async def test_between_large_bodies_the_loop_is_others() -> None:
    lanes, seen = Lanes(), list[str]()

    async def others() -> None:
        while True:
            seen.append("other")
            await asyncio.sleep(0)

    async def body(size: int) -> None:
        await lanes.wait_to_parse(size)
        seen.append("body")

    async with background_tasks(others()):
        await asyncio.gather(*(body(LARGE_BODY + 1) for _ in range(4)))
    lanes.close()
    apart = "".join(word[0] for word in seen).split("b")[:4]
    assert min(map(len, apart)) > 3, "each is several turns of the loop behind the one before it"
    seen.clear()
    await asyncio.gather(*(body(LARGE_BODY) for _ in range(4)))
    assert seen == ["body"] * 4, "small ones wait for nobody"


async def test_lanes_hold_one_text_each_whatever_clients_do() -> None:
    lanes, begun, held = Lanes(), list[str](), threading.Event()

    def work(name: str) -> str:
        begun.append(name)
        if name != "short":
            assert held.wait(60)
        return name

    first = asyncio.create_task(lanes.run(LONG_TEXT + 1, lambda: work("first")))
    await eventually(lambda: begun == ["first"])
    first.cancel()  # its client goes away: the thread works on
    most = 8  # of such texts
    large = MAX_TEXTS // most
    waiting = [asyncio.create_task(lanes.run(large, lambda: work("later"))) for _ in range(most - 1)]
    await asyncio.sleep(0)
    assert await lanes.run(LONG_TEXT, lambda: work("short")) == "short", "it does not wait for long ones"
    with pytest.raises(CapacityError, match="long prompts") as caught:
        await lanes.run(large + 1, lambda: work("too many"))
    assert caught.value.retry_after_s >= most
    smaller = [asyncio.create_task(lanes.run(LONG_TEXT + 1, lambda: work("smaller"))) for _ in range(30)]
    written = asyncio.create_task(lanes.run(LONG_TEXT + 1, lambda: work("an answer"), never_refuse=True))
    waiting.pop().cancel()  # one that waits goes: there is room for another
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(lanes.run(large, lambda: work("last"))))
    held.set()
    assert await written == "an answer", "who is done is not refused"
    assert await asyncio.gather(*smaller) == ["smaller"] * 30, "there was room for what costs little"
    assert await asyncio.gather(*waiting) == ["later"] * (most - 2) + ["last"]
    assert begun.count("later") == most - 2, "who went away was left out"
    with pytest.raises(ZeroDivisionError):
        await lanes.run(1, lambda: 1 // 0)
    lanes.close()


async def test_tenants_take_turns_with_long_texts() -> None:
    """Eight bodies of one kept another's long prompt waiting for fifteen seconds; a large one was refused."""
    lanes, begun, held = Lanes(), list[str](), threading.Event()

    def work(name: str) -> None:
        begun.append(name)
        assert held.wait(60)

    def reads(tenant: str, size: int) -> asyncio.Task[None]:
        return asyncio.create_task(lanes.run(size, partial(work, tenant), tenant))

    own = [reads("a", MAX_TEXTS // 8) for _ in range(9)]
    await eventually(lambda: len(begun) == 1)
    for size in (LONG_TEXT + 1, MAX_TEXTS):
        with pytest.raises(CapacityError, match="long prompts"):
            await reads("a", size)
        own.append(reads(f"b{size}", size))
    await asyncio.sleep(0)  # they wait
    held.set()
    await asyncio.gather(*own)
    assert begun == ["a", "a", f"b{LONG_TEXT + 1}", f"b{MAX_TEXTS}", *["a"] * 7]
    lanes.close()


async def test_nothing_is_kept_of_who_went_away_before_his_turn() -> None:
    class Text(str):
        """May be watched."""

    lanes, held, texts = Lanes(), threading.Event(), list[weakref.ref[Text]]()

    async def goes() -> None:
        text = Text("long")
        texts.append(weakref.ref(text))
        reading = asyncio.create_task(lanes.run(MAX_TEXTS, partial(len, text)))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    first = asyncio.create_task(lanes.run(MAX_TEXTS, partial(held.wait, 60)))
    await asyncio.sleep(0)
    for _ in range(9):
        await goes()
    await asyncio.sleep(0)
    gc.collect()
    assert [text() for text in texts] == [None] * 9, "while the first is read"
    held.set()
    assert await first
    lanes.close()


def test_a_text_may_outlive_its_event_loop(caplog: pytest.LogCaptureFixture) -> None:
    """A router is stopped while it reads one."""
    lanes, begun, held = Lanes(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert held.wait(60)

    async def stopped() -> None:
        reading = asyncio.create_task(lanes.run(LONG_TEXT + 1, work))
        await eventually(begun.is_set)
        reading.cancel()
        lanes.close()

    asyncio.run(stopped())
    held.set()
    for thread in threading.enumerate():
        if thread.name.startswith("long-texts"):
            thread.join(60)
    assert not caplog.records


PART = {"type": "text", "text": ""}
TOO_MUCH: list[tuple[Any, dict[str, Any], str]] = [
    (CompletionBody, {"prompt": [""] * (MAX_ITEMS + 1)}, "prompt"),
    (CompletionBody, {"prompt": [[1]] * (MAX_ITEMS + 1)}, "prompt"),
    (CompletionBody, {"prompt": [None] * (MAX_ITEMS + 1)}, "prompt"),
    (ChatBody, {"messages": [None] * (MAX_ITEMS + 1)}, "messages"),
    (ChatBody, {"messages": [{"role": "user", "content": [PART] * (MAX_ITEMS + 1)}]}, "messages"),
    (ChatBody, {"messages": [{"role": "user", "content": [PART] * (MAX_ITEMS // 2 + 1)}] * 2}, "messages"),
    (ChatBody, {"messages": [{"rôle": "user"}] * MAX_ITEMS}, "messages[0].rôle"),
    (ChatBody, {"messages": HELLO, "stream_options": {"a": 1, "b": 2}}, "stream_options.a"),
    (ChatBody, {"messages": HELLO, "stop": [1] * 100}, "stop"),
    (ChatBody, {"messages": HELLO, "logit_bias": {str(i): 1 for i in range(MAX_LOGIT_BIASES + 1)}}, "logit_bias"),
]


@pytest.mark.parametrize(("kind", "extra", "field"), TOO_MUCH)
def test_amounts_are_refused_by_name(kind: Any, extra: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(kind, {"model": "m", **extra})
    assert caught.value.field == field


def test_ids_that_wait_take_no_more_than_they_came_in() -> None:
    """As objects those of fifty bodies took a gigabyte, which is all that a router has."""
    ids = [300 + i % 600 for i in range(100_000)]
    over_http = json.dumps({"prompt": [ids[:50_000], ids[50_000:]]}).replace(" ", "")
    over_grpc = inference_pb2.CompleteRequest(prompt_tokens=ids).SerializeToString()
    readers: tuple[Callable[[], Any], ...] = (lambda: parse(CompletionBody, json.loads(over_http)),
                                              lambda: decode_complete(over_grpc))
    for reader in readers:
        reader()
        tracemalloc.start()
        kept = reader()
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept and taken < 1.2 * 4 * len(ids), taken


LONG = "a" * 300_000
CALLED = {"role": "assistant", "tool_calls": [{"type": "function", "function": {
    "name": "f", "arguments": json.dumps({f"{i:06d}": i for i in range(18_000)})}}]}


@pytest.mark.parametrize(("path", "body"), [
    (CHAT, {"messages": [{"role": "user", "content": f"{LONG}\U0001f600"}]}),
    (CHAT, {"messages": [*HELLO, CALLED]}),
    (CHAT, {"messages": HELLO, "response_format": {"type": "text", "of no use": list(range(300, 60_000))}}),
    (COMPLETIONS, {"prompt": f"{LONG}\U0001f600"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": f"{LONG}\U0001f600"}], "max_tokens": 9}),
])
async def test_what_waits_takes_no_more_than_it_came_in(path: str, body: dict[str, Any], tiny_folder: Path) -> None:
    """A character beyond 16 bits makes four bytes of each other of a text, and names and numbers fifty."""
    sent, echo = json.dumps(body, ensure_ascii=False).encode(), EchoTarget(stall_after=0)
    async with routing(tiny_folder, echo, max_in_flight=1) as r:
        asked = [asyncio.ensure_future(r.post(CHAT, messages=HELLO))]
        await eventually(lambda: echo.stalled == 1)
        tracemalloc.start()
        asked += [asyncio.ensure_future(r.http.post(path, content=sent)) for _ in range(2)]
        await eventually(lambda: r.service.gateway.admission.queued == 2)
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for one in asked:
            one.cancel()
    assert taken < 2 * 1.3 * len(sent) + 500_000, (taken, len(sent))


async def test_tokens_of_a_prompt_take_four_bytes_each_while_it_is_answered(tiny_folder: Path) -> None:
    echo = EchoTarget()
    echo.context = 10_000
    async with routing(tiny_folder, echo) as r:
        assert (await r.post(COMPLETIONS, prompt="a" * 5000, max_tokens=1)).status_code == 200
    assert sys.getsizeof(echo.requests[0].tokens) < 4.1 * 5000


async def test_of_a_response_s_body_only_what_counts_is_kept_while_it_is_answered(tiny_folder: Path) -> None:
    echo = EchoTarget(stall_after=1)
    body = (b'{"model":"tiny","input":"x","user":[["of no", "use"]],"tools":[{"type":"function","name":"f",'
            b'"parameters":{},"other":[["of no", "use"]]}]}')
    async with routing(tiny_folder, echo) as r:
        asked = asyncio.ensure_future(r.http.post("/v1/responses", content=body))
        await eventually(lambda: len(echo.running) == 1)
        assert not [one for one in gc.get_objects() if type(one) is list and one == ["of no", "use"]]
        asked.cancel()


@pytest.mark.parametrize("kind", [ChatReply, TextReply])
def test_scores_of_a_long_answer_are_written_in_parts(kind: type[ChatReply | TextReply]) -> None:
    """A million of them as objects took half a gigabyte, and everybody else waited while those were written."""
    codec: Any = SimpleNamespace(style=Style(), token_text=str, token_bytes=lambda token: str(token).encode())
    job = Job("chat", "tiny", ((1,),), (4000,), Options(Sampling(), top_logprobs=20), 1000)
    tokens = [AnswerToken(i % 1000, "x", False, TokenLogprob(-1.5, tuple((k, -k / 7) for k in range(300, 320))))
              for i in range(4000)]
    answers = [[TextDelta("x", (token,), "length" if i == 3999 else "") for i, token in enumerate(tokens)]]
    tracemalloc.start()
    told = orjson.dumps(kind("a", 0, job, codec, "").body(answers, Usage(1, 4000)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * len(told), (most, len(told))
    scored = json.loads(told)["choices"][0]["logprobs"]
    assert len(scored["content"] if kind is ChatReply else scored["top_logprobs"]) == 4000


@pytest.mark.parametrize(("detailed", "count", "most"), [(True, 2000, 700), (False, 20_000, 20)])
def test_a_whole_answer_takes_little_until_it_is_told(detailed: bool, count: int, most: int) -> None:
    """As objects a million scores, or tokens, took 140 MB and more, and several requests may have as many."""
    gc.collect()
    tracemalloc.start()
    kept = CollectedAnswer(detailed)
    for i in range(count):
        scored = TokenLogprob(-i / 7, tuple((300 + k, -k / 7) for k in range(20))) if detailed else None
        last = i == count - 1
        kept.add(TextDelta(str(i % 10), (AnswerToken(300 + i, "x", False, scored),), "length" if last else "", 1))
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < most * count + 200_000, taken / count
    assert "".join(delta.text for delta in kept.deltas) == "0123456789" * (count // 10)
    assert kept.deltas[-1].finish == "length" and sum(delta.num_tokens for delta in kept.deltas) == count
    if detailed:
        found = kept.deltas[70].tokens[0].logprob
        assert found and (found.logprob, found.top) == (-10.0, tuple((300 + k, -k / 7) for k in range(20)))


async def test_lists_and_objects_of_a_body_are_counted_before_it_is_read(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        for kind in ("[],", "{},", "[[[[]]]],", '["\\\\",["\\"",[],[]]],'):
            lists = kind * (MAX_CONTAINERS // (kind.count("[") + kind.count("{")))
            refused = await r.http.post(COMPLETIONS, content='{"model":"tiny","prompt":"x","user":[' + lists + "[]]}")
            assert refused.json()["error"]["message"].startswith(f"body: holds more than {MAX_CONTAINERS} "), kind
        told = (await r.post(COMPLETIONS, prompt='\\"[{' * MAX_CONTAINERS, user=[{}] * 9)).json()["error"]
        assert told["param"] == "prompt", "those of a text are text"
        assert (await r.post(COMPLETIONS, prompt="x", user=[[]] * (MAX_CONTAINERS - 2))).status_code == 200


async def test_a_body_is_refused_that_is_too_deep_to_be_written_again(tiny_folder: Path) -> None:
    def deep(levels: int) -> dict[str, Any]:
        return {"a": deep(levels - 1)} if levels else {}

    tool = {"type": "function", "function": {"name": "f", "parameters": deep(300)}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": HELLO, "chat_template_kwargs": deep(300)}), (CHAT, {"messages": HELLO, "tools": [tool]}),
        (CHAT, {"messages": HELLO, "guided_json": deep(300)}), ("/v1/responses", {"input": "x", "text": deep(900)}),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "name": "f", "input": deep(300)}]}]})]
    async with routing(tiny_folder, EchoTarget()) as r:
        for path, body in bodies:
            refused = await r.post(path, **body)
            assert refused.status_code == 400 and "deep" in refused.json()["error"]["message"], path
        turns = '{"anyOf":[' * 127 + "{}" + "]}" * 127  # lists in objects in lists: read by itself, where it is a text
        flat, call = ({"type": "function", "function": {"name": "f", **given}} for given in ({}, {"arguments": turns}))
        for field, body in (("guided_json", {"messages": HELLO, "guided_json": turns, "tools": [flat]}),
                            ("messages", {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]})):
            refused = await r.post(CHAT, **body)
            assert refused.status_code == 400 and refused.json()["error"]["param"].startswith(field)
            assert "128 deep" in refused.json()["error"]["message"]
        text = '\\"[{' * 200
        assert (await r.post(CHAT, messages=[{"role": "user", "content": text}])).status_code == 400, "a long text"
        assert (await r.post(COMPLETIONS, prompt="x", user=[[]] * 1000)).status_code == 200, "many, but flat"
        assert (await r.post(CHAT, messages=HELLO, chat_template_kwargs=deep(MAX_DEPTH - 2))).status_code == 200


def test_the_first_unknown_key_ends_the_check() -> None:
    class Keys(dict[str, Any]):
        seen = 0

        def items(self) -> Any:
            for item in super().items():
                Keys.seen += 1
                yield item

    with pytest.raises(InvalidRequest, match="did you mean 'temperature'") as caught:
        parse(ChatBody, Keys({"model": "m", "temperatur": 1, **{f"k{i}": 1 for i in range(1000)}}))
    assert caught.value.field == "temperatur" and Keys.seen == 2
    long = "k" * 100_000
    with pytest.raises(InvalidRequest) as caught:
        parse(ChatBody, {long: 1})
    assert caught.value.field == "k" * 200


def test_grpc_has_the_same_bounds() -> None:
    many = encode_chat("m", (Message("", ""),) * (MAX_ITEMS + 1), ChatOptions())
    with pytest.raises(InvalidRequest, match="at most") as caught:
        decode_chat(many)
    assert caught.value.field == "messages"
    for field, options in (("stop", ChatOptions(stop=("",) * (MAX_STOPS + 1))),
                           ("logit_bias", ChatOptions(
                               logit_bias=tuple((i, 1.0) for i in range(MAX_LOGIT_BIASES + 1))))):
        with pytest.raises(InvalidRequest, match="at most") as caught:
            decode_chat(encode_chat("m", (), options))
        assert caught.value.field == field
    large = inference_pb2.CompleteRequest(prompt="x" * MAX_BODY_BYTES).SerializeToString()
    for decode in (decode_chat, decode_complete):
        with pytest.raises(TooLarge):
            decode(large)


async def test_the_lag_of_the_loop_is_what_a_task_is_woken_late() -> None:
    now_s, told, late = 0.0, list[float](), iter([0.0, 2.5, 0.0])

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds + next(late)

    with pytest.raises(RuntimeError):  # the fourth sleep of three
        await watch_lag(told.append, lambda: now_s, sleep)
    assert told == pytest.approx([0.0, 2.5, 0.0])


async def test_a_router_tells_its_lag(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        while not re.search(r"^slipstream_event_loop_lag_seconds_count{.*} [1-9]", await r.metrics(), re.MULTILINE):
            await asyncio.sleep(LAG_EVERY_S)
