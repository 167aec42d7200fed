"""Names, folders, preparation and the vocabulary's hash."""

from __future__ import annotations

import hashlib
import json
import pwd
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders
from tokenizers import models as token_models

from slipstream.base.config import Config
from slipstream.base.errors import ConfigError, ModelError
from slipstream.models.folder import (
    HEADS,
    KNOWN,
    KnownModel,
    is_prepared,
    list_models,
    packaged_file,
    prepare,
    resolve,
    resolve_drafter,
    tokenizer_hash,
)
from tests.small_gguf import small_metadata, small_tensors, write_gguf


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", small_metadata(), small_tensors())


def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes) -> dict[str, KnownModel]:
    """An importable package that carries ``content``, and the registry that knows it."""
    package = tmp_path / "site" / f"carrier_{name}"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "small.gguf").write_bytes(content)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return {name: KnownModel(name, "small", package.name, "small.gguf", hashlib.sha256(content).hexdigest(),
                             f"pip install {package.name}", "Apache-2.0")}


def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is prepared for this user."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_prepare_once(small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = packaged(tmp_path, monkeypatch, "once", small_gguf.read_bytes())
    dest = tmp_path / "models" / "once"
    assert prepare("once", dest, known=known) == dest
    assert is_prepared(dest) and resolve(dest) == dest
    assert [path.name for path in dest.parent.iterdir()] == ["once"]
    written = (dest / "model.safetensors").stat().st_mtime_ns
    prepare("once", dest, known=known)
    assert (dest / "model.safetensors").stat().st_mtime_ns == written
    receipt = json.loads((dest / "slipstream.json").read_text())
    assert receipt["source"]["sha256"] == known["once"].sha256


def test_incomplete_folder_is_prepared_again(small_gguf: Path, tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    known = packaged(tmp_path, monkeypatch, "again", small_gguf.read_bytes())
    dest = prepare("again", tmp_path / "again", known=known)
    (dest / "model.safetensors").write_bytes(b"")
    assert not is_prepared(dest)
    prepare("again", dest, known=known)
    assert is_prepared(dest)


def test_many_preparing_at_once_agree(small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = packaged(tmp_path, monkeypatch, "race", small_gguf.read_bytes())
    dest = tmp_path / "models" / "race"
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: prepare("race", dest, known=known), range(4)))
    assert folders == [dest] * 4 and is_prepared(dest)
    assert [path.name for path in dest.parent.iterdir()] == ["race"]


def test_failed_preparation_leaves_nothing(small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk: a file cannot grow beyond some size, which the weights are above."""
    known, limits = packaged(tmp_path, monkeypatch, "late", small_gguf.read_bytes()), getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(ModelError, match=r"cannot write .*its size in disk"):
            prepare("late", tmp_path / "models" / "late", known=known)
    finally:
        setrlimit(RLIMIT_FSIZE, limits)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_folder_that_cannot_be_written_says_how_to_name_another(small_gguf: Path, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    known = packaged(tmp_path, monkeypatch, "tiny", small_gguf.read_bytes())
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"cannot write .*another folder with --to"):
        prepare("tiny", tmp_path / "file" / "tiny", known=known)


def test_no_name_is_no_folder() -> None:
    with pytest.raises(ModelError, match="no model is named: give a folder"):
        resolve("")


def test_another_file_than_the_pinned_one_is_refused(small_gguf: Path, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    known = packaged(tmp_path, monkeypatch, "pinned", small_gguf.read_bytes())
    carried = packaged_file(known["pinned"])
    carried.write_bytes(carried.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ModelError, match="sha256"):
        prepare("pinned", tmp_path / "pinned", known=known)


def test_a_folder_of_somebody_else_is_left_alone(small_gguf: Path, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    known = packaged(tmp_path, monkeypatch, "mine", small_gguf.read_bytes())
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").write_text("text")
    with pytest.raises(ModelError, match="not prepared by slipstream"):
        prepare("mine", tmp_path / "theirs", known=known)
    assert (tmp_path / "theirs" / "thesis.txt").read_text() == "text"


def test_missing_package_gives_the_command(tmp_path: Path) -> None:
    absent = KnownModel("absent", "", "no_such_package", "x.gguf", "", "pip install no-such-package", "")
    with pytest.raises(ModelError, match="pip install no-such-package"):
        prepare("absent", tmp_path / "absent", known={"absent": absent})


def test_resolve_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_cache(tmp_path, monkeypatch)
    with pytest.raises(ModelError, match="slipstream models prepare smollm2-135m"):
        resolve("smollm2-135m")
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        resolve("smollm-135m")
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(tmp_path)
    with pytest.raises(ModelError, match=r"hf download Qwen/Qwen3-0\.6B --local-dir"):
        resolve("Qwen/Qwen3-0.6B")
    with pytest.raises(ModelError, match="give the folder of safetensors"):
        resolve(tmp_path / "model.Q4_1.gguf")
    with pytest.raises(ModelError, match="known: smollm2-135m"):
        prepare("gpt-99", tmp_path / "x")
    with pytest.raises(ModelError, match="give the folder of safetensors"):
        prepare(str(tmp_path / "model.Q4_1.gguf"))
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "model.safetensors").write_bytes(b"weights")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"^head/model\.safetensors: a model is a folder .*: give head$"):
        resolve("head/model.safetensors")
    (tmp_path / "of_gguf").mkdir()
    (tmp_path / "of_gguf" / "model.Q4_1.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"of_gguf/model\.Q4_1\.gguf: a GGUF file is no model here"):
        resolve(tmp_path / "of_gguf")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"a model's folder is served as it is.*model\.path.*--dtype"):
        prepare(str(tmp_path))


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a number without a name in a container: each command ended in a traceback."""
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match="set HOME"):
        resolve_drafter(Config())


