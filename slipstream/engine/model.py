"""A model's dimensions and tensors, read from a Hugging Face folder, and the protocol that all engines implement.

Rules:
1. A field that is missing, of the wrong type or not supported is a ModelError that names the file and the field.
2. Nothing is guessed from a model's name; flags come from ``model_type`` and from fields.
3. Only safetensors are read, never pickles; shards follow ``model.safetensors.index.json``. A missing file, tensor or a
   wrong shape is a ModelError that names it.

It knows nothing about where folders come from (see ``slipstream.models``) or what tensors are for; of layers and
batches it knows the types only.
Format: ``config.json`` and ``generation_config.json`` as transformers writes them, nested ``rope_parameters`` included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from slipstream.base.errors import ModelError, first_line
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.fp8_blocks import SCALE_INV, Block, block_of, widened
from slipstream.engine.kv import KVPool
from slipstream.models.folder import end_tokens, read_error_text, read_json
from slipstream.observe.log import logger

Map = Callable[[torch.Tensor], torch.Tensor]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of all models of one ``model_type``."""

    qkv_bias: bool  # q, k and v have biases
    qk_norm: bool
    defaults: Mapping[str, Any]  # transformers' defaults for missing fields; a field that is null is not missing


VISION_TYPES = ("mistral3",)  # vision models of which only the text decoder is read: Mistral Small 3.1
VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.")  # of their tensors outside the text decoder
MAX_INTEGER = 1 << 24  # the largest integer that a field may hold
ORIGINAL_CONTEXT = "original_max_position_embeddings"  # the field with the context before positions were stretched
QWEN: Mapping[str, Any] = MappingProxyType({"num_key_value_heads": 32, "max_position_embeddings": 32768})
FAMILIES: Mapping[str, Family] = MappingProxyType({
    "llama": Family(False, False, {}),
    "mistral": Family(False, False, {"num_key_value_heads": 8, "max_position_embeddings": 131072,
                                     "sliding_window": 4096}),
    "mimo": Family(True, False, QWEN),
    "qwen2": Family(True, False, QWEN),
    "qwen3": Family(False, True, {**QWEN, "head_dim": 128}),
})


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. ``kind`` is "linear", "llama3" or "yarn"."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0  # llama3's
    high_freq_factor: float = 4.0
    original_context: int = 8192  # llama3's and yarn's
    beta_fast: float = 32.0  # yarn's: a frequency with at least so many turns in the original context is kept,
    beta_slow: float = 1.0  # one with at most so many is stretched in full
    truncate: bool = True  # yarn's: the bounds of the range between them are rounded to whole dimensions
    attention_factor: float = 1.0  # multiplies cosines and sines


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The dimensions of a decoder. ``decoder.py`` uses the rotary and norm fields; ``hf.py`` leaves those to
    transformers."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int  # 0: none; else how many of the newest tokens a row sees, itself included
    eos_token_ids: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    @staticmethod
    def from_folder(folder: str | Path) -> ModelConfig:
        """Read and check ``config.json`` of ``folder``; end tokens: see ``end_tokens``. Raises ModelError."""
        path = Path(folder) / "config.json"
        raw = read_json(path)
        text = text_of(raw)
        if any(raw.get(name) is not None for name in HEAD_FIELDS):
            raise ModelError(f"{path}: this is a draft head, no model: draft.model takes it, with the draft.drafter of "
                             "its kind")
        Fields(str(path), text).must_be("is_causal", True, None)  # False: an embedding model made of a family's
        config = parse_config(text, str(path), end_tokens(Path(folder)))
        if text is not raw:  # transformers writes tie_word_embeddings' default into text_config, so tensors decide
            config = replace(config, tied_embeddings="lm_head.weight" not in map(_of_text, tensor_names(folder)))
        rope = config.rope_scaling
        if rope is None or rope.kind != "yarn":
            return config
        context = stretched_context(rope.factor, rope.original_context)
        return replace(config, max_context=max(config.max_context, context))


