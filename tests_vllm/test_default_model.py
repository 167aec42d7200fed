"""vLLM's greedy tokens stay vLLM's, whatever a draft does, and drafts are used. Default model, float32."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.fleet import free_port
from tests_vllm.running import PROMPTS, accepts, draft, engine

pytestmark = pytest.mark.timeout(900)


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
            accepted = accepts(drafted, 0)
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
            accepts(drafted, drafted.ask(PROMPTS[:1], 1)["accepted"])
        finally:
            service.kill()
            service.wait()
