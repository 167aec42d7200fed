"""Multi-token prediction heads never change an answer: MiMo's on the decoder engine, GLM-4.5's and DeepSeek-V3's on the
hf engine, heads that predict well and heads of noise, all in float64."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from slipstream.base.config import DraftSection, GrowthSection, ModelSection
from slipstream.drafting import create
from slipstream.engine.loading import load_model
from slipstream.engine.runner import ModelRunner
from slipstream.protocol.requests import Piece, Request, Sampling
from tests.mtp_folder import mtp_config, write_mtp_target
from tests.pair import HASTY, STUBBORN, FaultyEvents, Rig, drafting, grpc_link, local_link, target
from tests.sequences import run

SAMPLINGS = {"greedy": Sampling(), "T1.0": Sampling(temperature=1.0, top_p=0.95, seed=12),
             "penalties": Sampling(temperature=0.8, seed=13, frequency_penalty=0.4, repetition_penalty=1.1,
                                   min_tokens=8, stop_token_ids=(7, 32, 101, 116))}
PROMPTS = (b"the cat sat on the mat. the cat sat on the", b"zq")


@dataclass(frozen=True)
class Pair:
    """A target with a head inside."""

    folder: Path
    engine: str
    faithful: bool


PAIRS = {"mimo": ("mimo", {"num_hidden_layers": 1}), "glm4_moe": ("glm4_moe", {"num_hidden_layers": 1}),
         "deepseek_v3": ("deepseek_v3", {"num_hidden_layers": 1}),
         "mimo with three layers of noise": ("mimo", {"num_nextn_predict_layers": 3})}


@pytest.fixture(scope="module", params=list(PAIRS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    kind, changes = PAIRS[request.param]
    faithful = "num_hidden_layers" in changes
    if faithful and kind != "mimo":
        changes = changes | {"first_k_dense_replace": 0}
    folder = write_mtp_target(tmp_path_factory.mktemp("mtp"), mtp_config(kind, **changes), faithful=faithful)
    return Pair(folder, "decoder" if kind == "mimo" else "hf", faithful)


@pytest.fixture(scope="module")
async def plain(pair: Pair) -> dict[str, list[list[int]]]:
    async with target(pair.folder, engine=pair.engine) as rig:
        return {name: [tokens_of(await rig.answer(request)) for request in requests(sampling)]
                for name, sampling in SAMPLINGS.items()}


def requests(sampling: Sampling) -> list[Request]:
    return [Request(str(i), tuple(prompt), sampling, 24) for i, prompt in enumerate(PROMPTS)]


def tokens_of(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


@asynccontextmanager
async def joined(rig: Rig, pair: Pair, fate: str) -> AsyncIterator[None]:
    section = DraftSection(drafter="mtp", dtype="float64",
                           growth=GrowthSection(num_steps=4, topk=2, num_draft_tokens=8))
    async with drafting(create(section, ModelSection(path=str(pair.folder), dtype="float64"), 1024)) as peers:
        if fate == "grpc":
            async with grpc_link(rig, peers):
                yield
            return
        faulty = FaultyEvents(rig.worker.following, delay_s=0.004 if fate == "late" else 0.0)
        async with local_link(rig, peers, faulty):
            yield
        assert fate != "late" or faulty.counts.delayed > 0


@pytest.mark.parametrize("fate", ["colocated", "grpc", "late"])
async def test_answers_equal_plain_decoding(pair: Pair, fate: str, plain: dict[str, list[list[int]]]) -> None:
    accepted = {}
    policy = HASTY if fate == "late" else STUBBORN
    async with target(pair.folder, policy, engine=pair.engine) as rig, joined(rig, pair, fate):
        for name, sampling in SAMPLINGS.items():
            answers = await asyncio.gather(*(rig.answer(request) for request in requests(sampling)))
            assert [tokens_of(pieces) for pieces in answers] == plain[name], name
            accepted[name] = sum(piece.accepted for pieces in answers for piece in pieces)
        await rig.check()
    if pair.faithful and fate != "late":
        assert min(accepted.values()) >= 12, f"heads that know their target were of no use: {accepted}"


def test_the_tap_that_heads_read_is_what_logits_come_from(pair: Pair) -> None:
    """The state after the final norm, on both engines: times the lm_head it is the logits."""
    model = load_model(pair.folder, ModelSection(dtype="float64", engine=pair.engine))
    runner = ModelRunner(model, 64)
    runner.set_taps((model.config.num_layers,))
    logits, slots = run(runner, list(PROMPTS[0]))
    torch.testing.assert_close(model.logits(runner.features(slots)), logits, rtol=0, atol=1e-12)
