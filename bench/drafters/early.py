"""``make bench-early PROMPTS=folder``: how well a middle layer of the target foretells how a round will end, and what
that would give a draft on another device.

A round ends at a node of its tree with a bonus token: its *outcome*. While the target still computes, the states of a
middle layer for all nodes are known. An exit head (a matrix that makes a final state of them, then rows of the target's
own lm_head) says what the target will choose at each node, so outcomes can be ranked before the round is over.

1. The target and the draft head are real, every tree is verified whole, greedily. Exit heads are trained on plain
   answers to other questions than those that are measured.
2. A round *hits* with c candidates if its outcome is among the c likeliest.
3. Speeds are simulated from the rounds' own hits: a step takes ``STEP_MS``, states leave when their layer is done, come
   after half a round trip, and growth comes back after drafting and another half. A hit waits for what is missing of
   that, a miss begins once the round is over. *Together* is the same pair on one device: a step, then a tree.
4. Bounds from above: trees drafted early are taken to be as good as others, and c of them as cheap as one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.progress import track

from bench.asking import read
from bench.report import Row, write
from router_service.text.tokens import TextCodec
from slipstream.base.config import DraftSection, GrowthSection, ModelSection
from slipstream.drafting import create
from slipstream.drafting.heads.checkpoint import lent_lm_head, read_head
from slipstream.drafting.rounds import Rounds, Tally, slots_needed
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.loading import load_model
from slipstream.engine.model import CausalModel
from slipstream.engine.runner import ModelRunner
from slipstream.models.folder import head_for, packaged_head, resolve

SETS, TOKENS = ("mt_bench", "alpaca", "gsm8k", "humaneval"), 64  # of an answer
LAYERS, EPOCHS = (20, 22, 24, 26, 28), 4  # whose inputs are read; over the plain rows
STEP_MS = 20.0
CANDIDATES, DRAFTED = (1, 2, 4, 8, 16), 8
ROUND_TRIPS_MS, DRAFTS_MS = (1.0, 5.0, 20.0), (1.0, 2.0, 5.0, 10.0)
GROWTH = GrowthSection(num_steps=5, topk=4, num_draft_tokens=16)
BEST = 16  # tokens of a node that can be outcomes: more than it has children, and the children
TOGETHER = 24  # answers of the plain ones
Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Round:
    """A verified tree: node 0 is its root."""

    parents: list[int]
    tokens: list[int]
    choices: list[int]
    early: Tensor  # [N, layers * H]

    def outcome(self) -> tuple[int, int]:
        """Where the walk ends, and its bonus token."""
        at, children = 0, {(parent, token): node for node, (parent, token) in enumerate(
            zip(self.parents, self.tokens, strict=True)) if node}
        while (at, self.choices[at]) in children:
            at = children[at, self.choices[at]]
        return at, self.choices[at]


class Watched(ModelRunner):
    """A runner that keeps what middle layers say of what it verifies."""

    def __init__(self, model: CausalModel, num_slots: int, layers: tuple[int, ...]) -> None:
        super().__init__(model, num_slots)
        self._layers, self._own = layers, 0
        self.plain: list[tuple[Tensor, list[int]]] = []
        self.rounds: list[Round] = []

    def set_taps(self, layers: tuple[int, ...]) -> None:
        """The early layers follow those that are asked for."""
        self._own = len(layers) * self.config.hidden_size
        super().set_taps((*layers, *self._layers))

    def features(self, slots: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Of the layers that were asked for."""
        return super().features(slots)[:, : self._own]

    def scored(self, batch: ForwardBatch, greedy: bool = False) -> tuple[Tensor, list[int] | None]:
        """What was verified joins ``plain`` or ``rounds``."""
        logits, best = super().scored(batch, greedy)
        chosen = logits.argmax(1).tolist() if best is None else list(best)
        early = super().features(batch.host.slots)[:, self._own :].clone()
        if batch.num_rows == len(batch.mask_lens):
            self.plain.append((early, chosen))
        else:
            words = batch.host.words.tolist()
            parents = [(word & ((1 << node) - 1)).bit_length() - 1 for node, word in enumerate(words)]
            self.rounds.append(Round(parents, batch.host.tokens.tolist(), chosen, early))
        return logits, best


