"""An EAGLE-2 head, which reads vLLM's states behind the final norm. Default model, float32.

The head is made by the test: one matrix, fitted by least squares to say the next state of the very answers that are
asked for. So nearly all that it drafts is accepted, as long as it is given the states that it was fitted to.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.fleet import free_port
from slipstream.models.folder import resolve
from tests.eagle_folder import eagle2_config, eagle2_tensors, write_eagle2_folder
from tests_vllm.running import MODEL, PROMPTS, Engine, engine
from tests_vllm.test_features import CHAIN, drafting

LAYERS = 30  # of the model: the state behind all of them
pytestmark = pytest.mark.timeout(900)


@torch.inference_mode()
def head_of(texts: list[list[int]], folder: Path) -> Path:
    """A head that continues the states of ``texts``, whose layer adds nothing to what ``fc`` says."""
    model = AutoModelForCausalLM.from_pretrained(resolve(MODEL), dtype=torch.float32)
    inputs, wanted = list[torch.Tensor](), list[torch.Tensor]()
    for text in texts:
        ids = torch.tensor([text])
        states = model.model(ids).last_hidden_state[0]
        inputs.append(torch.cat((model.get_input_embeddings()(ids)[0, 1:], states[:-1]), 1))
        wanted.append(states[1:])
    matrix = torch.linalg.lstsq(torch.cat(inputs).double(), torch.cat(wanted).double(), driver="gelsd").solution
    config = eagle2_config(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in eagle2_tensors(config).items()
               if name != "embed_tokens.weight"}
    return write_eagle2_folder(folder, config, {**tensors, "fc.weight": matrix.T.float().contiguous()})


def test_an_eagle2_head_is_given_the_states_that_it_was_fitted_to(vllm_python: Path, tmp_path: Path) -> None:
    port = free_port()
    options = {"drafts": [f"127.0.0.1:{port}"], "prompt_lookup": False, "always": True, "layers": [LAYERS],
               "deadline_s": 2.0}
    with engine(vllm_python, options, block_size=32) as drafted:
        plain = drafted.ask(PROMPTS, 1)
        texts = [[*prompt, *tokens] for prompt, tokens in zip(plain["prompts"], plain["tokens"], strict=True)]
        head = head_of(texts, tmp_path / "head")
        with drafting(port, "draft.drafter=eagle2", f"draft.model={head}", *CHAIN):
            before = begun(drafted)
            for batch in (1, 4):
                said = drafted.ask(PROMPTS, batch)
                tried, right = (said[name] - before[name] for name in ("drafted", "accepted"))
                assert said["tokens"] == plain["tokens"]
                assert right >= 0.8 * tried > 0, (right, tried)
                before = said


def begun(drafted: Engine, prompts: Sequence[str | list[int]] = PROMPTS, **more: Any) -> dict[str, Any]:
    """When draft tokens are used."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        if drafted.ask(prompts[3:], 1, **more)["accepted"]:
            return drafted.ask(prompts[:1], 1, 1, **more)
    raise AssertionError("no draft token was used for two minutes")
