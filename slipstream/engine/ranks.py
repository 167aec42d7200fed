"""A model on several devices of one machine: this process is rank 0, the others are started by it.

Rules:
1. Every call is an order that all ranks carry out, so any sequence of calls is right. What is called on a pool happens
   on a pool of the same number everywhere.
2. ``config`` has the measures of one rank's part: pools, memory and attention are sized from it. Everything else in it
   (width, layers, vocabulary) is the whole model's.
3. A rank that dies, or an error inside of an order, leaves the ranks out of step for good: every call is a RanksLost
   from then on, and whoever watches is told once. There is no way back but a new start of all.
4. Nothing waits for ever: see ``orders`` for what bounds each wait.

It knows nothing about sessions. How a model is cut stands in ``parts``.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from slipstream.base.config import ModelSection
from slipstream.base.errors import ModelError, RanksLost
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.graphs import GraphedDecoder
from slipstream.engine.kv import KVPool
from slipstream.engine.model import CausalModel, ModelConfig
from slipstream.engine.orders import ForwardOrder, Group, LogitsOrder, Meeting, Order, Pipe, WarmOrder, written
from slipstream.engine.parts import Part, load_part, part_of
from slipstream.observe.log import logger

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
            process = subprocess.Popen([sys.executable, "-m", "slipstream.engine.rank", str(given.fileno())],
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
        reason = str(error).strip().partition("\n")[0][:300]
        return self._lose(f"the {self._count} ranks of the model are out of step: {type(error).__name__}: {reason}")

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

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._model.embed(tokens)

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
