"""Any causal language model of transformers as a CausalModel: for families that decoder.py does not know, and as its
reference in tests; and single decoder layers of such a model, for draft heads that are layers of the target's kind.

Rules:
1. The model runs through transformers' attention interface: our function writes KV into the pool and attends over
   slots. Batch and pool are arguments of the forward call. Only the function's name in transformers' registry is global
   to the process; the function itself holds no state.
2. Local files only; remote code is never run.
3. Sliding windows are read from the masks that a family makes. What follows the decoder (logit scales, soft caps) runs
   in the family's own code.
4. A model that this engine cannot compute exactly is refused when it is loaded: layers without attention, attention
   scores with soft caps or sinks, or a failed trial (see ``trial``). If positions depend on the length of the text, its
   context ends where they begin to (``_max_context``).

It knows nothing about sessions. transformers computes norms in float32, so a float64 model is not float64 throughout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.base.errors import ModelError, first_line
from slipstream.engine.attention import AttentionCall, attend, plan_attention, plan_pages
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.int8 import check_floats
from slipstream.engine.kv import KVPool
from slipstream.engine.model import (
    MAX_INTEGER,
    ORIGINAL_CONTEXT,
    ModelConfig,
    Tensors,
    device_of,
    dtype_of,
    require_tensor,
    stretched_context,
    warn_unread,
)
from slipstream.engine.trial import check, check_layers
from slipstream.models.folder import end_tokens, read_json
from slipstream.observe.log import logger
from slipstream.protocol.tree import MAX_NODES

ATTENTION = "slipstream"
UNSUPPORTED = ("softcap", "s_aux", "head_mask", "position_bias")  # arguments that would change the scores


@dataclass(frozen=True, slots=True)
class Window:
    """What attention functions get in place of a mask: a row sees so many tokens, itself included. None stands for a
    full causal mask."""

    tokens: int


class States(tuple[torch.Tensor]):
    """A decoder's output: its last states [1, R, H]. Every other field that a family's code may read is None."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@dataclass(slots=True)
class Step:
    """One forward: what every layer's attention needs, and the plans made so far, one for each sliding window."""

    batch: ForwardBatch
    pool: KVPool
    plans: dict[int, tuple[AttentionCall, ...]] = field(default_factory=dict)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
               window: int) -> torch.Tensor:
        """q [T, Q, D], k [T, G, D], v [T, G, Dv] -> [T, Q, Dv]."""
        heads, size, value_size = q.shape[1], self.pool.kv.shape[4], v.shape[2]
        self.pool.write(layer, self.batch.slots, _pad_heads(k, size), _pad_heads(v, size))
        if window not in self.plans:
            group = heads // k.shape[1]
            self.plans[window] = plan_attention(plan_pages(self.batch, window), group, q.dtype, q.device)
        out = attend(_pad_heads(q, size), self.pool.kv[layer], self.plans[window], scale)
        return out.view(len(q), heads, size)[..., :value_size]


