"""``make bench-network ARGS="--real"``: the schedules on the default model, with its own forwards and prompts.

Model and drafters compute what they always do, in simulated time: a step and a level are charged what the timed
devices take (``simulate.cast``). So hits and acceptance are those of a real model and drafter, and the speeds are
those of two devices that take such times, which a machine whose few cores are shared by everybody could not show.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from bench.prompts import own, read
from bench.report import Row, save, write
from router_service.tokens import TextCodec
from slipstream.base.config import DraftSection, ModelSection
from slipstream.drafting import create
from slipstream.drafting.base import Drafter
from slipstream.engine.weights import load_model
from slipstream.models.folder import resolve
from slipstream.protocol.messages import Sampling
from slipstream.simulate.cast import RealCast
from slipstream.simulate.simulation import Deployment, of_schedule, simulate
from slipstream.simulate.timed import Timing

HEAD = "smollm2-135m-eagle3"
SLOTS = 4096
DRAFTERS: dict[str, dict[str, object]] = {
    "ngram": {"drafter": "ngram"},
    "eagle3": {"drafter": "eagle3", "model": HEAD},
}
SWEPT = "eagle3"  # the one that is asked over every round trip


def drafters(model: ModelSection) -> dict[str, Callable[[], Drafter]]:
    """By name, each made anew for a simulation."""
    def maker(settings: dict[str, object]) -> Callable[[], Drafter]:
        fixed: dict[str, object] = {"slots": SLOTS, "max_sessions": 16, "project_features": False}
        section = DraftSection.model_validate(fixed | settings)
        return lambda: create(section, model)

    return {name: maker(settings) for name, settings in DRAFTERS.items()}


def prompts_of(folder: str | None, sets: Sequence[str], count: int) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """``count`` questions of each set in ``folder``, or our own, as tokens; and the tokens that end an answer."""
    codec = TextCodec(resolve(ModelSection().path))
    asked = own() if folder is None else itertools.chain(*(read(folder, name, count) for name in sets))
    prompts = [tuple(codec.chat([{"role": "user", "content": question.text}])) for question in asked]
    return [prompt for prompt in prompts if len(prompt) < SLOTS // 4], tuple(codec.stop_token_ids)


def play(cast: RealCast, schedule: str, rtt_ms: float, timing: Timing) -> Row:
    """One row, without the drafter's name: every prompt is answered once."""
    deployment = Deployment(timing, rtt_s=rtt_ms / 1e3, cast=cast, answers=len(cast.prompts))
    found = simulate(of_schedule(schedule, deployment), 0.0)
    return {"schedule": schedule, "rtt_ms": rtt_ms, "tokens_per_s": found.tokens_per_s, "hit_rate": found.hit_rate,
            "waiting_share": found.waiting_share, "acceptance_length": found.acceptance_length,
            "draft_busy": found.draft_busy}


def cells(rtts_ms: Sequence[float]) -> list[tuple[str, str, float]]:
    """(drafter, schedule, round trip): every drafter at 1 ms, one of them at all."""
    rows = [(SWEPT, "plain", 0.0), (SWEPT, "colocated", 0.0)]
    rows += [(SWEPT, schedule, rtt_ms) for schedule in ("serial", "run-ahead") for rtt_ms in rtts_ms]
    return [*rows, *((name, schedule, 1.0) for name in DRAFTERS if name != SWEPT
                     for schedule in ("serial", "run-ahead"))]


def run(folder: str | None, sets: Sequence[str], count: int, tokens: int, rtts_ms: Sequence[float]) -> None:
    """Print and write ``build/bench/network-real.json``."""
    torch.set_num_threads(1)
    section = ModelSection()
    prompts, stops = prompts_of(folder, sets, count)
    made = drafters(section)
    cast = RealCast(load_model(resolve(section.path), section.dtype, section.device), made[SWEPT], prompts,
                    Sampling(stop_token_ids=stops), tokens, SLOTS)
    rows: list[Row] = []
    for name, schedule, rtt_ms in cells(rtts_ms):
        row = play(replace(cast, create=made[name]), schedule, rtt_ms, Timing(levels=3, draft_s=0.00375))
        rows.append({"drafter": name, **row})
        save("network-real", rows)
        print(rows[-1], file=sys.stderr)
    write("network-real", rows, f"bench-network --real: {section.path}, a step is charged 20 ms, a level 1.25 ms, "
          f"{len(cast.prompts)} prompts, answers of {tokens} tokens at most")
