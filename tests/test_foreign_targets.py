"""Heads for targets of families that our own decoder does not have: they load, and draft beside engine hf without
changing a token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

from slipstream.base.config import DraftSection, GrowthSection, ModelSection
from slipstream.base.errors import ModelError
from slipstream.drafting import create
from slipstream.drafting.heads.checkpoint import read_eagle2_head, read_head
from slipstream.drafting.heads.target_checkpoint import TargetCheckpoint
from slipstream.engine.loading import load_model
from slipstream.engine.model import VISION_TYPES, ModelConfig, load_tensors
from slipstream.engine.runner import ModelRunner
from slipstream.models.folder import read_json
from slipstream.protocol.requests import Sampling
from tests.block_folder import speculators_block_config, write_block_folder
from tests.eagle_folder import eagle2_config, eagle_config, eagle_tensors, write_eagle2_folder, write_eagle_folder
from tests.pair import drafting, local_link, target
from tests.sequences import run
from tests.test_mtp_lossless import requests, tokens_of
from tests.tiny import VOCAB, write_tiny_model

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 2048, "bos_token_id": 256,
    "eos_token_id": 257, "pad_token_id": 258}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1,
       "tie_word_embeddings": False}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": TEXT | MOE, "gemma3_text": TEXT | {"sliding_window": 64},
    "gemma3": {"text_config": TEXT | {"sliding_window": 64, "model_type": "gemma3_text"}, "vision_config": VISION,
               "mm_tokens_per_image": 4, "image_token_index": 259, "boi_token_index": 253, "eoi_token_index": 254},
    "mistral3": {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": VISION | {"head_dim": 8},
                 "image_token_index": 259, "tie_word_embeddings": False}}
CLASSES: dict[str, Any] = {"mistral3": AutoModelForMultimodalLM}  # of others AutoModelForCausalLM
SAMPLINGS = {"greedy": Sampling(), "T1.0": Sampling(temperature=1.0, top_p=0.95, seed=12)}


def write_target(folder: Path, family: str) -> Path:
    """A model folder of the family, with random weights."""
    write_tiny_model(folder)
    torch.manual_seed(0)
    model = CLASSES.get(family, AutoModelForCausalLM).from_config(AutoConfig.for_model(family, **FAMILIES[family]))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim > 1 and "vision" not in name:
                tensor.normal_(0, 1.5 * tensor.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def own_class(folder: Path) -> Any:
    return CLASSES.get(read_json(folder / "config.json")["model_type"], AutoModelForCausalLM)


def write_head(folder: Path, kind: str) -> Path:
    """A head that brings neither the embedding nor the lm_head, where its kind may."""
    if kind == "eagle2":
        return write_eagle2_folder(folder, eagle2_config())
    if kind == "block":
        return write_block_folder(folder, speculators_block_config("dflash", aux_hidden_state_layer_ids=[0, 1, 1]))
    config = eagle_config(hidden_size=48, eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 0, 0]})
    own = {name: tensor for name, tensor in eagle_tensors(config).items()
           if name not in ("embed_tokens.weight", "lm_head.weight")}
    return write_eagle_folder(folder, config, own)


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("foreign"), request.param)


@pytest.fixture(scope="module")
async def plain(folder: Path) -> dict[str, list[list[int]]]:
    async with target(folder, engine="hf") as rig:
        return {name: [tokens_of(await rig.answer(request)) for request in requests(sampling)]
                for name, sampling in SAMPLINGS.items()}


@pytest.mark.parametrize("kind", ["eagle3", "eagle2", "block"])
async def test_answers_equal_plain_decoding(tmp_path: Path, folder: Path, kind: str,
                                            plain: dict[str, list[list[int]]]) -> None:
    section = DraftSection(drafter=kind, model=str(write_head(tmp_path / "head", kind)), dtype="float64",
                           growth=GrowthSection(num_steps=4, topk=4, num_draft_tokens=16))
    drafter = create(section, ModelSection(path=str(folder), dtype="float64", engine="hf"), 1024)
    verified = 0
    async with target(folder, engine="hf") as rig, drafting(drafter) as peers, local_link(rig, peers):
        for name, sampling in SAMPLINGS.items():
            answers = await asyncio.gather(*(rig.answer(request) for request in requests(sampling)))
            assert [tokens_of(pieces) for pieces in answers] == plain[name], name
            verified += sum(piece.drafted for pieces in answers for piece in pieces)
        await rig.check()
    assert verified > 24, "nothing was drafted"


def test_logits_are_those_of_its_own_class(folder: Path) -> None:
    """Also where that sees more than text, as Mistral Small 3.1's does, whose text is a decoder of ours."""
    text, engines = [(7 * i) % 253 for i in range(90)], ["hf"]
    if read_json(folder / "config.json")["model_type"] in VISION_TYPES:
        engines.append("decoder")
    plain = own_class(folder).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for engine in engines:
        section = ModelSection.model_validate({"dtype": "float32", "engine": engine})
        ours = run(ModelRunner(load_model(folder, section), 128), text)[0]
        with torch.inference_mode():
            assert (ours - plain(torch.tensor([text])).logits[0]).abs().max() < 1e-4


