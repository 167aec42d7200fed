"""The configuration: mistakes in a file or a flag are told in words, with the key and what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from click import Group
from typer.main import get_command
from typer.testing import CliRunner

from slipstream.base.address import host_port
from slipstream.base.config import Config, config_yaml, dump_yaml, load
from slipstream.base.errors import ConfigError
from slipstream.cli.commands import app, in_home, models_app
from slipstream.cli.process import listen_addresses, with_local_addresses


@pytest.mark.parametrize(("override", "told"), [
    ("router.max_in_fligh=3", "router.max_in_fligh: unknown key; did you mean 'max_in_flight'?"),
    ("nothing=3", "nothing: unknown key; known: model, target, draft, router, wire, log"),
    ("target.policy.min_nodes=16", "target.policy.min_nodes: unknown key; did you mean 'max_nodes'?"),
    ("target.policy.enabled=false",
     "target.policy.enabled: unknown key; known: max_nodes, always, deadline_max_s"),
    ("target.max_sessions=three", "target.max_sessions: 'three' is not a whole number"),
    ("target.max_sessions=1.5", "target.max_sessions: '1.5' is not a whole number"),
    ("target.max_sessions=", "target.max_sessions: '' is not a whole number"),
    ("target.max_sessions=0", "target.max_sessions: must be at least 1"),
    ("draft.run_ahead=true", "draft.run_ahead: 'true' is not a number"),
    ("target.drain_s=off", "target.drain_s: 'false' is not a number"),
    ("draft.growth.topk=17", "draft.growth.topk: must be at most 16"),
    ("target.accept_threshold_acc=0", "target.accept_threshold_acc: must be above 0"),
    ("target.drain_s=soon", "target.drain_s: 'soon' is not a number"),
    ("draft.compile=perhaps", "draft.compile: 'perhaps' is neither true nor false"),
    ("model.dtype=fp16", "model.dtype: 'fp16' is not known; write 'float64', 'float32', 'bfloat16' or 'float16'"),
    ("model.path=8", "model.path: 8 is not text; YAML takes it as such in quotes: '8'"),
    ("router.api_keys_file=~",
     "router.api_keys_file: stands there without a value; write '' for none, or leave it out"),
    ("target.policy.deadline_max_s=.inf", "target.policy.deadline_max_s: must have an end"),
    ("router.request_timeout_s=.nan", "router.request_timeout_s: must have an end"),
    ("target.policy=3", "target.policy: is a section: write its settings below it, one a line, or "
                        "--set target.policy.NAME=VALUE"),
    ("router.listen=8000", "router.listen: '8000' is not host:port, such as 127.0.0.1:8000"),
    ("router.listen=':8000'", "router.listen: ':8000' names no host: for all interfaces write 0.0.0.0:8000"),
    ("draft.metrics_listen=here:99999",
     "draft.metrics_listen: 'here:99999' is not host:port, such as 127.0.0.1:8000"),
    ("target.drafts=127.0.0.1:8052", "target.drafts: write a list, as in [127.0.0.1:8052]; [] for none"),
    ("router.listen='::1'", "router.listen: '::1' is not host:port, such as 127.0.0.1:8000"),
    ("target.drafts=['fd00::5']", "target.drafts: 'fd00::5' is not host:port, such as 127.0.0.1:8000"),
    ("router.targets=[one]", "router.targets: 'one' is not host:port, such as 127.0.0.1:8000"),
    ("router.targets=[]", "router.targets: is empty; write one at least, as in [127.0.0.1:8051]"),
    ("target.drafts=['http://here:8052']",
     "target.drafts: 'http://here:8052' is not host:port, such as 127.0.0.1:8000"),
    ("log.spans=collector:4317",
     "log.spans: 'collector:4317' is no such address; write http://HOST:PORT, or https://"),
    ("router.targets=['kubernetes:///target:8051']",
     "router.targets: 'kubernetes:///target:8051' is not kubernetes:///SERVICE.NAMESPACE:PORT"),
    ("wire.tls.key=tls.key", "wire.tls.key: unknown key; known: folder, allowed_names"),
    ("wire.tls.server_name=draft", "wire.tls.server_name: unknown key; known: folder, allowed_names"),
    ("wire.tls.allowed_names=me", "wire.tls.allowed_names: write a list, as in [one, two]; [] for none"),
    ("router", "--set router: write section.key=value"),
    ("model.path=2024-13-01", "--set model.path=2024-13-01: not a YAML value"),
    ("model={path: a, path: b}", "--set model={path: a, path: b}: line 1: path stands there twice; write what belongs "
                                 "to it once, in one place"),
    (f"target.drafts={'[' * 2000}", f"--set target.drafts={'[' * 2000}: not a YAML value"),
])
def test_a_mistake_names_its_key_and_what_to_write(override: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, (override,))
    assert str(caught.value) == told


@pytest.mark.parametrize("text", ["draft:\n  # drafter: ngram\ntarget:\n  policy:\n", "draft: ~\n"])
def test_a_section_in_which_nothing_is_set_has_its_defaults(text: str, tmp_path: Path) -> None:
    path = tmp_path / "slipstream.yaml"
    path.write_text(text)
    assert load(path) == Config()
    found = load(path, ("draft.drafter=ngram", "target.policy.max_nodes=3"))
    assert found.draft.drafter == "ngram" and found.target.policy.max_nodes == 3


def test_every_mistake_has_a_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, ("router.max_in_flight=0", "draft.max_sessions=0", "log.level=loud"))
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "draft.max_sessions", "router.max_in_flight", "log.level"]


@pytest.mark.parametrize("override", ["draft.model=", "draft.model=''"])
def test_an_empty_text_can_be_said(override: str) -> None:
    assert load(None, ("draft.model=head", override)).draft.model == ""


@pytest.mark.parametrize(("written", "meant"), [("5e-05", 5e-05), ("1e-06", 1e-06), ("-2E3", -2000.0), ("1.5", 1.5)])
def test_a_number_may_have_an_exponent_and_no_point(tmp_path: Path, written: str, meant: float) -> None:
    """As Helm writes 0.00005. Where no kind of value is known, as of vLLM's arguments, it would stay a text."""
    file = tmp_path / "slipstream.yaml"
    file.write_text(f"target: {{engine: {{vllm: {{watermark: {written}}}}}}}\n")
    for config in (load(file), load(None, (f"target.engine.vllm.watermark={written}",))):
        assert config.target.vllm == {"watermark": meant}


