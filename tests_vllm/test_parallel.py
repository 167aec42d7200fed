"""vLLM in two processes that share a model's layers: one of them speaks with drafts, and both verify the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fleet import free_port
from tests_vllm.running import PROMPTS, draft, engine

pytestmark = pytest.mark.timeout(900)
# The default model's heads are no multiple of two. Weights of chance repeat themselves, which n-grams foretell.
SHARED = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "load_format": "dummy",
          "hf_overrides": {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
                           "head_dim": 64, "hidden_size": 512}}


def test_two_ranks_verify_what_one_of_them_was_told(vllm_python: Path) -> None:
    port = free_port()
    drafting = {"drafts": [f"127.0.0.1:{port}"], "prompt_lookup": False, "always": True}
    sampled = {"temperature": 0.8, "top_k": 2, "seed": 3}
    with engine(vllm_python, drafting, **SHARED) as shared:
        plain = [shared.ask(PROMPTS, 4), shared.ask(PROMPTS, 4, **sampled)]
        assert not plain[1]["drafted"]
        service = draft(port)
        try:
            while not shared.ask(PROMPTS[3:], 1)["accepted"]:
                pass  # the draft may still come up
            drafted = [shared.ask(PROMPTS, 4), shared.ask(PROMPTS, 4, **sampled)]
        finally:
            service.kill()
            service.wait()
        assert [said["tokens"] for said in drafted] == [said["tokens"] for said in plain]
        assert drafted[0]["accepted"] > plain[1]["accepted"]
        assert drafted[1]["drafted"] > drafted[0]["drafted"]
        assert shared.ask(PROMPTS, 4)["tokens"] == plain[0]["tokens"], "the draft is gone"
