"""``python -m bench.vllm.host``: what our adapter costs vLLM's engine thread in a step, beside a model that sleeps.

A runner with the fields that the adapter reads, whose forward takes a set time and follows the law of the timed
devices; a draft service with a timed device, over gRPC on loopback. ``host_us`` is the processor time of the engine's
thread in the proposer: reading the batch, committing, deciding, sending, taking chains. ``propose_ms`` is the whole
time there, waiting for the draft included.

It needs no vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from slipstream_vllm.adapter_0_32 import rows_of
from slipstream_vllm.links import Links
from slipstream_vllm.options import Options
from slipstream_vllm.remote import Chains

from bench.report import Row, finished, write
from bench.timed import deployed, text
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import PROTOCOL_VERSION, TargetHello
from slipstream.simulate.timed import MAX_CONTEXT, VOCAB, Law, Timing

BATCHES = (1, 8, 64)
CHAIN = 4
JOINED_S = 30.0
GOAL_US, GOAL_EACH_US = 500.0, 20.0
HELLO = TargetHello(PROTOCOL_VERSION, 0, "bench", VOCAB, "", 1, 1, MAX_CONTEXT)


@dataclass(slots=True)
class SleepingRunner:
    """vLLM's runner with a batch of ``count`` greedy requests and a model that takes ``timing``'s time."""

    count: int
    timing: Timing
    law: Law = field(init=False)
    max_model_len: int = 1 << 14
    device: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(type="cpu"))
    input_batch: SimpleNamespace = field(init=False)
    requests: dict[str, SimpleNamespace] = field(init=False)

    def __post_init__(self) -> None:
        names = [f"request-{number}" for number in range(self.count)]
        sampling = SimpleNamespace(max_tokens=self.max_model_len - 64, temperature=0.0, extra_args=None)
        self.requests = {name: SimpleNamespace(sampling_params=sampling) for name in names}
        self.law = Law(self.timing)
        tokens = np.zeros((self.count, self.max_model_len), np.int32)
        tokens[:, :2] = [text(number) for number in range(self.count)]
        self.input_batch = SimpleNamespace(
            req_ids=names, token_ids_cpu=tokens, num_tokens_no_spec=np.full(self.count, 2, np.int32),
            num_prompt_tokens=np.full(self.count, 2, np.int32))

    def step(self, chains: Sequence[Sequence[int]]) -> tuple[Any, list[list[int]]]:
        """Verify ``chains``. What vLLM hands to its proposer: the scheduler's output and the tokens that came."""
        batch = self.input_batch
        rows = len(chains) + sum(map(len, chains))
        time.sleep(self.timing.step_of(rows))
        sampled = [self._accepted(place, chain) for place, chain in enumerate(chains)]
        for place, new in enumerate(sampled):
            length = int(batch.num_tokens_no_spec[place])
            batch.token_ids_cpu[place, length : length + len(new)] = new
            batch.num_tokens_no_spec[place] += len(new)
        verified = {name: list(chain) for name, chain in zip(batch.req_ids, chains, strict=True) if chain}
        return SimpleNamespace(finished_req_ids=set[str](), scheduled_spec_decode_tokens=verified,
                               total_num_scheduled_tokens=rows), sampled

    def _accepted(self, place: int, chain: Sequence[int]) -> list[int]:
        length = int(self.input_batch.num_tokens_no_spec[place])
        newest = int(self.input_batch.token_ids_cpu[place, length - 1])
        new = list[int]()
        for token in (*chain, None):
            right = int(self.law.following([newest], [length - 1 + len(new)])[0])
            new.append(right)
            if right != token:
                break
            newest = right
        return new


async def measured(count: int, timing: Timing, steps: int) -> Row:
    """One batch size. Raises Unavailable."""
    async with deployed(timing, targets=0) as rig:
        options = Options((rig.drafts[0].address,), prompt_lookup=False)
        return await asyncio.to_thread(_steps, count, timing, steps, options)


def _steps(count: int, timing: Timing, steps: int, options: Options) -> Row:
    metrics = TargetMetrics("bench")
    chains = Chains(options, CHAIN, metrics)
    Links(options.drafts, HELLO, chains.following, metrics)
    runner = SleepingRunner(count, timing)
    proposed: list[list[int]] = [[]] * count
    warm = steps // 10
    host_us, spent_ms, tokens = list[float](), list[float](), 0
    deadline_s = time.monotonic() + JOINED_S
    while len(spent_ms) < warm + steps:
        output, sampled = runner.step(proposed)
        tokens += sum(map(len, sampled)) if len(spent_ms) >= warm else 0
        began_s, began_ns = time.perf_counter(), time.thread_time_ns()
        proposed = chains.step(rows_of(runner, output, sampled), output.finished_req_ids,
                               output.total_num_scheduled_tokens)
        if any(proposed) or spent_ms or time.monotonic() > deadline_s:  # it counts from the first draft on
            host_us.append((time.thread_time_ns() - began_ns) / 1e3)
            spent_ms.append(1e3 * (time.perf_counter() - began_s))
    host = statistics.median(host_us[warm:])
    goal = GOAL_US + GOAL_EACH_US * count
    return {"requests": count, "host_us": host, "goal_us": goal, "reached": host <= goal,
            "propose_ms": statistics.median(spent_ms[warm:]), "longest_ms": max(spent_ms[warm:]),
            "tokens_a_step": tokens / steps / count}


async def run(steps: int, timing: Timing) -> None:
    """Raises Unavailable."""
    rows = [await measured(count, timing, steps) for count in BATCHES]
    write("vllm-host", rows, f"bench.vllm.host: a step of {1e3 * timing.step_s:g} ms, chains of {CHAIN}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="that count, at each batch size")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--draft-ms", type=float, default=2.0)
    arguments = parser.parse_args()
    timing = Timing(step_s=arguments.step_ms / 1e3, draft_s=arguments.draft_ms / 1e3)
    finished(run(arguments.steps, timing))


if __name__ == "__main__":
    main()
