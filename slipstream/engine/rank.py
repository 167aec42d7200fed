"""A further rank of a model as a process: ``python -m slipstream.engine.rank FD``, started by rank 0 alone.

Rules:
1. It computes what it is told, and ends when the pipe does. Only rank 0 answers anybody.
2. Its pools mirror rank 0's, each with the heads of its own part.
3. An error before the first order is told to rank 0 in words; a later one ends the process, which rank 0 notices.

It knows nothing about sessions, and of a batch's sense nothing either.
"""

from __future__ import annotations

import socket
import sys

import torch

from slipstream.base.config import LogSection
from slipstream.base.errors import SlipstreamError
from slipstream.engine.graphs import GraphedDecoder
from slipstream.engine.kv import KVPool
from slipstream.engine.model import CausalModel
from slipstream.engine.orders import ForwardOrder, Group, LogitsOrder, Meeting, Order, Pipe, WarmOrder, read
from slipstream.engine.parts import Part, load_part
from slipstream.observe.log import configure

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


if __name__ == "__main__":
    main()
