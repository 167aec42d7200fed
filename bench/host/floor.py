"""``make bench-host ARGS=--floor``: what is under a round whatever we do, in microseconds.

- ``stream``: a message of 200 bytes over a gRPC stream to another process on this machine and back, with nothing behind
  it, once every 20 ms and in a loop. "Asker" and "answerer" are the processor time of all threads of each end, of a
  write and a read; a bare pause of the asker's loop is taken off. A target asks its draft so once a round, and a router
  is told by one more write.
- ``simulated``: processor time of what timed devices (``simulate.timed``) compute in place of a model, the growing of
  a draft's trees included, by streams: ``make bench-scale`` counts it, and it is no service's own.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.fleet import LOGS, Process, free_port
from bench.report import Row, write
from bench.timed import text
from slipstream.base.config import WireSection
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.kv import KVPool
from slipstream.protocol.messages import Commit, Open, Sampling
from slipstream.simulate.timed import Device, TimedDrafter, TimedModel, Timing
from slipstream.wire.channel import open_channel
from slipstream.wire.server import GrpcServer

SERVICE = "bench.Floor"
PATH = f"/{SERVICE}/Echo"
MESSAGE = bytes(200)
STEP_S = 0.02
REPEATS = 300
STREAMS = (1, 8, 64)
NODES = 4  # of a tree
NO_TIME = Timing(step_s=0.0, draft_s=0.0)


async def answer(_: object, context: Any) -> None:
    """Each message with the processor time of this process so far, in nanoseconds."""
    await context.send_initial_metadata(())
    while isinstance(message := await context.read(), bytes):
        await context.write(time.process_time_ns().to_bytes(8, "little") + message[8:])


class Method:
    """What gRPC reads of a method that takes and gives streams of bytes: grpc itself is the wire's."""

    request_streaming = response_streaming = True
    request_deserializer = response_serializer = None
    unary_unary = unary_stream = stream_unary = None
    stream_stream = staticmethod(answer)


class Methods:
    def service(self, called: Any) -> Method | None:
        return Method() if called.method == PATH else None


class Echo:
    """A ``wire.server.Servicer``."""

    service = SERVICE

    def handler(self) -> Any:
        return Methods()

    def drain(self) -> None:
        """Nothing: the process is ended."""


async def answers(address: str) -> None:
    server = GrpcServer(address, WireSection(), [Echo()])
    await server.start()
    await asyncio.get_running_loop().create_future()


async def exchanges(call: Any, pause_s: float) -> dict[str, float]:
    """Microseconds of one, the median of the way and means of the rest."""
    ways, answerer = list[float](), list[int]()
    began_s = time.process_time()
    for _ in range(REPEATS):
        await asyncio.sleep(pause_s)
        sent_s = time.perf_counter()
        await call.write(MESSAGE)
        answerer.append(int.from_bytes((await call.read())[:8], "little"))
        ways.append(time.perf_counter() - sent_s)
    asked_s, began_s = time.process_time() - began_s, time.process_time()
    for _ in range(REPEATS):
        await asyncio.sleep(pause_s)
    asked_s -= time.process_time() - began_s
    return {"there and back": 1e6 * statistics.median(ways), "asker": 1e6 * asked_s / REPEATS,
            "answerer": (answerer[-1] - answerer[0]) / 1e3 / (REPEATS - 1)}


async def streams() -> list[Row]:
    address = f"127.0.0.1:{free_port()}"
    LOGS.mkdir(parents=True, exist_ok=True)
    other = Process("bench.host.floor", (), 0, LOGS / "floor.log", (address,))
    other.start()
    try:
        async with open_channel(address, None) as channel:
            method: Any = channel.stream_stream(PATH)
            call = method(wait_for_ready=True)
            await exchanges(call, 0.0)
            found = [await exchanges(call, pause_s) for pause_s in (0.0, STEP_S)]
    finally:
        other.stop()
    return [{"part": f"stream: {name}", "loop": found[0][name], "once_a_step": found[1][name]} for name in found[0]]


def target_of(count: int) -> Callable[[], object]:
    model, builder, pool = TimedModel(NO_TIME, Device()), BatchBuilder(), KVPool(1, 1, 1, 2, torch.float32)
    for stream in range(count):
        builder.add([text(stream)[0]] * (1 + NODES), range(1, 2 + NODES), range(1 + NODES), np.zeros(0, np.int64))
    batch = builder.build(torch.device("cpu"))
    return lambda: model.logits(model.forward(batch, pool)[0])


def draft_of(count: int) -> Callable[[], object]:
    """A commit of a token and a growth of each."""
    drafter, ids = TimedDrafter(NO_TIME, Device()), range(1, 1 + count)
    prompts = [np.array(text(number), np.int32) for number in ids]
    drafter.open([Open(number, prompt, len(prompt), Sampling(), NODES)
                  for number, prompt in zip(ids, prompts, strict=True)])
    base = len(prompts[0])

    def round_() -> None:
        nonlocal base
        drafter.commit([Commit(number, base, prompt[:1], None, 0, NODES)
                        for number, prompt in zip(ids, prompts, strict=True)])
        base += 1
        drafter.grow(ids, [NODES] * count)

    return round_


def simulated(work: Callable[[], object], pause_s: float) -> float:
    times = list[float]()
    for _ in range(REPEATS // 3):
        time.sleep(pause_s)
        began_s = time.thread_time()
        work()
        times.append(1e6 * (time.thread_time() - began_s))
    return statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    rows = asyncio.run(streams())
    for role, made in (("target", target_of), ("draft", draft_of)):
        for count in STREAMS:
            work = made(count)
            rows.append({"part": f"simulated: a timed {role}, {count} streams", "loop": simulated(work, 0.0),
                         "once_a_step": simulated(work, STEP_S)})
    write("floor", rows, "under a round, microseconds")


if __name__ == "__main__":
    asyncio.run(answers(sys.argv[1]))
