"""``fc`` handed over to the target: a third of the bytes, the same rows, and nothing for a hostile draft to gain."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc import aio
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.base.config import GrowthSection, ModelSection
from slipstream.base.errors import PairingError, RemoteProtocolError
from slipstream.drafting import Drafter
from slipstream.drafting.heads.checkpoint import read_head
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.neural import NeuralDrafter
from slipstream.engine.loading import load_model
from slipstream.engine.ops.layer import Linear, PartsNorm
from slipstream.engine.runner import FeatureWriter, Fusion, ModelRunner
from slipstream.protocol.messages import (
    Commit,
    DraftBound,
    DraftHello,
    Faults,
    Features,
    FeatureSpec,
    Peer,
    PeerEvents,
    Projection,
    TargetHello,
)
from slipstream.protocol.pairing import check_pair
from slipstream.protocol.requests import Piece, Request, Sampling
from slipstream.v1 import draft_pb2
from slipstream.wire.codec import (
    CHUNK_OVERHEAD,
    ProjectionReader,
    decode_draft_hello,
    decode_target_hello,
    encode_draft_hello,
    encode_projection,
)
from slipstream.wire.link import DraftLink
from slipstream.wire.local import LocalLink
from slipstream.wire.server import GrpcServer
from slipstream.wire.servicer import DraftServicer
from tests.eagle_folder import eagle_config, eagle_tensors, speculators_config, speculators_tensors, write_eagle_folder
from tests.loop import eventually
from tests.pair import WIRE, Rig, drafting, grpc_link, local_link, target
from tests.sequences import run
from tests.test_wire import Echo, Target
from tests.tiny import VOCAB, write_tiny_model
from tests.written import WrittenEagle3, WrittenLayer

pytestmark = pytest.mark.usefixtures("servers_end")
TAPS = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [-1, 0, 0]}
REQUEST = Request("1", tuple(b"the cat sat on the mat. the cat sat"), Sampling(), 24)
Tensor = torch.Tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head as wide as its target, with a bias on ``fc``."""
    config = eagle_config(hidden_size=48, eagle_config=TAPS, bias=True)
    generator = torch.Generator().manual_seed(4)
    tensors = eagle_tensors(config) | {"fc.bias": torch.randn(48, generator=generator)}
    return write_eagle_folder(tmp_path_factory.mktemp("projection") / "head", config, tensors)


def network(folder: Path, target_folder: Path, project: bool) -> EagleNetwork:
    return EagleNetwork(read_head(folder, target_folder), "float64", torch.device("cpu"), 16, project)


def spec_of(of: EagleNetwork) -> FeatureSpec:
    assert of.features is not None
    return of.features


