"""Loading: makes drafters with weights from the settings. It resolves model folders, checks which settings go together,
and sizes the KV slots.

It knows nothing about how a network works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, TypeVar

import torch

from slipstream.base.config import DraftSection, ModelSection
from slipstream.base.errors import ModelError
from slipstream.drafting.drafter import Drafter
from slipstream.drafting.graph import GraphBackend, spare_slots
from slipstream.drafting.heads.block import BlockNetwork
from slipstream.drafting.heads.block_checkpoint import read_block_head
from slipstream.drafting.heads.checkpoint import read_eagle2_head, read_head
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.heads.mtp import DecoderLayers, Layers, MtpNetwork
from slipstream.drafting.heads.mtp_checkpoint import OWN_EMBEDDING, OWN_LM_HEAD, MtpHead, read_mtp
from slipstream.drafting.heads.target_checkpoint import TargetCheckpoint
from slipstream.drafting.network import Network, run_network, some_tokens
from slipstream.drafting.neural import NeuralDrafter, TreeBackend
from slipstream.drafting.standalone import AT_ONCE, Masks, StandaloneNetwork
from slipstream.drafting.token_map import load_token_map
from slipstream.engine.device import cores, default_slots, free_memory, kv_bytes
from slipstream.engine.flashinfer import FlashInferAttention
from slipstream.engine.fp8 import check_fp8, into_fp8
from slipstream.engine.graphs import CudaCapture
from slipstream.engine.int8 import check_int8
from slipstream.engine.loading import load_model
from slipstream.engine.model import Fields, ModelConfig, device_of, dtype_of, explain_out_of_memory, warn_unread
from slipstream.engine.ops.compiled import compiled
from slipstream.engine.ops.fused import operations_for, rounding_for
from slipstream.engine.ops.layer import TORCH, LayerOps, Linear, layer_shapes
from slipstream.engine.ops.races import race_for
from slipstream.engine.runner import ModelRunner
from slipstream.models.folder import read_json, resolve, tokenizer_size
from slipstream.observe.log import logger

N = TypeVar("N", bound=Network)
REPEATED = (OWN_EMBEDDING, OWN_LM_HEAD)
QUANTIZED = {"fp8": ("block", "eagle2", "eagle3", "standalone"), "int8": ("eagle3", "standalone")}  # drafters that can


@explain_out_of_memory("the draft model or head")
def load(section: DraftSection, target: ModelSection, num_slots: int = 0) -> Drafter:
    """The drafter with weights that ``section.drafter`` names; see ``drafting.create``. Raises ModelError, and
    ConfigError for trees that are too deep for its context."""
    _check(section, target)
    make = {"standalone": _standalone, "mtp": _mtp, "block": _block}.get(section.drafter, _eagle)
    return make(section, target, num_slots)


def _check(section: DraftSection, target: ModelSection) -> None:
    """Raises ModelError for ``quantize`` or ``compile`` with a drafter that does not support it."""
    quantize, drafters = section.quantize, QUANTIZED.get(section.quantize)
    if drafters is not None and section.drafter not in drafters:
        raise ModelError(f"draft.quantize: {quantize} is for {', '.join(drafters)}; use none with {section.drafter}")
    if quantize == "int8":
        native = target.kernels != "torch" and not section.compile
        check_int8("draft.quantize", quantize, section.dtype, section.device, native=native)
    if quantize == "fp8":
        if section.compile:
            raise ModelError("draft.quantize: it is for drafters without compile")
        check_fp8(dtype_of(section.dtype), device_of(section.device))
    if section.compile and section.drafter == "block":
        raise ModelError("draft.compile: it is not for block")


def _standalone(section: DraftSection, target: ModelSection, num_slots: int) -> Drafter:
    """A drafter over the model folder or name in ``section.model``; of ``target`` only ``kernels`` is read."""
    folder = resolve(section.model)
    config = ModelConfig.from_folder(folder)
    known, vocabulary = tokenizer_size(folder), _token_map(section, config.vocab_size)
    own = ModelSection(dtype=section.dtype, device=section.device, kernels=_kernels(target),
                       quantize="none" if section.quantize == "auto" else section.quantize)
    model = load_model(folder, own, compile_layers=section.compile)
    num_slots = _num_slots(section, config, num_slots)
    masks = _masks(folder, config, section.growth.num_steps - 1, num_slots)
    race = race_for(own.kernels, config, model.device) if vocabulary is None else None
    runner = ModelRunner(model, num_slots, 0 if masks is None else AT_ONCE * masks.count, race)
    if vocabulary is None:
        return _drafter(section, StandaloneNetwork(runner, masks, known=known))
    vocabulary = vocabulary[vocabulary < (known or config.vocab_size)]
    if len(vocabulary) < section.growth.topk:
        raise ModelError(f"draft.token_map: {len(vocabulary)} of its tokens have a text, the others are padding of the "
                         f"draft's vocabulary; expected at least {section.growth.topk} (draft.growth.topk)")
    lm_head = TargetCheckpoint.of(folder).lm_head(vocabulary)
    return _drafter(section, StandaloneNetwork(runner, masks, vocabulary, lm_head))


def _masks(folder: Path, config: ModelConfig, count: int, num_slots: int) -> Masks | None:
    """``count`` masks for a draft model that was trained to fill them in (PARD); None for another model. Raises
    ModelError."""
    fields = Fields(str(folder / "config.json"), read_json(folder / "config.json"))
    if fields.raw.get("pard2") or fields.raw.get("spd_type") == "pard2":
        raise ModelError(f"{fields.where}: pard2: such a model reads the target's states, too, and without them drafts "
                         "badly; take one of PARD's first kind")
    if fields.raw.get("pard_token") is None:
        return None
    token = fields.integer("pard_token", low=0, high=config.vocab_size - 1)
    return Masks(token, count, num_slots) if count else None


def _eagle(section: DraftSection, model: ModelSection, num_slots: int) -> Drafter:
    """A drafter over the EAGLE head of any version in ``section.model``, for the target in ``model.path``."""
    folder, target = resolve(section.model), resolve(model.path)
    head = (read_head(folder, target) if section.drafter == "eagle3" else
            read_eagle2_head(folder, target, _token_map(section, TargetCheckpoint.of(target).vocab_size)))
    device, num_slots = device_of(section.device), _num_slots(section, head.config, num_slots)
    ours = ("native" if section.quantize == "int8" else "torch" if section.compile or section.quantize == "fp8"
            else _kernels(model))
    graphs = device.type == "cuda" and not (section.compile or head.joint or head.config.sliding_window)
    spare = spare_slots(section.growth.topk, section.growth.num_steps - 1) if graphs else 0
    race = race_for(_kernels(model), head.config, device, some_tokens(head.vocabulary, head.config.vocab_size, device))
    network = _ready(section, model, lambda ops: EagleNetwork(
        head, section.dtype, device, num_slots, True, ops, kernels=ours, spare_slots=spare,
        to_int8=section.quantize in ("auto", "int8"), cores=0 if model.threads else cores(), race=race), head.config)
    _quantized(section, model, network.linears(), head.config)
    return _drafter(section, network, network.native if network.native is not None
                    else _graphs(section, network) if spare else None)


def _block(section: DraftSection, model: ModelSection, num_slots: int) -> Drafter:
    """A drafter over the DFlash or DSpark head in ``section.model``, for the target in ``model.path``."""
    head = read_block_head(resolve(section.model), resolve(model.path))
    device, num_slots = device_of(section.device), _num_slots(section, head.config, num_slots)
    kernels = "torch" if section.quantize == "fp8" else _kernels(model)
    network = _ready(section, model, lambda ops: BlockNetwork(
        head, section.dtype, device, num_slots, True, ops, kernels), head.config)
    _quantized(section, model, network.linears(), head.config)
    return _drafter(section, network)


def _mtp(section: DraftSection, model: ModelSection, num_slots: int) -> Drafter:
    """A drafter over the multi-token prediction head in ``section.model``, or (empty) in the target's own folder, for
    the target in ``model.path``."""
    target = resolve(model.path)
    head = read_mtp(resolve(section.model) if section.model else target, target)
    vocabulary = _token_map(section, head.vocab_size)

    def build(ops: LayerOps) -> Network:
        layers = mtp_layers(head, section.dtype, section.device, ops)
        return MtpNetwork(head, layers, section.dtype, _num_slots(section, layers.config, num_slots), vocabulary)

    if head.layout.on_transformers:
        if section.compile:
            logger("draft").warning("not compiled: these layers run on transformers; eager goes on",
                                    what=section.drafter)
        return _drafter(section, build(TORCH))
    return _drafter(section, _ready(section, model, build, ModelConfig.from_folder(head.folder)))


def mtp_layers(head: MtpHead, dtype: str, device: str, ops: LayerOps = TORCH) -> Layers:
    """The decoder layers of a head, built by transformers or by ``decoder.py``; ``ops``: for the latter. Raises
    ModelError."""
    kind, place, prefixes = dtype_of(dtype), device_of(device), [layer.prefix for layer in head.layers]
    layers: Layers
    if head.layout.on_transformers:
        # Imported here because transformers takes seconds to import, and other heads do not need it.
        from slipstream.engine.hf import HFLayers

        layers, taken = HFLayers(head.folder, head.tensors, prefixes, kind, place), head.tensors.read_names
    else:
        config = ModelConfig.from_folder(head.folder)
        layers = DecoderLayers(config, head, kind, place, ops)
        taken = head.tensors.read_names.union(*(layer_shapes(config, prefix) for prefix in prefixes))
    # Each further layer repeats the target's embedding and head.
    warn_unread(head.folder, (name for name in head.tensors.keys() - taken if not name.endswith(REPEATED)))
    return layers


def _kernels(target: ModelSection) -> Literal["auto", "torch"]:
    """Drafts use our own kernels where they can, unless the target's setting is ``torch``."""
    return "torch" if target.kernels == "torch" else "auto"


