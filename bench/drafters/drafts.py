"""``make bench-drafts PROMPTS=folder``: what each drafter is worth on each question set, over gRPC between processes.

What is measured, and how:
1. A drafter has two targets. One verifies every tree whole and never gives up: ``acceptance_length`` (accepted draft
   tokens a round, plus one) and ``by_depth`` (the share of rounds accepted at each depth, among those that were
   accepted at the depth above) come from there. The first round of an answer, for which nothing could be drafted, and
   the last, which its end cuts, are not counted.
2. The other target has the policy as configured, as users get it: ``tokens_per_s`` of decoding, ``speed_ratio`` (the
   median over questions of its speed by that of plain decoding of the same question) and ``speculating``, the share of
   rounds that the policy spent with speculation on.
3. Plain decoding is asked of a target that has no draft.
4. All of them are asked in turn, question by question and in turning order, greedy and at temperature 1 with a seed:
   a slow minute of the machine hurts all alike. ``of_greedy``: acceptance length by that of greedy decoding on the
   same questions. The two answers are different texts, and a small model's greedy one soon repeats itself, which is
   easy to draft.
5. Rows of finished sets are in ``build/bench/drafts.json`` at any time. Rows of the set "all" pool the questions.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import Progress

from bench.asking import Measured, Question, ask, read
from bench.fleet import running, served, service
from bench.report import Row, finished, save, write
from router_service.text.tokens import TextCodec
from slipstream.base.config import ModelSection
from slipstream.base.errors import ConfigError
from slipstream.drafting.rounds import Acceptance
from slipstream.models.folder import resolve
from slipstream.protocol.requests import Backend, Piece, Sampling
from slipstream.protocol.tree import MAX_NODES

SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm")
TEMPERATURES = (0.0, 1.0)
HEAD = "smollm2-135m-eagle3"
NODES = 16  # draft nodes that the measuring target verifies at most
WAIT_S = 10.0  # and how long it waits for a drafter
WHOLE_TREES = (f"target.policy.max_nodes={NODES}", "target.policy.always=true",
               f"target.policy.deadline_max_s={WAIT_S}", "target.prompt_lookup=false")
SLOTS = ("target.slots=8192", "target.max_sessions=2", "draft.max_sessions=8")
NAMES = ("ngram", "eagle3-chain5", "eagle3-tree16", "default", "standalone")


def draft_settings(name: str, model: str, head: str) -> tuple[str, ...]:
    """What ``--set`` makes of the drafter ``name``. Raises ConfigError for a name that is not in NAMES."""
    eagle = ("draft.drafter=eagle3", f"draft.model={head}")
    known = {
        "ngram": ("draft.drafter=ngram", "draft.model=''"),
        "eagle3-chain5": (*eagle, *shape(5, 1, 5)),
        "eagle3-tree16": (*eagle, *shape(5, 4, 16)),
        "default": eagle,
        "standalone": ("draft.drafter=standalone", f"draft.model={model}"),
    }
    if name not in known:
        raise ConfigError(f"no drafter '{name}' here; there are {', '.join(NAMES)}")
    return known[name]


def shape(steps: int, topk: int, nodes: int) -> tuple[str, ...]:
    return (f"draft.growth.num_steps={steps}", f"draft.growth.topk={topk}", f"draft.growth.num_draft_tokens={nodes}")


@dataclass(frozen=True, slots=True)
class Contender:
    """A drafter behind a target that verifies whole trees, and behind one with a policy."""

    name: str
    whole: Backend
    served: Backend


@asynccontextmanager
async def contender(name: str, folder: Path, settings: Sequence[str]) -> AsyncIterator[Contender]:
    """Its processes: a draft and two targets that share it. Raises Unavailable."""
    draft = service("draft", f"{name}-draft", folder, (*SLOTS, *settings))
    async with (running(draft),
                served(f"{name}-whole", folder, [draft], (*SLOTS, *settings, *WHOLE_TREES)) as whole,
                served(f"{name}-served", folder, [draft], (*SLOTS, *settings)) as usual):
        yield Contender(name, whole.client, usual.client)


@dataclass(slots=True)
class Score:
    """One drafter on one set at one temperature. Ratios and speeds have one entry a question."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    speeds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    rounds: int = 0  # of the target with a policy
    speculating: int = 0

    def add_whole(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces[1:-1]:
            self.acceptance.add(piece.accepted)

    def add_served(self, measured: Measured, plain: Measured, pieces: Sequence[Piece]) -> None:
        if not plain.tokens_per_s or not measured.tokens_per_s:  # an answer of one token has no speed
            return
        self.speeds.append(measured.tokens_per_s)
        self.ratios.append(measured.tokens_per_s / plain.tokens_per_s)
        self.rounds += len(pieces)
        self.speculating += sum(piece.state == "speculate" for piece in pieces)

    def join(self, other: Score) -> None:
        mine, theirs = self.acceptance, other.acceptance
        mine.rounds += theirs.rounds
        mine.reached = [sum(both) for both in itertools.zip_longest(mine.reached, theirs.reached, fillvalue=0)]
        self.speeds += other.speeds
        self.ratios += other.ratios
        self.rounds += other.rounds
        self.speculating += other.speculating


Key = tuple[str, str, float]  # drafter, set, temperature
Scores = dict[Key, Score]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as tokens."""

    set: str
    prompt: list[int]


async def measure(plain: Backend, contenders: Sequence[Contender], asked: Sequence[Asked], stops: tuple[int, ...],
                  max_tokens: int, advance: Callable[[], None] = lambda: None) -> Scores:
    """Ask all of ``asked`` of everybody."""
    scores: Scores = {}
    for number, question in enumerate(asked):
        for temperature in TEMPERATURES:
            sampling = Sampling(temperature=temperature, seed=number, stop_token_ids=stops)
            alone = await ask(plain, question.prompt, sampling, max_tokens, False)
            own = scores.setdefault(("plain", question.set, temperature), Score())
            own.add_served(alone, alone, [])
            turning = [contenders[(number + turn) % len(contenders)] for turn in range(len(contenders))]
            for who in turning:
                score = scores.setdefault((who.name, question.set, temperature), Score())
                pieces: list[Piece] = []
                await ask(who.whole, question.prompt, sampling, max_tokens, True, on_piece=pieces.append)
                score.add_whole(pieces)
                pieces = []
                drafted = await ask(who.served, question.prompt, sampling, max_tokens, True, on_piece=pieces.append)
                score.add_served(drafted, alone, pieces)
        advance()
    return scores


def rows_of(scores: Mapping[Key, Score], names: Iterable[str], sets: Sequence[str]) -> list[Row]:
    """The table: drafter by set by temperature, and the pool of all sets when there are several."""
    pooled: Scores = dict(scores)
    for (name, _, temperature), score in scores.items():
        if len(sets) > 1:
            pooled.setdefault((name, "all", temperature), Score()).join(score)
    return [_row((name, set_, temperature), pooled) for name in names for set_ in (*sets, "all")
            for temperature in TEMPERATURES if (name, set_, temperature) in pooled]


def _row(key: Key, scores: Mapping[Key, Score]) -> Row:
    score, greedy = scores[key], scores[key[0], key[1], TEMPERATURES[0]]
    length = score.acceptance.length
    return {
        "drafter": key[0], "set": key[1], "temperature": key[2], "acceptance_length": length,
        "of_greedy": length / greedy.acceptance.length,
        "by_depth": score.acceptance.by_depth,
        "speed_ratio": statistics.median(score.ratios) if score.ratios else 0.0,
        "tokens_per_s": statistics.median(score.speeds) if score.speeds else 0.0,
        "speculating": score.speculating / max(1, score.rounds), "answers": len(score.speeds),
    }


def prepare(questions: Sequence[Question], codec: TextCodec, room: int) -> list[Asked]:
    """The questions as tokens, without those of more than ``room`` tokens; says how many those are."""
    asked = [Asked(q.set, codec.chat([{"role": "user", "content": q.text}])) for q in questions]
    fitting = [a for a in asked if len(a.prompt) <= room]
    if len(fitting) < len(asked):
        print(f"{len(asked) - len(fitting)} of {len(asked)} questions have more than {room} tokens and are left out")
    return fitting


async def run(arguments: argparse.Namespace) -> None:
    """Start all processes, ask set by set, print, write ``build/bench/drafts.json``."""
    folder, common = Path("build/bench/logs/drafts"), (f"model.path={arguments.target}", *arguments.set)
    codec = TextCodec(resolve(arguments.target))
    questions = {name: read(arguments.prompts, name, arguments.count) for name in arguments.sets}
    async with AsyncExitStack() as stack:
        bar = stack.enter_context(Progress())
        starting = bar.add_task("starting processes", total=1 + len(arguments.drafters))
        plain = (await stack.enter_async_context(served("plain", folder, (), (*SLOTS, *common)))).client
        bar.advance(starting)
        contenders = []
        for name in arguments.drafters:
            settings = (*common, *draft_settings(name, arguments.target, arguments.head))
            contenders.append(await stack.enter_async_context(contender(name, folder, settings)))
            bar.advance(starting)
        info = await plain.info()
        room = min(info.max_context, info.slots_total - MAX_NODES) - MAX_NODES - arguments.max_tokens
        asking = bar.add_task("asking", total=sum(map(len, questions.values())))
        rows: list[Row] = []
        scores: Scores = {}
        for name, few in questions.items():
            bar.update(asking, description=f"asking {name}")
            asked = prepare(few, codec, room)
            bar.advance(asking, len(few) - len(asked))
            if asked and not scores:  # the first step of a process is slower than all others
                for backend in (plain, *(each for who in contenders for each in (who.whole, who.served))):
                    await ask(backend, asked[0].prompt, Sampling(), 8, True)
            scores |= await measure(plain, contenders, asked, tuple(codec.stop_token_ids), arguments.max_tokens,
                                    lambda: bar.advance(asking))
            rows = rows_of(scores, ("plain", *arguments.drafters), arguments.sets)
            save("drafts", rows)
    if rows:
        write("drafts", rows, f"bench-drafts: batch 1, {arguments.count} questions a set, {arguments.max_tokens} "
              "tokens an answer, over loopback gRPC")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="folder with JSONL question sets, such as mt_bench.jsonl")
    parser.add_argument("--count", type=int, default=3, help="questions of each set, evenly over it")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--drafters", type=str.split, default=list(NAMES[:-1]), help=f"some of {', '.join(NAMES)}")
    parser.add_argument("--sets", type=str.split, default=list(SETS), help="names of sets in the folder")
    parser.add_argument("--target", default=ModelSection().path, help="name or folder of the target")
    parser.add_argument("--head", default=HEAD, help="name or folder of its EAGLE-3 head")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for all processes")
    finished(run(parser.parse_args()))


if __name__ == "__main__":
    main()
