"""GGUF files of the Llama family, and model folders made of them, as transformers and this project's engine read them.

Rules:
1. Every value is checked for presence, type and size before it is used; a ModelError names the key or the tensor.
2. Weights are stored as float32: bfloat16 or float16 would round dequantised Q4_1 values again.
3. The rows of the query and key projections are reordered from llama.cpp's interleaved rotary order to transformers'.
4. The tokenizer splits digits one by one, as SmolLM's own does; the GGUF only names that rule (``pre = smollm``).
5. Characters that the vocabulary cannot express (SmolLM lacks six control characters) are dropped, never replaced by a
   special token.
6. Tensors are written one after the other, so memory holds one of them, not the whole model.

Formats: GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), safetensors
(https://github.com/huggingface/safetensors), the config.json of transformers' LlamaForCausalLM.
It knows nothing about where the file comes from and where the folder goes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from slipstream.base.errors import ModelError

Floats = NDArray[np.float32]
Value = TypeVar("Value", str, int, float, bool)

# The gguf library's reader checks nothing: a damaged file raises one of these.
READ_ERRORS = (ValueError, KeyError, IndexError, TypeError, OverflowError, OSError, AttributeError, RecursionError)
MAX_READS = 1 << 23  # reads of a value or a length in a header: enough for two million tokens of four reads each
CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
MAX_DIMENSION = 1 << 20  # the largest size that the metadata may name
HEADER_ALIGN = 64


class BoundedReader(gguf.GGUFReader):
    """The gguf library's reader with bounds. The library believes every length in a file, so a file of some kilobytes
    could keep it busy for hours. This one raises ValueError at the end of the file, or after MAX_READS reads."""

    def __init__(self, path: Path) -> None:
        self._num_reads = 0
        super().__init__(path)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> NDArray[Any]:
        self._num_reads += 1
        if self._num_reads > MAX_READS:
            raise ValueError(f"its header holds more than {MAX_READS} values")
        if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError("it ends in the midst of its header or of a tensor")
        return super()._get(offset, dtype, count, override_order)


class GgufFile:
    """One open file, memory-mapped. ``tensor_shapes`` holds name -> shape in row-major (numpy) order."""

    __slots__ = ("_fields", "_name", "_tensors", "tensor_shapes")

    def __init__(self, path: Path) -> None:
        """Raises ModelError when ``path`` is not a readable GGUF file."""
        self._name = path.name
        try:
            reader = BoundedReader(path)
        except READ_ERRORS as error:
            raise ModelError(f"{path.name}: no GGUF file, or a damaged one: {error}") from error
        self._fields: dict[str, Any] = dict(reader.fields)
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        self.tensor_shapes: dict[str, tuple[int, ...]] = {
            name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()
        }

    def value(self, key: str, kind: type[Value]) -> Value:
        """One metadata value. Raises ModelError when it is missing, of another type, or not finite."""
        found = self._contents(key)
        if kind is float and isinstance(found, int) and not isinstance(found, bool):
            found = float(found)
        if type(found) is not kind or (isinstance(found, float) and not math.isfinite(found)):
            raise ModelError(f"{self._name}: {key}: expected {kind.__name__}, found {type(found).__name__}")
        return found

    def values(self, key: str, kind: type[Value]) -> list[Value]:
        """One metadata array. Raises ModelError like ``value``."""
        found = self._contents(key)
        if not isinstance(found, list) or not all(type(item) is kind for item in found):
            raise ModelError(f"{self._name}: {key}: expected an array of {kind.__name__}")
        return found

    def tensor(self, name: str) -> Floats:
        """One tensor, dequantised to float32, with its shape in ``tensor_shapes``. Raises ModelError."""
        if name not in self._tensors:
            raise ModelError(f"{self._name}: no tensor {name}")
        tensor, shape = self._tensors[name], self.tensor_shapes[name]
        try:
            values: Floats = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            return values.reshape(shape)
        except (*READ_ERRORS, NotImplementedError) as error:
            raise ModelError(f"{self._name}: {name}: {tensor.tensor_type.name} of shape {shape}: {error}") from error

    def _contents(self, key: str) -> object:
        if key not in self._fields:
            raise ModelError(f"{self._name}: no metadata key {key}")
        try:
            found: object = self._fields[key].contents()
        except READ_ERRORS as error:
            raise ModelError(f"{self._name}: {key}: damaged: {error}") from error
        return found


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The sizes of a Llama, as the metadata gives them."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float
    norm_eps: float


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the folder and its name in the GGUF. interleaved_heads: the number of heads whose rows are to be
    reordered (rule 3); 0: none."""

    source: str
    name: str
    shape: tuple[int, ...]
    interleaved_heads: int = 0


