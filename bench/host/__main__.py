"""``make bench-host``: what a round costs the host besides the forwards, part by part, in microseconds.

A round of one session as ``make run`` has it: a tree of 8 nodes below the root, 49,152 tokens in the vocabulary, 12,288
of them the draft's, feature rows of 576 numbers. Logits fall off as a model's do: Zipf's law in random order, one draw
a row. The exchange is with a draft service whose device takes no time, over gRPC on loopback; then sums. What is not
here: forwards, and threads that wait for one another. ``--rounds`` measures real rounds instead (``rounds``).

``p50_us`` and ``p99_us`` are of a part that runs again and again. ``once_a_step_us`` is the median where all parts run
one after the other and then none for as long as a step of a device takes, as in a service: by then others have the
caches, and what each part touches first, code and objects, comes from memory. That is the gap between loops and rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from rich.progress import track

from bench.host import rounds
from bench.inputs import SAMPLINGS, choice_rows, zipf_logits
from bench.report import Row, number, write
from bench.timed import deployed, text
from slipstream.base.config import ModelSection, PolicySection
from slipstream.choosing.sampling import Children, Race, choose, ranked
from slipstream.cli.process import kept_up
from slipstream.decision.beliefs import Beliefs, StepCosts
from slipstream.decision.decide import Round, Seen
from slipstream.decision.policy import SpeculationPolicy
from slipstream.drafting.tree import GrowingTree
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.native import native_or
from slipstream.engine.native.program import Team
from slipstream.engine.native.races import NativeRace
from slipstream.grammar.compiling import Vocabulary
from slipstream.grammar.matcher import Ends
from slipstream.models.folder import load_tokenizer, resolve
from slipstream.protocol.grammar import Grammar
from slipstream.protocol.lookup import PromptLookup
from slipstream.protocol.messages import (
    PROTOCOL_VERSION,
    Commit,
    DraftHello,
    Faults,
    Features,
    Growth,
    Link,
    Open,
    TargetBound,
    TargetHello,
)
from slipstream.protocol.pairing import check_pair
from slipstream.protocol.requests import Sampling
from slipstream.protocol.session import TargetSide
from slipstream.protocol.tree import DraftTree, walk
from slipstream.simulate.timed import MAX_CONTEXT, Timing
from slipstream.simulate.timed import VOCAB as TIMED_VOCAB
from slipstream.wire.codec import (
    FrameLimits,
    decode_draft_frame,
    decode_target_frame,
    encode_draft_frames,
    encode_target_frames,
)
from slipstream.wire.link import DraftLink

VOCAB, DRAFT_VOCAB, HIDDEN, CONTEXT = 49_152, 12_288, 576, 256
STEP_S = 0.02
LEVELS, TOPK, NODES = 3, 4, 8
ACCEPTED = 2
MAX_BYTES = 1 << 22
WAIT_S = 60.0  # for all exchanges
LIMITS = FrameLimits(VOCAB, 8192, feature_width=HIDDEN, feature_dtype="bfloat16")

Part = Callable[[], object]


def children(count: int, seed: int) -> list[Children]:
    """Tokens and scores of the children of ``count`` nodes."""
    dice = np.random.default_rng(seed)
    return [(dice.choice(VOCAB, TOPK, replace=False).tolist(), np.sort(-dice.exponential(size=TOPK))[::-1].tolist())
            for _ in range(count)]


def levels_of_a_tree() -> list[list[Children]]:
    """What a drafter's forwards would say, level by level."""
    return [children(TOPK if level else 1, level) for level in range(LEVELS)]


def grown(levels: Sequence[list[Children]]) -> Growth:
    """A tree of the default shape, as a drafter makes it once its forwards are done."""
    tree = GrowingTree(CONTEXT, TOPK)
    for level in levels:
        tree.expand(level[:len(tree.frontier)])
    return tree.growth(1, NODES, time.perf_counter())


def side_with_tree(growth: Growth) -> TargetSide:
    side = TargetSide(1, list(range(CONTEXT)), CONTEXT, Sampling())
    side.attach()
    side.receive(growth)
    return side


def commit_of(growth: Growth) -> Commit:
    """What a target sends when it accepted some of ``growth``."""
    tree = side_with_tree(growth).tree.best(NODES)
    tokens = [*tree.tokens[tree.path(len(tree) - 1)[1:]].tolist(), 0][:ACCEPTED + 1]
    features = Features(1, CONTEXT - 1, bytes(2 * HIDDEN * len(tokens)), len(tokens), "bfloat16")
    return Commit(1, CONTEXT, np.array(tokens, np.int32), features, NODES, NODES)


