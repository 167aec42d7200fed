"""An EAGLE draft head on the CPU kernels, which grows all levels of a tree in one call (see ``trees.h``).

Rules:
1. A row's input is made here: its token's embedding and a state side by side, each with a norm of its own.
2. ``grow_trees`` gives the same trees as growing level by level with ``forward``: the operations of a row are the same.
3. The table of rotary rows grows by doubling, and so do the buffers. Results are never views of buffers.

It knows nothing about sessions, who owns slots, or files. Dimension key: see ``slipstream.engine``.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.choosing.logits import TokenHistory
from slipstream.choosing.sampling import RUNNERS_UP
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.int8 import as_int8
from slipstream.engine.kv import Indices, KVPool
from slipstream.engine.model import ModelConfig, Tensors, require_tensor
from slipstream.engine.native.program import (
    INITIAL_ROWS,
    LANES,
    BatchFrame,
    Buffers,
    NativeHead,
    NativeLayer,
    Packed,
    Program,
    RopeTable,
    Team,
    check_sizes,
)
from slipstream.engine.native.races import NativeRace, session_record
from slipstream.protocol.requests import Sampling

CHILD = np.dtype([("token", np.int64), ("score", np.float64)])
MOST_BITS = 64  # rows of a tree, as a row's ancestors are the bits of a word
MOST_PENDING = 16  # rows of one session; more rows are not a small forward


@dataclass(frozen=True, slots=True)
class Seed:
    """One session: its pending rows (tokens that the head has not read yet), and a tree to grow below the last one."""

    tokens: Sequence[int]  # [M] of the pending rows
    states: torch.Tensor  # bfloat16 [M, W] their states, read beside the tokens
    position: int  # rotary position of the first pending row
    context: Indices  # [C] slots of the KV before them
    slots: Indices  # [M + levels * K] for the pending rows and the tree's, level by level
    levels: int  # of the tree below the root's children
    base: int  # position of the root's children in the text, where the prompt's first token is 0
    sampling: Sampling | None  # how children are ranked; None: greedily, by the logits as they are
    num_output: int  # answer tokens before the root's children
    history: TokenHistory | None  # of the text up to the root; needed with penalties
    wanted: int = 0  # nodes that are sent of the tree: rows that cannot have children among them are left out; 0: all


@dataclass(frozen=True, slots=True)
class Grown:
    """The trees of B seeds. Row 0 is the root, the next K rows are its chosen children, and so on, level by level:
    R = 1 + L * K. Rows without a pick and rows beyond a seed's own levels are undefined."""

    tokens: Indices  # [B, R, K] children of each row, best first
    scores: NDArray[np.float64]  # [B, R, K] their log scores, as ``sampling.rank`` gives them
    picks: Indices  # [B, L, K] which candidates of the level above became a level's rows; -1 behind the last one
    states: torch.Tensor  # [B, R, W]
    known_levels: Indices  # [B] levels that are certain, counted from the root's children; deeper ones are undefined

    def select(self, places: list[int]) -> Grown:
        """The trees of the seeds at ``places``, in this order."""
        if places == list(range(len(self.known_levels))):
            return self
        return Grown(self.tokens[places], self.scores[places], self.picks[places], self.states[places],
                     self.known_levels[places])


class Trees(ctypes.Structure):
    """The arguments of a call; ``trees.h`` describes each field."""

    _fields_ = [*((name, kind) for names, kind in (
        ("body", ctypes.c_void_p), ("body_count", ctypes.c_int64), ("head logits", ctypes.c_void_p),
        ("logits_stride columns", ctypes.c_int64), ("normed states best", ctypes.c_void_p),
        ("sessions topk most_levels width window", ctypes.c_int64),
        ("cos sin seeds vocabulary choices", ctypes.c_void_p), ("runners_up", ctypes.c_int64),
        ("tokens pending_states kv_slots kv", ctypes.c_void_p), ("layer_stride", ctypes.c_int64),
        ("children picks known_levels row_states", ctypes.c_void_p)) for name in names.split())]


