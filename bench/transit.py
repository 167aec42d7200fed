"""Where a round's time goes besides verification, in real rounds: traces of a target and its draft, side by side.

Draft, target and router run as ``make run`` starts them, with the default model, and one client streams our own
questions. Every answer is drafted to its end, whether it pays or not. It knows nothing about what the services say to
one another: the arrows of their traces (``slipstream.observe.trace``) tell when a message left and when it came.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from bench.systems import Slipstream
from router_service.tokens import TextCodec
from slipstream.base.config import ModelSection
from slipstream.cli.questions import QUESTIONS
from slipstream.models.folder import resolve

STUBBORN = ("target.policy.leave_gain=0.01", "target.policy.enter_gain=0.02")
SPANS = {"verify": "round: verification", "wait": "round: waiting for the draft", "tree": "round: the draft's tree"}
ARROWS = {"commit": "round: a commit's way, from the step's end to the draft's engine",
          "growth": "round: a growth's way, from the draft's engine to the target's inbox"}

Event = Mapping[str, Any]


async def rounds(max_tokens: int, folder: Path = Path("build/bench/logs")) -> dict[str, list[float]]:
    """Microseconds by part. Raises Unavailable when a service does not start."""
    model = ModelSection()
    system = Slipstream("default", folder, model.path, model.dtype)
    traces = {part: folder / f"transit-{part}.json" for part in ("target", "draft")}
    for part, process in system.processes.items():
        traced = (f"log.trace={traces[part]}",) if part in traces else ()
        process.settings = (*process.settings, *STUBBORN, *traced)
    codec = TextCodec(resolve(model.path))
    try:
        await system.start()
        for question in track(QUESTIONS, "questions"):
            await system.ask(codec.chat([{"role": "user", "content": question}]), max_tokens)
    finally:
        await system.stop()
    return parts_of(event for trace in traces.values() for event in json.loads(trace.read_text())["traceEvents"])


def parts_of(events: Iterable[Event]) -> dict[str, list[float]]:
    """What the spans took, and the arrows from where they left to where they came, in microseconds."""
    parts: dict[str, list[float]] = {name: [] for name in (*SPANS.values(), *ARROWS.values())}
    ends: dict[str, dict[str, float]] = defaultdict(dict)
    kinds: dict[str, str] = {}
    for event in events:
        if event["ph"] == "X" and event["name"] in SPANS:
            parts[SPANS[event["name"]]].append(event["dur"])
        elif event["ph"] in "sf" and event["name"] in ARROWS:
            ends[event["id"]].setdefault(event["ph"], event["ts"])
            kinds[event["id"]] = event["name"]
    for key, times in ends.items():
        if len(times) == 2:
            parts[ARROWS[kinds[key]]].append(times["f"] - times["s"])
    return parts


def measurable(parts: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Those that happened often enough for a percentile."""
    return {name: times for name, times in parts.items() if len(times) >= 2}
