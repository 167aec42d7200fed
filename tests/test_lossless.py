"""Speculation never changes an answer.

Every drafter, every way to sample, every fate of the wire: the tokens are those of plain decoding, bit for bit, in
float64. And the law of sampled answers is the softmax's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from slipstream.base.config import DraftSection, Dtype, GrowthSection, ModelSection, PolicySection
from slipstream.drafting import Drafter, create
from slipstream.drafting.ngram import ORDERS, NgramDrafter
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.loading import load_model
from slipstream.engine.runner import ModelRunner
from slipstream.protocol.messages import PeerEvents
from slipstream.protocol.requests import Piece, Request, Sampling
from slipstream.wire.local import LocalLink
from tests.block_folder import speculators_block_config, write_block_folder
from tests.eagle_folder import eagle2_config, eagle_config, write_eagle2_folder, write_eagle_folder
from tests.hostile import HostileDraft
from tests.pair import HASTY, STUBBORN, FaultyEvents, Rig, drafting, grpc_link, local_link, target
from tests.tiny import write_tiny_model

MAX_TOKENS = 40
DRAFTERS = ("ngram", "standalone", "eagle2", "mapped", "eagle3", "block", "pard", "noisy", "hostile")
SAMPLINGS = {
    "greedy": Sampling(),
    "T0.7": Sampling(temperature=0.7, top_p=0.9, seed=11),
    "T1.0": Sampling(temperature=1.0, top_p=0.95, seed=12),
    "penalties": Sampling(temperature=0.8, seed=13, presence_penalty=2.0, frequency_penalty=1.5, repetition_penalty=1.1,
                          min_tokens=8, stop_token_ids=(7, 32, 101, 116), logit_bias=((65, 2.0),)),
}
FATES = ("colocated", "grpc", "late", "lost", "killed", "ahead", "shuffled")
AHEAD = {"ahead": 24, "shuffled": 1007}  # nodes beyond those that are verified next
DELAYS_S = {"late": 0.004, "ahead": 0.002}  # of growth that runs ahead, so that much of it crosses a commit
PROMPTS = (b"the cat sat on the mat. the cat sat on the", b"one two three one two three one", b"zq")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return model_folders(tmp_path_factory.mktemp("lossless"))


def model_folders(root: Path, sizes: Mapping[str, int] = {}) -> dict[str, Path]:
    """A target, and a model for each drafter that has one; ``sizes`` replace fields of all their configs."""
    hidden = sizes.get("hidden_size", 48)
    heads = {"num_attention_heads": hidden // sizes["head_dim"], "num_key_value_heads": 1, **sizes} if sizes else {}
    layer = speculators_block_config()["transformer_layer_config"]
    return {"target": write_tiny_model(root / "target", **sizes),
            "noisy": write_tiny_model(root / "noisy", noise=0.05, **sizes),
            "pard": write_tiny_model(root / "pard", noise=0.05, pard_token=258, **sizes),
            "standalone": write_tiny_model(root / "standalone", seed=5, num_hidden_layers=1, **sizes),
            "eagle3": write_eagle_folder(root / "eagle3", eagle_config(eagle_config={
                "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [-1, 0, 0]},
                target_hidden_size=hidden, **heads)),
            "block": write_block_folder(root / "block", speculators_block_config(
                aux_hidden_state_layer_ids=[0, 1, 1], target_hidden_size=hidden,
                transformer_layer_config=layer | dict(sizes))),
            "eagle2": write_eagle2_folder(root / "eagle2", eagle2_config(**heads)), "map": write_map(root / "map.json")}


def write_map(path: Path) -> Path:
    """A token map that leaves out part of what the target says."""
    path.write_text(json.dumps(list(range(0, 128, 2)) + list(range(1, 64, 2))))
    return path


def drafter(kind: str, folders: dict[str, Path], dtype: Dtype = "float64") -> Drafter:
    model = ModelSection(path=str(folders["target"]), dtype=dtype)
    growth = GrowthSection(num_steps=4, topk=2, num_draft_tokens=8)
    if kind == "ngram":
        return NgramDrafter(256, orders=(1, *ORDERS))
    head = {"mapped": "eagle2"}.get(kind, kind)
    name = head if head in ("eagle2", "eagle3", "block") else "standalone"
    return create(DraftSection(drafter=name, model=str(folders[head]),
                               token_map=str(folders["map"]) if kind == "mapped" else "", dtype=dtype,
                               growth=growth), model, 2048)


def requests(sampling: Sampling) -> list[Request]:
    return [Request(str(i), tuple(prompt), sampling, MAX_TOKENS, top_logprobs=2 if i == 0 else None)
            for i, prompt in enumerate(PROMPTS)]


def tokens_of(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


@pytest.fixture(scope="module")
async def plain(folders: dict[str, Path]) -> dict[str, list[list[Piece]]]:
    async with target(folders["target"]) as rig:
        return {name: [await rig.answer(request) for request in requests(sampling)]
                for name, sampling in SAMPLINGS.items()}


@asynccontextmanager
async def joined(rig: Rig, kind: str, fate: str, folders: dict[str, Path]) -> AsyncIterator[FaultyEvents | None]:
    """The rig with a drafter, over a wire that has the fate."""
    made: Drafter | HostileDraft = HostileDraft(seed=3) if kind == "hostile" else drafter(kind, folders)
    async with drafted(rig, made, fate) as faulty:
        yield faulty


@asynccontextmanager
async def drafted(rig: Rig, drafter: Drafter | HostileDraft, fate: str) -> AsyncIterator[FaultyEvents | None]:
    async with AsyncExitStack() as stack:
        peers: PeerEvents = drafter if isinstance(drafter, HostileDraft) else await stack.enter_async_context(
            drafting(drafter, AHEAD.get(fate, 0)))
        if fate == "grpc":
            await stack.enter_async_context(grpc_link(rig, peers))
            yield None
            return
        faulty = FaultyEvents(rig.worker.following, delay_s=DELAYS_S.get(fate, 0.0),
                              loss=0.4 if fate == "lost" else 0.0, shuffle=fate == "shuffled")
        link = await stack.enter_async_context(local_link(rig, peers, faulty))
        killer = asyncio.create_task(kill_often(link)) if fate == "killed" else None
        yield faulty
        if killer is not None:
            killer.cancel()
            await asyncio.gather(killer, return_exceptions=True)


async def kill_often(link: LocalLink) -> None:
    while True:
        await asyncio.sleep(0.02)
        link.cut("killed")
        await asyncio.sleep(0.005)
        link.restore()


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("kind", DRAFTERS)
async def test_answers_equal_plain_decoding(kind: str, fate: str, folders: dict[str, Path],
                                            plain: dict[str, list[list[Piece]]]) -> None:
    policy = HASTY if fate in ("late", "lost") else STUBBORN
    accepted = {}
    lookup = fate in ("killed", "shuffled")  # beside a drafter that goes and comes, or grows ahead
    async with (target(folders["target"], policy, prompt_lookup=lookup, shared_cores=lookup) as rig,
                joined(rig, kind, fate, folders) as faulty):
        for names in (("greedy", "penalties"), ("T0.7", "T1.0")):  # at once, and then where those were
            found = await asyncio.gather(*(asyncio.gather(*map(rig.answer, requests(SAMPLINGS[name])))
                                           for name in names))
            for name, answers in zip(names, found, strict=True):
                for expected, pieces in zip(plain[name], answers, strict=True):
                    assert tokens_of(pieces) == tokens_of(expected), (kind, fate, name)
                    assert pieces[-1].finish == expected[-1].finish
                    told = [p.logprob for piece in pieces for p in piece.logprobs]
                    np.testing.assert_allclose(told, [p.logprob for e in expected for p in e.logprobs], atol=1e-9)
                accepted[name] = sum(piece.accepted for pieces in answers for piece in pieces)
        assert accepted.keys() == SAMPLINGS.keys()
        await rig.check()
        if faulty is not None and fate in DELAYS_S:
            assert faulty.counts.delayed > 0
        if faulty is not None and fate == "ahead" and kind in ("standalone", "eagle3", "block", "pard", "noisy"):
            assert faulty.counts.further > 0, "nothing was grown ahead"
        if faulty is not None and fate == "lost" and kind != "hostile":
            assert faulty.counts.lost > 0
    if kind in ("eagle2", "mapped") and fate == "colocated":
        assert any(accepted.values()), "no state of an accepted token was ever used"
    if kind == "noisy" and fate in ("colocated", "grpc"):
        assert all(accepted.values()), f"a good drafter was of no use: {accepted}"


async def test_switching_speculation_in_mid_answer_changes_nothing(folders: dict[str, Path],
                                                                  plain: dict[str, list[list[Piece]]]) -> None:
    request = requests(SAMPLINGS["T1.0"])[0]
    async with (target(folders["target"]) as rig, drafting(drafter("noisy", folders)) as peers,
                local_link(rig, peers)):
        answer, pieces = rig.service.submit(request), []
        async for piece in answer:
            pieces.append(piece)
            answer.set_speculation(len(pieces) % 6 < 3)
        assert tokens_of(pieces) == tokens_of(plain["T1.0"][0])
        assert {"speculate", "plain"} <= {piece.state for piece in pieces}
        await rig.check()


def drafted_by(rig: Rig) -> dict[str, float]:
    """The draft tokens verified, by the drafter that proposed them."""
    lines = rig.metrics.registry.page("")[1].decode().splitlines()
    return {line.split('drafter="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines
            if line.startswith("slipstream_drafter_tokens_total{") and 'kind="drafted"' in line}


async def test_drafters_of_two_kinds_and_moves_between_them_change_nothing(
        folders: dict[str, Path], plain: dict[str, list[list[Piece]]]) -> None:
    """The one that has drafted goes in mid-answer, its answers go on with the other; when that one goes, it is back."""
    async with (target(folders["target"]) as rig, drafting(drafter("noisy", folders)) as some,
                drafting(drafter("eagle3", folders), AHEAD["ahead"]) as others, local_link(rig, some) as link,
                local_link(rig, others) as second):
        turns = [("standalone", link, second), ("eagle3", second, link)]
        before: dict[str, float] = {}

        def upset(_: int) -> None:
            kind, here, there = turns[0]
            if (used := drafted_by(rig)).get(kind, 0) > before.get(kind, 0):
                there.restore()
                here.cut("killed")
                turns.reverse()
                before.update(used)

        second.cut("killed")
        for name in ("greedy", "T1.0", "penalties"):
            answers = await asyncio.gather(*(rig.answer(request, upset) for request in requests(SAMPLINGS[name])))
            for expected, pieces in zip(plain[name], answers, strict=True):
                assert tokens_of(pieces) == tokens_of(expected), name
        await rig.check()
        assert rig.count("drafter_moves_total") > 0
        assert {kind for kind, count in drafted_by(rig).items() if count} == {"standalone", "eagle3"}


async def test_preemption_changes_nothing(folders: dict[str, Path], plain: dict[str, list[list[Piece]]]) -> None:
    """So few slots that answers push each other out."""
    async with (target(folders["target"], slots=160, prefix_cache=False) as rig,
                drafting(drafter("noisy", folders)) as peers, local_link(rig, peers)):
        wanted = requests(SAMPLINGS["greedy"])
        answers = await asyncio.gather(*(rig.answer(request) for request in wanted * 3))
        for expected, pieces in zip(plain["greedy"] * 3, answers, strict=True):
            assert tokens_of(pieces) == tokens_of(expected)
        assert rig.count("preemptions_total") > 0, "the slots sufficed, so nothing was tested"
        await rig.check()


def exact_law(folder: Path, prompt: bytes, top_k: int, count: int) -> dict[tuple[int, ...], float]:
    """The probability of each ``count`` first tokens under top-k sampling at temperature 1, from the model's logits."""
    model = load_model(folder, ModelSection(dtype="float64"))

    def step(tokens: list[int]) -> dict[int, float]:
        runner = ModelRunner(model, 64)
        builder = BatchBuilder()
        builder.add(tokens, range(len(tokens)), runner.slots.alloc(len(tokens)).tolist(), np.zeros(0, np.int64),
                    logits="last")
        best = torch.topk(runner.forward(builder.build())[0], top_k)
        return dict(zip(best.indices.tolist(), torch.softmax(best.values, 0).tolist(), strict=True))

    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        law = {(*path, token): p * q for path, p in law.items() for token, q in step([*prompt, *path]).items()}
    return law


