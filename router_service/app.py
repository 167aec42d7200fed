"""The HTTP surface: what every request passes, the routes of the OpenAI API, health and version.

Rules:
1. Every path but ``/live`` and ``/health`` needs a key where keys are set, also paths that do not exist.
2. Every answer carries ``x-request-id``: the client's if it is a decent one, else a new one.
3. An error that nobody foresaw becomes a plain 500; its type and place are logged, its text is not.
4. A body is capped before it is read, and read before anything is done for it. Lists and objects in it are counted
   first: two bytes of one take hundred of memory, and a million of them keep everybody waiting.
5. A stream's status is that of its first token: what fails before it is an HTTP error, what fails after it is an event
   ``{"error": …}`` followed by ``[DONE]``.
6. Who reads server-sent events by the book says so (``accept: text/event-stream``), and gets events with ids. Who shows
   the last of them with the same body gets what came after it. Nobody else pays for them.

It knows nothing about targets or how a request is answered.
"""

from __future__ import annotations

import re
import secrets
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router_service.admission import Limit
from router_service.connection import COMMENT, DONE, EventStream, Presence, connection_of, event, framed
from router_service.dialects.fields import Unknown
from router_service.dialects.openai import Body, ChatBody, CompletionBody, Options, parse
from router_service.dialects.problems import Problem, http_problem, problem_of
from router_service.dialects.replies import ChatReply, Chunks, Reply, TextReply
from router_service.event_id import HEADER as LAST_EVENT_ID
from router_service.event_id import EventIds, Origin, Reached, check_of, read
from router_service.gateway import Asked, Gateway, Run
from router_service.markup import BARE, Markup, Named
from router_service.tenants import ApiKeys
from router_service.tokens import TextCodec, TextDelta
from slipstream import __version__
from slipstream.base.errors import InvalidRequest, NotFound, SlipstreamError, TooLarge
from slipstream.observe.log import logger
from slipstream.observe.spans import HEADER, well_formed
from slipstream.protocol.chat import MAX_BODY_BYTES, MAX_ITEMS

MAX_CONTAINERS = 4 * MAX_ITEMS  # lists and objects of one body: messages, their contents and parts, and some more
BODY_S = 30.0  # a body that takes longer is refused
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDPOINTS = {CHAT: "chat", COMPLETIONS: "completions"}
ADVICE = {
    404: f"no such page; here are POST {CHAT}, POST {COMPLETIONS}, GET /v1/models and GET /health",
    405: f"this page does not take that method; {CHAT} and {COMPLETIONS} take POST, all others GET",
}
MAX_TOLD = 256  # unknown fields that the log names once
OPEN_PATHS = frozenset({"/live", "/health"})
REQUEST_ID = "slipstream.request_id"  # in the scope, for whoever logs
TENANT = "slipstream.tenant"  # in the scope: who asks
DECENT_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

Handler = Callable[[Request], Awaitable[Response]]


def create_app(gateway: Gateway, keys: ApiKeys) -> ASGIApp:
    """The ASGI application around ``gateway``."""
    return Gate(Surface(gateway), keys, lambda: gateway.leaving)


