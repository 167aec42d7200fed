"""An answer has an identity: it is wholly one model's, or a beginning of it and then an error that says so."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slipstream.base.config import Config, ModelSection
from slipstream.base.errors import Draining, ModelChanged, ModelError, Unavailable
from slipstream.engine.attention import TorchAttention
from slipstream.engine.decoder import Decoder
from slipstream.engine.graphs import GraphedDecoder, capture_eager
from slipstream.engine.hf import HFModel
from slipstream.engine.loading import CHOICE_PACKAGES, ROOT, identity_of, load_model
from slipstream.engine.model import CausalModel, ModelConfig, load_tensors
from slipstream.engine.ops.layer import TORCH, LayerOps
from slipstream.engine.trial import Sessions
from slipstream.models.folder import code_digest, weights_hash
from slipstream.protocol.identity import Identity
from slipstream.protocol.requests import Piece, Request
from slipstream.wire.answers import decode_answer_requests, decode_info, encode_answer_request, encode_info
from slipstream.wire.client import AsyncClient
from slipstream.wire.server import GrpcServer
from slipstream.wire.target import TargetClient, TargetServicer
from target_service import assembly, vllm_start
from tests.echo import EchoAnswer, EchoTarget, answer_bytes
from tests.held import Held, HeldModels
from tests.loop import eventually, settled
from tests.pair import WIRE, Rig, target
from tests.routing import CHAT, COMPLETIONS, HELLO, Routing, events, routing
from tests.test_moving import balanced, echo_request, read
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.usefixtures("servers_end")

OTHER = Identity("other", "float32", "none", "echo")
TOKENS = 120


@dataclass
class Serving:
    """A target of a tiny model behind its own server."""

    model: Held
    rig: Rig
    server: GrpcServer
    client: TargetClient


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Serving]:
    models = HeldModels()
    async with target(folder, dtype="float32", slots=4096, around=models) as rig:
        server = GrpcServer("127.0.0.1:0", WIRE, [TargetServicer(rig.service)])
        client = TargetClient(f"127.0.0.1:{await server.start()}")
        try:
            yield Serving(models[0], rig, server, client)
        finally:
            models[0].let_go()
            await client.aclose()
            await server.drain(0.0)


@dataclass
class Stream:
    """What a client has read of one answer."""

    text: str = ""
    error: dict[str, str] = field(default_factory=dict)
    finished: bool = False

    async def read(self, r: Routing, prompt: str) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True,
                "ignore_eos": True}
        async with r.http.stream("POST", COMPLETIONS, json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                self.error = event.get("error", self.error)
                for choice in event.get("choices", ()):
                    self.text += choice["text"]
                    self.finished = self.finished or bool(choice["finish_reason"])


async def texts(folder: Path, prompts: list[str], client: TargetClient) -> list[str]:
    """What one model alone answers."""
    async with routing(folder, client) as r:
        answers = await asyncio.gather(*(r.post(COMPLETIONS, prompt=prompt, max_tokens=TOKENS, temperature=0,
                                                ignore_eos=True) for prompt in prompts))
        return [answer.json()["choices"][0]["text"] for answer in answers]


@pytest.mark.parametrize("how", ["killed", "drained"])
async def test_a_rollout_under_load_mixes_no_two_models(tiny_folder: Path, tmp_path: Path, how: str) -> None:
    """Of two targets with different weights one is killed, and its answers end; or it drains, and finishes them, as
    nobody else can."""
    prompts = [f"Story {number} begins" for number in range(8)]
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(serving(tiny_folder))
        new = await stack.enter_async_context(serving(write_tiny_model(tmp_path / "new", seed=1)))
        of_old, of_new = [await texts(tiny_folder, prompts, one.client) for one in (old, new)]
        assert not set(of_old) & set(of_new)
        r = await stack.enter_async_context(routing(tiny_folder, old.client, new.client))
        old.model.hold()
        new.model.hold()
        streams = [Stream() for _ in prompts]
        reading = [asyncio.create_task(stream.read(r, prompt)) for stream, prompt in zip(streams, prompts, strict=True)]

        def all_have_begun() -> bool:
            old.model.step()
            new.model.step()
            return all(stream.text for stream in streams)

        await eventually(all_have_begun)
        assert old.rig.worker.num_running and new.rig.worker.num_running, "nothing is at stake"
        if how == "drained":
            draining = asyncio.create_task(old.rig.service.drain(0.0))

            def drained() -> bool:
                old.model.step()
                return draining.done()

            await eventually(drained)
            assert not draining.result(), "it has handed its answers back, and has got them again"
            old.model.let_go()
        new.model.let_go()
        await old.server.drain(0.0)
        await asyncio.gather(*reading)
    ended = 0
    for stream, old_text, new_text in zip(streams, of_old, of_new, strict=True):
        if stream.finished:
            assert stream.text in (old_text, new_text) and not stream.error
        else:
            ended += 1
            assert stream.text and old_text.startswith(stream.text), "a beginning of its own model's"
            assert stream.error["type"] == stream.error["code"] == "model_changed"
            assert "no longer served" in stream.error["message"]
    assert bool(ended) == (how == "killed")


def test_on_vllm_commits_that_choose_otherwise_are_told_apart(tiny_folder: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sampling is keyed, code of ours chooses from vLLM's logits."""
    device = SimpleNamespace(get_device_name=lambda: "cpu")
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=device))
    shape = SimpleNamespace(model_config=SimpleNamespace(dtype="torch.float32", quantization=None),
                            parallel_config=SimpleNamespace(world_size=1))
    found = set[str]()
    for commit, keyed in product(("1f", "2e"), (True, False)):
        monkeypatch.setattr(vllm_start, "code_digest", lambda root, folders, of=commit: f"{folders[0]}@{of}")
        found.add(vllm_start.identity_of(shape, tiny_folder, "0.32.0", {}, keyed).kernels)
    assert len(found) == 3 and all(f"slipstream choosing@{of} slipstream_vllm@{of}" in "; ".join(found)
                                   for of in ("1f", "2e"))


