"""What ``draft.drafter: auto`` stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.base.config import Config, load
from slipstream.base.errors import ConfigError
from slipstream.drafting import create
from slipstream.drafting.ngram import NgramDrafter
from slipstream.models.folder import (
    FORMAT,
    HEADS,
    HEADS_ROOT,
    RECEIPT,
    default_root,
    head_for,
    resolve,
    resolve_drafter,
)


def head_folder(root: Path) -> Path:
    folder = root / "smollm2-135m-eagle3"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return root


def test_a_shipped_head_is_for_its_target_by_name_or_prepared_folder(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.models.folder.HEADS_ROOT", head_folder(tmp_path))
    for target in ("smollm2-135m", str(default_root() / "smollm2-135m")):
        assert head_for(target) is HEADS["smollm2-135m-eagle3"]
    assert head_for("/models/another") is None
    volume = tmp_path / "models/whatever"
    volume.mkdir(parents=True)
    (volume / "config.json").write_text("{}")
    for name in ("smollm2-135m", "another"):
        (volume / RECEIPT).write_text(json.dumps({"format": FORMAT, "name": name, "files": {"config.json": 2}}))
        assert (head_for(str(volume)) is not None) == (name == "smollm2-135m")
    (volume / RECEIPT).write_text(json.dumps({"format": FORMAT, "name": "smollm2-135m", "files": {"config.json": 2}}))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert head_for("~/models/whatever") is not None and head_for("~nobody-here/whatever") is None
    monkeypatch.setattr("slipstream.models.folder.HEADS_ROOT", tmp_path / "nothing")
    assert head_for("smollm2-135m") is None


def test_a_model_without_a_head_gets_ngrams() -> None:
    config = resolve_drafter(load(None, ("model.path=/models/another",)))
    assert (config.draft.drafter, config.draft.model) == ("ngram", "")
    assert isinstance(create(load().draft, config.model), NgramDrafter)


def test_the_default_model_gets_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, also where a folder of its name is in the way."""
    monkeypatch.chdir(head_folder(tmp_path))
    draft = resolve_drafter(Config()).draft
    assert (draft.drafter, Path(draft.model)) == ("eagle3", HEADS_ROOT / "smollm2-135m-eagle3")
    assert resolve(draft.model) == HEADS_ROOT / "smollm2-135m-eagle3"


def test_a_named_drafter_is_left_alone() -> None:
    config = load(None, ("draft.drafter=ngram",))
    assert resolve_drafter(config) == config


@pytest.mark.parametrize("override", ["draft.model=somewhere", "draft.token_map=ids.json"])
def test_what_only_a_named_drafter_knows_is_refused(override: str) -> None:
    field = override.partition("=")[0]
    with pytest.raises(ConfigError, match=field):
        resolve_drafter(load(None, (override,)))
