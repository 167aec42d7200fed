"""Proposer: what an adapter reads of our proposer. ``remote`` has it, and imports the adapter.

It knows nothing about vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.following.chains import Chains

if TYPE_CHECKING:  # importing this package does not import torch
    from slipstream_vllm.features import FeatureStore


class Proposer:
    connects: bool  # whether this rank connects to drafts
    keyed: bool  # whether keyed sampling is wanted; the adapter installs it
    chooser: Any  # set by the adapter
    states: FeatureStore | None
    chains: Chains
