"""Discovery against an API server that speaks HTTP: pods come and go, watches break, servers restart and forget."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from slipstream.base.address import ServiceAddress, service_address
from slipstream.base.errors import ConfigError, RemoteProtocolError, Unavailable
from slipstream.wire.cluster import api_server
from slipstream.wire.discovery import Directory, ServiceWatch, WatchRules, fixed_addresses, watch_services
from slipstream.wire.roster import Roster, RosterRules
from slipstream.wire.slices import Endpoint, merge_slices, parse_endpoints
from tests.api_server import StandIn, endpoint
from tests.loop import eventually

ADDRESS = "kubernetes:///target.ns:50051"
QUICK = WatchRules(resync_s=60.0, repeat_s=0.05, backoff_min_s=0.01, backoff_max_s=0.05, min_watch_s=0.5)
A, B, C = "10.0.0.1:50051", "10.0.0.2:50051", "10.0.0.3:50051"


def kubeconfig(folder: Path, server: StandIn, user: str = "{}") -> str:
    file = folder / "kubeconfig"
    file.write_text(f"""{{apiVersion: v1, kind: Config, current-context: c, users: [{{name: u, user: {user}}}],
        clusters: [{{name: k, cluster: {{server: '{server.url}'}}}}],
        contexts: [{{name: c, context: {{cluster: k, user: u}}}}]}}""")
    return str(file)


class Told:
    """What a directory over a stand-in told."""

    def __init__(self, server: StandIn) -> None:
        self.server = server
        self.told: list[dict[str, str]] = []
        self.directory: Directory

    def seen(self, ready: Mapping[str, str]) -> None:
        self.told.append(dict(ready))

    async def ready(self, *addresses: str) -> None:
        """Wait until it tells exactly these."""
        await eventually(lambda: bool(self.told) and set(self.told[-1]) == set(addresses))


@asynccontextmanager
async def telling(folder: Path, *versions: str, rules: WatchRules = QUICK,
                  addresses: tuple[str, ...] = (ADDRESS,)) -> AsyncIterator[Told]:
    server = StandIn(*versions)
    await server.start()
    found = Told(server)
    async with watch_services(addresses, kubeconfig(folder, server), found.seen, rules) as found.directory:
        yield found
    await server.stop()


@pytest.mark.parametrize(("versions", "asked"), [(("v1", "v1beta1"), "v1"), (("v1beta1",), "v1beta1")])
async def test_pods_come_become_unready_and_go(tmp_path: Path, versions: tuple[str, ...], asked: str) -> None:
    async with telling(tmp_path, *versions) as f:
        await f.ready()
        await f.server.put("s1", endpoint("10.0.0.1", ready=False))
        await eventually(lambda: f.directory.num_listed == 1)
        await f.ready()
        await f.server.put("s1", endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=None))
        await f.server.put("s2", endpoint("10.0.0.3"))
        await f.ready(A, B, C)
        await f.server.put("s1", endpoint("10.0.0.1", ready=False), endpoint("10.0.0.2"))
        await f.ready(B, C)
        await f.server.delete("s2")
        await f.ready(B)
        assert f.told[-1] == {B: "target.ns.svc"} and f.server.lists == 1, "the watch alone brought all of it"
        assert f"/apis/discovery.k8s.io/{asked}/namespaces/ns/endpointslices" in f.server.paths


async def test_a_pod_that_ends_is_out_at_once(tmp_path: Path) -> None:
    async with telling(tmp_path) as f:
        await f.server.put("s1", endpoint("10.0.0.1"), endpoint("10.0.0.2"))
        await f.ready(A, B)
        await f.server.put("s1", endpoint("10.0.0.1", ready=True, terminating=True), endpoint("10.0.0.2"))
        await f.ready(B)
        assert f.directory.num_listed == 1, "what ends is not missed"


async def test_a_broken_watch_changes_nothing_and_is_taken_up_again(tmp_path: Path) -> None:
    async with telling(tmp_path) as f:
        await f.server.put("s1", endpoint("10.0.0.1"))
        await f.ready(A)
        for ip, expected in (("10.0.0.2", B), ("10.0.0.3", C)):
            watches = f.server.watches
            await f.server.cut()
            await f.server.put("s1", endpoint(ip))
            await f.ready(expected)
            await eventually(lambda watches=watches: f.server.watches > watches)
        assert all(told for told in f.told if told) and {} not in f.told[f.told.index({A: "target.ns.svc"}):]


async def test_a_forgotten_version_leads_to_another_list(tmp_path: Path) -> None:
    async with telling(tmp_path) as f:
        await f.server.put("s1", endpoint("10.0.0.1"))
        await f.ready(A)
        lists = f.server.lists
        f.server.forget()
        await f.server.put("s1", endpoint("10.0.0.2"))
        await f.ready(B)
        assert f.server.lists > lists
        assert {} not in f.told[f.told.index({A: "target.ns.svc"}):]


@pytest.mark.parametrize("status", [403, 500, 503])
async def test_a_server_that_refuses_or_is_away_empties_nothing(tmp_path: Path, status: int) -> None:
    async with telling(tmp_path) as f:
        await f.server.put("s1", endpoint("10.0.0.1"))
        await f.ready(A)
        f.server.refuse = status
        await f.server.cut()
        await eventually(lambda: not f.directory.in_sync)
        await f.server.stop()
        told = len(f.told)
        await asyncio.sleep(0.3)
        assert len(f.told) == told, "nothing is repeated that may have changed"
        f.server.refuse = 0
        f.server.versions = ("v1beta1",)  # it comes back older, with other pods
        await f.server.put("s1", endpoint("10.0.0.2"))
        await f.server.start()
        await f.ready(B)
        assert {} not in f.told[f.told.index({A: "target.ns.svc"}):]


async def test_nonsense_changes_nothing(tmp_path: Path) -> None:
    async with telling(tmp_path) as f:
        await f.server.put("s1", endpoint("10.0.0.1"))
        await f.ready(A)
        bad: list[object] = ["text", {"type": "ODD", "object": {}}, {"object": {}}, {"type": "ADDED", "object": 3},
                             {"type": "ADDED", "object": {"metadata": {}}}]
        for event in bad:
            lists = f.server.lists
            await f.server.send(event)
            await eventually(lambda lists=lists: f.server.lists > lists)
        await f.server.put("s1", {"addresses": ["not an address"]})
        await f.server.put("s2", endpoint("10.0.0.2"))
        await f.ready(A, B)


class Lists:
    """An API server that has some lists to give and no watch, and then says nothing."""

    def __init__(self, *listings: object) -> None:
        self._left = list(listings)
        self.silent = False

    async def api_version(self) -> str:
        return "v1"

    async def list(self, version: str, service: ServiceAddress) -> object:
        if not self._left:
            self.silent = True
            await asyncio.Event().wait()
        return self._left.pop(0)

    async def watch(self, version: str, service: ServiceAddress, since: str) -> AsyncIterator[tuple[str, Any]]:
        raise Unavailable("there is none")
        yield

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize("nonsense", [None, [], {}, {"items": {}}, {"items": []}, {"items": [], "metadata": []},
                                      {"items": [{}], "metadata": {"resourceVersion": "2"}}])
async def test_a_list_that_is_none_changes_nothing(nonsense: object) -> None:
    slices = {"addressType": "IPv4", "metadata": {"name": "s1"}, "ports": [{"port": 50051}],
              "endpoints": [endpoint("10.0.0.1")]}
    server = Lists({"items": [slices, 7], "metadata": {"resourceVersion": "1"}}, nonsense)
    watch = ServiceWatch(ServiceAddress("target", "ns", "50051"), server, lambda: None, QUICK)
    task = asyncio.create_task(watch.run())
    await eventually(lambda: server.silent)
    task.cancel()
    assert list(watch.endpoints) == [A] and not watch.in_sync


async def test_a_watch_that_is_never_granted_is_told_of_once() -> None:
    """As where a role lists and does not watch: a list follows every half a minute, for days."""
    listing = {"items": [], "metadata": {"resourceVersion": "1"}}
    server = Lists(*[listing] * 6)
    watch = ServiceWatch(ServiceAddress("target", "ns", "50051"), server, lambda: None, QUICK)
    with capture_logs() as logs:
        task = asyncio.create_task(watch.run())
        await eventually(lambda: server.silent)
    task.cancel()
    assert [line["event"] for line in logs].count("slices not followed; the last list stands") == 1
    assert [line["event"] for line in logs].count("slices listed") == 2


async def test_a_server_that_is_away_when_lists_are_due_is_told_of_once_and_so_is_its_return(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with telling(tmp_path, rules=WatchRules(resync_s=0.05, backoff_min_s=0.01, backoff_max_s=0.05)) as f:
            await f.ready()
            await asyncio.sleep(0.2)
            f.server.refuse_lists = 503  # not a watch that follows a list: that would be another problem
            await eventually(lambda: not f.directory.in_sync)
            await asyncio.sleep(0.3)
            f.server.refuse_lists = 0
            await eventually(lambda: f.directory.in_sync)
    said = [line["event"] for line in logs if line["event"].startswith("slices")]
    assert said == ["slices listed", "slices not followed; the last list stands", "slices listed"], said


async def test_a_watch_that_ends_at_once_is_not_hammered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)  # the longest of the waits that may be
    async with telling(tmp_path, rules=WatchRules(backoff_min_s=0.01, backoff_max_s=5.0)) as f:
        f.server.watch_ends_at_once = True
        await f.server.cut()
        before = f.server.watches
        await eventually(lambda: f.server.watches >= before + 5)
        gaps_s = [after - at for at, after in pairwise(f.server.watched_s[before:])]
        assert all(gap_s >= 0.01 * 2**attempt for attempt, gap_s in enumerate(gaps_s[:4], start=1)), gaps_s


async def test_lists_come_from_time_to_time(tmp_path: Path) -> None:
    async with telling(tmp_path, rules=WatchRules(resync_s=0.05)) as f:
        await f.server.put("s1", endpoint("10.0.0.1"))
        await f.ready(A)
        lists = f.server.lists
        await f.server.put("s1", endpoint("10.0.0.2"))
        await f.server.put("s1", endpoint("10.0.0.3"))
        await f.ready(C)
        await f.server.put("s1", endpoint("10.0.0.1"))
        await eventually(lambda: f.server.lists > lists)
        await f.ready(A)


async def test_several_services_and_named_ports(tmp_path: Path) -> None:
    pools = ("kubernetes:///main.ns.svc:grpc", "kubernetes:///canary.ns:50052", "10.9.9.9:1")
    assert fixed_addresses(pools) == ("10.9.9.9:1",)
    async with telling(tmp_path, addresses=pools) as f:
        await f.server.put("m", endpoint("10.0.0.1"), service="main", port=7000)
        await f.server.put("c", endpoint("10.0.0.2"), service="canary", port=50052)
        await f.ready("10.0.0.1:7000", "10.0.0.2:50052")
        assert f.told[-1] == {"10.0.0.1:7000": "main.ns.svc", "10.0.0.2:50052": "canary.ns.svc"}


@pytest.mark.parametrize("status", [403, 500])
async def test_what_the_api_server_refused_is_said(tmp_path: Path, status: int) -> None:
    """It is all that is known where nothing was ever listed."""
    server = StandIn()
    await server.start()
    server.refuse = status
    with capture_logs() as logs:
        async with watch_services((ADDRESS,), kubeconfig(tmp_path, server), lambda ready: None, QUICK):
            await eventually(lambda: any("problem" in line for line in logs))
    problem = next(line["problem"] for line in logs if "problem" in line)
    assert f"refused to say which versions of discovery.k8s.io it serves: {status}" in problem
    assert ("may this service account" in problem) is (status == 403)
    await server.stop()


async def test_why_no_api_server_can_be_asked_is_said(tmp_path: Path) -> None:
    """Its name is not known, it refuses, its certificate is another's: each was the name of a class."""
    server = StandIn()
    await server.start()
    await server.stop()
    asked = await api_server(kubeconfig(tmp_path, server))
    with pytest.raises(Unavailable, match=r"ClientConnectorError: .*Connect call failed"):
        await asked.api_version()
    await asked.aclose()


