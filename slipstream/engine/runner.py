"""ModelRunner: a model with its KV pool, its slots and, when a drafter reads them, its feature rows.

Rules:
1. Feature rows lie beside the KV, one row a slot, so the features of a committed token can be read by its slot at any
   time. They are sent as the drafter's spec says: fused or not, in its dtype, as bytes (``FeatureWriter``). The drafter
   makes tensors of them again, in its own dtype (``FeatureReader``). A ``Fusion`` fuses the states of several layers.
   The target applies it where that makes rows shorter (``fused_reader``): during the forward where the model can do
   it, else when the rows are read.
2. The same runner serves target and draft; it never learns why a row is there.

It knows nothing about sessions, trees, sampling or the network.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.base.errors import DeviceFull, ModelError, first_line
from slipstream.choosing.sampling import GREEDY, Draws, Race
from slipstream.choosing.transfer import to_device
from slipstream.engine.batch import BatchBuilder, ForwardBatch, rows_batch
from slipstream.engine.device import SHARE, free_memory, gb
from slipstream.engine.kv import KVPool, Slots, SlotTable
from slipstream.engine.model import DTYPES, CausalModel, Map, ModelConfig, dtype_of
from slipstream.engine.native.decoder import NativeDecoder
from slipstream.engine.native.program import fits
from slipstream.engine.ops.layer import Linear, PartsNorm
from slipstream.protocol.messages import Features, FeatureSpec, Projection

LARGEST_HALF = torch.finfo(torch.float16).max


class Fusion:
    """x [M, F] -> x W^T [M, H]. With a norm, the norm is applied to x first."""

    __slots__ = ("_dtype", "_norm", "_product")

    def __init__(self, weight: torch.Tensor, norm: PartsNorm | None,
                 linear: Callable[[torch.Tensor], Map] = Linear) -> None:
        """weight: W [H, F]; linear: makes the function x -> x W^T of W, on the device of the states."""
        self._product, self._dtype, self._norm = linear(weight), weight.dtype, norm

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        rows = _cast(rows, self._dtype)
        if self._norm is not None:
            if self._norm.weight.device != rows.device:  # once: each copy would wait for all that the device has to do
                self._norm = replace(self._norm, weight=self._norm.weight.to(rows.device))
            rows = self._norm(rows)
        return _cast(self._product(rows), self._dtype)


class FeatureWriter:
    """Makes the bytes that one ``FeatureSpec`` asks for from target states."""

    __slots__ = ("_dtype", "_fusion", "fused")

    def __init__(self, spec: FeatureSpec, linear: Callable[[torch.Tensor], Map] = Linear, fused: bool = False) -> None:
        """linear: see ``Fusion``; fused: the rows that it gets were fused during the forward already."""
        self.fused = fused
        self._dtype, projection = dtype_of(spec.dtype), None if fused else spec.projection
        self._fusion = None if projection is None else Fusion(*_weights_of(projection), linear)

    def passes_unchanged(self, dtype: torch.dtype) -> bool:
        """Whether rows of this dtype are sent unchanged."""
        return self._fusion is None and dtype is self._dtype

    @torch.inference_mode()
    def __call__(self, rows: torch.Tensor) -> bytes:
        """rows: [M, taps * H], any float dtype; [M, width] if they are fused already. Returns M * width numbers in the
        spec's dtype, row-major and little-endian."""
        if self._fusion is not None:
            rows = self._fusion(rows)
        cast = _cast(rows, self._dtype).cpu().contiguous()
        # numpy has no bfloat16, so the bytes are copied by their address.
        return ctypes.string_at(cast.data_ptr(), cast.nbytes)


