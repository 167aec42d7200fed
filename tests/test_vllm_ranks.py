"""Which rank of vLLM's engine speaks with drafts, and what the others do, without vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slipstream_vllm import remote, signals
from slipstream_vllm.options import Options
from slipstream_vllm.remote import RemoteDrafter, is_drafting_rank

from slipstream.base.errors import ConfigError
from slipstream.following.rounds import SOCKET
from slipstream.protocol.messages import TargetHello
from target_service.vllm import StepReports


def parallel(rank: int, tensor: int = 1, stages: int = 1, backend: str = "mp") -> Any:
    """As much of ``ParallelConfig`` as is read."""
    return SimpleNamespace(rank=rank, world_size=tensor * stages, pipeline_parallel_size=stages,
                           distributed_executor_backend=backend)


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_the_rank_whose_proposals_vllm_takes_speaks(tensor: int) -> None:
    assert [rank for rank in range(tensor) if is_drafting_rank(parallel(rank, tensor))] == [0]


@pytest.mark.parametrize(("rank", "drafts"), [(0, ("draft:8052",)), (1, ())])
def test_a_model_has_the_name_under_which_vllm_serves_it(rank: int, drafts: tuple[str, ...], tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """In metrics, beside vLLM's own, and in the logs of drafts, of which only one rank knows."""
    links = list[tuple[Options, TargetHello]]()
    monkeypatch.setattr(remote, "adapt", lambda kind: None)
    monkeypatch.setattr(remote, "Links", lambda options, hello, *_: links.append((options, hello)))
    model = SimpleNamespace(model=str(tmp_path), served_model_name="llama", tokenizer=str(tmp_path), max_model_len=64,
                            tokenizer_revision=None,
                            hf_text_config=SimpleNamespace(hidden_size=4, num_hidden_layers=2),
                            get_vocab_size=lambda: 260)
    drafter = RemoteDrafter(SimpleNamespace(
        model_config=model, speculative_config=SimpleNamespace(num_speculative_tokens=4),
        additional_config={"slipstream": {"drafts": ["draft:8052"]}}, parallel_config=parallel(rank, tensor=2)))
    assert [(options.drafts, hello.model_id) for options, hello in links] == [(drafts, "llama")]
    page = drafter.metrics.registry.page("")[1].decode()
    assert 'slipstream_drafts_connected{model="llama",service="target"}' in page


def test_ranks_that_schedule_for_themselves_are_refused() -> None:
    with pytest.raises(ConfigError, match="external_launcher"):
        is_drafting_rank(parallel(1, 2, backend="external_launcher"))
    for rank in range(4):  # of a trainer's processes, each with an engine of its own
        assert is_drafting_rank(parallel(rank, backend="external_launcher")), "one rank has nobody to part from"


def test_a_pipeline_is_refused() -> None:
    for rank in range(4):
        with pytest.raises(ConfigError, match="pipeline_parallel_size"):
            is_drafting_rank(parallel(rank, 2, 2))


@pytest.mark.parametrize("ending", ["first", "second", "alone"])
def test_a_signal_to_all_is_left_to_the_target_that_serves_the_answers(ending: str, tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """As systemd and a terminal send it. What ends the engine: the target, a second signal, or one while nobody is
    there any more."""
    heard = list[int]()
    before = {number: signal.signal(number, lambda number, _: heard.append(number))
              for number in (signal.SIGTERM, signal.SIGINT)}
    (tmp_path / "of").mkdir()  # which goes with it
    rounds = StepReports(tmp_path / "of" / "rounds")

    def loop(_: Any) -> None:
        if ending != "alone":
            signal.raise_signal(signal.SIGINT)
            assert not heard, "answers run"
        if ending == "first":
            rounds.close()
        elif ending == "alone":
            rounds._socket.close()
        signal.raise_signal(signal.SIGTERM)

    kinds = {name: type(name, (), {"run_busy_loop": loop, "worker_busy_loop": loop, "__init__": lambda _: None})
             for name in ("EngineCoreProc", "DPEngineCoreProc", "WorkerProc")}
    for module in ("engine.core", "executor.multiproc_executor"):
        monkeypatch.setitem(sys.modules, f"vllm.v1.{module}", SimpleNamespace(**kinds))
    monkeypatch.setenv(SOCKET, str(rounds.path))
    try:
        signals.patch()
        kinds["WorkerProc"]().worker_busy_loop()
        assert heard == [signal.SIGTERM]
    finally:
        for number, theirs in before.items():
            signal.signal(number, theirs)
        rounds.close()


def stays() -> None:
    """As a process of vLLM's, which waits for what does not come."""
    signals.patch()
    print(os.getpid(), flush=True)
    signal.pause()


def test_they_end_with_a_target_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import multiprocessing, sys
class Proc:
    run_busy_loop = worker_busy_loop = print
for module in ("engine.core", "executor.multiproc_executor"):
    sys.modules["vllm.v1." + module] = Proc
Proc.EngineCoreProc = Proc.DPEngineCoreProc = Proc.WorkerProc = Proc
from tests.test_vllm_ranks import stays
multiprocessing.get_context("fork").Process(target=stays).start()
"""
    monkeypatch.setenv(SOCKET, "nobody's")
    target = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert target.stdout is not None
    begun = int(target.stdout.readline())
    target.kill()
    target.wait()
    try:
        assert target.stdout.read() == "", "its output is open for as long as it is there"
    finally:
        with suppress(ProcessLookupError):
            os.kill(begun, signal.SIGKILL)
