"""Communication between the ranks of one model: orders from rank 0 over pipes, and tensors between their devices.

Rules:
1. An order is a list of arrays of int32, the first of which begins with its kind; words go as halves. Of a batch its
   host arrays are sent, not its tensors.
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
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.base.errors import ModelError
from slipstream.engine.batch import ForwardBatch, HostRows

TIMEOUT_S = 60.0
HOST = "127.0.0.1"
FORWARD, LOGITS, WARM = range(3)


def pipe_of(end: socket.socket) -> Connection[bytes, bytes]:
    """One end of a pair of connected sockets, for whole messages of bytes. ``send_bytes`` raises OSError when the other
    end is gone, or takes nothing for ``TIMEOUT_S``; ``recv_bytes`` waits without limit, and raises EOFError at the end
    of the pipe."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(TIMEOUT_S), 0))
    return Connection(end.detach())


def next_message(pipe: Connection[bytes, bytes]) -> bytes:
    """Wait for the next message. Raises EOFError at the end of the pipe, also where that is within a message."""
    try:
        return pipe.recv_bytes()
    except OSError as error:
        raise EOFError from error


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
            assert batch.features is None, "draft heads are not split"
            host = batch.host
            return _packed((FORWARD, pool, num_slots), taps, batch.q_indptr, batch.kv_indptr, batch.mask_lens,
                           host.words.view(np.int32), host.tokens, host.positions, host.slots, host.logit_rows,
                           batch.flat_kv_slots)
        case LogitsOrder(rows):
            return _packed((LOGITS, rows))
        case WarmOrder(pool, num_slots, most_segments):
            return _packed((WARM, pool, num_slots, most_segments))


def decode_order(message: bytes, device: torch.device) -> Order:
    """The order of a message; a batch's tensors are placed on ``device``."""
    numbers, *arrays = _unpacked(message)
    kind, *fields = numbers.tolist()
    if kind == LOGITS:
        return LogitsOrder(*fields)
    if kind == WARM:
        return WarmOrder(*fields)
    (pool, num_slots), (taps, q_indptr, kv_indptr, mask_lens, halves, *rows) = fields, arrays
    tokens, positions, slots, logit_rows, kv_slots = [part.astype(np.int64) for part in rows]
    host = HostRows(tokens, positions, slots, halves.copy().view(np.int64), logit_rows, kv_slots)
    batch = ForwardBatch(host, tuple(q_indptr.tolist()), tuple(kv_indptr.tolist()), tuple(kv_indptr[:-1].tolist()),
                         tuple(mask_lens.tolist()), device)
    return ForwardOrder(pool, num_slots, tuple(taps.tolist()), batch)


def _packed(*arrays: Sequence[int] | NDArray[np.int64] | NDArray[np.int32]) -> bytes:
    """Their number, the length of each, and the numbers of all."""
    lengths = [len(arrays), *map(len, arrays)]
    return np.concatenate([np.asarray(part, np.int32) for part in (lengths, *arrays)]).tobytes()


def _unpacked(message: bytes) -> list[NDArray[np.int32]]:
    values = np.frombuffer(message, np.int32)
    found, at = list[NDArray[np.int32]](), 1 + int(values[0])
    for length in values[1:at].tolist():
        found.append(values[at : at + length])
        at += length
    return found


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
