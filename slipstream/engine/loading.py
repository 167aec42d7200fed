"""From a model folder to a model that is ready: it picks engine, kernels, attention and quantisation.

Rules:
1. A setting that cannot be met is a ModelError that names the field; before anything is loaded, if that is possible.
2. A setting that is left open is decided once, here, and the log says what was chosen and why.
3. Kernels that must be exact are tried first: the rows of a random tree and of a prompt must have the same bits as
   plain steps. Our CPU kernels (``native``) pass, as they sum in a fixed order; torch's order depends on the number of
   rows.

It knows nothing about where folders come from (see ``slipstream.models``), sessions or pools.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from slipstream import __version__
from slipstream.base.config import ModelSection
from slipstream.base.errors import ModelError
from slipstream.engine.batch import rows_batch
from slipstream.engine.decoder import WHOLE, Decoder, Split, unread_names
from slipstream.engine.flashinfer import FlashInferAttention, attention_for
from slipstream.engine.fp8 import with_fp8
from slipstream.engine.fp8_blocks import FIELD
from slipstream.engine.graphs import CudaCapture, GraphedDecoder
from slipstream.engine.int8 import check_floats, check_int8, holds_int8, with_embedding
from slipstream.engine.kv import KVPool
from slipstream.engine.model import (
    CausalModel,
    ModelConfig,
    Tensors,
    device_of,
    dtype_of,
    explain_out_of_memory,
    fp8_block,
    load_tensors,
    of_folder,
    warn_unread,
)
from slipstream.engine.native import native_or
from slipstream.engine.native.decoder import NativeDecoder
from slipstream.engine.native.program import Team
from slipstream.engine.ops.compiled import compiled
from slipstream.engine.ops.fused import operations_for, rounding_for
from slipstream.engine.trial import Sessions
from slipstream.models.folder import code_digest
from slipstream.observe.log import logger
from slipstream.protocol.identity import Identity
from slipstream.protocol.tree import DraftTree

CONTEXT, ROWS = 120, 16  # in the trial of rule 3: tokens before the random tree, and its nodes
ROOT = Path(__file__).parents[1]
CHOICE_PACKAGES = ("choosing", "engine", "grammar")


@explain_out_of_memory("the model")
def load_model(folder: str | Path, section: ModelSection, compile_layers: bool = False) -> CausalModel:
    """The model in ``folder``, ready, with the settings of ``section`` except its path and tensor_parallel.
    compile_layers: see ``compiled``. Raises ModelError."""
    stored_int8, native_required = holds_int8(folder), section.kernels == "native"
    int8 = stored_int8 or section.quantize == "int8"
    native_allowed = section.engine == "decoder" and not compile_layers and section.kernels != "torch"
    if int8:
        check_int8("model.quantize", section.quantize, section.dtype, section.device, native=native_allowed)
    elif section.quantize == "fp8" and (native_required or section.engine != "decoder" or compile_layers):
        raise ModelError("model.quantize: fp8 is for engine decoder, without kernels native and without compile")
    if native_required and not (native_allowed and section.dtype == "bfloat16"
                                and torch.device(section.device).type == "cpu"):
        raise ModelError("model.kernels: native is for dtype bfloat16, device cpu and engine decoder, without compile; "
                         "float32 and float64 need no such kernels")
    if section.engine == "hf":
        if fp8_block(folder) is not None:
            raise ModelError(f"{Path(folder) / 'config.json'}: {FIELD}: fp8 in blocks is read by engine decoder alone; "
                             "take the model's folder without quantisation")
        if compile_layers:
            logger("engine").warning("not compiled: engine hf has no compiled layers; eager goes on")
        # transformers takes seconds to import, which the default engine need not pay.
        from slipstream.engine.hf import HFModel

        return HFModel.from_folder(folder, section.dtype, section.device)
    config, device = ModelConfig.from_folder(folder), device_of(section.device)
    if not stored_int8:
        check_floats(folder)
    tensors, dtype = with_embedding(config, load_tensors(folder)), dtype_of(section.dtype)
    warn_unread(folder, unread_names(config, tensors))
    choice = ("native" if native_required or int8
              else "auto" if native_allowed and section.quantize == "none" else "torch")

    def native(team: Team) -> CausalModel:
        return NativeDecoder(config, tensors, team, int8)

    with of_folder(folder):
        model = native_or(choice, dtype, device, "model", native,
                          partial(torch_decoder, config, tensors, dtype, device, section, compile_layers))
    return check_exact(model) if native_required else model


def identity_of(model: CausalModel, section: ModelSection, weights: str) -> Identity:
    """The identity of a loaded model: two targets with the same one choose the same greedy tokens. weights: the hash of
    its files. The kernels' part names all that changes rounding: their kind, the kind of device, the number of ranks,
    the versions of torch and Slipstream, and a hash of our source."""
    if model.device.type == "cuda":
        found = torch.cuda.get_device_properties(model.device)  # kernels split their work by its multiprocessors
        device = f"cuda {found.major}.{found.minor} of {found.multi_processor_count}"
    else:
        device = f"{model.device.type} {torch.backends.cpu.get_cpu_capability()}"
    return Identity(weights, str(model.dtype).removeprefix("torch."), section.quantize,
                    f"slipstream {__version__} {code_digest(ROOT, CHOICE_PACKAGES)}, torch {torch.__version__}, "
                    f"{section.engine}, {model.kernels}, {device}, ranks {section.tensor_parallel}")


def graphed(model: CausalModel, all_agree: Callable[[bool], bool] = bool) -> CausalModel:
    """The model as a GraphedDecoder if its attention can be captured (its pool then needs ``spare_slots``), else the
    model itself. all_agree: see ``GraphedDecoder``."""
    if isinstance(model, Decoder) and isinstance(model.attention, FlashInferAttention):
        return GraphedDecoder(model, model.attention, CudaCapture(model.device), all_agree=all_agree)
    return model


def torch_decoder(config: ModelConfig, tensors: Tensors, dtype: torch.dtype, device: torch.device,
                  section: ModelSection, compile_layers: bool = False, split: Split = WHOLE) -> Decoder:
    """A decoder on torch, with the kernels and the quantisation of ``section``. config: of the rank's part, if there is
    a ``split``; tensors: of the whole model."""
    make = partial(Decoder, config, tensors, dtype, device, attention=attention_for(config, dtype, device), split=split)
    decoder = (compiled(lambda ops: make(ops=ops), _warm_up, "model") if compile_layers
               else make(ops=operations_for(section.kernels, config, dtype, device)))
    if section.quantize == "fp8":
        return with_fp8(decoder, rounding_for(section.kernels, config, device))
    return decoder


def _warm_up(decoder: Decoder, rows: int) -> None:
    """One forward of ``rows`` rows on a pool made for it."""
    config = decoder.config
    pool = KVPool(config.num_layers, rows, config.num_kv_heads, config.head_dim, decoder.dtype, decoder.device)
    decoder.forward(rows_batch(np.arange(rows), decoder.device), pool)


def check_exact(model: CausalModel) -> CausalModel:
    """The same model, if it passes the trial of rule 3. Raises ModelError if not."""
    if not passes_trial(model):
        raise ModelError("model.kernels: native: on this machine a tree's rows differ from plain steps; serve with "
                         "model.dtype=float32 instead")
    return model


def passes_trial(model: CausalModel) -> bool:
    """Whether the logits of a random tree's and a prompt's rows have the same bits as those of plain steps: those of
    the prompt's last row and of the nodes on the tree's longest path are compared."""
    rng, sessions, drafted, plain = np.random.default_rng(0), Sessions(model), 0, 1
    parents = [-1, *(int(rng.integers(node)) for node in range(1, ROWS))]
    tokens = rng.integers(model.config.vocab_size, size=CONTEXT + ROWS).tolist()
    tree = DraftTree(CONTEXT + 1, tokens[CONTEXT:], parents, list(range(ROWS)), [0.0] * ROWS)
    context = tokens[:CONTEXT]
    prompt = sessions.run({drafted: context})
    sessions.run({plain: context[:-1]})
    if not torch.equal(prompt[-1:], sessions.run({plain: context[-1:]})):
        return False
    rows, longest = sessions.run_tree(drafted, tree), max(map(tree.path, range(ROWS)), key=len)
    return all(torch.equal(sessions.run({plain: [tree.tokens[node]]})[0], rows[node]) for node in longest)
