"""Stage ``served`` of ``make gpu``: answers end to end on a model of the large shape with random weights, through the
target's own engine thread, a draft beside it and the link between them.

Rules:
1. Every session asks at once; plain, then with a tree verified in each round, greedy and then at T = 1. A random head
   is hardly ever right, so drafted rounds say what they cost, and not what speculation gains.
2. Graphs are captured before anything counts: a draft's at its start, a target's as each mode runs once before. So
   no two threads capture at a time: a capture that begins breaks another that is in progress.
3. *Host busy* is the processor time of this process by the time that passed: where it is near 1, the host is what the
   device waits for.

It knows nothing about HTTP or how answers are chosen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np

from bench.asking import ask
from bench.gpu.pace import graphed, head_of
from bench.gpu.stage import Finding, StageOptions
from draft_service.worker import DraftWorker
from slipstream.base.config import load
from slipstream.drafting.neural import NeuralDrafter
from slipstream.protocol.requests import Piece, Sampling
from slipstream.protocol.session import LEASE_S
from slipstream.wire.local import LocalLink
from target_service.assembly import Target
from target_service.assembly import assemble as assemble_target

WINDOW = 512  # slots of the draft for a session
SLOTS = 2304  # of the target: all texts of a session, so that none is evicted from the prefix cache
MODES = {"plain": Sampling(), "drafted": Sampling(), "plain, T = 1": Sampling(temperature=1.0, seed=1),
        "drafted, T = 1": Sampling(temperature=1.0, seed=1)}


def served_stage(options: StageOptions) -> Iterator[Finding]:
    """``options.shape``: how many sessions ask at once."""
    count, rng = int(options.shape) if options.full else min(int(options.shape), 4), np.random.default_rng(0)
    prompt, answer = (128, 128) if options.full else (12, 8)
    with asyncio.Runner() as runner:
        pair = runner.run(_start_pair(options, count))
        try:
            for warm in (False, True):
                for name, sampling in MODES.items():
                    prompts = rng.integers(2, options.config.vocab_size, (count, prompt)).tolist()
                    asking = pair.ask_all(prompts, sampling, answer, "plain" not in name)
                    seconds, processor_s, pieces = runner.run(asking)
                    if warm:
                        yield from _findings(name, count, seconds, processor_s, pieces)
        finally:
            pair.end()


def _findings(name: str, count: int, seconds: float, processor_s: float, pieces: list[Piece]) -> Iterator[Finding]:
    tokens = sum(len(piece.tokens) for piece in pieces)
    yield Finding(f"{name}: all sessions", tokens / seconds, "tokens/s")
    yield Finding(f"{name}: a round of all", 1e3 * seconds * count / len(pieces), "ms")
    yield Finding(f"{name}: a step, as the target saw it", 1e3 * median(p.verify_s for p in pieces), "ms")
    yield Finding(f"{name}: verified nodes", sum(p.drafted for p in pieces) / len(pieces), "a round")
    yield Finding(f"{name}: host busy", processor_s / seconds, "of one core")


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft that are connected."""

    target: Target
    draft: DraftWorker
    link: LocalLink

    async def ask_all(self, prompts: list[list[int]], sampling: Sampling, answer: int,
                    speculate: bool) -> tuple[float, float, list[Piece]]:
        """Ask all at once. Returns seconds, processor seconds, and all pieces."""
        began_s, busy_s, pieces = time.perf_counter(), time.process_time(), list[Piece]()
        await asyncio.gather(*(ask(self.target.service, prompt, sampling, answer, speculate, on_piece=pieces.append)
                               for prompt in prompts))
        return time.perf_counter() - began_s, time.process_time() - busy_s, pieces

    def end(self) -> None:
        self.link.cut()
        self.target.end()
        self.draft.stop()


async def _start_pair(options: StageOptions, count: int) -> Pair:
    config = load(None, ("target.policy.always=true", "target.prompt_lookup=false", f"target.max_sessions={count}",
                         "target.max_context=1024", f"target.slots={count * SLOTS}"))
    target = assemble_target(config, graphed(options), "random", "", asyncio.get_running_loop())
    network, backend = head_of(options, config.draft.growth, count * WINDOW, count)
    backend.warm()
    drafter = NeuralDrafter("eagle3", network, config.draft.growth, count, WINDOW // 2, backend)
    draft = DraftWorker(drafter, "", LEASE_S, device=options.device)
    link = LocalLink(target.hello, target.worker.following, draft)
    pair = Pair(target, draft, link)
    draft.start()
    target.worker.start()
    link.restore()
    if problem := link.status().problem:
        pair.end()
        raise RuntimeError(problem)
    return pair