class Surface:
    """All routes. Requests for tokens go past FastAPI, whose layers every further token would have to pass as well; it
    has the same routes, for its schema and for other methods, and answers the rest."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started_at = int(time.time())
        self._log = logger("http")
        self._left_out_told: set[str] = set()
        self._answers: dict[str, Handler] = {CHAT: self.chat, COMPLETIONS: self.complete}
        self._rest = app = FastAPI(title="Slipstream", version=__version__, docs_url=None, redoc_url=None)
        app.add_exception_handler(SlipstreamError, self.refused)
        app.add_exception_handler(HTTPException, self.no_route)
        app.add_exception_handler(ClientDisconnect, self.gone)
        app.add_exception_handler(Exception, self.broken)
        app.add_api_route(CHAT, self.chat, methods=["POST"], openapi_extra=_schema(ChatBody))
        app.add_api_route(COMPLETIONS, self.complete, methods=["POST"], openapi_extra=_schema(CompletionBody))
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/v1/models/{model_id:path}", self.model, methods=["GET"])
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/live", self.live, methods=["GET"])
        app.add_api_route("/version", self.version, methods=["GET"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answers.get(scope["path"]) if scope["method"] == "POST" else None
        if answer is None:
            await self._rest(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await answer(request)
        except SlipstreamError as error:
            response = await self.refused(request, error)
        except ClientDisconnect as error:
            response = await self.gone(request, error)
        await response(scope, receive, send)

    async def chat(self, request: Request) -> Response:
        body, unknown = await self._read(request, ChatBody)
        asked = self._gateway.plan_chat(body)
        return await self._answer(request, asked, self._chat_reply, body, unknown)

    async def complete(self, request: Request) -> Response:
        body, unknown = await self._read(request, CompletionBody)
        asked = self._gateway.plan_completion(body)
        return await self._answer(request, asked, self._text_reply, body, unknown)

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

    async def _read(self, request: Request, kind: type[Body]) -> tuple[Body, Unknown]:
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
        if _num_containers(data) > MAX_CONTAINERS:
            raise InvalidRequest("body", f"holds more than {MAX_CONTAINERS} lists and objects")
        try:
            raw = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest("body", f"is not JSON: {error.msg} at byte {error.pos}", "invalid_json") from None
        unknown = Unknown(self._gateway.strict)
        return parse(kind, raw, unknown), unknown

    def _chat_reply(self, run: Run, origin: Origin) -> Reply:
        codec, options = self._gateway.codec, run.job.options
        markups = markups_of(codec, options, run.job.prompts[0], run.job.num_answers)
        return ChatReply(options.answer_id or origin.name, origin.created, run.job.model, codec,
                         options.top_logprobs is not None, run.job.prompts if options.token_ids else None, options.n,
                         markups, options.tell_reasoning)

    def _text_reply(self, run: Run, origin: Origin) -> Reply:
        options = run.job.options
        return TextReply(options.answer_id or origin.name, origin.created, run.job.model, self._gateway.codec,
                         options.top_logprobs is not None, run.job.prompts if options.token_ids else None, options.n)

    async def _answer(self, request: Request, asked: Asked, reply_to: Callable[[Run, Origin], Reply],
                      body: ChatBody | CompletionBody, unknown: Unknown) -> Response:
        shown = request.headers.get(LAST_EVENT_ID)
        reached = read(shown) if shown else None
        may_go_on = bool(body.stream) and asked.num_answers == 1 and self._gateway.repeats(asked.options)
        if reached is not None:
            if not may_go_on:
                raise InvalidRequest(LAST_EVENT_ID, "is for streams of one answer that a seed fixes")
            asked = _again(asked, body, reached)
        client = Presence(connection_of(request.scope))
        try:
            with client:
                trace = well_formed(request.headers.get(HEADER, ""))
                run = await self._gateway.start(asked, request.scope[TENANT], trace)
        except BaseException:
            client.close()
            raise
        origin = reached.origin if reached is not None else Origin(
            run.id, run.created, asked.options.sampling.seed, run.identity)
        reply = reply_to(run, origin)
        headers = {"x-slipstream-mode": run.mode, **self._left_out(unknown)}
        if body.stream:
            wanted = reached is not None or "text/event-stream" in request.headers.get("accept", "")
            ids = None
            if wanted and may_go_on and origin.identity:
                ids = EventIds(origin, check_of(request.scope[TENANT].namespace, run.job.prompts[0]), reached)
            events = self._events(run, reply, ids, body, request.scope[REQUEST_ID])
            return EventStream(events, client, run.aclose, headers)
        answers: list[list[TextDelta]] = [[] for _ in run.completions]
        try:
            with client:
                async for number, delta in run:
                    answers[number].append(delta)
        finally:
            client.close()
            await run.aclose()
        return json_response(reply.whole(answers, run.usage()), headers=headers)

    def _left_out(self, unknown: Unknown) -> dict[str, str]:
        if not unknown:
            return {}
        new = [name for name in unknown if name not in self._left_out_told]
        if new and len(self._left_out_told) < MAX_TOLD:
            self._left_out_told.update(new)
            self._log.info("fields left out that nobody knows", names=new)
        return {"x-slipstream-ignored": ", ".join(unknown)}

    async def _events(self, run: Run, reply: Reply, ids: EventIds | None, body: ChatBody | CompletionBody,
                      request_id: str) -> AsyncGenerator[bytes, None]:
        chunks = Chunks(reply, run.usage if body.continuous_usage else None)
        number = "" if ids is None else ids.after(TextDelta())
        beginning = b"" if ids is not None and ids.behind else b"".join(
            [event(opening, number) for choice in range(run.job.num_answers) if (opening := reply.opening(choice))])
        try:
            async for choice, delta in run:
                if ids is not None:
                    if ids.behind:
                        had, delta = ids.split(delta)
                        chunks.written(choice, had)  # what comes then counts from there
                        yield COMMENT  # computing all of it again takes time
                    number = ids.after(delta)
                data = chunks.written(choice, delta)
                if data or beginning:
                    yield beginning + framed(data, number) if data else beginning
                    beginning = b""
            if body.include_usage:
                yield event(reply.usage_chunk(run.usage()))
        except Exception as error:
            self._log.warning("stream broken", request_id=request_id, answer_id=run.id, error=type(error).__name__)
            self._gateway.failed(run.job.endpoint, error)
            yield event(problem_of(error).body())
        yield DONE

    def _model(self) -> dict[str, Any]:
        return {"id": self._gateway.model, "object": "model", "created": self._started_at, "owned_by": "slipstream",
                "max_model_len": self._gateway.max_context, "slipstream": {"lossy": self._gateway.lossy}}


def _again(asked: Asked, body: ChatBody | CompletionBody, reached: Reached) -> Asked:
    """For the answer that its client has ``reached`` so far. Raises InvalidRequest for a request that is another."""
    options, seed = asked.options, reached.origin.seed
    too_many = options.max_tokens is not None and reached.tokens > options.max_tokens
    if too_many or (body.seed is not None and options.sampling.seed != seed):
        raise InvalidRequest(LAST_EVENT_ID, "is of another request; send the one that it belongs to, or leave it out")
    return asked.again(seed, reached.origin.identity)


def markups_of(codec: TextCodec, options: Options, prompt: Sequence[int], count: int) -> list[Markup | Named]:
    """What tells calls and reasoning apart in so many answers to ``prompt``; [] where nobody asks for it."""
    use = options.use if options.use is not None and options.use.offered else None
    if not options.parsed or (use is None and codec.style.thoughts is None):
        return []
    if use is not None and use.named:
        return [Named(use.choice) for _ in range(count)]
    if use is not None and use.forced:
        return [Markup(BARE, use.schemas) for _ in range(count)]
    most = None if use is None or use.parallel else 1
    return [Markup(codec.style, {} if use is None else use.schemas, codec.thinks(prompt), most) for _ in range(count)]


def _num_containers(data: bytearray) -> int:
    """The lists and objects of a JSON text, or enough of them; those in its strings count only where there are few."""
    num = data.count(b"[") + data.count(b"{")
    if num <= MAX_CONTAINERS:
        return num
    early = _num_outside_strings(data[:len(data) // 4])
    return early if early > MAX_CONTAINERS else _num_outside_strings(data)


def _num_outside_strings(data: bytearray) -> int:
    outside = b"".join(data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    return outside.count(b"[") + outside.count(b"{")


def _late_body() -> InvalidRequest:
    return InvalidRequest("body", f"did not arrive within {BODY_S:g} s")


def json_response(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def problem_response(problem: Problem) -> Response:
    return json_response(problem.body(), problem.status, dict(problem.headers))


def _schema(kind: type[ChatBody | CompletionBody]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}


class Gate:
    """Wraps ``app``; ``keys`` say who may pass. Once ``leaving`` says so, each answer ends its connection."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, leaving: Callable[[], bool] = lambda: False) -> None:
        self._app = app
        self._keys = keys
        self._leaving = leaving
        self._log = logger("http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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

        tenant = scope[TENANT] = self._keys.tenant(_bearer(headers))
        if tenant is None and scope["path"] not in OPEN_PATHS:
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


def _request_id(shown: bytes) -> bytes:
    return shown if DECENT_ID.fullmatch(shown) else secrets.token_hex(16).encode()


def _bearer(headers: dict[Any, Any]) -> str:
    scheme, _, key = bytes(headers.get(b"authorization", b"")).decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _places(error: BaseException) -> list[str]:
    return [f"{frame.name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-6:]]
