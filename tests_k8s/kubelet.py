"""What an API server asks a node for: logs of containers, and commands beside them (`kubectl logs`, `kubectl exec`).

Forwarding of ports is not here. It knows nothing about how pods run.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from bench.fleet import free_port

STDOUT, STATUS = b"\x01", b"\x03"  # channels of a message, by its first byte
PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
Log = Callable[[str, str, str], Path]  # namespace, pod, container -> its log
Begin = Callable[[str, str, str, Sequence[str]], Awaitable[asyncio.subprocess.Process]]


@asynccontextmanager
async def kubelet(folder: Path, log: Log, begin: Begin) -> AsyncIterator[int]:
    """Serves on a port of this machine, which it yields. ``begin`` starts a command in a container, its output in a
    pipe."""

    async def logs(request: web.Request) -> web.Response:
        file = log(*_where(request))
        with file.open() as lines:
            wanted = deque(lines, int(request.query["tailLines"]) if "tailLines" in request.query else None)
        return web.Response(text="".join(wanted))

    async def execute(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=PROTOCOLS)
        await socket.prepare(request)
        process = await begin(*_where(request), request.query.getall("command"))
        said, _ = await process.communicate()
        await socket.send_bytes(STDOUT + said)
        await socket.send_bytes(STATUS + json.dumps(_status(process.returncode or 0)).encode())
        await socket.close()
        return socket

    application = web.Application()
    for name, answer in (("containerLogs", logs), ("exec", execute)):
        application.router.add_get(f"/{name}/{{namespace}}/{{pod}}/{{container}}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=await asyncio.to_thread(_certificate, folder)).start()
    yield port
    await runner.cleanup()


def _where(request: web.Request) -> tuple[str, str, str]:
    found = request.match_info
    return found["namespace"], found["pod"], found["container"]


def _status(code: int) -> dict[str, object]:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "message": f"exit status {code}",
            "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]}}


def _certificate(folder: Path) -> ssl.SSLContext:
    """One that nobody signed: the API server of these tests does not ask."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", "kubelet.key",
                    "-out", "kubelet.pem", "-subj", "/CN=kubelet"], cwd=folder, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "kubelet.pem", folder / "kubelet.key")
    return context
