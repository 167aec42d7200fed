"""The HTTP surface: routes of the OpenAI API, health and version.

Rules:
1. A body is capped before it is read, and read before anything is done for it.
2. A stream's status is that of its first token: what fails before it is an HTTP error, what fails after it is an event
   ``{"error": …}`` followed by ``[DONE]``.

It knows nothing about targets or how a request is answered.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from router_service.admission import Limit
from router_service.completion import Numbered, TextDelta
from router_service.gate import REQUEST_ID, ApiKeys, Gate, problem_response
from router_service.gateway import Gateway, Job, Run
from router_service.outlet import DONE, EventStream, Presence, event, framed, outlet_of
from router_service.problems import http_problem, problem_of
from router_service.replies import ChatReply, Reply, TextReply
from router_service.schemas import Body, ChatBody, CompletionBody, parse
from slipstream import __version__
from slipstream.base.config import RouterSection
from slipstream.base.errors import InvalidRequest, NotFound, SlipstreamError, TooLarge
from slipstream.observe.log import logger
from slipstream.observe.spans import HEADER, well_formed

BODY_S = 30.0  # a body that takes longer is refused
MAX_BODY_BYTES = 2 << 20  # a larger one is refused: the longest context is a few hundred thousand tokens of text
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDPOINTS = {CHAT: "chat", COMPLETIONS: "completions"}
ADVICE = {
    404: f"no such page; here are POST {CHAT}, POST {COMPLETIONS}, GET /v1/models and GET /health",
    405: f"this page does not take that method; {CHAT} and {COMPLETIONS} take POST, all others GET",
}

Handler = Callable[[Request], Awaitable[Response]]


def create_app(gateway: Gateway, keys: ApiKeys, section: RouterSection) -> ASGIApp:
    """The ASGI application around ``gateway``."""
    app = FastAPI(title="Slipstream", version=__version__, docs_url=None, redoc_url=None)
    surface = Surface(gateway, section)
    app.add_exception_handler(SlipstreamError, surface.refused)
    app.add_exception_handler(HTTPException, surface.no_route)
    app.add_exception_handler(ClientDisconnect, surface.gone)
    app.add_exception_handler(Exception, surface.broken)
    app.add_api_route(CHAT, surface.chat, methods=["POST"], openapi_extra=_schema(ChatBody))
    app.add_api_route(COMPLETIONS, surface.complete, methods=["POST"], openapi_extra=_schema(CompletionBody))
    app.add_api_route("/v1/models", surface.models, methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", surface.model, methods=["GET"])
    app.add_api_route("/health", surface.health, methods=["GET"])
    app.add_api_route("/live", surface.live, methods=["GET"])
    app.add_api_route("/version", surface.version, methods=["GET"])
    return Gate(Endpoints(app, surface), keys, lambda: gateway.leaving)


class Surface:
    """The handlers of all routes."""

    def __init__(self, gateway: Gateway, section: RouterSection) -> None:
        self._gateway = gateway
        self._started_at = int(time.time())
        self._log = logger("http")

    async def chat(self, request: Request) -> Response:
        body = await self._read(request, ChatBody)
        job = await self._gateway.plan_chat(body)
        return await self._answer(request, job, ChatReply, body)

    async def complete(self, request: Request) -> Response:
        body = await self._read(request, CompletionBody)
        job = await self._gateway.plan_completion(body)
        return await self._answer(request, job, TextReply, body)

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, model_id: str) -> Response:
        if model_id != self._gateway.model:
            raise NotFound("model", f"no model {model_id[:100]!r} here; GET /v1/models lists what there is",
                           "model_not_found")
        return json_response(self._model())

    async def health(self) -> Response:
        ready = self._gateway.ready
        return json_response({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    async def live(self) -> Response:
        return json_response({"status": "live"})

    async def version(self) -> Response:
        return json_response({"version": __version__})

    async def refused(self, request: Request, error: Exception) -> Response:
        if request.url.path in ENDPOINTS:
            self._gateway.failed(ENDPOINTS[request.url.path], error)
        problem = problem_of(error)
        if problem.status == 500:
            self._log.error("request failed", error=type(error).__name__)
        return problem_response(problem)

    async def no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        advice = ADVICE.get(error.status_code, str(error.detail))
        response = problem_response(http_problem(error.status_code, advice))
        response.headers.update(error.headers or {})
        return response

    async def gone(self, request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    async def broken(self, request: Request, error: Exception) -> Response:
        return problem_response(problem_of(error))  # the gate hears of it and logs it

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        data = bytearray()
        limit = Limit(_late_body, BODY_S)
        try:
            with limit:
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > MAX_BODY_BYTES:
                        raise TooLarge("body", f"is larger than {MAX_BODY_BYTES} bytes", "request_too_large")
        finally:
            limit.close()
        try:
            raw = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest("body", f"is not JSON: {error.msg} at byte {error.pos}", "invalid_json") from None
        return parse(kind, raw)

    async def _answer(self, request: Request, job: Job, kind: type[ChatReply | TextReply],
                      body: ChatBody | CompletionBody) -> Response:
        job = replace(job, trace=well_formed(request.headers.get(HEADER, "")))
        client = Presence(request.receive, outlet_of(request.scope))
        try:
            with client:
                run, deltas, first = await _begun(self._gateway, job)
        except BaseException:
            client.close()
            raise
        reply = kind(run.id, run.created, job.model, self._gateway.codec, job.options.top_logprobs is not None)
        headers = {"x-slipstream-mode": run.mode}
        if body.stream:
            events = self._events(run, reply, deltas, first, body.include_usage, request.scope[REQUEST_ID])
            return EventStream(events, client, run.aclose, headers)
        try:
            with client:
                answers = await _collected(run, deltas, first)
        finally:
            client.close()
        return json_response(reply.whole(answers, run.usage()), headers=headers)

    async def _events(self, run: Run, reply: Reply, deltas: Deltas, first: Numbered,
                      include_usage: bool, request_id: str) -> AsyncGenerator[bytes, None]:
        try:
            openings = [event(opening) for number in range(run.job.num_answers) if (opening := reply.opening(number))]
            data = reply.written(*first)
            if beginning := b"".join([*openings, framed(data) if data else b""]):
                yield beginning
            async for number, delta in deltas:
                if data := reply.written(number, delta):
                    yield framed(data)
            if include_usage:
                yield event(reply.usage_chunk(run.usage()))
        except Exception as error:
            self._log.warning("stream broken", request_id=request_id, answer_id=run.id, error=type(error).__name__)
            self._gateway.failed(run.job.endpoint, error)
            yield event(problem_of(error).body())
        finally:
            await deltas.aclose()
        yield DONE

    def _model(self) -> dict[str, Any]:
        return {"id": self._gateway.model, "object": "model", "created": self._started_at, "owned_by": "slipstream",
                "max_model_len": self._gateway.max_context, "slipstream": {"lossy": self._gateway.lossy}}


class Endpoints:
    """Takes the requests for tokens past FastAPI, whose layers every further token would have to pass as well. It has
    the same routes, for its schema and for other methods; ``app`` answers the rest."""

    def __init__(self, app: ASGIApp, surface: Surface) -> None:
        self._app = app
        self._surface = surface
        self._handlers: dict[str, Handler] = {CHAT: surface.chat, COMPLETIONS: surface.complete}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await handler(request)
        except SlipstreamError as error:
            response = await self._surface.refused(request, error)
        except ClientDisconnect as error:
            response = await self._surface.gone(request, error)
        await response(scope, receive, send)


def _late_body() -> InvalidRequest:
    return InvalidRequest("body", f"did not arrive within {BODY_S:g} s")


def json_response(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


Deltas = AsyncGenerator[Numbered, None]


async def _begun(gateway: Gateway, job: Job) -> tuple[Run, Deltas, Numbered]:
    """A run with its first delta; everything that can fail before the first token has failed by then."""
    run = await gateway.start(job)
    deltas = run.deltas()
    try:
        return run, deltas, await anext(deltas)
    except BaseException:
        await deltas.aclose()
        await run.aclose()
        raise


async def _collected(run: Run, deltas: Deltas, first: Numbered) -> list[list[TextDelta]]:
    """All deltas of each answer; frees the run."""
    answers: list[list[TextDelta]] = [[] for _ in run.completions]
    try:
        answers[first[0]].append(first[1])
        async for number, delta in deltas:
            answers[number].append(delta)
        return answers
    finally:
        await deltas.aclose()
        await run.aclose()


def _schema(kind: type[ChatBody | CompletionBody]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}
