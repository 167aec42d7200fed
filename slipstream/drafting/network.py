"""Network: the interface of a draft model or head to the code that grows trees with it.

Between forwards a network keeps nothing but its KV slots. Without ``features`` a row needs only its token. With them
the row of the token at position p also needs the target's state at p - 1, from which that token was chosen (a lag of
1); for draft tokens the network's own states replace the target's.

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
    states: torch.Tensor | None  # [R, W] the input of a child's row; None without features and for blocks
    block: BlockStates | None = None  # set if each row began a block; then logits are [R * reach, V]


class Network(Protocol):
    """A draft model or head on one device."""

    zero_fill: bool  # whether a row whose target state is missing is computed with zeros: its token still helps
    vocab_size: int  # of the target
    hidden_size: int  # of the target; 0: any
    features: FeatureSpec | None  # the target states that it reads; None: none
    vocabulary: torch.Tensor | None  # int64 [V] token ids of the logits' columns; None: the columns are the ids
    race: Race | None  # a faster way to choose from its logits than that of ``choosing.sampling``
    max_context: int  # the longest context that it was trained for, in tokens
    slots: Slots
    device: torch.device

    def read(self, features: Sequence[Features]) -> list[torch.Tensor]:
        """Target states as rows of this network's input, [M, W] for each. Only with ``features``."""
        ...

    def forward(self, batch: ForwardBatch) -> Output:
        """Run a batch; ``batch.features`` [T, W] if it has ``features``. KV is written at the batch's slots."""
        ...


def some_tokens(ids: torch.Tensor, vocab_size: int, device: torch.device) -> torch.Tensor | None:
    """``Network.vocabulary`` for the scored tokens ``ids`` int64 [V], on ``device``; None if they are all tokens in
    order."""
    return None if torch.equal(ids, torch.arange(vocab_size)) else ids.to(device)


def run_network(network: Network, num_rows: int) -> None:
    """Run one forward of ``num_rows`` rows of token 0; their slots are freed afterwards."""
    states, spec = None, network.features
    if spec is not None:
        content = bytes(num_rows * spec.width * FEATURE_DTYPES[spec.dtype])
        (states,) = network.read([Features(0, 0, content, num_rows, spec.dtype)])
    slots = network.slots.alloc(num_rows)
    try:
        network.forward(rows_batch(slots, network.device, states))
    finally:
        network.slots.free(slots)
