"""A model that several ranks compute together is the model; and when one is gone, the others say so and end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.fleet import Process, free_port
from slipstream.base.config import ModelSection
from slipstream.base.errors import ModelError, RanksLost, Unavailable
from slipstream.base.offload import main_command
from slipstream.drafting.ngram import NgramDrafter
from slipstream.engine.attention import Attention, TorchAttention
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.decoder import Decoder
from slipstream.engine.graphs import GraphedDecoder, Replay, Size, capture_eager
from slipstream.engine.loading import load_model
from slipstream.engine.model import ModelConfig, Tensors, load_tensors
from slipstream.engine.orders import (
    ForwardOrder,
    Group,
    LogitsOrder,
    Rendezvous,
    WarmOrder,
    decode_order,
    encode_order,
    pipe_of,
)
from slipstream.engine.ranks import RankedModel, part_config, part_of, ranked_model, split_for
from slipstream.engine.runner import ModelRunner
from slipstream.observe.vitals import Vitals, wait_until_stopped
from slipstream.protocol.requests import Request, Sampling
from slipstream.wire.target import TargetClient
from tests.pair import drafting, local_link, target
from tests.tiny import write_tiny_model

TEXT = b"The ranks of a model sum what each of them has."
CPU = torch.device("cpu")

RANKS = "slipstream.engine.ranks"  # a target has other children: one tries grammars


def with_biases(folder: Path) -> Path:
    """The folder, with a bias wherever a Llama may have one."""
    dice = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    biases = {name.replace("weight", "bias"): torch.randn(tensor.shape[0], generator=dice)
              for name, tensor in tensors.items() if "_proj" in name}
    save_file(tensors | biases, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose vocabulary does not divide, with biases on both sides of the sums."""
    return with_biases(write_tiny_model(tmp_path_factory.mktemp("ranks"), vocab=263, attention_bias=True,
                                        mlp_bias=True))


def section(ranks: int = 2, **settings: object) -> ModelSection:
    return ModelSection.model_validate({"dtype": "float64", "threads": 1, "tensor_parallel": ranks, **settings})


@pytest.fixture
def cut(folder: Path) -> Iterator[RankedModel]:
    model = ranked_model(folder, section())
    yield model
    model.close()


def prompt() -> ForwardBatch:
    builder = BatchBuilder()
    builder.add(list(TEXT), range(len(TEXT)), list(range(len(TEXT))), np.zeros(0, np.int64), logits="last")
    return builder.build()


def tree() -> ForwardBatch:
    """A tree of four nodes and a plain step behind the prompt."""
    builder, first = BatchBuilder(), len(TEXT)
    builder.add([7, 8, 9, 10], [first, first + 1, first + 1, first + 2], [60, 61, 62, 63], np.arange(first),
                [1, 3, 5, 11], 4)
    builder.add([9], [first], [70], np.arange(first))
    return builder.build()


class Threads:
    """Ranks as threads of one process: the group of one of them."""

    def __init__(self, rank: int, ranks: int, table: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.ranks, self._table, self._barrier = rank, ranks, table, barrier

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(sum(self._all(x)))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(x), -1)

    def all_agree(self, ok: bool) -> bool:
        return not float(self.all_reduce(torch.tensor([float(not ok)])))

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._table[self.rank] = x.clone()
        self._barrier.wait(10)
        found = list(self._table)
        self._barrier.wait(10)
        return found


def part_decoder(config: ModelConfig, tensors: Tensors, group: Threads, attention: Attention | None = None) -> Decoder:
    """A rank's part of the model with this config and these tensors."""
    split = split_for(config, tensors, cast(Group, group), torch.float64, CPU)
    return Decoder(part_config(config, group.ranks), tensors, torch.float64, CPU, attention=attention, split=split)


@pytest.mark.parametrize(("kind", "ranks", "tied", "changes"), [
    ("llama", 2, False, {}), ("qwen2", 2, True, {}), ("mistral", 4, True, {}), ("qwen3", 4, False, {}),
    ("llama", 4, False, {"hidden_size": 50, "attention_bias": True, "mlp_bias": True})])