@pytest.mark.parametrize("user", ["{tokenFile: token}", "{exec: {apiVersion: client.authentication.k8s.io/v1, "
                                  "command: cat, args: [CREDENTIAL]}}"], ids=["file", "plugin"])
async def test_a_token_of_a_kubeconfig_is_asked_for_again(tmp_path: Path, user: str) -> None:
    """Those of clouds end after a quarter of an hour, or an hour."""
    def issue(token: str) -> None:
        server.token = token
        (tmp_path / "token").write_text(token)
        (tmp_path / "credential").write_text(json.dumps({
            "apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
            "status": {"token": token, "expirationTimestamp": "2020-01-01T00:00:00Z"}}))

    server = StandIn()
    issue("first")
    await server.start()
    await server.put("s1", endpoint("10.0.0.1"))
    told = Told(server)
    config = kubeconfig(tmp_path, server, user.replace("CREDENTIAL", str(tmp_path / "credential")))
    async with watch_services((ADDRESS,), config, told.seen, QUICK):
        await told.ready(A)
        issue("second")
        await server.cut()
        await server.put("s1", endpoint("10.0.0.2"))
        await told.ready(B)
    await server.stop()


async def test_pods_that_nobody_could_ask_for_are_missed(tmp_path: Path) -> None:
    """Without the right to list them a target has no draft, and 0 expected would say that it shall have none."""
    server = StandIn()
    await server.start()
    server.refuse, told = 403, Told(server)
    async with watch_services((ADDRESS,), kubeconfig(tmp_path, server), told.seen, QUICK) as directory:
        assert directory.num_listed == 1
        server.refuse = 0
        await eventually(lambda: directory.in_sync)
        assert directory.num_listed == 0, "the list is there, and empty"
    await server.stop()


