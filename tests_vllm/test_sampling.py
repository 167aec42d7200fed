"""Sampled answers of vLLM with drafts: a seed fixes them, and their law is vLLM's. Default model, float32."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from bench.fleet import free_port
from tests_vllm.running import ENGINE, PROMPTS, accepts, draft, engine

pytestmark = pytest.mark.timeout(900)
MENDED = ENGINE.with_name("mended.py")
KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 7}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "seed": -3},
    {"temperature": 0.0}, {"temperature": 0.9, "seed": 11, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0.3, "seed": 5, "repetition_penalty": 1.1, "min_tokens": 30}]
ASKED = [(prompt, kind) for kind in KINDS for prompt in PROMPTS]
PLAY = ("The coin fell many times: heads, tails, tails, heads, tails, heads, heads, heads, tails, heads, tails, heads, "
        "tails, tails, heads, heads, tails, heads, heads,")
DRAWS, PAGE = 384, 32
WIDE = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "block_size": PAGE}
LAW = {"temperature": 0.9, "top_p": 0.95, "top_k": 6}


def asked(running: Any, batch: int, **more: Any) -> dict[str, Any]:
    said: dict[str, Any] = running.ask([prompt for prompt, _ in ASKED], batch, each=[kind for _, kind in ASKED],
                                       logprobs=1, **more)
    return said


def test_a_seed_fixes_an_answer_whatever_is_drafted_and_elsewhere(vllm_python: Path) -> None:
    port = free_port()
    drafting = {"drafts": [f"127.0.0.1:{port}"], "prompt_lookup": False, "always": True}
    with engine(vllm_python, drafting) as alone:
        plain = asked(alone, 8)
        assert not plain["drafted"]
        assert asked(alone, 3)["tokens"] == plain["tokens"]
    assert len({tuple(tokens) for tokens in plain["tokens"]}) == len(ASKED)
    service = draft(port)
    try:
        with engine(vllm_python, drafting) as elsewhere:
            accepts(elsewhere, 0)  # the draft may still come up
            before = elsewhere.ask(PROMPTS[:1], 1, 1)
            drafted = asked(elsewhere, 8)
            assert drafted["tokens"] == plain["tokens"]
            assert drafted["accepted"] - before["accepted"] > len(ASKED)
            for ours, theirs in zip(drafted["logprobs"], plain["logprobs"], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-3)
            begun = [[*prompt, *tokens[:15]] for prompt, tokens in zip(plain["prompts"], plain["tokens"], strict=True)]
            rest = elsewhere.ask(begun[:12], 8, 25, each=[kind for _, kind in ASKED[:12]], chat=False)
            assert rest["tokens"] == [tokens[15:] for tokens in plain["tokens"][:12]], "it did not go on there"
            several = elsewhere.ask(PROMPTS[:1], 8, n=3, temperature=1.0, seed=6)["tokens"]
            assert several[1] == plain["tokens"][0], "choice i has seed + i"
    finally:
        service.kill()
        service.wait()


def test_a_seed_of_plain_vllm_stands_for_prompts_that_come_in_parts(vllm_python: Path) -> None:
    prompt, how = [PLAY], {"temperature": 1.0, "seed": 7, "chat": False}
    with engine(vllm_python, None, max_num_batched_tokens=32) as parts:
        said = parts.ask(prompt, 1, **how)["tokens"]
        assert parts.ask(prompt, 1, **how)["tokens"] == said, "all but the end of it is in the prefix cache now"
    with engine(vllm_python, None, max_num_batched_tokens=512) as whole:
        assert whole.ask(prompt, 1, **how)["tokens"] == said


def outcomes(running: Any) -> Counter[tuple[int, ...]]:
    """What follows, from the second token on: draft tokens come after the first."""
    (prompt,) = running.ask([PLAY], 1, 1, chat=False)["prompts"]
    assert len(prompt) > PAGE  # all but one token of it is in the prefix cache now
    said = running.ask([prompt[: PAGE + 1]] * DRAWS, 64, 3, chat=False, **LAW)
    return Counter(tuple(tokens[1:]) for tokens in said["tokens"])


def alike(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """How likely two such counts are of one law."""
    likely = [what for what in one | other if one[what] + other[what] >= 16]
    table = [[counts[what] for what in likely] for counts in (one, other)]
    for row, counts in zip(table, (one, other), strict=True):
        row.append(counts.total() - sum(row) + 1)
    return float(stats.chi2_contingency(table).pvalue)


@pytest.fixture(scope="module")
def plain(vllm_python: Path) -> Counter[tuple[int, ...]]:
    with engine(vllm_python, None, **WIDE) as alone:
        return outcomes(alone)


@pytest.mark.parametrize("keyed", [True, False])
def test_the_law_is_plain_vllms_keyed_and_by_its_own_rejection_sampling(
        vllm_python: Path, plain: Counter[tuple[int, ...]], keyed: bool) -> None:
    port = free_port()
    drafting = {"drafts": [f"127.0.0.1:{port}"], "prompt_lookup": False, "always": True, "keyed": keyed}
    service = draft(port)
    try:
        with engine(vllm_python, drafting, script=MENDED, **WIDE) as drafted:
            accepts(drafted, 0)
            before = drafted.ask([PLAY], 1, 1, chat=False)
            law = outcomes(drafted)
            after = drafted.ask([PLAY], 1, 1, chat=False)
    finally:
        service.kill()
        service.wait()
    tried, right = (after[name] - before[name] for name in ("drafted", "accepted"))
    assert tried > DRAWS // 2 and 0 < right < tried
    assert len(plain) > 5 and alike(plain, law) > 1e-3
