"""A pod as processes of this machine, with a loopback address of its own.

Rules:
1. What the pod's specification says is done for real: init containers, commands, configuration, secrets, probes over
   HTTP, restarts, preStop hooks, SIGTERM, and SIGKILL when the grace period is over.
2. The image is this checkout; images of anybody else are not there.

There is no isolation: no root file system, no limits, no user of its own, and no network policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from tests_k8s.view import Places, View

IMAGE = "slipstream:"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(slots=True)
class Container:
    """One container of a pod, and its process while there is one."""

    spec: Mapping[str, Any]
    process: asyncio.subprocess.Process | None = None
    started: bool = False
    ready: bool = False
    restarts: int = 0
    code: int | None = None
    since: str = ""
    pulled: bool = True

    def status(self) -> dict[str, Any]:
        if not self.pulled:
            state: dict[str, Any] = {"waiting": {"reason": "ImagePullBackOff"}}
        elif self.code is not None:
            state = {"terminated": {"exitCode": self.code, "reason": "Error" if self.code else "Completed",
                                    "startedAt": self.since, "finishedAt": now()}}
        elif self.process is None:
            state = {"waiting": {"reason": "PodInitializing"}}
        else:
            state = {"running": {"startedAt": self.since}}
        return {"name": self.spec["name"], "image": self.spec["image"], "imageID": "", "ready": self.ready,
                "started": self.started, "restartCount": self.restarts, "state": state}


@dataclass(slots=True)
class Pod:
    """``found``: as the API server has it. ``folder``: for volumes and logs, of this pod alone."""

    found: Mapping[str, Any]
    folder: Path
    address: str
    places: Places
    phase: str = "Pending"
    reports: asyncio.Event = field(default_factory=asyncio.Event)  # something for ``status`` has changed
    view: View = field(init=False)
    inits: list[Container] = field(init=False)
    containers: list[Container] = field(init=False)
    _begun: str = field(default_factory=now)
    _ready_since: str = ""

    def __post_init__(self) -> None:
        self.view = View(self.found, self.folder, self.address, self.places)
        self.inits = [Container(spec) for spec in self.spec.get("initContainers", ())]
        self.containers = [Container(spec) for spec in self.spec["containers"]]

    @property
    def spec(self) -> Mapping[str, Any]:
        spec: Mapping[str, Any] = self.found["spec"]
        return spec

    @property
    def namespace(self) -> str:
        return str(self.found["metadata"]["namespace"])

    @property
    def name(self) -> str:
        return str(self.found["metadata"]["name"])

    @property
    def ready(self) -> bool:
        return self.phase == "Running" and all(container.ready for container in self.containers)

    def status(self) -> dict[str, Any]:
        ready, initialized = self.ready, all(container.code == 0 for container in self.inits)
        self._ready_since = (self._ready_since or now()) if ready else ""
        holds = {"PodScheduled": True, "Initialized": initialized, "ContainersReady": ready, "Ready": ready}
        return {"phase": self.phase, "podIP": self.address, "podIPs": [{"ip": self.address}], "hostIP": "127.0.0.1",
                "startTime": self._begun, "containerStatuses": [c.status() for c in self.containers],
                "initContainerStatuses": [c.status() for c in self.inits],
                "conditions": [{"type": kind, "status": str(bool(held)), "lastProbeTime": None,
                                "lastTransitionTime": self._ready_since or self._begun}
                               for kind, held in holds.items()]}

    async def run(self) -> None:
        """Until cancelled, or until all its containers have ended and none is to be begun again."""
        await self.view.make()
        for container in self.inits:
            while await self._once(container):
                await asyncio.sleep(2)
        self.phase = "Running"
        async with asyncio.TaskGroup() as group:
            refreshing = group.create_task(self.view.follow())
            running = [group.create_task(self._keep(container)) for container in self.containers]
            await asyncio.gather(*running)
            refreshing.cancel()
        self.phase = "Succeeded" if all(container.code == 0 for container in self.containers) else "Failed"
        self.reports.set()

    async def end(self, grace_s: float) -> None:
        """preStop, SIGTERM, and SIGKILL after ``grace_s`` seconds in all. The caller has cancelled ``run``."""
        await asyncio.gather(*(self._end(container, grace_s) for container in [*self.inits, *self.containers]))

    async def execute(self, name: str, command: Sequence[str]) -> asyncio.subprocess.Process:
        """Begin a command beside a container, its output in a pipe."""
        spec = next(container.spec for container in self.containers if container.spec["name"] == name)
        given = await self.view.command({**spec, "command": list(command), "args": []})
        return await asyncio.create_subprocess_exec(
            *given, cwd=self.folder, env=await self.view.environment(spec), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)

    async def _end(self, container: Container, grace_s: float) -> None:
        process = container.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(TimeoutError, ProcessLookupError):
            async with asyncio.timeout(grace_s):
                hook = container.spec.get("lifecycle", {}).get("preStop", {}).get("exec")
                if hook is not None:
                    await (await asyncio.create_subprocess_exec(*hook["command"])).wait()
                process.terminate()
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()

    async def _keep(self, container: Container) -> None:
        """Run it with its probes, and again if the pod is of that kind."""
        while True:
            probing = asyncio.create_task(self._probe(container))
            try:
                await self._once(container)
            finally:
                probing.cancel()
                container.started = container.ready = False
            if self.spec.get("restartPolicy", "Always") == "Never":
                return
            container.restarts += 1
            self.reports.set()
            await asyncio.sleep(min(2.0**container.restarts, 60))

    async def _once(self, container: Container) -> int:
        """Run it to its end, and return its status."""
        container.pulled = container.spec["image"].startswith(IMAGE)
        while not container.pulled:
            self.reports.set()
            await asyncio.sleep(60)
        command, environment = await self.view.command(container.spec), await self.view.environment(container.spec)
        with (self.folder / f"{container.spec['name']}.log").open("ab") as log:
            container.process = await asyncio.create_subprocess_exec(
                *command, cwd=self.folder, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log)
        container.code, container.since = None, now()
        self.reports.set()
        container.code = await container.process.wait()
        self.reports.set()
        return container.code

    async def _probe(self, container: Container) -> None:
        """Startup first, then readiness and liveness beside each other."""
        probes = {name: container.spec.get(f"{name}Probe") for name in ("startup", "readiness", "liveness")}
        if probes["startup"] is not None:
            await self._ask(container, probes["startup"], "startup")
        container.started = True
        container.ready = probes["readiness"] is None and container.process is not None
        self.reports.set()
        await asyncio.gather(*(self._ask(container, probes[name], name) for name in ("readiness", "liveness")
                               if probes[name] is not None))

    async def _ask(self, container: Container, probe: Mapping[str, Any], kind: str) -> None:
        """Probe until cancelled, a startup probe until it is well."""
        failures = 0
        async with httpx.AsyncClient(timeout=probe.get("timeoutSeconds", 1)) as client:
            while True:
                well = container.process is not None and await self._answers(client, container.spec, probe)
                failures = 0 if well else failures + 1
                over = failures >= probe.get("failureThreshold", 3)
                if kind == "readiness" and (well or over) and container.ready != well:
                    container.ready = well
                    self.reports.set()
                elif kind == "startup" and well:
                    return
                elif kind != "readiness" and over and container.process is not None:
                    failures = 0
                    with contextlib.suppress(ProcessLookupError):
                        container.process.send_signal(signal.SIGKILL)
                await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _answers(self, client: httpx.AsyncClient, spec: Mapping[str, Any], probe: Mapping[str, Any]) -> bool:
        port = next(port["containerPort"] for port in spec["ports"] if port["name"] == probe["httpGet"]["port"])
        try:
            return (await client.get(f"http://{self.address}:{port}{probe['httpGet']['path']}")).is_success
        except httpx.HTTPError:
            return False
