"""The cluster that the tests use: the one that KUBECONFIG names, else an API server of one's own.

Tests write objects through a door, which is `kubectl proxy`: it takes any way of logging in that a kubeconfig knows.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.fleet import free_port
from tests.api_server import endpoint
from tests.kube import program
from tests_k8s.own_server import LOOPBACK, OwnServer

NOT_OURS = {"events", "bindings", "localsubjectaccessreviews"}  # a cluster's own, or never listed
PATIENCE_S = 300.0


@dataclass(slots=True)
class Door:
    """kubectl proxy: the API server as plain HTTP on a port of this machine."""

    kubeconfig: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        self.process = subprocess.Popen([program("kubectl"), f"--kubeconfig={self.kubeconfig}", "proxy",
                                         f"--port={self.port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/version", timeout=30).status_code == 200:
                    return
            time.sleep(0.2)
        raise AssertionError("kubectl proxy does not reach the API server")

    def shut(self) -> None:
        """At once: connections through it break."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def kubeconfig_through(self, file: Path) -> str:
        """Write a kubeconfig that leads through this door, and return its path."""
        file.write_text(f"""{{apiVersion: v1, kind: Config, current-context: c, users: [{{name: u, user: {{}}}}],
            clusters: [{{name: k, cluster: {{server: '{self.url}'}}}}],
            contexts: [{{name: c, context: {{cluster: k, user: u}}}}]}}""")
        return str(file)


class Cluster:
    """An API server and what tests do with it. ``own`` is None for a cluster that KUBECONFIG names."""

    def __init__(self, kubeconfig: Path, own: OwnServer | None) -> None:
        self.kubeconfig = kubeconfig
        self.own = own
        self.door = Door(kubeconfig)
        self.door.open()
        self._client = httpx.Client(base_url=self.door.url, timeout=PATIENCE_S)
        served = [version["version"] for version in self.get("/apis/discovery.k8s.io")["versions"]]
        self.slice_version = next(version for version in ("v1", "v1beta1") if version in served)

    def close(self) -> None:
        self._client.close()
        self.door.shut()

    def get(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self._client.get(path).raise_for_status().json()
        return found

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self._client.post(path, json=body).raise_for_status().json()
        return found

    def delete(self, path: str) -> None:
        self._client.delete(path).raise_for_status()

    def run(self, name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """kubectl or helm against this cluster."""
        return subprocess.run([program(name), f"--kubeconfig={self.kubeconfig}", *map(str, arguments)],
                              capture_output=True, text=True, timeout=PATIENCE_S)

    @contextlib.contextmanager
    def namespace(self) -> Iterator[str]:
        """A new namespace that ends with the block."""
        name = f"slipstream-test-{secrets.token_hex(4)}"
        self.post("/api/v1/namespaces", {"metadata": {"name": name}})
        yield name
        self.delete(f"/api/v1/namespaces/{name}")

    def objects(self, namespace: str) -> set[str]:
        """Everything in a namespace, as KIND/NAME."""
        found = set()
        groups = ["/api/v1", *(f"/apis/{group['preferredVersion']['groupVersion']}"
                               for group in self.get("/apis")["groups"])]
        for group in groups:
            for kind in self.get(group)["resources"]:
                if kind["namespaced"] and "list" in kind["verbs"] and kind["name"] not in NOT_OURS:
                    items = self.get(f"{group}/namespaces/{namespace}/{kind['name']}")["items"]
                    found |= {f"{kind['name']}/{item['metadata']['name']}" for item in items}
        return found

    def may(self, account: str, namespace: str, verb: str, group: str, resource: str) -> bool:
        """What `kubectl auth can-i VERB RESOURCE --as=system:serviceaccount:NAMESPACE:ACCOUNT` says."""
        asked = {"user": f"system:serviceaccount:{namespace}:{account}",
                 "groups": ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"],
                 "resourceAttributes": {"namespace": namespace, "verb": verb, "group": group, "resource": resource}}
        found = self.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": asked})
        return bool(found["status"]["allowed"])


@contextlib.contextmanager
def own_cluster(place: Path, address: str = LOOPBACK) -> Iterator[Cluster]:
    """An API server of one's own while the block lasts; see ``OwnServer``."""
    server = OwnServer(place, address)
    try:
        server.start()
        found = Cluster(server.kubeconfig, server)
        yield found
        found.close()
    finally:
        server.stop()


class Slices:
    """EndpointSlices written by hand, as a controller would."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._path = f"/apis/discovery.k8s.io/{cluster.slice_version}/namespaces/{namespace}/endpointslices"

    def put(self, name: str, *endpoints: dict[str, Any], port: int = 50051, service: str = "target") -> None:
        """Make it, or change it to this."""
        body = {"kind": "EndpointSlice", "apiVersion": f"discovery.k8s.io/{self._cluster.slice_version}",
                "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
                "addressType": "IPv4", "endpoints": list(endpoints),
                "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}]}
        done = httpx.put(f"{self._cluster.door.url}{self._path}/{name}", json=body, timeout=PATIENCE_S)
        if done.status_code == 404:
            self._cluster.post(self._path, body)
        else:
            done.raise_for_status()

    def delete(self, name: str) -> None:
        self._cluster.delete(f"{self._path}/{name}")

    def need_loopback(self) -> None:
        """Skip where the API server refuses loopback addresses, as current ones do: processes cannot be pods there."""
        try:
            self.put("probe", endpoint("127.0.0.1"), service="none")
        except httpx.HTTPStatusError:
            pytest.skip("this API server refuses slices with loopback addresses, which 1.20.2 takes")
        self.delete("probe")
