"""A stand-in for the API server: EndpointSlices to list and watch over real HTTP, with faults on demand.

It has history, so a watch goes on from where it stopped; ``forget`` drops it (410 Gone), ``cut`` breaks all watches,
``stop`` and ``start`` are a restart on the same port, ``refuse`` answers everything with a status, ``refuse_lists``
each list. Where ``token`` is set, who does not show it gets 401.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

PREFIX = "/apis/discovery.k8s.io"


def endpoint(ip: str, ready: bool | None = True, terminating: bool | None = None, pod: str = "") -> dict[str, Any]:
    conditions = {"ready": ready, "serving": ready, "terminating": terminating}
    return {"addresses": [ip], "conditions": {k: v for k, v in conditions.items() if v is not None},
            "targetRef": {"kind": "Pod", "uid": pod or f"pod-{ip}"}}


class StandIn:
    """Serves ``versions`` of discovery.k8s.io on loopback."""

    def __init__(self, *versions: str) -> None:
        self.versions = versions or ("v1", "v1beta1")
        self.port = 0
        self.refuse = self.refuse_lists = 0
        self.token = ""
        self.lists = 0
        self.watched_s: list[float] = []  # when each watch began
        self.watch_ends_at_once = False
        self.paths: list[str] = []
        self._version = 100
        self._oldest = 100
        self._slices: dict[str, dict[str, Any]] = {}
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._news = asyncio.Condition()
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def watches(self) -> int:
        return len(self.watched_s)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()
        while self._open:
            await asyncio.sleep(0.001)

    async def cut(self) -> None:
        """Break all connections."""
        for writer in list(self._open):
            writer.transport.abort()
        async with self._news:
            self._news.notify_all()

    def forget(self) -> None:
        """No watch can go on from an old version."""
        self._version += 1
        self._oldest = self._version
        self._events.clear()

    async def put(self, name: str, *endpoints: dict[str, Any], port: int = 50051, service: str = "target",
                  kind: str = "IPv4", **more: Any) -> None:
        known = name in self._slices
        found = {"metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
                 "addressType": kind, "endpoints": list(endpoints),
                 "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}], **more}
        await self._happen("MODIFIED" if known else "ADDED", name, found)

    async def delete(self, name: str) -> None:
        await self._happen("DELETED", name, self._slices[name])

    async def send(self, event: object) -> None:
        """Any event to all watches."""
        async with self._news:
            self._version += 1
            self._events.append((self._version, "RAW", {"raw": event}))
            self._news.notify_all()

    async def _happen(self, kind: str, name: str, found: dict[str, Any]) -> None:
        async with self._news:
            self._version += 1
            metadata = {**found["metadata"], "resourceVersion": str(self._version)}
            found = {**found, "metadata": metadata}
            if kind == "DELETED":
                del self._slices[name]
            else:
                self._slices[name] = found
            self._events.append((self._version, kind, found))
            self._news.notify_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                known = not self.token or f"authorization: bearer {self.token}\r\n" in head.lower()
                await (self._answer(line.split()[1].decode(), writer) if known else self._json(writer, 401, {}))
        self._open.discard(writer)
        writer.close()

    async def _answer(self, target: str, writer: asyncio.StreamWriter) -> None:
        address = urlsplit(target)
        asked = {key: values[0] for key, values in parse_qs(address.query).items()}
        self.paths.append(address.path)
        is_list = address.path.endswith("/endpointslices") and asked.get("watch") != "true"
        if status := self.refuse or (self.refuse_lists if is_list else 0):
            return await self._json(writer, status, {"kind": "Status", "code": status})
        if address.path == f"{PREFIX}/":
            versions = [{"groupVersion": f"discovery.k8s.io/{v}", "version": v} for v in self.versions]
            return await self._json(writer, 200, {"name": "discovery.k8s.io", "versions": versions})
        version = address.path.removeprefix(f"{PREFIX}/").partition("/")[0]
        if version not in self.versions or not address.path.endswith("/namespaces/ns/endpointslices"):
            return await self._json(writer, 404, {"kind": "Status", "code": 404})
        service = asked["labelSelector"].removeprefix("kubernetes.io/service-name=")
        if asked.get("watch") == "true":
            return await self._watch(writer, int(asked["resourceVersion"]), service)
        self.lists += 1
        items = [found for found in self._slices.values() if _service(found) == service]
        return await self._json(writer, 200, {"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, writer: asyncio.StreamWriter, since: int, service: str) -> None:
        self.watched_s.append(asyncio.get_running_loop().time())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
        while not self.watch_ends_at_once:
            if since < self._oldest:
                self._chunk(writer, gone)
                break
            for version, kind, found in [event for event in self._events if event[0] > since]:
                since = version
                if kind == "RAW":
                    self._chunk(writer, found["raw"])
                elif _service(found) == service:
                    self._chunk(writer, {"type": kind, "object": found})
            await writer.drain()
            async with self._news:
                while not (writer.is_closing() or any(event[0] > since for event in self._events)):
                    await self._news.wait()
            if writer.is_closing():
                return
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _chunk(self, writer: asyncio.StreamWriter, event: object) -> None:
        line = json.dumps(event).encode() + b"\n"
        writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")

    async def _json(self, writer: asyncio.StreamWriter, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
                     .encode() + data)
        await writer.drain()


def _service(found: dict[str, Any]) -> str:
    return str(found["metadata"]["labels"]["kubernetes.io/service-name"])
