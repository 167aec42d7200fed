"""``make bench``: what is asked, in which order, what the rows say, and what the goals make of them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import exact
from bench.asking import TimedAnswer, read_questions
from bench.completions import Server, TimedCompletion
from bench.fleet import Process, cpu_s, resident_mib
from bench.peers.__main__ import (
    GOALS,
    LONG,
    NAMES,
    SAMPLED,
    WITH_SCHEMA,
    Results,
    Turn,
    ask_in_turn,
    in_batches,
    one_by_one,
    questions_of,
    ratio,
    row_of,
    verdicts,
)
from bench.peers.generating import TimingStreamer
from bench.peers.systems import System, Transformers, in_bfloat16, llama_server, llamacpp, peer, slipstream, vllm
from slipstream.base.errors import ConfigError, Unavailable
from slipstream.protocol.requests import Backend, Sampling


@dataclass(slots=True)
class FakeSystem:
    """A system that answers at a set speed and notes what it was asked."""

    name: str
    per_s: float
    asked: list[tuple[int, ...]] = field(default_factory=list)
    extras: list[Mapping[str, Any]] = field(default_factory=list)
    now: int = 0
    most: int = 0  # at once

    async def start(self) -> None:
        """Nothing to start."""

    async def ask(self, prompt: Sequence[int], max_tokens: int, extra: Mapping[str, Any]) -> TimedCompletion:
        self.asked.append(tuple(prompt))
        self.extras.append(extra)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return TimedCompletion(max_tokens, 0.1, 0.1 + (max_tokens - 1) / self.per_s)

    def memory(self) -> dict[str, float]:
        return {"all": 1.0}

    async def stop(self) -> None:
        """Nothing to stop."""


def answered(default: float = 2.0, llama: float = 1.0) -> Results:
    """Plain at 10 tokens a second, the others by their factor, two questions of each set."""
    results: Results = defaultdict(list)
    for name, factor in (("slipstream-plain", 1.0), ("slipstream-default", default), ("llamacpp-plain", llama)):
        for batch in (1, 16):
            for set_ in ("mt_bench", "copy"):
                for length in (11, 21):
                    took_s = (length - 1) / (10 * factor)
                    results[name, batch, set_].append(TimedCompletion(length, 0.0, took_s, rounds=length // 2))
    return results


async def ask_all(turns: Iterable[Turn], systems: Sequence[System], max_tokens: int) -> Results:
    results: Results = defaultdict(list)
    for number, turn in enumerate(turns):
        await ask_in_turn(number, turn, systems, max_tokens, results)
    return results


async def test_every_system_gets_every_question_and_none_is_always_first() -> None:
    first, second = FakeSystem("slipstream-plain", 10), FakeSystem("slipstream-default", 20)
    results = await ask_all(one_by_one({"copy": [[1], [2], [3], [4]]}), [first, second], 11)
    assert first.asked == second.asked == [(1,), (2,), (3,), (4,)]
    assert ratio(results, "slipstream-default", "slipstream-plain", 1, "copy") == pytest.approx(2.0)


async def test_a_system_that_fails_once_keeps_its_other_questions_paired() -> None:
    class Fails(FakeSystem):
        async def ask(self, prompt: Sequence[int], max_tokens: int, extra: Mapping[str, Any]) -> TimedCompletion:
            if prompt == [2]:
                raise Unavailable("gone")
            return await FakeSystem.ask(self, prompt, max_tokens, extra)

    systems = [FakeSystem("slipstream-plain", 10), Fails("slipstream-default", 30)]
    results = await ask_all(one_by_one({"copy": [[1], [2], [3]]}), systems, 11)
    row = row_of(("slipstream-default", 1, "copy"), results)
    assert row["answers"] == 2
    assert row["against_plain"] == pytest.approx(3.0)


async def test_a_batch_in_which_an_answer_fails_says_nothing_of_speed() -> None:
    """What is not answered takes no time: the others' would look like a faster machine."""
    class Fails(FakeSystem):
        async def ask(self, prompt: Sequence[int], max_tokens: int, extra: Mapping[str, Any]) -> TimedCompletion:
            if len(self.asked) == 5:
                self.asked.append(tuple(prompt))
                raise Unavailable("gone")
            return await FakeSystem.ask(self, prompt, max_tokens, extra)

    systems = [FakeSystem("slipstream-plain", 10), Fails("slipstream-default", 10)]
    results = await ask_all([Turn("copy", [[n] for n in range(8)], NAMES, 4)] * 2, systems, 11)
    assert [answer.tokens for answer in results["slipstream-default", 4, "copy"]] == [0, 88]
    assert row_of(("slipstream-default", 4, "copy"), results)["answers"] == 1


