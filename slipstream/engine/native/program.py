"""A forward as a list of operations, made once and run by a team of threads without Python in between.

Rules:
1. The list holds addresses of weights, which it keeps alive, and of buffers for a fixed number of rows. More rows need
   a new list.
2. The inputs of one batch (its KV slots, positions and visibility) are a Frame; nothing in the list depends on them.
3. Visibility is the rule of ``batch``, given for each row: a run of entries, then the bits of a word.
4. Layers are those of ``ops.layer``, with weights packed for the kernels; their input may be wider than the residual
   stream. The residual stream is float32 and is updated in place.

It knows nothing about whole models. Dimension key: see ``slipstream.engine``.
"""

from __future__ import annotations

import ctypes
import math
import struct
import weakref
from array import array
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F

from slipstream.base.errors import ModelError
from slipstream.choosing.sampling import GREEDY, Draws
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.int8 import Int8Matrix, Matrix, as_int8
from slipstream.engine.kv import KVPool, in_large_pages
from slipstream.engine.model import ModelConfig, Tensors
from slipstream.engine.native.compiled_kernels import Kernels
from slipstream.engine.ops.layer import Heads, LayerWeights, Rope
from slipstream.observe.log import logger

FIRST_POSITIONS = 4096  # rows of a new rotary table


def check_sizes(config: ModelConfig) -> None:
    """Raises ModelError for dimensions that the kernels do not support."""
    for name, size, of in (("hidden_size", config.hidden_size, LANES), ("head_dim", config.head_dim, GROUP),
                           ("intermediate_size", config.intermediate_size, LANES)):
        if size % of:
            raise ModelError(f"the CPU kernels need a {name} that is a multiple of {of}, and it is {size}; "
                             "set model.kernels=torch, without int8")


@dataclass(frozen=True, slots=True)
class Buffers:
    """Intermediate results of the layers of one list, for at most C rows."""

    stream: torch.Tensor  # float32 [C, H] the residual stream
    attention_input: torch.Tensor  # bfloat16 [C, in] the normed input of attention
    normed: torch.Tensor  # bfloat16 [C, H]
    qkv: torch.Tensor  # float32 [C, (Q + 2 G) D]
    queries: torch.Tensor  # bfloat16 [C, Q * D]
    attended: torch.Tensor  # bfloat16 [C, Q * D]
    inner: torch.Tensor  # bfloat16 [C, I]

    @staticmethod
    def of(config: ModelConfig, rows: int, in_features: int) -> Buffers:
        heads, size = config.num_heads, config.head_dim

        def rounded(width: int) -> torch.Tensor:
            return torch.empty(rows, width, dtype=torch.bfloat16)

        return Buffers(torch.empty(rows, config.hidden_size), rounded(in_features), rounded(config.hidden_size),
                       torch.empty(rows, (heads + 2 * config.num_kv_heads) * size), rounded(heads * size),
                       rounded(heads * size), rounded(config.intermediate_size))


