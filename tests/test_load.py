"""``make bench-load``: what aiperf is told, what is read from it, and what is said without it; rows of overload."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench.completions import Answered, Refused
from bench.peers.load import FIGURES, questions, row_of, run
from bench.traffic.overload import Seen, verdict
from slipstream.base.errors import ConfigError, Unavailable


def test_chat_and_copy_questions_come_in_turn(tmp_path: Path) -> None:
    lines = [json.loads(line)["text"] for line in questions(tmp_path / "new" / "q.jsonl").read_text().splitlines()]
    assert len(lines) == 24
    assert len(set(lines[1::2])) == 12
    assert len(set(lines[0::2])) == 6


def test_a_row_has_what_aiperf_said() -> None:
    exported = {metric: {"p50": 2.0, "p99": 3.0, "avg": 4.0} for metric, _ in FIGURES.values()}
    row = row_of("slipstream-plain", 0.5, exported)
    assert (row["first_p50_ms"], row["between_p99_ms"], row["tokens_per_s"]) == (2.0, 3.0, 4.0)


def test_a_run_without_answers_is_an_error_that_names_the_run() -> None:
    with pytest.raises(Unavailable, match=r"slipstream-plain at 0\.5"):
        row_of("slipstream-plain", 0.5, {})


async def test_without_aiperf_the_command_that_installs_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make bench-peers"):
        await run(argparse.Namespace(peers=tmp_path))


def test_a_row_of_overload_tells_goodput_and_which_refusals_are_not_as_they_should_be() -> None:
    head = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\n\r\n"
    said = [(head, b'{"error": {"code": "server_overloaded"}}'), (head, b"busy"),
            (b"HTTP/1.1 429 Too Many Requests\r\n\r\n", b'{"error": {"code": "server_overloaded"}}')]
    seen = Seen([20.0, 50.0, 60.0], [Answered(20, 0.5, 2.0, rounds=8)] * 100, lasted_s=12.0,
                refusals=[Refused(1, 429, *words) for words in said], counted=2.0)
    row = seen.row(2.0, 16.0)
    assert (row["goodput"], row["first_p99_s"], row["whole_p99_s"], row["a_round"]) == (50.0, 0.5, 2.0, 2.5)
    assert (row["refused"], row["untold"], row["uncounted"], row["told_s"]) == (3, 2, 1, 3.0)
    peak = Seen([62.5], seen.answers, lasted_s=12.0).row(1.0, 8.0)
    assert "0.80 of the peak" in verdict([peak, row], 1.0)
