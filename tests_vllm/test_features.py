"""Drafters that read vLLM's states: as good as vLLM's own with the same head, whatever happens to a request's KV.

Default model, float32, the EAGLE-3 head that comes with Slipstream, chains of four.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.fleet import free_port
from tests_vllm.running import MODEL, PROMPTS, ROOT, Engine, accepts, draft, engine

HEAD = ROOT / "slipstream" / "models" / "heads" / "smollm2-135m-eagle3"
CHAIN = ("draft.dtype=float32", "draft.growth.topk=1", "draft.growth.num_steps=4", "draft.growth.num_draft_tokens=4")
EAGLE3 = ("draft.drafter=eagle3", f"draft.model={HEAD}", *CHAIN)
STANDALONE = ("draft.drafter=standalone", f"draft.model={MODEL}", *CHAIN)
TOKENS = 48
# One block and more of each prompt are the same, and blocks are small, so that the prefix cache has something to give.
SHARED = ("You are asked by a reader of a small newspaper who wants a short, friendly and plain answer without lists. "
          "Write as you would write to a good friend who knows nothing about it. ")
ASKED = [SHARED + prompt for prompt in PROMPTS]
SETTINGS = {"block_size": 32}
pytestmark = pytest.mark.timeout(1800)


class Told:
    """What vLLM counted between two answers."""

    def __init__(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        self.tokens = after["tokens"]
        self.rounds, self.drafted, self.accepted, self.preempted, self.cached = (
            after[name] - before.get(name, 0) for name in ("rounds", "drafted", "accepted", "preempted", "cached"))

    @property
    def length(self) -> float:
        """Acceptance length: tokens of a drafted round, the bonus token included."""
        assert self.rounds, "nothing was drafted"
        return 1.0 + float(self.accepted) / float(self.rounds)


class Asking:
    def __init__(self, asked: Engine) -> None:
        self._asked, self._before = asked, dict[str, Any]()

    def __call__(self, batch: int, **given: Any) -> Told:
        return self.told(self._asked.ask(ASKED * (2 if batch == 8 else 1), batch, TOKENS, **given))

    def told(self, said: dict[str, Any]) -> Told:
        told, self._before = Told(self._before, said), said
        return told


def beginning(drafted: Engine) -> Asking:
    """Where a drafter is at work."""
    accepts(drafted, drafted.ask(PROMPTS[:1], 1, 1)["accepted"])
    ask = Asking(drafted)
    ask.told(drafted.ask(PROMPTS[:1], 1, 1))
    return ask


@contextmanager
def drafting(port: int, *settings: str) -> Iterator[subprocess.Popen[bytes]]:
    service = draft(port, *settings)
    try:
        yield service
    finally:
        service.kill()
        service.wait()


def reading(port: int) -> dict[str, Any]:
    return {"drafts": [f"127.0.0.1:{port}"], "prompt_lookup": False, "always": True, "layers": [2, 15, 27],
            "deadline_s": 2.0}  # none is late on a busy machine


SEEDED = {"temperature": 0.8, "seed": 7, "n": 2}


@pytest.fixture(scope="module")
def plain(vllm_python: Path) -> dict[int, list[list[int]]]:
    with engine(vllm_python, None, **SETTINGS) as alone:
        return {batch: alone.ask(ASKED * (2 if batch == 8 else 1), batch, TOKENS)["tokens"] for batch in (1, 8)}


@pytest.fixture(scope="module")
def own(vllm_python: Path) -> Told:
    """vLLM's EAGLE-3 with the same head."""
    speculative = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 4}
    with engine(vllm_python, None, speculative_config=speculative, **SETTINGS) as alone:
        return Asking(alone)(1)


def test_eagle3_is_as_good_as_vllms_own_and_stays_so(vllm_python: Path, plain: dict[int, list[list[int]]],
                                                     own: Told) -> None:
    port = free_port()
    with drafting(port, *EAGLE3), engine(vllm_python, reading(port), **SETTINGS) as drafted:
        ask = beginning(drafted)
        fresh = ask(1)
        assert fresh.tokens == plain[1]
        # Of the same answers: vLLM's own counts as accepted what comes behind an answer's end, too.
        assert abs(fresh.rounds - own.rounds) <= 0.03 * own.rounds
        again = ask(1)
        assert again.tokens == plain[1] and again.cached > fresh.cached
        assert again.length >= 0.9 * fresh.length, "prompts came out of the prefix cache"
        eight = ask(8)
        assert eight.tokens == plain[8]
        assert eight.length >= 0.9 * fresh.length
        assert ask(1, abort=9).tokens == plain[1]
        assert len(ask(1, **SEEDED).tokens) == 2 * len(ASKED)
        after = ask(1)
        assert after.tokens == plain[1]
        assert after.length >= 0.9 * fresh.length, "one was given up, others were two at once"


def test_drafts_that_die_come_late_and_are_of_another_kind(vllm_python: Path, plain: dict[int, list[list[int]]],
                                                           own: Told) -> None:
    port = free_port()
    with engine(vllm_python, reading(port), **SETTINGS) as drafted:
        with drafting(port, *EAGLE3) as service:
            ask = beginning(drafted)
            drafted.order(ASKED * 2, 8, TOKENS)
            time.sleep(1.0)
            service.kill()
            service.wait()
            assert ask.told(drafted.answers()).tokens == plain[8], "the draft was killed in mid-answer"
        drafted.order(ASKED * 2, 8, 160)
        with drafting(port, *EAGLE3):
            late = ask.told(drafted.answers())
            assert late.rounds == 0 or late.length >= 0.9 * own.length, "it came in the middle, or too late"
            ask = beginning(drafted)
            back = ask(1)
            assert back.tokens == plain[1]
            assert back.length >= 0.9 * own.length, "the draft came back"
        with drafting(port, *STANDALONE):
            ask = beginning(drafted)
            for batch in (1, 8):
                alike = ask(batch)
                assert alike.tokens == plain[batch]
                assert alike.accepted >= 0.9 * alike.drafted > 0, "the draft model is the target itself"


def test_requests_that_are_preempted_keep_their_tokens_and_their_drafts(vllm_python: Path, own: Told,
                                                                       plain: dict[int, list[list[int]]]) -> None:
    port = free_port()
    small = {**SETTINGS, "num_gpu_blocks_override": 16, "max_model_len": 256}
    with drafting(port, *EAGLE3), engine(vllm_python, reading(port), **small) as drafted:
        ask = beginning(drafted)
        tight = ask(8)
        assert tight.preempted > 0
        assert tight.tokens == plain[8]
        assert tight.length >= 0.9 * own.length