async def test_plain_addresses_need_no_cluster() -> None:
    async with watch_services(("127.0.0.1:1",), "", lambda ready: None) as found:
        await asyncio.sleep(0)
        assert found.num_listed == 0 and found.in_sync


def test_who_asks_no_cluster_loads_no_client_of_it() -> None:
    """The Kubernetes client is an extra, takes half a second and 40 MB."""
    program = "import sys, slipstream.wire.discovery as _; sys.exit('kubernetes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


async def test_no_cluster_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not set; run in a pod .*wire\.kubeconfig"):
        await api_server()
    with pytest.raises(ConfigError, match="need a cluster"):
        await api_server(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["", "- a list", "{open", "no configuration", "{apiVersion: v1, current-context: c, "
                                  "contexts: [{name: c, context: {cluster: k}}], clusters: [{name: k, cluster: "
                                  "{server: 'https://k', certificate-authority-data: odd!}}]}"])
async def test_a_kubeconfig_that_is_none_is_said(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"need a cluster: .*wire\.kubeconfig"):
        await api_server(str(file))


@pytest.mark.parametrize("address", ["kubernetes:///target:50051", "kubernetes://target.ns:1", "kubernetes:///t.ns",
                                     "kubernetes:///T.ns:1", "kubernetes:///t.ns:1/x"])
