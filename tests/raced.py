"""``python -m tests.raced [TIMES]``: the kernels that choose. With TRITON_INTERPRET=1 set, in Triton's interpreter, on
a CPU, beside ``choosing``, TIMES as many random cases as the tests have; without, compiled for an H100, whose code is
looked at. What it prints last says what was seen."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import interpreter
from triton.runtime.jit import create_function_from_signature

from bench.gpu.pace import Grower
from bench.gpu.shapes import TINY, config_of, random_head
from slipstream.base.config import GrowthSection
from slipstream.choosing.noise import noise, row_keys
from slipstream.choosing.sampling import ChoiceRows, choose, rank, ranked
from slipstream.drafting.graph import GraphBackend, spare_slots
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.network import some_tokens
from slipstream.drafting.neural import NeuralDrafter
from slipstream.engine.attention import TorchAttention
from slipstream.engine.graphs import capture_eager
from slipstream.engine.ops import race_kernels
from slipstream.engine.ops.races import (
    CANDIDATES,
    GREATEST,
    MOST,
    PART,
    DeviceRace,
    difference,
    plain_rows,
    supports,
    trial,
)
from slipstream.protocol.requests import Sampling
from tests.test_races import KINDS, cases, equals, peaked

CPU, SEED = torch.device("cpu"), 17
TARGET, SIZES = GPUTarget("cuda", 90, 32), (128_256, -(-128_256 // PART), PART)
WIDTHS = (1, 5, 700, PART, PART + 1, 2 * PART + 77)
patched = interpreter._patch_lang_tensor


def with_index(tensor: Any, scope: Any) -> None:
    """A scalar as a number of turns; the interpreter's own way is none that numpy knows any more."""
    patched(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def race_of(width: int, vocabulary: torch.Tensor | None = None) -> DeviceRace:
    return DeviceRace(race_kernels, width, vocabulary)


def rows_of(sampling: Sampling, count: int) -> ChoiceRows:
    return ChoiceRows(sampling, range(count), range(5, 5 + count), range(count), None, [()] * count)


def choices(rows: int) -> int:
    """Of all kinds of sessions, of which it supports some: tokens as ``choosing`` says, children too."""
    dice, taken = np.random.default_rng(SEED), 0
    for logits, sessions in cases(SEED, rows):
        sessions = [session if dice.random() < 0.3 else simple(session) for session in sessions]
        width = logits.shape[1]
        k, race = min(4, width), race_of(width)
        assert choose(logits, sessions, None, race) == choose(logits, sessions), (SEED, logits, sessions)
        some = torch.from_numpy(np.sort(dice.choice(9 * width, width, replace=False)))
        bare = [replace(session, allowed=None) for session in sessions]  # masks have no words for these ids
        same_children(ranked(logits, sessions, k, None, race), ranked(logits, sessions, k))
        same_children(ranked(logits, bare, k, some, race_of(width, some)), ranked(logits, bare, k, some))
        taken += sum(len(session.rows) for session in sessions if supports(session, True, width))
    return taken


def simple(session: ChoiceRows) -> ChoiceRows:
    """With nothing but its temperature and seed."""
    sampling = session.sampling
    return replace(session, sampling=Sampling(temperature=sampling.temperature, seed=sampling.seed), allowed=None)


def same_children(found: Sequence[Any], right: Sequence[Any]) -> None:
    for ours, theirs in zip(found, right, strict=True):
        there = np.isfinite(theirs[1])
        assert np.isfinite(ours[1]).tolist() == there.tolist(), (ours, theirs)
        assert np.array(ours[0])[there].tolist() == np.array(theirs[0])[there].tolist(), (ours, theirs)
        np.testing.assert_allclose(np.array(ours[1])[there], np.array(theirs[1])[there], rtol=2e-7, atol=2e-7)


@triton.jit
def noises(key: tl.tensor, ids: tl.tensor, found: tl.tensor, COUNT: tl.constexpr) -> None:
    at = tl.arange(0, COUNT)
    tl.store(found + at, race_kernels.gumbel(tl.load(key), tl.load(ids + at)))


def same_noise() -> None:
    """To the last units of its logarithms."""
    ids, found = torch.cat((torch.arange(2048), torch.arange(2048) * 131)), torch.zeros(4096, dtype=torch.float64)
    for seed in (0, 7, (1 << 64) - 3):
        key = row_keys([seed], [seed % 1000], CPU)
        noises[(1,)](key, ids, found, 4096)
        torch.testing.assert_close(found, noise(key, ids[None])[0], rtol=1e-15, atol=1e-15)


def scores() -> None:
    """Under noise, of every column."""
    logits, width = torch.from_numpy(peaked(np.random.default_rng(SEED), 2, 24)), 24
    for ids in (None, torch.arange(width) * 997):
        session = rows_of(Sampling(temperature=0.7, seed=(1 << 64) - 3), 2)
        won = race_of(width, ids)(logits, [session], width)
        assert won is not None and all(won.sure)
        keys = row_keys([session.sampling.seed] * 2, session.positions, CPU)
        named = torch.arange(width) if ids is None else ids
        right = torch.log_softmax(logits.double() / 0.7 + noise(keys, named[None]), 1)
        best, where = right.sort(1, descending=True)
        assert named[where].ravel().tolist() == list(won.tokens), SEED
        np.testing.assert_allclose(won.scores, best.ravel().numpy(), rtol=2e-7, atol=1e-7)


def company() -> None:
    """A row is told the same alone, among others, and in another place; so is one that has no number."""
    width = PART + 70
    logits = torch.from_numpy(peaked(np.random.default_rng(SEED), 9, width))
    logits[1, 1030], logits[3, 5], logits[4] = math.nan, math.inf, -math.inf
    logits[5, [7, PART + 1]] = 1e30
    logits[6, 3:] = -math.inf
    race, session = race_of(width), rows_of(Sampling(temperature=1.0, seed=3), 9)
    other = ChoiceRows(Sampling(temperature=1.0, top_p=0.5), range(9, 10), range(1), range(1), None, [()])
    together, won = choose(logits, [session], None, race), race(logits, [session], 12)
    assert together == choose(logits, [session]) and together[1] == together[4] == 0 and together[3] == 5
    assert won is not None and [place for place, sure in enumerate(won.sure) if not sure] == [1, 3, 4]
    assert together == choose(torch.cat((logits, logits[:1])), [session, other], None, race)[:9]
    for row in range(9):
        alone = replace(session.part(slice(row, row + 1)), rows=range(1))
        assert choose(logits[row : row + 1], [alone], None, race) == together[row : row + 1]
        own = race(logits[row : row + 1], [alone], 12)
        assert own is not None and own.tokens == won.tokens[12 * row : 12 * (row + 1)]
        np.testing.assert_array_equal(own.scores, won.scores[12 * row : 12 * (row + 1)])
    assert won.tokens[6 * 12 + 3 : 7 * 12] == [0] * 9 and set(won.scores[6 * 12 + 3 : 7 * 12]) == {-math.inf}


def filtered(turns: int) -> float:
    """Of what filters leave: what is sure is what ``choosing`` says, and nearly all is. Returns the share of it."""
    dice, sure, count = np.random.default_rng(SEED), 0, 0
    for turn in range(turns):
        width, rows = int(dice.choice(WIDTHS[1:])), int(dice.integers(1, 4))
        logits = torch.from_numpy(KINDS[int(dice.integers(0, len(KINDS)))](dice, rows, width))
        which = int(dice.integers(1, 9))
        sampling = Sampling(
            temperature=float(dice.choice([0.3, 0.7, 1.0, 2.0])), seed=turn,
            top_k=(int(dice.integers(1, width)) if which in (1, 3) else width + 2 if which == 6 else
                   int(dice.integers(1, GREATEST + 1)) if which in (7, 8) else 0),
            top_p=float(dice.choice([0.3, 0.5, 0.9, 0.99])) if which in (2, 5, 6, 7, 8) else 1.0,
            min_p=float(dice.choice([1e-5, 0.01, 0.3])) if which in (3, 4, 5) else 0.0)
        won, right = race_of(width)(logits, [rows_of(sampling, rows)], 1), choose(logits, [rows_of(sampling, rows)])
        assert won is not None
        for token, is_sure, other in zip(won.tokens, won.sure, right, strict=True):
            assert not is_sure or token == other, (SEED, turn, sampling)
            sure, count = sure + is_sure, count + 1
    return sure / count


def edges() -> None:
    """Where a filter ends: equal logits live or die together, and a mass that is its limit is left to ``choosing``."""
    logits = torch.full((4, PART + 3), -math.inf)
    logits[:, [5, 70, PART, PART + 2]] = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    race = race_of(PART + 3)
    every = {5, 70, PART, PART + 2}
    for filters, left, all_sure in (
            ({"top_p": 0.5}, {5}, False), ({"top_p": 0.6}, {5, 70}, True), ({"top_p": 0.76}, every, True),
            ({"top_k": 3, "top_p": 0.8}, every, True), ({"top_k": 2, "top_p": 0.7}, {5, 70}, True),
            ({"top_k": 2, "top_p": 0.6}, {5}, True), ({"top_k": 1}, {5}, True), ({"top_k": 3}, every, True),
            ({"min_p": 0.4}, {5, 70}, True)):
        session = rows_of(Sampling(temperature=1.0, seed=1, **filters), 4)
        won = race(logits, [session], 1)
        assert won is not None and all(won.sure) == all_sure, filters
        for token, is_sure, right in zip(won.tokens, won.sure, choose(logits, [session]), strict=True):
            assert not is_sure or (token == right and token in left), filters


def greedy(turns: int) -> int:
    """Children without noise: ``rank``'s, in its order, where logits are equal and where they are impossible; of more
    equals than it looks at, the lowest ids."""
    dice, count = np.random.default_rng(SEED), 0
    for _ in range(turns):
        width = int(dice.choice(WIDTHS))
        logits = torch.from_numpy(KINDS[int(dice.integers(0, 4))](dice, int(dice.integers(1, 4)), width))
        k = min(int(dice.integers(1, 25)), width)
        some = torch.from_numpy(np.sort(dice.choice(9 * width, width, replace=False)))
        for ids in (None, some):
            found = race_of(width, ids).children(logits, k)
            right = rank(logits, plain_rows(len(logits)), k, ids)
            order = torch.log_softmax(logits, 1).sort(dim=1, descending=True, stable=True).indices[:, :k]
            assert torch.equal(found[0], order if ids is None else ids[order]), (SEED, width, k)
            torch.testing.assert_close(found[1], right[1].double(), rtol=3e-7, atol=3e-6)
            assert bool((found[1] <= 0).all())
        count += len(logits) * k
    return count


def no_children() -> None:
    """Of rows that are no numbers: columns all the same, each once, and no number."""
    logits = torch.from_numpy(equals(np.random.default_rng(SEED), 3, PART + 9))
    logits[0, 3], logits[1], logits[2, PART + 2] = math.nan, -math.inf, math.inf
    ids, found = race_of(PART + 9).children(logits, 6)
    assert bool(found.isnan().all()) and all(len(set(row)) == 6 for row in ids.tolist())
    assert int(ids.min()) >= 0 and int(ids.max()) < PART + 9


def trees() -> None:
    """Of a head, grown at once: the same nodes by kernels and by torch."""
    growth, config = GrowthSection(num_steps=4, topk=3, num_draft_tokens=20), config_of(TINY)
    found, spare = list[object](), spare_slots(3, 3)
    for draft_vocab in (config.vocab_size // 2, config.vocab_size):
        head = random_head(config, draft_vocab, torch.bfloat16, CPU)
        vocabulary = some_tokens(head.vocabulary, config.vocab_size, CPU)
        for race in (None, race_of(draft_vocab, vocabulary)):
            network = EagleNetwork(head, "bfloat16", CPU, 600, True, spare_slots=spare, race=race)
            backend = GraphBackend(network, TorchAttention(config, torch.bfloat16), 3, 3, capture_eager)
            grower = Grower(NeuralDrafter("eagle3", network, growth, 4, backend=backend), Sampling())
            found.append([grower() for _ in range(2)])
            assert len(backend.graphs()) == 1
    assert found[0] == found[1] and found[2] == found[3], SEED


def interpreted(times: int) -> str:
    interpreter._patch_lang_tensor = with_index
    with np.errstate(all="ignore"):
        same_noise()
        scores()
        company()
        no_children()
        trees()
        assert trial(PART + 3, CPU) == "" and difference(race_of(7), CPU) == ""
        edges()
        assert filtered(20 * times) > 0.9
        return f"{choices(40 * times)} rows raced and {greedy(10 * times)} children compared"


def sources() -> Iterator[tuple[str, ASTSource, int]]:
    """All that is launched for a model of 128,256 columns: a name, what is compiled, warps."""
    of_parts = {"logits": "*fp32", "row_params": "*i64", "vocabulary": "*i64", "keys": "*i64", "columns": "*i32",
                "sums": "*fp32", "most": "i32"}
    of_rows = {"keys": "*i64", "columns": "*i32", "sums": "*fp32", "vocabulary": "*i64", "tokens": "*i64",
               "shares": "*fp64", "most": "i32", "wanted": "i32"}
    width, parts, _ = SIZES
    for noised in (True, False):
        for named in (True, False):
            without = {} if named else {"vocabulary": None}
            sizes = {"NOISED": noised, "WIDTH": width, "PARTS": parts, "PART": PART}
            yield (f"parts, noise {noised}", source(race_kernels.part_winners, of_parts, without | sizes | (
                {} if noised else {"row_params": None})), 8)
            sizes = {"PARTS": parts, "PARTS_BLOCK": 128, "BLOCK": 128 * MOST, "MOST": MOST}
            yield (f"rows, noise {noised}", source(race_kernels.winners, of_rows, without | sizes | (
                {"sums": None} if noised else {})), 8)
    of_filters = of_parts | {"tokens": "*i64", "shares": "*fp64", "masses": "*fp64", "counts": "*i64",
                             "chosen": "*i64", "certainty": "*fp64", "greatest_of": "*i64", "num_greatest": "i32"}
    sizes = {"WIDTH": width, "PARTS": parts, "PARTS_BLOCK": 128}
    for beside in (True, False):
        without = {} if beside else {"greatest_of": None}
        yield "masses", source(race_kernels.part_masses, of_filters, without | sizes | {"PART": PART}), 8
        yield "survivors", source(race_kernels.first_survivor, of_filters,
                                  sizes | {"JOINT": beside, "MOST": CANDIDATES}), 8


def source(kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> ASTSource:
    kinds = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    return ASTSource(kernel, kinds, {(kernel.arg_names.index(name),): value for name, value in constants.items()}, {})


def compiled() -> str:
    """Numbers stay float64 and hashes 64 bits: nothing is approximated but exponentials of float32."""
    count = 0
    for name, what, warps in sources():
        made = triton.compile(what, target=TARGET, options={"num_warps": warps})
        ptx, ir = made.asm["ptx"], made.asm["ttir"]
        assert ".target sm_90a" in ptx and len(made.asm["cubin"]) > 0
        assert "lg2.approx" not in ptx and "div.full" not in ptx and "div.approx" not in ptx, name
        if name == "masses":
            assert "div.rn.f64" in ptx and "ex2.approx" not in ptx
        if name == "parts, noise True":
            assert "div.rn.f64" in ptx and "mul.lo.s64" in ptx and "ex2.approx" not in ptx
            assert ir.count("math.log") == 3 == sum("math.log" in line and "xf64" in line for line in ir.splitlines())
            assert all(f"dense<{word.value}> : tensor<{PART}xi64>" in ir for word in (
                race_kernels.FIRST, race_kernels.SECOND, race_kernels.STRIDE, race_kernels.BLOCK_STRIDE))
        count += 1
    assert compilations() == 4
    return f"{count} kernels compiled"


def compilations() -> int:
    """How many there are of all launches for one model, whatever their numbers of rows and of what is wanted, wherever
    in memory their inputs and outputs begin."""
    backend, seen = make_backend(TARGET), set()
    bits, small, floats, wide = (torch.zeros(100, dtype=kind) for kind in (
        torch.int64, torch.int32, torch.float32, torch.float64))
    for first, most, wanted in itertools.product((0, 1, 3, 16), (1, 2, 9, 16, 32), (1, 8, 16)):
        out = wide[first:], bits[first:], wide[first:]  # shares, chosen, certainty
        launches = ((race_kernels.part_winners, (floats[first:], bits, bits[first:], bits, small, None, most, True,
                                                 *SIZES)),
                    (race_kernels.winners, (bits, small, None, bits[first:], bits[first:], wide[first:], most, wanted,
                                            SIZES[1], 128, 128 * MOST, MOST)),
                    (race_kernels.part_masses, (floats[first:], bits[first:], floats, bits, bits, wide, bits, most,
                                                wanted, *SIZES[:2], 128, PART)),
                    (race_kernels.first_survivor, (floats[first:], bits[first:], floats, bits, out[0], wide, bits,
                                                   *out[1:], most, True, *SIZES[:2], 128, CANDIDATES)))
        for kernel, given in launches:
            bind = create_function_from_signature(kernel.signature, kernel.params, backend)
            seen.add((kernel.__name__, str(bind(*given, debug=False, instrumentation_mode="", num_warps=8)[1:])))
    return len(seen)


def main() -> None:
    torch.set_num_threads(1)
    print(interpreted(int(*sys.argv[1:]) or 1) if os.environ.get("TRITON_INTERPRET") == "1" else compiled())


if __name__ == "__main__":
    main()