def test_every_family_cut_in_parts_is_whole(tmp_path: Path, kind: str, ranks: int, tied: bool,
                                            changes: dict[str, int]) -> None:
    """Also where the width, which no rank has a part of, does not divide: biases behind a sum were added by each."""
    written_to = write_tiny_model(tmp_path, kind, num_key_value_heads=ranks, tie_word_embeddings=tied, **changes)
    if changes:
        with_biases(written_to)
    whole = load_model(written_to, ModelSection(dtype="float64"))
    table, barrier = [torch.empty(0)] * ranks, threading.Barrier(ranks)

    def run(rank: int) -> torch.Tensor:
        group = Threads(rank, ranks, table, barrier)
        runner = ModelRunner(part_decoder(whole.config, load_tensors(written_to), group), 80)
        assert runner.pool.kv.shape[3] == 1
        return torch.cat([group.all_gather(runner.forward(batch)) for batch in (prompt(), tree())])

    runner = ModelRunner(whole, 80)
    right = torch.cat([runner.forward(batch) for batch in (prompt(), tree())])
    with ThreadPoolExecutor(ranks) as pool:
        for found in pool.map(run, range(ranks)):
            assert float((found - right).abs().max()) < 1e-12


def test_a_tensor_that_nothing_reads_is_no_matter_for_ranks_either(tmp_path: Path) -> None:
    """Of one device it is a warning, whatever its name looks like."""
    folder = write_tiny_model(tmp_path)
    tensors = load_tensors(folder) | {"spare": torch.zeros(3), "o_proj": torch.zeros(())}
    config = load_model(folder, ModelSection(dtype="float64")).config
    group = Threads(0, 2, [torch.empty(0)] * 2, threading.Barrier(1))
    assert part_decoder(config, tensors, group).config == part_config(config, 2)
    name = "model.layers.1.self_attn.o_proj.weight"
    with pytest.raises(ModelError, match=name):
        part_decoder(config, tensors | {name: torch.zeros(48)}, group)


def test_two_processes_give_the_logits_and_states_of_one(folder: Path, cut: RankedModel) -> None:
    whole = load_model(folder, ModelSection(dtype="float64"))
    for _ in range(2):  # each runner has a pool of its own
        runners = [ModelRunner(model, 128) for model in (whole, cut)]
        for runner in runners:
            runner.set_taps((1, 2))
        for batch in (prompt(), tree()):
            right, found = (runner.forward(batch) for runner in runners)
            assert found.shape == right.shape == (len(batch.logit_rows), 263)
            assert float((found - right).abs().max()) < 1e-12
            right, found = (runner.features(batch.host.slots) for runner in runners)
            assert float((found - right).abs().max()) < 1e-12
    assert cut.logits(torch.empty(0, 48, dtype=torch.float64)).shape == (0, 263)
    assert runners[1].pool.kv.shape[3] == 1 and runners[0].pool.kv.shape[3] == 2


async def test_answers_of_two_ranks_are_those_of_one_with_drafts_and_without(folder: Path, cut: RankedModel) -> None:
    requests = [Request("r", tuple(TEXT * 2), sampling, 24) for sampling in (Sampling(), Sampling(temperature=0.9))]
    texts = []
    for around in (lambda model: model, lambda model: cut):
        async with target(folder, around=around) as rig, drafting(NgramDrafter(8)) as peers:
            plain = [await rig.answer(request) for request in requests]
            async with local_link(rig, peers):
                drafted = [await rig.answer(request) for request in requests]
            await rig.check()
            texts.append([[token for piece in pieces for token in piece.tokens] for pieces in (*plain, *drafted)])
    assert texts[0] == texts[1] and len(texts[0][0]) == 24


async def test_a_killed_rank_ends_the_other_with_its_name(cut: RankedModel) -> None:
    vitals = Vitals("target")
    cut.watch(partial(vitals.report_lost, "a rank"))
    runner = ModelRunner(cut, 128)
    runner.forward(prompt())
    os.kill(cut.pids[0], signal.SIGKILL)
    with pytest.raises(RanksLost, match=r"rank 1 of 2 has ended \(signal 9\)"):
        await wait_until_stopped(asyncio.Event(), vitals)
    with pytest.raises(RanksLost, match=r"rank 1 of 2 has ended \(signal 9\)"):
        runner.forward(tree())
    vitals.disarm_exit()  # or this process ends, too


def test_a_rank_that_dies_in_a_step_ends_it(cut: RankedModel) -> None:
    runner = ModelRunner(cut, 128)
    runner.forward(prompt())
    os.kill(cut.pids[0], signal.SIGSTOP)  # takes the order, and never sums
    threading.Timer(0.5, os.kill, (cut.pids[0], signal.SIGKILL)).start()
    with pytest.raises(RanksLost, match=r"rank 1 of 2 has ended \(signal 9\)"):
        runner.forward(tree())


