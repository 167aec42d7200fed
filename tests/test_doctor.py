"""What the doctor finds, on this machine and on a port and a model that are made to be wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from slipstream.base.config import Config, load
from slipstream.cli.commands import app
from slipstream.cli.doctor import Check, checks
from tests.certificates import authority, issue, laid


def found(name: str, config: Config) -> list[Check]:
    return [check for check in checks(config) if check.name == name]


def test_every_problem_comes_with_advice(tiny_folder: Path) -> None:
    listed = checks(Config.model_validate({"model": {"path": str(tiny_folder)}}))
    assert {"python", "grpc", "torch", "cpu", "cuda", "flashinfer", "memory", "disk", "model", "ports"} <= {
        check.name for check in listed}
    assert all(bool(check.advice) == (check.status != "ok") for check in listed), listed
    assert next(check for check in listed if check.name == "python").status == "ok"


def test_a_package_that_was_copied_without_its_metadata_is_of_unknown_version(
        tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flashinfer.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    (check,) = found("flashinfer", Config.model_validate({"model": {"path": str(tiny_folder)}}))
    assert (check.status, check.found) == ("ok", "of unknown version")


def test_what_is_not_installed_is_told_once(tiny_folder: Path) -> None:
    """Each check that needs torch said to reinstall all packages, where one extra is not there."""
    code = ("import sys; sys.modules['torch'] = None\nfrom slipstream.base.config import load\n"
            "from slipstream.cli.doctor import checks\n"
            f"print([one.name for one in checks(load(None, ('model.path={tiny_folder}',))) if one.status == 'fail'])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "['torch']\n", done.stderr


def test_a_taken_port_is_named(tiny_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = Config.model_validate({"router": {"listen": f"127.0.0.1:{port}"}, "model": {"path": str(tiny_folder)}})
        ports = [check for check in found("ports", config) if f":{port}" in check.found]
    assert [check.status for check in ports] == ["warn"]
    assert "router.listen" in ports[0].advice


def test_a_port_that_is_given_twice_is_named(tiny_folder: Path) -> None:
    """A launch refuses it."""
    config = Config.model_validate({"router": {"grpc_listen": "127.0.0.1:1025"}, "target": {"listen": "127.0.0.1:1025"},
                                    "model": {"path": str(tiny_folder)}})
    (ports,) = [check for check in found("ports", config) if "1025" in check.found]
    assert (ports.status, ports.found) == ("warn", "target.listen: 127.0.0.1:1025 is router.grpc_listen already")
    assert "--set target.listen=" in ports.advice


def test_a_missing_model_fails(tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"path": str(tmp_path / "nowhere")}})
    (model,) = found("model", config)
    assert model.status == "fail" and "model.path" in model.advice


def test_a_model_that_is_not_there_is_no_pair_that_does_not_fit(tiny_folder: Path, tmp_path: Path) -> None:
    """A known one needs one command, and people were told to set another one, too."""
    config = load(None, (f"model.path={tmp_path}/nowhere", "draft.drafter=standalone", f"draft.model={tiny_folder}"))
    assert [check.name for check in checks(config) if check.status == "fail"] == ["model"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_here_is_named(tiny_folder: Path) -> None:
    """Also where no model is loaded: a target beside such a draft would not begin."""
    config = load(None, (f"model.path={tiny_folder}", "draft.drafter=ngram", "model.device=cuda"))
    (device,) = found("device", config)
    assert device.status == "warn" and "'cuda' cannot be used here" in device.found and "model.device" in device.advice
    assert not found("device", load(None, (f"model.path={tiny_folder}", "draft.drafter=ngram")))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="it is here")
def test_an_engine_that_is_not_here_is_named(tiny_folder: Path) -> None:
    asked = (f"model.path={tiny_folder}", "draft.drafter=ngram")
    (vllm,) = found("vllm", load(None, (*asked, "target.engine={vllm: {max_num_seqs: 8}}")))
    assert vllm.status == "warn" and "target.engine: vllm needs vLLM and slipstream-vllm" in vllm.found and vllm.advice
    assert not found("vllm", load(None, asked)), "nobody asked for it"


def test_a_model_folder_is_fine(tiny_folder: Path) -> None:
    (model,) = found("model", Config.model_validate({"model": {"path": str(tiny_folder)}}))
    assert (model.status, model.found) == ("ok", str(tiny_folder))


def test_what_a_container_has_used_is_not_free(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit alone was taken for free memory."""
    monkeypatch.setattr("slipstream.engine.device.limited_memory", lambda: (1 << 30, 1 << 32))
    (memory,) = found("memory", Config.model_validate({"model": {"path": str(tiny_folder)}}))
    assert (memory.status, memory.found) == ("warn", "1.0 of 4.0 GiB are free") and "target.slots" in memory.advice


