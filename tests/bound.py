"""Bound answers by the thousand against plain ones: ``python -m tests.bound [--first N] [--count N] [--dtype TYPE]
[--model NAME]``.

Batch N decides all about its answers: a drafter and what becomes of its drafts, and for each answer a grammar, a
prompt, a length and a way to choose. Told with their batch and number are: answers with another token than plain
constrained decoding; with a token that a matcher forbids which has seen nothing else; with a mask along them that
drafts have changed; and whole ones that are no text of their grammar (``tests.grammars``). Rows go to
``build/bound-MODEL-TYPE.jsonl``; batches that are there are not asked again, and the tables count them all.

bfloat16 is computed as it is served, on the CPU kernels of our own. Without ``--model``: tiny models.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from router_service.text.tokens import TextCodec
from slipstream.base.config import DraftSection, Dtype, LogSection, ModelSection
from slipstream.drafting import Drafter, create
from slipstream.drafting.ngram import NgramDrafter
from slipstream.drafting.tree import ROOT, GrowingTree
from slipstream.grammar.compiling import Vocabulary
from slipstream.grammar.matcher import Masks, Matcher, StopTokens
from slipstream.grammar.trial import Grammars
from slipstream.models.folder import load_tokenizer, resolve
from slipstream.observe.log import configure
from slipstream.protocol.messages import Commit, Features, Growth, Open
from slipstream.protocol.requests import Piece, Request, Sampling
from slipstream.protocol.tree import DraftTree
from tests.grammars import MAKERS, Bound, Dice, made
from tests.hostile import HostileDraft
from tests.pair import HASTY, STUBBORN, Rig, target
from tests.test_lossless import drafted, drafter, model_folders, tokens_of
from tests.tiny import tiny_tokenizer

BATCH, ALIKE = 60, 3  # answers of one drafter and fate, all at once; those in a row that share a grammar
DRAFTERS = ("told", "ngram", "standalone", "eagle2", "mapped", "eagle3", "block", "pard", "noisy", "hostile", "lookup")
SERVED = ("told", "ngram", "eagle3", "standalone", "lookup", "hostile")  # of a model with a head of its own
HEAD = "smollm2-135m-eagle3"
FATES = {"drafted": "colocated", "late": "late", "moved": "colocated", "ahead": "ahead", "lost": "lost",
         "killed": "killed"}
TEXT = "one two three one two three. Anna is 31 and lives in Oslo, Bob is 7. the cat sat on the mat. "
SIZES = {"hidden_size": 64, "intermediate_size": 176, "head_dim": 32}  # of tiny models: what the CPU kernels take
# Tokens that open and close several rules of a grammar at once, beside one for each byte.
LONGER = ("(((", "((", ")))", "))+", ")+((", ")*(", ")/", ")-(", "+(", "*((", "-(", "/(", "1)", "(1", "7))", "12",
          "345", '{"c":[{"', '{"of":[{"', '{"next":[{"', '{"is":', '"}]}]}', '"}]}', '"}}', '"]}', '"],"', '","',
          '":"', '": "', '": [{"', '": {"', '": ', "]}]}]}", "]}]", "]]", "],[", "[]}]}", "[[", "[{}", "[{", "[]",
          "{}]}", "{}", "{{", "}]}]}]}", "}}}", "},{", "}, {", "]}, {", "0}", "1}]", "2,", "null}", "null]}", "true,",
          "true}]", "false}", ', "', ',"', "one ", "two three", "the cat", " sat", "name", "arguments", "tool0", "ab",
          "bc", "xx", "--")
DEPTH, ASTRAY = 8, 0.5  # of what is told; how often it ends early
STRAYS, STRAY = 4, 2  # branches that are wrong; tokens of each

ROOT_ONLY = DraftTree.root_only(1, 0)
WRONG = ("different", "forbidden", "masks", "unfit")

Prompt = tuple[int, ...]
Row = dict[str, Any]


class Watched:
    """A matcher that drafts walk, and one that has seen none: what the first says along an answer is what the second
    says. A ``Rule`` of an answer."""

    def __init__(self, walked: Matcher, other: Matcher) -> None:
        self._walked, self._other = walked, other
        self._tree, self._said = ROOT_ONLY, walked.masks(ROOT_ONLY)
        self.wrong = 0  # masks
        self.forced, self.forced_behind = walked.forced, walked.forced_behind
        self.allowed_nodes = walked.allowed_nodes

    @property
    def ended(self) -> bool:
        return self._walked.ended

    def masks(self, tree: DraftTree) -> tuple[Masks, frozenset[int]]:
        self._tree, self._said = tree, self._walked.masks(tree)
        return self._said

    def commit(self, tokens: Sequence[int]) -> int:
        node, (masks, known) = 0, self._said
        for token in tokens:
            right = self._other.masks(ROOT_ONLY)[0][0]
            self.wrong += node in known and bool((masks[node] != right).any())
            node = next((child for child, parent in enumerate(self._tree.parents)
                         if parent == node and self._tree.tokens[child] == token), -1)
            self._other.commit([token])
        return self._walked.commit(tokens)


class Witness:
    """``Grammars`` whose matchers are watched."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self.watched: dict[str, Watched] = {}  # of requests, by their names
        self.warm = grammars.warm

    def compile(self, request: Request) -> asyncio.Future[Watched]:
        return asyncio.ensure_future(self._both(request))

    async def _both(self, request: Request) -> Watched:
        both = [await self._grammars.compile(request) for _ in range(2)]
        watched = self.watched[request.request_id] = Watched(*both)
        return watched