def text_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The part of a parsed ``config.json`` that describes the text decoder: ``text_config`` of a vision model
    (VISION_TYPES), else all of it."""
    text = raw.get("text_config")
    return text if raw.get("model_type") in VISION_TYPES and isinstance(text, dict) else raw


class CausalModel(Protocol):
    """One model on one device: ``decoder.Decoder``, ``hf.HFModel`` or ``native.decoder.NativeDecoder``, which can also
    choose tokens."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def kernels(self) -> str:
        """The name of the kernels that compute. The same model on other kernels rounds differently."""
        ...

    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """States after the final norm [T, H], and the tapped states side by side [T, len(taps) * H] or None."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] after the final norm -> [R, V] in float32 (float64 for a float64 model)."""
        ...


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a configured name. Raises ModelError that lists the known names."""
    if name not in DTYPES:
        raise ModelError(f"dtype '{name}' is not known; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def device_of(name: str) -> torch.device:
    """The torch device of a configured name. Raises ModelError when torch cannot use it here."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device '{name}' is not known; write cpu, or cuda for a GPU") from error
    try:
        torch.ones(1, device=device).item()  # a kernel has to run: allocating works even on a GPU without kernels here
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device '{name}' cannot be used here: {str(error).splitlines()[0]}") from error
    return device