def test_answers_that_are_too_short_to_say_do_not_count_as_slow() -> None:
    """A word and an end come in one event: nothing was decoded between two of them."""
    short, long = TimedCompletion(2, 0.5, 0.5), TimedCompletion(11, 1.0, 2.0)
    assert short.tokens_per_s == 0.0
    row = row_of(("slipstream-plain", 1, "copy"), {("slipstream-plain", 1, "copy"): [short, long, short]})
    assert row["tokens_per_s"] == pytest.approx(10.0) and row["answers"] == 3
    assert row_of(("slipstream-plain", 1, "copy"), {("slipstream-plain", 1, "copy"): [short]})["tokens_per_s"] == 0.0


async def test_a_peer_that_says_nothing_is_named_and_the_others_go_on(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.systems.START_S", 0.05)
    system = Transformers("plain", tmp_path, tmp_path, "bfloat16")
    with pytest.raises(Unavailable, match="transformers-plain"):
        await system.start()
    with pytest.raises(Unavailable, match="transformers-plain"):
        await system.ask([1], 1)  # what it says late would be taken for this answer
    await system.stop()


async def test_sampled_questions_go_to_plain_and_default_and_bound_ones_to_all_of_ours() -> None:
    systems = plain, other, default, ngram = [FakeSystem(name, speed) for name, speed in (
        ("slipstream-plain", 10), ("llamacpp-plain", 9), ("slipstream-default", 15), ("slipstream-ngram", 11))]
    sets = {"copy": [[9]], "mt_bench": [[1], [2]], "extraction": [[3]], "record": [[4]], LONG: [[5]]}
    results = await ask_all(one_by_one(sets), systems, 11)
    assert other.asked == [(9,), (1,), (2,)] and other.extras == [{}] * 3
    assert ngram.asked == [(9,), (1,), (2,), (3,), (4,)] and ngram.extras == [{}] * 3 + [*WITH_SCHEMA.values()]
    assert plain.asked == default.asked == [*ngram.asked, (5,)] + [(1,), (2,)] * len(SAMPLED)
    assert default.extras[6::2] == [*SAMPLED.values()]
    for name in SAMPLED:
        assert ratio(results, "slipstream-default", "slipstream-plain", 1, name) == pytest.approx(1.5)


async def test_a_batch_is_asked_by_as_many_streams_and_counts_all_tokens() -> None:
    system = FakeSystem("slipstream-plain", 10)
    turns = in_batches({"copy": [[1], [2], [3]], "record": [[4]], LONG: [[5]]}, 2, 3)
    results = await ask_all(turns, [system, FakeSystem("slipstream-ngram", 10)], 8)
    assert [a.tokens for a in results["slipstream-plain", 4, "copy"]] == [96, 96]
    assert [a.tokens for a in results["slipstream-plain", 16, "copy"]] == [384, 384]
    assert [a.tokens for a in results["slipstream-plain", 8, "group"]] == [64, 64]
    assert len(results) == 3, "what is bound is asked in no batch, and some systems are not"
    assert len(system.asked) == 2 * 3 * (4 + 16) + 2 * 8 and system.most == 16
    assert set(system.asked[-8:]) == {(2,)}, "a group is asked one prompt"
    assert [extra["seed"] for extra in system.extras[-8:]] == list(range(8))


def test_a_row_says_speed_of_decoding_and_of_the_whole_answer() -> None:
    results: Results = {("slipstream-plain", 1, "copy"): [TimedCompletion(11, 1.0, 2.0, rounds=11)]}
    row = row_of(("slipstream-plain", 1, "copy"), results)
    assert row["tokens_per_s"] == pytest.approx(10.0)
    assert row["end_to_end"] == pytest.approx(5.5)
    assert row["acceptance_length"] == pytest.approx(1.0)
    assert {"system", "precision", "batch", "set", "tokens_per_s"} <= set(row)


def test_verdicts_name_what_is_reached_missed_and_not_measured() -> None:
    lines = verdicts(answered(default=1.5))
    assert len(lines) == len(GOALS)
    assert "slipstream-default by slipstream-plain, batch 1, mt_bench: goal 1.3 ×: 1.50 ×, reached" in lines
    assert "slipstream-default by slipstream-plain, batch 1, copy: goal 1.9 ×: 1.50 ×, MISSED" in lines
    assert any("transformers-plain" in line and line.endswith("not measured") for line in lines)


async def test_completions_are_read_however_they_are_cut() -> None:
    events = [{"choices": [{"text": "a"}]}, {"choices": [{"text": ""}]}, {"choices": [{"text": "bc"}]},
              {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 2}, "slipstream": {"rounds": 2}}]
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in (body[:20], body[20:50], body[50:]):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        answer = await Server(server.sockets[0].getsockname()[1], "m").ask([1, 2], 3, {})
    assert (answer.tokens, answer.rounds) == (3, 2)
    assert 0 < answer.first_s <= answer.total_s
    assert got[0].startswith(b"POST /v1/completions")


