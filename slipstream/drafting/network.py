"""Network: the interface of a small model or a head for the code that grows trees.

A network is stateless between forwards but for its KV slots. ``lag`` 0: a row needs its token alone. ``lag`` 1: the
row of the token at position p also needs the target's state at p - 1, the one from which that token was chosen; below
the newest token the network's own states take its place.

It knows nothing about sessions or trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.choosing.sampling import Race
from slipstream.drafting.block import BlockStates
from slipstream.engine.batch import ForwardBatch, rows_batch
from slipstream.engine.kv import Slots
from slipstream.protocol.messages import FEATURE_DTYPES, Features, FeatureSpec


@dataclass(frozen=True, slots=True)
class Output:
    """The rows of a forward whose logits were wanted."""

    logits: torch.Tensor  # [R, V] float32, float64 for a float64 network; V of the draft vocabulary
    states: torch.Tensor | None  # [R, W] the input of a child's row; None with lag 0 and of blocks
    block: BlockStates | None = None  # the rows began blocks; then logits are [R * reach, V]


class Network(Protocol):
    """A draft model or head on one device."""

    lag: int
    bridged: bool  # whether rows whose states never come stand in their places: their tokens tell something
    vocab_size: int  # of the target
    hidden_size: int  # of the target; 0: any
    features: FeatureSpec | None  # None with lag 0
    vocabulary: torch.Tensor | None  # int64 [V] token ids of the logits' columns; None: the columns are the ids
    race: Race | None  # finds choices in its logits, beside ``choosing.sampling`` itself
    max_context: int  # tokens it was trained for
    slots: Slots
    device: torch.device

    def read(self, features: Sequence[Features]) -> list[torch.Tensor]:
        """Target states as rows of this network's input, [M, W] for each. Only with lag 1."""
        ...

    def forward(self, batch: ForwardBatch) -> Output:
        """Run a batch; ``batch.features`` [T, W] with lag 1. KV is written at the batch's slots."""
        ...


def some_tokens(ids: torch.Tensor, vocab_size: int, device: torch.device) -> torch.Tensor | None:
    """``Network.vocabulary`` of a network that scores the tokens ``ids`` int64 [V]."""
    return None if torch.equal(ids, torch.arange(vocab_size)) else ids.to(device)


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
