"""vLLM's greedy tokens stay vLLM's, whatever a draft does, and drafts are used. Default model, float32."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.fleet import free_port
from tests_vllm.running import PROMPTS, accepts, draft, engine

COPIED = "The quick brown fox jumps over the lazy dog near a river bank, while some old cat sleeps. " * 3
EOS = 2
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


def test_an_answer_ends_where_it_may_behind_accepted_drafts_too(vllm_python: Path) -> None:
    """With the first token that may be its end: a step verifies some of the least tokens, and that one behind them."""
    port = free_port()
    options = {"drafts": [f"127.0.0.1:{port}"], "prompt_lookup": False, "always": True, "deadline_s": 2.0}
    with engine(vllm_python, options) as drafted:
        (plain,) = drafted.ask([COPIED], 1, chat=False)["tokens"]
        plain = plain[: plain.index(EOS)] if EOS in plain else plain  # vLLM lets no answer end before the least tokens
        ends = [at for at, token in enumerate(plain) if at > 1 and token not in plain[:at]]
        service = draft(port)
        try:
            before = accepts(drafted, 0)
            said = drafted.ask([COPIED] * len(ends), 8, chat=False, each=[
                {"stop_token_ids": [plain[at]], "min_tokens": at} for at in ends])
        finally:
            service.kill()
            service.wait()
    assert said["accepted"] - before > len(ends)
    assert said["tokens"] == [plain[: at + 1] for at in ends]
    assert set(said["finishes"]) == {"stop"}
