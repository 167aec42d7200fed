"""``make walk``: calls between two events are recorded, and a round and a request of a real answer are printed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from bench.host.walk import OURS, ROOT, Call, CallRecorder, config_of, walk
from slipstream.protocol.tree import DraftTree

FOLDERS = (*OURS, f"{ROOT}/tests/")
WHOLE_TREES = ("target.policy.max_nodes=16", "target.policy.deadline_max_s=10", "target.prompt_lookup=false")


def begin() -> None:
    """The first event."""


def end() -> None:
    """The last event."""


def between(counts: bool = True) -> CallRecorder:
    return CallRecorder(lambda frame, event: event == "call" and frame.f_code is begin.__code__,
                        lambda frame, event: event == "call" and frame.f_code is end.__code__, lambda: counts,
                        folders=FOLDERS)


def recorded_by(recorder: CallRecorder, *steps: Callable[[], object]) -> list[list[Call]]:
    def profile(frame: FrameType, event: str, _: object) -> None:
        recorder.on_event(frame, event)

    sys.setprofile(profile)
    try:
        for step in steps:
            step()
    finally:
        sys.setprofile(None)
    return recorder.recordings


def numbers() -> Iterator[int]:
    yield from (1, 2)
    yield 3


def root() -> None:
    DraftTree.root_only(7, 3)


def test_calls_between_the_events_are_recorded_and_no_others() -> None:
    (found,) = recorded_by(between(), root, begin, root, end, root)
    assert Call("slipstream/protocol/tree.py", "DraftTree.root_only") in found
    assert {call.file for call in found} == {"slipstream/protocol/tree.py", "tests/test_walk.py"}


def test_a_thread_that_does_not_count_is_not_recorded() -> None:
    assert recorded_by(between(counts=False), begin, root, end) == [[]]


def test_a_generator_counts_once() -> None:
    (found,) = recorded_by(between(), begin, lambda: list(numbers()), end)
    assert [call.function for call in found].count("numbers") == 1


def test_a_round_and_a_request_are_printed(tiny_folder: Path, tiny_draft_folder: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    walk(config_of(f"model.path={tiny_folder}", "model.dtype=float32", "model.threads=1", "target.slots=1024",
                   "draft.drafter=standalone", f"draft.model={tiny_draft_folder}", *WHOLE_TREES),
         max_tokens=24)
    printed = capsys.readouterr().out
    assert "a round, the median of" in printed and "a request to its first event" in printed
    for file in ("draft_service/worker.py", "router_service/app.py", "slipstream/protocol/session.py"):
        assert file in printed
