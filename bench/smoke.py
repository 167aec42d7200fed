"""``make bench-smoke``: plain, n-gram and standalone decoding of a dozen prompts, over gRPC between real processes.

Systems are asked in turn, prompt by prompt, so that a slow minute of the machine hurts all of them alike. The
standalone draft is the target itself, as no smaller model with its vocabulary is at hand: it accepts nearly everything
and costs a whole step a token, so it shows the mechanism and not a gain.
"""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

from rich.progress import track

from bench.asking import Measured, ask
from bench.fleet import Pair
from bench.prompts import own
from bench.report import Row, write
from router_service.tokens import TextCodec
from slipstream.base.config import ModelSection
from slipstream.models.folder import resolve
from slipstream.protocol.messages import Sampling

MAX_TOKENS = 96
MODEL = ModelSection().path


async def run() -> None:
    """Start three pairs, ask, print, write ``build/bench/smoke.json``."""
    folder = Path("build/bench/logs")
    pairs = [Pair("ngram", folder, ("draft.drafter=ngram",)), Pair("default", folder),
             Pair("standalone", folder, ("draft.drafter=standalone", f"draft.model={MODEL}"))]
    systems = [("plain", pairs[0], False), ("ngram", pairs[0], True), ("default", pairs[1], True),
               ("standalone", pairs[2], True)]
    try:
        for pair in pairs:
            await pair.start()
        codec = TextCodec(resolve(MODEL))
        sampling = Sampling(stop_token_ids=tuple(codec.stop_token_ids))
        results: dict[tuple[str, str], list[Measured]] = {}
        for question in track(own(), description="asking"):
            prompt = codec.chat([{"role": "user", "content": question.text}])
            for name, pair, speculate in systems:
                measured = await ask(pair.client, prompt, sampling, MAX_TOKENS, speculate)
                results.setdefault((name, question.set), []).append(measured)
        await asyncio.sleep(1.0)  # byte counts are exported twice a second
        costs = {pair.name: await costs_of(pair, results) for pair in pairs}
        write("smoke", [row(name, kind, results, costs) for name, _, _ in systems for kind in ("chat", "copy")],
              "bench-smoke: batch 1, greedy, default model, over loopback gRPC")
    finally:
        for pair in pairs:
            await pair.stop()


async def costs_of(pair: Pair, results: dict[tuple[str, str], list[Measured]]) -> dict[str, float]:
    """Milliseconds of drafting a round and bytes on the wire a token, from the services' own counters."""
    tokens = sum(len(m.tokens) for (name, _), all_ in results.items() if name == pair.name for m in all_)
    rounds = max(1.0, await pair.draft.metric("draft_seconds_count"))
    return {"draft_ms": 1e3 * await pair.draft.metric("draft_seconds_sum") / rounds,
            "wire_bytes": await pair.target.metric("wire_bytes_total") / max(1, tokens)}


def row(name: str, kind: str, results: dict[tuple[str, str], list[Measured]],
        costs: dict[str, dict[str, float]]) -> Row:
    answers, plain = results[name, kind], results["plain", kind]
    rounds = sum(m.rounds for m in answers)
    ratios = [a.tokens_per_s / p.tokens_per_s for a, p in zip(answers, plain, strict=True) if p.tokens_per_s]
    speculating = name in costs
    return {
        "drafter": name, "set": kind,
        "tokens_per_s": statistics.median(m.tokens_per_s for m in answers),
        "speed_ratio": statistics.median(ratios),
        "acceptance_length": sum(len(m.tokens) for m in answers) / rounds,
        "draft_ms": costs[name]["draft_ms"] if speculating else 0.0,
        "wait_ms": 1e3 * sum(m.wait_s for m in answers) / rounds,
        "verify_ms": 1e3 * sum(m.verify_s for m in answers) / rounds,
        "wire_bytes_per_token": costs[name]["wire_bytes"] if speculating else 0.0,
        "same_as_plain": sum(a.tokens == p.tokens for a, p in zip(answers, plain, strict=True)),
        "answers": len(answers),
    }


if __name__ == "__main__":
    asyncio.run(run())
