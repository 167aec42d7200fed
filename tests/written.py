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

    def normed(self, name: str, x: Tensor) -> Tensor:
        """Queries or keys, of a Qwen3's layer."""
        weight = self.weight.get(f"{self.prefix}.self_attn.{name}_norm.weight")
        return x if weight is None else self.norm(x, weight)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        out = self.of(f"mlp.{name}_proj") @ x
        bias = self.weight.get(f"{self.prefix}.mlp.{name}_proj.bias")
        return out if bias is None else out + bias

    def row(self, residual: Tensor, attention_input: Tensor, position: int) -> Tensor:
        """The layer's output for one row, which later rows will see."""
        q, k, v = (self.projected(name, attention_input).view(-1, self.size) for name in "qkv")
        self.keys.append(self.rotated(self.normed("k", k), position))
        self.values.append(v)
        mixed = []
        for number, query in enumerate(self.rotated(self.normed("q", q), position)):
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
        further = [WrittenLayer(self.config, self.tensors, f"layers.{number}")
                   for number in range(1, self.config["num_hidden_layers"])]
        weight, text = layer.weight, [*tokens, *path]
        out = final = torch.zeros(HIDDEN, dtype=torch.float64)
        for row, position in enumerate(range(first, len(text))):
            state = self.projected(layer, states[row]) if row < len(states) else out
            token = layer.norm(weight["embed_tokens.weight"][text[position]], layer.of("input_layernorm"))
            normed = layer.norm(state, layer.of("hidden_norm"))
            out = layer.row(normed if self.norm_before_residual else state, torch.cat((token, normed)), position - 1)
            for plain in further:
                out = plain.row(out, plain.norm(out, plain.of("input_layernorm")), position - 1)
            final = layer.norm(out, weight["norm.weight"])
            out = final if self.config.get("norm_output") else out
        return weight["lm_head.weight"] @ final, out

    def projected(self, layer: WrittenLayer, state: Tensor) -> Tensor:
        if "input_norm.weight" in layer.weight:
            state = layer.norm(state, layer.weight["input_norm.weight"])
        if "fc_norm.0.weight" in layer.weight:
            state = torch.cat([layer.norm(part, layer.weight[f"fc_norm.{i}.weight"])
                               for i, part in enumerate(state.chunk(len(state) // 48))])
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


class WrittenBlock:
    """A DFlash or DSpark head, by its published names, with the target's embedding and lm_head where it has none."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], from_anchor: bool,
                 embedding: Tensor | None = None, lm_head: Tensor | None = None) -> None:
        self.config = dict(config)
        self.layer_config = {"rope_theta": 10000.0} | dict(config.get("transformer_layer_config", config))
        self.weight = {name: t.double() for name, t in tensors.items() if t.is_floating_point()}
        self.from_anchor, self.size = from_anchor, config["block_size"]
        self.kinds = self.layer_config["layer_types"]
        self.mask = config.get("mask_token_id", config.get("dflash_config", {}).get("mask_token_id"))
        vocab = self.layer_config["vocab_size"]
        self.ids = (tensors["d2t"] + torch.arange(len(tensors["d2t"])) if "d2t" in tensors else torch.arange(vocab))
        self.embedding = self.weight.get("embed_tokens.weight", embedding).double()
        self.lm_head = (self.weight["lm_head.weight"] if "lm_head.weight" in self.weight
                        else lm_head.double()[self.ids])
        self.norms = WrittenLayer(self.layer_config, tensors, "layers.0")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.norms.norm(x, self.weight[f"{name}.weight"])

    def slots(self, anchor: int, states: Tensor, first: int = 0) -> list[Tensor]:
        """What the slots of a block end as, behind the target's states [n, taps * H] of positions first ...; those of
        NaN never came."""
        context = [self.norm(self.weight["fc.weight"] @ state, "hidden_norm") for state in states]
        at = first + len(context)
        xs = [self.embedding[token] for token in [anchor] + [self.mask] * (self.size - 1)]
        for number in range(self.layer_config["num_hidden_layers"]):
            xs = self.layer(f"layers.{number}", context, xs, first, at, self.kinds[number] == "sliding_attention")
        return [self.norm(x, "norm") for x in xs]

    def sees(self, slot: int, position: int, at: int, slides: bool) -> bool:
        """Whether a slot of the block that begins at ``at`` sees what is at a position."""
        if not slides:
            return True
        window = self.config.get("dflash_config", {}).get("swa_window_size") or self.layer_config["sliding_window"]
        if self.config.get("sliding_window_non_causal") or self.config.get("is_causal") is False:
            return position >= at - window
        return at + slot - window < position <= at + slot

    def layer(self, name: str, context: list[Tensor], xs: list[Tensor], first: int, at: int,
              slides: bool) -> list[Tensor]:
        written = WrittenLayer(self.layer_config, self.weight, name)

        def heads(part: str, x: Tensor, position: int) -> Tensor:
            rows = written.projected(part, x).view(-1, written.size)
            if part == "v":
                return rows
            return written.rotated(written.norm(rows, self.weight[f"{name}.self_attn.{part}_norm.weight"]), position)

        inputs = [written.norm(x, written.of("input_layernorm")) for x in xs]
        seen = [(c, first + i) for i, c in enumerate(context) if not c.isnan().any()]
        seen += [(x, at + i) for i, x in enumerate(inputs)]
        keys, values = ([heads(part, x, position) for x, position in seen] for part in "kv")
        outs = []
        for place, (x, read) in enumerate(zip(xs, inputs, strict=True)):
            mixed, own = [], [i for i, (_, position) in enumerate(seen) if self.sees(place, position, at, slides)]
            for number, query in enumerate(heads("q", read, at + place)):
                group = number // (written.heads // written.kv_heads)
                shares = (torch.stack([query @ keys[i][group] for i in own]) / written.size**0.5).softmax(0)
                mixed.append(sum(p * values[i][group] for p, i in zip(shares, own, strict=True)))
            out = x + written.projected("o", torch.cat(mixed))
            y = written.norm(out, written.of("post_attention_layernorm"))
            outs.append(out + written.mlp("down", torch.nn.functional.silu(written.mlp("gate", y)) *
                                          written.mlp("up", y)))
        return outs

    def bias(self, slots: list[Tensor], before: Sequence[int], place: int) -> Tensor | None:
        """Of the prediction ``place``, where the tokens from the newest on are ``before``."""
        if not self.config.get("markov_rank"):
            return None
        kind, w1 = self.config["markov_head_type"], self.weight["markov_head.markov_w1.weight"]
        told = w1[before[place]]
        if kind == "gated":
            read = torch.cat((slots[place + (not self.from_anchor)], told))
            gate = self.weight["markov_head.gate_proj.weight"] @ read + self.weight["markov_head.gate_proj.bias"]
            told = gate.sigmoid() * told
        if kind == "rnn":
            carried, out = torch.zeros(len(told), dtype=torch.float64), told
            steps = [(slots[k], before[k]) for k in range(place + 1)] if self.from_anchor else [
                (slots[k], before[max(0, k - 1)]) for k in range(place + 2)]
            for x, token in steps:
                joint = self.weight["markov_head.joint_proj.weight"] @ torch.cat((carried, w1[token], x))
                gate, new, out = (joint + self.weight["markov_head.joint_proj.bias"]).chunk(3)
                carried = gate.sigmoid() * carried + (1 - gate.sigmoid()) * new.tanh()
            told = out.tanh()
        return self.weight["markov_head.markov_w2.weight"] @ told

    def children(self, path: tuple[int, ...], tokens: Sequence[int], states: Tensor, topk: int = 1, first: int = 0,
                 candidates: int = 64) -> tuple[list[int], list[float]]:
        """tokens: all committed; the best children of a path of draft tokens, none below the last slot."""
        place, anchor = len(path), tokens[-1]
        if place >= self.size - (not self.from_anchor):
            return [], []
        slots = self.slots(anchor, states, first)
        x = slots[place + (not self.from_anchor)]
        shares, bias = (self.lm_head @ x).softmax(0), self.bias(slots, [anchor, *path], place)
        best = shares.topk(min(candidates, len(shares))).indices
        scores = shares[best].float().double().log() if bias is None else None
        if scores is None:
            raised = shares[best] * bias[best].exp()
            scores = (raised / (raised.sum() + 1 - shares[best].sum())).log()
        if self.config.get("enable_confidence_head"):
            read = torch.cat((x, self.weight["markov_head.markov_w1.weight"][[anchor, *path][place]])) if self.config[
                "confidence_head_with_markov"] else x
            scores = scores + torch.nn.functional.logsigmoid(
                self.weight["confidence_head.proj.weight"][0] @ read + self.weight["confidence_head.proj.bias"][0])
        scores, order = scores.topk(topk)
        return self.ids[best[order]].tolist(), scores.tolist()


class WrittenPard:
    """A Llama that fills in masks behind the newest token, by its tensor names."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], count: int) -> None:
        self.config, self.tensors = config, {name: t.double() for name, t in tensors.items()}
        self.mask, self.count = config["pard_token"], count

    def children(self, path: tuple[int, ...], tokens: Sequence[int], topk: int = 1,
                 seen: int = 0) -> tuple[list[int], list[float]]:
        """What the mask as many places below the newest token as ``path`` is long says; seen: newest tokens that the
        model sees, 0 for all."""
        if len(path) > self.count:
            return [], []
        xs = [self.tensors["model.embed_tokens.weight"][token]
              for token in [*tokens[-seen:], *[self.mask] * self.count]]
        for number in range(self.config["num_hidden_layers"]):
            layer = WrittenLayer(self.config, self.tensors, f"model.layers.{number}")
            xs = [layer.row(x, layer.norm(x, layer.of("input_layernorm")), at) for at, x in enumerate(xs)]
        final = layer.norm(xs[len(xs) - 1 - self.count + len(path)], self.tensors["model.norm.weight"])
        scores, best = (self.tensors["lm_head.weight"] @ final).log_softmax(0).topk(topk)
        return best.tolist(), scores.tolist()
