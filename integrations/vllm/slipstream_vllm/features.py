"""Features: keeps the target's states that a drafter reads, taken from the engine's own forward.

Rules:
1. Taps are fixed when the engine loads, because graphs and compilation depend on them. A draft that reads other layers
   is refused, and the error names them.
2. Each KV slot has a row of states, written in the step that wrote the KV. So there are rows also for tokens from the
   prefix cache, for a preempted request, and for a draft that connects late or again.
3. They take at most ``most_bytes``: where that is too little for all slots, a new row takes the place of the oldest. A
   row belongs to a token if both its slot and its token are those that were written. A missing row is a gap; the
   drafter begins after it.
4. They are kept as the engine made them. A spec's projection and dtype are applied when rows are sent.
5. From a GPU the newest rows are copied on a separate stream, while the host reads the sampled tokens.

It knows nothing about vLLM's classes, sessions or links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from slipstream.base.errors import ConfigError, PairingError
from slipstream.observe.log import logger
from slipstream.protocol.messages import DraftHello, FeatureSpec, TargetHello
from slipstream.protocol.pairing import check_pair

CHUNK = 1024  # most rows of one product
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Indices = NDArray[np.int64]
FinalNorm = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Taps:
    """The layers whose states are kept: ids as ``FeatureSpec.layers``, in the order in which drafts name them. Raises
    ConfigError for ids that the target does not have."""

    layers: tuple[int, ...]
    num_layers: int  # of the target

    def __post_init__(self) -> None:
        if not all(0 <= layer <= self.num_layers for layer in self.layers):
            raise ConfigError(f"slipstream.layers: {list(self.layers)} are not layers of a target with "
                              f"{self.num_layers}")

    @property
    def inner(self) -> tuple[int, ...]:
        """The layers to request from the engine; it returns the state after the final norm anyway."""
        return tuple(sorted({layer for layer in self.layers if layer < self.num_layers}))

    def pick(self, inner: Sequence[torch.Tensor] | None, last: torch.Tensor) -> list[torch.Tensor]:
        """The states in the order of ``layers``. inner: of the inner layers in the model's order; last: after the final
        norm."""
        states = dict(zip(self.inner, inner or (), strict=True))
        return [states.get(layer, last) for layer in self.layers]

    def check(self, target: TargetHello, draft: DraftHello) -> str:
        """As ``check_pair``, and raises PairingError unless the draft reads exactly these layers."""
        doubt = check_pair(target, draft)
        if draft.features is not None and draft.features.layers != self.layers:
            layers = list(draft.features.layers)
            raise PairingError("features.layers", f"the draft reads {layers}, vLLM gives {list(self.layers)}: start it "
                               f"with slipstream.layers {layers}")
        return doubt


@dataclass(frozen=True, slots=True)
class Batch:
    """The B requests of a step, in the order of their rows in its forward."""

    requests: Sequence[str]
    scheduled: Indices  # [B] rows in the forward
    computed: Indices  # [B] tokens with KV before the step
    ends: Indices  # [B] tokens with KV after it; later rows are those of refused draft tokens
    sampled: Indices  # [B] tokens that the step committed
    tokens: NDArray[np.int32]  # [B, _]
    blocks: NDArray[np.int32]  # [B, _] KV blocks; block 0 belongs to no request
    block_size: int

    def slots(self, indices: Indices, positions: Indices) -> Indices:
        """KV slots of ``positions`` of the requests at ``indices``; -1: no slot."""
        blocks = self.blocks[indices, positions // self.block_size].astype(np.int64)
        return np.where(blocks > 0, blocks * self.block_size + positions % self.block_size, -1)


class FeatureStore:
    """The kept rows of states (see the module). Call it only from the engine's thread."""

    def __init__(self, taps: Taps, most_bytes: int) -> None:
        self.taps = taps
        self._most_bytes = most_bytes
        self._pool = torch.empty(0, 0)
        self._final_norm: FinalNorm | None = None
        self._copy_stream: torch.cuda.Stream | None = None
        self._owners: Indices = np.zeros(0, np.int64)  # [places] the slot whose state is there; -1: none
        self._tokens: NDArray[np.int32] = np.zeros(0, np.int32)
        self._places: Indices = np.zeros(0, np.int64)  # [slots] where each slot's newest row was put
        self._next_place = 0
        self._rows: RowEncoder | None = None
        self._batch: Batch | None = None
        self._indices: dict[str, int] = {}
        self._newest_rows: dict[str, tuple[int, int]] = {}  # request -> first of its rows that are sent, number
        self._host_copy: HostCopy | None = None
        self._problem = ""

    def allocate(self, hidden_size: int, dtype: torch.dtype, device: torch.device,
                 final_norm: FinalNorm | None = None) -> None:
        """Allocate the pool. Call it while the engine loads, so that its KV takes the memory that is left. final_norm:
        the model's, if its forward returns states before it."""
        self._final_norm = final_norm
        width = len(self.taps.layers) * hidden_size
        num_places = max(1, self._most_bytes // (width * dtype.itemsize))
        self._pool = torch.empty(num_places, width, dtype=dtype, device=device)
        self._copy_stream = None
        if device.type == "cuda":
            self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._owners, self._tokens = np.full(num_places, -1, np.int64), np.zeros(num_places, np.int32)
        self._places = np.zeros(num_places, np.int64)

    def set_feature_spec(self, spec: FeatureSpec) -> bool:
        """Send rows as ``spec`` says from now on. False: its layers differ, or there is no memory for its projection;
        then the former spec stays in force."""
        if spec.layers != self.taps.layers:
            return False
        try:
            self._rows = RowEncoder(spec, self._pool.device)
        except torch.OutOfMemoryError:
            return False
        return True

    def keep(self, batch: Callable[[], Batch], inner: Sequence[torch.Tensor] | None, last: torch.Tensor,
             reads: Callable[[str], bool]) -> None:
        """Keep the states of a step: ``inner`` taps and the ``last`` state, with a row for each row of the forward. For
        requests that a drafter ``reads`` the copy of the committed tokens' rows to the host begins here. It never
        raises: an error means no rows, and one log line for each new problem."""
        self._batch, self._indices, self._newest_rows, self._host_copy = None, {}, {}, None
        try:
            last = last if self._final_norm is None else self._final_norm(last)
            self._keep(batch(), self.taps.pick(inner, last), reads)
        except Exception as error:
            if (problem := repr(error)) != self._problem:
                self._problem = problem
                logger("vllm").exception("no states of this step")

    def _keep(self, batch: Batch, taps: Sequence[torch.Tensor], reads: Callable[[str], bool]) -> None:
        self._batch, self._indices = batch, {request: index for index, request in enumerate(batch.requests)}
        offsets = np.cumsum(batch.scheduled) - batch.scheduled
        self._send_newest(batch, taps, offsets, reads)
        indices, steps = _spread(batch.ends - batch.computed)
        positions = batch.computed[indices] + steps
        slots = batch.slots(indices, positions)
        rows, tokens = offsets[indices] + steps, batch.tokens[indices, positions]
        if not (has_slot := slots >= 0).all():
            slots, rows, tokens = slots[has_slot], rows[has_slot], tokens[has_slot]
        at = self._take_places(slots)
        self._owners[at] = slots
        self._tokens[at] = tokens
        # Of more rows than there are places the last ones keep them.
        if not (is_newest := self._owners[at] == slots).all():
            at, rows = at[is_newest], rows[is_newest]
        if len(at):
            self._pool.index_copy_(0, self._near(at), self._side_by_side(taps, rows).to(self._pool.dtype))

    def newest_rows(self, request: str) -> bytes | None:
        """The rows for the tokens that the last step committed: of the position before each; None: there are none."""
        span = self._newest_rows.get(request)
        if span is None or self._host_copy is None:
            return None
        return self._host_copy.rows(*span)

    def rows_since(self, request: str, start: int) -> tuple[int, int, bytes]:
        """The kept rows of a request of the last step, from position ``start`` on and after the last gap. Returns the
        first position, the number of rows, and the rows."""
        index, batch = self._indices.get(request), self._batch
        if index is None or batch is None or self._rows is None:
            return start, 0, b""
        positions = np.arange(start, int(batch.ends[index]), dtype=np.int64)
        slots = batch.slots(np.full(len(positions), index), positions)
        known = (slots >= 0) & (slots < len(self._places))
        at = self._places[np.where(known, slots, 0)]
        gaps = np.flatnonzero((self._owners[at] != slots) | ~known
                              | (self._tokens[at] != batch.tokens[index, positions]))
        at = at[int(gaps[-1]) + 1 :] if len(gaps) else at
        end = int(batch.ends[index])
        try:
            parts = [HostCopy(self._rows(self._pool.index_select(0, self._near(at[first : first + CHUNK]))),
                              self._copy_stream)
                     for first in range(0, len(at), CHUNK)]
        except torch.OutOfMemoryError:  # treated as a gap
            return end, 0, b""
        return end - len(at), len(at), b"".join(part.rows() for part in parts)

    def _take_places(self, slots: Indices) -> Indices:
        """A place for each of ``slots``: its own while there is one for every slot, as a text that the prefix cache
        has may be old, and else those that were taken longest ago."""
        if len(slots) and (most := int(slots.max()) + 1) > len(self._places):
            self._places = np.concatenate((self._places, np.zeros(2 * most - len(self._places), np.int64)))
        taken = slots
        if len(self._places) > len(self._owners):
            taken = (self._next_place + np.arange(len(slots))) % len(self._owners)
            self._next_place = (self._next_place + len(slots)) % len(self._owners)
        self._places[slots] = taken
        return taken

    def _send_newest(self, batch: Batch, taps: Sequence[torch.Tensor], offsets: Indices,
                     reads: Callable[[str], bool]) -> None:
        if self._rows is None:
            return
        counts = np.where([reads(request) for request in batch.requests], batch.sampled, 0)
        counts[counts > batch.ends - batch.computed] = 0
        indices, steps = _spread(counts)
        if not len(indices):
            return
        first = offsets + batch.ends - batch.computed - counts
        self._host_copy = HostCopy(self._rows(self._side_by_side(taps, first[indices] + steps)), self._copy_stream)
        begins = np.cumsum(counts) - counts
        self._newest_rows = {request: (int(begins[index]), int(counts[index]))
                             for index, request in enumerate(batch.requests) if counts[index]}

    def _side_by_side(self, taps: Sequence[torch.Tensor], rows: Indices) -> torch.Tensor:
        near = self._near(rows)
        return torch.cat([tap.index_select(0, near) for tap in taps], dim=-1)

    def _near(self, indices: Indices) -> torch.Tensor:
        return torch.from_numpy(indices).to(self._pool.device)


def _spread(counts: Indices) -> tuple[Indices, Indices]:
    """Counts (2, 0, 3) become owners (0, 0, 2, 2, 2) and their own numbers (0, 1, 0, 1, 2)."""
    counts = np.maximum(counts, 0)
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)