async def test_a_begun_answer_goes_past_targets_of_another_identity() -> None:
    whole = answer_bytes(echo_request())[:30]
    dying, other, same = EchoTarget(fail_after=2, error=Unavailable("gone")), EchoTarget(), EchoTarget()
    other.identity, same.waiting, other.waiting = OTHER, 20, 10
    balancer = await balanced(dying, other, same)
    assert await read(balancer.submit(echo_request())) == whole
    assert (len(other.requests), len(same.requests)) == (0, 1)


async def test_before_its_first_token_an_answer_may_go_anywhere() -> None:
    dying, other = EchoTarget(fail_after=0, error=Unavailable("gone")), EchoTarget()
    other.identity, other.waiting = OTHER, 10
    balancer = await balanced(dying, other)
    assert await read(balancer.submit(echo_request())) == answer_bytes(echo_request())[:30]


async def test_who_does_not_say_what_it_serves_finishes_nobody_s_answer() -> None:
    dying, silent = EchoTarget(fail_after=2, error=Unavailable("gone")), EchoTarget()
    dying.identity = silent.identity = None
    silent.waiting = 10
    balancer = await balanced(dying, silent)
    with pytest.raises(ModelChanged):
        await read(balancer.submit(echo_request()))
    assert not silent.requests


async def test_a_model_that_was_exchanged_since_the_last_poll_refuses_a_begun_answer() -> None:
    """Its address is the same, and the router does not know yet."""
    dying, exchanged = EchoTarget(fail_after=2, error=Unavailable("gone")), EchoTarget()
    exchanged.waiting = 10
    balancer = await balanced(dying, exchanged)
    exchanged.identity = OTHER
    with pytest.raises(ModelChanged):
        await read(balancer.submit(echo_request()))
    assert [request.answered > 0 for request in exchanged.requests] == [True] and not exchanged.running