@dataclass(slots=True)
class ExitHead:
    """Trained on states of one layer."""

    ids: Tensor  # int64 [V'] tokens that it knows
    lm_head: Tensor  # [V', H]
    matrix: Tensor = field(default_factory=lambda: torch.zeros(0))  # [H + 1, H]

    def scores(self, states: Tensor) -> Tensor:
        """[N, H] -> log chances [N, V']."""
        return torch.log_softmax(_inputs(states) @ self.matrix @ self.lm_head.T, 1)

    def train(self, states: Tensor, finals: Tensor, chosen: Tensor, epochs: int) -> None:
        """From the ridge regression of the final states on, by the cross-entropy with what was chosen."""
        wide = _inputs(states).double()
        square = wide.T @ wide
        square.diagonal().add_(1e-3 * square.diagonal().mean())
        self.matrix = torch.linalg.solve(square, wide.T @ finals.double()).float().requires_grad_()
        places = torch.full((int(self.ids.max()) + 1,), -1)
        places[self.ids] = torch.arange(len(self.ids))
        inside = chosen <= int(self.ids.max())
        inside[inside.clone()] = places[chosen[inside]] >= 0
        rows, wanted = states[inside], places[chosen[inside]]
        optimizer = torch.optim.AdamW([self.matrix], lr=2e-4, weight_decay=0.1)
        dice = torch.Generator().manual_seed(0)
        for _ in range(epochs):
            for part in torch.randperm(len(rows), generator=dice).split(256):  # type: ignore[no-untyped-call]
                optimizer.zero_grad()
                F.nll_loss(self.scores(rows[part]), wanted[part]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        self.matrix = self.matrix.detach()

    def rank_of(self, round_: Round, states: Tensor) -> int:
        """How many outcomes it holds for likelier than the true one; many, if it does not think of it."""
        logs = self.scores(states)
        known = {token: place for place, token in enumerate(self.ids.tolist())}
        above, found = [0.0], list[tuple[float, tuple[int, int]]]()
        children: list[set[int]] = [set() for _ in round_.tokens]
        for node in range(1, len(round_.tokens)):
            parent, token = round_.parents[node], round_.tokens[node]
            children[parent].add(token)
            chance = float(logs[parent, known[token]]) if token in known else -30.0
            above.append(above[parent] + chance)
        best, where = logs.topk(min(BEST, logs.shape[1]), 1)
        for node, (values, places) in enumerate(zip(best.tolist(), self.ids[where].tolist(), strict=True)):
            found += [(above[node] + value, (node, token)) for value, token in zip(values, places, strict=True)
                      if token not in children[node]]
        found.sort(reverse=True)
        true = round_.outcome()
        return next((place for place, (_, outcome) in enumerate(found) if outcome == true), 1 << 20)


def _inputs(states: Tensor) -> Tensor:
    """[N, H] -> [N, H + 1]: brought to one size, as the target's final norm does, and a one."""
    return F.pad(F.rms_norm(states.float(), states.shape[1:]), (0, 1), value=1.0)


def gathered(prompts: str, count: int, learnt: int) -> tuple[Watched, float, ExitHead]:
    """Plain answers to learn from, rounds to measure, and the acceptance length; an exit head that knows nothing."""
    known = head_for(ModelSection().path)
    assert known is not None
    folder, head = resolve(ModelSection().path), packaged_head(known)
    codec, asked = TextCodec(folder), [[one.text for one in read(prompts, name, learnt)] for name in SETS]
    measured = [text for texts in asked for text in texts[:: max(1, len(texts) // count)][:count]]
    others = [text for texts in asked for text in texts if text not in set(measured)]
    tokens = {text: codec.chat([{"role": "user", "content": text}])[-512:] for text in (*measured, *others)}
    model = load_model(folder, ModelSection())
    slots = slots_needed([[0] * 512] * TOGETHER, TOKENS)
    runner = Watched(model, slots, (*LAYERS, model.config.num_layers))
    runner.set_taps(())
    for first in track(range(0, len(others), TOGETHER), "plain answers"):
        some = [tokens[text] for text in others[first : first + TOGETHER]]
        Rounds(runner, None, TOKENS).answer(some, 0, Tally())
    section = DraftSection(drafter="eagle3", model=str(head), growth=GROWTH)
    drafter, tally = create(section, ModelSection(path=str(folder)), 4096), Tally()
    for text in track(measured, "rounds"):
        Rounds(runner, drafter, TOKENS).answer([tokens[text]], GROWTH.num_draft_tokens, tally)
    ids = read_head(head, folder).vocabulary
    assert ids is not None
    return runner, tally.acceptance.length, ExitHead(ids, lent_lm_head(folder, model.config, ids).float())


def speeds(hits: Sequence[bool], length: float, done: float, trip_ms: float, draft_ms: float) -> tuple[float, ...]:
    """Tokens a second with early states, serial, and together. done: share of a step after which states leave."""
    serial, together = STEP_MS + trip_ms + draft_ms, STEP_MS + draft_ms
    early = sum(max(STEP_MS, done * STEP_MS + trip_ms + draft_ms) if hit else serial for hit in hits) / len(hits)
    return tuple(1000 * length / ms for ms in (early, serial, together))


def run(prompts: str, count: int, learnt: int) -> None:
    runner, length, blank = gathered(prompts, count, learnt)
    deep, hidden = runner.config.num_layers, runner.config.hidden_size
    states = torch.cat([early for early, _ in runner.plain])
    chosen = torch.tensor([token for _, tokens in runner.plain for token in tokens])
    rows, ranks = list[Row](), dict[int, list[int]]()
    for place, layer in enumerate(track(LAYERS, "exit heads")):
        own = slice(place * hidden, (place + 1) * hidden)
        head = ExitHead(blank.ids, blank.lm_head)
        head.train(states[:, own], states[:, -hidden:], chosen, EPOCHS)
        ranks[layer] = [head.rank_of(round_, round_.early[:, own]) for round_ in runner.rounds]
        rows.append({"layer": layer, "of": deep, **{f"hits_with_{count}": share(ranks[layer], count)
                                                    for count in CANDIDATES}})
    title = (f"{len(states)} plain rows learnt from, {len(runner.rounds)} rounds measured, {length:.2f} tokens a "
             "round: share of rounds whose outcome is among the likeliest")
    write("early-hits", rows, title)
    found = [_fastest(ranks, deep, length, trip, draft) for trip in ROUND_TRIPS_MS for draft in DRAFTS_MS]
    write("early", found, f"simulated tokens a second at a step of {STEP_MS:g} ms, {DRAFTED} candidates; the layer "
                          "that gives most (bounds from above)")


def share(ranks: Sequence[int], count: int) -> float:
    """Of rounds whose outcome is among so many."""
    return sum(rank < count for rank in ranks) / len(ranks)


def _fastest(ranks: dict[int, list[int]], deep: int, length: float, trip: float, draft: float) -> Row:
    def at(layer: int) -> tuple[float, ...]:
        return speeds([rank < DRAFTED for rank in ranks[layer]], length, layer / deep, trip, draft)

    layer = max(ranks, key=lambda layer: at(layer)[0])
    early, serial, together = at(layer)
    return {"round_trip_ms": trip, "tree_ms": draft, "together": together, "serial": serial, "early": early,
            "layer": layer, "early_by_together": early / together, "early_by_serial": early / serial}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="folder with JSONL question sets, such as mt_bench.jsonl")
    parser.add_argument("--count", type=int, default=5, help="questions of each set that are measured")
    parser.add_argument("--learnt", type=int, default=50, help="questions of each set, the measured ones included")
    run(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
