"""From a model folder to a model: safetensors in, a checked ``CausalModel`` out.

Rules:
1. Only safetensors are read, never pickles; shards follow ``model.safetensors.index.json``.
2. A missing file, tensor or a wrong shape is a ModelError that names it.

It knows nothing about where folders come from (``models.py``) or how weights are laid out in memory (``layers.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slipstream.base.errors import ModelError
from slipstream.engine.compiled import compiled, run_decoder
from slipstream.engine.decoder import Decoder
from slipstream.engine.exact import check_exact
from slipstream.engine.flashinfer import FlashInferAttention, attention_for
from slipstream.engine.fp8 import with_fp8
from slipstream.engine.fused import halves_for
from slipstream.engine.graphs import CudaCapture, GraphedDecoder
from slipstream.engine.int8 import check_floats, check_int8, holds_int8
from slipstream.engine.model import DTYPES, CausalModel, ModelConfig, device_of, dtype_of, read_json
from slipstream.engine.native import native_or
from slipstream.engine.native.decoder import NativeDecoder
from slipstream.observe.log import logger

__all__ = ["DTYPES", "CausalModel", "ModelConfig", "dtype_of", "load_model", "load_tensors", "tensor_names"]


def load_tensors(folder: str | Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of the folder's safetensors by name, in their stored dtypes, on the CPU: those of ``names`` that are
    there, or (None) all. Raises ModelError."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _sharded(folder, index, names)
    return _tensors_of(folder / "model.safetensors", names)


def tensor_names(folder: str | Path) -> set[str]:
    """The names of the tensors that ``load_tensors`` would read; only headers are. Raises ModelError."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return set(_weight_map(index))
    with _opened(folder / "model.safetensors") as file:
        return set(file.keys())


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
    decoder = (compiled(lambda halves: make(halves=halves), run_decoder, "model") if compile_layers
               else make(halves=halves_for(kernels, config, dtype, device)))
    if quantize == "fp8":
        decoder = with_fp8(decoder)
    return GraphedDecoder(decoder, backend, CudaCapture(device)) if graphs and isinstance(
        backend, FlashInferAttention) else decoder


def _tensors_of(path: Path, wanted: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    with _opened(path) as file:
        names: list[str] = list(file.keys())
        return {name: file.get_tensor(name) for name in names if wanted is None or name in wanted}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.exists():
        raise ModelError(f"{path}: no such file; a model folder holds config.json and *.safetensors")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not readable as safetensors: {error}") from error


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ModelError(f"{index}: weight_map: expected an object of tensor name to file name")
    return weight_map


def _sharded(folder: Path, index: Path, names: Collection[str] | None) -> dict[str, torch.Tensor]:
    weight_map = _weight_map(index)
    if names is not None:
        weight_map = {name: file for name, file in weight_map.items() if name in names}
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise ModelError(f"{index}: weight_map: {name!r} is not the name of a file of this folder")
        tensors.update(_tensors_of(folder / name, names))
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise ModelError(f"{index}: tensor {missing[0]} is in the index but in none of its files")
    return tensors
