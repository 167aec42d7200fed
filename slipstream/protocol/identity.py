"""The identity of an answer: everything but prompt, seed and position that its tokens depend on.

Rules:
1. Two targets of one identity choose the same greedy tokens. A begun answer goes on only at a target of its identity:
   at another one it would mix two models.
2. In doubt two identities differ: an answer that cannot move ends with an error, one that moves wrongly is wrong.
3. A target computes its identity when it loads, and never changes it. Where no identity is known (None), nothing is
   compared.

It knows nothing about files, engines or who compares.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    weights: str  # SHA-256 over the model's weights and configuration, which makes it their version, too
    dtype: str
    quantize: str
    kernels: str  # whose, for what kind of device, of which releases

    @property
    def tag(self) -> str:
        """A digest of the identity, for code that only compares it."""
        parts = (self.weights, self.dtype, self.quantize, self.kernels)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
