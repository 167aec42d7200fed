"""Stage ``ranks`` of ``make gpu``: a model on two devices against the same on one. One GPU skips it, and says so.

It knows nothing about what is shared out: see ``slipstream.engine.parts``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.exactness import DTYPES, LIMITS, Subject, relative, scripted
from bench.pace import CONTEXT, Stepper
from bench.shapes import SMALL, TINY, write_folder
from bench.stage import Finding, Given, free, seconds
from slipstream.base.config import ModelSection
from slipstream.engine.loading import graphed, load_model
from slipstream.engine.model import CausalModel
from slipstream.engine.ranks import ranked_model

RANKS = 2
SLOTS, PADDING = 2000, 128  # of which rows that fill up a graph take the last ones
ROWS = (1, 16, 64)


def ranks_stage(given: Given) -> Iterator[Finding]:
    devices = torch.cuda.device_count() if given.device.type == "cuda" else RANKS
    if devices < RANKS:
        yield Finding("skipped", f"{RANKS} GPUs are needed, and {devices} can be seen")
        return
    with TemporaryDirectory() as made:
        folder = given.model or write_folder(Path(made), SMALL if given.full else TINY)
        for dtype in DTYPES:
            yield from _compared(given, folder, dtype)
    free()


def _compared(given: Given, folder: Path, dtype: str) -> Iterator[Finding]:
    kind = given.device.type
    one = graphed(load_model(folder, ModelSection(dtype=dtype, device=kind)))
    two = ranked_model(folder, ModelSection(dtype=dtype, device=kind, tensor_parallel=RANKS))
    try:
        pairs = zip(_logits(two), _logits(one), strict=True)
        worst = max(float(relative(found, right).max()) for found, right in pairs)
        yield Finding(f"{dtype}: largest error of a row", worst, "rms", f"<= {LIMITS[dtype]:g}")
        steppers = [Stepper(model, CONTEXT + max(ROWS) + PADDING) for model in (one, two)]
        for rows in ROWS:
            alone_s, shared_s = (seconds(of.tree(rows, CONTEXT), given.device, given.repeats) for of in steppers)
            yield Finding(f"{dtype}: a step of {rows} rows by one device's", shared_s / alone_s, "ratio")
    finally:
        two.close()


def _logits(model: CausalModel) -> list[torch.Tensor]:
    subject = Subject.of(model, SLOTS + PADDING)
    return [subject.logits(batch) for _, batch in scripted(model.config.vocab_size, SLOTS)]