async def test_a_refusal_is_an_error_with_its_words() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\nno such model")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        with pytest.raises(Unavailable, match="no such model"):
            await Server(server.sockets[0].getsockname()[1], "m").ask("x", 1, {})


def test_a_peer_that_is_not_installed_is_named_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make bench-peers"):
        llama_server(tmp_path)
    with pytest.raises(ConfigError, match="make vllm"):
        vllm(tmp_path, tmp_path, tmp_path, "bfloat16")


def test_a_model_is_converted_once_and_whole(tmp_path: Path) -> None:
    program, source, file = tmp_path / "quantize", tmp_path / "some.gguf", tmp_path / "new" / "some.gguf"
    source.write_text("weights")
    program.write_text('#!/bin/sh\necho "no room" >&2; exit 1')
    program.chmod(0o755)
    with pytest.raises(Unavailable, match="no room"):
        in_bfloat16(program, source, file)
    assert not file.exists()
    program.write_text('#!/bin/sh\n[ "$1 $4" = "--allow-requantize BF16" ] && mv "$2" "$3"')
    assert in_bfloat16(program, source, file).read_text() == "weights"
    assert in_bfloat16(program, source, file) == file, "its source is gone by now"


@pytest.mark.parametrize(("name", "count"), [("copy", 12), ("extraction", 8)])
def test_our_sets_read_like_any_other(name: str, count: int) -> None:
    assert len(set(read_questions(Path("bench/sets"), name, 99))) == count