@dataclass(frozen=True, slots=True)
class Told:
    """An answer that is known beforehand, and its grammar behind some of its tokens."""

    answer: Sequence[int]
    behind: Callable[[Sequence[int]], Matcher]
    stops: Sequence[int]

    def stray(self, dice: Dice, matcher: Matcher, path: list[int]) -> list[int]:
        """``path``, and behind it what an answer could go on with."""
        for _ in range(STRAY):
            ids = range(len(path) + 1)
            chain = DraftTree(1, [0, *path], [at - 1 for at in ids], [*ids], [-float(at) for at in ids])
            masks, known = matcher.masks(chain)
            open_ = np.flatnonzero(np.unpackbits(masks[-1].view(np.uint8), bitorder="little"))
            choices = open_[~np.isin(open_, self.stops)]
            if len(path) not in known or not len(choices):
                break
            path = [*path, int(dice.choice(choices))]
        return path


class TellingDrafter:
    """It knows the answers beforehand, and tells others that their grammars allow: the longest paths that drafts can
    have, and what makes matchers build most."""

    name, features, vocab_size, hidden_size, max_context, max_nodes, max_sessions = "told", None, 0, 0, 1 << 16, 63, 256

    def __init__(self, told: Mapping[Prompt, Told], dice: Dice) -> None:
        self._told, self._dice = told, dice
        self._prompts: dict[int, Prompt] = {}
        self._trees: dict[int, GrowingTree] = {}

    def open(self, opens: Sequence[Open]) -> list[int]:
        for message in opens:
            tokens = tuple(message.tokens.tolist())
            known = self._trees.get(message.session)
            self._prompts[message.session] = next(known for known in self._told if tokens[: len(known)] == known)
            self._trees[message.session] = GrowingTree(len(tokens), 2, 1 if known is None else known.next_id)
        return []

    def absorb(self, features: Sequence[Features]) -> None:
        """Nothing."""

    def commit(self, commits: Sequence[Commit]) -> None:
        for message in commits:
            if (tree := self._trees.get(message.session)) is not None:
                tree.commit(message.tokens.tolist(), keep_kv=False)

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        grown = []
        for session, budget in zip(ids, budgets, strict=True):
            if (tree := self._trees.get(session)) is not None:
                prompt = self._prompts[session]
                self._extend(tree, self._told[prompt], tree.base - len(prompt))
                grown.append(tree.next_growth(session, budget))
        return grown

    def read(self, ids: Sequence[int]) -> list[int]:
        return []

    def tree(self, session: int) -> GrowingTree:
        return self._trees[session]

    def close(self, ids: Sequence[int]) -> None:
        for session in ids:
            self._prompts.pop(session, None)
            self._trees.pop(session, None)

    def _extend(self, tree: GrowingTree, told: Told, at: int) -> None:
        """``at``: tokens of the answer that came."""
        right, dice = list(told.answer[at : at + DEPTH]), self._dice
        if not right or tree.begun:
            return
        tree.begun, matcher = True, told.behind(told.answer[:at])
        strays = [told.stray(dice, matcher, right[:cut]) for cut in dice.integers(len(right), size=STRAYS)]
        nodes: dict[tuple[int, int], int] = {}
        for path in (*strays, right[: int(dice.integers(DEPTH)) if dice.random() < ASTRAY else DEPTH]):
            node = ROOT
            for depth, token in enumerate(path):
                if (node, token) not in nodes:
                    nodes[node, token] = tree.propose(node, token, -0.1 * depth)
                node = nodes[node, token]


