"""Real processes, real gRPC, the default model on its default kernels: what a user relies on, and a killed draft."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest

from bench import fleet
from bench.asking import ask, builtin_questions
from router_service.text.tokens import TextCodec
from slipstream.base.config import ModelSection
from slipstream.drafting.ngram import NgramDrafter
from slipstream.models.folder import is_prepared, prepare, resolve
from slipstream.protocol.requests import Piece, Request, Sampling
from tests.pair import STUBBORN, Rig, drafting, grpc_link, target
from tests.scraped import scraped

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
CHAT, COPY = builtin_questions().values()
# What a target copies by itself would pass for a draft's.
PREFERS_DRAFTS = ("target.policy.always=true", "target.prompt_lookup=false", "draft.drafter=ngram")


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    name = ModelSection().path
    folder = prepare(name)
    assert is_prepared(folder)
    return TextCodec(resolve(name))


@pytest.fixture(scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory, codec: TextCodec) -> AsyncIterator[fleet.Services]:
    async with fleet.target_with_draft("real", tmp_path_factory.mktemp("real"), PREFERS_DRAFTS) as made:
        yield made


@pytest.fixture(scope="module")
async def rig(codec: TextCodec) -> AsyncIterator[Rig]:
    async with target(resolve(ModelSection().path), STUBBORN, dtype="bfloat16", slots=4096) as made:
        yield made


def prompt(codec: TextCodec, text: str) -> list[int]:
    return codec.chat([{"role": "user", "content": text}])


SAMPLINGS = (Sampling(stop_token_ids=(2,)), Sampling(temperature=0.8, top_p=0.95, seed=5))


async def test_answers_over_grpc_equal_plain_ones(pair: fleet.Services, codec: TextCodec) -> None:
    """To the bit, and side by side: what a row computes depends on its own path alone."""
    wanted = [(prompt(codec, text), sampling) for text in (*CHAT[:2], *COPY[:3]) for sampling in SAMPLINGS]
    plain, drafted = [await asyncio.gather(*(ask(pair.clients[0], *one, 32, speculate) for one in wanted))
                      for speculate in (False, True)]
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert sum(answer.accepted for answer in drafted) > 20, "drafts were hardly used, so this shows little"


async def test_answers_at_temperature_1_equal_plain_ones(pair: fleet.Services, codec: TextCodec) -> None:
    """What clients ask for that say nothing. With nobody beside them who filters, kernels choose on their way."""
    plain, drafted = [await asyncio.gather(*(
        ask(pair.clients[0], prompt(codec, text), Sampling(temperature=1.0, seed=seed), 32, speculate)
        for seed, text in enumerate(COPY[:3], 1))) for speculate in (False, True)]
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert sum(answer.accepted for answer in drafted) > 5, "drafts were hardly used, so this shows little"


@pytest.mark.parametrize("text", [COPY[0], pytest.param(COPY[2], marks=pytest.mark.long)], ids=["one", "another"])
async def test_answers_of_torch_in_float32_equal_plain_ones(text: str, codec: TextCodec) -> None:
    """A difference is possible where two tokens are as good as equal, and is then shown with the margin."""
    from_drafts = 0
    async with (target(resolve(ModelSection().path), STUBBORN, dtype="float32", slots=2048) as rig,
                drafting(NgramDrafter(8)) as peers, grpc_link(rig, peers)):
        for sampling in SAMPLINGS:
            plain = await ask(rig.service, prompt(codec, text), sampling, 24, False, top_logprobs=2)
            drafted = await ask(rig.service, prompt(codec, text), sampling, 24, True)
            parted = next((i for i, (a, b) in enumerate(zip(plain.tokens, drafted.tokens, strict=False)) if a != b),
                          None)
            margin = None if parted is None else plain.logprobs[parted][0] - plain.logprobs[parted][1]
            assert parted is None, f"they part at token {parted}, margin {margin}"
            assert len(plain.tokens) == len(drafted.tokens)
            from_drafts += drafted.accepted
    assert from_drafts > 5, "drafts were hardly used, so this shows little"


async def test_a_killed_draft_changes_nothing_and_a_restarted_one_is_used(pair: fleet.Services,
                                                                          codec: TextCodec) -> None:
    text = prompt(codec, COPY[0].replace("exactly", "exactly three times"))
    plain = await ask(pair.clients[0], text, Sampling(), 96, False)
    killed = asyncio.Event()
    accepted_after: list[int] = []

    def on_piece(piece: Piece) -> None:
        heard.append(piece)
        if len(heard) == 10:
            pair.drafts[0].signal(signal.SIGKILL)
            killed.set()
        if back.is_set():
            accepted_after.append(piece.accepted)

    async def restart() -> None:
        await killed.wait()
        await asyncio.sleep(0.3)
        pair.drafts[0].start()
        await pair.drafts[0].ready()
        while not (await pair.clients[0].info()).drafts[0].connected:
            await asyncio.sleep(0.05)
        back.set()

    heard: list[Piece] = []
    back = asyncio.Event()
    restarting = asyncio.create_task(restart())
    through = await ask(pair.clients[0], text, Sampling(), 96, True, on_piece=on_piece)
    assert through.tokens == plain.tokens, "the answer that lost its drafter"
    await asyncio.wait_for(restarting, 60)
    again = await ask(pair.clients[0], text, Sampling(), 96, True, on_piece=on_piece)
    assert again.tokens == plain.tokens
    assert again.accepted > 10 and sum(accepted_after) > 10, "the restarted draft was not used"
    assert await scraped(pair.targets[0].metrics_port, "drafter_lost_total") == 1
    assert "draft link down" in pair.targets[0].log.read_text()


async def test_thirty_two_streams_finish_and_give_every_slot_back(rig: Rig, codec: TextCodec) -> None:
    texts = [*CHAT, *COPY]
    async with drafting(NgramDrafter(64)) as peers, grpc_link(rig, peers):
        answers = await asyncio.gather(*(
            rig.answer(Request(str(i), tuple(prompt(codec, texts[i % len(texts)])), Sampling(seed=i), 12))
            for i in range(32)))
        assert all(pieces[-1].finish for pieces in answers)
        assert [sum(len(piece.tokens) for piece in pieces) for pieces in answers] == [12] * 32
        assert sum(piece.accepted for pieces in answers for piece in pieces) > 0
        await rig.check()
        info = await rig.service.info()
        assert rig.worker.num_free_slots == 4096 and info.sessions_running == info.sessions_waiting == 0


async def test_an_answer_that_nobody_reads_frees_its_slots(rig: Rig, codec: TextCodec) -> None:
    answer = rig.service.submit(Request("1", tuple(prompt(codec, CHAT[0])), Sampling(), 1000))
    async for _ in answer:
        break
    await answer.aclose()
    async with asyncio.timeout(60):
        while (await rig.service.info()).sessions_running:
            await asyncio.sleep(0.01)
    await rig.check()
    assert rig.worker.num_free_slots == 4096
