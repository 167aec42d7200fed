"""A client of OpenAI's streamed completions that measures the times of the first and the last token, and counts tokens.

Each answer is read by ``http.client`` on a thread of its own, because a library for asyncio takes as long for a token
as some servers do. It knows nothing about the server.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyio import to_thread

from slipstream.base.errors import Unavailable


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
        return await to_thread.run_sync(self._ask, json.dumps(body).encode())

    def _ask(self, body: bytes) -> TimedCompletion:
        began_s = time.perf_counter()
        first_s = last_s = 0.0
        usage: Mapping[str, Any] = {}
        statistics: Mapping[str, Any] = {}
        for data in self._events(body):
            event = json.loads(data)
            if event.get("choices") and event["choices"][0].get("text"):
                last_s = time.perf_counter() - began_s
                first_s = first_s or last_s
            usage, statistics = event.get("usage") or usage, event.get("slipstream") or statistics
        if not usage or not first_s:
            raise Unavailable(f"port {self.port}: the answer has no text or no usage")
        return TimedCompletion(int(usage["completion_tokens"]), first_s, last_s, int(statistics.get("rounds", 0)))

    def _events(self, body: bytes) -> Iterator[bytes]:
        """The data of each event, without the one that ends them."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise Unavailable(f"port {self.port}: {response.status} {response.read(500)!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    yield line[6:]
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"port {self.port}: no whole answer ({error!r})") from error
        finally:
            connection.close()
