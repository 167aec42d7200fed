"""What a step makes the host wait for, on a device that counts it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.choosing.logits import TokenHistory
from slipstream.choosing.sampling import ChoiceRows, choose, rank
from slipstream.drafting.heads.mtp import DecoderLayers, MtpNetwork
from slipstream.drafting.heads.mtp_checkpoint import read_mtp
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.decoder import Decoder
from slipstream.engine.model import ModelConfig, load_tensors
from slipstream.engine.runner import ModelRunner
from slipstream.protocol.requests import Sampling
from tests.far import FAR, crossings, sent
from tests.mtp_folder import mtp_config, write_mtp_target

PENALISED = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": ((7, 2.0),)}
ONE_COPY = [Sampling(), Sampling(temperature=1.0, seed=3), Sampling(**PENALISED),
            Sampling(temperature=0.8, seed=5, min_tokens=9, stop_token_ids=(4,), **PENALISED)]
FILTERED = [Sampling(temperature=0.8, top_p=0.9, seed=3), Sampling(temperature=0.7, top_k=20, seed=3),
            Sampling(temperature=1.2, min_p=0.1, top_p=0.95, seed=8)]


def rows_of(sampling: Sampling, first: int = 0, count: int = 5) -> ChoiceRows:
    history = TokenHistory.of(sampling, (1, 2, 3))
    if history is not None:
        history.append((5, 5, 6))
    paths = [tuple(range(9, 9 + depth)) for depth in range(count)]
    return ChoiceRows(sampling, range(first, first + count), range(20, 20 + count), range(3, 3 + count), history, paths)


def logits_of(rows: int, vocab: int = 3000) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sampling", [*ONE_COPY, *FILTERED])
def test_choices_come_back_in_one_copy(sampling: Sampling) -> None:
    logits = logits_of(5)
    with crossings() as counted:
        found = choose(sent(logits), [rows_of(sampling)])
    assert found == choose(logits, [rows_of(sampling)])
    questions = counted.waits.pop("aten._local_scalar_dense.default", 0)
    assert questions <= (1 if sampling in FILTERED else 0), "a filter asks once whether it looked far enough"
    assert counted.waits == Counter({"aten._to_copy.default": 1})


def test_sessions_of_all_kinds_share_the_copy() -> None:
    sessions = [rows_of(sampling, 5 * i) for i, sampling in enumerate(ONE_COPY)]
    logits = logits_of(5 * len(ONE_COPY))
    with crossings() as counted:
        found = choose(sent(logits), sessions)
    assert found == choose(logits, sessions)
    assert counted.waits == Counter({"aten._to_copy.default": 1})


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)])
def test_a_draft_ranks_without_waiting(sampling: Sampling) -> None:
    logits = logits_of(5)
    with crossings() as counted:
        ids, scores = rank(sent(logits), rows_of(sampling), 6)
        found = ids.cpu(), scores.cpu()
    right = rank(logits, rows_of(sampling), 6)
    assert torch.equal(found[0], right[0]) and float((found[1] - right[1]).abs().max()) < 1e-5
    assert counted.waits == Counter({"aten._to_copy.default": 2}), "the two that this test asks for"


def test_a_forward_waits_for_nothing(tiny_folder: Path) -> None:
    config = ModelConfig.from_folder(tiny_folder)
    tensors = {name: t.double() for name, t in load_tensors(tiny_folder).items()}
    builders = []
    for words in (None, [1, 3, 5]):
        builder = BatchBuilder()
        builder.add([5, 6, 7], [0, 1, 2], [4, 2, 9], np.zeros(0, np.int64), words, 3 if words else 0)
        builder.add([8], [0], [11], np.zeros(0, np.int64))
        builders.append(builder)
    near = ModelRunner(Decoder(config, tensors, torch.float64, torch.device("cpu")), 64)
    near.set_taps((0, 2))
    right = [near.forward(builder.build()) for builder in builders]
    with crossings() as counted:
        runner = ModelRunner(Decoder(config, {name: sent(t) for name, t in tensors.items()}, torch.float64, FAR), 64)
        runner.set_taps((0, 2))
        counted.waits.clear()
        found = [runner.forward(builder.build(FAR)) for builder in builders]
        assert not counted.waits
        for a, b in zip(found, right, strict=True):
            assert float((a.cpu() - b).abs().max()) < 1e-12


def test_layers_that_predict_wait_for_nothing(tmp_path: Path) -> None:
    target = write_mtp_target(tmp_path, mtp_config("mimo", num_nextn_predict_layers=2))
    head, config = read_mtp(target, target), ModelConfig.from_folder(target)
    states = torch.randn(4, config.hidden_size, generator=torch.Generator().manual_seed(1))

    def run(device: torch.device, states: torch.Tensor) -> torch.Tensor:
        layers, builder = DecoderLayers(config, head, torch.float32, device), BatchBuilder()
        network = MtpNetwork(head, layers, "float32", 64)
        builder.add([5, 6, 7], [1, 2, 3], [4, 2, 9], np.zeros(0, np.int64))
        builder.add([8], [4], [11], np.array([4, 2, 9]), [1], 1)
        batch = builder.build(device, states)
        counted.waits.clear()
        return network.forward(batch).logits

    with crossings() as counted:
        found = run(FAR, sent(states))
        assert not counted.waits
        assert torch.equal(found.cpu(), run(torch.device("cpu"), states))