def parts_of_choosing() -> Iterator[tuple[str, Part]]:
    logits, drafts = zipf_logits(NODES + 1, VOCAB, 0), zipf_logits(TOPK, DRAFT_VOCAB, 1)
    vocabulary = torch.arange(0, VOCAB, VOCAB // DRAFT_VOCAB)
    races = [native_or("auto", torch.bfloat16, torch.device("cpu"), "choices", partial(race_of, tokens), lambda: None)
             for tokens in (None, vocabulary)]
    for name, sampling in SAMPLINGS.items():
        rows, few = choice_rows(sampling, NODES + 1), choice_rows(sampling, TOPK)
        yield f"target: choose, {NODES + 1} rows, {name}", partial(choose, logits, [rows], None, races[0])
        yield f"draft: rank, {TOPK} rows, {name}", partial(ranked, drafts, [few], TOPK, vocabulary, races[1])


def race_of(vocabulary: torch.Tensor | None, team: Team) -> Race | None:
    return NativeRace(team, vocabulary)


def parts_of_a_round() -> Iterator[tuple[str, Part]]:
    levels = levels_of_a_tree()
    growth = grown(levels)
    side = side_with_tree(growth)
    tree = side.tree.best(NODES)
    choices = [int(tree.tokens[child]) if child < len(tree) else 0 for child in range(1, len(tree) + 1)]
    commit = commit_of(growth)
    tokens, features = commit.tokens.tolist(), commit.features
    (commit_frame,), _ = encode_target_frames(1, [commit], MAX_BYTES)
    (growth_frame,), _ = encode_draft_frames(1, [growth], MAX_BYTES)
    policy = SpeculationPolicy(PolicySection(), Beliefs(StepCosts({1: 0.015, 8: 0.017, 16: 0.022})))

    def build() -> object:
        builder = BatchBuilder()
        builder.add(tree.tokens.tolist(), (tree.base - 1 + tree.depths()).tolist(), range(CONTEXT, CONTEXT + len(tree)),
                    np.arange(CONTEXT - 1), tree.ancestor_words().tolist(), len(tree))
        return builder.build(torch.device("cpu"))

    def decide() -> object:
        policy.observe(0.0, Round(NODES, ACCEPTED, LEVELS, 0.02, 0.001, NODES + 1))
        return policy.decide(0.0, Seen(followed=True))

    lookup = PromptLookup([token % 40 for token in range(CONTEXT)])

    def look_up() -> object:
        lookup.commit([token % 40 for token in tokens])
        return lookup.chain(16)

    yield "target: look up what the text foretells", look_up
    yield "target: select the best nodes", lambda: side.tree.best(NODES)
    yield "target: build the batch", build
    yield "target: walk", lambda: walk(tree, choices)
    yield "target: receive a growth and commit", lambda: side_with_tree(growth).commit(tokens, features)
    yield "target: policy", decide
    yield "wire: encode a commit", lambda: encode_target_frames(1, [commit], MAX_BYTES)
    yield "wire: decode a commit", lambda: decode_target_frame(commit_frame, 1, LIMITS)
    yield "wire: encode a growth", lambda: encode_draft_frames(1, [growth], MAX_BYTES)
    yield "wire: decode a growth", lambda: decode_draft_frame(growth_frame, 1, LIMITS)
    yield f"draft: grow {LEVELS} levels, send {NODES} nodes", partial(grown, levels)


def parts_of_a_grammar() -> Iterator[tuple[str, Part]]:
    """Of a chain inside of a JSON string, where nearly every token is allowed, and at its beginning; in the default
    model's vocabulary."""
    grammar = Grammar("json_schema", '{"type":"object","properties":{"name":{"type":"string"}},"required":["name"]}')
    tokenizer = load_tokenizer(resolve(ModelSection().path))
    vocabulary = Vocabulary(tokenizer, VOCAB)
    begun, said = (tokenizer.encode(text, add_special_tokens=False).ids for text in ('{"name":"', "a day " * NODES))
    for where, tokens, path in (("the beginning", [], [*begun, *said]), ("a string", begun, said)):
        matcher = vocabulary.compile(grammar, Ends((0,)), tokens)
        tree = DraftTree.root_only(1, 0).append(range(1, NODES + 1), [-1, *range(1, NODES)], path[:NODES],
                                                [-0.1 * node for node in range(NODES)])
        assert len(matcher.kept(tree)) == NODES + 1
        yield f"grammar: masks of {NODES + 1} nodes, {where}", partial(matcher.masks, tree)
        yield f"grammar: what of {NODES + 1} nodes is allowed, {where}", partial(matcher.kept, tree)


class Caller:
    """The target's end of a link: it waits for what comes."""

    def __init__(self) -> None:
        self.up = asyncio.Event()
        self.came = asyncio.Event()

    def link_up(self, link: Link, hello: DraftHello) -> None:
        self.up.set()

    def link_down(self, link: Link, reason: str) -> None:
        self.up.clear()

    def received(self, link: Link, items: Sequence[TargetBound], faults: Faults) -> None:
        self.came.set()

    def full(self, link: Link) -> bool:
        return False


async def exchanges(repeats: int) -> list[float]:
    """Microseconds from a commit to its growth, after a tenth that does not count. Raises Unavailable."""
    prompt, caller, times = np.array(text(1), np.int32), Caller(), list[float]()
    hello = TargetHello(PROTOCOL_VERSION, 0, "bench", TIMED_VOCAB, "", 1, 1, MAX_CONTEXT)
    async with deployed(Timing(draft_s=0.0), targets=0) as rig:
        link = DraftLink(rig.drafts[0].address, hello, caller, check_pair)
        async with kept_up(link.run()), asyncio.timeout(WAIT_S):
            await caller.up.wait()
            link.send([Open(1, prompt, len(prompt), Sampling(), NODES)])
            await caller.came.wait()
            for run in range(-(repeats // 10) - 1, repeats):
                caller.came.clear()
                base = len(prompt) + len(prompt) * (run + repeats // 10 + 1)
                began_s = time.perf_counter()
                link.send([Commit(1, base, prompt, None, 0, NODES)])
                await caller.came.wait()
                if run >= 0:
                    times.append(1e6 * (time.perf_counter() - began_s))
    return times


def once_a_step(parts: Sequence[tuple[str, Part]], repeats: int) -> dict[str, float]:
    """Median microseconds of each, of ``repeats`` steps."""
    times = defaultdict[str, list[float]](list)
    for _ in range(repeats):
        time.sleep(STEP_S)
        for name, part in parts:
            began = time.perf_counter()
            part()
            times[name].append(1e6 * (time.perf_counter() - began))
    return {name: statistics.median(of_one) for name, of_one in times.items()}


def measured(name: str, part: Part, repeats: int) -> Row:
    """A warm-up of a tenth, then ``repeats`` runs."""
    times = []
    for run in range(-(repeats // 10) - 1, repeats):
        began = time.perf_counter()
        part()
        if run >= 0:
            times.append(1e6 * (time.perf_counter() - began))
    return row_of(name, times)


def row_of(name: str, times: list[float]) -> Row:
    """``times`` in microseconds."""
    cuts = statistics.quantiles(times, n=100)
    return {"part": name, "p50_us": cuts[49], "p99_us": cuts[98]}


def sums(rows: Sequence[Row]) -> list[Row]:
    """What a greedy round costs each side: its own parts, and the frames that it reads and writes. The 99th percentile
    is what it would be if all parts were slow together."""
    frames = {"target": ("encode a commit", "decode a growth"), "draft": ("decode a commit", "encode a growth")}
    found: list[Row] = []
    for side, ends in frames.items():
        times = {"p50_us": 0.0, "p99_us": 0.0, "once_a_step_us": 0.0}
        for row in rows:
            part = str(row["part"])
            if (part.startswith(f"{side}: ") and ", T =" not in part) or part.removeprefix("wire: ") in ends:
                for key in times:
                    times[key] += number(row, key) * (LEVELS if "rank" in part else 1)
        found.append({"part": f"{side}: a greedy round, all of it", **times})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1, help="as each service has where two share the cores")
    parser.add_argument("--rounds", action="store_true", help="where the time goes between the steps of real rounds")
    options = parser.parse_args()
    if options.rounds:
        rounds.main()
        return
    torch.set_num_threads(options.threads)
    parts = [*parts_of_a_round(), *parts_of_choosing(), *parts_of_a_grammar()]
    rows = [measured(name, part, options.repeats) for name, part in track(parts, "parts")]
    stepped = once_a_step(parts, options.repeats)
    rows = [{**row, "once_a_step_us": stepped[str(row["part"])]} for row in rows]
    rows += sums(rows)
    times = asyncio.run(exchanges(options.repeats))
    rows.append(row_of("wire: exchange over loopback, commit to growth", times))
    write("round", rows, "a round besides its forwards, microseconds")


if __name__ == "__main__":
    main()
