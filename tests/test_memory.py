from __future__ import annotations

import pytest
import torch

from bench.gpu.shapes import LLAMA_8B, config_of
from slipstream.base.errors import ConfigError
from slipstream.engine.runner import Memory, slot_bytes, step_bytes
from slipstream.observe.log import refuse_private

CONFIG = config_of(LLAMA_8B)
GB = 10**9


def test_bytes_of_a_published_shape() -> None:
    # Llama 3.1 8B: 32 layers of 8 heads of 128, K and V, and three states of 4096 numbers.
    assert slot_bytes(CONFIG, torch.bfloat16) == 2 * 32 * 8 * 128 * 2 + 3 * 4096 * 2
    # 512 rows: logits of 128256 tokens alone are a gigabyte.
    assert 1.0e9 < step_bytes(CONFIG, torch.bfloat16, 512) < 1.4e9


def test_slots_leave_room_for_a_step() -> None:
    memory = Memory(80 * GB, 60 * GB, 150_000, 2 * GB)
    assert memory.slots(1000) == 1000
    most = memory.slots(10**9)
    assert most * 150_000 + 2 * GB <= 0.9 * 60 * GB < (most + 2) * 150_000 + 2 * GB
    assert Memory(80 * GB, GB, 150_000, 2 * GB).slots(10) == 0


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    memory = Memory(80 * GB, 10 * GB, 150_000, 2 * GB)
    memory.check(memory.slots(10**9))
    with pytest.raises(ConfigError, match=r"target.slots: 131136 tokens need 19.67 GB .* 10.0 GB that are free"):
        memory.check(131_136)


def test_the_report_adds_up() -> None:
    found = Memory(80 * GB, 60 * GB, 150_000, 2 * GB).report(100_000)
    assert found == {"total": 80.0, "free_beside_model": 60.0, "slots": 15.0, "largest_step": 2.0, "left": 43.0}
    assert refuse_private(None, "info", {"gb": found}) == {"gb": found}, "no word of it may be a word for texts"


def test_this_machine_has_memory() -> None:
    memory = Memory.of(CONFIG, torch.bfloat16, torch.device("cpu"), 16)
    assert 0 < memory.free <= memory.total and memory.slots(1) in (0, 1)


def test_what_loading_let_go_of_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [12 * GB]  # by torch, for later
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 * GB - sum(kept), 80 * GB))
    assert Memory.of(CONFIG, torch.bfloat16, torch.device("cuda"), 16).free == 64 * GB
