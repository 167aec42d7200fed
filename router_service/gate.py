"""The gate: what every HTTP request passes, whatever its route.

Rules:
1. Every path but ``/live`` and ``/health`` needs a key where keys are set, also paths that do not exist. Keys come from
   a file, one a line; empty lines and lines that begin with # do not count.
2. Only digests of keys are kept, and all of them are compared in constant time on every question.
3. Their file is read again when it changes. One that cannot be read or holds no key changes nothing: keys never go, and
   the door never opens, by a mistake. No key is ever logged, nor a line of the file.
4. Every answer carries ``x-request-id``: the client's if it is a decent one, else a new one.
5. An error that nobody foresaw becomes a plain 500; its type and place are logged, its text is not.

An ASGI middleware. It knows nothing about bodies.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router_service.problems import Problem, http_problem, problem_of
from slipstream.base.errors import ConfigError
from slipstream.base.stamp import stamp
from slipstream.observe.log import logger

OPEN_PATHS = frozenset({"/live", "/health"})
REQUEST_ID = "slipstream.request_id"  # in the scope, for whoever logs
LOOK_S = 2.0  # between looks at the file of keys
DECENT_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Gate:
    """Wraps ``app``; ``keys`` say who may pass. Once ``leaving`` says so, each answer ends its connection."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, leaving: Callable[[], bool] = lambda: False) -> None:
        self._app = app
        self._keys = keys
        self._leaving = leaving
        self._log = logger("http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        scope[REQUEST_ID] = request_id.decode()
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                ours = [(b"x-request-id", request_id), *([(b"connection", b"close")] if self._leaving() else [])]
                message = {**message, "headers": [*message.get("headers", ()), *ours]}
            await send(message)

        if scope["path"] not in OPEN_PATHS and not self._keys.open(_bearer(headers)):
            refusal = http_problem(401, "send a valid API key as 'Authorization: Bearer <key>'")
            await problem_response(refusal)(scope, receive, answer)
            return
        try:
            await self._app(scope, receive, answer)
        except Exception as error:
            self._log.error("request failed", request_id=request_id.decode(), error=type(error).__name__,
                            at=_places(error))
            if not started:
                await problem_response(problem_of(error))(scope, receive, answer)


def problem_response(problem: Problem) -> JSONResponse:
    return JSONResponse(problem.body(), problem.status, dict(problem.headers))


def _request_id(shown: bytes) -> bytes:
    return shown if DECENT_ID.fullmatch(shown) else secrets.token_hex(16).encode()


def _bearer(headers: dict[Any, Any]) -> str:
    scheme, _, key = bytes(headers.get(b"authorization", b"")).decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _places(error: BaseException) -> list[str]:
    return [f"{frame.name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-6:]]


class ApiKeys:
    """The keys that open the door; none at all leave it open."""

    def __init__(self, keys: tuple[str, ...] = (), file: Path | None = None) -> None:
        self._digests = tuple(_digest(key) for key in keys)
        self._file = file
        self._stamp = stamp(file) if file is not None else None
        self._log = logger("keys")

    @staticmethod
    def load(path: str) -> ApiKeys:
        """The keys of a file, "" for none. Raises ConfigError for a file that cannot be read or holds no key."""
        return ApiKeys(_read(Path(path)), Path(path)) if path else ApiKeys()

    async def follow(self, look_s: float = LOOK_S) -> None:
        """Take the keys of the file again whenever it changes, until cancelled."""
        while self._file is not None:
            await asyncio.sleep(look_s)
            found = stamp(self._file)
            if found == self._stamp:
                continue
            self._stamp = found
            try:
                self._digests = tuple(_digest(key) for key in _read(self._file))
                self._log.info("keys read again", count=len(self._digests))
            except ConfigError as error:
                self._log.error("keys not read again; the old ones stay", problem=str(error))

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def open(self, key: str) -> bool:
        """Whether ``key`` opens the door."""
        if not self._digests:
            return True
        shown = _digest(key)
        matches = [hmac.compare_digest(shown, digest) for digest in self._digests]
        return any(matches)


def _read(file: Path) -> tuple[str, ...]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"router.api_keys_file: cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"router.api_keys_file: {file} is not UTF-8 text") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"router.api_keys_file: {file} holds no key; write one a line or leave the setting empty")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