async def test_sampled_answers_follow_the_softmax(folders: dict[str, Path]) -> None:
    """Chi-square of the first three tokens over many seeds, speculation on, against the exact law. The first comes with
    the prompt, and behind it one may be drafted."""
    draws, prompt = 2000, b"the cat sat on the"
    law = exact_law(folders["target"], prompt, 3, 3)
    policy = PolicySection(always=True, deadline_max_s=20.0)  # its 256 streams may be slow together
    counts = dict.fromkeys(law, 0)
    room = asyncio.Semaphore(256)

    async def answer(rig: Rig, seed: int) -> list[Piece]:
        async with room:
            return await rig.answer(Request(str(seed), tuple(prompt), Sampling(temperature=1.0, top_k=3, seed=seed), 3))

    async with (target(folders["target"], policy) as rig,
                drafting(drafter("noisy", folders)) as peers, local_link(rig, peers)):
        answers = await asyncio.gather(*(answer(rig, seed) for seed in range(draws)))
    for pieces in answers:
        counts[tuple(tokens_of(pieces))] += 1
    assert sum(piece.accepted for pieces in answers for piece in pieces) > draws / 4, "drafts were used"
    _, p_value = stats.chisquare(list(counts.values()), [draws * p / sum(law.values()) for p in law.values()])
    assert p_value > 1e-4, (p_value, counts, law)