def convert(source: GgufFile, folder: Path, progress: Callable[[int, int], None]) -> dict[str, dict[str, Any]]:
    """Write tokenizer.json and model.safetensors into the existing ``folder``. Returns the contents of its other files
    by name: config.json, generation_config.json and tokenizer_config.json.

    progress: called with the bytes of weights written so far, and their total. Raises ModelError before weights are
    written, if the file is not a Llama with a GPT-2 style tokenizer, or its tensors do not match its metadata.
    """
    dimensions = read_dimensions(source)
    tied = "output.weight" not in source.tensor_shapes
    specs = tensor_specs(dimensions, tied)
    _check_tensors(source, specs)
    tokenizer = build_tokenizer(source, dimensions.vocab)
    ids = {name: _token_id(source, name, dimensions.vocab) for name in ("bos", "eos", "padding")}
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    contents = {
        "tokenizer_config.json": tokenizer_config(source, tokenizer, ids, dimensions),
        "config.json": model_config(dimensions, ids, tied),
        "generation_config.json": {"bos_token_id": ids["bos"], "eos_token_id": [ids["eos"]],
                                   "pad_token_id": ids["padding"]}}
    write_weights(source, specs, folder / "model.safetensors", progress)
    return contents


def read_dimensions(source: GgufFile) -> Dimensions:
    """The sizes in the metadata. Raises ModelError for another architecture, or for sizes that do not fit together."""
    architecture = source.value("general.architecture", str)
    if architecture != "llama":
        raise ModelError(f"general.architecture: '{architecture}' is not supported, only 'llama'")

    def size(key: str) -> int:
        found = source.value(key, int)
        if not 0 < found <= MAX_DIMENSION:
            raise ModelError(f"{key}: {found} is not between 1 and {MAX_DIMENSION}")
        return found

    heads, hidden = size("llama.attention.head_count"), size("llama.embedding_length")
    kv_heads, head_dim = size("llama.attention.head_count_kv"), size("llama.rope.dimension_count")
    if head_dim % 2 or heads % kv_heads or heads * head_dim != hidden:
        raise ModelError(f"llama.attention.head_count: {heads} heads ({kv_heads} for keys) of {head_dim} do not make "
                         f"up llama.embedding_length {hidden}")
    return Dimensions(
        layers=size("llama.block_count"), hidden=hidden, ffn=size("llama.feed_forward_length"), heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, vocab=size("llama.vocab_size"), context=size("llama.context_length"),
        rope_theta=_shortest_decimal(source.value("llama.rope.freq_base", float)),
        norm_eps=_shortest_decimal(source.value("llama.attention.layer_norm_rms_epsilon", float)),
    )


def _shortest_decimal(value: float) -> float:
    """The shortest decimal for a float32: 1e-05 for 9.999999747378752e-06, which is the same float32."""
    return float(f"{value:.7g}")


def tensor_specs(d: Dimensions, tied: bool) -> list[TensorSpec]:
    """Every tensor of a Llama of these sizes, in the order of the folder's safetensors file."""
    query, key = d.heads * d.head_dim, d.kv_heads * d.head_dim
    specs = [TensorSpec("token_embd.weight", "model.embed_tokens.weight", (d.vocab, d.hidden))]
    for i in range(d.layers):
        gguf_prefix, prefix = f"blk.{i}.", f"model.layers.{i}."
        specs += [
            TensorSpec(f"{gguf_prefix}attn_norm.weight", f"{prefix}input_layernorm.weight", (d.hidden,)),
            TensorSpec(f"{gguf_prefix}attn_q.weight", f"{prefix}self_attn.q_proj.weight", (query, d.hidden), d.heads),
            TensorSpec(f"{gguf_prefix}attn_k.weight", f"{prefix}self_attn.k_proj.weight", (key, d.hidden), d.kv_heads),
            TensorSpec(f"{gguf_prefix}attn_v.weight", f"{prefix}self_attn.v_proj.weight", (key, d.hidden)),
            TensorSpec(f"{gguf_prefix}attn_output.weight", f"{prefix}self_attn.o_proj.weight", (d.hidden, query)),
            TensorSpec(f"{gguf_prefix}ffn_norm.weight", f"{prefix}post_attention_layernorm.weight", (d.hidden,)),
            TensorSpec(f"{gguf_prefix}ffn_gate.weight", f"{prefix}mlp.gate_proj.weight", (d.ffn, d.hidden)),
            TensorSpec(f"{gguf_prefix}ffn_up.weight", f"{prefix}mlp.up_proj.weight", (d.ffn, d.hidden)),
            TensorSpec(f"{gguf_prefix}ffn_down.weight", f"{prefix}mlp.down_proj.weight", (d.hidden, d.ffn)),
        ]
    specs.append(TensorSpec("output_norm.weight", "model.norm.weight", (d.hidden,)))
    return specs if tied else [*specs, TensorSpec("output.weight", "lm_head.weight", (d.vocab, d.hidden))]


