"""The HTTP surface: what every request passes, the routes of the OpenAI API, health and version.

Rules:
1. Every path but ``/live``, ``/ready``, ``/health``, ``/ping`` and ``/`` needs a key where keys are set, also paths
   that do not exist. OPTIONS does nothing, and needs none.
2. Every answer carries ``x-request-id`` (and ``request-id``, as Anthropic's clients read it): the client's if it is a
   decent one, else a new one.
3. An unexpected error becomes a plain 500; its type and place are logged, but not its message, which may hold a user's
   text.
4. A body's size is limited before it is read, and nothing else is done before it is read.
5. A stream's status is that of its first token: what fails before it is an HTTP error, what fails after it is an event
   ``{"error": …}`` followed by ``[DONE]``.
6. A client that sends ``accept: text/event-stream`` gets events with ids. If it sends the last id with the same body,
   it gets what came after that event. Other clients get no ids, which would only cost them bytes.
7. Web pages of any origin may call where keys are set, because they need a key. Without keys only pages of this machine
   may, or of a program with its own origin scheme: web pages that the router's users visit must not reach it. Cookies
   are never used. Posts of other pages are refused, because a browser sends them without asking, even to an address
   that the page's own DNS name points to.

It knows nothing about targets or how a request is answered.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from router_service.connection import COMMENT, DONE, EventStream, connection_of, event, framed, presence
from router_service.dialects import messages, responses
from router_service.dialects.blocks import AnswerHead
from router_service.dialects.chat import ChatBody, ChatReply
from router_service.dialects.completions import CompletionBody, TextReply
from router_service.dialects.openai import (
    VALID_ID,
    Body,
    Chunks,
    Generation,
    Plan,
    Reply,
    UnknownFields,
    known_fields,
    parse,
    read_body,
)
from router_service.dialects.problems import Problem, http_problem, problem_of, with_field_names
from router_service.event_id import HEADER as LAST_EVENT_ID
from router_service.event_id import EventIds, Origin, ResumePoint, initial_check, parse_event_id
from router_service.gateway import Gateway, Run
from router_service.tenants import ANYONE, ApiKeys, Tenant
from router_service.text.deltas import CollectedAnswer, TextDelta
from slipstream import __version__
from slipstream.base.errors import InvalidRequest, TooLarge
from slipstream.observe.log import bug, logger
from slipstream.observe.spans import HEADER
from slipstream.protocol.chat import BODY_TIMEOUT_S, MAX_BODY_BYTES

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ENDPOINTS = {CHAT: "chat", COMPLETIONS: "completions", MESSAGES: "chat", RESPONSES: "chat"}
MODEL = "/v1/models/"  # and the name of one
NO_SUCH_PAGE = (f"no such page; here are POST {CHAT}, {COMPLETIONS}, {RESPONSES} and {MESSAGES}, GET /v1/models and "
                "/health")
WRONG_METHOD = "this page does not take that method; what makes answers or counts takes POST, all others GET"
MAX_LOGGED_NAMES = 256  # of unknown fields, each logged once
OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/ping", "/"})  # the last is what load balancers ask for
WEB_ORIGIN = re.compile(rb"null|https?://.*")  # of web pages, not of programs that show pages of their own
LOCAL_ORIGIN = re.compile(rb"https?://(([A-Za-z0-9-]+\.)*localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")
EXPOSED = b"x-request-id, x-slipstream-mode, x-slipstream-ignored, retry-after"
REQUESTED_HEADERS = b"access-control-request-headers"
VALID_HEADERS = re.compile(rb"[A-Za-z0-9, _-]{1,2048}")
REQUEST_ID = "slipstream.request_id"  # in the scope, for whoever logs
TENANT = "slipstream.tenant"  # in the scope

Result = TypeVar("Result")
MetricsPage = Callable[[str], tuple[str, bytes]]  # a scraper's accept header -> content type, page
EventReply = messages.MessagesReply | responses.ResponsesReply


class Surface:
    """All pages. An unknown path or method gets an error that lists the known ones."""

    def __init__(self, gateway: Gateway, metrics_page: MetricsPage | None = None) -> None:
        """metrics_page: if it is served on this port, too."""
        self._gateway = gateway
        self._metrics_page = metrics_page
        self._started_at = int(time.time())
        self._log = logger("http")
        self._logged_names: set[str] = set()
        self._gets = GETS if metrics_page is None else {**GETS, "/metrics": Surface.metrics}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, request = scope["path"], Request(scope, receive)
        try:
            response = await self._page(scope["method"], path)(self, request)
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception as error:
            if path in ENDPOINTS:
                self._gateway.failed(ENDPOINTS[path], error)
            problem = problem_of(error)
            if problem.status == 500:  # the gate logs and answers it
                raise
            response = problem_response(problem, path)
        await response(scope, receive, send)

    def _page(self, method: str, path: str) -> Handler:
        pages = POSTS if method == "POST" else self._gets if method in ("GET", "HEAD") else {}
        path = MODEL if path.startswith(MODEL) else path
        if (page := pages.get(path)) is not None:
            return page
        return Surface.wrong_method if path in POSTS or path in self._gets else Surface.no_page

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatReply, *await self._read(request, ChatBody, self._gateway.plan_chat))

    async def complete(self, request: Request) -> Response:
        read = await self._read(request, CompletionBody, self._gateway.plan_completion)
        return await self._answer(request, TextReply, *read)

    async def messages(self, request: Request) -> Response:
        return await self._answer_translated(request, messages.chat_of, messages.FIELD_NAMES, messages.MessagesReply)

    async def responses(self, request: Request) -> Response:
        return await self._answer_translated(request, responses.chat_of, responses.FIELD_NAMES,
                                             responses.ResponsesReply, responses.repeated_fields, "input")

    async def count_tokens(self, request: Request) -> Response:
        raw, unknown = await self._json(request)
        with with_field_names(messages.FIELD_NAMES):
            plan = self._gateway.plan_chat(parse(ChatBody, messages.chat_of(raw), unknown))
            tokens = await _while_connected(request, partial(self._gateway.tokens, plan))
        return json_response({"input_tokens": len(tokens)}, headers=self._ignored_header(unknown))

    async def tokenize(self, request: Request) -> Response:
        raw, unknown = await self._json(request)
        if not isinstance(with_strings := raw.pop("return_token_strs", None), bool | None):
            raise InvalidRequest("return_token_strs", "must be true or false")
        if "messages" in raw:
            plan = self._gateway.plan_chat(parse(ChatBody, raw, unknown))
        else:
            plan = self._gateway.plan_completion(parse(CompletionBody, raw, unknown))
        if len(plan.prompts) > 1:
            raise InvalidRequest("prompt", "must be one")
        tokens = await _while_connected(request, partial(self._gateway.tokens, plan))
        counted = {"count": len(tokens), "max_model_len": self._gateway.info.max_context, "tokens": tokens}
        pieces = self._gateway.codec.pieces
        body = await self._gateway.lanes.off_loop(  # there may be more than any answer has
            len(tokens), lambda: orjson.dumps(counted | ({"token_strs": pieces(tokens)} if with_strings else {})),
            request.scope[TENANT].id)
        return Response(body, headers=self._ignored_header(unknown), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        raw, unknown = await self._json(request)
        fields = known_fields(raw, ("model", "tokens"), {}, unknown)
        text = await _while_connected(request, partial(self._gateway.text, fields.get("model"), fields.get("tokens")))
        return json_response({"prompt": text}, headers=self._ignored_header(unknown))

    async def load(self, _: Request) -> Response:
        return json_response({"server_load": self._gateway.admission.in_flight})

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.scope["path"].removeprefix(MODEL)
        if not name:
            return await self.models(request)
        self._gateway.resolve_model(name)
        return json_response(self._model())

    async def health(self, _: Request) -> Response:
        ready = self._gateway.ready
        return json_response({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    async def live(self, _: Request) -> Response:
        return json_response({"status": "live"})

    async def version(self, _: Request) -> Response:
        return json_response({"version": __version__})

    async def openapi(self, _: Request) -> Response:
        document = openapi_document(POSTS, self._gets.keys() - {"/openapi.json"})
        return Response(json.dumps(document), media_type="application/json")  # bounds are longer than orjson's numbers

    async def metrics(self, _: Request) -> Response:
        assert self._metrics_page is not None
        # Never OpenMetrics: to a Prometheus before 3 the client library writes vllm: as vllm_ there.
        content_type, page = self._metrics_page("")
        return Response(page, headers={"content-type": content_type})

    async def no_page(self, request: Request) -> Response:
        path = request.scope["path"]
        closest = _closest_page(path[:100])
        message = f"no such page; did you mean {closest}?" if closest else NO_SUCH_PAGE
        return problem_response(http_problem(404, message), path)

    async def wrong_method(self, request: Request) -> Response:
        path = request.scope["path"]
        response = problem_response(http_problem(405, WRONG_METHOD), path)
        response.headers["allow"] = _methods(path)["allow"]
        return response

    async def _read(self, request: Request, kind: type[Body],
                    make_plan: Callable[[Body], Plan]) -> tuple[Plan, Generation, UnknownFields]:
        """The plan, and the fields of its body that are needed later: the whole may be large, and may wait."""
        raw, unknown = await self._json(request)
        body = parse(kind, raw, unknown)
        later = Generation(stream=body.stream, stream_options=body.stream_options)
        return make_plan(body), later, unknown

    async def _json(self, request: Request) -> tuple[dict[str, Any], UnknownFields]:
        """A body, and the collector of its unknown fields."""
        if (coding := request.headers.get("content-encoding", "identity")) != "identity":
            raise InvalidRequest("body", f"is encoded as {coding[:20]!r}; send it as it is", "invalid_encoding")
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > MAX_BODY_BYTES:
                        raise TooLarge("body", f"is larger than {MAX_BODY_BYTES} bytes", "request_too_large")
        except TimeoutError:
            raise InvalidRequest("body", f"did not arrive within {BODY_TIMEOUT_S:g} s") from None
        await self._gateway.lanes.wait_to_parse(len(data))
        return read_body(data), UnknownFields(self._gateway.strict)

    async def _answer(self, request: Request, reply_type: type[ChatReply | TextReply], plan: Plan, body: Generation,
                      unknown: UnknownFields) -> Response:
        reached = self._resume_point(request, plan, body)
        if reached is not None:
            plan = plan.repeated(reached.origin.seed, reached.origin.identity)
        run = await self._start(request, plan)
        identity = run.identity
        origin = reached.origin if reached is not None else Origin(
            run.id, run.created, plan.options.sampling.seed, identity)
        reply = reply_type(run.job.options.answer_id or origin.name, origin.created, run.job, self._gateway.codec,
                           identity)
        headers = {"x-slipstream-mode": run.mode, **self._ignored_header(unknown)}
        if body.stream:
            wants_ids = "text/event-stream" in request.headers.get("accept", "")
            ids = None
            if reached is not None or (wants_ids and identity and self._gateway.is_resumable(plan)):
                ids = EventIds(origin, initial_check(run.place.tenant.namespace, run.job.prompts[0]), reached)
            events = self._events(run, reply, ids, body, request.scope[REQUEST_ID])
            return EventStream(events, run.aclose, headers)
        answers = [CollectedAnswer(reply.detailed) for _ in range(run.job.num_answers)]
        await _consume(request, run, lambda number, delta: answers[number].add(delta))
        deltas = [answer.deltas for answer in answers]
        content = await self._gateway.lanes.off_loop(
            run.num_returned, lambda: orjson.dumps(reply.body(deltas, run.usage())), run.place.tenant.id)
        return Response(content, headers=headers, media_type="application/json")

    async def _start(self, request: Request, plan: Plan) -> Run:
        trace = request.headers.get(HEADER, "")
        return await _while_connected(request, partial(self._gateway.start, plan, trace=trace))

    async def _answer_translated(self, request: Request, chat_of: Callable[[dict[str, Any]], dict[str, Any]],
                          names: Mapping[str, str], reply_type: Callable[[AnswerHead], EventReply],
                                 repeated_fields: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {},
                                 conversation: str = "messages") -> Response:
        """An answer of a dialect that is translated to chat. ``conversation``: the dialect's field of it."""
        raw, unknown = await self._json(request)
        with with_field_names(names):
            body = parse(ChatBody, chat_of(raw), unknown)
            raw = repeated_fields(raw)
            plan, streamed = self._gateway.plan_chat(body), bool(body.stream)
            del body
        if plan.num_answers > 1:
            raise InvalidRequest("n", "must be 1")
        options = plan.options
        for name, requested in (("prompt_logprobs", options.returns_prompt),
                                ("return_token_ids", options.return_token_ids),
                                ("return_tokens_as_token_ids", options.tokens_as_ids),
                             ("logprobs", options.top_logprobs is not None)):
            if requested:
                raise InvalidRequest(name, f"is told by {CHAT} and {COMPLETIONS} alone", "unsupported_parameter")
        if request.headers.get(LAST_EVENT_ID):
            raise InvalidRequest(LAST_EVENT_ID, f"is for {CHAT} and {COMPLETIONS}; answers here begin anew")
        with with_field_names({**names, "messages": conversation}):
            run = await self._start(request, plan)
        markups = run.job.markups(self._gateway.codec)
        reply = reply_type(AnswerHead(options.answer_id or run.id, run.created, plan.model,
                                      markups[0] if markups else None,
                              raw, options.return_reasoning))
        headers = {"x-slipstream-mode": run.mode, **self._ignored_header(unknown)}
        if streamed:
            return EventStream(self._reply_events(run, reply, request.scope[REQUEST_ID]), run.aclose, headers)
        await _consume(request, run, lambda _, delta: reply.events(delta))
        return json_response(reply.body(run.usage(), run.completions[0].stopped_by), headers=headers)

    async def _reply_events(self, run: Run, reply: EventReply, request_id: str) -> AsyncGenerator[bytes, None]:
        pending = reply.opening(run.usage())
        try:
            async for _, delta in run:
                data = pending + reply.events(delta)
                pending = b""
                if data:
                    yield data
            yield reply.closing(run.usage(), run.completions[0].stopped_by)
        except Exception as error:
            self._stream_failed(run, request_id, error)
            yield pending + reply.error_events(problem_of(error))

    def _stream_failed(self, run: Run, request_id: str, error: Exception) -> None:
        if problem_of(error).status == 500:
            self._log.error("request failed", request_id=request_id, answer_id=run.id, **bug(error))
        else:
            self._log.warning("stream broken", request_id=request_id, answer_id=run.id, error=type(error).__name__)
        run.fail()
        self._gateway.failed(run.job.endpoint, error)

    def _resume_point(self, request: Request, plan: Plan, body: Generation) -> ResumePoint | None:
        """What the client has of the answer. Raises InvalidRequest if that cannot be of this request."""
        event_id, options = request.headers.get(LAST_EVENT_ID), plan.options
        if not event_id:
            return None
        reached = parse_event_id(event_id)
        if not (body.stream and self._gateway.is_resumable(plan)):
            raise InvalidRequest(LAST_EVENT_ID, "is for streams of one answer that a seed fixes")
        if ((options.max_tokens is not None and reached.tokens > options.max_tokens)
                or (options.seeded and options.sampling.seed != reached.origin.seed)):
            raise InvalidRequest(LAST_EVENT_ID, "is of another request; send the one that it belongs to")
        return reached

    def _ignored_header(self, unknown: UnknownFields) -> dict[str, str]:
        if not unknown:
            return {}
        new = [name for name in unknown if name not in self._logged_names]
        if new and len(self._logged_names) < MAX_LOGGED_NAMES:
            self._logged_names.update(new)
            self._log.info("fields left out that nobody knows", names=new)
        return {"x-slipstream-ignored": ", ".join(unknown)}

    async def _events(self, run: Run, reply: Reply, ids: EventIds | None, body: Generation,
                      request_id: str) -> AsyncGenerator[bytes, None]:
        chunks = Chunks(reply, run.usage if body.continuous_usage else None)
        event_id = "" if ids is None else ids.after(TextDelta())
        pending = b"" if ids is not None and ids.catching_up else b"".join(
            [event(opening, event_id) for choice in range(run.job.num_answers)
             if (opening := chunks.opening(choice, len(run.job.prompts[choice // run.job.options.n])))])
        try:
            async for choice, delta in run:
                if ids is not None:
                    if ids.catching_up:
                        old, delta = ids.split(delta)
                        chunks.chunk(choice, old)  # what follows counts from there
                        yield COMMENT  # computing all of it again takes time
                    event_id = ids.after(delta)
                data = (chunks.chunk(choice, delta) if not delta.prompt else await self._gateway.lanes.off_loop(
                    run.job.num_scores, partial(chunks.chunk, choice, delta), run.place.tenant.id))
                if data or pending:
                    yield pending + framed(data, event_id) if data else pending
                    pending = b""
            if body.include_usage:
                yield event(reply.usage_chunk(run.usage()))
        except Exception as error:
            self._stream_failed(run, request_id, error)
            yield event(problem_of(error).body())
        yield DONE

    def _model(self) -> dict[str, Any]:
        """As OpenAI's clients read it, then as Anthropic's do."""
        name, created = self._gateway.model, datetime.fromtimestamp(self._started_at, UTC)
        context = self._gateway.info.max_context
        return {"id": name, "object": "model", "created": self._started_at, "owned_by": "slipstream",
                "type": "model", "display_name": name, "created_at": created.isoformat(), "lifecycle": "active",
                "max_input_tokens": context, "max_model_len": context,
                "slipstream": {"lossy": self._gateway.info.lossy}}


Handler = Callable[[Surface, Request], Awaitable[Response]]
POSTS: Mapping[str, Handler] = {
    CHAT: Surface.chat, COMPLETIONS: Surface.complete, MESSAGES: Surface.messages, RESPONSES: Surface.responses,
    f"{MESSAGES}/count_tokens": Surface.count_tokens, "/tokenize": Surface.tokenize,
    "/detokenize": Surface.detokenize}
GETS: Mapping[str, Handler] = {
    "/v1/models": Surface.models, MODEL: Surface.model, "/load": Surface.load, "/live": Surface.live,
    "/health": Surface.health, "/ready": Surface.health, "/ping": Surface.health, "/version": Surface.version,
    "/": Surface.health, "/openapi.json": Surface.openapi}


async def _while_connected(request: Request, work: Callable[[Tenant], Awaitable[Result]]) -> Result:
    """The result of ``work`` for the request's tenant, cancelled if the client leaves."""
    with presence(connection_of(request.scope)):
        return await work(request.scope[TENANT])


async def _consume(request: Request, run: Run, take: Callable[[int, TextDelta], object]) -> None:
    """Call ``take`` with all of ``run``'s deltas, and close it. Cancelled if the client leaves."""
    try:
        with presence(connection_of(request.scope)):
            async for number, delta in run:
                take(number, delta)
    except Exception as error:
        if not isinstance(error, ClientDisconnect):
            run.fail()
        raise
    finally:
        await run.aclose()


def _closest_page(path: str) -> str:
    """The page that ``path`` is the beginning of, or nearly is; "" for none."""
    pages = (*POSTS, *GETS)
    longer = (page for page in pages if len(path) > 3 and f"{page}/".startswith(f"{path.rstrip('/')}/"))
    return next(longer, "") or next(iter(difflib.get_close_matches(path, pages, n=1, cutoff=0.7)), "")


def json_response(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def problem_response(problem: Problem, path: str) -> Response:
    """As the dialect of ``path`` writes it."""
    anthropic = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    return json_response(messages.error_of(problem) if anthropic else problem.body(), problem.status,
                         dict(problem.headers))


def openapi_document(posts: Iterable[str], gets: Iterable[str]) -> dict[str, Any]:
    """The pages as OpenAPI has them, and what those of OpenAI's API take."""
    operation: dict[str, Any] = {"responses": {"200": {"description": "what was asked for"}}}
    paths = {path: {"post": dict(operation)} for path in posts} | {path: {"get": dict(operation)} for path in gets}
    schemas = dict[str, Any]()
    for path, kind in ((CHAT, ChatBody), (COMPLETIONS, CompletionBody)):
        schema = dict(_schema(kind))
        schemas |= schema.pop("$defs", {})
        paths[path]["post"]["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    paths[f"{MODEL}{{model_id}}"] = model = paths.pop(MODEL)
    model["get"]["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return {"openapi": "3.1.0", "info": {"title": "Slipstream", "version": __version__}, "paths": paths,
            "components": {"schemas": schemas}}


@cache
def _schema(kind: type[ChatBody | CompletionBody]) -> Mapping[str, Any]:
    return kind.model_json_schema(ref_template="#/components/schemas/{model}")


class Gate:
    """The ASGI application: what every request passes before and after its page. ``keys``: the valid ones; None: no key
    is needed. Once ``gateway`` is leaving, each answer ends its connection. ``metrics_page``: as of ``Surface``."""

    def __init__(self, gateway: Gateway, keys: ApiKeys | None, metrics_page: MetricsPage | None = None) -> None:
        self._surface = Surface(gateway, metrics_page)
        self._keys = keys
        self._gateway = gateway
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
                added = [(b"x-request-id", request_id), (b"request-id", request_id), *self._cors_headers(headers),
                        *([(b"connection", b"close")] if self._gateway.leaving else [])]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        if scope["method"] == "OPTIONS":
            await Response(status_code=204, headers=_methods(scope["path"]))(scope, receive, answer)
            return
        tenant = scope[TENANT] = ANYONE if self._keys is None else self._keys.tenant(_key(headers))
        if tenant is None and scope["path"] not in OPEN_PATHS:
            self._gateway.metrics.failed("authentication_error")
            refusal = http_problem(401, "send a valid API key as 'Authorization: Bearer <key>'")
            await problem_response(refusal, scope["path"])(scope, receive, answer)
            return
        if tenant is not None:
            connection_of(scope).set_tenant(tenant.id)
        origin = headers.get(b"origin", b"")
        if scope["method"] == "POST" and not self._origin_allowed(origin):
            refusal = http_problem(403, "a router without API keys takes posts of its own machine's pages alone; set "
                                        "router.api_keys_file to serve this one")
            await problem_response(refusal, scope["path"])(scope, receive, answer)
            return
        try:
            await self._surface(scope, receive, answer)
        except Exception as error:
            self._log.error("request failed", request_id=request_id.decode(), **bug(error))
            if not started:
                await problem_response(problem_of(error), scope["path"])(scope, receive, answer)

    def _origin_allowed(self, origin: bytes) -> bool:
        """Whether pages of this origin may call."""
        return self._keys is not None or LOCAL_ORIGIN.fullmatch(origin) is not None or not WEB_ORIGIN.fullmatch(origin)

    def _cors_headers(self, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """The headers that let the calling page read the answer."""
        origin = headers.get(b"origin")
        if origin is None or not self._origin_allowed(origin):
            return []
        requested = headers.get(REQUESTED_HEADERS, b"")
        allowed = [(b"access-control-allow-headers", requested)] if VALID_HEADERS.fullmatch(requested) else []
        return [(b"access-control-allow-origin", origin), (b"vary", b"origin"),
                (b"access-control-expose-headers", EXPOSED), *allowed]


def _methods(path: str) -> dict[str, str]:
    methods = "POST, OPTIONS" if path in POSTS else "GET, HEAD, OPTIONS"
    return {"allow": methods, "access-control-allow-methods": methods, "access-control-max-age": "600"}


def _request_id(given: bytes) -> bytes:
    return given if VALID_ID.fullmatch(given.decode("latin-1")) else secrets.token_hex(16).encode()


def _key(headers: dict[Any, Any]) -> str:
    authorization, api_key = (bytes(headers.get(name, b"")).decode("utf-8", "surrogateescape")
                    for name in (b"authorization", b"x-api-key"))
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return api_key.strip()  # the other may be for a proxy on the way
