"""What rank 0 tells the other ranks of a model to compute, and the pipe that it is told through.

Rules:
1. An order is an array of int32: a kind, lengths, values. A batch travels as what the host knows of it.
2. Between orders a rank waits for ever, and the end of the pipe is the end of the rank. Whoever gives orders waits at
   most ``TIMEOUT_S`` for a rank to take one.

It knows nothing about devices. Both ends are the same program on the same machine.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.engine.batch import ForwardBatch, HostRows
from slipstream.engine.group import TIMEOUT_S

LENGTH_BYTES = 8
FORWARD, LOGITS, WARM = range(3)
Words = NDArray[np.int32]


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
            read = self._socket.recv_into(view)
            if not read:
                raise ConnectionResetError("the other end of the pipe is closed")
            view = view[read:]
        return bytes(found)

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True, slots=True)
class ForwardOrder:
    """Run a batch on the pool of a number, which has so many slots."""

    pool: int
    num_slots: int
    taps: tuple[int, ...]
    batch: ForwardBatch


@dataclass(frozen=True, slots=True)
class LogitsOrder:
    """Take so many states from rank 0, and give their logits."""

    rows: int


@dataclass(frozen=True, slots=True)
class WarmOrder:
    """Capture what steps of so many segments need."""

    pool: int
    num_slots: int
    most_segments: int


Order = ForwardOrder | LogitsOrder | WarmOrder


def written(order: Order) -> bytes:
    """As it travels."""
    match order:
        case ForwardOrder(pool, num_slots, taps, batch):
            parts = _arrays(batch)
            lengths = [len(taps), *(len(part) for part in parts)]
            return np.concatenate([_words([FORWARD, pool, num_slots, *lengths, *taps]), *parts]).tobytes()
        case LogitsOrder(rows):
            return _words([LOGITS, rows]).tobytes()
        case WarmOrder(pool, num_slots, most_segments):
            return _words([WARM, pool, num_slots, most_segments]).tobytes()


def read(message: bytes, device: torch.device) -> Order:
    """The order of a message; a batch's tensors are placed on ``device``."""
    values = np.frombuffer(message, np.int32)
    kind, *rest = values[:4].tolist()
    if kind == LOGITS:
        return LogitsOrder(rest[0])
    if kind == WARM:
        return WarmOrder(*rest)
    lengths, at = values[3:13].tolist(), 13
    cut: list[NDArray[np.int64]] = []
    for length in lengths:
        cut.append(values[at : at + length].astype(np.int64))
        at += length
    taps, tokens, positions, slots, words, logit_rows, kv_slots, q_indptr, kv_indptr, mask_lens = cut
    whole = words.astype(np.int32).view(np.int64)
    host = HostRows(tokens, positions, slots, whole, logit_rows, kv_slots)
    batch = ForwardBatch.of(host, q_indptr.tolist(), kv_indptr.tolist(), mask_lens.tolist(), host.placed(device))
    return ForwardOrder(rest[0], rest[1], tuple(taps.tolist()), batch)


def _arrays(batch: ForwardBatch) -> list[Words]:
    assert batch.features is None, "draft heads are not cut"
    host = batch.host
    return [_words(host.tokens), _words(host.positions), _words(host.slots), host.words.view(np.int32),
            _words(host.logit_rows), _words(host.kv_slots), _words(batch.q_indptr), _words(batch.kv_indptr),
            _words(batch.mask_lens)]


def _words(values: Sequence[int] | NDArray[np.int64]) -> Words:
    return np.asarray(values).astype(np.int32)
