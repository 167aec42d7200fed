"""vLLM's own OpenAI server with drafts of ours: its answers are the same before, during and after a draft."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from bench.fleet import free_port
from slipstream.models.folder import resolve
from tests_vllm.running import MODEL, PROMPTS, Server, draft, quiet

TOKENS = 64
pytestmark = pytest.mark.timeout(900)


class Own:
    """The server, and where its drafts are looked for."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.draft_port, listen = free_port(), free_port()
        self.url = f"http://127.0.0.1:{listen}"
        remote = {"method": "custom_class", "model": "slipstream_vllm.RemoteDrafter", "num_speculative_tokens": 4}
        options = {"drafts": [f"127.0.0.1:{self.draft_port}"], "prompt_lookup": False, "always": True}
        self.server = Server(
            [python, "-m", "vllm.entrypoints.openai.api_server", "--model", resolve(MODEL), "--served-model-name",
             MODEL, "--host", "127.0.0.1", "--port", listen, "--dtype", "float32", "--max-model-len", 1024,
             "--max-num-seqs", 8, "--enforce-eager", "--speculative-config", json.dumps(remote),
             "--additional-config", json.dumps({"slipstream": options})],
            folder / "vllm.log", f"127.0.0.1:{listen}", "/health", quiet(), folder)
        self.server.wait()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0)

    def ask(self, prompt: str) -> str:
        return "".join(chunk.choices[0].delta.content or "" for chunk in self.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": prompt}], temperature=0.0, max_tokens=TOKENS,
            stream=True) if chunk.choices)

    def accepted(self) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in httpx.get(f"{self.url}/metrics").text.splitlines()
                   if line.startswith("vllm:spec_decode_num_accepted_tokens_total"))


@pytest.fixture(scope="module")
def own(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    made = Own(vllm_python, tmp_path_factory.mktemp("own"))
    yield made
    made.server.end()


def test_answers_are_equal_before_during_and_after_a_draft(own: Own) -> None:
    before = [own.ask(prompt) for prompt in PROMPTS]
    assert own.accepted() == 0 and all(before)
    service = draft(own.draft_port)
    try:
        until_s = time.monotonic() + 120
        while not own.accepted():
            assert own.ask(PROMPTS[3]) == before[3] and time.monotonic() < until_s, "no draft token was accepted"
        assert [own.ask(prompt) for prompt in PROMPTS] == before
        used, said = own.accepted(), dict[int, str]()
        asked = [threading.Thread(target=lambda place=place: said.update({place: own.ask(PROMPTS[place])}))
                 for place in range(len(PROMPTS))]
        for thread in asked:
            thread.start()
        until_s = time.monotonic() + 60
        while own.accepted() == used and time.monotonic() < until_s:
            time.sleep(0.02)
    finally:
        service.kill()
        service.wait()
    for thread in asked:
        thread.join()
    assert [said[place] for place in range(len(PROMPTS))] == before, "the draft was killed in mid-answer"
    assert own.accepted() > used
    assert [own.ask(prompt) for prompt in PROMPTS] == before
