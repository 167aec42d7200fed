from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from bench.gpu.shapes import LLAMA_8B, config_of
from deploy.values import DraftValues, PodValues, TargetValues
from slipstream.base.config import DraftSection, ModelSection, TargetSection
from slipstream.base.errors import ConfigError, ModelError
from slipstream.drafting import create
from slipstream.drafting.heads.checkpoint import read_head
from slipstream.drafting.standalone import StandaloneNetwork
from slipstream.engine import ranks
from slipstream.engine.attention import TorchAttention, plan_attention, plan_pages
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.decoder import Decoder
from slipstream.engine.device import Memory, default_slots, kv_bytes, slot_bytes, step_bytes
from slipstream.engine.graphs import GraphedDecoder, capture_eager
from slipstream.engine.loading import load_model
from slipstream.engine.model import ModelConfig
from slipstream.engine.orders import Group
from slipstream.models.folder import resolve, resolve_draft_section
from slipstream.observe.log import refuse_private
from target_service.assembly import gathers, slots_for

CONFIG = config_of(LLAMA_8B)
GB = 10**9


def test_bytes_of_a_published_shape() -> None:
    # Llama 3.1 8B: 32 layers of 8 heads of 128, K and V, and three states of 4096 numbers.
    assert slot_bytes(CONFIG, torch.bfloat16) == 2 * 32 * 8 * 128 * 2 + 3 * 4096 * 2
    # 512 rows: logits of 128256 tokens alone are a gigabyte.
    assert 1.0e9 < step_bytes(CONFIG, torch.bfloat16, 512) < 1.4e9


def test_a_step_has_room_for_what_torch_s_attention_gathers_and_masks() -> None:
    """A chunk at the end of a long context has a mask as large as all its logits."""
    context, builder = 4000, BatchBuilder()
    for first in (0, 5000):
        slots = np.arange(first, first + 2 * context, 2)  # no run: they are gathered
        builder.add([0] * 100, range(100), list(range(20_000 + first, 20_100 + first)), slots)
    plan = plan_attention(plan_pages(builder.build()), CONFIG.group, torch.bfloat16, torch.device("cpu"))
    masks = sum(part.mask.nbytes for part in plan if part.mask is not None)
    gathered = max(part.size[0] * part.size[2] for part in plan) * kv_bytes(CONFIG, torch.bfloat16) // CONFIG.num_layers
    usual, beside = (step_bytes(CONFIG, torch.bfloat16, 200, tokens) for tokens in (0, context + 100))
    assert masks > 10**6 and masks + gathered <= beside - usual < 10**9


def test_kernels_that_read_slots_need_no_room_for_a_context(tiny_folder: Path) -> None:
    torchs = load_model(tiny_folder, ModelSection(dtype="float64"))
    assert gathers(torchs)
    graphs = GraphedDecoder(cast(Decoder, torchs), TorchAttention(torchs.config, torch.float64), capture_eager)
    assert not gathers(graphs)


@pytest.mark.parametrize(("slots", "told"), [
    (10, "target.slots: 10 are too few for one answer and its tree: at least 192, or 0"),
    (10**12, r"target.slots: 1000000000000 tokens need .* GB that are free .*: lower target.slots")])
def test_slots_that_cannot_be_had_are_refused_by_name(slots: int, told: str, tiny_folder: Path) -> None:
    model = load_model(tiny_folder, ModelSection(dtype="float64"))
    with pytest.raises(ConfigError, match=told):
        slots_for(TargetSection(slots=slots), model, 64)
    assert slots_for(TargetSection(max_sessions=1), model, 8) == slots_for(TargetSection(slots=192), model, 8) == 192


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


def test_a_model_or_draft_that_does_not_fit_is_refused_in_a_sentence(tiny_folder: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 224.00 MiB. GPU 0 has 23.68 GiB.\nSee ...")

    for place in (Decoder, StandaloneNetwork):
        monkeypatch.setattr(place, "__init__", full)
    model = ModelSection(path=str(tiny_folder), dtype="float64")
    section = DraftSection(drafter="standalone", model=str(tiny_folder), dtype="float64")
    told = "does not fit into the memory of its device: OutOfMemoryError: CUDA out of memory.* 23.68 GiB.$"
    with pytest.raises(ModelError, match=f"the model {told}"):
        load_model(tiny_folder, model)
    with pytest.raises(ModelError, match=told):
        create(section, model, 600)
    with pytest.raises(ModelError, match=told):
        ranks.load_part(ranks.RankPart(0, 0, str(tiny_folder), model), cast(Group, SimpleNamespace(
            rank=0, ranks=1, all_agree=bool)))


def test_the_report_adds_up() -> None:
    found = Memory(80 * GB, 60 * GB, 150_000, 2 * GB).report(100_000)
    assert found == {"total": 80.0, "free_beside_model": 60.0, "slots": 15.0, "largest_step": 2.0, "left": 43.0}
    assert refuse_private(None, "info", {"gb": found}) == {"gb": found}, "no word of it may be a word for texts"


@pytest.mark.parametrize(("values", "section", "beside_mib"), [(TargetValues, TargetSection, 1600),
                                                              (DraftValues, DraftSection, 400)])
def test_pools_that_are_full_are_within_what_the_chart_requests(values: type[PodValues],
                                                                section: type[TargetSection | DraftSection],
                                                                beside_mib: int) -> None:
    """``beside_mib``: a process with its weights and, of a target, the largest step."""
    folder = resolve(ModelSection().path)
    if values is DraftValues:
        head = resolve(resolve_draft_section(DraftSection(), ModelSection()).model)
        config, a_slot = read_head(head, folder).config, kv_bytes
    else:
        config, a_slot = ModelConfig.from_folder(folder), slot_bytes
    slots = default_slots(config, torch.bfloat16, section().max_sessions, share=1.0)
    assert slots == section().max_sessions * 1024
    requested = re.fullmatch(r"(\d+)Mi", values().resources["requests"]["memory"])
    assert requested and slots * a_slot(config, torch.bfloat16) / 2**20 + beside_mib <= int(requested[1])


def test_this_machine_has_memory() -> None:
    memory = Memory.of(CONFIG, torch.bfloat16, torch.device("cpu"), 16)
    assert 0 < memory.free <= memory.total and memory.slots(1) in (0, 1)


def test_what_loading_let_go_of_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [12 * GB]  # by torch, for later
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 * GB - sum(kept), 80 * GB))
    assert Memory.of(CONFIG, torch.bfloat16, torch.device("cuda"), 16).free == 64 * GB