class Ranking:
    """The lm_head and the best tokens of each row, for at most C rows and one number of children."""

    __slots__ = ("best", "logits", "program", "topk")

    def __init__(self, team: Team, normed: torch.Tensor, head: Packed, vocabulary: torch.Tensor | None,
                 topk: int) -> None:
        rows, self.topk = len(normed), topk
        self.best = torch.empty(rows, 2 * topk, dtype=torch.int64)  # [C, K] of CHILD
        # Kernels read whole vectors, also beyond the last column: the rest of the last one is -inf.
        self.logits = logits = torch.full((rows, -(-head.outer // LANES) * LANES), -torch.inf)[:, : head.outer]
        self.program = Program(team, keep_cached=True)
        self.program.product(normed, head, logits)
        self.program.rank(logits, vocabulary, self.best)


class Call:
    """Arguments and results of calls for trees of one shape. Its memory is reused: with cold caches making arrays takes
    longer than filling them."""

    __slots__ = ("_children", "_known", "_picks", "_seeds", "_trees")

    def __init__(self, trees: Trees) -> None:
        """trees: with all fields that are the same in each call. It holds addresses: the owner must keep their memory
        alive as long as this object."""
        sessions, levels, topk = trees.sessions, trees.most_levels, trees.topk
        self._trees = trees
        self._children = np.zeros((sessions, 1 + levels * topk, topk), CHILD)
        self._picks = np.zeros((sessions, levels, topk), np.int64)
        self._known = np.zeros(sessions, np.int64)
        self._seeds = (ctypes.c_int64 * (9 * sessions))()
        trees.children, trees.picks, trees.known_levels = (
            made.__array_interface__["data"][0] for made in (self._children, self._picks, self._known))
        trees.seeds = ctypes.addressof(self._seeds)

    def __call__(self, team: Team, seeds: Sequence[Seed], states: torch.Tensor, table: RopeTable) -> Grown:
        """states: bfloat16 [M, W] of all pending rows of ``seeds``; table: with rows for all positions."""
        trees, records, tokens, slots, begin = self._trees, list[int](), list[int](), list[Indices](), 0
        choices, kept = list[bytes](), list[object]()
        for seed in seeds:
            records += (len(seed.tokens), begin, len(seed.context), seed.position, seed.levels, seed.base,
                        seed.num_output, -1 if seed.sampling is None else len(choices), seed.wanted)
            if seed.sampling is not None:
                choices.append(session_record(seed.sampling, seed.history, kept))
            tokens += seed.tokens
            slots += (seed.context, seed.slots)
            begin += len(seed.context) + len(seed.slots)
        self._seeds[:] = records
        packed = array("B", b"".join(choices))
        trees.choices = packed.buffer_info()[0]
        pending, entries = (ctypes.c_int64 * len(tokens))(*tokens), np.concatenate(slots)
        rows = 1 + trees.most_levels * trees.topk
        row_states = torch.empty(len(seeds), rows, trees.width, dtype=torch.bfloat16)
        trees.tokens, trees.kv_slots = ctypes.addressof(pending), entries.__array_interface__["data"][0]
        trees.pending_states, trees.row_states = states.data_ptr(), row_states.data_ptr()
        trees.cos, trees.sin = table.cos.data_ptr(), table.sin.data_ptr()
        team.grow(trees)
        return Grown(self._children["token"].copy(), self._children["score"].copy(), self._picks.copy(), row_states,
                     self._known.copy())


class NativeDraft:
    """One head's weights, and its lists of operations. It grows whole trees."""

    max_batch = 8  # of one call
    prunes = True
    __slots__ = ("_alone", "_body", "_buffers", "_calls", "_config", "_embedding", "_head", "_layers",
                 "_norm_before_residual", "_norm_output", "_norms", "_pool", "_ranking", "_states", "_table", "_team",
                 "_vocabulary", "race")

    def __init__(self, team: Team, config: ModelConfig, tensors: Tensors, norms: tuple[str, str, str],
                 pool: KVPool, norm_before_residual: bool, vocabulary: torch.Tensor | None, to_int8: bool = False,
                 norm_output: bool = False, cores: int = 0) -> None:
        """tensors: by name, on the CPU; norms: names of the norm weights of tokens, states and head; pool: of its KV;
        norm_before_residual: the residual stream begins with the normed state; vocabulary: int64 [V], the tokens of the
        logits' columns, None: column numbers are tokens; to_int8: as in ``NativeLayer``; norm_output: the next level
        reads states after the head's norm; cores: threads for ``grow_trees`` of a single session, if more than ``team``
        has. Raises ModelError."""
        check_sizes(config)
        self._team, self._config, self._pool = team, config, pool
        self._alone = Team(team.kernels, cores) if cores > team.threads else team
        embedding = require_tensor(tensors, "embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._embedding = embedding.to(torch.bfloat16).contiguous()
        self._norms = [require_tensor(tensors, name, config.hidden_size) for name in norms]
        self._norm_before_residual, self._norm_output = norm_before_residual, norm_output
        self._layers = [NativeLayer(team, config, tensors, "layers.0", 2 * config.hidden_size, False, to_int8),
                        *(NativeLayer(team, config, tensors, f"layers.{layer}", to_int8=to_int8)
                          for layer in range(1, config.num_layers))]
        lm_head = tensors["lm_head.weight"]
        self._head = NativeHead(team, as_int8(lm_head) if to_int8 else lm_head)
        self._vocabulary = vocabulary
        self.race = NativeRace(team, vocabulary)  # of its logits
        self._table = RopeTable(config)
        self._ranking: Ranking | None = None
        self._calls: dict[tuple[int, int, int], Call] = {}  # by sessions, levels and topk
        self._allocate(INITIAL_ROWS)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """``batch.features`` [T, H] -> of the rows with logits: states bfloat16 [R, H], logits float32 [R, V]."""
        assert batch.features is not None and batch.features.dtype == torch.bfloat16
        self._reach(batch.num_rows, 1 + int(batch.host.positions.max()))
        states = batch.features.contiguous()
        frame = BatchFrame.of(batch, self._pool, self._table.cos, self._table.sin, self._config.sliding_window)
        frame.frame.states = states.data_ptr()
        self._body.run(frame)
        normed = self._buffers.normed.index_select(0, batch.logit_rows)
        return self._states.index_select(0, batch.logit_rows), self._head(normed)

    def reshape(self, topk: int, levels: int) -> None:
        """Nothing: it grows trees of any shape."""

    def supports(self, rows: int, levels: int, topk: int, sampling: Sampling | None) -> bool:
        """Whether ``grow_trees`` can grow such a tree: at most MOST_PENDING pending ``rows`` and MOST_BITS tree rows, a
        ``topk`` within the vocabulary, and with ``sampling`` a vocabulary that its race supports."""
        columns = self._head.packed.outer
        return (rows <= MOST_PENDING and topk <= columns and topk * levels <= MOST_BITS
                and not (sampling is not None and self.race.vocabulary(columns) is None))

    def grow_trees(self, seeds: Sequence[Seed], topk: int, alone: bool = False) -> Grown:
        """The trees of all ``seeds``, at least one; KV of their rows is written. topk: K; a tree has at most MOST_BITS
        rows. alone: there is no other session, so its target likely waits, and its cores can be used."""
        most, pending = max(seed.levels for seed in seeds), sum(len(seed.tokens) for seed in seeds)
        assert 0 < topk <= self._head.packed.outer and topk * most <= MOST_BITS
        self._reach(max(pending, topk * len(seeds)), max(s.position + len(s.tokens) + s.levels for s in seeds))
        states = torch.cat([seed.states for seed in seeds]) if len(seeds) > 1 else seeds[0].states.contiguous()
        assert states.dtype == self._pool.kv.dtype == torch.bfloat16
        assert states.shape == (pending, self._config.hidden_size)
        call = self._calls.get((len(seeds), most, topk))
        if call is None:
            call = self._calls[len(seeds), most, topk] = self._call(len(seeds), most, topk)
        return call(self._alone if alone else self._team, seeds, states, self._table)

    def _call(self, sessions: int, levels: int, topk: int) -> Call:
        if self._ranking is None or self._ranking.topk != topk:
            self._ranking = Ranking(self._team, self._buffers.normed, self._head.packed, self._vocabulary, topk)
            self._calls.clear()
        body, head, config = self._body.op_array(), self._ranking.program.op_array(), self._config
        logits, kv = self._ranking.logits, self._pool.kv
        vocabulary = self.race.vocabulary(logits.shape[1])
        return Call(Trees(
            body=ctypes.addressof(body), body_count=len(body), head=ctypes.addressof(head), logits=logits.data_ptr(),
            logits_stride=logits.stride(0), columns=logits.shape[1],
            vocabulary=None if vocabulary is None else ctypes.addressof(vocabulary), runners_up=RUNNERS_UP,
            normed=self._buffers.normed.data_ptr(), states=self._states.data_ptr(), best=self._ranking.best.data_ptr(),
            sessions=sessions, topk=topk, most_levels=levels, width=config.hidden_size, window=config.sliding_window,
            kv=kv.data_ptr(), layer_stride=kv.stride(0)))

    def _reach(self, rows: int, positions: int) -> None:
        self._table.ensure(positions)
        if rows > len(self._states):
            self._allocate(2 * rows)

    def _allocate(self, rows: int) -> None:
        config, (of_tokens, of_states, of_head) = self._config, self._norms
        hidden, eps = config.hidden_size, config.norm_eps
        # Made in inference mode whoever calls: tensors made in it can only be written in it, and all calls are.
        with torch.inference_mode():
            self._buffers = buffers = Buffers.of(config, rows, 2 * hidden)
            further = replace(buffers, attention_input=torch.empty(rows, hidden, dtype=torch.bfloat16))
            embedded = torch.empty(rows, hidden)
            self._states = torch.empty(rows, hidden, dtype=torch.bfloat16)
        self._body = program = Program(self._team, keep_cached=True)
        token, state = torch.split(buffers.attention_input, hidden, 1)
        program.embed(self._embedding, embedded)
        program.norm(embedded, of_tokens, eps, token)
        program.widen(None, buffers.stream)
        program.norm(buffers.stream, of_states, eps, state)
        if self._norm_before_residual:
            program.widen(state, buffers.stream)
        self._layers[0].append_layer(program, buffers, 0)
        for number, layer in enumerate(self._layers[1:], 1):
            layer.append_input_norm(program, buffers.stream, further.attention_input)
            layer.append_layer(program, further, number)
        if self._norm_output:
            program.norm(buffers.stream, of_head, eps, self._states)
        else:
            program.to_bf16(buffers.stream, self._states)
        program.norm(buffers.stream, of_head, eps, buffers.normed)
        self._ranking = None
        self._calls.clear()