async def test_a_model_that_was_exchanged_since_the_last_poll_takes_new_answers() -> None:
    only = EchoTarget()
    balancer = await balanced(only)
    only.identity = OTHER
    assert await read(balancer.submit(echo_request())) == answer_bytes(echo_request())[:30]
    assert [request.identity for request in only.requests] == [EchoTarget().identity, OTHER]


async def test_each_answer_says_whose_it_is(tiny_folder: Path) -> None:
    """Who trains on answers has to know which weights gave them."""
    only = EchoTarget()
    async with routing(tiny_folder, only) as r:
        for identity in (only.identity, OTHER, None):
            only.identity = identity
            right = None if identity is None else identity.tag
            for path, asked in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "hello", "n": 2})):
                whole = (await r.post(path, max_tokens=3, **asked)).json()
                chunks = events((await r.post(path, stream=True, max_tokens=3, **asked)).text)
                assert {chunk["system_fingerprint"] for chunk in (whole, *chunks)} == {right}


class Distant(EchoTarget):
    """What it says to the first answer takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.arrives = asyncio.Event()

    def submit(self, request: Request) -> EchoAnswer:
        self.requests.append(request)
        return (Delayed if len(self.requests) == 1 else EchoAnswer)(self, request)


class Delayed(EchoAnswer):
    async def __aiter__(self) -> AsyncIterator[Piece]:
        assert isinstance(self.target, Distant)
        await self.target.arrives.wait()
        async for piece in EchoAnswer.__aiter__(self):
            yield piece


async def test_who_hears_of_an_exchanged_model_behind_others_is_answered_as_they_are() -> None:
    """It was asked of the model before, and meanwhile the router has learned of the new one from somebody else."""
    only = Distant()
    balancer = await balanced(only)
    only.identity = OTHER
    late = asyncio.create_task(read(balancer.submit(echo_request())))
    await settled()
    assert await read(balancer.submit(echo_request())) == answer_bytes(echo_request())[:30]
    only.arrives.set()
    assert await late == answer_bytes(echo_request())[:30]


async def test_the_error_has_a_name_on_both_surfaces(tiny_folder: Path) -> None:
    dying, other = EchoTarget(fail_after=2, error=Unavailable("gone")), EchoTarget()
    other.identity, other.waiting = OTHER, 10
    async with routing(tiny_folder, dying, other) as r:
        whole = await r.post("/v1/chat/completions", messages=HELLO)
        assert whole.status_code == 503 and whole.headers["retry-after"] == "1"
        assert whole.json()["error"]["type"] == "model_changed"
        async with AsyncClient(f"127.0.0.1:{r.service.grpc_port}") as client:
            with pytest.raises(ModelChanged, match="no longer served"):
                _ = [delta async for delta in client.chat("hello")]


def test_whatever_changes_an_answer_changes_the_hash(tiny_folder: Path, tmp_path: Path) -> None:
    def folder(name: str) -> Path:
        return Path(shutil.copytree(tiny_folder, tmp_path / name))

    copy, weights, config = folder("copy"), folder("weights"), folder("config")
    tensors = load_file(weights / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 1e-6
    save_file(tensors, weights / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((config / "config.json").read_text())
    (config / "config.json").write_text(json.dumps(raw | {"rms_norm_eps": 2e-5}))
    hashes = [weights_hash(place) for place in (tiny_folder, copy, weights, config)]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3


async def test_kinds_of_numbers_are_told_apart(tiny_folder: Path) -> None:
    found = []
    for dtype in ("float32", "float32", "float64"):
        async with target(tiny_folder, dtype=dtype) as rig:
            found.append((await rig.service.info()).identity)
    assert found[0] == found[1] and found[0] is not None and found[2] == replace(found[0], dtype="float64")


def test_kernels_that_round_otherwise_are_told_apart(tiny_folder: Path) -> None:
    """A target on which a trial of kernels failed is another one, though it was configured alike."""
    config, tensors, section = ModelConfig.from_folder(tiny_folder), load_tensors(tiny_folder), ModelSection()
    torch_s = TorchAttention(config, torch.float32)

    class Paged(TorchAttention):
        pass

    def decoder(ops: LayerOps, attention: TorchAttention) -> Decoder:
        return Decoder(config, tensors, torch.float32, torch.device("cpu"), ops, attention)

    fused = replace(TORCH, name="fused")
    models: list[CausalModel] = [decoder(TORCH, torch_s), decoder(fused, torch_s), decoder(TORCH, Paged(
        config, torch.float32)), GraphedDecoder(decoder(TORCH, torch_s), torch_s, capture_eager),
        HFModel.from_folder(tiny_folder, "float32", "cpu")]
    found = [identity_of(model, section, "w") for model in models]
    assert len({identity.tag for identity in found}) == len(models)
    assert identity_of(decoder(TORCH, torch_s), section, "w") == found[0]
    assert transformers.__version__ in found[-1].kernels


def test_commits_that_compute_otherwise_are_told_apart(tiny_folder: Path, tmp_path: Path) -> None:
    """Two of one release round and choose as each does: an answer went on at the other's target in an upgrade."""
    model, section = load_model(tiny_folder, ModelSection(kernels="torch")), ModelSection()
    assert f" {code_digest(ROOT, CHOICE_PACKAGES)}, torch" in identity_of(model, section, "w").kernels
    file = tmp_path / "engine" / "native" / "products.h"
    file.parent.mkdir(parents=True)
    found = set[str]()
    for content in ("", "// sums", "// sums", "// sums of other order"):
        file.write_text(content)
        code_digest.cache_clear()
        found.add(code_digest(tmp_path, CHOICE_PACKAGES))
    assert len(found) == 3
    code_digest.cache_clear()