class NativeLayer:
    """The weights of a layer, and methods that append its operations to a Program."""

    __slots__ = ("_weights",)

    def __init__(self, team: Team, config: ModelConfig, tensors: Tensors, prefix: str,
                 in_features: int | None = None, input_norm: bool = True, to_int8: bool = False) -> None:
        """tensors: by name, any float dtype or stored as int8 (see ``int8``), on the CPU; to_int8: round the matrices
        to int8; the rest as in ``LayerWeights.read``. Raises ModelError."""

        def packed(name: str, weight: Matrix, bias: torch.Tensor | None) -> Packed:
            return Packed(team, as_int8(weight) if to_int8 else weight, bias, silu=name == "gate_up")

        self._weights = LayerWeights.from_tensors(config, tensors, prefix, packed, in_features, input_norm)

    def append_input_norm(self, program: Program, x: torch.Tensor, out: torch.Tensor) -> None:
        """Append: the layer's input norm of x float32 [C, H], to out bfloat16 [C, H]."""
        assert self._weights.norm is not None
        program.norm(x, self._weights.norm, self._weights.heads.eps, out)

    def append_qkv(self, program: Program, buffers: Buffers, layer: int) -> None:
        """Append: queries and KV from ``buffers.attention_input``; KV is written to the pool. layer: number
        in the pool."""
        program.product(buffers.attention_input, self._weights.qkv, buffers.qkv)
        program.rotate_and_store(buffers.qkv, self._weights.heads, layer, buffers.queries)

    def append_layer(self, program: Program, buffers: Buffers, layer: int) -> None:
        """Append: the whole layer from ``buffers.attention_input`` on; it adds to ``buffers.stream``. layer: number in
        the pool."""
        weights = self._weights
        self.append_qkv(program, buffers, layer)
        program.attention(buffers.queries, weights.heads, layer, buffers.attended)
        program.product(buffers.attended, weights.o, buffers.stream, add=True)
        program.norm(buffers.stream, weights.post_norm, weights.heads.eps, buffers.normed)
        program.product(buffers.normed, weights.gate_up, buffers.inner)
        program.product(buffers.inner, weights.down, buffers.stream, add=True)


class RopeTable:
    """Rotary rows by position, float32 [P, 1, D]; it grows by doubling."""

    __slots__ = ("_rope", "cos", "sin")

    def __init__(self, config: ModelConfig) -> None:
        self._rope = Rope(config, torch.float32, torch.device("cpu"))
        self.cos, self.sin = self._rope.rows(torch.arange(min(FIRST_POSITIONS, config.max_context)))  # [P, 1, D]

    def ensure(self, positions: int) -> None:
        """Make rows for at least so many positions."""
        if positions > len(self.cos):
            self.cos, self.sin = self._rope.rows(torch.arange(2 * positions))


INITIAL_ROWS = 64  # rows of new buffers
MAX_SCREENED_ROWS = 64  # on processors with tiles
TRIAL_ROWS = (2, 8, 19)  # rows of a screen's trials: different code computes each
MAX_MISSED = 1 / 4  # a screen that leaves more of the sampled steps to all logits costs more than it saves
MAX_EXACT_SHARE = 1 / 16  # a screen that leaves more of the groups to compute exactly for any state is not used


def fits(outer: int, inner: int) -> bool:
    """Whether ``NativeLinear`` takes a bfloat16 W [O, I] of these sizes."""
    return outer % LANES == 0 and inner % 2 == 0


