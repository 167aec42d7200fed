"""What a drafter with weights runs: a small model or a head, behind one forward.

Rules:
1. A network is stateless between forwards but for its KV slots; sessions are the drafter's.
2. ``lag`` 0: a row needs its token alone. ``lag`` 1: the row of the token at position p also needs the target's state
   at p - 1, the one from which that token was chosen; below the newest token the network's own states take its place.

It knows nothing about sessions, trees or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.engine.batch import ForwardBatch, rows_batch
from slipstream.engine.kv import Slots
from slipstream.engine.model import dtype_of
from slipstream.protocol.messages import FEATURE_DTYPES, Features, FeatureSpec


@dataclass(frozen=True, slots=True)
class Output:
    """The rows of a forward whose logits were wanted."""

    logits: torch.Tensor  # [R, V] float32, float64 for a float64 network; V of the draft vocabulary
    states: torch.Tensor | None  # [R, W] the input of a child's row; None with lag 0


class Network(Protocol):
    """A draft model or head on one device."""

    lag: int
    vocab_size: int  # of the target
    hidden_size: int  # of the target; 0: any
    features: FeatureSpec | None  # None with lag 0
    vocabulary: torch.Tensor | None  # int64 [V] token ids of the logits' columns; None: the columns are the ids
    max_context: int  # tokens it was trained for
    slots: Slots
    device: torch.device

    def read(self, features: Sequence[Features]) -> list[torch.Tensor]:
        """Target states as rows of this network's input, [M, W] for each. Only with lag 1."""
        ...

    def forward(self, batch: ForwardBatch) -> Output:
        """Run a batch; ``batch.features`` [T, W] with lag 1. KV is written at the batch's slots."""
        ...


def wire_rows(features: Sequence[Features], spec: FeatureSpec, device: torch.device,
              dtype: torch.dtype) -> torch.Tensor:
    """The rows of ``features``, already checked against ``spec``, one below the other: [sum of M, width], in a
    network's own dtype and place. This is the edge at which a target's dtype becomes a drafter's."""
    content = bytearray(features[0].rows) if len(features) == 1 else bytearray().join(f.rows for f in features)
    rows = torch.frombuffer(content, dtype=dtype_of(spec.dtype)).view(-1, spec.width)
    return rows.to(device, dtype, non_blocking=True)


def run_network(network: Network, num_rows: int) -> None:
    """One forward of so many rows of token 0, whose slots are free again afterwards."""
    states, spec = None, network.features
    if spec is not None:
        content = bytes(num_rows * spec.width * FEATURE_DTYPES[spec.dtype])
        (states,) = network.read([Features(0, 0, content, num_rows, spec.dtype)])
    slots = network.slots.alloc(num_rows)
    try:
        network.forward(rows_batch(slots, network.device, states))
    finally:
        network.slots.free(slots)


def apart(rows: torch.Tensor, features: Sequence[Features]) -> list[torch.Tensor]:
    """[sum of M, W] -> [M, W] for each of ``features``."""
    if len(features) == 1:
        return [rows]
    return list(torch.split_with_sizes(rows, [f.num_rows for f in features]))
