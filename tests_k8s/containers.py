"""A real node: Kubernetes' own kubelet and kube-proxy, and pods in Docker's containers, on Docker's own network.

It needs root, Docker, socat (for `kubectl port-forward`), and what `make k8s-cluster ARGS=--node` builds. Pods reach
this machine, and it them, by Docker's bridge. Services have addresses and names. Network policies are not enforced. It
knows nothing about what runs in the pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path

from bench.fleet import free_port
from deploy.cluster import NODE_PROGRAMS, folder
from tests_k8s.cluster import Cluster
from tests_k8s.names import names

NAME = "containers"
PAUSE = "slipstream-pause"  # the image whose process holds a pod's network
PAUSE_PROGRAM = "int pause(void); int main(void) { for (;;) pause(); }\n"
OF_PODS = ("--filter", "label=io.kubernetes.pod.namespace")


def missing(images: Sequence[str]) -> str:
    """What a node of containers lacks here; empty: nothing."""
    if os.geteuid() != 0:
        return "root"
    programs = [name for name in NODE_PROGRAMS if not (folder() / name).exists()]
    if programs:
        return f"{', '.join(programs)}: run `make k8s-cluster ARGS=--node`"
    absent = [name for name in ("docker", "socat", "gcc") if shutil.which(name) is None]
    if absent or _docker("info").returncode:
        return ", ".join(absent) or "Docker's daemon"
    unbuilt = [image for image in images if _docker("image", "inspect", image).returncode]
    return f"{', '.join(unbuilt)}: run `make image`" if unbuilt else ""


def bridge() -> str:
    """This machine's address on Docker's network: the first one."""
    subnet = _docker("network", "inspect", "bridge", "-f", "{{(index .IPAM.Config 0).Subnet}}").stdout.strip()
    return str(next(ip_network(subnet).hosts()))


class ContainerNode:
    """Made by ``on_containers``."""

    def __init__(self, cluster: Cluster, place: Path) -> None:
        self._cluster = cluster
        self._place = place
        self._address = bridge()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the kubelet, which registers the node, and kube-proxy."""
        self._place.mkdir(parents=True, exist_ok=True)
        if _docker("image", "inspect", PAUSE).returncode:
            (self._place / "pause.c").write_text(PAUSE_PROGRAM)
            subprocess.run(["gcc", "-static", "-o", "pause", "pause.c"], cwd=self._place, check=True)
            packed = subprocess.run(["tar", "-c", "pause"], cwd=self._place, check=True, capture_output=True).stdout
            subprocess.run(["docker", "import", "-c", 'ENTRYPOINT ["/pause"]', "-", PAUSE], input=packed, check=True,
                           capture_output=True)
        login = f"--kubeconfig={self._cluster.kubeconfig}"
        self._run("kubelet", login, f"--root-dir={self._place / 'pods'}", f"--hostname-override={NAME}",
                  f"--node-ip={self._address}", f"--address={self._address}", f"--pod-infra-container-image={PAUSE}",
                  f"--cluster-dns={self._address}", "--cluster-domain=cluster.local", "--cgroup-driver=cgroupfs",
                  "--fail-swap-on=false", "--cgroups-per-qos=false", "--enforce-node-allocatable=",
                  "--anonymous-auth=true", "--authorization-mode=AlwaysAllow", "--eviction-hard=memory.available<50Mi",
                  "--read-only-port=0", "--healthz-port=0", "--network-plugin=", "--image-gc-high-threshold=100")
        self._run("kube-proxy", login, f"--hostname-override={NAME}", "--proxy-mode=iptables",
                  "--conntrack-max-per-core=0", "--healthz-bind-address=",
                  f"--metrics-bind-address=127.0.0.1:{free_port()}")

    def stop(self) -> None:
        """End both, every container of a pod, and what they mounted; kube-proxy's rules go, too."""
        for process in self._processes:
            process.terminate()
            process.wait()
        if pods := _docker("ps", "-aq", *OF_PODS).stdout.split():
            _docker("rm", "-f", *pods)
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in reversed([mount for mount in mounted if mount.startswith(str(self._place))]):
            subprocess.run(["umount", mount], check=False)
        subprocess.run([folder() / "kube-proxy", "--cleanup"], check=False, capture_output=True)

    async def service(self, name: str, namespace: str) -> str:
        """The address of a service, which this machine reaches, too; the name itself if there is none such."""
        found = await self.find(name, namespace)
        return found[0] if found else f"{name}.{namespace}.svc"

    def kill(self, namespace: str, container: str) -> None:
        """Kill the process of all such containers (SIGKILL)."""
        found = _docker("ps", "-q", "--filter", f"label=io.kubernetes.pod.namespace={namespace}",
                        "--filter", f"label=io.kubernetes.container.name={container}").stdout.split()
        assert found, f"no container {container} runs"
        _docker("kill", *found)

    async def find(self, service: str, namespace: str) -> list[str] | None:
        """The addresses behind a service's name: its own, or those of its ready pods."""
        return await asyncio.to_thread(self._find, service, namespace)

    def _find(self, service: str, namespace: str) -> list[str] | None:
        services = self._cluster.get(f"/api/v1/namespaces/{namespace}/services")["items"]
        found = next((item for item in services if item["metadata"]["name"] == service), None)
        if found is None:
            return None
        if found["spec"]["clusterIP"] != "None":
            return [found["spec"]["clusterIP"]]
        endpoints = self._cluster.get(f"/api/v1/namespaces/{namespace}/endpoints/{service}")
        return [address["ip"] for subset in endpoints.get("subsets", ()) for address in subset.get("addresses", ())]

    def logs(self) -> str:
        """The ends of all containers' logs, for whoever asks why."""
        found = []
        for line in _docker("ps", "-a", *OF_PODS, "--format", "{{.ID}} {{.Names}} {{.Status}}").stdout.splitlines():
            said = subprocess.run(["docker", "logs", "--tail=15", line.split()[0]], capture_output=True, text=True)
            found.append(f"--- {line}\n{said.stdout}{said.stderr}")
        return "\n".join(found)

    def _run(self, name: str, *arguments: str) -> None:
        with (self._place / f"{name}.log").open("ab") as log:
            self._processes.append(subprocess.Popen([folder() / name, *arguments], cwd=self._place, stdout=log,
                                                    stderr=log, stdin=subprocess.DEVNULL))


def _docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True)


@asynccontextmanager
async def on_containers(cluster: Cluster, place: Path) -> AsyncIterator[ContainerNode]:
    """A node that takes pods while the block lasts."""
    node = ContainerNode(cluster, place)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(names(bridge(), node.find))
        stack.callback(node.stop)
        await asyncio.to_thread(node.start)
        yield node