def test_what_is_asked_is_of_the_folder_or_our_own(tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text('{"turns": ["a"]}')
    given, ours = questions_of(str(tmp_path), ["some"]), questions_of(None, ["some"])
    assert list(given) == ["some", "copy", *WITH_SCHEMA] and given["some"] == ["a"] and len(given["copy"]) == 12
    assert list(ours) == ["chat", "copy", *WITH_SCHEMA] and len(ours["copy"]) == 6
    (tmp_path / "cnn_dm.jsonl").write_text("\n".join(f'{{"turns": ["{place}"]}}' for place in range(14)))
    long = questions_of(str(tmp_path), ["some"])[LONG]
    assert [text.split() for text in long] == [[*map(str, range(6))], [*map(str, range(6, 12))]]


def test_slipstream_is_three_processes_two_or_one(tmp_path: Path) -> None:
    parts = {kind: slipstream(kind, tmp_path, "model", "bfloat16").processes
             for kind in ("alone", "default", "colocated")}
    assert {kind: list(found) for kind, found in parts.items()} == {
        "alone": ["target", "router"], "default": ["draft", "target", "router"], "colocated": ["all"]}
    (all_,) = parts["colocated"].values()
    assert (all_.module, all_.arguments) == ("slipstream", ("serve", "--colocated"))
    for part in ("draft", "target", "router"):
        assert sum(setting.startswith(f"{part}.listen=") for setting in all_.settings) == 1


async def test_a_system_whose_draft_is_refused_is_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its target serves without: with prompt lookup nothing in the row would show it."""
    asked = list[Path]()

    async def ready(self: Process) -> None:
        """At once."""

    async def wait_for_drafts(client: object, log: Path) -> None:
        asked.append(log)
        raise Unavailable("the target does not find its draft")

    monkeypatch.setattr(Process, "start", lambda self: None)
    monkeypatch.setattr(Process, "ready", ready)
    monkeypatch.setattr("bench.peers.systems.wait_for_drafts", wait_for_drafts)
    with pytest.raises(Unavailable, match="does not find its draft"):
        await slipstream("default", tmp_path, "model", "bfloat16").start()
    for kind in ("alone", "colocated"):
        await slipstream(kind, tmp_path, "model", "bfloat16").start()
    assert asked == [tmp_path / "slipstream-default-target.log"]


async def test_a_peer_starts_answers_and_is_gone(tmp_path: Path) -> None:
    """A web server that is none of ours: the page says when it takes work, and an end before that is told."""
    (tmp_path / "health").write_text("well")
    program = ("import http.server, sys; "
               "http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[4]), bind=sys.argv[2])")
    system = peer("web", tmp_path / "logs", ["env", "-C", str(tmp_path), sys.executable, "-c", program])
    await system.start()
    assert system.memory()["server"] > 1
    await system.stop()
    with pytest.raises(Unavailable, match=r"(?s)broken did not start.*no such thing"):
        await peer("broken", tmp_path / "logs", [sys.executable, "-c", "raise SystemExit('no such thing')"]).start()


def test_sets_hold_turns_or_prompts_and_are_read_evenly(tmp_path: Path) -> None:
    lines = [{"turns": ["a", "z"]}, {"prompt": "b"}, {"turns": ["c"]}, {"prompt": "d"}]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_questions(tmp_path, "some", 9) == ["a", "b", "c", "d"]
    assert read_questions(tmp_path, "some", 2) == ["a", "c"]
    (tmp_path / "odd.jsonl").write_bytes('{"prompt": "a\u2028b\x85c"}\r\n\n{"prompt": "d"}'.encode())
    assert read_questions(tmp_path, "odd", 9) == ["a\u2028b\x85c", "d"], "what JSON has in a text ends no line"
    (tmp_path / "wrong.jsonl").write_text('{"turns": ["a"]}\n{"turn": "b"}')
    with pytest.raises(ConfigError, match="line 2"):
        read_questions(tmp_path, "wrong", 9)


def test_the_work_of_a_process_is_told_and_of_none_is_zero() -> None:
    assert cpu_s(os.getpid()) > 0
    assert resident_mib(os.getpid()) > 10
    assert cpu_s(0) == resident_mib(0) == 0


def test_names_are_families_that_can_be_built() -> None:
    assert {name.split("-")[0] for name in NAMES} == {"slipstream", "transformers", "llamacpp", "vllm"}


def test_tokens_that_come_with_the_first_are_not_counted_as_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' assisted decoding gives what is accepted in one go, behind the prompt too."""
    now = iter((0.0, 2.0, 3.0, 4.0))
    monkeypatch.setattr("bench.peers.generating.time.perf_counter", lambda: next(now))
    streamer = TimingStreamer()
    for tokens in ([7] * 30, [1] * 6, [1] * 2, [1]):
        streamer.put(torch.tensor([tokens]))
    answer = TimedCompletion(**streamer.result(9))
    assert (answer.tokens, answer.first_s, answer.total_s) == (9, 2.0, 4.0)
    assert answer.tokens_per_s == 1.5 and answer.end_to_end == 9 / 4
    assert TimedCompletion(5, 1.0, 2.0).tokens_per_s == 4.0
    assert TimedCompletion(6, 1.0, 1.0, num_first=6).tokens_per_s == 0.0


def test_a_peer_is_asked_as_its_user_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own defaults: Slipstream keeps what prompts begin with, and so does llama.cpp."""
    extras = list[Mapping[str, Any]]()

    async def ask(self: Server, prompt: Sequence[int], max_tokens: int, extra: Mapping[str, Any]) -> TimedCompletion:
        extras.append(extra)
        return TimedCompletion(1, 0.1, 0.1)

    monkeypatch.setattr(Server, "ask", ask)
    here = Path("llama-server"), Path("model.gguf")
    for system in (slipstream("plain", tmp_path, "tiny", "bfloat16"), llamacpp("plain", tmp_path, *here)):
        asyncio.run(system.ask([1, 2], 8))
    assert extras == [{}, {}]


@pytest.mark.parametrize("drafted", [(5, 6, 7), (5, 6, 8)])
async def test_plain_and_drafted_are_asked_alike_where_speeds_are_compared(drafted: tuple[int, ...],
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Log probabilities cost a step time: only an answer whose speed does not count has them."""
    asked = list[tuple[bool, int | None]]()

    async def ask(backend: Backend, prompt: list[int], sampling: Sampling, max_tokens: int, speculate: bool,
                  top_logprobs: int | None = None) -> TimedAnswer:
        asked.append((speculate, top_logprobs))
        margins = ((-0.1, -3.0),) * 2 + ((-0.6, -0.8),) if top_logprobs else ()
        return TimedAnswer(drafted if speculate else (5, 6, 7), 3, 0, 2.0 if top_logprobs else 1.0, margins)

    monkeypatch.setattr(exact, "ask", ask)
    pair = plain, _ = await exact.ask_both(None, [1], Sampling(), 3)  # type: ignore[arg-type]
    assert asked[:2] == [(False, None), (True, None)] and plain.tokens_per_s == 2.0
    if drafted != plain.tokens:
        assert asked[2:] == [(False, 2)]
        assert exact.describe_difference(*pair) == "they part at token 2, where the margin is 0.20000 (log probability)"
    else:
        assert not asked[2:]


@pytest.mark.parametrize("command", [
    ("bench.exact", "--prompts", "nowhere"), ("bench.traffic.network", "--real", "--prompts", "nowhere"),
    ("bench.vllm", "--vllm", "nowhere", "--prompts", "nowhere"), ("bench.gpu", "--device", "cuda:99")])
def test_what_cannot_be_measured_is_told_in_a_sentence(command: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-P", "-m", *command], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert ("nowhere" in done.stderr) == ("nowhere" in command) and done.stderr.strip()
