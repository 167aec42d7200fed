"""What a container would see, for a process of this machine: volumes are folders, texts are changed instead of views.

Rules:
1. In commands, arguments, environments and configurations, paths of mounts become their folders, 0.0.0.0 the pod's
   address, and names of services their addresses.
2. Secrets and configurations are written anew when they change, each file at once.
3. The image is this checkout with the Python that runs it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from slipstream.cli.process import SHARED_CORES
from tests.kube import ROOT

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
REFRESH_S = 2.0  # between looks at secrets and configurations; a kubelet takes up to a minute


class Places(Protocol):
    """What a pod is told by its node."""

    async def service(self, name: str, namespace: str) -> str:
        """A service's address; its name if there is no such service."""
        ...

    async def read(self, path: str) -> dict[str, Any]: ...

    async def kubeconfig(self, namespace: str, account: str) -> str:
        """One that logs in as a service account."""
        ...


@dataclass(slots=True)
class View:
    """``pod``: as the API server has it. ``folder``: of this pod alone."""

    pod: Mapping[str, Any]
    folder: Path
    address: str
    places: Places
    _versions: dict[str, str] = field(default_factory=dict)

    @property
    def _namespace(self) -> str:
        return str(self.pod["metadata"]["namespace"])

    async def make(self) -> None:
        """The service account's files and all volumes. Waits for claims that are not bound."""
        (self.folder / "account").mkdir(parents=True)
        if self.pod["spec"].get("automountServiceAccountToken", True):
            account = self.pod["spec"].get("serviceAccountName", "default")
            text = await self.places.kubeconfig(self._namespace, account)
            (self.folder / "account/kubeconfig").write_text(text)
        await self._fill()

    async def follow(self) -> None:
        """Rule 2, until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_S)
            with contextlib.suppress(httpx.HTTPError):
                await self._fill()

    async def command(self, spec: Mapping[str, Any]) -> list[str]:
        given = list(spec.get("command", ["python3", "-m", "slipstream"]))
        assert given[0] == "python3", f"not in the image: {given[0]}"
        environment = await self.environment(spec)
        arguments = [re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], argument)
                     for argument in spec.get("args", ())]
        return [sys.executable, *[await self._local(spec, text) for text in [*given[1:], *arguments]]]

    async def environment(self, spec: Mapping[str, Any]) -> dict[str, str]:
        found = {**SHARED_CORES, "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1",
                 "TMPDIR": await self._local(spec, "/tmp")}
        for entry in spec.get("env", ()):
            if "valueFrom" in entry:
                kind, amount = entry["valueFrom"]["resourceFieldRef"]["resource"].split(".")
                found[entry["name"]] = str(math.ceil(cpus(spec["resources"][kind][amount])))
            else:
                found[entry["name"]] = await self._local(spec, entry["value"])
        return found

    async def _local(self, spec: Mapping[str, Any], text: str) -> str:
        """Rule 1."""
        mounts = {mount["mountPath"]: self._volume(mount["name"]) / mount.get("subPath", "")
                  for mount in spec.get("volumeMounts", ())} | {ACCOUNT: self.folder / "account"}
        for path in mounts.values():
            path.mkdir(parents=True, exist_ok=True)
        names = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
        text = re.sub(rf"(?<![\w./-])({names})(?=[/\"'\s]|$)", lambda match: str(mounts[match[1]]), text)
        text = text.replace("0.0.0.0:", f"{self.address}:")
        for name, namespace in set(re.findall(r"\b([a-z0-9-]+)\.([a-z0-9-]+)\.svc\b", text)):
            text = text.replace(f"{name}.{namespace}.svc", await self.places.service(name, namespace))
        return text

    @property
    def _first(self) -> Mapping[str, Any]:
        """The container whose mounts configurations speak of: all of ours have one."""
        spec: Mapping[str, Any] = self.pod["spec"]["containers"][0]
        return spec

    def _volume(self, name: str) -> Path:
        return self.folder / "volumes" / name

    async def _fill(self) -> None:
        """Make the volumes, and write anew what has changed of secrets and configurations."""
        # Claims first: what is written for a container names the folders of all its mounts.
        for volume in sorted(self.pod["spec"].get("volumes", ()), key=lambda v: "persistentVolumeClaim" not in v):
            place = self._volume(volume["name"])
            if "configMap" in volume or "secret" in volume:
                kind, name = (("configmaps", volume["configMap"]["name"]) if "configMap" in volume
                              else ("secrets", volume["secret"]["secretName"]))
                found = await self.places.read(f"/api/v1/namespaces/{self._namespace}/{kind}/{name}")
                await self._write(place, found, kind == "secrets")
            elif "persistentVolumeClaim" in volume and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(await self._claimed(volume["persistentVolumeClaim"]["claimName"]))
            else:
                place.mkdir(parents=True, exist_ok=True)

    async def _write(self, place: Path, found: Mapping[str, Any], encoded: bool) -> None:
        version = found["metadata"]["resourceVersion"]
        if self._versions.get(str(place)) == version:
            return
        self._versions[str(place)] = version
        for name, text in found.get("data", {}).items():
            written = base64.b64decode(text) if encoded else (await self._local(self._first, text)).encode()
            _put(place / name, written)

    async def _claimed(self, name: str) -> str:
        """The folder of a claim's volume, as soon as it has one."""
        while True:
            claim = await self.places.read(f"/api/v1/namespaces/{self._namespace}/persistentvolumeclaims/{name}")
            if claim.get("status", {}).get("phase") == "Bound":
                volume = await self.places.read(f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}")
                return str(volume["spec"]["hostPath"]["path"])
            await asyncio.sleep(0.5)


def _put(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    part.write_bytes(content)
    part.replace(file)


def cpus(quantity: str) -> float:
    return float(quantity.removesuffix("m")) / (1000 if quantity.endswith("m") else 1)
