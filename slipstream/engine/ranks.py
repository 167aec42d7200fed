"""Tensor parallelism: a model on several devices of one machine, split as in Megatron (Shoeybi et al., arXiv
1909.08053). This process is rank 0; it starts the others, each as ``main FD``.

Rules of the ranks:
1. Every call is an order that all ranks carry out, so calls may come in any sequence. Pools have numbers: a call on a
   pool of rank 0 uses the pool of the same number on each rank, with that rank's KV heads. Only rank 0 returns results.
2. ``config`` has the dimensions of one rank's part (heads, MLP width): pools, memory and attention are sized from it.
   Its other fields (hidden size, layers, vocabulary) are those of the whole model.
3. If a rank dies, or an order fails, the ranks are out of step for good: every later call raises RanksLost, the
   ``watch`` callback is called once, and all must be started anew. A SlipstreamError while a rank loads is sent to rank
   0 as text; an error in an order ends the rank's process.
4. A wait of rank 0 has a limit (see ``orders``), except that for a rank to load: this ends when the rank does.

Rules of the split:
5. A rank has some KV heads with their query heads, and an equal share of the MLP's columns. So it is a smaller model
   with its own attention and KV pool. The residual stream is whole on every rank.
6. There are two all-reduces a layer: after ``o`` and after ``down``, whose input columns are split. Only rank 0 adds
   their biases.
7. The embedding is whole on every rank: splitting it would save no reads (rows are looked up) and cost a third
   all-reduce. lm_head is split by vocabulary, since a step reads all of it; the ranks' logits are put side by side.
8. A dimension that does not divide by the number of ranks is a ModelError that names the field.

It knows nothing about sessions. Format of a ``RankPart``: JSON, for the other ranks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F

from slipstream.base.config import LogSection, ModelSection
from slipstream.base.errors import ModelError, RanksLost, SlipstreamError, first_line
from slipstream.base.offload import main_command
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.decoder import Split, unread_names
from slipstream.engine.graphs import GraphedDecoder
from slipstream.engine.int8 import EMBEDDING, HEAD, Matrix, check_floats, holds_int8, with_embedding
from slipstream.engine.kv import KVPool
from slipstream.engine.loading import graphed, torch_decoder
from slipstream.engine.model import (
    CausalModel,
    ModelConfig,
    Tensors,
    dtype_of,
    explain_out_of_memory,
    load_tensors,
    require_tensor,
    warn_unread,
)
from slipstream.engine.ops.layer import Linear
from slipstream.engine.orders import (
    ForwardOrder,
    Group,
    LogitsOrder,
    Order,
    Rendezvous,
    WarmOrder,
    decode_order,
    encode_order,
    next_message,
    pipe_of,
)
from slipstream.observe.log import configure, logger

SPLIT_AXIS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}
SUMMED = ("o", "down")  # products whose results are summed over the ranks


@dataclass(frozen=True, slots=True)
class RankPart:
    """What a rank loads: its part of the model in ``folder``, with the settings of ``section``. port: of the
    ``Rendezvous``. With device cuda, rank r uses GPU r."""

    rank: int
    port: int
    folder: str
    section: ModelSection

    @property
    def ranks(self) -> int:
        return self.section.tensor_parallel

    @property
    def torch_device(self) -> torch.device:
        device = self.section.device
        return torch.device(device, self.rank) if device == "cuda" else torch.device(device)

    def message(self) -> bytes:
        return json.dumps([self.rank, self.port, self.folder, self.section.model_dump()]).encode()

    @staticmethod
    def read(message: bytes) -> RankPart:
        rank, port, folder, section = json.loads(message)
        return RankPart(rank, port, folder, ModelSection.model_validate(section))


def part_of(folder: str | Path, section: ModelSection) -> RankPart:
    """The part of rank 0. Raises ModelError, before anything is loaded, if the model cannot be split as ``section``
    says, or devices are missing."""
    ranks, field = section.tensor_parallel, "model.tensor_parallel"
    if section.engine != "decoder" or section.kernels == "native":
        raise ModelError(f"{field}: it is for engine decoder, without kernels native")
    if section.device not in ("cpu", "cuda"):
        raise ModelError(f"{field}: device '{section.device}' cannot be shared out; use cuda (the first GPUs) or cpu")
    if section.device == "cuda" and torch.cuda.device_count() < ranks:
        raise ModelError(f"{field}: {ranks} GPUs are wanted and {torch.cuda.device_count()} can be seen; give the pod "
                         "more, or lower it")
    if section.quantize == "int8" or holds_int8(folder):
        raise ModelError(f"{field}: int8 weights (model.quantize) are not shared out; take the model's own folder, and "
                         "none or fp8")
    part_config(ModelConfig.from_folder(folder), ranks)
    check_floats(folder)
    return RankPart(0, 0, str(folder), section)


@explain_out_of_memory("this rank's part of the model")
def load_part(part: RankPart, group: Group) -> CausalModel:
    """The model of this rank. Raises ModelError."""
    config = ModelConfig.from_folder(part.folder)
    dtype, device = dtype_of(part.section.dtype), part.torch_device
    tensors = with_embedding(config, load_tensors(part.folder))
    if part.rank == 0:
        warn_unread(part.folder, unread_names(config, tensors))
    decoder = torch_decoder(part_config(config, part.ranks), tensors, dtype, device, part.section,
                            split=split_for(config, tensors, group, dtype, device))
    return graphed(decoder, group.all_agree)


def part_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """The dimensions of one rank's part. Raises ModelError naming the field that does not divide."""
    for field, whole in (("num_attention_heads", config.num_heads), ("num_key_value_heads", config.num_kv_heads),
                         ("intermediate_size", config.intermediate_size)):
        if whole % ranks:
            raise ModelError(f"model.tensor_parallel: {field} {whole} of this model does not divide by {ranks}")
    return replace(config, num_heads=config.num_heads // ranks, num_kv_heads=config.num_kv_heads // ranks,
                   intermediate_size=config.intermediate_size // ranks)


def part_of_tensor(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part of a checkpoint's tensor; the whole tensor if it is not split."""
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    if module not in SPLIT_AXIS:
        return tensor
    if kind == "bias" and SPLIT_AXIS[module] == 1:
        return tensor if rank == 0 else torch.zeros_like(tensor)
    axis = SPLIT_AXIS[module] if kind == "weight" else 0
    if tensor.dim() <= axis or tensor.shape[axis] % ranks:
        return tensor  # of a wrong shape: the decoder raises an error that names it
    return tensor.chunk(ranks, axis)[rank]


def part_head(config: ModelConfig, tensors: Tensors, rank: int, ranks: int) -> torch.Tensor:
    """A rank's rows of lm_head [ceil(V / ranks), H]; rows beyond the vocabulary are zeros."""
    name = EMBEDDING if config.tied_embeddings else HEAD
    head = require_tensor(tensors, name, config.vocab_size, config.hidden_size)
    width = -(-config.vocab_size // ranks)
    rows = head[rank * width : (rank + 1) * width]
    return F.pad(rows, (0, 0, 0, width - len(rows)))


def split_for(config: ModelConfig, tensors: Tensors, group: Group, dtype: torch.dtype, device: torch.device) -> Split:
    """What makes a decoder this rank's part; its logits cover its part of the vocabulary. config, tensors: of the whole
    model. Raises ModelError."""
    head = part_head(config, tensors, group.rank, group.ranks).to(device, dtype, copy=True)

    def product(name: str, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        assert isinstance(weight, torch.Tensor)
        return Linear(weight, bias, group.all_reduce if name in SUMMED else None)

    return Split(partial(part_of_tensor, rank=group.rank, ranks=group.ranks), product, head)


END_S = 10.0  # how long ranks may take to end by themselves
REASON_S = 2.0  # after a failed collective operation: how long to wait until it is known which rank has ended


class Ranks:
    """The processes of the other ranks."""

    def __init__(self, first: RankPart) -> None:
        """Starts them, and returns when all have joined the group. Raises ModelError, RanksLost."""
        self._count = first.ranks
        self._lost: RanksLost | None = None
        self._exit_seen, self._ending = threading.Event(), threading.Event()
        self._on_lost: Callable[[RanksLost], None] | None = None
        self._lock = threading.Lock()
        self._pipes: list[Connection[bytes, bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        rendezvous = Rendezvous(first.ranks)
        try:
            for rank in range(1, first.ranks):
                self._start(replace(first, rank=rank, port=rendezvous.port))
            self.wait_ready()  # the processes run, so the meeting below is quick
            self.group: Group = rendezvous.join(0, first.ranks, first.torch_device)
        except BaseException:
            self.stop(0.0)
            raise

    def _start(self, part: RankPart) -> None:
        own, given = socket.socketpair()
        with given:  # in a session of its own, so that Ctrl-C reaches rank 0 only
            process = subprocess.Popen([*main_command("slipstream.engine.ranks"), str(given.fileno())],
                                       pass_fds=(given.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True)
        self._processes.append(process)
        self._pipes.append(pipe_of(own))
        threading.Thread(target=self._watch, args=(part.rank, process), name=f"rank-{part.rank}", daemon=True).start()
        self._pipes[-1].send_bytes(part.message())

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait_ready(self) -> None:
        """Wait until each rank has sent that it is ready. Raises ModelError with a rank's error, RanksLost."""
        for pipe in self._pipes:
            try:
                problem = pipe.recv_bytes()
            except (EOFError, OSError) as error:
                raise self.loss_of(error) from error
            if problem:
                raise ModelError(problem.decode())

    def send(self, order: Order) -> None:
        """Send an order to all ranks. Raises RanksLost."""
        if self._lost is not None:
            raise self._lost
        message = encode_order(order)
        try:
            for pipe in self._pipes:
                pipe.send_bytes(message)
        except OSError as error:
            raise self.loss_of(error) from error

    def loss_of(self, error: Exception) -> RanksLost:
        """The RanksLost for an error between ranks; it names the rank that has ended, if one has."""
        self._exit_seen.wait(REASON_S)
        return self._set_lost(f"the {self._count} ranks of the model are out of step: {first_line(error)}")

    def watch(self, callback: Callable[[RanksLost], None]) -> None:
        """Call ``callback`` once, from any thread, when ranks are lost; at once if they are."""
        with self._lock:
            self._on_lost = callback
        if self._lost is not None:
            callback(self._lost)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._ending.is_set():
            ending = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._set_lost(f"rank {rank} of {self._count} has ended ({ending}): a model that is split cannot go on "
                           "without all its ranks; the service has to start again")
            self._exit_seen.set()

    def _set_lost(self, reason: str) -> RanksLost:
        with self._lock:
            if self._lost is not None:
                return self._lost
            self._lost, callback = RanksLost(reason), self._on_lost
        logger("engine").error("ranks lost", reason=reason)
        if callback is not None:
            callback(self._lost)
        return self._lost

    def stop(self, patience_s: float = END_S) -> None:
        """Close the pipes, which ends the ranks; kill those that still run after ``patience_s``."""
        self._ending.set()
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class RankedModel:
    """See ``model.CausalModel``. All methods belong to one thread at a time."""

    __slots__ = ("_closed", "_group", "_model", "_pools", "_ranks", "_vocab_size", "config", "device", "dtype", "pids",
                 "spare_slots", "watch")

    def __init__(self, model: CausalModel, vocab_size: int, ranks: Ranks) -> None:
        self._model, self._vocab_size, self._ranks, self._group = model, vocab_size, ranks, ranks.group
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.spare_slots = model.spare_slots if isinstance(model, GraphedDecoder) else 0  # beyond those handed out
        self.pids, self.watch = ranks.pids, ranks.watch
        self._pools: list[KVPool] = []
        self._closed = False

    @property
    def kernels(self) -> str:
        """See ``model.CausalModel``, of this rank."""
        return self._model.kernels

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As CausalModel's. Raises RanksLost."""
        self._ranks.send(ForwardOrder(self._pool_number(pool), pool.num_slots, taps, batch))
        with self._detect_loss():
            return self._model.forward(batch, pool, taps)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As CausalModel's. Raises RanksLost."""
        if not len(hidden):
            return hidden.new_empty(0, self._vocab_size, dtype=torch.promote_types(self.dtype, torch.float32))
        self._ranks.send(LogitsOrder(len(hidden)))
        with self._detect_loss():
            own = self._model.logits(self._group.broadcast(hidden.contiguous()))
            return self._group.all_gather(own)[:, : self._vocab_size]

    def warm(self, pool: KVPool, most_segments: int) -> int:
        """Capture graphs on all ranks, if they use graphs. Returns how many rank 0 serves."""
        if not isinstance(self._model, GraphedDecoder):
            return 0
        self._ranks.send(WarmOrder(self._pool_number(pool), pool.num_slots, most_segments))
        with self._detect_loss():
            return self._model.warm(pool, most_segments)

    def close(self) -> None:
        """End the other ranks; a second time does nothing."""
        if not self._closed:
            self._closed = True
            self._ranks.stop()
            self._group.close()

    def _pool_number(self, pool: KVPool) -> int:
        for number, known in enumerate(self._pools):
            if known is pool:
                return number
        self._pools.append(pool)
        return len(self._pools) - 1

    @contextmanager
    def _detect_loss(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # after any error the ranks are out of step
            raise self._ranks.loss_of(error) from error


def ranked_model(folder: str | Path, section: ModelSection) -> RankedModel:
    """A ready model on ``section.tensor_parallel`` devices: the first GPUs (device cuda), or so many processes on one
    CPU, which is for tests. Raises ModelError, RanksLost."""
    part = part_of(folder, section)
    ranks = Ranks(part)
    try:
        model = load_part(part, ranks.group)
        ranks.wait_ready()
    except BaseException:
        ranks.stop(0.0)
        ranks.group.close()
        raise
    logger("engine").info("ranks ready", ranks=part.ranks, device=section.device)
    return RankedModel(model, ModelConfig.from_folder(folder).vocab_size, ranks)


READY = b""


def main() -> None:
    """The process of a rank other than 0: load its part, then carry out orders until the pipe ends."""
    configure(LogSection())
    pipe = pipe_of(socket.socket(fileno=int(sys.argv[1])))
    try:
        part = RankPart.read(next_message(pipe))
        if part.section.threads:
            torch.set_num_threads(part.section.threads)
        pipe.send_bytes(READY)
        group = Rendezvous(part.ranks, part.port).join(part.rank, part.ranks, part.torch_device)
        try:
            follower = Follower(load_part(part, group), group)
        except SlipstreamError as error:
            pipe.send_bytes(str(error).encode())
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd sends it to all: rank 0 drains, and needs its ranks
        pipe.send_bytes(READY)
        while True:
            follower.execute(decode_order(next_message(pipe), part.torch_device))
    except (EOFError, ConnectionError):  # rank 0 has ended, or has closed the pipe
        sys.stdout.flush()
        os._exit(0)  # Python's own end aborts if a thread of torch still lets go of the last step's tensors


class Follower:
    """Carries out rank 0's orders on this rank's part of the model."""

    __slots__ = ("_group", "_model", "_pools")

    def __init__(self, model: CausalModel, group: Group) -> None:
        self._model, self._group = model, group
        self._pools: dict[int, KVPool] = {}

    @torch.inference_mode()
    def execute(self, order: Order) -> None:
        model = self._model
        match order:
            case ForwardOrder(number, num_slots, taps, batch):
                model.forward(batch, self._pool(number, num_slots), taps)
            case LogitsOrder(rows):
                states = torch.empty(rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
                self._group.all_gather(model.logits(self._group.broadcast(states)))
            case WarmOrder(number, num_slots, most_segments):
                if isinstance(model, GraphedDecoder):
                    model.warm(self._pool(number, num_slots), most_segments)

    def _pool(self, number: int, num_slots: int) -> KVPool:
        config = self._model.config
        if number not in self._pools:
            pool = KVPool(config.num_layers, num_slots, config.num_kv_heads, config.head_dim, self._model.dtype,
                          self._model.device)
            pool.kv.zero_()  # to measure steps, rank 0 reads slots that were never written
            self._pools[number] = pool
        return self._pools[number]