def test_what_only_begins_like_a_number_is_text() -> None:
    assert load(None, ("model.path=7e3b-instruct", "router.model_name=1e")).model.path == "7e3b-instruct"


@pytest.mark.parametrize("name", ["1e-5", "4e21093", "5e3", "yes", "010", "8", "été"])
def test_a_text_that_looks_like_a_number_is_printed_as_text(tmp_path: Path, name: str) -> None:
    """As folders of checkpoints are called by their learning rate, or by a commit."""
    config = load(None, (f"model.path='{name}'",))
    for number, text in enumerate((config_yaml(config), dump_yaml(config.model_dump(mode="json")))):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text, encoding="utf-8")
        assert load(file).model.path == name


def test_config_prints_what_is_in_force(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["config", "--set", "router.max_in_flight=3"])
    file = tmp_path / "slipstream.yaml"
    file.write_text(result.output)
    assert load(file).router.max_in_flight == 3
    moved = ("target.listen=127.0.0.1:7001", "draft.listen=127.0.0.1:7002")
    for changes in ((), moved):  # a launch finds the rest out, as without a file
        from_file, given = (with_local_addresses(load(path, changes)) for path in (file, None))
        assert from_file.target == given.target and from_file.router.targets == given.router.targets
    result = CliRunner().invoke(app, ["config", "--set", "target.shared_cores=false", "--set", "target.drafts=[]"])
    file.write_text(result.output)
    loaded = with_local_addresses(load(file))
    assert not loaded.target.shared_cores and loaded.target.drafts == ()


