"""torch.compile for the two halves of a decoder layer: what stands before attention, and what stands after it.

Rules:
1. Only the halves are compiled: their one changing size is the number of rows, so two graphs (one row, more rows) serve
   every layer of a model. Planning, KV writes and attention change shape with every batch and stay eager.
2. All graphs are made before anything is served, by running the model once for each kind of batch.
3. Whatever goes wrong there (no C++ compiler, an operation that cannot be compiled) is a warning, and eager goes on.
4. Fused sums round otherwise: results agree with eager ones to rounding, not bit for bit. Target steps of one process
   all take the same path, so exactness is what it was.

It knows nothing about files, sessions or the kind of model.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

import numpy as np
import torch

from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.decoder import Decoder
from slipstream.engine.halves import EAGER, Halves, after_attention, before_attention, writing
from slipstream.engine.kv import KVPool
from slipstream.observe.log import logger

ROWS = (1, 3)  # one row is a graph of its own

M = TypeVar("M")


def compiled(build: Callable[[Halves], M], run: Callable[[M, int], object], what: str) -> M:
    """What ``build`` makes of compiled halves, after ``run`` took it through so many rows; of eager ones where that
    fails. what: for the log."""
    log, began_s = logger("engine"), perf_counter()
    try:
        model = build(Halves(writing(torch.compile(before_attention)), torch.compile(after_attention)))
        for rows in ROWS:
            run(model, rows)
    except Exception as error:  # compilers fail in their own ways, and none of them is a reason not to serve
        log.warning("not compiled: eager goes on; 'slipstream doctor' looks for a C++ compiler", what=what,
                    error=type(error).__name__, reason=str(error).strip().partition("\n")[0][:300])
        return build(EAGER)
    log.info("compiled", what=what, seconds=round(perf_counter() - began_s, 1))
    return model


def run_decoder(decoder: Decoder, rows: int) -> None:
    """One forward of ``rows`` rows on a pool of its own."""
    config = decoder.config
    pool = KVPool(config.num_layers, rows, config.num_kv_heads, config.head_dim, decoder.dtype, decoder.device)
    decoder.forward(rows_batch(np.arange(rows), decoder.device), pool)


def rows_batch(slots: np.ndarray, device: torch.device, features: torch.Tensor | None = None) -> ForwardBatch:
    """A causal segment of token 0, with so many rows as slots."""
    builder = BatchBuilder()
    builder.add([0] * len(slots), range(len(slots)), slots.tolist(), np.zeros(0, np.int64), logits="all")
    return builder.build(device, features)
