"""The identity of an answer: everything but prompt, seed and position that its tokens depend on.

Rules:
1. Two targets of one identity choose the same greedy token, as one of them does twice. A begun answer goes on at no
   other: it would be made of two models.
2. In doubt two differ: an answer that moves too rarely ends with an error, one that moves too often is wrong.
3. A target finds out its own identity when it loads, and never changes it. Who is not told one compares with nobody.

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
        """A digest of it, for those who keep it without a need to read it."""
        parts = (self.weights, self.dtype, self.quantize, self.kernels)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
