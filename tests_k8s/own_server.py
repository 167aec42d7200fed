"""An API server of one's own: processes, to be killed, restarted and compacted.

Nothing runs in it unless controllers are started and a node (``node`` or ``containers``) is there. It needs what
`make k8s-cluster` builds, and openssl.
"""

from __future__ import annotations

import secrets
import signal
import ssl
import subprocess
import time
from pathlib import Path

import httpx

from bench.fleet import free_port
from deploy.cluster import PROGRAMS, folder
from slipstream.base.errors import Unavailable

LOOPBACK = "127.0.0.1"
START_S = 400.0  # seconds on an idle machine, minutes on one that is busy with something else


def missing() -> list[str]:
    """The programs that are not there."""
    return [name for name in PROGRAMS if not (folder() / name).exists()]


class OwnServer:
    """Processes of one server; ``kubeconfig`` is an administrator's. ``address``: where pods reach it. On loopback pods
    are processes: none gets an account's token, and services have slices alone."""

    def __init__(self, place: Path, address: str = LOOPBACK) -> None:
        self.kubeconfig = place / "kubeconfig"
        self._address = address
        self._place = place
        self._token = secrets.token_hex(16)
        self._etcd_port, self._peer_port, self._port = free_port(), free_port(), free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self._place.mkdir(parents=True, exist_ok=True)
        for command in (["genrsa", "-out", "accounts.key", "2048"],
                        ["rsa", "-in", "accounts.key", "-pubout", "-out", "accounts.pub"]):
            subprocess.run(["openssl", *command], cwd=self._place, check=True, capture_output=True)
        (self._place / "tokens.csv").write_text(f'{self._token},admin,admin,"system:masters"\n')
        etcd, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port}"
        self._run("etcd", f"--data-dir={self._place / 'etcd'}", "--unsafe-no-fsync", f"--listen-client-urls={etcd}",
                  f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peer}",
                  f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}")
        self.start_api()
        self.kubeconfig.write_text(f"""{{apiVersion: v1, kind: Config, current-context: own,
            contexts: [{{name: own, context: {{cluster: own, user: admin}}}}],
            clusters: [{{name: own, cluster: {{server: 'https://{self._address}:{self._port}',
                certificate-authority: {self._place / 'certificates/apiserver.crt'}}}}}],
            users: [{{name: admin, user: {{token: {self._token}}}}}]}}""")

    def start_api(self) -> None:
        """Start the API server and wait until it is ready. Raises Unavailable with the end of its log."""
        processes = ("--endpoint-reconciler-type=none", "--disable-admission-plugins=ServiceAccount")
        self._run("kube-apiserver", f"--etcd-servers=http://127.0.0.1:{self._etcd_port}", "--cert-dir=certificates",
                  f"--bind-address={self._address}", f"--secure-port={self._port}", "--insecure-port=0",
                  f"--advertise-address={self._address}", "--service-cluster-ip-range=10.250.0.0/16",
                  "--kubelet-preferred-address-types=InternalIP",
                  "--service-account-key-file=accounts.pub", "--service-account-signing-key-file=accounts.key",
                  "--service-account-issuer=https://kubernetes.default.svc", "--token-auth-file=tokens.csv",
                  "--authorization-mode=RBAC", *(processes if self._address == LOOPBACK else ()))
        deadline_s = time.monotonic() + START_S
        while not self._ready():
            if time.monotonic() > deadline_s or self._processes["kube-apiserver"].poll() is not None:
                log = (self._place / "kube-apiserver.log").read_text()
                raise Unavailable(f"kube-apiserver was not ready within {START_S:.0f} s; its log ends with:\n"
                                  f"{log[-2000:]}")
            time.sleep(0.5)

    def start_controllers(self) -> None:
        """What makes pods of deployments, gives them to nodes and lists them in slices. The older kind of endpoints
        takes no loopback addresses."""
        shared = (f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--port=0", "--secure-port=0",
                  "--kube-api-qps=200", "--kube-api-burst=400")
        endpoints = ",-endpoint,-endpointslicemirroring" if self._address == LOOPBACK else ""
        self._run("kube-controller-manager", *shared, f"--controllers=*{endpoints}",
                  "--service-account-private-key-file=accounts.key", "--root-ca-file=certificates/apiserver.crt",
                  "--node-monitor-grace-period=300s")
        self._run("kube-scheduler", *shared)

    def end_controllers(self) -> None:
        for name in ("kube-scheduler", "kube-controller-manager"):
            self._end(name, signal.SIGTERM)

    def kill_api(self) -> None:
        """As if its machine had lost power. What it has said is in etcd."""
        self._end("kube-apiserver", signal.SIGKILL)

    def compact(self) -> None:
        """Forget the past: a watch cannot go on from it."""
        etcdctl = [str(folder() / "etcdctl"), f"--endpoints=http://127.0.0.1:{self._etcd_port}"]
        status = subprocess.run([*etcdctl, "endpoint", "status", "-w", "fields"], check=True, capture_output=True,
                                text=True).stdout
        revision = next(line.split(":")[1].strip() for line in status.splitlines() if line.startswith('"Revision"'))
        subprocess.run([*etcdctl, "compact", revision], check=True, capture_output=True)

    def stop(self) -> None:
        for name in list(self._processes):
            self._end(name, signal.SIGTERM)

    def _ready(self) -> bool:
        certificate = self._place / "certificates/apiserver.crt"
        if not certificate.exists():
            return False
        try:
            return httpx.get(f"https://{self._address}:{self._port}/readyz", timeout=10,
                             verify=ssl.create_default_context(cafile=certificate),
                             headers={"Authorization": f"Bearer {self._token}"}).status_code == 200
        except (httpx.HTTPError, ssl.SSLError):
            return False

    def _run(self, name: str, *arguments: str) -> None:
        with (self._place / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen([folder() / name, *arguments], cwd=self._place, stdout=log,
                                                     stderr=log, stdin=subprocess.DEVNULL)

    def _end(self, name: str, how: signal.Signals) -> None:
        process = self._processes.pop(name)
        process.send_signal(how)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
