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

from slipstream.base.errors import ModelError
from slipstream.engine.batch import rows_batch
from slipstream.engine.decoder import Decoder
from slipstream.engine.exact import check_exact
from slipstream.engine.flashinfer import FlashInferAttention, attention_for
from slipstream.engine.fp8 import with_fp8
from slipstream.engine.graphs import CudaCapture, GraphedDecoder
from slipstream.engine.int8 import check_floats, check_int8, holds_int8
from slipstream.engine.kv import KVPool
from slipstream.engine.model import CausalModel, ModelConfig, device_of, dtype_of
from slipstream.engine.native import native_or
from slipstream.engine.native.decoder import NativeDecoder
from slipstream.engine.ops.compiled import compiled
from slipstream.engine.ops.fused import operations_for
from slipstream.engine.weights import load_tensors
from slipstream.observe.log import logger


def load_model(folder: str | Path, dtype: str = "bfloat16", device: str = "cpu", engine: str = "decoder",
               compile_layers: bool = False, attention: str = "auto", graphs: bool = False,
               exact: bool = False, quantize: str = "none", kernels: str = "auto") -> CausalModel:
    """A ready model. dtype: a key of DTYPES; engine: "decoder" or "hf"; compile_layers: see ``compiled``; attention:
    see ``flashinfer.attention_for``; graphs: a GraphedDecoder where the attention can be captured, whose pool needs
    spare slots; exact: see ``exact``; quantize: "none", "fp8" or "int8" (see there); kernels: one of
    ``native.CHOICES``, and on a GPU see ``fused``. Raises ModelError."""
    plain = (engine, compile_layers, attention) == ("decoder", False, "auto")
    noted = holds_int8(folder)
    whole = noted or quantize == "int8"
    if whole:
        check_int8("model.quantize", quantize, dtype, device, native=plain and kernels != "torch")
    elif quantize != "none" and (exact or engine != "decoder" or compile_layers):
        raise ModelError("model.quantize: fp8 is for engine decoder, without kernels native and without compile")
    if exact and (engine, dtype, torch.device(device).type, compile_layers) != ("decoder", "bfloat16", "cpu", False):
        raise ModelError("model.kernels: native is for dtype bfloat16, device cpu and engine decoder, without compile; "
                         "float32 and float64 need no such kernels")
    if engine == "hf":
        if attention == "flashinfer":
            raise ModelError("attention 'flashinfer' cannot be used: engine hf gathers slots; use engine: decoder, or "
                             "attention: auto")
        if compile_layers:
            logger("engine").warning("not compiled: engine hf has no compiled layers; eager goes on")
        # transformers takes seconds to import, which the default engine need not pay.
        from slipstream.engine.hf import HFModel

        return HFModel.from_folder(folder, dtype, device)
    if engine != "decoder":
        raise ModelError(f"engine '{engine}' is not known; use decoder or hf")
    config = ModelConfig.from_folder(folder)
    tensors, kind, place = load_tensors(folder), dtype_of(dtype), device_of(device)
    if not noted:
        check_floats(folder, tensors)
    usual = partial(_torch_decoder, config, tensors, kind, place, compile_layers, attention, graphs, quantize,
                    kernels)
    ours = "native" if exact or whole else kernels if plain and quantize == "none" else "torch"
    model = native_or(ours, kind, place, "model", lambda team: NativeDecoder(config, tensors, team, whole), usual)
    return check_exact(model) if exact else model


def _torch_decoder(config: ModelConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device,
                   compile_layers: bool, attention: str, graphs: bool, quantize: str, kernels: str) -> CausalModel:
    backend = attention_for(attention, config, dtype, device)
    make = partial(Decoder.from_tensors, config, tensors, dtype, device, attention=backend)
    decoder = (compiled(lambda ops: make(ops=ops), _first_rows, "model") if compile_layers
               else make(ops=operations_for(kernels, config, dtype, device)))
    if quantize == "fp8":
        decoder = with_fp8(decoder)
    return GraphedDecoder(decoder, backend, CudaCapture(device)) if graphs and isinstance(
        backend, FlashInferAttention) else decoder


def _first_rows(decoder: Decoder, rows: int) -> None:
    """One forward of ``rows`` rows on a pool of its own."""
    config = decoder.config
    pool = KVPool(config.num_layers, rows, config.num_kv_heads, config.head_dim, decoder.dtype, decoder.device)
    decoder.forward(rows_batch(np.arange(rows), decoder.device), pool)
