"""From a model folder to a model that is ready: which engine, kernels, attention and kind of numbers serve it.

Rules:
1. What was asked for and cannot be had is a ModelError that names the field, before anything is loaded where it can be.
2. What was left to be chosen is chosen once, here, and the log says what and why.

It knows nothing about where folders come from (see ``slipstream.models``), sessions or pools.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch

from slipstream.base.config import ModelSection
from slipstream.base.errors import ModelError
from slipstream.engine.batch import rows_batch
from slipstream.engine.decoder import Decoder
from slipstream.engine.flashinfer import FlashInferAttention, attention_for
from slipstream.engine.fp8 import with_fp8
from slipstream.engine.graphs import CudaCapture, GraphedDecoder
from slipstream.engine.int8 import check_floats, check_int8, holds_int8
from slipstream.engine.kv import KVPool
from slipstream.engine.model import CausalModel, ModelConfig, device_of, dtype_of
from slipstream.engine.native import native_or
from slipstream.engine.native.decoder import NativeDecoder
from slipstream.engine.native.program import Team
from slipstream.engine.ops.compiled import compiled
from slipstream.engine.ops.fused import operations_for
from slipstream.engine.trial import check_exact
from slipstream.engine.weights import Tensors, load_tensors
from slipstream.observe.log import logger


def load_model(folder: str | Path, section: ModelSection, compile_layers: bool = False) -> CausalModel:
    """The model in ``folder`` as ``section`` says, ready; where it lies and on how many devices is not its to read.
    compile_layers: see ``compiled``. Raises ModelError."""
    noted, insisted = holds_int8(folder), section.kernels == "native"
    whole = noted or section.quantize == "int8"
    ours = section.engine == "decoder" and not compile_layers and section.kernels != "torch"
    if whole:
        check_int8("model.quantize", section.quantize, section.dtype, section.device, native=ours)
    elif section.quantize == "fp8" and (insisted or section.engine != "decoder" or compile_layers):
        raise ModelError("model.quantize: fp8 is for engine decoder, without kernels native and without compile")
    if insisted and (not ours or section.dtype != "bfloat16" or torch.device(section.device).type != "cpu"):
        raise ModelError("model.kernels: native is for dtype bfloat16, device cpu and engine decoder, without compile; "
                         "float32 and float64 need no such kernels")
    if section.engine == "hf":
        if compile_layers:
            logger("engine").warning("not compiled: engine hf has no compiled layers; eager goes on")
        # transformers takes seconds to import, which the default engine need not pay.
        from slipstream.engine.hf import HFModel

        return HFModel.from_folder(folder, section.dtype, section.device)
    config, device = ModelConfig.from_folder(folder), device_of(section.device)
    tensors, dtype = load_tensors(folder), dtype_of(section.dtype)
    if not noted:
        check_floats(folder, tensors)
    choice = "native" if insisted or whole else "auto" if ours and section.quantize == "none" else "torch"

    def native(team: Team) -> CausalModel:
        return NativeDecoder(config, tensors, team, whole)

    model = native_or(choice, dtype, device, "model", native,
                      partial(_torch_decoder, config, tensors, dtype, device, section, compile_layers))
    return check_exact(model) if insisted else model


def graphed(model: CausalModel) -> CausalModel:
    """The model as a GraphedDecoder where its attention can be captured; its pool needs spare slots then."""
    if isinstance(model, Decoder) and isinstance(model.attention, FlashInferAttention):
        return GraphedDecoder(model, model.attention, CudaCapture(model.device))
    return model


def _torch_decoder(config: ModelConfig, tensors: Tensors, dtype: torch.dtype, device: torch.device,
                   section: ModelSection, compile_layers: bool) -> Decoder:
    attention = attention_for(config, dtype, device)
    make = partial(Decoder.from_tensors, config, tensors, dtype, device, attention=attention)
    decoder = (compiled(lambda ops: make(ops=ops), _first_rows, "model") if compile_layers
               else make(ops=operations_for(section.kernels, config, dtype, device)))
    return with_fp8(decoder) if section.quantize == "fp8" else decoder


def _first_rows(decoder: Decoder, rows: int) -> None:
    """One forward of ``rows`` rows on a pool of its own."""
    config = decoder.config
    pool = KVPool(config.num_layers, rows, config.num_kv_heads, config.head_dim, decoder.dtype, decoder.device)
    decoder.forward(rows_batch(np.arange(rows), decoder.device), pool)
