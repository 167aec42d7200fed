"""A peer that sends without end is read at a share of the thread's time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import count

import numpy as np

from slipstream.base.errors import RemoteProtocolError
from slipstream.protocol.conduct import MAX_BURST_S, Pace
from slipstream.protocol.messages import Commit, DraftBound, Features, Growth, TargetBound
from slipstream.wire.codec import FrameLimits, decode_draft_frame, encode_draft_frames, encode_target_frames
from slipstream.wire.link import Outbox, Pumps, WireCounts
from tests.test_wire import DRAFT, HELLO


class Times:
    """Of a thread that computes a part of the time."""

    def __init__(self) -> None:
        self.worked_s = self.now_s = 0.0

    def reads(self, pace: Pace, work_s: float) -> float:
        self.worked_s += work_s
        self.now_s += work_s
        return pace.pause_after_s(work_s)


def test_reading_takes_its_share_and_no_more() -> None:
    times = Times()
    pace = Pace(0.25, lambda: times.now_s)
    assert times.reads(pace, MAX_BURST_S) == 0.0, "what comes once is read at once"
    for _ in range(100):
        times.now_s += times.reads(pace, 0.01)
    assert 0.24 < times.worked_s / times.now_s < 0.28
    times.now_s += 10.0
    assert times.reads(pace, MAX_BURST_S / 2) == 0.0, "what was long ago is forgotten"


def test_who_sends_what_was_asked_for_never_waits() -> None:
    times = Times()
    pace = Pace(0.25, lambda: times.now_s)
    for _ in range(1000):
        assert times.reads(pace, 0.004) == 0.0
        times.now_s += 0.016


(STALE,), _ = encode_draft_frames(2, [Growth.empty(1, 5)], 1 << 20)


class Endless:
    """A line on which frames of another stream never end: even those are work."""

    def __init__(self) -> None:
        self.frames = 0

    async def read(self) -> object:
        self.frames += 1
        return STALE

    async def write(self, message: bytes, /) -> None:
        pass


async def test_a_stream_rests_between_frames_of_a_flood() -> None:
    worked = count(0.0, MAX_BURST_S / 2)  # each frame is that much work

    def received(items: Sequence[TargetBound], faults: Sequence[tuple[int, RemoteProtocolError]]) -> None:
        raise AssertionError("frames of another stream are not heard")

    line = Endless()
    outbox: Outbox[DraftBound] = Outbox()
    pumps = Pumps(encode_target_frames, decode_draft_frame, 1, FrameLimits.of(HELLO, DRAFT), 1 << 20, WireCounts(),
                  outbox, received, pace=Pace(0.5), cpu_clock=lambda: next(worked))

    async def enough() -> None:
        while line.frames < 6:
            await asyncio.sleep(0.001)

    began_s = time.monotonic()
    await pumps.run(line, enough())
    rests = line.frames // 2  # a slow loop reads some more than six
    assert time.monotonic() - began_s >= rests * MAX_BURST_S / 2, "it was read as fast as it came"


async def test_rows_of_more_prompts_than_a_stream_carries_do_not_end_it() -> None:
    """It ended every few seconds, with the drafts of all sessions, and what came next had to carry all rows again."""
    box: Outbox[Features | Commit] = Outbox(max_batches=100, max_bytes=1000)
    taken = list[Features | Commit]()
    for n in range(40):
        box.send([Features(n, 0, bytes(300), 1, "float32"), Commit(1, n, np.array([5], np.int32))])
        if n % 4 == 3:  # a quarter of what is sent
            taken += box.take(300)
    taken += box.take(1 << 20)
    assert [item.base for item in taken if isinstance(item, Commit)] == [*range(40)]
    rows = [item.session for item in taken if isinstance(item, Features)]
    assert 10 <= len(rows) < 20 and rows[-1] > 30, "as many as it carries, until the end"
