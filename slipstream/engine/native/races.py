"""Keyed choices on the CPU kernels: the rows of many sessions in one call (see ``races.h``).

``choosing`` is the specification: results are its results, and rows for which this is not certain are marked.

Of sessions it knows their ``ChoiceRows`` only.
"""

from __future__ import annotations

import ctypes
import math
import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.choosing.logits import TokenHistory
from slipstream.choosing.noise import BLOCK
from slipstream.choosing.sampling import ChoiceRows, Winners
from slipstream.engine.native.program import LANES, RACE, Frame, Op, Team
from slipstream.protocol.requests import Sampling

CHOICE_ROWS = struct.Struct("=QdddqdddQQqQQqQqqqqQqQQq")
NONE = array("q")


class Vocabulary(ctypes.Structure):
    """``races.h`` describes each field."""

    _fields_ = [("ids", ctypes.c_void_p), ("starts", ctypes.c_void_p), ("columns", ctypes.c_void_p),
                ("num_ids", ctypes.c_int64), ("blocks", ctypes.c_int64)]


class NativeRace:
    """A ``sampling.Race`` for float32 logits on the CPU."""

    __slots__ = ("_kept", "_ops", "_team", "_vocabulary")

    def __init__(self, team: Team, vocabulary: torch.Tensor | None = None) -> None:
        """vocabulary: int64 [V] token ids of the columns; None: the columns are the ids."""
        self._team = team
        self._vocabulary: Vocabulary | None = Vocabulary()
        self._kept: tuple[NDArray[np.int64], ...] = ()
        if vocabulary is not None:
            self._vocabulary = self._describe(vocabulary.numpy().astype(np.int64))
        self._ops = (Op * 1)(Op(kind=RACE))

    def vocabulary(self, width: int) -> Vocabulary | None:
        """The vocabulary of ``width`` columns; None: no race supports it (its ids do not ascend)."""
        if self._vocabulary is not None and not self._kept:
            self._vocabulary.blocks = -(-width // BLOCK)
        return self._vocabulary

    def _describe(self, ids: NDArray[np.int64]) -> Vocabulary | None:
        if ids[0] < 0 or (np.diff(ids) <= 0).any():
            return None  # the columns of a noise block must be consecutive
        blocks, columns = int(ids[-1]) // BLOCK + 1, np.full(int(ids[-1]) + 1, -1, np.int64)
        columns[ids] = np.arange(len(ids))
        starts = np.searchsorted(ids, BLOCK * np.arange(blocks + 1)).astype(np.int64)
        ids = np.append(ids, np.zeros(LANES, np.int64))  # a kernel's vector may begin at the last one
        self._kept = (ids, starts, columns)  # kept alive, as kernels get their addresses
        return Vocabulary(ids.ctypes.data, starts.ctypes.data, columns.ctypes.data, len(columns), blocks)

    def __call__(self, logits: torch.Tensor, sessions: Sequence[ChoiceRows], most: int) -> Winners | None:
        """See ``sampling.Race``."""
        width = logits.shape[1]
        vocabulary = self.vocabulary(width)
        if vocabulary is None or logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.stride(1) != 1:
            return None
        assert not self._kept or width == len(self._kept[0]) - LANES
        records, kept = list[bytes](), list[object]()
        session_of, positions, outputs, paths, ends = (array("q") for _ in range(5))
        for place, session in enumerate(sessions):
            count = len(session.rows)
            assert session.rows.stop <= len(logits) and session.rows.step == 1
            records.append(_record(session, len(session_of), vocabulary.num_ids or width, kept))
            positions.extend(session.positions)
            outputs.extend(session.num_output)
            if session.sampling.penalised:
                ends.extend([len(paths)] * (len(session_of) - len(ends)))  # rows before it have none
                for path in session.paths:
                    paths.extend(path)
                    ends.append(len(paths))
            session_of.extend([place] * count)
        assert len(positions) == len(outputs) == len(session_of)
        ends.extend([len(paths)] * (len(session_of) - len(ends)))
        session_records = array("B", b"".join(records))
        size = 8 * len(session_of) * most
        tokens, scores, sure = array("q", bytes(size)), array("d", bytes(size)), session_of[:]
        arrays: tuple[array[Any], ...] = (session_records, session_of, positions, outputs, paths, ends, tokens, scores,
                                          sure)
        call = array("Q", (ctypes.addressof(vocabulary), *map(_at, arrays), most))  # ``RaceCall`` of ``races.h``
        op = self._ops[0]
        op.input, op.in_stride, op.inner, op.extra = logits.data_ptr(), logits.stride(0), width, _at(call)
        self._team.run(self._ops, Frame(len(session_of)))
        return Winners(tokens, scores, sure)


def _record(session: ChoiceRows, first: int, num_ids: int, kept: list[object]) -> bytes:
    """A session as a ``ChoiceRows`` of ``races.h``. first: index of its first row in the call; num_ids: size of the
    vocabulary; kept: gets the objects whose addresses the record has, to keep them alive."""
    sampling = session.sampling
    seen = counts = biased = stops = NONE
    amounts = array("d")
    masks, mask_words = 0, 0
    parents = nodes = NONE
    if session.tree is not None and len(session.rows) > 1:
        parents, nodes = array("q", session.tree[0]), array("q", session.tree[1])
        assert len(parents) == len(nodes) == len(session.rows)
        kept.append((parents, nodes))
    if session.adjusted:
        if session.sampling.penalised:
            assert session.history is not None, "penalties need a TokenHistory"
            seen, counts = session.history.tokens, session.history.counts
        biased = array("q", [token for token, _ in sampling.logit_bias])
        amounts = array("d", [amount for _, amount in sampling.logit_bias])
        stops = array("q", sampling.stop_token_ids)
        if session.allowed is not None:
            allowed = np.ascontiguousarray(session.allowed, np.uint32)
            assert len(allowed) == len(session.rows) and 32 * allowed.shape[1] >= num_ids
            masks, mask_words = allowed.ctypes.data, allowed.shape[1]
            kept.append(allowed)
        kept.append((seen, counts, biased, amounts, stops))
    return CHOICE_ROWS.pack(
        sampling.seed, sampling.temperature, sampling.top_p, math.log(sampling.min_p) if sampling.min_p else -math.inf,
        sampling.top_k, sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty,
        _at(seen), _at(counts), len(seen), _at(biased), _at(amounts), len(biased), _at(stops), len(stops),
        sampling.min_tokens, first, session.rows.start, masks, mask_words, _at(parents) if parents else 0, _at(nodes),
        len(session.rows))


def session_record(sampling: Sampling, history: TokenHistory | None, kept: list[object]) -> bytes:
    """The record of a session without its rows, for ``trees.h``. history: needed with penalties; kept: see
    ``_record``."""
    return _record(ChoiceRows(sampling, range(0), (), (), history, ()), 0, 0, kept)


def _at(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]
