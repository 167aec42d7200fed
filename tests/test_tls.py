"""TLS between services, on real gRPC servers: who is refused, what is replaced while calls run."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import structlog.testing
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.base.config import TlsSection, WireSection
from slipstream.base.errors import ConfigError, InvalidRequest, Unavailable
from slipstream.client import Client
from slipstream.protocol.requests import Request, Sampling
from slipstream.wire.channel import ConnectionRules, open_channel
from slipstream.wire.client import parse_address
from slipstream.wire.inference import InferenceServicer
from slipstream.wire.link import DraftLink
from slipstream.wire.server import GrpcServer
from slipstream.wire.servicer import DraftServicer
from slipstream.wire.status import OVERWRITTEN_DETAILS, from_grpc_error
from slipstream.wire.target import TargetClient, TargetServicer
from slipstream.wire.tls import TlsFiles, expiry_s, export_expiry, tls_files, with_server_name
from tests.certificates import authority, issue, laid, needs_openssl, replace_files
from tests.echo import EchoTarget
from tests.loop import eventually
from tests.test_wire import HELLO, LOOPBACK, Echo, Parrot, Target, commit

pytestmark = [needs_openssl, pytest.mark.usefixtures("servers_end")]
WIRE = WireSection()
RULES = ConnectionRules(backoff_max_s=0.2)
LONG = Request("r", (1, 2, 3), Sampling(), 400)


@asynccontextmanager
async def serving(files: TlsFiles, backend: EchoTarget | None = None) -> AsyncIterator[int]:
    server = GrpcServer(LOOPBACK, WIRE, [TargetServicer(backend or EchoTarget())], tls=files)
    yield await server.start()
    await server.drain(0)


async def ask(port: int, files: TlsFiles | None) -> str:
    """The model of the target that listens there."""
    client = TargetClient(f"127.0.0.1:{port}", tls=files, connect_s=5.0)
    try:
        return (await client.info()).model_id
    finally:
        await client.aclose()


async def test_strangers_are_refused(tmp_path: Path) -> None:
    ours, theirs = authority(tmp_path / "ours"), authority(tmp_path / "theirs")
    files, good, foreign = issue(ours, "server"), issue(ours, "client"), issue(theirs, "client")
    late = issue(ours, "late", days=-1)
    async with serving(files) as port:
        assert await ask(port, good) == "tiny"
        # The last two accept the server; it is their own certificate that is wrong.
        for stranger in (None, foreign, replace(foreign, authority=good.authority), late):
            with pytest.raises(Unavailable):
                await ask(port, stranger)
        assert await ask(port, good) == "tiny"


async def test_a_server_that_is_not_the_one_dialled_is_refused(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    client = issue(ca, "client")
    for names, days, fits in (("DNS:target.ns.svc", 2, True), ("DNS:other.ns.svc", 2, False),
                              ("DNS:target.ns.svc", -1, False), ("", 2, False)):
        async with serving(issue(ca, "server", names, days)) as port:
            named = with_server_name(client, "target.ns.svc")
            if fits:
                assert await ask(port, named) == "tiny", "a pod is dialled by its address, and shows its service's name"
            else:
                with pytest.raises(Unavailable):
                    await ask(port, named)
            with pytest.raises(Unavailable):
                await ask(port, client)
    assert with_server_name(None, "x") is None


@pytest.mark.parametrize(("names", "fits"), [
    ("DNS:router.ns.svc", True), ("DNS:x,DNS:Router.ns.svc", True), ("URI:spiffe://cluster/router", True), ("", True),
    ("DNS:draft.ns.svc", False), ("DNS:router.ns.svc.evil", False), ("IP:127.0.0.1", False)])
async def test_only_allowed_names_come_in(tmp_path: Path, names: str, fits: bool) -> None:
    ca = authority(tmp_path / "ca")
    allowed = ("router.ns.svc", "spiffe://cluster/router", "common")
    files = replace(issue(ca, "server"), allowed_names=allowed)
    client = issue(ca, "common" if fits or names else "other", names)  # a common name counts where there is no other
    async with serving(files) as port:
        if fits:
            assert await ask(port, client) == "tiny"
            return
        with pytest.raises(Unavailable, match="none of its names is allowed"):
            await ask(port, client)
        # Health, streams and answers alike.
        channel = open_channel(f"127.0.0.1:{port}", client)
        with pytest.raises(Exception, match="PERMISSION_DENIED"):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        await channel.close()
        target = TargetClient(f"127.0.0.1:{port}", tls=client, connect_s=5.0)
        reasons = []
        while not reasons or "the next attempt tells why" in reasons[-1]:  # a refusal that overtook the request
            with pytest.raises(Unavailable) as refused:
                _ = [piece async for piece in target.submit(LONG)]
            reasons.append(str(refused.value))
        assert "none of its names is allowed" in reasons[-1]
        await target.aclose()


async def test_a_draft_lets_in_targets_alone(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    echo, target = Echo(), Target()
    files = replace(issue(ca, "draft"), allowed_names=("target.ns.svc",))
    server = GrpcServer(LOOPBACK, WIRE, [DraftServicer(echo)], tls=files)
    address = f"127.0.0.1:{await server.start()}"
    strange = DraftLink(address, HELLO, Target(), rules=RULES, tls=issue(ca, "router"))
    link = DraftLink(address, HELLO, target, rules=RULES, tls=issue(ca, "target", "DNS:target.ns.svc"))
    tasks = [asyncio.create_task(one.run()) for one in (strange, link)]
    await eventually(lambda: link.status().connected and "none of its names" in strange.status().problem)
    link.send([commit()])
    await eventually(lambda: len(target.items) == 1)
    for task in tasks:
        task.cancel()
    await server.drain(0)


async def test_a_server_takes_replaced_certificates(tmp_path: Path) -> None:
    ours, theirs = authority(tmp_path / "ours"), authority(tmp_path / "theirs")
    files, good, foreign = issue(ours, "server"), issue(ours, "client"), issue(theirs, "client")
    async with serving(files) as port:
        assert await ask(port, good) == "tiny"
        replace_files(files, issue(theirs, "server"))
        assert await ask(port, foreign) == "tiny"
        with pytest.raises(Unavailable):
            await ask(port, good)


async def test_a_replacement_that_holds_nothing_changes_nothing(tmp_path: Path) -> None:
    """Also not what came in the place of the first certificate."""
    ours, theirs = authority(tmp_path / "ours"), authority(tmp_path / "theirs")
    files, foreign = issue(ours, "server"), issue(theirs, "client")
    async with serving(files) as port:
        replace_files(files, issue(theirs, "server"))
        assert await ask(port, foreign) == "tiny"
        files.certificate.write_text("half a certif")
        assert await ask(port, foreign) == "tiny"


async def test_certificates_are_replaced_under_load_and_nothing_fails(tmp_path: Path) -> None:
    ours, theirs = authority(tmp_path / "ours"), authority(tmp_path / "theirs")
    stranger = issue(ours, "stranger")
    server_files, client_files = (replace(issue(ours, name), authority=tmp_path / f"{name}-ca.pem")
                                  for name in ("server", "client"))
    for files in (server_files, client_files):
        files.authority.write_bytes(stranger.authority.read_bytes())
    both = (ours / "ca.pem").read_bytes() + (theirs / "ca.pem").read_bytes()
    target = EchoTarget(pause_s=0.002, end=10_000)
    async with serving(server_files, target) as port:
        client = TargetClient(f"127.0.0.1:{port}", tls=client_files, connect_s=5.0)
        stop, answers = asyncio.Event(), 0

        async def load() -> None:
            nonlocal answers
            while not stop.is_set():
                pieces = [piece async for piece in client.submit(LONG)]
                assert sum(len(piece.tokens) for piece in pieces) == 400
                answers += 1

        loads = [asyncio.create_task(load()) for _ in range(4)]
        # As an operator does it: trust both authorities, then show the new certificates, then drop the old authority.
        for step in range(3):
            for files, name in ((server_files, "server"), (client_files, "client")):
                fresh = issue(theirs, f"{name}-{step}") if step else files
                (tmp_path / "both.pem").write_bytes(both)
                trusted = tmp_path / "both.pem" if step < 2 else fresh.authority
                replace_files(files, replace(fresh, authority=trusted))
            before = answers
            await asyncio.sleep(1.1)
            await eventually(lambda before=before: answers >= before + 4)
        stop.set()
        await asyncio.gather(*loads)
        assert await client.info()
        with pytest.raises(Unavailable):
            await ask(port, replace(stranger, authority=theirs / "ca.pem"))
        await client.aclose()


async def test_the_end_of_a_certificate_is_told_again_when_it_is_replaced(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    told: list[float] = []
    files = issue(ca, "pod", days=2)
    task = asyncio.create_task(export_expiry(files, told.append, interval_s=0.01))
    await eventually(lambda: len(told) == 1)
    files.certificate.write_text("half a certif")
    await asyncio.sleep(0.03)
    replace_files(files, issue(ca, "next", days=9))
    await eventually(lambda: len(told) == 2)
    assert told[1] - told[0] == pytest.approx(7 * 86400, abs=120)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(export_expiry(None, told.append), 60)


def test_ends(tmp_path: Path) -> None:
    folder = authority(tmp_path / "ca")
    assert expiry_s(issue(folder, "far", days=20_000).certificate.read_bytes()) > 2_600_000_000, "beyond 2049"
    chain = issue(folder, "pod").certificate.read_bytes() + (folder / "ca.pem").read_bytes()
    for words in ("some words before\n", "friendlyName: Zürich\n"):  # OpenSSL writes the latter into what it exports
        assert expiry_s(words.encode() + chain) == expiry_s(chain)
    for bad in (b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----", chain[:200], b"\xff"):
        with pytest.raises(ConfigError, match="no certificate"):
            expiry_s(bad)


def test_the_configuration_names_a_folder_with_all_of_them(tmp_path: Path) -> None:
    files = issue(authority(tmp_path / "ca"), "pod")
    folder = str(laid(files, tmp_path / "mounted"))
    found = tls_files(TlsSection(folder=folder, allowed_names=("b",)))
    assert found is not None and found.read() == files.read() and found.allowed_names == ("b",)
    assert tls_files(TlsSection()) is None
    with pytest.raises(ValueError, match="allowed_names"):
        TlsSection(allowed_names=("router",))


def test_a_missing_certificate_is_named(tmp_path: Path) -> None:
    nowhere = tmp_path / "none.pem"
    with pytest.raises(ConfigError, match=r"none\.pem"):
        TlsFiles(nowhere, nowhere, nowhere).read()


@pytest.mark.parametrize(("name", "words"), [
    ("certificate", "holds no certificate"), ("authority", "holds no certificate"), ("key", "is not the key of")])
def test_a_file_that_holds_something_else_is_named(tmp_path: Path, name: str, words: str) -> None:
    """gRPC would say that it cannot listen, and a person look for who has the port."""
    ca = authority(tmp_path / "ca")
    files, other = issue(ca, "pod"), issue(ca, "other")
    wrong = [tmp_path / "words"] if name != "key" else [tmp_path / "words", other.key]
    (tmp_path / "words").write_text("hello")
    for file in wrong:
        with pytest.raises(ConfigError, match=f"{file}.* {words}"):
            replace(files, **{name: file}).read()
    assert files.read()


async def test_a_server_with_a_wrong_key_does_not_ask_whether_its_port_is_taken(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    files = replace(issue(ca, "server"), key=issue(ca, "other").key)
    with pytest.raises(ConfigError, match=r"other\.key is not the key of"):
        await GrpcServer(LOOPBACK, WIRE, [TargetServicer(EchoTarget())], tls=files).start()


async def test_a_certificate_that_has_ended_is_told_once(tmp_path: Path) -> None:
    """Nobody but its peers would say so, in words of their TLS."""
    files, now_s, looks = issue(authority(tmp_path / "ca"), "pod", days=2), 0.0, 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return now_s

    def ends() -> list[str]:
        return [line["ended"] for line in logs if line["event"].startswith("certificate has ended")]

    told: list[float] = []
    with structlog.testing.capture_logs() as logs:
        task = asyncio.create_task(export_expiry(files, told.append, interval_s=0.001, clock=clock))
        await eventually(lambda: looks > 3)
        assert not ends()
        now_s, looks = told[0], 0
        await eventually(lambda: looks > 3)
        assert len(ends()) == 1
        files.certificate.write_text("half a certif")
        await eventually(lambda: any("holds no certificate" in line.get("problem", "") for line in logs))
        looks = 0
        await eventually(lambda: looks > 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert sum("not replaced" in line["event"] for line in logs) == 1 and len(ends()) == 1 and len(told) == 1


def test_a_write_that_meets_the_end_of_a_call_says_so() -> None:
    lost = aio.AioRpcError(grpc.StatusCode.INTERNAL, aio.Metadata(), aio.Metadata(), OVERWRITTEN_DETAILS)
    assert str(from_grpc_error(lost, "a")) == "a ended the call while it was written to; the next attempt tells why"


ASKING = """
import asyncio, sys
from slipstream.client import AsyncClient, Client, Unavailable
with Client(["https://127.0.0.1:1", sys.argv[1]]) as client:
    assert client.models() == ["parrot"], "it trusts whom this machine trusts"
