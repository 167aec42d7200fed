"""One product, y = x W^T + b, as a layer calls it.

It knows nothing about layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import library

Map = Callable[[torch.Tensor], torch.Tensor]


class Linear:
    """With W packed once where that is faster: oneDNN's blocked layout on CPU in float32 and bfloat16, 1.4 to 1.6
    times as fast as ``F.linear`` on few rows. Elsewhere it is ``F.linear``."""

    __slots__ = ("_bias", "_other", "_packed", "_total", "_weight", "in_features", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, total: Map | None = None) -> None:
        """weight [O, I], bias [O] or None. total: of what it gives, where several ranks sum it."""
        self.out_features, self.in_features = weight.shape
        self._bias, self._total = bias, total
        self._other: Map | None = None
        self._packed = (weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
                        and _onednn_works())
        self._weight = (torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None) if self._packed
                        else weight.contiguous())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O]."""
        y = self._own(x)
        return y if self._total is None else self._total(y)

    def only(self, product: Map) -> None:
        """Compute x W^T by ``product`` from now on; W itself is given up."""
        self._other, self._packed = product, False
        self._weight = torch.empty(0)

    def weight(self) -> torch.Tensor:
        """W [O, I], as it was given."""
        return self._weight.to_dense() if self._packed else self._weight

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        if self._other is not None:
            y = self._other(x)
            return y if self._bias is None else y.add_(self._bias)
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        if torch.compiler.is_compiling():
            opaque: torch.Tensor = torch.ops.slipstream.packed_linear(x, self._weight, self._bias)
            return opaque
        return _packed_linear(x, self._weight, self._bias)


def _packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _packed_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


# A compiled graph takes packed weights as constants or not at all, so there the operation is one of our own. Registered
# by hand, because what ``library.custom_op`` does around each call shows in a step's time.
_OPERATIONS: Any = library.Library("slipstream", "DEF")  # type: ignore[no-untyped-call]
_OPERATIONS.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_OPERATIONS.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
library.register_fake("slipstream::packed_linear", _packed_shape, lib=_OPERATIONS)


def _onednn_works() -> bool:
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
