"""A device that computes as the CPU does and counts what crosses: each number that the host reads back makes it wait
for all that the device was given, on a GPU. So does what is sent there by a copy that blocks.

Tensors on ``FAR`` refuse to meet the CPU's in one operation, as a GPU's do. Operations whose result's shape depends on
values, and indexing with a mask, count as reading back: a GPU's host must wait for them just the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

FAR = torch.device("meta")
aten: Any = torch.ops.aten
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.bincount.default,
         aten._unique2.default, aten.repeat_interleave.Tensor, aten.equal.default, aten.is_nonzero.default}


class Far(torch.Tensor):
    """A tensor on ``FAR``; ``near`` holds its numbers."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> Far:
        far: Far = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype, device=FAR)
        far.near = near
        return far

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of crossings()")


class Crossings(TorchDispatchMode):
    """``waits`` counts, by operation, what made the host wait; "to the device" are copies that block."""

    def __init__(self, kind: type[Far] = Far) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.overloadpacket is aten.to:  # as it comes in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        given = tree_flatten((args, kwargs))[0]
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        far = [x for x in tensors if isinstance(x, Far)]
        wanted = kwargs.get("device")
        to_far = torch.device(wanted) == FAR if wanted is not None else bool(far)
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        is_copy = func in (aten.copy_.default, aten._to_copy.default)
        if far and not is_copy:
            mixed = [x for x in tensors if not isinstance(x, Far) and x.dim() > 0]
            assert not mixed, f"{func}: a tensor of the CPU among those of the device"
        if far and self._is_wait(func, args, to_far):
            self.waits[str(func)] += 1
        if is_copy and to_far and not all(isinstance(x, Far) for x in tensors) and not _lets_go(func, args, kwargs):
            self.waits["to the device"] += 1
        in_place = args[0] if args and isinstance(args[0], Far) and func._schema.is_mutable else None
        with torch.inference_mode(False), torch.no_grad():  # what is made in it cannot be wrapped
            result = func(*tree_map(_near, args), **tree_map(_near, kwargs))
            if in_place is not None:
                return in_place
            return tree_map(lambda x: self._kind(x) if isinstance(x, torch.Tensor) and to_far else x, result)

    @staticmethod
    def _is_wait(func: Any, args: Any, to_far: bool) -> bool:
        if func in WAITS:
            return True
        if func is aten._to_copy.default:
            return not to_far
        if func is aten.copy_.default:
            return not isinstance(args[0], Far)
        if func in (aten.index.Tensor, aten.index_put_.default):
            return any(x is not None and x.dtype == torch.bool for x in args[1])
        return False


def _near(x: Any) -> Any:
    return x.near if isinstance(x, Far) else x


def _lets_go(func: Any, args: Any, kwargs: Any) -> bool:
    if func is aten.copy_.default:
        return bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
    return bool(kwargs.get("non_blocking"))


class Made(TorchFunctionMode):
    """``torch.tensor`` makes its numbers where no dispatch mode sees it, and waits until they are there."""

    def __init__(self, crossings: Crossings) -> None:
        super().__init__()
        self._crossings = crossings

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") is not None and torch.device(kwargs["device"]) == FAR:
            self._crossings.waits["to the device"] += 1
            return Far(torch.tensor(*args, **kwargs | {"device": "cpu"}))
        return func(*args, **kwargs)


@contextmanager
def crossings() -> Iterator[Crossings]:
    mode = Crossings()
    with Made(mode), mode:
        yield mode


def sent(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x`` on ``FAR``."""
    return Far(x.clone())
