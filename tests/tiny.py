"""A model small enough for every test: two layers, a byte vocabulary, fixed random weights, a real model folder.

``noise`` perturbs every weight by seeded Gaussian noise relative to the tensor's spread: a draft model whose agreement
with the target is a knob. Share of positions with the same greedy token (400 sampled tokens, llama, seed 0), and mean
overlap of the two distributions at temperature 1:

noise      0.02   0.05   0.1    0.2    0.4
greedy     0.96   0.90   0.81   0.68   0.54
overlap    0.95   0.89   0.80   0.68   0.52

The llama's greedy text does not loop within 200 tokens; its entropy at temperature 1 is between 1 and 2 nats a token.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|pad|>", "<|unk|>")
BOS, EOS, PAD, UNK = 256, 257, 258, 259
VOCAB = 260
KINDS = ("llama", "mistral", "qwen2", "qwen3")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_config(kind: str = "llama", vocab: int = VOCAB, **changes: Any) -> dict[str, Any]:
    """The content of a ``config.json``; ``changes`` replace fields."""
    assert kind in KINDS, kind
    config: dict[str, Any] = {
        "architectures": [{"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
                           "qwen3": "Qwen3ForCausalLM"}[kind]],
        "model_type": kind, "vocab_size": vocab, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24 if kind == "qwen3" else 12,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False,
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "dtype": "float32",
    }
    if kind == "mistral":
        config["sliding_window"] = None
    if kind in ("llama", "qwen3"):
        config["attention_bias"] = False
    return config | changes


def with_template(template: str, tiny_folder: Path, folder: Path) -> Path:
    """``folder``: a copy of ``tiny_folder`` with another chat template."""
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def write_tiny_model(folder: str | Path, kind: str = "llama", vocab: int = VOCAB, seed: int = 0, noise: float = 0.0,
                     peaky: float = 1.0, **changes: Any) -> Path:
    """Write a model folder and return it. peaky scales the logits: above 1 sampling is closer to greedy."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(kind, vocab, **changes)
    save_file(tiny_tensors(config, seed, noise, peaky), folder / "model.safetensors", metadata={"format": "pt"})
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": [EOS], "pad_token_id": PAD})
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIALS[0], "eos_token": SPECIALS[1],
        "pad_token": SPECIALS[2], "unk_token": SPECIALS[3], "chat_template": CHAT_TEMPLATE,
        "model_max_length": config["max_position_embeddings"], "clean_up_tokenization_spaces": False,
    })
    return folder


def store_as_the_head(folder: Path) -> None:
    """Write a tied model as safetensors' own ``save_model`` does: of two names of a tensor the first in the
    alphabet."""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tiny_tensors(config: dict[str, Any], seed: int = 0, noise: float = 0.0,
                 peaky: float = 1.0) -> dict[str, torch.Tensor]:
    """Random weights of a config by their names in a checkpoint, float32."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _weight(name, shape, generator, peaky) for name, shape in tiny_shapes(config).items()}
    perturb = torch.Generator().manual_seed(seed + 1)
    if noise:
        for tensor in tensors.values():
            tensor += noise * tensor.std() * torch.randn(tensor.shape, generator=perturb)
    return tensors


def tiny_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a config asks for."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes |= {f"{attention}.q_proj.weight": (q, hidden), f"{attention}.k_proj.weight": (kv, hidden),
                   f"{attention}.v_proj.weight": (kv, hidden), f"{attention}.o_proj.weight": (hidden, q)}
        if config["model_type"] == "qwen2":
            shapes |= {f"{attention}.{name}_proj.bias": (width,) for name, width in (("q", q), ("k", kv), ("v", kv))}
        if config["model_type"] == "qwen3":
            shapes |= {f"{attention}.{name}_norm.weight": (size,) for name in "qk"}
        shapes |= {f"{mlp}.gate_proj.weight": (inner, hidden), f"{mlp}.up_proj.weight": (inner, hidden),
                   f"{mlp}.down_proj.weight": (hidden, inner)}
        shapes |= {f"model.layers.{i}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def tiny_tokenizer(longer: Sequence[str] = ()) -> Tokenizer:
    """Byte b is token b; then the specials; then ``longer`` ASCII texts, each behind all that it begins with."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: _byte_of(letter) for letter in letters} | {s: 256 + i for i, s in enumerate(SPECIALS)}
    merges = dict.fromkeys((text[:end].replace(" ", "Ġ"), text[end].replace(" ", "Ġ"))
                           for text in longer for end in range(1, len(text)))
    vocab |= {left + right: VOCAB + place for place, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab, [*merges], unk_token=SPECIALS[3]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def _weight(name: str, shape: tuple[int, ...], generator: torch.Generator, peaky: float) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if len(shape) == 1:
        return 0.3 * noise
    # Attention loud enough that the text depends on more than the last token; a few tokens stand out in the head, so
    # that the best logit leads by more than a little noise.
    if name.startswith("lm_head"):
        noise *= torch.randn((shape[0], 1), generator=generator).mul(0.5).exp()
    gain = {"q_proj": 1.5, "k_proj": 1.5, "lm_head": 2.0 * peaky}
    return noise * gain.get(name.split(".")[-2], 1.0) * (1.0 if "embed" in name else shape[1] ** -0.5)


def _byte_of(letter: str) -> int:
    # The byte-level alphabet shows printable bytes as themselves and the rest, in order, from code point 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if ord(letter) < 256:
        return ord(letter)
    return [b for b in range(256) if b not in printable][ord(letter) - 256]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
