"""A client of OpenAI's streamed completions that measures the times of the first and the last token, and counts tokens.

It uses HTTP/1.1 over a plain socket, because a client library takes as long for a token as some servers do. It knows
nothing about the server.
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


@dataclass(frozen=True, slots=True)
class TimedCompletion:
    """One answer. Seconds from sending the request; ``rounds``: if the server reports them."""

    tokens: int
    first_s: float
    total_s: float
    rounds: int = 0
    num_first: int = 1  # tokens that arrived at ``first_s``

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second after the first piece, which is not counted. 0: the answer is too short."""
        if self.tokens <= self.num_first or self.total_s <= self.first_s:
            return 0.0
        return (self.tokens - self.num_first) / (self.total_s - self.first_s)

    @property
    def end_to_end(self) -> float:
        """Tokens a second from the request to the last token."""
        return self.tokens / self.total_s


@dataclass(frozen=True, slots=True)
class Server:
    """Where completions are served."""

    port: int
    model: str

    async def ask(self, prompt: str | Sequence[int], max_tokens: int, extra: Mapping[str, Any]) -> TimedCompletion:
        """Ask greedily, read all of the answer. Raises Unavailable."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "stream": True,
                "stream_options": {"include_usage": True}, **extra}
        began_s = time.perf_counter()
        first_s = last_s = 0.0
        usage: Mapping[str, Any] = {}
        statistics: Mapping[str, Any] = {}
        async for data in self._events(json.dumps(body).encode()):
            event = json.loads(data)
            if event.get("choices") and event["choices"][0].get("text"):
                last_s = time.perf_counter() - began_s
                first_s = first_s or last_s
            usage, statistics = event.get("usage") or usage, event.get("slipstream") or statistics
        if not usage or not first_s:
            raise Unavailable(f"port {self.port}: the answer has no text or no usage")
        return TimedCompletion(int(usage["completion_tokens"]), first_s, last_s, int(statistics.get("rounds", 0)))

    async def _events(self, body: bytes) -> AsyncIterator[bytes]:
        """The data of each event, without the one that ends them."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=MAX_LINE)
        except OSError as error:
            raise Unavailable(f"port {self.port}: {error}") from error
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
            head = await reader.readuntil(b"\r\n\r\n")
            if (status := int(head.split(b" ", 2)[1])) != 200:
                raise Unavailable(f"port {self.port}: {status} {(await reader.read())[:500]!r}")
            rest = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):  # of a part in chunked encoding
                *lines, rest = (rest + (await reader.readexactly(size + 2))[:-2]).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        yield line[6:]
        except (OSError, EOFError, ValueError) as error:
            raise Unavailable(f"port {self.port}: the answer broke off ({error!r})") from error
        finally:
            writer.close()