def test_memory_is_compared_with_what_the_model_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 GiB were enough for any model, and the start of one with 8 billion weights was killed by the system."""
    monkeypatch.setattr("slipstream.engine.device.limited_memory", lambda: (4 << 30, 1 << 40))
    head = json.dumps({"w": {"dtype": "F32", "shape": [2 << 30], "data_offsets": [0, 8 << 30]}}).encode()
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:  # mostly a hole, which takes no disk
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + (8 << 30))
    for setting, status, said in (("dtype=bfloat16", "warn", "needs about 5 GiB"), ("quantize=int8", "ok", ""),
                                  ("dtype=float32", "warn", "needs about 9 GiB")):
        (check,) = found("memory", load(None, (f"model.path={tmp_path}", "draft.drafter=ngram", f"model.{setting}")))
        assert check.status == status and said in check.advice


def test_a_model_that_is_there_needs_no_room_for_another(tiny_folder: Path, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod reads its model from a volume, and its root cannot be written: each was told to prepare it elsewhere."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    (disk,) = found("disk", load(None, (f"model.path={tiny_folder}",)))
    assert disk.status == "ok"
    (disk,) = found("disk", load(None, (f"model.path={tmp_path}/nowhere",)))
    assert (disk.status, bool(disk.advice)) == ("warn", True)


def test_files_that_services_need_are_read(tiny_folder: Path, tmp_path: Path) -> None:
    """All was well with the doctor, and no service began."""
    def of(name: str, key: str, place: Path) -> Check:
        (check,) = found(name, load(None, (f"model.path={tiny_folder}", "draft.drafter=ngram", f"{key}={place}")))
        return check

    folder = tmp_path / "tls"
    for name, key in (("certificates", "wire.tls.folder"), ("API keys", "router.api_keys_file")):
        check = of(name, key, folder)
        assert check.status == "fail" and str(folder) in check.found and key in check.advice
    laid(issue(authority(tmp_path / "signed"), "a"), folder)
    assert of("certificates", "wire.tls.folder", folder) == Check("certificates", "ok", str(folder))
    laid(issue(authority(tmp_path / "old"), "a", days=-1), ended := tmp_path / "ended")
    check = of("certificates", "wire.tls.folder", ended)
    assert check.status == "fail" and "has ended" in check.found, "every peer refuses it"
    (keys := tmp_path / "keys").write_text("abc name=alice\n")
    assert of("API keys", "router.api_keys_file", keys) == Check("API keys", "ok", str(keys))
    keys.write_text("abc colour=red\n")
    assert "line 1" in of("API keys", "router.api_keys_file", keys).found


def test_what_no_service_begins_with_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    """All was well with the doctor."""
    def of(*settings: str) -> list[tuple[str, str, str]]:
        listed = checks(load(None, (f"model.path={tiny_folder}", "draft.drafter=ngram", *settings)))
        assert all(check.advice for check in listed if check.status != "ok")
        return [(check.name, check.status, check.found) for check in listed
                if check.name in ("plain text", "discovery", "trace")]

    assert of() == []
    for key in ("draft.listen", "target.listen", "router.listen", "router.grpc_listen"):
        ((name, status, said),) = of(f"{key}=0.0.0.0:0")
        assert (name, status) == ("plain text", "fail") and said.startswith(f"{key}: 0.0.0.0:0 reaches beyond")
        assert of(f"{key}=0.0.0.0:0", "wire.insecure_allow_plaintext=true") == []
    assert of("target.metrics_listen=0.0.0.0:0") == [], "anybody may read it"
    for key in ("target.drafts", "router.targets"):
        ((name, status, said),) = of(f"{key}=['kubernetes:///draft.llm:50052']", f"wire.kubeconfig={tmp_path}/none")
        assert (name, status) == ("discovery", "warn") and "need a cluster" in said
    ((name, status, said),) = of(f"log.trace={tmp_path}/nowhere/trace.json")
    assert (name, status) == ("trace", "fail") and "nowhere" in said
    assert of(f"log.trace={tmp_path}/trace.json") == [] and not (tmp_path / "trace.json").exists()


def test_a_target_alone_has_no_pair_to_check(tiny_folder: Path, tmp_path: Path) -> None:
    """Its configuration says where drafts are, not which ones: a tick would be for a pair that does not run."""
    file = tmp_path / "slipstream.yaml"
    file.write_text(f"model: {{path: {tiny_folder}}}\ntarget: {{drafts: ['draft:50052']}}\n")
    (pairing,) = found("pairing", load(file))
    assert pairing.status == "warn" and "not checked" in pairing.found
    shown = CliRunner().invoke(app, ["doctor", "--config", str(file)])
    assert "not checked" in shown.output
    (pairing,) = found("pairing", load(file, ("draft.drafter=ngram",)))
    assert pairing.status == "ok" and "ngram" in pairing.found


def test_a_terminal_without_its_signs_gets_others(tmp_path: Path) -> None:
    """Where the locale is Latin-1, the list of what is wrong ended in a traceback at its first check."""
    done = subprocess.run([sys.executable, "-P", "-m", "slipstream", "doctor", "--set", f"model.path={tmp_path}"],
                          env=os.environ | {"PYTHONIOENCODING": "latin-1"}, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (1, "") and "\\u2713" in done.stdout


def test_a_path_in_a_table_is_whole_where_there_is_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was folded at 80 characters, and so was a command in the doctor's advice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("slipstream.models.folder.sys.platform", "linux")
    listed = CliRunner().invoke(app, ["models", "list"])
    assert str(tmp_path / "slipstream" / "models" / "smollm2-135m") in listed.stdout, listed.stdout