@dataclass(slots=True)
class Probe:
    """A forward of one row that notes which layers attend, and with how many heads of which size."""

    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # layer -> Q, G, D

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
               window: int) -> torch.Tensor:
        """As ``Step.attend`` for one row, which sees itself."""
        self.shapes[layer] = (q.shape[1], k.shape[1], max(k.shape[2], v.shape[2]))
        return v.repeat_interleave(q.shape[1] // k.shape[1], 1)


class HFModel:
    """A transformers model; see ``model.CausalModel``."""

    __slots__ = ("_after_decoder", "_decoder", "config", "device", "dtype")

    def __init__(self, model: PreTrainedModel, eos_token_ids: tuple[int, ...] = ()) -> None:
        """model: in its final dtype, on its device. Raises ModelError for what this engine cannot compute exactly."""
        _attend_over_slots(model, model.dtype)
        whole: Any = model  # transformers leaves these untyped
        self._decoder = whole.get_decoder()
        self._after_decoder = _without_decoder(model, self._decoder)
        self.dtype, self.device = model.dtype, model.device
        self.config = self._measure(whole.config.get_text_config(), whole.get_input_embeddings(), eos_token_ids)

    @staticmethod
    def from_folder(folder: str | Path, dtype: str, device: str) -> HFModel:
        """Load a local folder, once a tiny copy has passed its trial. Raises ModelError."""
        path = Path(folder) / "config.json"
        with _explained(folder, "load it"):
            check_layers(read_json(path), str(path))
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            _scale_attention(config.get_text_config())
            check_tiny_copy(config)
            check_floats(folder)
            model, found = _class_of(config).from_pretrained(
                folder, config=config, dtype=dtype_of(dtype), local_files_only=True, trust_remote_code=False,
                use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True)
            for name, shape, expected in sorted(found["mismatched_keys"]):
                raise ModelError(f"{folder}: tensor {name} has shape {tuple(shape)}, expected {tuple(expected)}")
            if found["missing_keys"]:  # transformers goes on with random numbers in their place
                raise ModelError(f"{folder}: tensor {min(found['missing_keys'])} is missing from the model's "
                                 "safetensors")
            warn_unread(folder, found["unexpected_keys"])
            model.requires_grad_(False)
            to = device_of(device)
            if to.type == "cpu":  # transformers maps the files, whose contents may change; to a GPU all is copied
                for weight in (*model.parameters(), *model.buffers()):
                    weight.data = weight.data.clone()
            served = HFModel(nn.Module.to(model, to), end_tokens(Path(folder)))
            if served.config.max_context < (own := config.get_text_config().max_position_embeddings):
                logger("engine").warning("served as far as positions do not depend on the length of a text",
                                         max_context=served.config.max_context, of=own)
            return served

    @property
    def kernels(self) -> str:
        """See ``model.CausalModel``."""
        return f"transformers {transformers.__version__}"

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, H] after the final norm, and the taps side by side [T, len(taps) * H] or None."""
        out = self._run(batch.tokens, batch.positions, Step(batch, pool), output_hidden_states=bool(taps))
        tapped = torch.cat([out.hidden_states[i][0] for i in taps], -1) if taps else None
        return out.last_hidden_state[0], tapped

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] after the final norm -> [R, V] in float32, float64 for a float64 model."""
        logits: torch.Tensor = self._after_decoder(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.to(torch.promote_types(self.dtype, torch.float32))

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, step: Step | Probe, **options: Any) -> Any:
        return self._decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False,
                             slipstream_step=step, **options)

    @torch.inference_mode()
    def _measure(self, text: Any, embedding: Any, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        probe, start = Probe(), torch.zeros(1, dtype=torch.int64, device=self.device)
        self._run(start, start, probe)
        rows, hidden = embedding.weight.shape
        return _config_of(text, probe, f"{text.model_type} model", rows, hidden, eos_token_ids)


def check_tiny_copy(config: Any) -> None:
    """Try a tiny copy of the model that a transformers configuration describes, and log how long it took. Raises
    ModelError."""
    began = time.perf_counter()
    check(config, with_random_weights, HFModel)
    logger("engine").info("a tiny copy computes what the model's own forward does", model_type=config.model_type,
                          seconds=round(time.perf_counter() - began, 2))


def with_random_weights(config: Any) -> PreTrainedModel:
    """A float32 model of a configuration with random weights and its family's own (eager) attention."""
    model: PreTrainedModel = _class_of(config).from_config(config, attn_implementation="eager", dtype=torch.float32,
                                                           trust_remote_code=False).eval()
    return model


def _class_of(config: Any) -> Any:
    """The transformers class that loads a text model, or a multimodal one of which only text is served."""
    plain: Any = AutoModelForCausalLM
    further: Any = AutoModelForMultimodalLM
    kind = type(config)
    return further if kind in further._model_mapping and kind not in plain._model_mapping else plain


class HFLayers:
    """The layers of a multi-token prediction head, without the model around them: decoder layers of the target's kind.
    Layer i uses the KV pool's layer i."""

    __slots__ = ("_layers", "_rotary", "config", "device", "dtype")

    def __init__(self, folder: str | Path, tensors: Tensors, prefixes: Sequence[str], dtype: torch.dtype,
                 device: torch.device) -> None:
        """folder: its ``config.json`` describes the model; prefixes: those of each layer's tensors, for example
        ``model.layers.61``. Raises ModelError naming a tensor that is missing or of a wrong shape, or what cannot be
        computed exactly."""
        model = _without_weights(folder, len(prefixes))
        _attend_over_slots(model, dtype)
        self.dtype, self.device = dtype, device
        self._layers = [_with_weights(layer, tensors, prefix, dtype, device)
                        for layer, prefix in zip(model.layers, prefixes, strict=True)]
        self._rotary = nn.Module.to(type(model.rotary_emb)(config=model.config), device)
        with _explained(folder, "run its layers"):
            self.config = self._measure(model.config)

    def begin(self, batch: ForwardBatch, pool: KVPool) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Begin one forward. Returns a function from a layer's number and input [T, H] to its output [T, H]."""
        return self._run(batch.positions, Step(batch, pool))

    def _run(self, positions: torch.Tensor, step: Step | Probe) -> Callable[[int, torch.Tensor], torch.Tensor]:
        angles = self._rotary(torch.empty(0, dtype=self.dtype, device=self.device), positions[None])

        def run(number: int, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self._layers[number](x[None], attention_mask=None, position_ids=positions[None],
                                                     position_embeddings=angles, slipstream_step=step)
            return out[0]

        return run

    @torch.inference_mode()
    def _measure(self, config: Any) -> ModelConfig:
        where = f"{config.model_type} layers"
        probe = Probe()
        run = self._run(torch.zeros(1, dtype=torch.int64, device=self.device), probe)
        for number in range(len(self._layers)):
            run(number, torch.zeros(1, config.hidden_size, dtype=self.dtype, device=self.device))
        return _config_of(config, probe, where, config.vocab_size, config.hidden_size, ())


def _without_weights(folder: str | Path, num_layers: int) -> Any:
    """The model of a folder's prediction layers, ``num_layers`` of them, without weights."""
    auto: Any = AutoModel
    with _explained(folder, "build it"):
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.num_mtp_layers = num_layers
        with torch.device("meta"):
            model = auto.from_config(config.get_mtp_config(), trust_remote_code=False)
    return model.eval().requires_grad_(False)


@contextmanager
def _explained(folder: str | Path, what: str) -> Iterator[None]:
    """A context for a family's own code: what it raises has no class in common, and becomes a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{folder}: transformers cannot {what}: {first_line(error)}") from error


def _with_weights(layer: nn.Module, tensors: Tensors, prefix: str, dtype: torch.dtype,
                  device: torch.device) -> nn.Module:
    """The layer with weights. Most checkpoints have a tensor for each expert; transformers has one for all experts, as
    have some checkpoints that it wrote."""
    state = {}
    for name, empty in layer.state_dict().items():
        # As in transformers, the bias that corrects the choice of experts is at least float32.
        kind = torch.promote_types(dtype, torch.float32) if name.endswith("e_score_correction_bias") else dtype
        full = f"{prefix}.{name}"
        per_expert = ".experts." in name and full not in tensors
        tensor = _experts(tensors, full, empty) if per_expert else require_tensor(tensors, full, *empty.shape)
        state[name] = tensor.to(device, kind, copy=True)
    layer.load_state_dict(state, assign=True)
    return layer.requires_grad_(False)


def _experts(tensors: Tensors, name: str, empty: torch.Tensor) -> torch.Tensor:
    above, _, last = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    count, rows, columns = empty.shape
    return torch.stack([torch.cat([require_tensor(tensors, f"{above}.{i}.{part}.weight", rows // len(parts), columns)
                                   for part in parts]) for i in range(count)])


def _without_decoder(module: nn.Module, decoder: nn.Module) -> Any:
    """The same module with shared weights, in which the decoder returns its input unchanged."""
    rest = copy(module)
    if module is decoder:
        rest.forward = _pass_through
    elif decoder in module.modules():
        rest._modules = {name: _without_decoder(child, decoder) for name, child in module.named_children()}
    return rest


def _pass_through(*_: Any, inputs_embeds: torch.Tensor, **__: Any) -> States:
    return States((inputs_embeds,))


def _attend_over_slots(model: PreTrainedModel, dtype: torch.dtype) -> None:
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, mask)
    model.set_attn_implementation(ATTENTION)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped kernels have no float64


def _config_of(text: Any, probe: Probe, where: str, rows: int, hidden: int,
               eos_token_ids: tuple[int, ...]) -> ModelConfig:
    if set(probe.shapes) != set(range(text.num_hidden_layers)):
        raise ModelError(f"{where}: only layers {sorted(probe.shapes)} of {text.num_hidden_layers} have attention "
                         "that this engine can serve")
    if len(set(probe.shapes.values())) != 1:
        raise ModelError(f"{where}: attention heads differ between layers: {sorted(set(probe.shapes.values()))}")
    heads, kv_heads, size = probe.shapes[0]
    return ModelConfig(text.model_type, rows, hidden, 0, text.num_hidden_layers, heads, kv_heads, size,
                       _max_context(text), 0.0, 0.0, None, bool(getattr(text, "tie_word_embeddings", False)), False,
                       False, False, False, 0, eos_token_ids)


def attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: Window | None, scaling: float | None = None, sliding_window: int | None = None,
              slipstream_step: Step | Probe | None = None, **others: Any) -> tuple[torch.Tensor, None]:
    """The function in transformers' registry: query [1, Q, T, D], key and value [1, G, T, D] -> [1, T, Q, D]. Raises
    ModelError for arguments that this engine does not support."""
    if slipstream_step is None or not (attention_mask is None or isinstance(attention_mask, Window)):
        raise ModelError(f"{type(module).__name__} does not pass attention arguments through, so its layers "
                         "cannot attend over slots")
    named = [name for name in UNSUPPORTED if others.get(name) is not None]
    if named:
        raise ModelError(f"{type(module).__name__}: attention with {', '.join(named)} is not supported")
    window = attention_mask.tokens if attention_mask is not None else sliding_window or 0
    if 0 < window < MAX_NODES:
        raise ModelError(f"{type(module).__name__}: a window of {window} tokens does not hold a whole tree of "
                         f"{MAX_NODES}")
    layer = module.layer_idx
    assert isinstance(layer, int)
    out = slipstream_step.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1),
                                 scaling if scaling is not None else query.shape[-1] ** -0.5, window)
    return out[None], None


def mask(local_size: int | None = None, **_: Any) -> Window | None:
    """The function in transformers' registry of masks. It keeps the window only: all else is planned from the batch."""
    return None if local_size is None else Window(local_size)


def _max_context(text: Any) -> int:
    """The context in tokens, up to which rotary positions do not depend on the text's length (cached KV could not
    change with it). "dynamic" stretches positions only beyond the model's own limit; "longrope" changes all of them
    once the text is longer than the original context. Command R's first models say what they were trained for in
    model_max_length, as vLLM reads it, and 8,192 in max_position_embeddings."""
    rope = text.to_dict().get("rope_parameters") or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    trained = getattr(text, "model_max_length", None)
    own = max([int(text.max_position_embeddings), *(stretched_context(kind["factor"], kind[ORIGINAL_CONTEXT])
                                                    for kind in kinds
                                                    if kind.get("rope_type") == "yarn" and kind.get("factor"))])
    if rope.get("rope_type") == "default" and type(trained) is int:
        own = max(own, min(trained, MAX_INTEGER))
    return min([own, *(int(kind[ORIGINAL_CONTEXT]) for kind in kinds if kind.get("rope_type") == "longrope")])


def _scale_attention(text: Any) -> None:
    """Apply yarn's ``attn_factor``, as ``model.rope_of`` does: transformers ignores it."""
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn" and rope.get("attn_factor") and rope.get("attention_factor") is None:
        rope["attention_factor"] = ROPE_INIT_FUNCTIONS["yarn"](text)[1] * rope["attn_factor"]


def _pad_heads(x: torch.Tensor, size: int) -> torch.Tensor:
    # Heads narrower than the pool's are padded with zeros, which change no score.
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))
