"""Multi-token prediction heads written out: no batch, no cache, no slots. What the drafters' logits are held against.

GLM-4.5 and DeepSeek-V3 are transformers' own prediction layer around its own decoder layer; MiMo's is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.modeling_layers import MtpLayer

from tests.mtp_folder import HIDDEN, head_prefix
from tests.written import WrittenLayer

Tensor = torch.Tensor


class KeepFloat64(TorchFunctionMode):
    """transformers computes norms and routers in float32 whatever the model's dtype; this leaves float64 as it is."""

    def __torch_function__(self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        casts = func in (torch.Tensor.to, torch.Tensor.type) and args[1:] == (torch.float32,)
        if casts and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


class WrittenMtp(Protocol):
    """A head written out: no batch, no cache, no slots."""

    def run(self, tokens: Sequence[int], states: Tensor, path: Sequence[int]) -> tuple[Tensor, Tensor]:
        """tokens: all committed; states [len(tokens) - 1, H] of the target; path: draft tokens. The logits and the
        output of the last row."""
        ...


class WrittenNextN:
    """transformers' own prediction layer around its own decoder layer."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
        weight = {name: tensor.double() for name, tensor in tensors.items()}
        whole: PreTrainedConfig = AutoConfig.from_pretrained(folder).get_mtp_config()
        whole._attn_implementation = "sdpa"
        auto: Any = AutoModel
        model = auto.from_config(whole).double()
        model.set_experts_implementation("eager")
        layer, norm = type(model.layers[0]), type(model.norm)
        self.layer, self.rotary = MtpLayer(whole, layer, norm, 0).double().eval(), model.rotary_emb
        self.layer.load_state_dict(fused(weight, f"{head_prefix(config)}.", config["n_routed_experts"]))
        self.embedding, self.lm_head = weight["model.embed_tokens.weight"], weight["lm_head.weight"]

    def run(self, tokens: Sequence[int], states: Tensor, path: Sequence[int]) -> tuple[Tensor, Tensor]:
        text, known = [*tokens, *path], list(states)
        with torch.no_grad(), KeepFloat64():
            for count in range(len(tokens), len(text) + 1):
                rows = torch.stack(known)[None]
                positions = torch.arange(count - 1)[None]
                masked = torch.full((count - 1, count - 1), float("-inf"), dtype=torch.float64).triu(1)[None, None]
                out = self.layer(self.embedding[text[1:count]][None], rows, self.rotary(rows, positions), masked,
                                 positions, None)[0, -1]
                known.append(out)
        return self.lm_head @ out, out


def fused(weight: Mapping[str, Tensor], prefix: str, num_experts: int) -> dict[str, Tensor]:
    """A published layer by the names of ``MtpLayer``: experts in one tensor, the decoder layer as ``mtp_block``."""
    plain = {name.removeprefix(prefix): tensor for name, tensor in weight.items() if name.startswith(prefix)}
    state = {}
    for name, tensor in plain.items():
        if name.startswith(("enorm", "hnorm", "eh_proj")):
            state[name] = tensor
        elif name == "shared_head.norm.weight":
            state["post_norm.weight"] = tensor
        elif not name.startswith(("shared_head", "embed_tokens", "mlp.experts")):
            state[f"mtp_block.{name}"] = tensor

    def experts(part: str) -> Tensor:
        return torch.stack([plain[f"mlp.experts.{i}.{part}.weight"] for i in range(num_experts)])

    state["mtp_block.mlp.experts.gate_up_proj"] = torch.cat((experts("gate_proj"), experts("up_proj")), 1)
    state["mtp_block.mlp.experts.down_proj"] = experts("down_proj")
    return state


class WrittenMimo:
    """MiMo's head, as in the layer that is published with it: layer k reads what layer k - 1 gave for the row
    before (the target's state for layer 0); a draft token at depth d is read by layer d, or by the last."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.config, self.tensors = config, tensors
        self.embedding = tensors["model.embed_tokens.weight"].double()
        self.lm_head = tensors["lm_head.weight"].double()

    def run(self, tokens: Sequence[int], states: Tensor, path: Sequence[int]) -> tuple[Tensor, Tensor]:
        text, last = [*tokens, *path], self.config["num_nextn_predict_layers"] - 1
        depths = [max(0, position - len(tokens) + 1) for position in range(1, len(text))]
        below: list[Tensor] = []
        for number in range(last + 1):
            layer = WrittenLayer(self.config, self.tensors, head_prefix(self.config, number))
            outs: list[Tensor] = []
            for row, depth in enumerate(depths):
                if depth > number < last:
                    break
                if depth > number:
                    state = outs[-1]
                elif number:
                    state = below[row - 1] if row else torch.zeros(HIDDEN, dtype=torch.float64)
                else:
                    state = states[row]
                outs.append(self.row(layer, text[row + 1], state, row))
            below = outs
            if depths[-1] == number or number == last:
                return self.lm_head @ outs[-1], outs[-1]
        raise AssertionError("a path ends at some layer")

    def row(self, layer: WrittenLayer, token: int, state: Tensor, row: int) -> Tensor:
        embedded = self.embedding[token] if row else torch.zeros(HIDDEN, dtype=torch.float64)
        sides = (layer.norm(state, layer.of("hidden_layernorm")), layer.norm(embedded, layer.of("token_layernorm")))
        x = layer.of("input_proj") @ torch.cat(sides)
        return layer.norm(layer.row(x, layer.norm(x, layer.of("input_layernorm")), row), layer.of("final_layernorm"))