def test_an_error_inside_of_a_step_ends_all_ranks_and_every_call_after_it(cut: RankedModel) -> None:
    """Ranks that are out of step would sum what does not belong together."""
    runner = ModelRunner(cut, 128)
    builder = BatchBuilder()
    builder.add([9999], [0], [0], np.zeros(0, np.int64))  # beyond the vocabulary: it fails before any sum
    with pytest.raises(RanksLost, match=r"ranks of the model are out of step|rank 1 of 2 has ended \(exit code 1\)"):
        runner.forward(builder.build())
    with pytest.raises(RanksLost):
        runner.forward(prompt())
    with pytest.raises(RanksLost):
        cut.logits(torch.zeros(1, 48, dtype=torch.float64))


@pytest.mark.skipif(sys.platform != "linux", reason="nobody else limits another process")
def test_a_rank_that_has_no_memory_in_a_step_ends_it(cut: RankedModel) -> None:
    """Rank 0 has, and waits for its sum."""
    runner = ModelRunner(cut, 1 << 16)  # whose pool the other has not made yet
    rank = psutil.Process(cut.pids[0])
    rank.rlimit(psutil.RLIMIT_AS, (rank.memory_info().vms + (1 << 20),) * 2)
    with pytest.raises(RanksLost, match=r"rank 1 of 2 has ended"):
        runner.forward(prompt())


def test_ranks_end_with_whoever_started_them(folder: Path) -> None:
    """Also right behind a step, whose tensors torch's threads may still hold: one of ten ended with SIGABRT."""
    model = ranked_model(folder, section())
    (process,) = model._ranks._processes
    ModelRunner(model, 128).forward(prompt())
    model.close()
    assert process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_rank_whose_first_one_dies_within_a_message_ends_without_a_word() -> None:
    """Its traceback read as the cause."""
    own, given = socket.socketpair()
    with given, own:
        rank = subprocess.Popen([*main_command(RANKS), str(given.fileno())], pass_fds=(given.fileno(),),
                                stderr=subprocess.PIPE)
        own.sendall(struct.pack("!i", 1000) + b"[1, 4")
    assert (rank.communicate(timeout=60)[1], rank.returncode) == (b"", 0)