def test_listing_names_every_known_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_cache(tmp_path, monkeypatch)
    listed = list_models()
    assert [model.name for model in listed] == [*KNOWN, *HEADS]
    assert not any(model.prepared for model in listed if model.name in KNOWN)


def test_heads_come_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_cache(tmp_path, monkeypatch)
    monkeypatch.setattr("slipstream.models.folder.HEADS_ROOT", tmp_path)
    name = "smollm2-135m-eagle3"
    with pytest.raises(ModelError, match="train-head --target smollm2-135m,"):
        resolve(name)
    assert not any(model.prepared for model in list_models())
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="lacks it"):
        resolve(name)
    (tmp_path / name / "model.safetensors").write_bytes(b"")
    assert resolve(name) == tmp_path / name
    assert [model.name for model in list_models() if model.prepared] == [name]


def test_hash_is_of_the_vocabulary_alone(tiny_folder: Path, tmp_path: Path) -> None:
    original = json.loads((tiny_folder / "tokenizer.json").read_text())

    def folder(name: str, **changes: Any) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "tokenizer.json").write_text(json.dumps(original | changes, indent=4))
        return path

    vocab: dict[str, int] = original["model"]["vocab"]
    backwards = dict(reversed(vocab.items()))
    assert tokenizer_hash(folder("same", model=original["model"] | {"vocab": backwards})) == tokenizer_hash(tiny_folder)
    swapped = vocab | {"!": vocab['"'], '"': vocab["!"]}
    assert tokenizer_hash(folder("other", model=original["model"] | {"vocab": swapped})) != tokenizer_hash(tiny_folder)
    more = Tokenizer(token_models.BPE(vocab=vocab, merges=[]))
    more.decoder = decoders.ByteLevel()
    more.add_special_tokens(["<|more|>"])
    (tmp_path / "more").mkdir()
    more.save(str(tmp_path / "more" / "tokenizer.json"))
    assert tokenizer_hash(tmp_path / "more") != tokenizer_hash(tiny_folder)


def test_hash_of_a_broken_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
        tokenizer_hash(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        tokenizer_hash(tmp_path)


def test_import_is_light() -> None:
    code = ("import sys, slipstream.models.folder, router_service.text.tokens; "
            "print(sorted({'torch', 'transformers', 'gguf', 'safetensors'} & sys.modules.keys()))")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert run.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def default_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = prepare("smollm2-135m", tmp_path_factory.mktemp("real") / "smollm2-135m")
    yield folder
    (folder / "model.safetensors").unlink()  # half a gigabyte


@pytest.mark.real
def test_default_model(default_model: Path) -> None:
    assert is_prepared(default_model)
    assert tokenizer_hash(default_model) == "caf0a7d6e05ebc74476affa031dcd0a954796b0f7891210dcbaa53623b64a846"
    weights = load_file(default_model / "model.safetensors")
    assert len(weights) == 272 and weights["model.embed_tokens.weight"].shape == (49152, 576)
    assert all(np.isfinite(values).all() for values in weights.values())
