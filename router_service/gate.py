"""The gate: what every HTTP request passes, whatever its route.

Rules:
1. Every path but ``/live`` and ``/health`` needs a key where keys are set, also paths that do not exist.
2. Every answer carries ``x-request-id``: the client's if it is a decent one, else a new one.
3. An error that nobody foresaw becomes a plain 500; its type and place are logged, its text is not.

An ASGI middleware. It knows nothing about bodies.
"""

from __future__ import annotations

import re
import secrets
import traceback
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router_service.keys import ApiKeys
from router_service.problems import Problem, http_problem, problem_of
from slipstream.observe.log import logger

OPEN_PATHS = frozenset({"/live", "/health"})
REQUEST_ID = "slipstream.request_id"  # in the scope, for whoever logs
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