def _cast(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows in another dtype. What float16 cannot hold becomes its largest number: a head that has read one infinite
    state gives NaN for all tokens behind it, so it would never draft again."""
    rows = rows.to(dtype)  # first: that number itself is infinite if it was rounded to bfloat16 before
    return rows.clamp(-LARGEST_HALF, LARGEST_HALF) if dtype is torch.float16 else rows


@dataclass(frozen=True, slots=True)
class FeatureReader:
    """Turns feature bytes from the wire into a draft network's input. ``project``: applied to all rows at once [M, W],
    or None."""

    spec: FeatureSpec
    device: torch.device
    dtype: torch.dtype
    project: Map | None = None

    @torch.inference_mode()
    def __call__(self, features: Sequence[Features]) -> list[torch.Tensor]:
        """One tensor [M, W] for each of ``features``, which were checked against ``spec`` before."""
        content = bytearray(features[0].rows) if len(features) == 1 else bytearray().join([f.rows for f in features])
        rows = torch.frombuffer(content, dtype=DTYPES[self.spec.dtype]).view(-1, self.spec.width)
        rows = rows.to(self.device, self.dtype, non_blocking=True)
        if self.project is not None:
            rows = self.project(rows)
        if len(features) == 1:
            return [rows]
        return list(torch.split_with_sizes(rows, [f.num_rows for f in features]))


def fused_reader(layers: tuple[int, ...], dtype: str, project: bool, weight: torch.Tensor,
                 norm: PartsNorm | None = None, then: Map | None = None) -> FeatureReader:
    """A reader of the states of ``layers``, fused by a ``Fusion`` of ``weight`` [H, F] and ``norm``. dtype: on the
    wire; project: the target applies the fusion if that makes rows shorter; then: a further map of the fused rows,
    always applied here."""
    if project and weight.shape[0] < weight.shape[1]:
        projection = _projection_of(weight, dtype, norm)
        return FeatureReader(FeatureSpec(layers, projection.rows, dtype, projection), weight.device, weight.dtype, then)
    fusion = Fusion(weight, norm)
    return FeatureReader(FeatureSpec(layers, weight.shape[1], dtype), weight.device, weight.dtype,
                         fusion if then is None else lambda rows: then(fusion(rows)))


def _projection_of(weight: torch.Tensor, dtype: str, norm: PartsNorm | None) -> Projection:
    """The fusion as it is sent to a target."""
    matrix = weight if norm is None else torch.cat((weight, norm.weight[None]))
    content = matrix.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return Projection(weight.shape[0], weight.shape[1], dtype, hashlib.sha256(content).digest(), content,
                      *((norm.width, norm.eps) if norm is not None else ()))


def _weights_of(projection: Projection) -> tuple[torch.Tensor, PartsNorm | None]:
    """The weight [rows, columns] and the norm of ``columns`` numbers or None, both in the projection's dtype."""
    flat = torch.frombuffer(bytearray(projection.weights), dtype=dtype_of(projection.dtype))
    matrix, width = flat.view(-1, projection.columns), projection.norm_width
    norm = PartsNorm(matrix[projection.rows].clone(), width, projection.norm_eps) if width else None
    return matrix[: projection.rows], norm


PROFILE_CONTEXT = 128
LONG_CONTEXT = 1536  # tokens; behind so many, what reading them takes stands out from noise
LONG_ROWS = 16
PROFILE_REPEATS = 5
PROFILE_S = 10.0  # after so long no further turn begins: a large model on a CPU would start much later
PROFILED_ROWS = (1, 2, 4, 8, 12, 16, 32, 64)  # rows; our CPU kernels compute up to twelve rows together


class ModelRunner:
    """Runs batches of one model. All methods belong to the engine thread."""

    __slots__ = (
        "_features",
        "_fusion",
        "_has_features",
        "_host_features",
        "_native",
        "_projection",
        "_writer_of_spec",
        "model",
        "pool",
        "race",
        "slots",
        "table",
        "taps",
    )

    def __init__(self, model: CausalModel, num_slots: int, spare_slots: int = 0, race: Race | None = None) -> None:
        """spare_slots: further slots at the end of the pool, which ``slots`` never hands out (see ``graphs``). race: a
        faster way to choose tokens from the model's logits (``sampling.Race``); a NativeDecoder brings its own."""
        config = model.config
        self.model = model
        self._native = model if isinstance(model, NativeDecoder) else None
        self.race = race if self._native is None else self._native.race
        self.slots = Slots(num_slots)
        self.pool = KVPool(config.num_layers, num_slots + spare_slots, config.num_kv_heads, config.head_dim,
                           model.dtype, model.device)
        self.table = SlotTable(range(num_slots, num_slots + spare_slots))
        self.taps: tuple[int, ...] = ()
        self._fusion: Map | None = None  # fuses the tapped states during the forward
        self._projection: Projection | None = None  # what ``_fusion`` was made of, without its weights
        self._writer_of_spec: tuple[FeatureSpec, FeatureWriter] | None = None
        self._features = torch.empty(0, 0)  # [S, F]
        self._host_features: NDArray[np.uint8] | None = None  # [S, ·] bytes of ``_features``, if it is in host memory
        self._has_features = np.zeros(num_slots, bool)  # [S] slots whose feature row was written under the present taps

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def keep_features(self, spec: FeatureSpec) -> FeatureWriter:
        """Keep the states that ``spec`` names from the next forward on. Returns the object that makes the spec's bytes
        from them. Raises DeviceFull as ``set_taps`` does, or OutOfMemoryError; then nothing has changed."""
        if self._writer_of_spec is not None and self._writer_of_spec[0] == spec:
            return self._writer_of_spec[1]
        projection = spec.projection if self._can_fuse(spec) else None
        writer = FeatureWriter(spec, self.linear, projection is not None)
        self.set_taps(spec.layers, projection)
        self._writer_of_spec = spec.without_weights(), writer
        return writer

    def set_taps(self, layers: tuple[int, ...], projection: Projection | None = None) -> None:
        """Keep the states of ``layers`` (see FeatureSpec) from the next forward on; () stops. projection: the one that
        the model applies to them during the forward. A change forgets all rows: tokens computed before need a new
        prefill to have features. Raises DeviceFull if there is no memory for the rows; then the taps are as before, or
        none."""
        assert all(0 <= layer <= self.config.num_layers for layer in layers), f"no such layers: {layers}"
        if layers == self.taps and projection == self._projection:
            return
        width = len(layers) * self.config.hidden_size if projection is None else projection.rows
        # Checked first: on a CPU an allocation succeeds without memory behind it, and writing to it kills the process.
        size, old_bytes = self.slots.num_slots * width * self.model.dtype.itemsize, self._features.nbytes
        problem = f"feature rows of layers {layers} need {gb(size)} GB, which are not free"
        if size > SHARE * free_memory(self.model.device)[0] + old_bytes:
            raise DeviceFull(problem)
        before = self.taps, self._features.shape[1], self._fusion, self._projection, self._writer_of_spec
        try:
            fusion = None if projection is None else self.linear(_weights_of(projection)[0])
            self._allocate_features(layers, width, fusion, projection)
        except RuntimeError as error:  # mostly out of memory; cuBLAS raises its own error for that
            with suppress(RuntimeError):
                self._allocate_features(*before)
            raise DeviceFull(f"{problem}: {first_line(error)}") from error

    def _allocate_features(self, layers: tuple[int, ...], width: int, fusion: Map | None, projection: Projection | None,
                           writer_of_spec: tuple[FeatureSpec, FeatureWriter] | None = None) -> None:
        self.taps, self._host_features = (), None
        self._features = torch.empty(0, 0)  # old rows are freed first: both need not fit
        self._fusion = self._projection = self._writer_of_spec = None
        self._has_features[:] = False
        rows = self.slots.num_slots if layers else 0
        self._features = torch.empty(rows, width, dtype=self.model.dtype, device=self.model.device)
        if layers and self._features.device.type == "cpu":
            self._host_features = self._features.view(torch.uint8).numpy()
        self.taps, self._fusion, self._writer_of_spec = layers, fusion, writer_of_spec
        self._projection = None if projection is None else replace(projection, weights=b"")

    def _can_fuse(self, spec: FeatureSpec) -> bool:
        """Whether the model can apply the spec's projection during the forward."""
        projection = spec.projection
        return (projection is not None and self._native is not None and not projection.norm_width
                and dtype_of(projection.dtype) is dtype_of(spec.dtype) is self.model.dtype
                and fits(projection.rows, projection.columns))

    @torch.inference_mode()
    def states(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a batch: KV (and features, with taps) are written at its slots. Returns the states [T, H] after the final
        norm, for ``logits``."""
        hidden, tapped = self.model.forward(batch, self.pool, self.taps)
        if tapped is not None:
            self._features.index_copy_(0, batch.slots, tapped if self._fusion is None else self._fusion(tapped))
            self._has_features[batch.host.slots] = True
        return hidden

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a batch as ``states`` does. Returns the logits [R, V] of its rows that want them."""
        return self.logits(batch, self.states(batch))

    def logits(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of the batch's ``logit_rows``. hidden: [T, H], as ``states`` returns."""
        all_rows = len(batch.host.logit_rows) == len(hidden)
        return self.model.logits(hidden if all_rows else hidden.index_select(0, batch.logit_rows))

    def logits_and_best(self, batch: ForwardBatch, draws: Draws | None = None) -> tuple[torch.Tensor, list[int] | None]:
        """As ``forward``, and the argmax of each row if the model finds it in the same call, else None. draws: only the
        tokens that it chooses are wanted: they take the argmax's place, and the logits may be empty. The logits are
        valid until the next call."""
        if self._native is None:
            return self.forward(batch), None
        scored = self._native.logits_and_best(batch, self.pool, self.taps, self._features if self.taps else None, draws,
                                              self._fusion)
        if self.taps:
            self._has_features[batch.host.slots] = True
        return scored

    def linear(self, weight: torch.Tensor) -> Map:
        """The function x [M, I] -> x W^T [M, O] for W [O, I] on the model's device. Its result is valid until its next
        call."""
        if self._native is not None:
            return self._native.linear(weight)
        return Linear(weight.to(self.model.device))

    def features(self, slots: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        """[M, F], the feature rows of the tokens at ``slots``, in the model's dtype."""
        assert self.taps, "no taps are set"
        indices, device = np.asarray(slots, np.int64), self._features.device
        index = torch.from_numpy(indices) if device.type == "cpu" else to_device(indices, device)
        return self._features.index_select(0, index)

    def feature_bytes(self, slots: NDArray[np.int64], writer: FeatureWriter) -> bytes:
        """The bytes that ``writer`` makes from the feature rows at ``slots``. writer: what ``keep_features`` returned
        last."""
        assert writer.fused == (self._fusion is not None), "the rows are kept for another writer"
        if self._host_features is not None and writer.passes_unchanged(self.model.dtype):
            return self._host_features[slots].tobytes()
        return writer(self.features(slots))

    @torch.inference_mode()
    def copy_features(self, old: NDArray[np.int64], new: NDArray[np.int64]) -> None:
        """Copy the feature rows of slots ``old`` to ``new``, for tokens whose slots changed. Rows that are not there,
        or for whose copy memory is missing, are left out: a draft can do without them."""
        if not self.taps:
            return
        available = self._has_features[old]
        with suppress(torch.OutOfMemoryError):
            source, target = (to_device(slots[available], self._features.device) for slots in (old, new))
            self._features.index_copy_(0, target, self._features.index_select(0, source))
            self._has_features[new[available]] = True

    @property
    def feature_slots(self) -> NDArray[np.bool_] | None:
        """[S] whether a slot's feature row is there; None: no rows are kept."""
        return self._has_features if self.taps else None

    def features_from(self, slots: NDArray[np.int64]) -> int:
        """The first index in ``slots`` from which on every feature row is there; ``len(slots)``: the last is not."""
        unknown = np.flatnonzero(~self._has_features[slots])
        return int(unknown[-1]) + 1 if len(unknown) else 0

    def profile(self, rows: Sequence[int] = PROFILED_ROWS) -> tuple[dict[int, float], float]:
        """The cost of verifying: for each of ``rows`` the seconds of a forward with so many tree rows behind a context
        of PROFILE_CONTEXT tokens, and the seconds that each row beyond the first takes longer for each further token of
        context. Counts that do not fit the free slots are left out; where no long context fits, the latter is 0. Raises
        ModelError if the logits are NaN."""
        self._check_numbers()
        fitting = [(count, PROFILE_CONTEXT) for count in rows if PROFILE_CONTEXT + count <= self.slots.num_free]
        corners: list[tuple[int, int]] = []
        if min(self.slots.num_free, self.config.max_context) >= LONG_CONTEXT + LONG_ROWS:
            corners = [(count, context) for count in (1, LONG_ROWS) for context in (PROFILE_CONTEXT, LONG_CONTEXT)]
        took = self._fastest([*dict.fromkeys([*fitting, *corners])])
        read_s = 0.0
        if corners:
            near, far, many_near, many_far = (took[corner] for corner in corners)
            read_s = max(0.0, many_far - many_near - far + near) / (LONG_ROWS - 1) / (LONG_CONTEXT - PROFILE_CONTEXT)
        return {count: took[count, context] for count, context in fitting}, read_s

    def _fastest(self, cases: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
        # Seconds of steps of so many rows behind so many tokens.
        slots = self.slots.alloc(max((count + context for count, context in cases), default=0))
        try:
            self.pool.kv[:, to_device(slots, self.pool.kv.device)] = 0  # memory may hold anything
            # Cases take turns: a slow moment that hit one alone would make the next one look cheap. The first warms up.
            turns, until_s = list[dict[tuple[int, int], float]](), time.perf_counter() + PROFILE_S
            while len(turns) < 2 or (len(turns) <= PROFILE_REPEATS and time.perf_counter() < until_s):
                turns.append({(count, context): self._time_step(slots[: context + count], count)
                              for count, context in cases})
        finally:
            self.slots.free(slots)
        # Other work on the machine can only make a step slower, so the fastest one is what the step costs.
        return {case: min(turn[case] for turn in turns[1:]) for case in cases}

    def _check_numbers(self) -> None:
        slots = self.slots.alloc(1)
        try:
            self.pool.kv[:, to_device(slots, self.pool.kv.device)] = 0  # memory may hold anything
            logits = self.forward(rows_batch(slots, self.model.device))
        finally:
            self.slots.free(slots)
        if bool(logits.isnan().any()):
            raise ModelError("the model's logits are NaN, so every answer would be nonsense: its tensors hold NaN, or "
                             f"numbers that {str(self.model.dtype).removeprefix('torch.')} (model.dtype) cannot hold")

    def _time_step(self, slots: NDArray[np.int64], count: int) -> float:
        words, context = [(2 << i) - 1 for i in range(count)], len(slots) - count
        began = time.perf_counter()
        builder = BatchBuilder()
        builder.add([0] * count, range(context, context + count), slots[context:].tolist(), slots[:context], words,
                    count)
        logits, best = self.logits_and_best(builder.build(self.model.device), GREEDY)
        if best is None:
            logits.argmax(-1).tolist()
        return time.perf_counter() - began
