"""The token map: which files are maps, and that a mapped drafter ranks its tokens exactly as the whole one does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slipstream.base.config import DraftSection, GrowthSection, ModelSection
from slipstream.base.errors import ConfigError, ModelError
from slipstream.drafting import create
from slipstream.drafting.heads.target_checkpoint import TargetCheckpoint
from slipstream.drafting.standalone import StandaloneNetwork
from slipstream.drafting.token_map import CONVERSION, load_token_map
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.kv import KVPool
from slipstream.engine.loading import load_model
from slipstream.engine.model import ModelConfig
from slipstream.engine.runner import ModelRunner
from slipstream.protocol.messages import Open
from slipstream.protocol.requests import Sampling
from tests.eagle_folder import write_eagle2_folder, write_eagle_folder
from tests.growth_rules import scored_paths
from tests.tiny import VOCAB, write_tiny_model

IDS = [250, 7, 65, 66, 101, 0, 259, 32]
Tensor = torch.Tensor


def as_json(folder: Path, ids: Any = IDS) -> Path:
    path = folder / "map.json"
    path.write_text(json.dumps(ids))
    return path


def as_tensor(folder: Path, name: str = "token_map", ids: Tensor | None = None) -> Path:
    path = folder / "map.safetensors"
    save_file({name: torch.tensor(IDS) if ids is None else ids}, path)
    return path


@pytest.mark.parametrize("write", [as_json, as_tensor, lambda f: as_tensor(f, "hot_token_id"),
                                   lambda f: as_tensor(f, ids=torch.tensor(IDS, dtype=torch.int32))])
def test_published_forms_are_read(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    assert load_token_map(write(tmp_path), VOCAB).tolist() == sorted(IDS)


def written(content: str, name: str = "map.json") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(content)
        return folder / name
    return write


@pytest.mark.parametrize(("write", "match"), [
    (written("", "freq_32768.pt"), r"draft.token_map: .*freq_32768\.pt is a pickle.*convert it once.*json\.dump"),
    (lambda folder: folder / "none.json", "draft.token_map: .*cannot be read: No such file"),
    (written("[1, 2"), "neither JSON nor"),
    (written("[" * 100_000), "neither JSON nor"),
    (written('{"ids": [1, 2, 3]}'), "expected a list of token ids"),
    (written("[1, 2, 3.5]"), "expected a list of token ids"),
    (written("[1, 2, true]"), "expected a list of token ids"),
    (written("[1, 2, 260]"), "from 1 to 260, expected 0 to 259: .*another vocabulary"),
    (written("[-1, 2, 3]"), "from -1 to 3, expected 0 to 259"),
    (written("[1, 2, 3, 2]"), "4 token ids, 3 of them distinct"),
    (written("[1, 2]"), r"2 token ids, expected at least 3 \(draft.growth.topk\)"),
    (written("[]"), "0 token ids, expected at least 3"),
    (written("junk", "map.safetensors"), "not readable as safetensors"),
    (lambda folder: as_tensor(folder, "d2t"), "expected one tensor called token_map or hot_token_id, found d2t"),
    (lambda folder: as_tensor(folder, ids=torch.ones(4)), "expected a list of integers, found torch.float32"),
    (lambda folder: as_tensor(folder, ids=torch.ones(4, dtype=torch.complex64)), "expected a list of integers, found"),
    (lambda folder: as_tensor(folder, ids=torch.ones(2, 2, dtype=torch.int64)), r"expected a list of integers.*2, 2"),
])
def test_what_is_no_map_is_refused(tmp_path: Path, write: Callable[[Path], Path], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        load_token_map(write(tmp_path), VOCAB, 3)


@pytest.mark.parametrize("ids", [IDS, torch.tensor(IDS)])
def test_a_map_that_is_a_pickle_is_converted_as_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           ids: object) -> None:
    """Those of FR-Spec are lists, and what was told was for a tensor."""
    command = CONVERSION.partition("a JSON list, ")[2]
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-c", f"import json, torch\nfrom torch import tensor\nids = {ids!r}\n{command}"],
                   check=True)
    assert load_token_map(tmp_path / "map.json", VOCAB).tolist() == sorted(IDS)


@pytest.mark.parametrize("tied", [False, True])
def test_a_mapped_model_has_the_columns_of_the_whole_one(tmp_path: Path, tied: bool) -> None:
    folder = write_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    model = load_model(folder, ModelSection(dtype="float64"))
    ids = load_token_map(as_json(tmp_path), VOCAB)
    whole, mapped = StandaloneNetwork(ModelRunner(model, 8)), StandaloneNetwork(
        ModelRunner(model, 8), vocabulary=ids, lm_head=TargetCheckpoint.of(folder).lm_head(ids))
    for wanted in ("all", "last"):
        builder = BatchBuilder()
        builder.add(list(b"a map"), range(5), range(5), np.zeros(0, np.int64), logits=wanted)
        batch = builder.build()
        logits = mapped.forward(batch).logits
        assert torch.allclose(logits, whole.forward(batch).logits[:, ids], rtol=0, atol=1e-12)
        assert mapped.vocabulary is not None and torch.equal(mapped.vocabulary, ids) and mapped.race is None


def section(folder: Path, kind: str, token_map: str = "") -> DraftSection:
    growth = GrowthSection(num_steps=2, topk=3, num_draft_tokens=6)
    return DraftSection(drafter=kind, model=str(folder), dtype="float64", growth=growth, token_map=token_map)


def children(folder: Path, token_map: str = "") -> dict[int, float]:
    """What a standalone drafter proposes below the root, with scores."""
    drafter = create(section(folder, "standalone", token_map), ModelSection(), 64)
    drafter.open([Open(1, np.array(list(b"the cat"), np.int32), 7, Sampling())])
    return {path[0]: score for path, score in scored_paths(drafter.grow([1], [6])[0]).items() if len(path) == 1}


def test_a_mapped_drafter_proposes_target_ids(tmp_path: Path, tiny_folder: Path) -> None:
    """The best tokens of the map by the whole model's logits, under their own ids."""
    logits = first_logits(tiny_folder)
    ids = sorted(int(i) for i in torch.topk(logits, 40).indices[10:])  # the best ten are missing
    found = children(tiny_folder, str(as_json(tmp_path, ids)))
    scores = logits[ids].log_softmax(0)
    wanted = torch.topk(scores, 3)
    assert list(found) == [ids[i] for i in wanted.indices.tolist()]
    assert list(found.values()) == pytest.approx(wanted.values.tolist(), abs=1e-5)
    assert list(children(tiny_folder)) == torch.topk(logits, 3).indices.tolist()


