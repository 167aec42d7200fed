"""Communication between the ranks of one model: orders from rank 0 over pipes, and tensors between their devices.

Rules:
1. An order is an array of int32: a kind, lengths, values. Of a batch its host arrays are sent, not its tensors.
2. Between orders a rank waits without limit; it ends when its pipe is closed. Rank 0 waits at most ``TIMEOUT_S`` for a
   rank to take an order.
3. All ranks call the same collective operations of ``Group`` in the same order. If one rank does not join an operation,
   the others' ends after ``TIMEOUT_S``: with an error on CPUs (gloo), by ending the process on GPUs (NCCL's watchdog).
   On a GPU only ``all_agree`` makes the host wait, so a graph can capture the others.
4. All ranks are processes of the same program on one machine. NCCL connects GPUs, gloo CPUs.

It knows nothing about models.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.base.errors import ModelError
from slipstream.engine.batch import ForwardBatch, HostRows

TIMEOUT_S = 60.0
HOST = "127.0.0.1"
LENGTH_BYTES = 8
FORWARD, LOGITS, WARM = range(3)
Int32s = NDArray[np.int32]


class Pipe:
    """One end of a pair of connected sockets that carries whole messages."""

    __slots__ = ("_socket",)

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: bytes) -> None:
        """Raises OSError when the other end is gone, or takes nothing for too long."""
        self._socket.settimeout(TIMEOUT_S)
        self._socket.sendall(len(message).to_bytes(LENGTH_BYTES, "little") + message)

    def receive(self) -> bytes:
        """The next message, however long it takes. Raises OSError at the end of the pipe."""
        self._socket.settimeout(None)
        return self._bytes(int.from_bytes(self._bytes(LENGTH_BYTES), "little"))

    def _bytes(self, count: int) -> bytes:
        found = bytearray(count)
        view = memoryview(found)
        while len(view):
            received = self._socket.recv_into(view)
            if not received:
                raise ConnectionResetError("the other end of the pipe is closed")
            view = view[received:]
        return bytes(found)

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True, slots=True)
class ForwardOrder:
    """Run a batch on pool number ``pool``, which has ``num_slots`` slots."""

    pool: int
    num_slots: int
    taps: tuple[int, ...]
    batch: ForwardBatch


@dataclass(frozen=True, slots=True)
class LogitsOrder:
    """Receive ``rows`` states from rank 0, and send back this rank's part of their logits."""

    rows: int


@dataclass(frozen=True, slots=True)
class WarmOrder:
    """Capture the graphs that steps of at most ``most_segments`` segments need."""

    pool: int
    num_slots: int
    most_segments: int


Order = ForwardOrder | LogitsOrder | WarmOrder


def encode_order(order: Order) -> bytes:
    """The bytes of an order; ``decode_order`` is the inverse."""
    match order:
        case ForwardOrder(pool, num_slots, taps, batch):
            parts = _arrays(batch)
            lengths = [len(taps), *(len(part) for part in parts)]
            return np.concatenate([_int32([FORWARD, pool, num_slots, *lengths, *taps]), *parts]).tobytes()
        case LogitsOrder(rows):
            return _int32([LOGITS, rows]).tobytes()
        case WarmOrder(pool, num_slots, most_segments):
            return _int32([WARM, pool, num_slots, most_segments]).tobytes()


def decode_order(message: bytes, device: torch.device) -> Order:
    """The order of a message; a batch's tensors are placed on ``device``."""
    values = np.frombuffer(message, np.int32)
    kind, *rest = values[:4].tolist()
    if kind == LOGITS:
        return LogitsOrder(rest[0])
    if kind == WARM:
        return WarmOrder(*rest)
    lengths, at = values[3:13].tolist(), 13
    arrays: list[NDArray[np.int64]] = []
    for length in lengths:
        arrays.append(values[at : at + length].astype(np.int64))
        at += length
    taps, tokens, positions, slots, words, logit_rows, kv_slots, q_indptr, kv_indptr, mask_lens = arrays
    words64 = words.astype(np.int32).view(np.int64)
    host = HostRows(tokens, positions, slots, words64, logit_rows, kv_slots)
    batch = ForwardBatch(host, tuple(q_indptr.tolist()), tuple(kv_indptr.tolist()), tuple(mask_lens.tolist()), device)
    return ForwardOrder(rest[0], rest[1], tuple(taps.tolist()), batch)


def _arrays(batch: ForwardBatch) -> list[Int32s]:
    assert batch.features is None, "draft heads are not split"
    host = batch.host
    return [_int32(host.tokens), _int32(host.positions), _int32(host.slots), host.words.view(np.int32),
            _int32(host.logit_rows), _int32(batch.flat_kv_slots), _int32(batch.q_indptr), _int32(batch.kv_indptr),
            _int32(batch.mask_lens)]


def _int32(values: Sequence[int] | NDArray[np.int64]) -> Int32s:
    return np.asarray(values).astype(np.int32)


class Rendezvous:
    """Where ranks find one another: a port of rank 0, open on this machine only."""

    __slots__ = ("_store", "port")

    def __init__(self, ranks: int, port: int = 0) -> None:
        """port: rank 0's; 0: this is rank 0."""
        self._store: Any = _distributed().TCPStore(HOST, port, ranks, port == 0, timedelta(seconds=TIMEOUT_S),
                                                   wait_for_workers=False)
        self.port: int = self._store.port

    def join(self, rank: int, ranks: int, device: torch.device) -> Group:
        """Waits for all other ranks. Raises RuntimeError if they do not come within ``TIMEOUT_S``."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        _distributed().init_process_group(backend, store=self._store, rank=rank, world_size=ranks,
                                          timeout=timedelta(seconds=TIMEOUT_S))
        return Group(rank, ranks, device)


class Group:
    """The collective operations of one rank. A process has one Group at a time."""

    __slots__ = ("_all", "_device", "rank", "ranks")

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self.rank, self.ranks, self._device = rank, ranks, device
        self._all = _distributed()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, written to x (all-reduce)."""
        self._all.all_reduce(x)
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, written to x (broadcast)."""
        self._all.broadcast(x, 0)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The x [R, W] of all ranks side by side: [R, ranks * W] (all-gather)."""
        parts = x.new_empty(self.ranks, *x.shape)
        self._all.all_gather(list(parts.unbind(0)), x)
        return parts.transpose(0, 1).reshape(x.shape[0], -1)

    def all_agree(self, ok: bool) -> bool:
        """Whether ``ok`` is true on all ranks. It waits for them."""
        return not self.all_reduce(torch.full((), not ok, dtype=torch.int32, device=self._device)).item()

    def close(self) -> None:
        self._all.destroy_process_group()


def _distributed() -> Any:
    if not torch.distributed.is_available():
        raise ModelError("model.tensor_parallel: this build of torch has no torch.distributed; use 1")
    return torch.distributed
