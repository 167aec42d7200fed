"""A GGUF file: its metadata and its tensors, dequantised to float32.

Rules:
1. Every value is checked for presence, type and size before it is used; a ModelError names the key or the tensor.
2. A dequantised value is what the format defines: ``scale * quant (+ minimum)`` in float32, nothing rounded further.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; blocks of 32 values, Q4_1 as (scale, minimum:
float16; 16 bytes of nibbles, low halves first), Q8_0 as (scale: float16; 32 int8).

It knows nothing about models, layers or tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
from numpy.typing import NDArray

from slipstream.base.errors import ModelError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Value = TypeVar("Value", str, int, float, bool)

BLOCK = 32  # values of one quantised block
MAGIC = b"GGUF"
# The reader of the gguf library trusts what it reads; a damaged file shows up as one of these.
DAMAGE = (ValueError, KeyError, IndexError, TypeError, OverflowError, OSError, AttributeError)


def dequantise_q4_1(raw: Bytes) -> Floats:
    """uint8 [..., 20 n] -> float32 [32 n], row-major."""
    blocks = raw.reshape(-1, 20)  # [n, 20]
    scale = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)  # [n, 1]
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)  # [n, 1]
    values = np.empty((len(blocks), BLOCK), np.float32)
    np.multiply(blocks[:, 4:] & 15, scale, out=values[:, :16])
    np.multiply(blocks[:, 4:] >> 4, scale, out=values[:, 16:])
    values += minimum
    return values.reshape(-1)


def dequantise_q8_0(raw: Bytes) -> Floats:
    """uint8 [..., 34 n] -> float32 [32 n], row-major."""
    blocks = raw.reshape(-1, 34)  # [n, 34]
    scale = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)  # [n, 1]
    values: Floats = blocks[:, 2:].view(np.int8) * scale
    return values.reshape(-1)


def _from_f32(raw: Bytes) -> Floats:
    return np.frombuffer(raw.tobytes(), np.dtype("<f4")).astype(np.float32, copy=False)


def _from_f16(raw: Bytes) -> Floats:
    return np.frombuffer(raw.tobytes(), np.dtype("<f2")).astype(np.float32)


# kind -> (bytes of one block, values of one block, its dequantisation)
KINDS: dict[str, tuple[int, int, Callable[[Bytes], Floats]]] = {
    "F32": (4, 1, _from_f32),
    "F16": (2, 1, _from_f16),
    "Q8_0": (34, BLOCK, dequantise_q8_0),
    "Q4_1": (20, BLOCK, dequantise_q4_1),
}


class GgufFile:
    """One open file, memory-mapped. ``tensor_shapes`` holds name -> shape in row-major (numpy) order."""

    __slots__ = ("_fields", "_name", "_tensors", "tensor_shapes")

    def __init__(self, path: Path) -> None:
        """Raises ModelError when ``path`` is not a readable GGUF file."""
        self._name = path.name
        try:
            with path.open("rb") as file:
                magic = file.read(len(MAGIC))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
        if magic != MAGIC:
            raise ModelError(f"{path.name}: not a GGUF file (it does not begin with 'GGUF')")
        try:
            reader = gguf.GGUFReader(path)
        except DAMAGE as error:
            raise ModelError(f"{path.name}: damaged GGUF file: {error}") from error
        self._fields: dict[str, Any] = dict(reader.fields)
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        self.tensor_shapes: dict[str, tuple[int, ...]] = {
            name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()
        }

    def value(self, key: str, kind: type[Value]) -> Value:
        """One metadata value. Raises ModelError when it is missing, of another type, or not finite."""
        found = self._contents(key)
        if kind is float and isinstance(found, int) and not isinstance(found, bool):
            found = float(found)
        if type(found) is not kind or (isinstance(found, float) and not math.isfinite(found)):
            raise ModelError(f"{self._name}: {key}: expected {kind.__name__}, found {type(found).__name__}")
        return found

    def values(self, key: str, kind: type[Value]) -> list[Value]:
        """One metadata array. Raises ModelError like ``value``."""
        found = self._contents(key)
        if not isinstance(found, list) or not all(type(item) is kind for item in found):
            raise ModelError(f"{self._name}: {key}: expected an array of {kind.__name__}")
        return found

    def tensor(self, name: str) -> Floats:
        """One tensor, dequantised: float32, of its shape in ``tensor_shapes``. Raises ModelError."""
        if name not in self._tensors:
            raise ModelError(f"{self._name}: no tensor {name}")
        tensor, shape = self._tensors[name], self.tensor_shapes[name]
        kind = tensor.tensor_type.name
        if kind not in KINDS:
            raise ModelError(f"{self._name}: {name}: type {kind} is not supported; known: {', '.join(KINDS)}")
        block_bytes, block_values, dequantise = KINDS[kind]
        raw = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1)
        count = math.prod(shape)
        if count % block_values or raw.size != count // block_values * block_bytes:
            raise ModelError(f"{self._name}: {name}: {raw.size} bytes do not fit shape {shape} of type {kind}")
        return dequantise(raw).reshape(shape)

    def _contents(self, key: str) -> object:
        if key not in self._fields:
            raise ModelError(f"{self._name}: no metadata key {key}")
        try:
            found: object = self._fields[key].contents()
        except DAMAGE as error:
            raise ModelError(f"{self._name}: {key}: damaged: {error}") from error
        return found