def test_no_default_port_is_one_that_a_system_gives_to_clients() -> None:
    """Linux hands out 32768 to 60999, others from 49152: a service that starts later finds its port taken."""
    ports = [host_port(address)[1] for address in listen_addresses(Config()).values()]
    assert len(set(ports)) == len(ports) == 7 and max(ports) < 32768


def test_an_address_that_stands_there_twice_is_dialled_once() -> None:
    config = load(None, ("target.drafts=[10.0.0.1:1, 10.0.0.2:1, 10.0.0.1:1]",))
    assert config.target.drafts == ("10.0.0.1:1", "10.0.0.2:1")


@pytest.mark.parametrize("addresses", ["[]", "[10.0.0.1:1, '[::1]:2']", "['kubernetes:///target.llm:8051']"])
def test_addresses_that_can_be_dialled(addresses: str) -> None:
    assert isinstance(load(None, (f"target.drafts={addresses}",)).target.drafts, tuple)


@pytest.mark.parametrize(("content", "told"), [
    (b"target: [", " is not YAML: "), (b"target: " + b"[" * 2000, " is not YAML: "), (b"\xff\xfe", " is not YAML: "),
    (b"- target", "expected sections like 'target:'"),
    (b"target:\n  max_sessions: 4\nrouter: {}\ntarget:\n  drain_s: 3\n", ": line 4: target stands there twice; "),
    (b"draft:\n  growth:\n    topk: 1\n    topk: 2\n", ": line 4: topk stands there twice; "),
])
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "slipstream.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert str(file) in str(caught.value) and told in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "none.yaml")
    assert str(caught.value) == f"cannot read {tmp_path / 'none.yaml'}: No such file or directory"


@pytest.mark.parametrize("key", ["draft.token_map", "router.api_keys_file", "wire.tls.folder", "log.trace"])
def test_a_file_may_stand_in_ones_home(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model's folder may: a shell leaves the ~ in NAME=~/FILE as it is."""
    monkeypatch.setenv("HOME", "/home/she")
    assert ": /home/she/file  #" in config_yaml(load(None, [f"{key}=~/file"]))


def test_a_file_of_an_option_may_stand_in_ones_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A shell leaves the ~ of --logs=~/logs as it is: a folder of that name was made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    groups = [cast(Group, get_command(each)) for each in (app, models_app)]
    paths = {f"{command.name} {option.opts[0]}": command.make_context(
        "", [option.opts[0], "~/it"], resilient_parsing=True).params[option.name] for group in groups
        for command in group.commands.values() for option in command.params if option.metavar in ("FILE", "FOLDER")}
    it = tmp_path / "it"
    assert len(paths) > 10 and not [name for name, path in paths.items() if path not in (it, [it])]
    assert in_home("~nobody-here/it") == Path("~nobody-here/it")  # to which there was a traceback


def test_an_ipv6_address_loses_its_brackets() -> None:
    assert host_port("[::1]:80") == ("::1", 80) and host_port("localhost:0") == ("localhost", 0)


@pytest.mark.parametrize("address", ["::1:8000", "'[::1]:8000'", "[::1]:8000"])
def test_an_ipv6_address_to_listen_on_has_brackets(address: str) -> None:
    assert load(None, (f"router.listen={address}",)).router.listen == "[::1]:8000"


def test_a_section_is_explained_in_whole_sentences() -> None:
    """A comment is the section's docstring, which may take two lines in the code."""
    heads = [line for line in config_yaml(Config()).splitlines() if line.partition("  # ")[0].endswith(":")]
    explained = [line.partition("  # ")[2] for line in heads if "  # " in line]
    assert explained and not [text for text in explained if not text.endswith(".") or "``" in text]
