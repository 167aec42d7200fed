"""What a model computes on a device that is not the CPU stays there: no operation mixes devices, and none makes the
host wait for a number, but where answers come back; what is captured reads nothing of the host. No such device is
needed: torch's fake tensors stand on one that computes nothing, and refuse what it would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.gpu.shapes import SMALL, config_of, decoder_shapes, head_shapes
from slipstream.choosing.logits import FIRST_WIDTH, TokenHistory
from slipstream.choosing.sampling import ChoiceRows, choices, log_probabilities, rank
from slipstream.drafting.graph import Shape, TreeGraph
from slipstream.drafting.heads.block import BlockNetwork
from slipstream.drafting.heads.block_checkpoint import BlockHead
from slipstream.drafting.heads.checkpoint import EagleHead
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.heads.mtp import DecoderLayers, MtpNetwork
from slipstream.drafting.heads.mtp_checkpoint import MIMO, MtpHead, MtpLayer
from slipstream.drafting.network import Network
from slipstream.engine.attention import Attend, PagePlan, PageTensors, TorchAttention, page_tensors, plan_pages
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.decoder import Decoder
from slipstream.engine.graphs import CapturedStep, Replay, Size, capture_eager
from slipstream.engine.kv import KVPool, SlotTable
from slipstream.engine.mirror import Mirror
from slipstream.engine.model import ModelConfig, TrackedTensors
from slipstream.engine.ops.layer import layer_shapes
from slipstream.protocol.messages import Features
from slipstream.protocol.requests import Sampling

THERE, KIND = torch.device("meta"), torch.bfloat16
CONFIG = config_of(SMALL)
HIDDEN, VOCAB, SLOTS, SPARE = CONFIG.hidden_size, CONFIG.vocab_size, 200, 100
NOTHING = np.zeros(0, np.int64)


@pytest.fixture(name="elsewhere")
def computing_elsewhere() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        yield


class Capturing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A graph would read what the host had when it was captured."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        near = [leaf for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"]
        if near:
            raise RuntimeError(f"{operation} reads the host's memory")
        return operation(*args, **(kwargs or {}))


def captured(run: Callable[[], None]) -> Replay:
    with Capturing():  # type: ignore[no-untyped-call]
        return capture_eager(run)


def empty(shapes: dict[str, tuple[int, ...]], device: torch.device = THERE) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=KIND, device=device) for name, shape in shapes.items()}


def pool_of(config: ModelConfig) -> KVPool:
    return KVPool(config.num_layers, SLOTS + SPARE, config.num_kv_heads, config.head_dim, KIND, THERE)


class Listed:
    """A paged attention that reads what kernels read."""

    def plan(self, batch: ForwardBatch) -> Attend:
        return ListedRows(page_tensors(plan_pages(batch), batch.device))

    def fixed(self, pages: PageTensors, own_plan: bool = False) -> ListedRows:
        return ListedRows(pages)


class ListedRows:
    def __init__(self, pages: PageTensors) -> None:
        self._pages = pages

    def replan(self, plan: PagePlan) -> bool:
        return True

    def __call__(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        pages = self._pages
        read = kv.index_select(0, pages.indices.to(torch.int64)).sum() + pages.q_indptr.sum() + pages.kv_indptr.sum()
        return (q.flatten(1) + read + (pages.firsts + pages.limits + pages.words)[:, None]).to(KIND)


def batch_of(states: torch.Tensor | None = None, tree: bool = True) -> ForwardBatch:
    """A prompt and, if wanted, a tree behind another."""
    builder = BatchBuilder()
    builder.add(range(5), range(5), range(5), NOTHING, logits="last")
    if tree:
        builder.add([1, 2, 3], [4, 5, 5], [50, 51, 52], np.arange(20, 24), [1, 3, 5], 3)
    return builder.build(THERE, states)


@pytest.mark.usefixtures("elsewhere")
def test_the_fakes_refuse_what_a_device_would() -> None:
    rows, near = torch.empty(3, 4, device=THERE), torch.zeros(2, dtype=torch.int64)
    refused: list[Callable[[], object]] = [
        lambda: rows + torch.ones(3, 4), lambda: rows.index_select(0, near), lambda: bool(rows.any()),
        lambda: rows.nonzero(), lambda: rows.max().item()]
    for operation in refused:
        with pytest.raises(RuntimeError):
            operation()

    def copied() -> None:
        rows.copy_(torch.ones(3, 4))

    with pytest.raises(RuntimeError, match="reads the host's memory"):
        captured(copied)


@pytest.mark.usefixtures("elsewhere")
def test_steps_of_a_model() -> None:
    for attention in (TorchAttention(CONFIG, KIND), Listed()):
        model, pool = Decoder(CONFIG, empty(decoder_shapes(CONFIG)), KIND, THERE, attention=attention), pool_of(CONFIG)
        batch = batch_of()
        hidden, tapped = model.forward(batch, pool, (0, 2, CONFIG.num_layers))
        assert tapped is not None and tapped.shape == (8, 3 * HIDDEN)
        assert model.logits(hidden.index_select(0, batch.logit_rows)).shape == (4, VOCAB)


@pytest.mark.usefixtures("elsewhere")
def test_captured_steps_over_a_table() -> None:
    attention, pool, table = Listed(), pool_of(CONFIG), SlotTable(range(SLOTS, SLOTS + SPARE))
    model = Decoder(CONFIG, empty(decoder_shapes(CONFIG)), KIND, THERE, attention=attention)
    row, builder = table.add_row(100), BatchBuilder()
    row.write(0, np.arange(30))
    builder.add_row([1, 2, 3], [30, 31, 31], [40, 41, 42], row, 30, [1, 3, 5], 3)
    indices = torch.zeros(2 * pool.num_slots, dtype=torch.int32, device=THERE)
    step = CapturedStep(model, attention, indices, Size(8, 2), pool, range(SLOTS, SLOTS + 8), (1,), captured)
    done = step(builder.build(THERE), Mirror(table, THERE))
    assert done is not None and done[0].shape == (3, HIDDEN) and done[1] is not None


def eagle(joint: bool) -> EagleHead:
    own = ({"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,), "embed_tokens.weight": (VOCAB, HIDDEN),
            "lm_head.weight": (64, HIDDEN), **layer_shapes(CONFIG, "layers.0", input_norm=False)}
           if joint else head_shapes(CONFIG, 64))
    return EagleHead(replace(CONFIG, num_layers=1), HIDDEN, (4,) if joint else (2, 2, 1), empty(own),
                     torch.arange(0, 128, 2), joint=joint)


def blocks() -> BlockHead:
    config, rank, join = replace(CONFIG, num_layers=2, qk_norm=True, sliding_window=4096), 16, "markov_head.joint_proj"
    layers = layer_shapes(config, "layers.0") | layer_shapes(config, "layers.1")
    own = {"fc.weight": (HIDDEN, 3 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,),
           "embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (64, HIDDEN), **layers,
           "markov_head.markov_w1.weight": (VOCAB, rank), "markov_head.markov_w2.weight": (64, rank),
           f"{join}.weight": (3 * rank, 2 * rank + HIDDEN), f"{join}.bias": (3 * rank,),
           "confidence_head.proj.weight": (1, HIDDEN + rank)}
    return BlockHead(config, HIDDEN, (1, 2, 3), 5, 7, False, "rnn", rank, True, True, (False, True), False,
                     empty(own), torch.arange(0, 128, 2))


def mtp(vocabulary: torch.Tensor | None) -> MtpNetwork:
    own = empty(layer_shapes(CONFIG, "model.mtp_layers.0"))
    vector, matrix = torch.empty(HIDDEN, device=THERE), torch.empty(VOCAB, HIDDEN, device=THERE)
    layer = MtpLayer("model.mtp_layers.0", vector, vector, torch.empty(HIDDEN, 2 * HIDDEN, device=THERE), vector)
    head = MtpHead(Path(), MIMO, VOCAB, HIDDEN, 4, 1e-6, (layer,), TrackedTensors(own), matrix, matrix)
    return MtpNetwork(head, DecoderLayers(CONFIG, head, KIND, THERE), "bfloat16", SLOTS, vocabulary)


NETWORKS: dict[str, Callable[[], Network]] = {
    "eagle3": lambda: EagleNetwork(eagle(False), "bfloat16", THERE, SLOTS),
    "eagle2": lambda: EagleNetwork(eagle(True), "bfloat16", THERE, SLOTS),
    "block": lambda: BlockNetwork(blocks(), "bfloat16", THERE, SLOTS), "mtp": lambda: mtp(None)}


@pytest.mark.parametrize("kind", NETWORKS)
def test_rows_of_a_head(kind: str, request: pytest.FixtureRequest) -> None:
    network = NETWORKS[kind]()
    request.getfixturevalue("elsewhere")
    spec = network.features
    assert spec is not None
    content = bytes(5 * spec.width * KIND.itemsize)
    (states,) = network.read([Features(1, 0, content, 5, "bfloat16")])
    output = network.forward(batch_of(states, tree=False))
    assert output.logits.shape[1] == (VOCAB if kind == "mtp" else 64)
    if output.block is not None and output.block.markov is not None and output.block.states is not None:
        markov, tokens = output.block.markov, torch.zeros(1, dtype=torch.int64).to(THERE)
        carried = markov.begin(output.block.states, tokens)
        bias, _, chance = markov.step(tokens, output.block.states[:, 0], carried)
        assert bias is not None and chance is not None and (bias @ markov.rows(tokens).T).shape == (1, 1)


def test_levels_of_a_captured_tree(request: pytest.FixtureRequest) -> None:
    network, shape = EagleNetwork(eagle(False), "bfloat16", THERE, SLOTS, spare_slots=SPARE), Shape(2, 4, 3)
    request.getfixturevalue("elsewhere")
    loop = TreeGraph(network, Listed(), shape, False, captured)
    assert {buffer.device for buffer in loop.buffers()} == {THERE}


ASKED = {
    "greedy": Sampling(), "sampled": Sampling(temperature=1.0, seed=3),
    "filtered": Sampling(temperature=0.5, top_k=5, top_p=0.9, min_p=0.1),
    "adjusted": Sampling(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=((3, 1.0),),
                         min_tokens=4, stop_token_ids=(7,)),
    "adjusted, greedy": Sampling(repetition_penalty=1.2, presence_penalty=0.1)}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.usefixtures("elsewhere")
def test_choices_wait_for_nothing(name: str) -> None:
    """Of a vocabulary that is looked at whole: a search in a wider one asks whether it has found enough."""
    width, sampling = FIRST_WIDTH - 24, ASKED[name]
    logits = torch.empty(6, width, device=THERE)
    history = TokenHistory.of(sampling, [1, 2, 3], 2)
    for allowed in (None, np.full((3, width // 32 + 1), 0xFFFFFFFF, np.uint32)):
        asked = ChoiceRows(sampling, range(3), range(3), [0] * 3, history, [[4, 5]] * 3, allowed)
        other = ChoiceRows(Sampling(temperature=2.0), range(3, 6), range(3), [0] * 3, None, [()] * 3)
        assert choices(logits, [asked, other]).device == THERE
        tokens, scores = rank(logits[:3], asked, 4)
        assert tokens.device == scores.device == THERE
        if not sampling.greedy:
            assert log_probabilities(logits[:3], asked).device == THERE