def _ready(section: DraftSection, target: ModelSection, build: Callable[[LayerOps], N], config: ModelConfig) -> N:
    """config: of the layers."""
    if section.compile:
        return compiled(build, run_network, section.drafter)
    return build(operations_for(_kernels(target), config, dtype_of(section.dtype), device_of(section.device)))


def _quantized(section: DraftSection, target: ModelSection, linears: Iterable[Linear], config: ModelConfig) -> None:
    """config: of the layers."""
    if section.quantize == "fp8":
        into_fp8(linears, rounding_for(_kernels(target), config, device_of(section.device)))


def _token_map(section: DraftSection, vocab_size: int) -> torch.Tensor | None:
    if not section.token_map:
        return None
    return load_token_map(section.token_map, vocab_size, section.growth.topk)


def _num_slots(section: DraftSection, config: ModelConfig, given: int) -> int:
    """``given``, or if 0 as many slots as ``max_sessions`` and memory suggest. Their size is logged now, because memory
    is only touched when a slot is first used, which may be hours later."""
    if given:
        return given
    dtype = dtype_of(section.dtype)
    free = free_memory(torch.device(section.device))[0]
    slots = default_slots(config, dtype, section.max_sessions, device=section.device)
    gb = {"free": round(free / 1e9, 2), "slots": round(slots * kv_bytes(config, dtype) / 1e9, 2)}
    logger("draft").info("memory", device=section.device, gb=gb, slots=slots)
    return slots


def _graphs(section: DraftSection, network: EagleNetwork) -> TreeBackend | None:
    if network.torch is None or not isinstance(network.torch.attention, FlashInferAttention):
        return None
    growth = section.growth
    backend = GraphBackend(network, network.torch.attention, growth.topk, growth.num_steps - 1,
                           CudaCapture(network.device), section.max_sessions)
    logger("draft").info("graphs captured", count=backend.warm())
    return backend


def _drafter(section: DraftSection, network: Network, backend: TreeBackend | None = None) -> Drafter:
    return NeuralDrafter(section.drafter, network, section.growth, section.max_sessions, backend=backend)