def test_a_sampled_session_on_our_kernels_draws_from_the_map(tmp_path: Path) -> None:
    """The kernels' own way to draw takes a column's number for its token."""
    folder = write_tiny_model(tmp_path / "draft", hidden_size=64, intermediate_size=176, head_dim=32)
    mapped = section(folder, "standalone", str(as_json(tmp_path, list(range(100, 140)))))
    drafter = create(mapped.model_copy(update={"dtype": "bfloat16"}), ModelSection(), 64)
    drafter.open([Open(1, np.array(list(b"the cat"), np.int32), 7, Sampling(temperature=1.0, seed=3))])
    (growth,) = drafter.grow([1], [6])
    assert len(growth.tokens) == 6 and set(growth.tokens.tolist()) <= set(range(100, 140))


def first_logits(folder: Path) -> Tensor:
    model, config = load_model(folder, ModelSection(dtype="float64")), ModelConfig.from_folder(folder)
    pool = KVPool(config.num_layers, 8, config.num_kv_heads, config.head_dim, torch.float64)
    builder = BatchBuilder()
    builder.add(list(b"the cat"), range(7), range(7), np.zeros(0, np.int64), logits="last")
    return model.logits(model.forward(builder.build(), pool)[0][-1:])[0]


def test_a_map_of_padding_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, vocab=VOCAB + 60)
    made = as_json(tmp_path, [65, *range(VOCAB, VOCAB + 8)])
    section = DraftSection(drafter="standalone", model=str(folder), token_map=str(made),
                           growth=GrowthSection(num_steps=2, topk=2, num_draft_tokens=4))
    with pytest.raises(ModelError, match=r"draft\.token_map: 1 of its tokens"):
        create(section, ModelSection(), 64)


def test_settings_reach_the_drafters(tmp_path: Path, tiny_folder: Path) -> None:
    path = str(as_json(tmp_path))
    model = ModelSection(path=str(tiny_folder))
    head = write_eagle2_folder(tmp_path / "head")
    drafter = create(section(head, "eagle2", path), model, 64)
    assert (drafter.name, drafter.vocab_size, drafter.hidden_size) == ("eagle2", VOCAB, 48)
    with pytest.raises(ModelError, match=r"draft.token_map: .*2 token ids, expected at least 3"):
        create(section(head, "eagle2", str(as_json(tmp_path, [1, 2]))), model, 64)


@pytest.mark.parametrize("kind", ["eagle3", "ngram"])
def test_a_map_that_would_be_ignored_is_an_error(tmp_path: Path, tiny_folder: Path, kind: str) -> None:
    head = write_eagle_folder(tmp_path / "head")
    with pytest.raises(ConfigError, match=r"draft\.token_map: an .*leave it out"):
        create(section(head, kind, str(as_json(tmp_path))), ModelSection(path=str(tiny_folder)), 64)