class NativeHead:
    """lm_head: logits x W^T in float32, or only the greatest of them (``screen``)."""

    def __init__(self, team: Team, weight: Matrix) -> None:
        """weight: [V, H], any float dtype or int8."""
        self._team = team
        self.packed = Packed(team, weight)
        self._column_norms = (torch.linalg.vector_norm(weight, dim=0, dtype=torch.float32)  # [H] norms of the columns
                         if isinstance(weight, torch.Tensor) else torch.ones(self.packed.inner))
        self._missed = 0.0  # share of the latest sampled steps whose screen left a row to all logits

    @cached_property
    def screen(self) -> Screen | None:
        """The screen, made and tried when it is first read; None: there is none, or it failed its trial."""
        made = Screen.of(self._team, self.packed)
        return made if made is not None and self._passes_trial(made) else None

    def uses_screen(self, rows: int, sampled: bool) -> bool:
        """Whether choices of ``rows`` rows should use the screen. With tiles a whole product of many rows costs little
        more than one of few, while a screen costs some exact groups for each row."""
        return ((rows <= MAX_SCREENED_ROWS or not self._team.kernels.tiles)
                and not (sampled and self._missed > MAX_MISSED) and self.screen is not None)

    def tell_sampled(self, missed: bool | None) -> None:
        """Tell of a sampled step: whether its screen left a row to all logits; None: it had none. It is tried again
        after some steps."""
        self._missed += -self._missed / 64 if missed is None else (missed - self._missed) / 8

    def _passes_trial(self, screen: Screen) -> bool:
        """Whether the screen finds the argmax of random states on this processor, and leaves few groups to compute
        exactly. If some inputs have far larger weights than others, it leaves many for ordinary states."""
        rng, seen = torch.Generator().manual_seed(0), 0
        for rows in TRIAL_ROWS:
            states = torch.randn(rows, self.packed.inner, generator=rng)
            # In every other row all inputs contribute equally.
            states[::2] *= self._column_norms.mean() / self._column_norms.clamp(min=1e-9)
            states = states.to(torch.bfloat16)
            best, program = torch.empty(rows, dtype=torch.int64), Program(self._team)
            most = program.choose(states, self.packed, screen, best)
            program.run(BatchFrame(Frame(rows=rows, num_picked=rows)))
            top, expected = self(states).max(1)
            if not torch.equal(best, expected):
                logger("engine").warning("a screened choice was wrong on this processor; all logits are computed")
                return False
            seen = max(seen, int((most >= top[:, None]).sum(1).max()))
        return seen <= max(1, MAX_EXACT_SHARE * screen.groups)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """States bfloat16 [R, H] -> logits float32 [R, V]."""
        out = torch.empty(hidden.shape[0], self.packed.outer)
        program = Program(self._team)
        program.product(hidden.contiguous(), self.packed, out)
        program.run(BatchFrame(Frame(hidden.shape[0])))
        return out


