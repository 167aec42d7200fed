"""``slipstream run`` and ``serve`` with every setting of the router's section that changes what a client needs: keys,
TLS between the services, names, addresses that are none to dial."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from slipstream.base.address import reachable
from slipstream.base.config import Config, RouterSection, load
from slipstream.base.errors import ConfigError
from slipstream.cli import colocated
from slipstream.cli.commands import app
from slipstream.cli.host import first_key
from slipstream.cli.process import with_local_addresses
from tests.certificates import authority, issue, laid, needs_openssl
from tests.test_cli import on_free_ports, read_until

WALKED = {"listen", "grpc_listen", "metrics_listen", "targets", "api_keys_file", "model_name", "strict"}
ALIKE = {"max_in_flight", "max_wait_s", "request_timeout_s", "drain_s"}  # a client asks in the same way


def test_every_setting_of_the_router_is_walked_through_or_changes_nothing_for_a_client() -> None:
    assert set(RouterSection.model_fields) == WALKED | ALIKE


@pytest.mark.parametrize(("listen", "dialled"), [("0.0.0.0:80", "127.0.0.1:80"), ("[::]:80", "[::1]:80"),
                                                 ("10.0.0.1:80", "10.0.0.1:80"), ("[::1]:80", "[::1]:80")])
def test_what_listens_everywhere_is_dialled_at_home(listen: str, dialled: str) -> None:
    assert reachable(listen) == dialled
    config = Config.model_validate({"target": {"listen": listen}, "draft": {"listen": listen}})
    assert with_local_addresses(config).router.targets == with_local_addresses(config).target.drafts == (dialled,)


def test_the_first_key_of_a_file_is_a_word_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who may ask\n\n  one weight=2\ntwo\n")
    assert first_key(file) == "one"
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no key"):
        first_key(file)


@pytest.mark.parametrize(("change", "told"), [
    ("router.listen={taken}", "^router.listen: port .* is taken; .* add --set router.listen=127.0.0.1:"),
    ("target.metrics_listen={taken}", "^target.metrics_listen: port .* is taken"),
    ("router.listen=0.0.0.0:8000", "^router.listen: 0.0.0.0:8000 reaches beyond this machine in plain text"),
    ("router.grpc_listen=0.0.0.0:8001", "^router.grpc_listen: 0.0.0.0:8001 reaches beyond this machine"),
    ("router.api_keys_file=nowhere", "^router.api_keys_file: cannot read nowhere")])
def test_one_process_says_what_it_cannot_begin_with_before_a_model_is_loaded(change: str, told: str) -> None:
    """Which may take minutes. Here there is none to load."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        config = load(None, (*on_free_ports(), "model.path=nowhere",
                             change.format(taken=f"127.0.0.1:{holder.getsockname()[1]}")))
        with pytest.raises(ConfigError, match=told):
            asyncio.run(colocated.serve(config, asyncio.Event(), lambda: None))


@needs_openssl
@pytest.mark.parametrize("command", [["run", "Hello!", "--max-tokens", "24"], ["serve"]], ids=["run", "serve"])
def test_a_launch_and_its_clients_with_all_of_them(command: list[str], tiny_folder: Path, tmp_path: Path) -> None:
    keys, folder = tmp_path / "the keys", laid(issue(authority(tmp_path / "ca"), "services"), tmp_path / "tls")
    keys.write_text("# keys\nopen-sesame\n")
    overrides = [setting.replace("127.0.0.1", "0.0.0.0") for setting in on_free_ports()]
    settings = (*overrides, f"model.path={tiny_folder}", "model.dtype=float32", "model.threads=1",
                "wire.insecure_allow_plaintext=true", f"wire.tls.folder={folder}", f"router.api_keys_file={keys}",
                "router.model_name=anna's", "router.strict=true")
    flags = [part for setting in settings for part in ("--set", setting)]
    process = subprocess.Popen([sys.executable, "-m", "slipstream", *command, "--logs", str(tmp_path / "logs"), *flags],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)
    assert process.stdout is not None
    try:
        shown = "\n".join(read_until(process.stdout, "serving; Ctrl-C drains"))
        url = only(r"base_url=\"(\S+)\"", shown)
        chat = shlex.split(only(r"slipstream (chat --address \S+ --api-key-file .+)", shown))
        *_, said = shlex.split(only(r"(curl -N [^\n]+\\\n[^\n]+)", shown))
        with httpx.Client(base_url=url + "/", timeout=60) as client:
            body = {"model": "anna's", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            assert client.post("chat/completions", json=body).status_code == 401
            client.headers["Authorization"] = "Bearer open-sesame"
            answer = client.post("chat/completions", json=body)
            assert client.post("chat/completions", json=body | {"nobody_knows": 1}).status_code == 400
        spoken = CliRunner().invoke(app, [*chat, "--temperature", "0", "--max-tokens", "8"], input="hello\n/quit\n")
        scraped = httpx.get(only(r"curl (http://\S+/metrics)", shown)).text
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert answer.status_code == 200 and answer.json()["model"] == json.loads(said)["model"] == "anna's"
    assert spoken.exit_code == 0 and "of 8 tokens came from drafts" in spoken.output
    assert ("of 24 tokens came from drafts" in shown) == (command[0] == "run")
    assert "has not found its draft" not in shown and "does not seem to fit" not in shown
    assert "open-sesame" not in shown and "Authorization: Bearer KEY" in shown
    assert 'slipstream_drafts_connected{model="anna\'s",service="target"} 1.0' in scraped
    assert "drained: every service has ended" in rest and process.returncode == 0


def only(pattern: str, text: str) -> str:
    (found,) = re.findall(pattern, text)
    return str(found)
