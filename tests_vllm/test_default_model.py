"""vLLM's greedy tokens stay vLLM's, whatever a draft does, and drafts are used. Default model, float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.fleet import free_port
from slipstream.models.folder import resolve

MODEL = "smollm2-135m"
ENGINE = Path(__file__).with_name("engine.py")
ROOT = ENGINE.parent.parent
QUIET = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "KMP_BLOCKTIME": "0",
         "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
         "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
PROMPTS = ["Explain in simple words how a bicycle stays upright.", "List five facts about the moon.",
           "Write a Python function that returns the n-th Fibonacci number, and explain it.",
           "Repeat this three times: The quick brown fox jumps over the lazy dog near the river bank."]
TOKENS = 40
pytestmark = pytest.mark.timeout(900)


class Engine:
    """vLLM in a process of its own."""

    def __init__(self, python: Path, drafting: dict[str, Any] | None) -> None:
        environment = {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **QUIET}
        self._process = subprocess.Popen([python, ENGINE, str(resolve(MODEL)), json.dumps(drafting)], text=True,
                                         cwd=ENGINE.parent, env=environment, stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE)
        assert self._said()["ready"]

    def order(self, prompts: Sequence[str], batch: int, tokens: int = TOKENS) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "batch": batch, "max_tokens": tokens}) + "\n")
        self._process.stdin.flush()

    def answers(self) -> dict[str, Any]:
        return self._said()

    def ask(self, prompts: Sequence[str], batch: int, tokens: int = TOKENS) -> dict[str, Any]:
        self.order(prompts, batch, tokens)
        return self._said()

    def _said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                said: dict[str, Any] = json.loads(line[1:])
                return said
        raise AssertionError(f"vLLM ended with {self._process.wait()}")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def engine(python: Path, drafting: dict[str, Any] | None) -> Iterator[Engine]:
    running = Engine(python, drafting)
    try:
        yield running
    finally:
        running.end()


def draft(port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "draft_service", "--set", "draft.drafter=ngram", "--set",
                             f"draft.listen=127.0.0.1:{port}", "--set", "draft.metrics_listen=127.0.0.1:0"],
                            cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def plain(vllm_python: Path) -> dict[int, list[list[int]]]:
    with engine(vllm_python, None) as alone:
        return {batch: alone.ask(PROMPTS * 2, batch)["tokens"] for batch in (1, 8)}


def test_tokens_are_plain_vllms_while_drafts_come_go_and_come_back(vllm_python: Path,
                                                                   plain: dict[int, list[list[int]]]) -> None:
    port = free_port()
    with engine(vllm_python, {"drafts": [f"127.0.0.1:{port}"], "prompt_lookup": False, "always": True}) as drafted:
        assert drafted.ask(PROMPTS, 1)["tokens"] == plain[1][:4], "no draft yet"
        service = draft(port)
        try:
            accepted = _accepts(drafted, 0)
            for batch in (1, 8):
                said = drafted.ask(PROMPTS * 2, batch)
                assert said["tokens"] == plain[batch]
                assert said["accepted"] > accepted, "no draft token was used"
                accepted = said["accepted"]
            drafted.order(PROMPTS * 2, 8)
            time.sleep(0.3)
        finally:
            service.kill()
            service.wait()
        assert drafted.answers()["tokens"] == plain[8], "the draft was killed in mid-answer"
        assert drafted.ask(PROMPTS * 2, 8)["tokens"] == plain[8]
        service = draft(port)
        try:
            _accepts(drafted, drafted.ask(PROMPTS[:1], 1)["accepted"])
        finally:
            service.kill()
            service.wait()


def _accepts(drafted: Engine, before: int) -> int:
    """Asks until a draft token was used."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        if (accepted := int(drafted.ask(PROMPTS[3:], 1)["accepted"])) > before:
            return accepted
    raise AssertionError("no draft token was used for two minutes")