async def test_an_identity_travels(tiny_folder: Path) -> None:
    info = replace(await EchoTarget().info(), identity=OTHER)
    assert decode_info(encode_info(info)) == info
    request = replace(echo_request(), identity=OTHER)
    assert list(decode_answer_requests(encode_answer_request(7, request))) == [(7, request)]
    refused = replace(request, identity=replace(OTHER, kernels="x" * 300))
    [(_, error)] = decode_answer_requests(encode_answer_request(7, refused))
    assert "identity.kernels" in str(error)


async def test_a_target_that_drains_is_asked_last_and_only_for_what_is_begun() -> None:
    whole = answer_bytes(echo_request())[:30]
    ending, other = EchoTarget(fail_after=2, error=Draining("bye")), EchoTarget()
    other.identity, other.waiting = OTHER, 10
    balancer = await balanced(ending, other)
    answer = balancer.submit(echo_request())
    tokens = list((await anext(aiter(answer))).tokens)
    assert tokens + await read(answer) == whole
    assert len(ending.requests) > 1 and not other.requests
    assert await read(balancer.submit(echo_request())) == whole and len(other.requests) == 1, "a new one"
    same = EchoTarget()
    balancer = await balanced(ending, other, same)
    same.waiting = 20
    await balancer.poll()
    before = len(ending.requests)
    assert await read(balancer.submit(echo_request())) == whole
    assert (len(ending.requests), len(same.requests)) == (before + 1, 1)


@pytest.mark.parametrize("engine", ["decoder", "hf"])
def test_a_model_keeps_its_weights_when_a_trainer_writes_others_into_their_file(tmp_path: Path, engine: str) -> None:
    folder, other = (write_tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    model = load_model(folder, ModelSection.model_validate({"dtype": "float32", "engine": engine}))
    before = Sessions(model).run({0: [1, 2, 3, 4]})
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    assert torch.equal(Sessions(model).run({0: [1, 2, 3, 4]}), before)


async def test_a_target_refuses_a_folder_that_is_written_while_it_is_read(tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """It would answer with the weights that it has read and tell routers of those that came after."""
    folder, other = (write_tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1))

    def load(*given: Any) -> CausalModel:
        model = load_model(*given)
        (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
        return model

    monkeypatch.setattr(assembly, "load_model", load)
    config = Config.model_validate({"model": {"path": str(folder), "dtype": "float32"}})
    with pytest.raises(ModelError, match="changed while they were read"):
        assembly.build(config, asyncio.get_running_loop())