@contextmanager
def explain_out_of_memory(what: str) -> Iterator[None]:
    """A context for loading ``what``: running out of memory inside becomes a ModelError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{what} does not fit into the memory of its device: {first_line(error)}") from error


@contextmanager
def of_folder(folder: str | Path) -> Iterator[None]:
    """A context for what is read from ``folder``: a ModelError inside that names another thing only, a tensor for
    example, gets the folder in front. A process reads several folders."""
    try:
        yield
    except ModelError as error:
        if str(folder) in str(error):
            raise
        raise ModelError(f"{folder}: {error}") from error


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to one JSON object. A missing or null field takes its default. Without a default, or with a value of
    another type, it is a ModelError that names file and field."""

    where: str
    raw: dict[str, Any]

    def integer(self, name: str, default: int | None = None, low: int = 1, high: int = MAX_INTEGER) -> int:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ModelError(f"{self.where}: {name}: expected a number from {low} to {high}, found {value!r}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e12:
            raise ModelError(f"{self.where}: {name}: expected a positive number, found {value!r}")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {name}: expected true or false, found {value!r}")
        return value

    def must_be(self, name: str, *allowed: Any) -> None:
        if self.raw.get(name, allowed[0]) not in allowed:
            raise ModelError(f"{self.where}: {name}: {self.raw[name]!r} is not supported by this engine; as a "
                             "target it may be served with --set model.engine=hf")


def parse_config(raw: dict[str, Any], where: str, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """The ModelConfig of a parsed ``config.json``; ``where`` names it in errors. Raises ModelError."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(f"{where}: model_type: {model_type!r} is not one of {', '.join(FAMILIES)}; "
                         "as a target it may be served with --set model.engine=hf, which takes more families")
    family = FAMILIES[model_type]
    fields, qkv_bias = Fields(where, {**family.defaults, **raw}), family.qkv_bias
    fields.must_be("hidden_act", "silu", "swish")
    attention_bias = fields.flag("attention_bias", False)
    num_heads = fields.integer("num_attention_heads", high=1024)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads, high=num_heads)
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden_size // num_heads, high=1024)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(f"{where}: num_key_value_heads: {num_heads} query heads do not divide into {num_kv_heads} "
                         f"groups, or head_dim {head_dim} is odd")
    theta, scaling = rope_of(fields)
    return ModelConfig(
        model_type, fields.integer("vocab_size"), hidden_size, fields.integer("intermediate_size"),
        fields.integer("num_hidden_layers", high=1024), num_heads, num_kv_heads, head_dim,
        fields.integer("max_position_embeddings", 2048), fields.real("rms_norm_eps", 1e-6), theta, scaling,
        fields.flag("tie_word_embeddings", False), qkv_bias or attention_bias,
        attention_bias and not qkv_bias,  # a family with biases of its own (MiMo says attention_bias) has none at o
        fields.flag("mlp_bias", False), family.qk_norm, _sliding_window(fields, model_type), eos_token_ids,
    )


def rope_of(fields: Fields) -> tuple[float, RopeScaling | None]:
    """The rotary base (theta) and the scaling of rotary positions. Raises ModelError."""
    given = [_rope(fields, name) for name in ("rope_parameters", "rope_scaling") if fields.raw.get(name)]
    if given and given[0] != given[-1]:
        raise ModelError(f"{fields.where}: rope_scaling: it says other positions than rope_parameters; keep one")
    return given[0] if given else _rope(fields, "rope_parameters")


def _rope(fields: Fields, name: str) -> tuple[float, RopeScaling | None]:
    raw = fields.raw
    nested = raw.get(name) or {}
    if not isinstance(nested, dict):
        raise ModelError(f"{fields.where}: {name}: expected an object, found {type(nested).__name__}")
    for layers, value in nested.items():
        if isinstance(value, dict):
            raise ModelError(f"{fields.where}: {name}: {layers}: positions for each kind of layer are not supported")
    if raw.get(ORIGINAL_CONTEXT) is not None:  # transformers takes it first
        nested = nested | {ORIGINAL_CONTEXT: raw[ORIGINAL_CONTEXT]}
    rope = Fields(f"{fields.where}: {name}", nested)
    for given in (fields, rope):  # all numbers of a head must be rotated
        given.must_be("partial_rotary_factor", 1, None)
    theta = rope.real("rope_theta", fields.real("rope_theta", 10000.0))
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind in ("default", "dynamic", "mrope", None):
        # "dynamic" stretches positions beyond max_position_embeddings only; "mrope" has equal axes in text.
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind, rope.real("factor"))
    if kind == "llama3":
        return theta, RopeScaling(kind, rope.real("factor"), rope.real("low_freq_factor"),
                                  rope.real("high_freq_factor"), rope.integer(ORIGINAL_CONTEXT))
    if kind == "yarn" and theta > 1:
        return theta, _yarn(fields, rope)
    raise ModelError(f"{rope.where}: rope_type: {kind!r} is not supported (default, dynamic, mrope, linear, llama3 "
                     "and, with a rope_theta above 1, yarn are)")


def stretched_context(factor: float, original: int) -> int:
    """The context in tokens of positions that yarn stretches from ``original``. Users who add yarn to ``config.json``,
    as model cards describe it, often leave ``max_position_embeddings`` as it was."""
    return int(min(factor * original, MAX_INTEGER))


def _yarn(fields: Fields, rope: Fields) -> RopeScaling:
    context = fields.integer("max_position_embeddings", 2048)
    original = rope.integer(ORIGINAL_CONTEXT, context)
    factor = rope.real("factor", context / original)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scales = [rope.real(name) for name in ("mscale", "mscale_all_dim") if rope.raw.get(name)]
    attention = magnitude(scales[0]) / magnitude(scales[1]) if len(scales) == 2 else magnitude(1.0)
    attention *= rope.real("attn_factor", 1.0)  # as vLLM, SGLang and llama.cpp have it; transformers does not know it
    return RopeScaling("yarn", factor, original_context=original, beta_fast=rope.real("beta_fast", 32.0),
                       beta_slow=rope.real("beta_slow", 1.0), truncate=rope.flag("truncate", True),
                       attention_factor=rope.real("attention_factor", attention))


def _sliding_window(fields: Fields, model_type: str) -> int:
    # Qwen configs carry a window that a second field switches off.
    if model_type in ("mimo", "qwen2", "qwen3"):
        fields.must_be("use_sliding_window", False)
        return 0
    if model_type != "mistral" or fields.raw.get("sliding_window") is None:
        return 0
    return fields.integer("sliding_window", low=64)


HEAD_FIELDS = ("draft_vocab_size", "speculators_model_type", "num_target_layers")  # of published heads, and of no model
Tensors = Mapping[str, torch.Tensor]
BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")  # computed from the config
PICKLES = ("*.bin", "*.pt", "*.pth")
CONVERSION = "read it there and write its tensors with safetensors.torch.save_file(tensors, 'model.safetensors')"
INDEX, SINGLE, SHARDS = "model.safetensors.index.json", "model.safetensors", "model-*-of-*.safetensors"
NAMES_SHOWN, NAME_SHOWN = 5, 120  # of tensors that nothing reads, and characters of each


class TrackedTensors(dict[str, torch.Tensor]):
    """Tensors by name that remember which of them were read."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.read_names: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read_names.add(name)
        return super().__getitem__(name)


def require_tensor(tensors: Tensors, name: str, *shape: int) -> torch.Tensor:
    """The tensor called ``name``, of this shape. A vector is copied: as a view it would keep a whole file in memory.
    Raises ModelError when it is missing or has another shape."""
    if name not in tensors:
        raise ModelError(f"tensor {name} is missing from the model's safetensors")
    if tuple(tensors[name].shape) != shape:
        raise ModelError(f"tensor {name} has shape {tuple(tensors[name].shape)}, expected {shape}")
    return tensors[name].clone() if len(shape) == 1 else tensors[name]


def warn_unread(folder: str | Path, names: Iterable[str]) -> None:
    """Log a warning about tensors in a file that nothing reads, for example a bias that the config does not mention.
    BUFFERS are left out: they are computed from the config."""
    unread_names = sorted(name for name in names if not name.endswith(BUFFERS))
    if unread_names:
        logger("engine").warning(
            "tensors that nothing reads: answers are wrong if they belong to the model", folder=str(folder),
            count=len(unread_names), first=[name[:NAME_SHOWN] for name in unread_names[:NAMES_SHOWN]])


def load_tensors(folder: str | Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """The folder's tensors by name, on the CPU, in their stored dtypes (``fp8_blocks``: bfloat16). names: read only
    those of them that are there; None: all. Raises ModelError."""
    block = fp8_block(folder)
    if block is not None and names is not None:
        names = {*names, *(name + SCALE_INV for name in names)}
    files, listed = _files(Path(folder), names)
    if names is None and listed and SINGLE not in listed.values() and (Path(folder) / SINGLE).exists():
        logger("engine").warning(f"{SINGLE} is not read, as the index names other files: one of them may be old",
                                 folder=str(folder), index=INDEX)
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        with _opened(path) as file:
            tensors |= {name: file.get_tensor(name) for name in sorted(file.keys())
                        if (names is None or name in names) and (name not in tensors or listed.get(name) == path.name)}
    if missing := sorted(listed.keys() - tensors.keys()):
        raise ModelError(f"{Path(folder) / INDEX}: tensor {missing[0]} is in the index but in none of its files")
    tensors = tensors if block is None else widened(tensors, block)
    if names is None and read_json(Path(folder) / "config.json", missing_ok=True).get("model_type") in VISION_TYPES:
        return {_of_text(name): tensor for name, tensor in tensors.items()
                if not name.removeprefix("model.").startswith(VISION_PREFIXES)}
    return tensors


def _of_text(name: str) -> str:
    """A tensor's name as a text-only model has it."""
    return name.replace("model.language_model.", "model.", 1).removeprefix("language_model.")


def fp8_block(folder: str | Path) -> Block | None:
    """The block size of the folder's fp8 weights (see ``fp8_blocks``); None: they are not in blocks. Raises
    ModelError."""
    path = Path(folder) / "config.json"
    return block_of(read_json(path), str(path)) if path.exists() else None


def tensor_names(folder: str | Path) -> set[str]:
    """The names of the tensors that ``load_tensors`` would read: those of the index, if there is one. Raises
    ModelError."""
    return set(_files(Path(folder))[1] or tensor_types(folder))


def tensor_types(folder: str | Path) -> dict[str, str]:
    """The stored type of each tensor in the files that ``load_tensors`` would read, as safetensors names it ("BF16").
    Only headers are read. Raises ModelError."""
    types: dict[str, str] = {}
    for path in _files(Path(folder))[0]:
        with _opened(path) as file:
            types |= {name: file.get_slice(name).get_dtype() for name in sorted(file.keys())}
    return types


def _files(folder: Path, names: Collection[str] | None = None) -> tuple[list[Path], dict[str, str]]:
    """The files with the tensors ``names`` (None: all), and by tensor the file that the index names, if there is an
    index: a tensor in two files is read from that one. An index none of whose files exist is of an earlier save and is
    ignored. Shards whose index was not downloaded are read all."""
    index = folder / INDEX
    if not index.exists():
        shards = [] if (folder / SINGLE).exists() else sorted(folder.glob(SHARDS))
        return shards or [folder / SINGLE], {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ModelError(f"{index}: weight_map: expected an object of tensor name to file name")
    present = {path.name for path in folder.glob("*.safetensors")}
    if SINGLE in present and present.isdisjoint(weight_map.values()):
        return [folder / SINGLE], {}
    listed = {name: file for name, file in weight_map.items() if names is None or name in names}
    for file in listed.values():
        if Path(file).name != file:
            raise ModelError(f"{index}: weight_map: {file!r} is not the name of a file of this folder")
    return [folder / file for file in sorted(set(listed.values()))], listed


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        if not path.exists():
            raise ModelError(_missing(path))
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not readable as safetensors: {read_error_text(path, error)}") from error


def _missing(path: Path) -> str:
    pickles = sorted(found.name for pattern in PICKLES for found in path.parent.glob(pattern))
    if not pickles or list(path.parent.glob("*.safetensors")):
        return f"{path}: no such file; a model folder holds config.json and *.safetensors"
    return (f"{path.parent}: {pickles[0]} is a pickle, which can run code when it is read, so it never is; convert it "
            f"once where you trust it: {CONVERSION}")
