"""Draft heads written out straight in float64, as their papers have them: one row after the other, no batch, no cache,
no slots. What the drafters' logits are held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tests.eagle_folder import HIDDEN, eagle2_config, eagle2_tensors, eagle_config, eagle_tensors

Tensor = torch.Tensor


class WrittenLayer:
    """One Llama layer over rows that come one at a time."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> None:
        self.weight = {name: t.double() for name, t in tensors.items() if t.is_floating_point()}
        self.prefix, self.eps, self.theta = prefix, config["rms_norm_eps"], config.get("rope_theta", 10000.0)
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.size = config.get("head_dim", config["hidden_size"] // self.heads)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def of(self, name: str) -> Tensor:
        return self.weight[f"{self.prefix}.{name}.weight"]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * weight

    def rotated(self, x: Tensor, position: int) -> Tensor:
        half = torch.arange(0, self.size, 2, dtype=torch.int64).float() / self.size
        angle = torch.tensor([float(position)]) * (1.0 / self.theta**half)  # float32, as checkpoints are trained
        cos, sin = angle.cos().double(), angle.sin().double()
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def projected(self, name: str, x: Tensor) -> Tensor:
        out = self.of(f"self_attn.{name}_proj") @ x
        bias = self.weight.get(f"{self.prefix}.self_attn.{name}_proj.bias")
        return out if bias is None else out + bias

    def mlp(self, name: str, x: Tensor) -> Tensor:
        out = self.of(f"mlp.{name}_proj") @ x
        bias = self.weight.get(f"{self.prefix}.mlp.{name}_proj.bias")
        return out if bias is None else out + bias

    def row(self, residual: Tensor, attention_input: Tensor, position: int) -> Tensor:
        """The layer's output for one row, which later rows will see."""
        q, k, v = (self.projected(name, attention_input).view(-1, self.size) for name in "qkv")
        self.keys.append(self.rotated(k, position))
        self.values.append(v)
        mixed = []
        for number, query in enumerate(self.rotated(q, position)):
            group = number // (self.heads // self.kv_heads)
            scores = torch.stack([query @ key[group] for key in self.keys]) / self.size**0.5
            mixed.append(sum(p * value[group] for p, value in zip(scores.softmax(0), self.values, strict=True)))
        out = residual + self.projected("o", torch.cat(mixed))
        y = self.norm(out, self.of("post_attention_layernorm"))
        return out + self.mlp("down", torch.nn.functional.silu(self.mlp("gate", y)) * self.mlp("up", y))


class WrittenEagle3:
    """An EAGLE-3 head, by the authors' tensor names."""

    def __init__(self, config: Mapping[str, Any] | None = None, tensors: Mapping[str, Tensor] | None = None,
                 prefix: str = "midlayer", norm_before_residual: bool = False) -> None:
        self.config = dict(config or eagle_config())
        self.tensors = dict(tensors or eagle_tensors(self.config))
        self.prefix, self.norm_before_residual = prefix, norm_before_residual
        self.ids = self.tensors["d2t"] + torch.arange(len(self.tensors["d2t"]))

    def run(self, tokens: Sequence[int], states: Tensor, path: Sequence[int], first: int = 1) -> tuple[Tensor, Tensor]:
        """tokens: all committed; states: [base - first, 3 Ht] target states of positions first - 1 ..; path: draft
        tokens. The logits and the output of the last row."""
        layer = WrittenLayer(self.config, self.tensors, self.prefix)
        weight, text = layer.weight, [*tokens, *path]
        out = torch.zeros(HIDDEN, dtype=torch.float64)
        for row, position in enumerate(range(first, len(text))):
            state = self.projected(layer, states[row]) if row < len(states) else out
            token = layer.norm(weight["embed_tokens.weight"][text[position]], layer.of("input_layernorm"))
            normed = layer.norm(state, layer.of("hidden_norm"))
            out = layer.row(normed if self.norm_before_residual else state, torch.cat((token, normed)), position - 1)
        return weight["lm_head.weight"] @ layer.norm(out, weight["norm.weight"]), out

    def projected(self, layer: WrittenLayer, state: Tensor) -> Tensor:
        if "input_norm.weight" in layer.weight:
            state = layer.norm(state, layer.weight["input_norm.weight"])
        out = layer.weight["fc.weight"] @ state
        return out + layer.weight["fc.bias"] if "fc.bias" in layer.weight else out

    def children(self, path: tuple[int, ...], tokens: Sequence[int], states: Tensor, topk: int = 1,
                 first: int = 1) -> tuple[list[int], list[float]]:
        scores, columns = self.run(tokens, states, path, first)[0].log_softmax(0).topk(topk)
        return self.ids[columns].tolist(), scores.tolist()


class WrittenEagle2:
    """An EAGLE-1 or EAGLE-2 head, by the authors' tensor names, with the target's embedding and lm_head."""

    def __init__(self, embedding: Tensor, lm_head: Tensor, config: Mapping[str, Any] | None = None,
                 tensors: Mapping[str, Tensor] | None = None) -> None:
        self.config = dict(config or eagle2_config())
        self.tensors = dict(tensors or eagle2_tensors(self.config))
        self.embedding, self.lm_head = embedding.double(), lm_head.double()

    def run(self, tokens: Sequence[int], states: Tensor, path: Sequence[int], first: int = 1) -> tuple[Tensor, Tensor]:
        """As ``WrittenEagle3.run``; states: [base - first, H]."""
        layer = WrittenLayer(self.config, self.tensors, "layers.0")
        weight, text = layer.weight, [*tokens, *path]
        out = torch.zeros(self.config["hidden_size"], dtype=torch.float64)
        for row, position in enumerate(range(first, len(text))):
            state = states[row] if row < len(states) else out
            x = weight["fc.weight"] @ torch.cat((self.embedding[text[position]], state))
            if "fc.bias" in weight:
                x = x + weight["fc.bias"]
            out = layer.row(x, x, position - 1)
        return self.lm_head @ out, out

    def children(self, path: tuple[int, ...], tokens: Sequence[int], states: Tensor, topk: int = 1,
                 first: int = 1, ids: Tensor | None = None) -> tuple[list[int], list[float]]:
        """ids: int64 [K], the token map."""
        logits = self.run(tokens, states, path, first)[0]
        columns = torch.arange(len(logits)) if ids is None else ids
        scores, best = logits[columns].log_softmax(0).topk(topk)
        return columns[best].tolist(), scores.tolist()