def _check_tensors(source: GgufFile, specs: list[TensorSpec]) -> None:
    wanted = {spec.source: spec.shape for spec in specs}
    for name, shape in wanted.items():
        found = source.tensor_shapes.get(name)
        if found != shape:
            raise ModelError(f"tensor {name}: expected shape {shape}, found {found or 'nothing'}")
    if unknown := sorted(source.tensor_shapes.keys() - wanted.keys()):
        raise ModelError(f"tensor {unknown[0]}: a Llama has no such tensor")


def deinterleave(rows: Floats, heads: int) -> Floats:
    """Reorder rows, float32 [heads * D, in], from llama.cpp's rotary order (pairs side by side) to transformers' (two
    halves)."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def write_weights(source: GgufFile, specs: list[TensorSpec], path: Path, progress: Callable[[int, int], None]) -> None:
    """Write the safetensors file ``path``: float32, little-endian, in the order of ``specs``."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for spec in specs:
        end = total + 4 * math.prod(spec.shape)
        header[spec.name] = {"dtype": "F32", "shape": spec.shape, "data_offsets": [total, end]}
        total = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGN)
    done = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in specs:
            values = source.tensor(spec.source)
            if spec.interleaved_heads:
                values = deinterleave(values, spec.interleaved_heads)
            file.write(values.astype("<f4", copy=False).data)
            done += values.nbytes
            progress(done, total)


def build_tokenizer(source: GgufFile, vocab_size: int) -> Tokenizer:
    """The byte-level BPE tokenizer that the metadata describes. Raises ModelError for any other kind of tokenizer."""
    kind, rule = source.value("tokenizer.ggml.model", str), source.value("tokenizer.ggml.pre", str)
    if (kind, rule) != ("gpt2", "smollm"):
        raise ModelError(f"tokenizer.ggml.pre: '{kind}/{rule}' is not supported, only 'gpt2/smollm'")
    tokens = source.values("tokenizer.ggml.tokens", str)
    types = source.values("tokenizer.ggml.token_type", int)
    merges = [tuple(merge.split(" ")) for merge in source.values("tokenizer.ggml.merges", str)]
    vocab = {token: i for i, token in enumerate(tokens)}
    if not len(vocab) == len(tokens) == len(types) == vocab_size:
        raise ModelError(f"tokenizer.ggml.tokens: {len(vocab)} different tokens for a vocabulary of {vocab_size}")
    pairs = [(merge[0], merge[1]) for merge in merges if len(merge) == 2]
    if len(pairs) != len(merges) or not all(a in vocab and b in vocab and a + b in vocab for a, b in pairs):
        raise ModelError("tokenizer.ggml.merges: a merge is not a pair of tokens that make a token")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [token for token, found in zip(tokens, types, strict=True) if found == wanted]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in added])
    return tokenizer


def _token_id(source: GgufFile, name: str, vocab_size: int) -> int:
    key = f"tokenizer.ggml.{name}_token_id"
    found = source.value(key, int)
    if not 0 <= found < vocab_size:
        raise ModelError(f"{key}: {found} is outside the vocabulary of {vocab_size}")
    return found


def tokenizer_config(source: GgufFile, tokenizer: Tokenizer, ids: dict[str, int], d: Dimensions) -> dict[str, Any]:
    """The content of tokenizer_config.json. ids: of the special tokens ``bos``, ``eos`` and ``padding``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.id_to_token(ids["bos"]),
        "eos_token": tokenizer.id_to_token(ids["eos"]),
        "pad_token": tokenizer.id_to_token(ids["padding"]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": d.context,
        "chat_template": source.value("tokenizer.chat_template", str),
    }


def model_config(d: Dimensions, ids: dict[str, int], tied: bool) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
        "hidden_size": d.hidden, "intermediate_size": d.ffn, "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads, "num_key_value_heads": d.kv_heads, "head_dim": d.head_dim,
        "vocab_size": d.vocab, "max_position_embeddings": d.context, "rms_norm_eps": d.norm_eps,
        "rope_theta": d.rope_theta, "rope_scaling": None, "hidden_act": "silu", "tie_word_embeddings": tied,
        "attention_bias": False, "mlp_bias": False,
        "bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["padding"],
    }
