"""``python -m bench.vllm.host``: what our adapter costs vLLM's engine thread in a step, beside a model that sleeps.

A runner with the fields that the adapter reads, whose forward takes a set time and follows the law of the timed
devices; a draft service with a timed device, over gRPC on loopback. ``host_us`` is the processor time of the engine's
thread in the proposer, ``beside_us`` that of all other threads of the process in that time; ``propose_ms`` is the
whole time there, waiting for the draft included. ``drafted`` is the share of requests that got a chain.

The policy always drafts, so the same work is measured on any machine, however busy. As vLLM does, the process freezes
its heap once all is loaded.

It needs no vLLM. As ``make bench-vllm`` runs it, modules are compiled as they are in a wheel; in a checkout they are
not.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
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

from bench.report import Row, exit_on_error, write
from bench.timed import stream_prompt, timed_services
from slipstream.base.config import LogSection
from slipstream.following import following
from slipstream.following.chains import Chains
from slipstream.observe.log import configure
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import PROTOCOL_VERSION, TargetHello
from slipstream.simulate.timed import MAX_CONTEXT, VOCAB, SyntheticText, Timing

BATCHES = (1, 8, 64)
CHAIN = 4
CONNECT_S = 30.0
GOAL_US, GOAL_EACH_US = 500.0, 20.0
HELLO = TargetHello(PROTOCOL_VERSION, 0, "bench", VOCAB, "", 1, 1, MAX_CONTEXT)


@dataclass(slots=True)
class SleepingRunner:
    """vLLM's runner with a batch of ``count`` greedy requests and a model that takes ``timing``'s time."""

    count: int
    timing: Timing
    law: SyntheticText = field(init=False)
    max_model_len: int = 1 << 14
    device: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(type="cpu"))
    input_batch: SimpleNamespace = field(init=False)
    requests: dict[str, SimpleNamespace] = field(init=False)

    def __post_init__(self) -> None:
        names = [f"request-{number}" for number in range(self.count)]
        sampling = SimpleNamespace(max_tokens=self.max_model_len - 64, temperature=0.0, extra_args=None, min_tokens=0,
                                   stop_token_ids=[], eos_token_id=None)
        self.requests = {name: SimpleNamespace(sampling_params=sampling) for name in names}
        self.law = SyntheticText(self.timing)
        tokens = np.zeros((self.count, self.max_model_len), np.int32)
        tokens[:, :2] = [stream_prompt(number) for number in range(self.count)]
        self.input_batch = SimpleNamespace(
            req_ids=names, vocab_size=VOCAB, token_ids_cpu=tokens, num_tokens_no_spec=np.full(self.count, 2, np.int32),
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
                               total_num_scheduled_tokens=rows, num_spec_tokens_to_schedule=CHAIN), sampled

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


class Proposer:
    """The proposer under test, connected to ``runner``."""

    def __init__(self, runner: SleepingRunner, options: Options) -> None:
        """Raises ConfigError."""
        self._runner, metrics = runner, TargetMetrics("bench")
        self._chains = Chains(options.section(CHAIN), metrics)
        Links(options, HELLO, self._chains.following, metrics)
        self._proposed: Sequence[Sequence[int]] = [[]] * runner.count

    def step(self) -> dict[str, float]:
        """Do one step. Returns its measurements."""
        runner, chains = self._runner, self._chains
        output, sampled = runner.step(self._proposed)
        began_s, all_ns, own_ns = time.perf_counter(), time.process_time_ns(), time.thread_time_ns()
        rows = rows_of(runner, output, sampled)
        self._proposed = chains.step(rows, output.finished_req_ids, output.total_num_scheduled_tokens)
        own_us, all_us = (time.thread_time_ns() - own_ns) / 1e3, (time.process_time_ns() - all_ns) / 1e3
        spent_ms = 1e3 * (time.perf_counter() - began_s)
        return {"host_us": own_us, "beside_us": all_us - own_us, "propose_ms": spent_ms,
                "drafted": sum(map(bool, self._proposed)) / runner.count,
                "tokens_a_step": sum(map(len, sampled)) / runner.count}


async def measure(count: int, timing: Timing, steps: int) -> Row:
    """Measure one batch size. Raises Unavailable."""
    async with timed_services(timing, targets=0) as rig:
        options = Options((rig.drafts[0].address,), prompt_lookup=False, always=True)
        return await asyncio.to_thread(_steps, count, timing, steps, options)


def _steps(count: int, timing: Timing, steps: int, options: Options) -> Row:
    proposer = Proposer(SleepingRunner(count, timing), options)
    deadline_s = time.monotonic() + CONNECT_S
    while not proposer.step()["drafted"] and time.monotonic() < deadline_s:
        pass  # measure from the first draft on
    for _ in range(steps // 10):
        proposer.step()
    gc.collect()
    gc.freeze()
    measurements = [proposer.step() for _ in range(steps)]
    gc.unfreeze()
    medians = {name: statistics.median(step[name] for step in measurements)
               for name in ("host_us", "beside_us", "propose_ms")}
    return {"requests": count, "goal_us": GOAL_US + GOAL_EACH_US * count, **medians,
            **{name: statistics.mean(step[name] for step in measurements) for name in ("drafted", "tokens_a_step")}}


async def run(steps: int, timing: Timing) -> None:
    """Raises Unavailable."""
    rows = [await measure(count, timing, steps) for count in BATCHES]
    kind = "compiled" if (following.__file__ or "").endswith((".so", ".pyd")) else "as sources"
    write("vllm-host", rows, f"a step of {1e3 * timing.step_s:g} ms, chains of {CHAIN}, modules {kind}")


@exit_on_error()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="that count, at each batch size")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--draft-ms", type=float, default=2.0)
    arguments = parser.parse_args()
    configure(LogSection(level="warning"))
    timing = Timing(step_s=arguments.step_ms / 1e3, draft_s=arguments.draft_ms / 1e3)
    asyncio.run(run(arguments.steps, timing))


if __name__ == "__main__":
    main()