def test_a_rank_is_ours_whatever_lies_in_the_folder_that_one_stands_in(folder: Path, tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('not the one you think')")
    monkeypatch.chdir(tmp_path)
    ranked_model(folder, section()).close()


class Served:
    """A target of two ranks as a process."""

    def __init__(self, folder: Path, log: Path) -> None:
        listen, metrics = free_port(), free_port()
        self.process = Process("target_service", (
            f"model.path={folder}", "model.dtype=float64", "model.tensor_parallel=2", "model.threads=1",
            "target.drafts=[]", "target.slots=4096", f"target.listen=127.0.0.1:{listen}",
            f"target.metrics_listen=127.0.0.1:{metrics}"), metrics, log)
        self.client = TargetClient(f"127.0.0.1:{listen}")

    async def __aenter__(self) -> Served:
        self.process.start()
        await self.process.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        self.process.stop()

    def rank(self) -> psutil.Process:
        (child,) = (one for one in psutil.Process(self.process.pid).children() if RANKS in str(one.cmdline()))
        return child

    async def ended(self) -> int:
        assert self.process.process is not None
        return await asyncio.to_thread(self.process.process.wait, 30)


async def test_a_service_that_loses_a_rank_in_mid_answer_says_so_and_ends(folder: Path, tmp_path: Path) -> None:
    async with Served(folder, tmp_path / "log") as served:
        rank = served.rank()
        with pytest.raises(Unavailable):
            async for _ in served.client.submit(Request("r", tuple(TEXT), Sampling(), 1900)):
                with suppress(psutil.NoSuchProcess):  # its parent sees to it that nothing of it is left
                    rank.kill()
        assert await served.ended() == 1
    assert "rank 1 of 2 has ended (signal 9): a model that is split" in (tmp_path / "log").read_text()


async def test_a_service_of_two_ranks_stops_as_any_other(folder: Path, tmp_path: Path) -> None:
    async with Served(folder, tmp_path / "log") as served:
        rank = served.rank()
        rank.terminate()  # systemd tells all processes of a unit, and rank 0 drains
        pieces = [piece async for piece in served.client.submit(Request("r", tuple(TEXT), Sampling(), 8))]
        assert sum(len(piece.tokens) for piece in pieces) == 8
        served.process.signal(signal.SIGTERM)
        assert await served.ended() == 0
        assert not rank.is_running()
    log = (tmp_path / "log").read_text()
    assert "ranks ready" in log and "stopped" in log and "lost" not in log and "Traceback" not in log


@pytest.mark.parametrize("fails", [False, True])
def test_captured_steps_of_ranks_are_those_of_one(folder: Path, fails: bool) -> None:
    """Also where one of them alone has no memory for a graph: the others tried theirs, step by step, without it."""
    whole = load_model(folder, ModelSection(dtype="float64"))
    table, barrier = [torch.empty(0)] * 2, threading.Barrier(2)

    def run(rank: int) -> torch.Tensor:
        group = Threads(rank, 2, table, barrier)
        paged = TorchAttention(part_config(whole.config, 2), torch.float64)
        decoder = part_decoder(whole.config, load_tensors(folder), group, paged)
        captured = 0

        def capture(run: Callable[[], None]) -> Replay:
            nonlocal captured
            replay, captured = capture_eager(run), captured + 1
            if fails and rank == 1 and captured == 1:
                raise RuntimeError("out of memory")
            return replay

        model = GraphedDecoder(decoder, paged, capture, [Size(8, 3), Size(48, 1)], group.all_agree)
        runner = ModelRunner(model, 80, model.spare_slots)
        runner.pool.kv.zero_()
        assert model.warm(runner.pool, 2) == 2 - fails
        return torch.cat([group.all_gather(runner.forward(batch)) for batch in (prompt(), tree())])[:, :263]

    runner = ModelRunner(whole, 80)
    right = torch.cat([runner.forward(batch) for batch in (prompt(), tree())])
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(run, range(2)):
            assert float((found - right).abs().max()) < 1e-12


def test_a_group_agrees_on_what_went_well_on_all_of_its_ranks() -> None:
    group = Rendezvous(1).join(0, 1, CPU)
    try:
        assert [group.all_agree(well) for well in (True, False, True)] == [True, False, True]
    finally:
        group.close()


@pytest.mark.parametrize(("settings", "problem"), [
    ({"ranks": 3}, "num_attention_heads 4 of this model does not divide by 3"),
    ({"ranks": 4}, "num_key_value_heads 2 of this model does not divide by 4"),
    ({"engine": "hf"}, "for engine decoder"), ({"kernels": "native"}, "without kernels native"),
    ({"device": "cuda:1"}, "cannot be shared out"), ({"device": "cuda", "ranks": 16}, "16 GPUs are wanted"),
])
def test_what_cannot_be_cut_is_refused_before_a_process_is_started(folder: Path, settings: dict[str, object],
                                                                   problem: str) -> None:
    with pytest.raises(ModelError, match=f"model.tensor_parallel: .*{problem}"):
        part_of(folder, section(**settings))  # type: ignore[arg-type]


def test_what_a_rank_cannot_load_is_told_in_its_words(tmp_path: Path) -> None:
    broken = write_tiny_model(tmp_path)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is missing"):
        ranked_model(broken, section())


def test_an_order_takes_four_bytes_a_slot() -> None:
    builder = BatchBuilder()
    builder.add([5], [10_000], [10_000], np.arange(10_000))
    assert len(encode_order(ForwardOrder(0, 20_000, (), builder.build()))) < 4 * 10_100


def test_orders_arrive_as_they_were_given() -> None:
    builder = BatchBuilder()
    builder.add([5], [4], [9], np.array([1, 2, 3, 8]))
    builder.add([6, 7], [3, 4], [10, 11], np.arange(100, 164), [1, (1 << 63) | 2], 64, "last")
    batch = builder.build()
    found = decode_order(encode_order(ForwardOrder(3, 4096, (2, 5), batch)), CPU)
    assert isinstance(found, ForwardOrder) and (found.pool, found.num_slots, found.taps) == (3, 4096, (2, 5))
    got = found.batch
    assert (got.q_indptr, got.kv_indptr, got.mask_lens) == (batch.q_indptr, batch.kv_indptr, batch.mask_lens)
    for name in ("tokens", "positions", "slots", "words", "logit_rows", "kv_slots"):
        assert torch.equal(getattr(got, name), getattr(batch, name)), name
        assert np.array_equal(getattr(got.host, name), getattr(batch.host, name)), name
    for order in (LogitsOrder(7), WarmOrder(1, 64, 9)):
        assert decode_order(encode_order(order), CPU) == order


def test_messages_are_whole_and_the_end_of_a_pipe_is_an_error() -> None:
    left, right = map(pipe_of, socket.socketpair())
    sent = [b"", b"x" * 3_000_000, b"last"]
    sending = threading.Thread(target=lambda: [left.send_bytes(message) for message in sent])
    sending.start()
    assert [right.recv_bytes() for _ in sent] == sent
    sending.join()
    left.close()
    with pytest.raises(EOFError):
        right.recv_bytes()
    with pytest.raises(OSError):
        right.send_bytes(b"x" * 3_000_000)
