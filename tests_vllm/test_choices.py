"""Scores of prompts, allowed tokens and bad words: with vLLM behind the router clients read what they read with our own
engine behind it, and drafts change nothing. Default model, float32."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.fleet import free_port
from tests_vllm.running import MODEL, ROOT, Server, draft, quiet

pytestmark = pytest.mark.timeout(900)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy cat. The quick"
SETTINGS = ("model.dtype=float32", "target.max_sessions=8", "target.policy.max_nodes=4", "target.policy.always=true",
            "target.prompt_lookup=false")
# So that prompts come in chunks.
VLLM = "target.engine={vllm: {enforce_eager: true, max_model_len: 1024, max_num_batched_tokens: 16}}"
TOLD_APART = ("id", "created", "completion_tokens_details", "prompt_tokens_details",  # these differ between answers
              "system_fingerprint")  # and this between engines
BOUND: dict[str, dict[str, Any]] = {
    "bad words": {"bad_words": ["fox", "lazy dog", "quick brown"]},
    "a bad word that is said at once": {"bad_words": [" jumps", "over the"], "min_tokens": 8},
    "allowed": {"allowed_token_ids": TEXT},
    "no end to wait for": {"prompt": "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n", "min_tokens": 36},
    "another end to wait for": {"prompt": "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n",
                                "min_tokens": 36, "stop_token_ids": [7]},
    "both": {"allowed_token_ids": TEXT, "bad_words": ["fox", "brown fox", "the lazy"]},
}
GREEDY: dict[str, Any] = {"temperature": 0.0}
SCORED: dict[str, Any] = {"prompt_logprobs": 1, "max_tokens": 16, **GREEDY}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "seed": 11}


@dataclass
class Served:
    """A router and its target."""

    http: str
    servers: list[Server]

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.http}{path}", json={"model": MODEL, **body}, timeout=300.0)

    def ask(self, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found


def settings(*given: str) -> list[str]:
    return [word for one in given for word in ("--set", one)]


def serving(name: str, python: Path, folder: Path, port: int, own: tuple[str, ...]) -> Served:
    """port: of the draft."""
    listen, page, http, page_2 = (f"127.0.0.1:{free_port()}" for _ in range(4))
    command = [python, "-m", "target_service", *settings(
        *SETTINGS, *own, f"target.listen={listen}", f"target.metrics_listen={page}",
        f"target.drafts=[127.0.0.1:{port}]")]
    where = (quiet(), folder) if own else (None, ROOT)
    target = Server(command, folder / f"{name}.log", page, "/ready", *where)
    router = Server([sys.executable, "-m", "router_service", *settings(
        f"router.listen={http}", f"router.grpc_listen=127.0.0.1:{free_port()}", f"router.metrics_listen={page_2}",
        f"router.targets=[{listen}]")], folder / f"{name}-router.log", page_2, "/ready", None, ROOT)
    return Served(f"http://{http}", [target, router])


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def both(vllm_python: Path, port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """Ours, and vLLM's."""
    folder = tmp_path_factory.mktemp("served")
    made = (serving("ours", Path(sys.executable), folder, port, ()),
            serving("vllm", vllm_python, folder, port, (VLLM,)))
    try:
        for one in made:
            for server in one.servers:
                server.wait()
        yield made
    finally:
        for one in made:
            for server in one.servers:
                server.end()


def check(ours: Any, theirs: Any, name: str = "") -> None:
    """The same, but for the last digits of log probabilities."""
    if isinstance(ours, dict):
        assert list(ours) == list(theirs), name
        for key in ours:
            if key not in TOLD_APART:
                check(ours[key], theirs[key], f"{name}.{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), name
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            check(one, other, f"{name}[{at}]")
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, abs=2e-3), name
    elif name.endswith(".rank"):  # of tokens that are as good as each other but for the last digits
        assert abs(ours - theirs) <= 1 + ours // 100, name
    else:
        assert ours == theirs, name