def test_malformed_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="SERVICE"):
        service_address(address)


def test_addresses() -> None:
    assert service_address("target.ns.svc:50051") is None
    assert service_address(ADDRESS) == ServiceAddress("target", "ns", "50051")


def a_slice(**changes: Any) -> dict[str, Any]:
    return {"addressType": "IPv4", "endpoints": [endpoint("10.0.0.1")], "ports": [{"name": "grpc", "port": 50051}],
            **changes}


@pytest.mark.parametrize("changes", [
    {"endpoints": "all"}, {"endpoints": [3]}, {"endpoints": [{"addresses": []}]}, {"endpoints": [{"addresses": [7]}]},
    {"endpoints": [{"addresses": ["10.0.0.1"], "conditions": []}]} | {"ports": {}}, {"ports": "x"},
    {"endpoints": [endpoint("10.0.0.1")] * 1001}, {"endpoints": [{"addresses": ["::g"]}]}])
def test_slices_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_endpoints(a_slice(**changes), "50051")


def test_ports_must_be_there() -> None:
    assert parse_endpoints(a_slice(), "50052") == () and parse_endpoints(a_slice(ports=None), "50051") == ()
    assert parse_endpoints(a_slice(ports=[{"name": "grpc", "port": 1, "protocol": "UDP"}]), "grpc") == ()
    assert parse_endpoints(a_slice(addressType="FQDN"), "50051") == ()


def test_a_pod_of_two_families_or_two_slices_counts_once() -> None:
    four = Endpoint("10.0.0.1:1", "p", True, False)
    six = Endpoint("[fd00::1]:1", "p", True, False)
    old = Endpoint("10.0.0.1:1", "p", False, False)
    assert set(merge_slices([(six,), (four,)])) == set(merge_slices([(four,), (six,)])) == {"10.0.0.1:1"}
    assert merge_slices([(old,), (four,)]) == merge_slices([(four,), (old,)]) == {"10.0.0.1:1": four}
    assert parse_endpoints(a_slice(addressType="IPv6", endpoints=[endpoint("fd00::1")]), "grpc")[0].address == (
        "[fd00::1]:50051")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_roster() -> None:
    clock = Clock()
    roster = Roster(clock, RosterRules(forget_after_s=30, silent_s=60))
    assert roster.update({A: "n", B: "n"}) == ([A, B], {}) and roster.update({A: "n", B: "n"}) == ([], {})
    assert roster.update({A: "n"}) == ([], {B: True}) and roster.update({A: "n"}) == ([], {})
    assert roster.is_delisted(B) and not roster.is_delisted(A) and not roster.expired()
    clock.now_s = 29
    assert roster.update({A: "n", B: "n"}) == ([], {B: False}) and not roster.is_delisted(B), "it came back as it was"
    roster.mark_alive(A)
    roster.update({A: "n"})
    clock.now_s = 60
    assert roster.expired() == [B]
    roster.forget(B)
    clock.now_s = 200
    assert roster.expired() == [], "nobody is heard: nobody is forgotten"
    assert roster.update({A: "n", C: "n"}) == ([C], {})
    assert roster.expired() == [], "who is in a new list is there, if cut off"
    clock.now_s = 261
    roster.mark_alive(C)
    assert roster.expired() == [A], "but one who is silent while another is there, and the list is old"
    assert roster.update({A: "n", B: "n", C: "n"}) == ([B], {})
