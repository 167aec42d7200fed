"""A model on several devices of one machine, cut as Megatron cuts it (Shoeybi et al., arXiv 1909.08053): this process
is rank 0, the others are started by it, each as ``main FD``.

Rules of the ranks:
1. Every call is an order that all ranks carry out, so any sequence of calls is right. What is called on a pool happens
   on a pool of the same number everywhere, each with the heads of its own part. Only rank 0 answers anybody.
2. ``config`` has the measures of one rank's part: pools, memory and attention are sized from it. Everything else in it
   (width, layers, vocabulary) is the whole model's.
3. After a rank dies, or an order raises an error, the ranks are out of step for good: every call raises RanksLost from
   then on, and the watcher is told once. Only a restart of all helps. A rank sends an error before the first order to
   rank 0 as text; a later one ends its process.
4. Nothing waits for ever: see ``orders`` for what bounds each wait.

Rules of the cut:
5. A rank holds whole heads, KV heads with their query heads, and as many columns of the MLP: a smaller model, whose
   attention, KV pool and batches are as any other's. The residual stream is whole on every rank.
6. Two sums a layer: after ``o`` and after ``down``, which are cut along what they sum over. Their biases are rank 0's.
7. The embedding is whole on every rank: its rows are looked up, not multiplied, and cutting it would cost a third sum.
   The head is cut by vocabulary, since a step reads all of it; its logits are put side by side.
8. What does not divide is a ModelError that names the field.

It knows nothing about sessions. Format of a part: JSON, for the other ranks.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from slipstream.base.config import LogSection, ModelSection
from slipstream.base.errors import ModelError, RanksLost, SlipstreamError, in_a_line
from slipstream.base.offload import command
from slipstream.engine.attention import Attention
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.decoder import Decoder, Placing, unread_names
from slipstream.engine.flashinfer import attention_for
from slipstream.engine.fp8 import with_fp8
from slipstream.engine.graphs import GraphedDecoder
from slipstream.engine.int8 import EMBEDDING, HEAD, Matrix, check_floats, holds_int8, with_embedding
from slipstream.engine.kv import KVPool
from slipstream.engine.loading import graphed
from slipstream.engine.model import (
    CausalModel,
    ModelConfig,
    Tensors,
    dtype_of,
    fitting,
    load_tensors,
    take,
    tell_unread,
)
from slipstream.engine.ops.fused import operations_for, rounding_for
from slipstream.engine.ops.layer import TORCH, LayerOps, Linear
from slipstream.engine.orders import ForwardOrder, Group, LogitsOrder, Meeting, Order, Pipe, WarmOrder, read, written
from slipstream.observe.log import configure, logger

ALONG = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}
SUMMED = ("o", "down")  # products that ranks have parts of


@dataclass(frozen=True, slots=True)
class Part:
    """Of the model in ``folder``, which ``section`` shares out: the ``rank``-th. ``port``: where ranks meet. Of device
    cuda, rank r has the r-th."""

    rank: int
    port: int
    folder: str
    section: ModelSection

    @property
    def ranks(self) -> int:
        return self.section.tensor_parallel

    @property
    def place(self) -> torch.device:
        device = self.section.device
        return torch.device(device, self.rank) if device == "cuda" else torch.device(device)

    def message(self) -> bytes:
        return json.dumps([self.rank, self.port, self.folder, self.section.model_dump()]).encode()

    @staticmethod
    def read(message: bytes) -> Part:
        rank, port, folder, section = json.loads(message)
        return Part(rank, port, folder, ModelSection.model_validate(section))


def part_of(folder: str | Path, section: ModelSection) -> Part:
    """The first part of a model. Raises ModelError where it cannot be cut as the section says, or devices are missing;
    before anything is loaded."""
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
    return Part(0, 0, str(folder), section)


@fitting("this rank's part of the model")
def load_part(part: Part, group: Group) -> CausalModel:
    """The model of this rank. Raises ModelError."""
    config = ModelConfig.from_folder(part.folder)
    dtype, device = dtype_of(part.section.dtype), part.place
    own = part_config(config, part.ranks)
    attention = attention_for(own, dtype, device)
    tensors = with_embedding(config, load_tensors(part.folder))
    if part.rank == 0:
        tell_unread(part.folder, unread_names(config, tensors))
    decoder = sharded_decoder(config, tensors, group, dtype, device, attention,
                              operations_for(part.section.kernels, own, dtype, device))
    if part.section.quantize == "fp8":
        with_fp8(decoder, rounding_for(part.section.kernels, own, device))
    return graphed(decoder, group.agreed)


def part_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """The measures of one rank's part. Raises ModelError naming what does not divide."""
    for field, whole in (("num_attention_heads", config.num_heads), ("num_key_value_heads", config.num_kv_heads),
                         ("intermediate_size", config.intermediate_size)):
        if whole % ranks:
            raise ModelError(f"model.tensor_parallel: {field} {whole} of this model does not divide by {ranks}")
    return replace(config, num_heads=config.num_heads // ranks, num_kv_heads=config.num_kv_heads // ranks,
                   intermediate_size=config.intermediate_size // ranks)


def part_of_tensor(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part of one of a checkpoint's tensors."""
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    if module not in ALONG:
        return tensor
    if kind == "bias" and ALONG[module] == 1:
        return tensor if rank == 0 else torch.zeros_like(tensor)
    along = ALONG[module] if kind == "weight" else 0
    if tensor.dim() <= along or tensor.shape[along] % ranks:
        return tensor  # of a wrong shape, which the decoder names
    return tensor.chunk(ranks, along)[rank]


def part_head(config: ModelConfig, tensors: Tensors, rank: int, ranks: int) -> torch.Tensor:
    """A rank's rows of the head [ceil(V / ranks), H]; those beyond the vocabulary are zeros."""
    name = EMBEDDING if config.tied_embeddings else HEAD
    head = take(tensors, name, config.vocab_size, config.hidden_size)
    width = -(-config.vocab_size // ranks)
    rows = head[rank * width : (rank + 1) * width]
    return F.pad(rows, (0, 0, 0, width - len(rows)))


def sharded_decoder(config: ModelConfig, tensors: Tensors, group: Group, dtype: torch.dtype, device: torch.device,
                    attention: Attention | None = None, ops: LayerOps = TORCH) -> Decoder:
    """This rank's part of a decoder, whose logits are of its part of the vocabulary. config, tensors: of the whole
    model; attention, ops: of the part. Raises ModelError."""
    part = part_config(config, group.ranks)
    own = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and name != HEAD}
    head = part_head(config, tensors, group.rank, group.ranks).to(device, dtype)

    def place(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return part_of_tensor(name, tensor, group.rank, group.ranks).to(device, dtype)

    def product(name: str, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        assert isinstance(weight, torch.Tensor)
        return Linear(weight, bias, group.sum if name in SUMMED else None)

    return Decoder(part, own, ops, attention, Placing(place, product, head))


END_S = 10.0  # that ranks have to end by themselves
REASON_S = 2.0  # after a failed sum, for the news which rank is gone


class Ranks:
    """The other ranks' processes."""

    def __init__(self, first: Part) -> None:
        """Starts them, and returns when all have met."""
        self._count = first.ranks
        self._lost: RanksLost | None = None
        self._gone, self._ending = threading.Event(), threading.Event()
        self._told: Callable[[RanksLost], None] | None = None
        self._lock = threading.Lock()
        self._pipes: list[Pipe] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        meeting = Meeting(first.ranks)
        try:
            for rank in range(1, first.ranks):
                self._start(replace(first, rank=rank, port=meeting.port))
            self.hear()  # they are there, so meeting them takes no time
            self.group: Group = meeting.join(0, first.ranks, first.place)
        except BaseException:
            self.end(0.0)
            raise

    def _start(self, part: Part) -> None:
        own, given = socket.socketpair()
        with given:  # a group of its own: a Ctrl-C is rank 0's to deal with
            process = subprocess.Popen([*command("slipstream.engine.ranks"), str(given.fileno())],
                                       pass_fds=(given.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True)
        self._processes.append(process)
        self._pipes.append(Pipe(own))
        threading.Thread(target=self._watch, args=(part.rank, process), name=f"rank-{part.rank}", daemon=True).start()
        self._pipes[-1].send(part.message())

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def hear(self) -> None:
        """Until each rank has said that it is ready. Raises ModelError with what one says, RanksLost."""
        for pipe in self._pipes:
            try:
                problem = pipe.receive()
            except OSError as error:
                raise self.lost(error) from error
            if problem:
                raise ModelError(problem.decode())

    def tell(self, order: Order) -> None:
        """Raises RanksLost."""
        if self._lost is not None:
            raise self._lost
        message = written(order)
        try:
            for pipe in self._pipes:
                pipe.send(message)
        except OSError as error:
            raise self.lost(error) from error

    def lost(self, error: Exception) -> RanksLost:
        """What an error between ranks means: the rank that is gone, where one is."""
        self._gone.wait(REASON_S)
        return self._lose(f"the {self._count} ranks of the model are out of step: {in_a_line(error)}")

    def watch(self, told: Callable[[RanksLost], None]) -> None:
        """``told`` is called once, from any thread, when ranks are lost."""
        with self._lock:
            self._told = told
        if self._lost is not None:
            told(self._lost)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._ending.is_set():
            ending = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._lose(f"rank {rank} of {self._count} has ended ({ending}): a model that is cut cannot go on without "
                       "all its ranks; the service has to start again")
            self._gone.set()

    def _lose(self, reason: str) -> RanksLost:
        with self._lock:
            if self._lost is not None:
                return self._lost
            self._lost, told = RanksLost(reason), self._told
        logger("engine").error("ranks lost", reason=reason)
        if told is not None:
            told(self._lost)
        return self._lost

    def end(self, patience_s: float = END_S) -> None:
        """Close the pipes, at whose end ranks end, and see that they do."""
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

    __slots__ = ("_closed", "_group", "_model", "_pools", "_ranks", "_vocabulary", "config", "device", "dtype", "pids",
                 "spare_slots", "watch")

    def __init__(self, model: CausalModel, vocab_size: int, ranks: Ranks) -> None:
        self._model, self._vocabulary, self._ranks, self._group = model, vocab_size, ranks, ranks.group
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
        self._ranks.tell(ForwardOrder(self._number(pool), pool.num_slots, taps, batch))
        with self._in_step():
            return self._model.forward(batch, pool, taps)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As CausalModel's. Raises RanksLost."""
        if not len(hidden):
            return hidden.new_empty(0, self._vocabulary, dtype=torch.promote_types(self.dtype, torch.float32))
        self._ranks.tell(LogitsOrder(len(hidden)))
        with self._in_step():
            own = self._model.logits(self._group.told(hidden.contiguous()))
            return self._group.beside(own)[:, : self._vocabulary]

    def warm(self, pool: KVPool, most_segments: int) -> int:
        """Capture graphs on all ranks, where there are any. Returns how many there are on each."""
        if not isinstance(self._model, GraphedDecoder):
            return 0
        self._ranks.tell(WarmOrder(self._number(pool), pool.num_slots, most_segments))
        with self._in_step():
            return self._model.warm(pool, most_segments)

    def close(self) -> None:
        """End the other ranks; a second time does nothing."""
        if not self._closed:
            self._closed = True
            self._ranks.end()
            self._group.leave()

    def _number(self, pool: KVPool) -> int:
        for number, known in enumerate(self._pools):
            if known is pool:
                return number
        self._pools.append(pool)
        return len(self._pools) - 1

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, the others are now somewhere else
            raise self._ranks.lost(error) from error


def ranked_model(folder: str | Path, section: ModelSection) -> RankedModel:
    """A ready model on ``section.tensor_parallel`` devices: the first GPUs (device cuda), or so many processes on a
    CPU, which serve to prove it. Raises ModelError, RanksLost."""
    part = part_of(folder, section)
    others = Ranks(part)
    try:
        model = load_part(part, others.group)
        others.hear()
    except BaseException:
        others.end(0.0)
        others.group.leave()
        raise
    logger("engine").info("ranks ready", ranks=part.ranks, device=section.device)
    return RankedModel(model, ModelConfig.from_folder(folder).vocab_size, others)


READY = b""


def main() -> None:
    configure(LogSection())
    pipe = Pipe(socket.socket(fileno=int(sys.argv[1])))
    try:
        part = Part.read(pipe.receive())
        if part.section.threads:
            torch.set_num_threads(part.section.threads)
        pipe.send(READY)
        group = Meeting(part.ranks, part.port).join(part.rank, part.ranks, part.place)
        try:
            follower = Follower(load_part(part, group), group)
        except SlipstreamError as error:
            pipe.send(str(error).encode())
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd sends it to all: rank 0 drains, and needs its ranks
        pipe.send(READY)
        while True:
            follower.obey(read(pipe.receive(), part.place))
    except ConnectionError:
        return  # rank 0 has ended, or sends us home


class Follower:
    """Does on this rank what rank 0 does on its own."""

    __slots__ = ("_group", "_model", "_pools")

    def __init__(self, model: CausalModel, group: Group) -> None:
        self._model, self._group = model, group
        self._pools: dict[int, KVPool] = {}

    @torch.inference_mode()
    def obey(self, order: Order) -> None:
        model = self._model
        match order:
            case ForwardOrder(number, num_slots, taps, batch):
                model.forward(batch, self._pool(number, num_slots), taps)
            case LogitsOrder(rows):
                states = torch.empty(rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
                self._group.beside(model.logits(self._group.told(states)))
            case WarmOrder(number, num_slots, most_segments):
                if isinstance(model, GraphedDecoder):
                    model.warm(self._pool(number, num_slots), most_segments)

    def _pool(self, number: int, num_slots: int) -> KVPool:
        config = self._model.config
        if number not in self._pools:
            pool = KVPool(config.num_layers, num_slots, config.num_kv_heads, config.head_dim, self._model.dtype,
                          self._model.device)
            pool.kv.zero_()  # rank 0 may look at slots that nothing was written to, to measure steps
            self._pools[number] = pool
        return self._pools[number]