async def use():
    async with AsyncClient(sys.argv[1]) as client:
        assert await client.models() == ["parrot"]
asyncio.run(use())
for other in (sys.argv[1].replace("https", "http"), sys.argv[1].replace("127.0.0.1", "localhost")):
    with Client(other) as client:
        try:
            sys.exit(client.models())
        except Unavailable:
            pass
"""


async def test_a_client_reaches_a_router_behind_a_proxy_with_tls(tmp_path: Path) -> None:
    """Which is where the pages want one; it shows no certificate itself."""
    files = issue(authority(tmp_path / "ca"), "server", "IP:127.0.0.1")
    server = aio.server()
    server.add_generic_rpc_handlers([InferenceServicer(lambda *_: Parrot()).handler()])
    port = server.add_secure_port(LOOPBACK, grpc.ssl_server_credentials(
        [(files.key.read_bytes(), files.certificate.read_bytes())]))
    await server.start()
    asks = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", ASKING, f"https://127.0.0.1:{port}",
        env={**os.environ, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(files.authority)})
    assert await asyncio.wait_for(asks.wait(), 100) == 0
    await server.stop(0)


@pytest.mark.parametrize(("address", "dialled"), [
    ("https://llm.example.org", "llm.example.org:443"), ("https://[::1]:8443/", "[::1]:8443"),
    ("http://llm.example.org", "llm.example.org:80"), ("http://127.0.0.1:8001", "127.0.0.1:8001"),
    ("127.0.0.1:8001", "127.0.0.1:8001"), ("dns:///a:1", "dns:///a:1")])
def test_an_address_may_be_a_url(address: str, dialled: str) -> None:
    assert parse_address(address) == (dialled, address.startswith("https"))


@pytest.mark.parametrize("address", ["https://", "https://a/v1", "https://a:b", "https://key@a", "http://a?b"])
def test_what_is_no_address_is_said_at_once(address: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Client(address)
    assert caught.value.field == "address"
