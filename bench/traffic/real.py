"""``make bench-network ARGS=--real PROMPTS=folder``: schedules on a real pair, in simulated time; and what a second
device is worth.

1. Records of real answers (``slipstream.drafting.records``), of the default model and its shipped head, are played by
   real workers, scheduler and policy (``slipstream.simulate.replay``): a step takes 20 ms, a tree what is said, and a
   forward of few rows what one row takes. Recording 25 answers takes two minutes of a CPU.
2. Bounds: ``bound`` is a step and a tree by a step, as if every tree were there and as good as one that is waited for.
   ``oracle`` knows how each round ends: all trees are there, as good as those that were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.progress import track

from bench.asking import read_questions
from bench.report import Row, write
from router_service.text.tokens import TextCodec
from slipstream.base.config import DraftSection, Dtype, LogSection, ModelSection
from slipstream.drafting import create
from slipstream.drafting.neural import NeuralDrafter
from slipstream.drafting.records import MAX_PROMPTS, Record, record, slots_for
from slipstream.drafting.rounds import slots_needed
from slipstream.engine.loading import load_model
from slipstream.engine.runner import ModelRunner
from slipstream.models.folder import head_for, packaged_head, resolve
from slipstream.observe.log import configure
from slipstream.simulate.replay import RecordedText, ReplayedWorkload
from slipstream.simulate.simulation import Deployment, simulate, with_schedule
from slipstream.simulate.timed import KNEE_ROWS, Timing

SETS = ("mt_bench", "alpaca", "gsm8k", "humaneval", "cnn_dm")
PROMPT = 512  # of its newest tokens
STEP_MS, LEVELS, CHILDREN = 20.0, 5, 16  # of a tree: its levels, and children of a node
DRAFTS_MS, ROUND_TRIPS_MS = (1.0, 2.0, 5.0, 10.0), (0.2, 1.0, 5.0)
SECOND_MS, TARGETS, PRICE = (5.0, 10.0), (1, 2, 4, 8), 0.25  # of a draft's device, by a target's
SECONDS = 12.0  # simulated


def recorder_of(target: Path, head: Path, tokens: int,
                dtype: Dtype = "bfloat16") -> Callable[[Sequence[Sequence[int]]], list[Record]]:
    """What records prompts with a target and its EAGLE-3 head. Raises ModelError."""
    model = ModelSection(path=str(target), dtype=dtype)
    draft = DraftSection(drafter="eagle3", model=str(head), dtype=dtype)
    drafter = create(draft, model, MAX_PROMPTS * slots_for(PROMPT, tokens))
    assert isinstance(drafter, NeuralDrafter)
    runner = ModelRunner(load_model(target, model), slots_needed([[0] * PROMPT] * MAX_PROMPTS, tokens))
    return partial(record, runner, drafter.network, tokens)


def recorded(prompts: str, count: int, tokens: int) -> list[Record]:
    """``count`` questions of each of SETS in the folder ``prompts``, answered. Raises ConfigError, ModelError."""
    target = ModelSection().path
    known = head_for(target)
    assert known is not None
    codec = TextCodec(resolve(target))
    asked = [codec.chat([{"role": "user", "content": question}])[-PROMPT:]
             for name in SETS for question in read_questions(prompts, name, count)]
    recorder, records = recorder_of(resolve(target), packaged_head(known), tokens), list[Record]()
    for first in track(range(0, len(asked), MAX_PROMPTS), "answers and trees"):
        records += recorder(asked[first : first + MAX_PROMPTS])
    return records


def timing_of(draft_ms: float) -> Timing:
    return Timing(STEP_MS / 1e3, draft_knee_rows=KNEE_ROWS, draft_s=draft_ms / 1e3, levels=LEVELS, width=CHILDREN)


def compare_schedules(workload: ReplayedWorkload, draft_ms: float, rtt_ms: float, seconds: float) -> Row:
    """One row of the sweep."""
    timing = timing_of(draft_ms)
    deployment = Deployment(timing, rtt_s=rtt_ms / 1e3, workload=workload)

    together, serial, ahead, outcomes = (simulate(with_schedule(name, deployment), seconds)
                                         for name in ("colocated", "serial", "run-ahead", "outcomes"))
    rate, every = together.tokens_per_s, 1e3 * outcomes.hit_length / STEP_MS
    return {"tree_ms": draft_ms, "round_trip_ms": rtt_ms, "together": rate, "serial": serial.tokens_per_s,
            "ahead": ahead.tokens_per_s, "outcomes": outcomes.tokens_per_s, "ahead_hits": ahead.hit_rate,
            "outcomes_hits": outcomes.hit_rate, "tokens": together.acceptance_length, "hit_tokens": outcomes.hit_length,
            "outcomes_by_together": outcomes.tokens_per_s / rate, "oracle": every / rate,
            "bound": (STEP_MS + draft_ms) / STEP_MS}


def second_device(workload: ReplayedWorkload, draft_ms: float, targets: int, seconds: float) -> Row:
    """What a second device gives: beside ``targets`` targets, for ``PRICE`` targets' money, at 1 ms. Replicas of a pair
    on one device give as much by device and by money as one of them does."""
    timing = timing_of(draft_ms)
    deployment = Deployment(timing, targets, workload=workload)
    one = simulate(with_schedule("colocated", replace(deployment, targets=1)), seconds).tokens_per_s
    row: dict[str, float] = {"tree_ms": draft_ms, "targets": targets, "together": one, "replicas": (targets + 1) * one}
    for name in ("serial", "outcomes"):
        found = simulate(with_schedule(name, deployment), seconds)
        row |= {name: found.tokens_per_s, f"{name}_by_device": found.tokens_per_s / (targets + 1) / one,
                f"{name}_by_money": found.tokens_per_s / (targets + PRICE) / one}
    return row


def run(prompts: str, count: int, tokens: int, seconds: float = SECONDS) -> None:
    """Print both tables."""
    configure(LogSection(level="error"))
    records = recorded(prompts, count, tokens)
    torch.set_num_threads(1)
    workload = ReplayedWorkload(RecordedText(records))
    cells = [(draft_ms, rtt_ms) for draft_ms in DRAFTS_MS for rtt_ms in ROUND_TRIPS_MS]
    rows = [compare_schedules(workload, *cell, seconds) for cell in track(cells, "schedules")]
    write("network-real", rows, f"{ModelSection().path} and its head, {len(records)} questions, "
                                f"{len(workload.recorded)} tokens, simulated: tokens a second at a step of "
                                f"{STEP_MS:g} ms")
    pairs = [(draft_ms, targets) for draft_ms in SECOND_MS for targets in TARGETS]
    rows = [second_device(workload, *pair, seconds / 2) for pair in track(pairs, "a second device")]
    write("second-device", rows, f"one draft for so many targets, 1 ms away, which costs {PRICE:g} of a target; "
                                 "replicas: as many devices, a pair on each")
