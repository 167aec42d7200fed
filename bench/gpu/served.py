"""Stage ``served`` of ``make gpu``: answers end to end on a model of the large shape with random weights, through the
target's own engine thread, a draft beside it and the link between them.

Rules:
1. Every session asks at once; plain, then with a tree verified in each round, greedy and then at T = 1. A random head
   is hardly ever right, so drafted rounds say what they cost, and not what speculation gains.
2. *Host busy* is the processor time of this process by the time that passed: where it is near 1, the host is what the
   device waits for.

It knows nothing about HTTP or how answers are chosen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from statistics import median

import numpy as np

from bench.asking import ask
from bench.gpu.pace import graphed, head_of
from bench.gpu.stage import Finding, Given
from draft_service.assembly import assemble as assemble_draft
from slipstream.base.config import Config, load
from slipstream.drafting.neural import NeuralDrafter
from slipstream.protocol.pairing import check_pair
from slipstream.protocol.requests import Piece, Sampling
from slipstream.protocol.session import LEASE_S
from slipstream.wire.local import LocalLink
from target_service.assembly import assemble as assemble_target

WINDOW = 512  # slots of the draft for a session
TURNS = {"warm-up": Sampling(), "plain": Sampling(), "drafted": Sampling(),
         "plain, T = 1": Sampling(temperature=1.0, seed=1), "drafted, T = 1": Sampling(temperature=1.0, seed=1)}


def served_stage(given: Given) -> Iterator[Finding]:
    """``given.shape``: how many sessions ask at once."""
    count = int(given.shape) if given.full else min(int(given.shape), 4)
    prompt, answer = (128, 128) if given.full else (12, 8)
    config = load(None, ("target.policy.always=true", "target.prompt_lookup=false", f"target.max_sessions={count}",
                         "target.max_context=1024"))
    for name, seconds, processor_s, pieces in asyncio.run(_asked(given, config, count, prompt, answer)):
        tokens = sum(len(piece.tokens) for piece in pieces)
        yield Finding(f"{name}: all sessions", tokens / seconds, "tokens/s")
        yield Finding(f"{name}: a round of all", 1e3 * seconds * count / len(pieces), "ms")
        yield Finding(f"{name}: a step, as the target saw it", 1e3 * median(p.verify_s for p in pieces), "ms")
        yield Finding(f"{name}: verified nodes", sum(p.drafted for p in pieces) / len(pieces), "a round")
        yield Finding(f"{name}: host busy", processor_s / seconds, "of one core")


Asked = list[tuple[str, float, float, list[Piece]]]


async def _asked(given: Given, config: Config, count: int, prompt: int, answer: int) -> Asked:
    """For each way: its name, seconds, processor seconds, and all pieces."""
    target = await asyncio.to_thread(assemble_target, config, graphed(given), "random", "", asyncio.get_running_loop())
    network, levels = head_of(given, config.draft.growth, count * WINDOW)
    drafter = NeuralDrafter("eagle3", network, config.draft.growth, count, WINDOW // 2, levels)
    draft = assemble_draft(drafter, "", LEASE_S, device=given.device)
    link = LocalLink("local", target.hello, target.worker.following, draft.worker, check_pair)
    draft.worker.start()
    target.worker.start()
    found: Asked = []
    try:
        link.restore()
        if problem := link.status().problem:
            raise RuntimeError(problem)
        for turn, (name, sampling) in enumerate(TURNS.items()):
            began_s, busy_s = time.perf_counter(), time.process_time()
            pieces, dice = list[Piece](), np.random.default_rng(turn)
            prompts = dice.integers(2, given.config.vocab_size, (count, prompt)).tolist()
            await asyncio.gather(*(ask(target.service, one, sampling, answer, "plain" not in name,
                                       on_piece=pieces.append) for one in prompts))
            found.append((name, time.perf_counter() - began_s, time.process_time() - busy_s, pieces))
        return found[1:]
    finally:
        link.cut()
        await asyncio.to_thread(target.end)
        await asyncio.to_thread(draft.worker.stop)