@pytest.mark.parametrize("body", [
    {"prompt": TEXT, "prompt_logprobs": 2, "max_tokens": 3, "logprobs": 2},
    {"prompt": [TEXT, TEXT[:40]], "echo": True, "logprobs": 1, "max_tokens": 0},
    {"prompt": TEXT, "echo": True, "logprobs": 0, "max_tokens": 1, "speculate": False},
    {"prompt": TEXT, "max_tokens": 0, "echo": True}, {"prompt": [19], "prompt_logprobs": 1, "max_tokens": 1},
    {"messages": [{"role": "user", "content": TEXT}], "prompt_logprobs": 0, "max_tokens": 2},
], ids=["scores", "alone", "echo", "nothing", "one token", "chat"])
def test_prompts_are_scored_as_by_our_own_engine(body: dict[str, Any], both: tuple[Served, Served]) -> None:
    path = CHAT if "messages" in body else COMPLETIONS
    ours, theirs = (one.ask(path, **GREEDY, **body) for one in both)
    check(ours, theirs)
    again = both[1].ask(path, **GREEDY, **body)  # prompts that are cached are scored, too
    check(theirs, again)


def test_answers_keep_to_what_they_may_say_with_drafts_as_without(both: tuple[Served, Served], port: int) -> None:
    ours, vllm = both
    ids = vllm.ask("/tokenize", prompt=TEXT)["tokens"]
    asked = list[dict[str, Any]]()
    for bound in BOUND.values():
        more = bound | ({"allowed_token_ids": sorted(set(ids))} if "allowed_token_ids" in bound else {})
        asked += [{"prompt": TEXT, "max_tokens": 40, "ignore_eos": True, "logprobs": 1, "return_token_ids": True,
                   **more, **how}
                  for how in (GREEDY, SEEDED)]
    free = vllm.ask(**asked[0] | {"bad_words": []})["choices"][0]["text"]
    plain = [vllm.ask(**body, speculate=False) for body in asked]
    for body, said in zip(asked, plain, strict=True):
        text = said["choices"][0]["text"]
        assert not any(word in text for word in body.get("bad_words", ())), text
        assert set(said["choices"][0]["token_ids"]) <= set(body.get("allowed_token_ids") or range(1 << 20))
        check(ours.ask(**body, speculate=False)["choices"], said["choices"])
    assert "fox" in free, "nothing was forbidden"
    expected_scores = vllm.ask(prompt=TEXT, **SCORED, speculate=False)["choices"]
    service: subprocess.Popen[bytes] = draft(port)
    try:
        for _ in range(60):
            with ThreadPoolExecutor(8) as together:  # they come and go beside one another, and prompts are scored
                scored = together.submit(vllm.ask, prompt=TEXT, **SCORED)
                drafted = list(together.map(lambda body: vllm.ask(**body), asked))
                check(expected_scores, scored.result()["choices"])
            for body, said, expected in zip(asked, drafted, plain, strict=True):
                assert said["choices"][0]["text"] == expected["choices"][0]["text"], body
                check(expected["choices"], said["choices"])
            accepted = [said["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] for said in drafted]
            if sum(accepted):
                break
        else:
            raise AssertionError("no draft token was used")
    finally:
        service.kill()
        service.wait()


@pytest.mark.parametrize(("body", "named"), [
    ({"logprobs_mode": "processed_logprobs"}, "logprobs_mode"), ({"bad_words": [f"word{i}" for i in range(100)]},
                                                               "bad_words"),
    ({"allowed_token_ids": [19, 20], "bad_words": ["x"], "prompt_logprobs": 21}, "prompt_logprobs"),
    ({"allowed_token_ids": [1 << 20]}, "allowed_token_ids"), ({"temperature": 3.0}, "temperature"),
])
def test_what_vllm_does_not_do_is_refused_by_name(body: dict[str, Any], named: str,
                                                  both: tuple[Served, Served]) -> None:
    refused = both[1].post(COMPLETIONS, prompt=TEXT, max_tokens=4, **body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == named, refused.text
    assert both[1].ask(prompt=TEXT, max_tokens=4)["choices"], "vLLM goes on"
