"""Multi-token prediction heads, which read vLLM's states behind the final norm, of models as small as vLLM takes them.

The head is the target's own by its names. Its layer adds nothing; its one matrix is fitted by least squares to say the
next state of the very answers that are asked for. So nearly all that it drafts is accepted, as long as it is given the
states that it was fitted to: those of another place, or from before the final norm, are of no use to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.fleet import free_port
from slipstream.base.config import ModelSection
from slipstream.engine.loading import load_model
from slipstream.engine.runner import ModelRunner
from tests.mtp_folder import NORMS, head_prefix, mtp_config, mtp_tensors, projection, write_mtp_target
from tests.sequences import run
from tests_vllm.running import engine
from tests_vllm.test_features import CHAIN, drafting
from tests_vllm.test_last_states import begun

LAYERS, WIDTH, TOKENS, EPS = 2, 256, 40, 1e-5
SIZES = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": LAYERS}
EXPERTS = {"moe_intermediate_size": 64}
KINDS: dict[str, dict[str, Any]] = {
    "mimo": {"head_dim": 64}, "glm4_moe": {"head_dim": 32, **EXPERTS},
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, **EXPERTS}}
PROMPTS = [list(text.encode()) for text in ("the cat sat on the mat. the cat", "zq", "a house by the sea, 1 2 3",
                                            "what is it that you want?")]
pytestmark = pytest.mark.timeout(900)


@torch.inference_mode()
def fitted(config: dict[str, Any], tensors: dict[str, torch.Tensor], folder: Path, texts: list[list[int]]) -> Path:
    """The target in ``folder`` beside a head that continues the states of ``texts``."""
    native = config["model_type"] == "mimo"
    runner = ModelRunner(load_model(folder, ModelSection(dtype="float64", engine="decoder" if native else "hf")), 1024)
    runner.set_taps((LAYERS,))
    embedding, final = tensors["model.embed_tokens.weight"].double(), tensors["model.norm.weight"].double()
    inputs, wanted = list[torch.Tensor](), list[torch.Tensor]()
    for text in texts:
        _, slots = run(runner, text)
        states = runner.features(slots).double()
        halves = [normed(embedding[text[1:]]), normed(states[:-1])]
        inputs.append(torch.cat(halves[::-1] if native else halves, 1))
        wanted.append(states[1:] / final)
    matrix = torch.linalg.lstsq(torch.cat(inputs), torch.cat(wanted), driver="gelsd").solution
    prefix, (token_norm, state_norm, final_norm) = head_prefix(config), NORMS[config["model_type"]]
    for name, tensor in tensors.items():
        if name.startswith(prefix) and name.endswith(("o_proj.weight", "o_proj.bias", "down_proj.weight")):
            tensor.zero_()
    tensors |= {f"{prefix}.{token_norm}.weight": torch.ones(WIDTH), f"{prefix}.{state_norm}.weight": torch.ones(WIDTH),
                f"{prefix}.{final_norm}.weight": final.float(),
                f"{prefix}.{projection(config)}.weight": matrix.T.float().contiguous()}
    return write_mtp_target(folder.with_name("headed"), config, tensors)


def normed(rows: torch.Tensor) -> torch.Tensor:
    return rows / (rows.pow(2).mean(1, keepdim=True) + EPS).sqrt()


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_head_is_given_the_states_that_it_was_fitted_to(kind: str, vllm_python: Path, tmp_path: Path) -> None:
    config = mtp_config(kind, **SIZES, **KINDS[kind])
    tensors, port = mtp_tensors(config), free_port()
    folder = write_mtp_target(tmp_path / "target", config, tensors)
    # vLLM reads MiMo's own type with code of MiMo's alone; what it is built from is said by its architecture.
    known = {"model_type": "qwen2"} if kind == "mimo" else {}
    served = write_mtp_target(tmp_path / "served", config | known, tensors)
    options = {"drafts": [f"127.0.0.1:{port}"], "prompt_lookup": False, "always": True, "layers": [LAYERS],
               "deadline_s": 2.0}
    # On processors with AMX vLLM would take another, which knows no float32.
    attention = {"attention_backend": "CPU_MLA"} if kind == "deepseek_v3" else {}
    with engine(vllm_python, options, model=served, log=tmp_path / "log", **attention) as drafted:
        plain = drafted.ask(PROMPTS, 1, TOKENS, chat=False)
        texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, plain["tokens"], strict=True)]
        headed = fitted(config, tensors, folder, texts)
        with drafting(port, "draft.drafter=mtp", f"model.path={headed}", *CHAIN):
            before = begun(drafted, PROMPTS, chat=False)
            for batch in (1, 4):
                said = drafted.ask(PROMPTS, batch, TOKENS, chat=False)
                tried, right = (said[name] - before[name] for name in ("drafted", "accepted"))
                assert said["tokens"] == plain["tokens"]
                assert right >= 0.8 * tried > 0, (right, tried)
                before = said