@dataclass(frozen=True, slots=True)
class Bench:
    """A model, and how answers of it are made, plain and drafted."""

    folder: Path
    dtype: Dtype
    drafters: Sequence[str]
    folders: Mapping[str, Path]  # of tiny drafters
    codec: TextCodec
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    plain: Rig

    @asynccontextmanager
    async def drafted(self, batch: int, told: Mapping[Prompt, Told]) -> AsyncIterator[Rig]:
        kind, fate = cell(batch, self.drafters)
        policy = HASTY if fate in ("late", "lost") else STUBBORN
        lookup = kind == "lookup" or fate == "killed"
        async with (AsyncExitStack() as stack,
                    target(self.folder, policy, self.dtype, 1 << 14, exact=self.dtype == "bfloat16",
                           bound=Witness(self.plain.grammars), prompt_lookup=lookup) as rig):
            if kind != "lookup":
                await stack.enter_async_context(drafted(rig, self._drafter(kind, batch, told), FATES[fate]))
            yield rig

    def _drafter(self, kind: str, batch: int, told: Mapping[Prompt, Told]) -> Drafter | HostileDraft:
        if kind == "hostile":
            return HostileDraft(batch)
        if kind == "told":
            return TellingDrafter(told, np.random.default_rng(batch))
        if self.folders:
            return drafter(kind, dict(self.folders), self.dtype)
        if kind == "ngram":
            return NgramDrafter(2 * BATCH)
        model = ModelSection(path=str(self.folder), dtype=self.dtype)
        name = {"eagle3": HEAD}.get(kind, str(self.folder))
        return create(DraftSection(drafter=kind, model=name, dtype=self.dtype), model, 1 << 14)

    def behind(self, bound: Bound, one: Request, said: Sequence[int]) -> Matcher:
        """One that has seen nothing but ``said``."""
        return self.vocabulary.compile(bound.grammar, StopTokens(one.sampling.stop_token_ids), said)

    def asked(self, batch: int) -> list[tuple[str, str, Bound, Request]]:
        """Kind of grammar, way to choose, grammar and request of each answer."""
        dice, found = np.random.default_rng([19, batch]), []
        for number in range(BATCH):
            if number % ALIKE == 0:  # to try one takes longer than to answer
                kind = list(MAKERS)[number // ALIKE % len(MAKERS)]
                bound = made(kind, dice)
            at = int(dice.integers(len(TEXT)))
            tokens = tuple(self.codec.encode(f"{batch} {number} {TEXT[at:]}{TEXT[:at]}"))
            name, sampling = way(dice, self.codec.stop_token_ids)
            found.append((kind, name, bound, Request(f"{batch}-{number}", tokens, sampling, int(dice.integers(8, 64)),
                                                     grammar=bound.grammar)))
        return found


def cell(batch: int, drafters: Sequence[str]) -> tuple[str, str]:
    """The drafter and the fate of a batch."""
    return drafters[batch % len(drafters)], list(FATES)[batch // len(drafters) % len(FATES)]


def way(dice: Dice, stops: tuple[int, ...]) -> tuple[str, Sampling]:
    """To choose tokens."""
    seed = int(dice.integers(1 << 30))
    ways = {"greedy": Sampling(), "T=1": Sampling(1.0, seed=seed),
            "T=0.7, top-p": Sampling(0.7, top_p=0.9, seed=seed),
            "penalties": Sampling(0.8, seed=seed, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.1,
                                  min_tokens=int(dice.integers(12)), logit_bias=((65, 2.0),))}
    name = str(dice.choice(list(ways), p=[0.4, 0.2, 0.2, 0.2]))
    return name, replace(ways[name], stop_token_ids=stops)


@asynccontextmanager
async def bench(model: str, dtype: Dtype) -> AsyncIterator[Bench]:
    """Of the model ``model``, "": the tiny one."""
    with tempfile.TemporaryDirectory() as made_:
        folders = {} if model else tiny_folders(Path(made_))
        folder = resolve(model) if model else folders["target"]
        kinds = SERVED if model else DRAFTERS
        async with target(folder, dtype=dtype, slots=1 << 14, exact=dtype == "bfloat16") as plain:
            tokenizer = load_tokenizer(folder)
            yield Bench(folder, dtype, kinds, folders, TextCodec(folder), tokenizer,
                        Vocabulary(tokenizer, plain.hello.vocab_size), plain)


def tiny_folders(root: Path) -> dict[str, Path]:
    """A target with tokens of several bytes, and what drafts for it."""
    tokenizer = tiny_tokenizer(LONGER)
    folders = model_folders(root, SIZES | {"vocab_size": tokenizer.get_vocab_size()})
    tokenizer.save(str(folders["target"] / "tokenizer.json"))
    return folders


async def swept(on: Bench, batch: int) -> list[Row]:
    """The answers of a batch, compared."""
    kind, fate = cell(batch, on.drafters)
    asked = on.asked(batch)
    plain = [tokens_of(pieces) for pieces in await asyncio.gather(*(on.plain.answer(one) for *_, one in asked))]
    dice = np.random.default_rng([20, batch])
    cuts = [int(dice.integers(1, len(tokens))) if fate == "moved" and len(tokens) > 1 else 0 for tokens in plain]
    told = {one.tokens: Told(tokens, partial(on.behind, bound, one), one.sampling.stop_token_ids)
            for (*_, bound, one), tokens in zip(asked, plain, strict=True)}
    async with on.drafted(batch, told) as rig:
        found = await asyncio.gather(*(rig.answer(one.after(tokens[:cut]) if cut else one) for (*_, one), tokens, cut
                                       in zip(asked, plain, cuts, strict=True)))
        await rig.check()
    rows = []
    for (grammar, name, bound, one), tokens, cut, pieces in zip(asked, plain, cuts, found, strict=True):
        whole = [*tokens[:cut], *tokens_of(pieces)]
        rows.append({"batch": batch, "answer": one.request_id, "grammar": grammar, "drafter": kind, "fate": fate,
                     "sampling": name, "tokens": len(whole), "accepted": sum(piece.accepted for piece in pieces),
                     "whole": pieces[-1].finish == "stop", "different": whole != tokens,
                     "masks": rig.grammars.watched[one.request_id].wrong,
                     "forbidden": not allowed(on, bound, one, whole), "unfit": not fit(on, bound, one, whole, pieces)})
    return rows


def allowed(on: Bench, bound: Bound, one: Request, tokens: list[int]) -> bool:
    """Whether one that has seen nothing else allows every token."""
    said = tokens[:-1] if tokens[-1] in one.sampling.stop_token_ids else tokens
    return on.behind(bound, one, ()).commit(said) == len(said)


def fit(on: Bench, bound: Bound, one: Request, tokens: list[int], pieces: Sequence[Piece]) -> bool:
    """Whether a whole answer is a text of its grammar."""
    if pieces[-1].finish != "stop":
        return True
    stops = one.sampling.stop_token_ids
    try:
        return bound.fits(on.tokenizer.decode([token for token in tokens if token not in stops]))
    except ValueError:
        return False


def is_wrong(row: Row) -> bool:
    return any(row[name] for name in WRONG)


def show(rows: Sequence[Row]) -> None:
    for by in (("grammar",), ("sampling",), ("fate",), ("drafter",), ("drafter", "fate")):
        table: dict[tuple[str, ...], Counter[str]] = {}
        for row in rows:
            counts = table.setdefault(tuple(row[part] for part in by), Counter())
            counts.update({"answers": 1} | {name: int(row[name]) for name in (
                "whole", "tokens", "accepted", *WRONG)})
        print(f"\nby {' and '.join(by)}")
        for key, counts in sorted(table.items()):
            print(f"  {', '.join(key):24}" + "".join(f" {count:7} {name}" for name, count in counts.items()))
    cells = {(row["grammar"], row["drafter"], row["sampling"] == "greedy", row["fate"]) for row in rows}
    print(f"\n{len(rows)} answers in {len(cells)} cells of grammar, drafter, greedy or sampled, and fate: "
          + ", ".join(f"{sum(row[name] for row in rows)} {name}" for name in WRONG))


async def run(options: argparse.Namespace) -> None:
    file = Path("build") / f"bound-{options.model or 'tiny'}-{options.dtype}.jsonl"
    file.parent.mkdir(exist_ok=True)
    rows: list[Row] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {row["batch"] for row in rows}
    async with bench(options.model, options.dtype) as on:
        for batch in sorted({*range(options.first, options.first + options.count)} - done):
            began_s = perf_counter()
            new = await swept(on, batch)
            rows += new
            with file.open("a") as out:
                out.writelines(json.dumps(row) + "\n" for row in new)
            bad = [row for row in new if is_wrong(row)]
            print(f"batch {batch}: {', '.join(cell(batch, on.drafters))}: {len(new)} answers in "
                  f"{perf_counter() - began_s:.1f} s", *bad, sep="\n", flush=True)
    show(rows)
    sys.exit(any(is_wrong(row) for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="batch")
    parser.add_argument("--count", type=int, default=168, help=f"of batches, {BATCH} answers each")
    parser.add_argument("--dtype", choices=("float64", "bfloat16"), default="float64")
    parser.add_argument("--model", default="", help="a name or folder")
    configure(LogSection(level="error"))
    torch.set_num_threads(1)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