@pytest.mark.parametrize("tied", [True, False])
def test_text_of_a_model_that_sees_is_read_by_either_of_its_names(tmp_path: Path, tied: bool) -> None:
    """As libraries write them; config.json need not say whether the embedding is tied, and may say it wrongly."""
    folder = write_target(tmp_path, "mistral3")
    raw, tensors = read_json(folder / "config.json"), load_file(folder / "model.safetensors")
    assert ModelConfig.from_folder(folder).model_type == "mistral" and len(load_tensors(folder)) < len(tensors)
    named = {name.replace("language_model.model.", "model.language_model.").replace("language_model.lm", "lm"): tensor
             for name, tensor in tensors.items() if not (tied and "lm_head" in name)}
    raw["text_config"].pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    save_file(named, folder / "model.safetensors")
    model = load_model(folder, ModelSection(dtype="float32"))
    head = "embed_tokens" if tied else "lm_head"
    weight = next(tensor for name, tensor in tensors.items() if head in name)
    state = torch.randn(1, 48, generator=torch.Generator().manual_seed(0))
    assert (model.logits(state) - state @ weight.T).abs().max() < 1e-4


def test_a_head_borrows_what_the_target_s_own_forward_reads(tmp_path: Path, folder: Path) -> None:
    head = read_eagle2_head(write_eagle2_folder(tmp_path, eagle2_config()), folder)
    model = own_class(folder).from_pretrained(folder)
    assert torch.equal(head.tensors["embed_tokens.weight"], model.get_input_embeddings().weight)
    assert torch.equal(head.tensors["lm_head.weight"], model.get_output_embeddings().weight)


def test_a_target_s_config_may_leave_its_vocabulary_and_its_tie_to_its_tensors(tmp_path: Path) -> None:
    """As Gemma 3's published files do."""
    folder = write_tiny_model(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "hidden_size": 48, "num_hidden_layers": 34}}))
    tensors = load_file(folder / "model.safetensors")
    names = ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight")
    embedding, lm_head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    save_file({names[0]: embedding, names[1]: lm_head}, folder / "model.safetensors")
    lender = TargetCheckpoint.of(folder)
    assert (lender.vocab_size, lender.hidden_size, lender.num_layers) == (VOCAB, 48, 34)
    assert torch.equal(lender.embedding(48), embedding) and torch.equal(lender.lm_head(), lm_head)
    save_file({names[0]: embedding}, folder / "model.safetensors")
    assert torch.equal(lender.lm_head(torch.tensor([3, 5])), embedding[[3, 5]])
    (folder / "config.json").write_text(json.dumps({  # as a library writes both parts, by what each takes for granted
        "model_type": "mistral3", "tie_word_embeddings": True, "text_config": {
            "model_type": "mistral", "hidden_size": 48, "num_hidden_layers": 34, "tie_word_embeddings": False}}))
    assert torch.equal(TargetCheckpoint.of(folder).lm_head(torch.tensor([3, 5])), embedding[[3, 5]])


@pytest.mark.parametrize(("rope", "theta"), [
    ({"rope_theta": 150000, "rope_scaling": {"rope_type": "longrope", "factor": 32.0}}, None),
    ({"rope_theta": 150000, "rope_scaling": {"rope_type": "yarn", "factor": 32.0}}, 150000),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}, None),
    ({"rope_theta": 5e6}, 5e6)])
def test_rotary_positions_that_no_head_has_are_compared_with_none(tmp_path: Path, rope: dict[str, Any],
                                                                  theta: float | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "gpt_oss", "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 24, **rope}))
    found = TargetCheckpoint.of(tmp_path).rope
    assert (found and found[0]) == theta
    head = eagle_config()
    assert read_head(write_eagle_folder(tmp_path / "head", head), tmp_path).taps == (2, 12, 21)


@pytest.mark.parametrize(("field", "value"), [("hidden_size", None), ("num_hidden_layers", "many"), ("vocab_size", 0),
                                              ("tie_word_embeddings", "yes")])
def test_a_fact_that_is_missing_or_wrong_is_named(tmp_path: Path, field: str, value: object) -> None:
    facts = {"model_type": "gpt_oss", "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 24, field: value}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ModelError, match=f"config.json: {field}: expected"):
        TargetCheckpoint.of(tmp_path)
