"""A client of OpenAI's streamed completions that measures: when the first token came, when the last, and how many.

It speaks HTTP/1.1 over a bare socket, because a comfortable client takes as long for a token as some servers do. It
knows nothing about who serves.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.base.errors import Unavailable

MAX_LINE = 1 << 20

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer. Seconds from sending the request; ``rounds`` and ``accepted`` where the server tells them."""

    tokens: int
    first_s: float
    total_s: float
    rounds: int = 0
    accepted: int = 0
    prompt_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Of decoding: the first token and what came before it are not counted. 0: too short to say."""
        return (self.tokens - 1) / (self.total_s - self.first_s) if self.tokens > 1 else 0.0

    @property
    def end_to_end(self) -> float:
        """Tokens a second from the request to the last token."""
        return self.tokens / self.total_s


class Refused(Unavailable):
    """An answer that is an error. ``code`` as in the API's shape, "" where the body has none; ``retry_after_s`` 0: it
    does not say when to come back."""

    def __init__(self, port: int, status: int, head: bytes, body: bytes) -> None:
        super().__init__(f"port {port}: {status} {body[:500]!r}")
        told = head.lower().partition(b"\r\nretry-after:")[2].split(b"\r\n", 1)[0]
        self.status, self.retry_after_s = status, float(told or 0)
        try:
            self.code = str(json.loads(body)["error"]["code"])
        except (ValueError, LookupError, TypeError):
            self.code = ""


@dataclass(frozen=True, slots=True)
class Server:
    """Where completions are served. ``kept``: connections that are open and idle, for requests to come; None: each
    request has its own. ``ids``: events shall have ids."""

    port: int
    model: str
    kept: list[Connection] | None = None
    ids: bool = False

    async def ask(self, prompt: str | Sequence[int], max_tokens: int, extra: Mapping[str, Any],
                  came: list[float] | None = None) -> Answered:
        """Ask greedily, read all of the answer; ``came`` is told when each piece came. Raises Refused where the server
        says no, else Unavailable."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "stream": True,
                "stream_options": {"include_usage": True}, **extra}
        began_s = time.perf_counter()
        first_s = last_s = 0.0
        usage: Mapping[str, Any] = {}
        told: Mapping[str, Any] = {}
        async for data in self._events(json.dumps(body).encode()):
            event = json.loads(data)
            if event.get("choices") and event["choices"][0].get("text"):
                last_s = time.perf_counter() - began_s
                first_s = first_s or last_s
                if came is not None:
                    came.append(began_s + last_s)
            usage, told = event.get("usage") or usage, event.get("slipstream") or told
        if not usage or not first_s:
            raise Unavailable(f"port {self.port}: the answer has no text or no usage")
        details = usage.get("completion_tokens_details") or {}
        return Answered(int(usage["completion_tokens"]), first_s, last_s, int(told.get("rounds", 0)),
                        int(details.get("accepted_prediction_tokens") or 0), int(usage["prompt_tokens"]))

    async def _events(self, body: bytes) -> AsyncIterator[bytes]:
        """The data of each event, without the one that ends them."""
        reader, writer = self.kept.pop() if self.kept else await self._open()
        whole, manner = False, b"close" if self.kept is None else b"keep-alive"
        accept = b"text/event-stream" if self.ids else b"application/json"
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b"Accept: %b\r\nContent-Length: %d\r\nConnection: %b\r\n\r\n%b"
                % (accept, len(body), manner, body))
            head = await reader.readuntil(b"\r\n\r\n")
            if (status := int(head.split(b" ", 2)[1])) != 200:
                raise Refused(self.port, status, head, await reader.read(-1 if self.kept is None else MAX_LINE))
            rest = b""
            async for chunk in chunks(reader):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        yield line[6:]
            if self.kept is not None:
                whole = await reader.readuntil(b"\r\n") == b"\r\n"
        except (OSError, EOFError, ValueError) as error:
            raise Unavailable(f"port {self.port}: the answer broke off ({error!r})") from error
        finally:
            if whole and self.kept is not None:
                self.kept.append((reader, writer))
            else:
                writer.close()

    async def _open(self) -> Connection:
        try:
            return await asyncio.open_connection("127.0.0.1", self.port, limit=MAX_LINE)
        except OSError as error:
            raise Unavailable(f"port {self.port}: {error}") from error


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The parts of a body in chunked encoding."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