def test_rows_are_fc_of_the_states_in_a_third_of_the_bytes(folder: Path, tiny_folder: Path) -> None:
    states = torch.randn(7, 144, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    head, sizes = read_head(folder, tiny_folder), []
    for project in (False, True):
        of = network(folder, tiny_folder, project)
        rows = FeatureWriter(spec_of(of))(states)
        sizes.append(len(rows))
        (read,) = of.read([Features(1, 0, rows, 7, "float64")])
        wanted = states @ head.tensors["fc.weight"].double().T + head.tensors["fc.bias"].double()
        assert torch.allclose(read, wanted, rtol=0, atol=1e-9), project
    assert sizes[0] == 3 * sizes[1] == 7 * 144 * 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_is_projected(folder: Path, tiny_folder: Path, dtype: str) -> None:
    head = read_head(folder, tiny_folder)
    of = EagleNetwork(head, dtype, torch.device("cpu"), 16, project=True)
    states = torch.randn(7, 144, generator=torch.Generator().manual_seed(1))
    (read,) = of.read([Features(1, 0, FeatureWriter(spec_of(of))(states.bfloat16()), 7, dtype)])
    wanted = states.bfloat16().float() @ head.tensors["fc.weight"].T + head.tensors["fc.bias"]
    assert torch.allclose(read.float(), wanted, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("project", [False, True])
def test_a_state_that_float16_cannot_hold_leaves_a_head_its_numbers(folder: Path, tiny_folder: Path, project: bool,
                                                                    dtype: torch.dtype) -> None:
    """As the first token of some models has them: with one infinite row no token of the answer was drafted."""
    of = EagleNetwork(read_head(folder, tiny_folder), "float16", torch.device("cpu"), 16, project)
    states = torch.randn(7, 144, generator=torch.Generator().manual_seed(1))
    states[0] *= 1e6
    (read,) = of.read([Features(1, 0, FeatureWriter(spec_of(of))(states.to(dtype)), 7, "float16")])
    assert bool(read.isfinite().all()) and float(read[0].abs().max()) > 1e4


@pytest.mark.parametrize(("field", "width"), [("norm_before_fc", 144), ("fc_norm", 48)])
def test_norms_before_fc_are_handed_over_with_it(tmp_path: Path, field: str, width: int) -> None:
    tall = write_tiny_model(tmp_path / "target", num_hidden_layers=8)
    config = speculators_config(**{field: True})
    folder = write_eagle_folder(tmp_path / "head", config, speculators_tensors(config))
    states, read = torch.randn(7, 144, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3, []
    for project in (False, True):
        of = network(folder, tall, project)
        rows = FeatureWriter(spec_of(of))(states)
        assert len(rows) == 7 * 8 * (48 if project else 144)
        read += of.read([Features(1, 0, rows, 7, "float64")])
    assert torch.equal(read[0], read[1])
    written = WrittenEagle3(config | config["transformer_layer_config"], speculators_tensors(config), "layers.0")
    layer = WrittenLayer(written.config, written.tensors, "layers.0")
    wanted = torch.stack([written.projected(layer, state) for state in states])
    assert torch.allclose(read[1], wanted, rtol=0, atol=1e-9)
    projection = spec_of(of).projection
    assert projection is not None and (projection.norm_width, projection.norm_eps) == (width, 1e-5)
    assert len(projection.weights) == projection.size == 49 * 144 * 8


class Copies(TorchDispatchMode):
    """Counts the copies to another device or dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_the_norm_before_fc_is_brought_to_the_device_of_the_states_once() -> None:
    fusion = Fusion(torch.ones(2, 4), PartsNorm(torch.ones(4), 2, 1e-5), lambda weight: Linear(weight.to("meta")))
    rows, found = torch.ones(3, 4, device="meta"), list[int]()
    for _ in range(2):
        with Copies() as copies:
            assert fusion(rows).shape == (3, 2)
        found.append(copies.count)
    assert found == [1, 0]


def drafter(folder: Path, target_folder: Path, project: bool) -> Drafter:
    network = EagleNetwork(read_head(folder, target_folder), "float64", torch.device("cpu"), 200, project)
    return NeuralDrafter("eagle3", network, GrowthSection(num_steps=3, topk=2, num_draft_tokens=5), 8)


def tokens_of(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


Join = Callable[..., AbstractAsyncContextManager[DraftLink | LocalLink]]


@pytest.mark.parametrize("join", [grpc_link, local_link])
async def test_answers_are_the_same_and_the_traffic_shrinks(folder: Path, tiny_folder: Path, join: Join) -> None:
    sent, answers = {}, []
    for project in (False, True):
        async with (target(tiny_folder) as rig, drafting(drafter(folder, tiny_folder, project)) as peers,
                    join(rig, peers) as link):
            pieces = await rig.answer(REQUEST)
            assert sum(piece.drafted for piece in pieces) > 12 and rig.count("invalid_growths_total") == 0
            sent[project] = link.counts.bytes_out
            answers.append(tokens_of(pieces))
            await rig.check()
    assert answers[0] == answers[1]
    assert sent[True] < 0.42 * sent[False], sent


class Listening:
    """A draft, and the rows that commits brought it, by session and position."""

    def __init__(self, peers: PeerEvents) -> None:
        self.rows: dict[int, dict[int, bytes]] = {}
        self.peer_up, self.peer_down, self.inbox_full = peers.peer_up, peers.peer_down, peers.inbox_full
        self._peers = peers

    def received(self, peer: Peer, items: list[DraftBound], faults: Faults) -> None:
        for item in items:
            if isinstance(item, Commit) and item.features is not None:
                rows, own = item.features, self.rows.setdefault(item.session, {})
                size = len(rows.rows) // rows.num_rows
                own.update({rows.start + i: rows.rows[i * size : (i + 1) * size] for i in range(rows.num_rows)})
        self._peers.received(peer, items, faults)


async def test_answers_of_one_step_get_each_its_own_rows(folder: Path, tiny_folder: Path) -> None:
    requests = [replace(REQUEST, request_id=str(n), tokens=REQUEST.tokens[n:]) for n in range(4)]
    async with target(tiny_folder) as rig, drafting(drafter(folder, tiny_folder, True)) as peers:
        listening = Listening(peers)
        async with local_link(rig, listening):
            answers = await asyncio.gather(*(rig.answer(request) for request in requests))
    texts = [[*request.tokens, *tokens_of(pieces)] for request, pieces in zip(requests, answers, strict=True)]
    of = network(folder, tiny_folder, True)
    runner = ModelRunner(load_model(tiny_folder, ModelSection(dtype="float64")), 256)
    runner.set_taps(spec_of(of).layers)
    assert len(listening.rows) == len(texts)
    for text, (_, found) in zip(texts, sorted(listening.rows.items()), strict=True):
        slots = run(runner, text)[1]
        rows = FeatureWriter(spec_of(of))(runner.features(slots))
        size = len(rows) // len(text)
        for position, row in found.items():
            wanted = np.frombuffer(rows[position * size : (position + 1) * size])
            np.testing.assert_allclose(np.frombuffer(row), wanted, rtol=0, atol=1e-9)
        assert len(found) > 16
        runner.slots.free(slots)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError], ids=["memory", "something else"])
@pytest.mark.parametrize("failing", [(), (1,), (2,), (3, 4), range(1000)], ids=["none", "first", "2nd", "some", "all"])
async def test_rows_that_cannot_be_made_cost_drafts_and_no_answers(
        folder: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, failing: Sequence[int],
        error: type[Exception]) -> None:
    """The engine thread goes on: cuBLAS, say, has an error of its own for a device that is full. Rows of a prompt are
    made a few at a time."""
    sizes, real = list[int](), FeatureWriter.__call__

    def cramped(rows: FeatureWriter, states: Tensor) -> bytes:
        sizes.append(len(states))
        if len(sizes) in failing or failing == range(1000):
            raise error("no memory for rows")
        return real(rows, states)

    monkeypatch.setattr(FeatureWriter, "__call__", cramped)
    monkeypatch.setattr("target_service.sequence.FEATURE_CHUNK", 8)
    async with target(tiny_folder) as rig:
        alone = tokens_of(await rig.answer(REQUEST))
    async with (target(tiny_folder) as rig, drafting(drafter(folder, tiny_folder, True)) as peers,
                local_link(rig, peers)):
        first, second = await rig.answer(REQUEST), await rig.answer(REQUEST)  # of the second, rows are in the cache
        await rig.check()
    assert tokens_of(first) == tokens_of(second) == alone and max(sizes) <= 8 < len(sizes)
    assert (sum(piece.drafted for piece in second) > 0) == (failing != range(1000))


def test_settings_choose(folder: Path, tiny_folder: Path) -> None:
    widths = [made.features.width for project in (True, False)
              if (made := drafter(folder, tiny_folder, project)).features is not None]
    assert widths == [48, 144]


WEIGHTS = torch.arange(6 * 24, dtype=torch.float32).numpy().tobytes()
WHOLE = Projection(6, 24, "float32", hashlib.sha256(WEIGHTS).digest(), WEIGHTS)
NORMED = replace(WHOLE, digest=hashlib.sha256(WEIGHTS + WEIGHTS[:96]).digest(), weights=WEIGHTS + WEIGHTS[:96],
                 norm_width=12, norm_eps=1e-5)
HELLO = TargetHello(1, 5, "tiny", VOCAB, "abc", 12, 4, 4096)
DRAFT = DraftHello(1, 5, "eagle3", VOCAB, "", FeatureSpec((1, 2), 6, "float64", WHOLE), 12, 256, 63, 16)


def chunk(weights: bytes) -> bytes:
    return draft_pb2.ExchangeResponse(projection=draft_pb2.ProjectionChunk(weights=weights)).SerializeToString()


@pytest.mark.parametrize("limit", [CHUNK_OVERHEAD + 1, CHUNK_OVERHEAD + 100, 1 << 20])
@pytest.mark.parametrize("whole", [WHOLE, NORMED])
def test_weights_travel_below_the_message_limit(limit: int, whole: Projection) -> None:
    draft = replace(DRAFT, features=FeatureSpec((1, 2), 6, "float64", whole))
    hello = decode_draft_hello(encode_draft_hello(draft))
    check_pair(HELLO, hello)
    assert hello.features is not None and hello.features.projection is not None
    assert hello == draft and hello.features.projection.weights == b"", "they come later"
    reader = ProjectionReader(hello.features.projection)
    for number, message in enumerate(encode_projection(whole, limit)):
        assert len(message) <= limit and not reader.complete
        assert draft_pb2.ExchangeResponse.FromString(message).projection.index == number, "older targets ask for it"
        reader.add(message)
    assert reader.complete and reader.finish().weights == whole.weights


async def test_a_link_keeps_no_weights() -> None:
    """Of each draft it would be a hundred megabytes and more, as long as the stream lasts."""
    heard, server = Target(), GrpcServer("127.0.0.1:0", WIRE, [DraftServicer(Echo(DRAFT))])
    link = DraftLink(f"127.0.0.1:{await server.start()}", HELLO, heard)
    running = asyncio.create_task(link.run())
    await eventually(lambda: len(heard.ups) > 0)
    spec = heard.ups.pop().features
    assert spec is not None and spec.projection is not None
    weights = spec.projection.weights
    del spec
    alone = bytes(bytearray(WEIGHTS))
    assert weights == WEIGHTS and sys.getrefcount(weights) == sys.getrefcount(alone)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.drain(0.0)


HOSTILE = {
    "in another order": [chunk(WEIGHTS[100:]), chunk(WEIGHTS[:100])],
    "twice": [chunk(WEIGHTS[:288]), chunk(WEIGHTS[:288])],
    "too large": [chunk(WEIGHTS + b"x")],
    "one byte too many": [chunk(WEIGHTS[:-1]), chunk(b"ab")],
    "empty": [chunk(b"")],
    "no chunk": [b"\xff\xff"],
    "a frame": [draft_pb2.ExchangeResponse(frame=draft_pb2.DraftFrame(incarnation=5)).SerializeToString()],
    "other weights": [chunk(WEIGHTS[::-1])],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_chunks_are_typed_errors(name: str) -> None:
    reader = ProjectionReader(replace(WHOLE, weights=b""))
    with pytest.raises(RemoteProtocolError, match=r"^features\.projection"):
        for message in HOSTILE[name]:
            reader.add(message)
        reader.finish()


def test_too_few_weights_are_never_a_projection() -> None:
    reader = ProjectionReader(replace(WHOLE, weights=b""))
    reader.add(chunk(WEIGHTS[:8]))
    assert not reader.complete
    with pytest.raises(RemoteProtocolError, match="8 bytes where 576 were declared"):
        reader.finish()


@pytest.mark.parametrize(("change", "match"), [
    ({"rows": 1 << 14, "columns": 1 << 14}, "features.projection: 1073741824 is not between"),
    ({"rows": 25}, "would make rows longer"),
    ({"rows": 0}, "features.projection.rows"),
    ({"columns": 1 << 30}, "features.projection.columns"),
    ({"digest": b"123"}, "features.projection.digest"),
    ({"norm_width": 7, "norm_eps": 1e-5}, "features.projection.norm_width: does not divide columns"),
    ({"norm_width": 48, "norm_eps": 1e-5}, "features.projection.norm_width"),
    ({"norm_width": 12, "norm_eps": 0.0}, "features.projection.norm_eps"),
    ({"norm_width": 12, "norm_eps": float("nan")}, "features.projection.norm_eps"),
])
def test_a_declaration_is_bounded_before_anything_is_read(change: dict[str, object], match: str) -> None:
    spec = FeatureSpec((1, 2), 6, "float64", replace(WHOLE, **change))
    with pytest.raises(RemoteProtocolError, match=match):
        decode_draft_hello(encode_draft_hello(replace(DRAFT, features=spec)))


@pytest.mark.parametrize(("change", "field"), [
    ({"projection": replace(WHOLE, columns=36)}, "features.projection"),
    ({"projection": replace(WHOLE, norm_width=6, norm_eps=1e-5)}, "features.projection.norm_width"),
    ({"width": 24}, "features.width"),
    ({"projection": None}, "features.width"),
])
def test_a_projection_of_other_states_is_refused(change: dict[str, object], field: str) -> None:
    assert DRAFT.features is not None
    with pytest.raises(PairingError) as refused:
        check_pair(HELLO, replace(DRAFT, features=replace(DRAFT.features, **change)))
    assert refused.value.field == field


async def hostile_draft(rig: Rig, messages: Sequence[bytes], ends: bool) -> tuple[aio.Server, DraftLink]:
    """A draft service that declares a projection for the rig's target and then sends ``messages``."""
    width = rig.hello.hidden_size
    projection = replace(WHOLE, rows=6, columns=width)
    spec = FeatureSpec((1,), 6, "float64", replace(projection, digest=bytes(32)))

    async def exchange(_requests: object, context: aio.ServicerContext[bytes, bytes]) -> None:
        hello = decode_target_hello(await context.read())
        await context.write(encode_draft_hello(replace(
            DRAFT, incarnation=hello.incarnation, features=spec, hidden_size=width)))
        for message in messages:
            await context.write(message)
        if not ends:
            await asyncio.Event().wait()

    server = aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(
        "slipstream.v1.DraftService", {"Exchange": grpc.stream_stream_rpc_method_handler(exchange)})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, DraftLink(f"127.0.0.1:{port}", rig.hello, rig.worker.following)


@pytest.mark.parametrize(("messages", "ends", "problem"), [
    ([chunk(b"")], False, "features.projection: a chunk of 0 bytes where 1152 are missing"),
    ([chunk(bytes(1 << 20))], False, "features.projection: a chunk of 1048576 bytes where 1152 are missing"),
    ([chunk(bytes(1152))], False, "features.projection.digest: is not that of the weights"),
    ([chunk(bytes(8))], True, "ended the stream before its projection"),
])
async def test_the_target_serves_plain_beside_a_hostile_draft(tiny_folder: Path, messages: Sequence[bytes], ends: bool,
                                                              problem: str) -> None:
    async with target(tiny_folder) as rig:
        server, link = await hostile_draft(rig, messages, ends)
        running = asyncio.create_task(link.run())
        await eventually(lambda: problem in link.status().problem)
        assert not link.status().connected
        pieces = await rig.answer(REQUEST)
        assert len(tokens_of(pieces)) == 24 and not any(piece.drafted for piece in pieces)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(0)


async def test_another_projection_is_refused_while_one_is_in_use(tmp_path: Path, folder: Path,
                                                                 tiny_folder: Path) -> None:
    """All drafts of a target share one spec: a second one with other weights would get rows that are not its own."""
    config = eagle_config(hidden_size=48, eagle_config=TAPS)
    other = write_eagle_folder(tmp_path / "other", config, eagle_tensors(config, seed=9))
    async with (target(tiny_folder) as rig, drafting(drafter(folder, tiny_folder, True)) as first,
                drafting(drafter(other, tiny_folder, True)) as second, drafting(drafter(folder, tiny_folder, True)) as
                third, local_link(rig, first), local_link(rig, second), local_link(rig, third)):
        await rig.check()
        page = rig.metrics.registry.page("")[1].decode()
        assert "slipstream_drafts_connected" in page
        assert [line.rsplit(" ", 1)[1] for line in page.splitlines()
                if line.startswith("slipstream_drafts_connected{")] == ["2.0"]