class RowEncoder:
    """Applies the projection and the dtype of one spec to states."""

    def __init__(self, spec: FeatureSpec, device: torch.device) -> None:
        self._dtype = DTYPES[spec.dtype]
        self._weight: torch.Tensor | None = None
        if (projection := spec.projection) is not None:
            flat = torch.frombuffer(bytearray(projection.weights), dtype=DTYPES[projection.dtype])
            weights = flat.view(-1, projection.columns).to(device)
            self._weight, self._norms = weights[: projection.rows], weights[projection.rows :]
            self._norm_width, self._norm_eps = projection.norm_width, projection.norm_eps

    @torch.inference_mode()
    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """[M, taps * H] -> [M, width] in the dtype of the wire."""
        if self._weight is not None:
            states = _cast(states, self._weight.dtype)
            if self._norm_width:
                count = states.shape[1] // self._norm_width
                parts = zip(states.chunk(count, 1), self._norms[0].chunk(count), strict=True)
                states = torch.cat([F.rms_norm(part, norm.shape, norm, self._norm_eps) for part, norm in parts], 1)
            states = F.linear(states, self._weight)
        return _cast(states, self._dtype)


def _cast(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In another dtype; what float16 cannot hold becomes its largest number (see ``slipstream.engine.runner``)."""
    states, most = states.to(dtype), torch.finfo(dtype).max
    return states.clamp(-most, most) if dtype is torch.float16 else states


class HostCopy:
    """Rows that are being copied to the host. The code for GPUs was reviewed and has never run on one."""

    def __init__(self, rows: torch.Tensor, copy_stream: torch.cuda.Stream | None) -> None:
        """copy_stream: the stream that copies them; None: they are copied at once."""
        self._event: torch.cuda.Event | None = None
        if copy_stream is None:
            self._host = rows.cpu().contiguous()
            return
        self._host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        copy_stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(copy_stream):
            self._host.copy_(rows, non_blocking=True)
            rows.record_stream(copy_stream)  # its memory is not reused before the copy is done
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(copy_stream)

    def rows(self, first: int = 0, count: int | None = None) -> bytes:
        """The bytes of ``count`` rows from ``first`` on (None: all); it waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        rows = self._host[first:] if count is None else self._host[first : first + count]
        # numpy has no bfloat16, so the rows are read as bytes.
        return rows.view(torch.uint8).numpy().tobytes()
