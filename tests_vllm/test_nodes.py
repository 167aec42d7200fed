"""vLLM on two machines that compute one model together, here two services of one: the first serves and speaks with
drafts. Where one ends, be it while nothing runs, answers are errors, and the other one ends too: so both begin anew."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.fleet import free_port
from slipstream.base.errors import Unavailable
from slipstream.models.folder import resolve
from slipstream.protocol.requests import Piece, Request, Sampling
from slipstream.wire.target import TargetClient
from tests_vllm.running import MODEL, Server, draft, quiet
from tests_vllm.test_parallel import SHARED
from tests_vllm.test_target import settings

PROMPT = tuple(range(100, 120)) * 3
pytestmark = pytest.mark.timeout(1800)


@dataclass
class Nodes:
    serving: Server
    other: Server
    listen: str
    draft_port: int


@pytest.fixture
def nodes(vllm_python: Path, tmp_path: Path) -> Iterator[Nodes]:
    folder, drafts = tmp_path, free_port()
    shared = {name: value for name, value in SHARED.items() if name != "tensor_parallel_size"}
    meeting = {**shared, "enforce_eager": True, "max_model_len": 1024, "nnodes": 2, "master_addr": "127.0.0.1",
               "master_port": free_port()}

    def started(rank: int) -> tuple[Server, str]:
        listen, page = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        given = settings(
            f"model.path={resolve(MODEL)}", "model.dtype=float32", "model.tensor_parallel=2", "target.max_sessions=4",
            "target.policy.max_nodes=4", "target.policy.always=true", "target.prompt_lookup=false",
            f"target.engine={ {'vllm': {**meeting, 'node_rank': rank}} }", f"target.listen={listen}",
            f"target.metrics_listen={page}", f"target.drafts=[127.0.0.1:{drafts}]")
        return Server([vllm_python, "-m", "target_service", *given], folder / f"node-{rank}.log", page, "/ready",
                      {**quiet(), "VLLM_HOST_IP": "127.0.0.1"}, folder), listen

    (serving, listen), (other, _) = started(0), started(1)
    try:
        serving.wait(900)
        other.wait()
        yield Nodes(serving, other, listen, drafts)
    finally:
        serving.end()
        other.end()


async def asked(client: TargetClient, tokens: int = 64, begun: asyncio.Event | None = None) -> list[Piece]:
    pieces = list[Piece]()
    async for piece in client.submit(Request("r", PROMPT, Sampling(), tokens)):
        pieces.append(piece)
        if begun is not None:
            begun.set()
    return pieces


def tokens(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


async def test_both_compute_and_drafts_change_nothing_until_one_ends_in_mid_answer(nodes: Nodes) -> None:
    client = TargetClient(nodes.listen)
    plain = await asked(client)
    service = draft(nodes.draft_port)
    try:
        drafted = await asked(client)
        while not sum(piece.accepted for piece in drafted):  # the draft may still come up
            drafted = await asked(client)
    finally:
        service.kill()
        service.wait()
    assert tokens(drafted) == tokens(plain)
    begun = asyncio.Event()
    answer = asyncio.create_task(asked(client, 900, begun))
    await begun.wait()
    nodes.other.end()
    with pytest.raises(Unavailable):
        await answer
    assert await asyncio.to_thread(nodes.serving.process.wait) == 1
    await client.aclose()


async def test_one_that_ends_while_nothing_runs_is_missed(nodes: Nodes) -> None:
    client = TargetClient(nodes.listen)
    await asked(client)
    await asyncio.sleep(5.0)  # the first one learns that nothing runs; else it waits longer
    nodes.other.end()
    await asyncio.sleep(5.0)
    with pytest.raises(Unavailable):
        await asked(client)
    assert await asyncio.to_thread(nodes.serving.process.wait) == 1
    await client.aclose()


async def test_the_first_one_does_not_end_alone(nodes: Nodes) -> None:
    nodes.serving.end()
    assert await asyncio.to_thread(nodes.other.process.wait) == 1