class NativeLinear:
    """x W^T: sums in float32, rounded to bfloat16."""

    __slots__ = ("_out", "_program", "_team", "packed")

    def __init__(self, team: Team, weight: torch.Tensor) -> None:
        """weight: bfloat16 [O, I] that ``fits``."""
        self._team = team
        self.packed = Packed(team, weight)
        self._allocate(INITIAL_ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """bfloat16 [M, I] -> bfloat16 [M, O], valid until the next call."""
        assert x.dtype == torch.bfloat16 and x.stride(1) == 1
        if len(x) > len(self._out):
            self._allocate(2 * len(x))
        self._program.read(x)
        self._program.run(BatchFrame(Frame(len(x)), x))
        return self._out[: len(x)]

    def append_to(self, program: Program, x: torch.Tensor, out: torch.Tensor | FeatureColumns) -> None:
        """Append: the product of x bfloat16 [C, I], to out bfloat16 [C, O]."""
        sums = torch.empty(len(x), self.packed.outer)
        program.product(x, self.packed, sums)
        program.to_bf16(sums, out)

    def _allocate(self, rows: int) -> None:
        self._out = torch.empty(rows, self.packed.outer, dtype=torch.bfloat16)
        self._program = Program(self._team)
        self.append_to(self._program, torch.empty(rows, self.packed.inner, dtype=torch.bfloat16), self._out)


NORM, PRODUCT, ROPE, ATTEND, ROUND, EMBED, WIDEN, RANK, BEST, RACE, SCREEN, CHOOSE = range(12)
STORE, ADD, SILU = range(3)
LINE, CHUNK = 64, 32 << 20  # bytes of a cache line, and of memory that is allocated at a time
DRAW = struct.Struct("=Qdddqqqq")  # ``Draw`` of ``op.h``
LANES, GROUP = 16, 32  # widths must be multiples of these: floats of the widest vector, and of two
QUAD = 4  # int8 numbers that one instruction may multiply and add


class Op(ctypes.Structure):
    """One operation; ``op.h`` describes each field."""

    _fields_ = [("kind", ctypes.c_int32), ("result", ctypes.c_int32), ("input", ctypes.c_void_p),
                ("in_stride", ctypes.c_int64), ("weight", ctypes.c_void_p), ("extra", ctypes.c_void_p),
                ("out", ctypes.c_void_p), ("out_stride", ctypes.c_int64), ("inner", ctypes.c_int64),
                ("outer", ctypes.c_int64), ("layer", ctypes.c_int64), ("eps", ctypes.c_float),
                ("heads", ctypes.c_int32), ("kv_heads", ctypes.c_int32), ("head_dim", ctypes.c_int32),
                ("scales", ctypes.c_void_p), ("picked_only", ctypes.c_int64), ("keep_cached", ctypes.c_int64)]


class Frame(ctypes.Structure):
    """The inputs of one forward; ``op.h`` describes each field."""

    _fields_ = [("rows", ctypes.c_int64), ("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p),
                ("slots", ctypes.c_void_p), ("kv_slots", ctypes.c_void_p), ("prefix_begin", ctypes.c_void_p),
                ("prefix_len", ctypes.c_void_p), ("tree_begin", ctypes.c_void_p), ("words", ctypes.c_void_p),
                ("kv", ctypes.c_void_p), ("layer_stride", ctypes.c_int64), ("tokens", ctypes.c_void_p),
                ("states", ctypes.c_void_p), ("positions", ctypes.c_void_p), ("segments", ctypes.c_void_p),
                ("num_segments", ctypes.c_int64), ("window", ctypes.c_int64), ("picked", ctypes.c_void_p),
                ("num_picked", ctypes.c_int64), ("features", ctypes.c_void_p), ("draws", ctypes.c_void_p),
                ("num_draws", ctypes.c_int64)]


class WeightMemory:
    """Memory for weights, in large pages if the system has them: a step reads all of it, page after page."""

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, count: int) -> torch.Tensor:
        """uint8 [count], not cleared."""
        size = -(-count // LINE) * LINE
        if size > len(self._free):
            self._free = in_large_pages(torch.empty(max(size, CHUNK), dtype=torch.uint8))
        taken, self._free = self._free[:size], self._free[size:]
        return taken[:count]


class Team:
    """Threads that run lists of operations; they sleep in between, and end with this object."""

    __slots__ = ("__weakref__", "_handle", "kernels", "threads", "weights")

    def __init__(self, kernels: Kernels, threads: int) -> None:
        self.kernels, self.threads, self.weights = kernels, threads, WeightMemory()
        self._handle = kernels.functions.slipstream_team_new(threads)
        # Not at exit: a thread may still run a list then, and the system ends all threads anyway.
        weakref.finalize(self, kernels.functions.slipstream_team_delete, self._handle).atexit = False

    def grow(self, trees: ctypes.Structure) -> None:
        """Grow draft trees; see ``draft.Trees``."""
        self.kernels.functions.slipstream_grow(self._handle, ctypes.addressof(trees))

    def run(self, ops: ctypes.Array[Op], frame: Frame) -> None:
        """Run the operations for one forward; returns when all are done."""
        self.kernels.functions.slipstream_run(self._handle, ctypes.addressof(ops), len(ops), ctypes.addressof(frame))


class Packed:
    """The weights of a product in the layout that the kernels read."""

    __slots__ = ("bias", "inner", "outer", "scales", "silu", "weight")

    def __init__(self, team: Team, weight: Matrix, bias: torch.Tensor | None = None, silu: bool = False) -> None:
        """weight: [O, I], any float dtype or int8; bias: [O] or None, any float dtype; silu: the first half of the
        outputs gates the second. Raises ModelError for widths that the kernels do not support."""
        source = weight.numbers if isinstance(weight, Int8Matrix) else weight.to(torch.bfloat16)
        rows, self.inner = source.shape
        self.silu, self.outer = silu, rows // 2 if silu else rows
        lanes = team.kernels.lanes
        if self.inner % 2 or (silu and self.outer % lanes):
            raise ModelError(f"a matrix of {rows} x {self.inner} does not fit the CPU kernels; "
                             "set model.kernels=torch, without int8")
        order = torch.arange(rows)
        if silu:  # a group has a vector of gates, then the outputs that they gate
            order = order.view(2, -1, lanes).transpose(0, 1).reshape(-1)
        padded = -(-rows // (2 * lanes)) * 2 * lanes
        self.weight = team.weights.allocate(padded * -(-self.inner // QUAD) * QUAD * source.itemsize)
        functions, ordered = team.kernels.functions, source[order]
        pack = functions.slipstream_pack_int8 if isinstance(weight, Int8Matrix) else functions.slipstream_pack
        pack(ordered.data_ptr(), rows, self.inner, self.weight.data_ptr())
        self.scales = _padded(weight.scales[order], padded) if isinstance(weight, Int8Matrix) else None
        self.bias = None if bias is None else _padded(bias[order], padded)


@dataclass(frozen=True, slots=True)
class Screen:
    """Data to rule out most outputs of a product as the greatest, without computing them exactly; see ``screen.h``."""

    numbers: torch.Tensor  # int8, as many as weights
    bounds: torch.Tensor  # float32 [3, O], to whole groups
    groups: int

    @staticmethod
    def of(team: Team, packed: Packed) -> Screen | None:
        """The screen of a product; None if its weights are not all finite, or int8 already (nothing would be gained),
        or if it has a bias or gates."""
        if packed.scales is not None or packed.silu or packed.bias is not None:
            return None
        group = 2 * team.kernels.lanes
        groups = -(-packed.outer // group)
        numbers, bounds = team.weights.allocate(groups * group * packed.inner), torch.empty(3, groups * group)
        known = team.kernels.functions.slipstream_screen(packed.weight.data_ptr(), packed.outer, packed.inner,
                                                         numbers.data_ptr(), bounds.data_ptr())
        return Screen(numbers, bounds, groups) if known else None


def _padded(vector: torch.Tensor, size: int) -> torch.Tensor:
    return F.pad(vector.float(), (0, size - len(vector)))


@dataclass(frozen=True, slots=True)
class FeatureColumns:
    """An output that is no buffer: the frame's feature rows by slot, ``width`` numbers wide, from ``column`` on."""

    column: int
    width: int


class Program:
    """A list of operations: methods append to it, ``run`` runs it."""

    __slots__ = ("_array", "_keep_cached", "_kept", "_ops", "_team")

    def __init__(self, team: Team, keep_cached: bool = False) -> None:
        """keep_cached: the list is run several times in a row, so its weights should stay in a cache."""
        self._team, self._keep_cached = team, keep_cached
        self._ops: list[Op] = []
        self._kept: list[object] = []
        self._array: ctypes.Array[Op] | None = None

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | FeatureColumns,
             picked_only: bool = False) -> None:
        """Append: RMS norm of x float32 [C, W] with weight [W], to out bfloat16 [C, W]. picked_only: only the rows that
        the frame picks, written one after the other."""
        self._add(Op(kind=NORM, inner=x.shape[1], eps=eps, picked_only=picked_only), x, out, weight.float())

    def product(self, x: torch.Tensor, packed: Packed, out: torch.Tensor, add: bool = False,
                picked_only: bool = False) -> None:
        """Append: x bfloat16 [C, I] times weights, to out float32 [C, O] (``add``: added to it); gated products write
        bfloat16. picked_only: as many rows as the frame picks."""
        result = SILU if packed.silu else ADD if add else STORE
        assert x.shape[1] == packed.inner and out.shape[1] == packed.outer
        assert out.dtype == (torch.bfloat16 if packed.silu else torch.float32)
        op = Op(kind=PRODUCT, result=result, inner=packed.inner, outer=packed.outer, picked_only=picked_only,
                keep_cached=self._keep_cached, scales=None if packed.scales is None else packed.scales.data_ptr())
        self._kept.append(packed)
        self._add(op, x, out, packed.weight, packed.bias)

    def rotate_and_store(self, x: torch.Tensor, heads: Heads, layer: int, queries: torch.Tensor) -> None:
        """Append: norm and rotate x float32 [C, (Q + 2 G) D], which holds queries, keys and values; KV is written to
        the pool's ``layer``, queries to bfloat16 [C, Q * D]."""
        norms = [None if norm is None else norm.float() for norm in (heads.q_norm, heads.k_norm)]
        self._add(Op(kind=ROPE, **_sizes(heads, layer)), x, queries, *norms)

    def attention(self, queries: torch.Tensor, heads: Heads, layer: int, out: torch.Tensor) -> None:
        """Append: attention of queries bfloat16 [C, Q * D] over the pool's ``layer``, to out bfloat16 [C, Q * D]."""
        self._add(Op(kind=ATTEND, **_sizes(heads, layer)), queries, out)

    def to_bf16(self, x: torch.Tensor, out: torch.Tensor | FeatureColumns) -> None:
        """Append: x float32 [C, W], rounded to out bfloat16 [C, W]."""
        self._add(Op(kind=ROUND, inner=x.shape[1]), x, out)

    def embed(self, table: torch.Tensor, out: torch.Tensor) -> None:
        """Append: rows of table bfloat16 [V, W] for the frame's tokens, to out float32 [C, W]."""
        self._add(Op(kind=EMBED, inner=table.shape[1]), table, out)

    def widen(self, x: torch.Tensor | None, out: torch.Tensor) -> None:
        """Append: x bfloat16 [C, W] (None: the frame's states) to out float32 [C, W]."""
        self._add(Op(kind=WIDEN, inner=out.shape[1]), x, out)

    def rank(self, x: torch.Tensor, tokens: torch.Tensor | None, best: torch.Tensor) -> None:
        """Append: the K best columns of x float32 [C, V] (padded with -inf to whole vectors), to best int64 [C, 2 K]:
        token and log probability (float64) in turn. tokens: int64 [V], those of the columns; None: column numbers."""
        assert x.stride(0) % LANES == 0
        self._add(Op(kind=RANK, inner=x.shape[1], outer=best.shape[1] // 2), x, best, tokens)

    def best(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Append: the argmax of as many rows of x float32 [C, V] as the frame picks, to out int64 [C]: the first among
        equals, or the first NaN, as in torch."""
        self._add(Op(kind=BEST, inner=x.shape[1], picked_only=True), x, out.view(-1, 1))

    def choose(self, x: torch.Tensor, packed: Packed, screen: Screen, out: torch.Tensor) -> torch.Tensor:
        """Append: the result of ``best`` for the product of as many rows of x bfloat16 [C, I] as the frame picks, to
        out int64 [C]. For sampled rows of the frame's draws it is the keyed choice, or -1: ``choosing`` must decide; 0
        where no walk through a tree reaches the row. Returns float32 [C, groups], to which a run writes an upper bound
        of each group's outputs."""
        most, each = torch.empty(len(out), screen.groups), torch.empty(len(out), screen.bounds.shape[1])
        assert x.shape[1] == packed.inner and packed.inner % LANES == 0
        self._kept.append((packed, screen))
        shape = {"inner": packed.inner, "outer": packed.outer, "picked_only": True}
        self._add(Op(kind=SCREEN, scales=screen.bounds.data_ptr(), **shape), x, most, screen.numbers, each)
        self._add(Op(kind=CHOOSE, scales=most.data_ptr(), layer=most.stride(0), **shape), x, out.view(-1, 1),
                  packed.weight, each)
        return most

    def op_array(self) -> ctypes.Array[Op]:
        """The list as the array that kernels run; nothing can be appended after it is made."""
        if self._array is None:
            self._array = (Op * len(self._ops))(*self._ops)
        return self._array

    def read(self, x: torch.Tensor) -> None:
        """Make the first operation read x [C, I] from now on; the caller keeps x alive."""
        first = self.op_array()[0]
        first.input, first.in_stride = x.data_ptr(), x.stride(0)

    def run(self, frame: BatchFrame) -> None:
        """Run the list for the frame's rows."""
        self._team.run(self.op_array(), frame.frame)

    def only(self, *kinds: int) -> Program:
        """A list of the operations of some kinds only, to time them."""
        part = Program(self._team)
        part._ops, part._kept = [op for op in self._ops if op.kind in kinds], self._kept
        return part

    def _add(self, op: Op, x: torch.Tensor | None, out: torch.Tensor | FeatureColumns,
             weight: torch.Tensor | None = None, extra: torch.Tensor | None = None) -> None:
        if isinstance(out, FeatureColumns):
            op.out, op.out_stride, op.layer = None, out.width, out.column
        else:
            assert out.stride(1) == 1
            op.out, op.out_stride = out.data_ptr(), out.stride(0)
        if x is not None:
            assert x.stride(1) == 1
            op.input, op.in_stride = x.data_ptr(), x.stride(0)
        op.weight = None if weight is None else weight.data_ptr()
        op.extra = None if extra is None else extra.data_ptr()
        self._ops.append(op)
        self._kept.extend((x, out, weight, extra))


def _sizes(heads: Heads, layer: int) -> dict[str, int | float]:
    return {"layer": layer, "eps": heads.eps, "heads": heads.queries, "kv_heads": heads.kv, "head_dim": heads.size}


def draw_records(draws: Draws) -> array[int]:
    """A ``Draw`` of ``op.h`` for each session."""
    firsts = accumulate(draws.counts[:-1], initial=0)
    return array("B", b"".join([
        DRAW.pack(sampling.seed, sampling.temperature, sampling.top_p,
                  math.log(sampling.min_p) if sampling.min_p else -math.inf, sampling.top_k, position, first, count)
        for sampling, position, first, count in zip(draws.samplings, draws.positions, firsts, draws.counts,
                                                         strict=True)]))


class BatchFrame:
    """A Frame, and the objects that it points to. For a list without attention ``Frame(rows)`` is enough."""

    __slots__ = ("_kept", "frame")

    def __init__(self, frame: Frame, *kept: object) -> None:
        self.frame, self._kept = frame, kept

    @staticmethod
    def of(batch: ForwardBatch, pool: KVPool, cos: torch.Tensor, sin: torch.Tensor, window: int = 0,
           features: torch.Tensor | None = None, draws: Draws = GREEDY) -> BatchFrame:
        """The frame of a batch over a pool. cos, sin: float32 [P, 1, D] by position; window: sliding window in tokens,
        0 for none; features: bfloat16 [S, F], where ``FeatureColumns`` outputs go; draws: for ``choose``, of the
        batch's ``logit_rows``."""
        kv, count = pool.kv, len(batch.mask_lens)
        assert kv.dtype == torch.bfloat16
        segments = array("q", (*batch.q_indptr, *batch.kv_indptr, *batch.begins, *batch.mask_lens))
        host = batch.host  # a tensor of each would take another 25 us in caches that the last step has emptied
        tokens, positions, slots, words, logit_rows, entries = (
            part.__array_interface__["data"][0] for part in (host.tokens, host.positions, host.slots, host.words,
                                                             host.logit_rows, host.kv_slots))
        frame = Frame(batch.num_rows, cos.data_ptr(), sin.data_ptr(), slots, entries, None, None, None, words,
                      kv.data_ptr(), kv.stride(0), tokens, None, positions, segments.buffer_info()[0], count, window,
                      logit_rows, len(host.logit_rows), None if features is None else features.data_ptr())
        records: array[int] | None = None
        if draws.samplings:
            records = draw_records(draws)
            assert sum(draws.counts) == frame.num_picked
            frame.draws, frame.num_draws = records.buffer_info()[0], len(draws.samplings)
        return BatchFrame(frame, batch, kv, cos, sin, segments, features, records)
