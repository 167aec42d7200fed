"""An attention that computes something else than torch's does not serve, on a GPU in name."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from slipstream.engine.attention import Attention, PageTensors, TorchAttention, disagreement
from slipstream.engine.decoder import Decoder
from slipstream.engine.flashinfer import FlashInferAttention, attention_for
from slipstream.engine.graphs import CudaCapture, GraphedDecoder, Replay
from slipstream.engine.kv import KVPool
from tests.pretended import GPU, pretended
from tests.test_pretended import SIZES, Kernel, attended, config, library
from tests.tiny import tiny_config, tiny_tensors

CPU = torch.device("cpu")


def chosen(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Attention:
    with pretended() as gpu:
        monkeypatch.setitem(sys.modules, "flashinfer", library(gpu, kernel))
        return attention_for(config(), torch.bfloat16, GPU, lambda *_: "")


def blind_to_trees(q: torch.Tensor, kv: torch.Tensor, pages: PageTensors, scale: float) -> torch.Tensor:
    return attended(q, kv, PageTensors(*list(pages)[:5], torch.where(pages.words != 0, -1, 0)), scale)


def blind_to_lengths(q: torch.Tensor, kv: torch.Tensor, pages: PageTensors, scale: float) -> torch.Tensor:
    return attended(q, kv, PageTensors(*list(pages)[:4], pages.limits + 1, pages.words), scale)


def unscaled(q: torch.Tensor, kv: torch.Tensor, pages: PageTensors, scale: float) -> torch.Tensor:
    return attended(q, kv, pages, 1.0)


def missing(q: torch.Tensor, kv: torch.Tensor, pages: PageTensors, scale: float) -> torch.Tensor:
    raise RuntimeError("no kernel image is available for execution on the device")


def test_one_that_computes_what_torch_does_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(chosen(attended, monkeypatch), FlashInferAttention)


@pytest.mark.parametrize("kernel", [blind_to_trees, blind_to_lengths, unscaled, missing])
def test_torch_serves_in_its_place(kernel: Kernel, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(chosen(kernel, monkeypatch), TorchAttention)
    told = capsys.readouterr().out
    assert ("no kernel image" if kernel is missing else "of its length") in told


def test_torchs_own_pages_pass() -> None:
    assert disagreement(TorchAttention(config(), torch.float32), config(), torch.float32, CPU) == ""


def test_graphs_that_replay_something_else_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful:
        """Leaves out what it captured last."""

        def __init__(self) -> None:
            self._capture = CudaCapture(GPU)

        def __call__(self, run: Callable[[], None]) -> Replay:
            replay = self._capture(run)
            del gpu.graphs[-1].calls[-8:-4]
            return replay

    shape = config()
    with pretended() as gpu:
        monkeypatch.setitem(sys.modules, "flashinfer", library(gpu, attended))
        attention = FlashInferAttention(shape, torch.bfloat16, GPU)
        tensors = tiny_tensors(tiny_config(num_attention_heads=4, num_key_value_heads=2, head_dim=64))
        decoder = Decoder(shape, tensors, torch.bfloat16, GPU, attention=attention)
        right = GraphedDecoder(decoder, attention, CudaCapture(GPU), SIZES)
        wrong = GraphedDecoder(decoder, attention, Forgetful(), SIZES)
        pool = KVPool(shape.num_layers, right.spare_slots, shape.num_kv_heads, shape.head_dim, torch.bfloat16, GPU)
        assert right.warm(pool, 3) == len(SIZES)
        assert wrong.warm(pool, 3) == 0
