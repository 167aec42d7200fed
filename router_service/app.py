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
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import cache, partial
from os.path import basename
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router_service.connection import COMMENT, DONE, EventStream, Presence, connection_of, event, framed
from router_service.dialects import messages, responses
from router_service.dialects.blocks import Told
from router_service.dialects.chat import ChatBody, ChatReply
from router_service.dialects.completions import CompletionBody, TextReply
from router_service.dialects.openai import (
    DECENT_ID,
    Asked,
    Body,
    Chunks,
    Generation,
    Reply,
    Unknown,
    known,
    parse,
    read_body,
)
from router_service.dialects.problems import Problem, http_problem, problem_of, written_as
from router_service.event_id import HEADER as LAST_EVENT_ID
from router_service.event_id import EventIds, Origin, Reached, check_of, read
from router_service.gateway import Gateway, Run
from router_service.tenants import ANYONE, ApiKeys, Tenant
from router_service.text.deltas import Gathered, TextDelta
from slipstream import __version__
from slipstream.base.errors import InvalidRequest, SlipstreamError, TooLarge
from slipstream.observe.log import logger
from slipstream.observe.spans import HEADER
from slipstream.protocol.chat import BODY_S, MAX_BODY_BYTES

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ENDPOINTS = {CHAT: "chat", COMPLETIONS: "completions", MESSAGES: "chat", RESPONSES: "chat"}
POSTED = (*ENDPOINTS, f"{MESSAGES}/count_tokens", "/tokenize", "/detokenize")
PAGES = (*POSTED, "/v1/models", "/health", "/ready", "/live", "/ping", "/load", "/version", "/openapi.json")
MODEL = "/v1/models/"  # and the name of one
NO_PAGE = f"no such page; here are POST {CHAT}, {COMPLETIONS}, {RESPONSES} and {MESSAGES}, GET /v1/models and /health"
OTHER_METHOD = "this page does not take that method; what makes answers or counts takes POST, all others GET"
MAX_TOLD = 256  # unknown fields that the log names once
OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/ping", "/"})  # the last is what load balancers ask for
PAGE = re.compile(rb"null|https?://.*")  # origins of pages, not of programs that show pages of their own
HERE = re.compile(rb"https?://(([A-Za-z0-9-]+\.)*localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")  # origins of this machine
EXPOSED = b"x-request-id, x-slipstream-mode, x-slipstream-ignored, retry-after"
ASKED_HEADERS = b"access-control-request-headers"
DECENT_HEADERS = re.compile(rb"[A-Za-z0-9, _-]{1,2048}")
REQUEST_ID = "slipstream.request_id"  # in the scope, for whoever logs
TENANT = "slipstream.tenant"  # in the scope: who asks

Made = TypeVar("Made")
Handler = Callable[[Request], Awaitable[Response]]
Measured = Callable[[str], tuple[str, bytes]]  # what a scraper takes -> content type, page
Narrative = messages.MessagesReply | responses.ResponsesReply  # what is told of its deltas is its events


def create_app(gateway: Gateway, keys: ApiKeys | None, measured: Measured | None = None) -> ASGIApp:
    """The ASGI application around ``gateway``. measured: its page of metrics, where it is one of these."""
    return Gate(Surface(gateway, measured), keys, gateway)


class Surface:
    """All pages. An unknown path or method gets an error that lists the known ones."""

    def __init__(self, gateway: Gateway, measured: Measured | None = None) -> None:
        self._gateway = gateway
        self._measured = measured
        self._started_at = int(time.time())
        self._log = logger("http")
        self._left_out_told: set[str] = set()
        self._posts: dict[str, Handler] = {
            CHAT: self.chat, COMPLETIONS: self.complete, MESSAGES: self.messages, RESPONSES: self.responses,
            f"{MESSAGES}/count_tokens": self.count_tokens, "/tokenize": self.tokenize, "/detokenize": self.detokenize}
        self._gets: dict[str, Handler] = {
            "/v1/models": self.models, MODEL: self.model, "/load": self.load, "/live": self.live,
            "/health": self.health, "/ready": self.health, "/ping": self.health, "/version": self.version,
            "/": self.health, "/openapi.json": self.openapi}
        if measured is not None:
            self._gets["/metrics"] = self.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, request = scope["path"], Request(scope, receive)
        try:
            response = await self._page(scope["method"], path)(request)
        except SlipstreamError as error:
            response = self._refused(request, error)
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception as error:  # the gate answers it
            if path in ENDPOINTS:
                self._gateway.failed(ENDPOINTS[path], error)
            raise
        await response(scope, receive, send)

    def _page(self, method: str, path: str) -> Handler:
        pages = self._posts if method == "POST" else self._gets if method in ("GET", "HEAD") else {}
        path = MODEL if path.startswith(MODEL) else path
        if (page := pages.get(path)) is not None:
            return page
        return self.other_method if path in self._posts or path in self._gets else self.no_page

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatReply, *await self._read(request, ChatBody, self._gateway.plan_chat))

    async def complete(self, request: Request) -> Response:
        read = await self._read(request, CompletionBody, self._gateway.plan_completion)
        return await self._answer(request, TextReply, *read)

    async def messages(self, request: Request) -> Response:
        return await self._translated(request, messages.chat_of, messages.NAMES, messages.MessagesReply)

    async def responses(self, request: Request) -> Response:
        return await self._translated(request, responses.chat_of, responses.NAMES, responses.ResponsesReply,
                                      responses.told_again, "input")

    async def count_tokens(self, request: Request) -> Response:
        raw, unknown = await self._json(request)
        with written_as(messages.NAMES):
            asked = self._gateway.plan_chat(parse(ChatBody, messages.chat_of(raw), unknown))
            tokens = await _present(request, partial(self._gateway.tokens, asked))
        return json_response({"input_tokens": len(tokens)}, headers=self._left_out(unknown))

    async def tokenize(self, request: Request) -> Response:
        raw, unknown = await self._json(request)
        if not isinstance(spelt := raw.pop("return_token_strs", None), bool | None):
            raise InvalidRequest("return_token_strs", "must be true or false")
        if "messages" in raw:
            asked = self._gateway.plan_chat(parse(ChatBody, raw, unknown))
        else:
            asked = self._gateway.plan_completion(parse(CompletionBody, raw, unknown))
        if len(asked.prompts) > 1:
            raise InvalidRequest("prompt", "must be one")
        tokens = await _present(request, partial(self._gateway.tokens, asked))
        told = {"count": len(tokens), "max_model_len": self._gateway.info.max_context, "tokens": tokens}
        pieces = self._gateway.codec.pieces
        written = await self._gateway.lanes.beside(  # there may be more than any answer has
            len(tokens), lambda: orjson.dumps(told | ({"token_strs": pieces(tokens)} if spelt else {})),
            request.scope[TENANT].id)
        return Response(written, headers=self._left_out(unknown), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        raw, unknown = await self._json(request)
        asked = known(raw, ("model", "tokens"), {}, unknown)
        text = await _present(request, partial(self._gateway.text, asked.get("model"), asked.get("tokens")))
        return json_response({"prompt": text}, headers=self._left_out(unknown))

    async def load(self, _: Request) -> Response:
        return json_response({"server_load": self._gateway.admission.in_flight})

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.scope["path"].removeprefix(MODEL)
        if not name:
            return await self.models(request)
        self._gateway.named(name)
        return json_response(self._model())

    async def health(self, _: Request) -> Response:
        ready = self._gateway.ready
        return json_response({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    async def live(self, _: Request) -> Response:
        return json_response({"status": "live"})

    async def version(self, _: Request) -> Response:
        return json_response({"version": __version__})

    async def openapi(self, _: Request) -> Response:
        told = described(self._posts, self._gets.keys() - {"/openapi.json"})
        return Response(json.dumps(told), media_type="application/json")  # bounds are longer than orjson's numbers

    async def metrics(self, request: Request) -> Response:
        assert self._measured is not None
        content_type, page = self._measured(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    async def no_page(self, request: Request) -> Response:
        path = request.scope["path"]
        near = _near(path[:100])
        return problem_response(http_problem(404, f"no such page; did you mean {near}?" if near else NO_PAGE), path)

    async def other_method(self, request: Request) -> Response:
        path = request.scope["path"]
        response = problem_response(http_problem(405, OTHER_METHOD), path)
        response.headers["allow"] = _methods(path)["allow"]
        return response

    def _refused(self, request: Request, error: SlipstreamError) -> Response:
        path = request.scope["path"]
        if path in ENDPOINTS:
            self._gateway.failed(ENDPOINTS[path], error)
        problem = problem_of(error)
        if problem.status == 500:
            self._log.error("request failed", request_id=request.scope[REQUEST_ID], error=type(error).__name__,
                            at=_places(error))
        return problem_response(problem, path)

    async def _read(self, request: Request, kind: type[Body],
                    plan: Callable[[Body], Asked]) -> tuple[Asked, Generation, Unknown]:
        """What is asked, and what of its body is looked at later: the rest of that may be large, and may wait."""
        raw, unknown = await self._json(request)
        body = parse(kind, raw, unknown)
        return plan(body), Generation(stream=body.stream, stream_options=body.stream_options, seed=body.seed), unknown

    async def _json(self, request: Request) -> tuple[dict[str, Any], Unknown]:
        """A body, and what takes those of its fields that nobody knows."""
        if (coding := request.headers.get("content-encoding", "identity")) != "identity":
            raise InvalidRequest("body", f"is encoded as {coding[:20]!r}; send it as it is", "invalid_encoding")
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > MAX_BODY_BYTES:
                        raise TooLarge("body", f"is larger than {MAX_BODY_BYTES} bytes", "request_too_large")
        except TimeoutError:
            raise InvalidRequest("body", f"did not arrive within {BODY_S:g} s") from None
        await self._gateway.lanes.pause(len(data))
        return read_body(data), Unknown(self._gateway.strict)

    async def _answer(self, request: Request, reply_to: type[ChatReply | TextReply], asked: Asked, body: Generation,
                      unknown: Unknown) -> Response:
        reached = self._reached(request, asked, body)
        if reached is not None:
            asked = asked.again(reached.origin.seed, reached.origin.identity)
        client, run = await self._begun(request, asked)
        asks_for_ids = "text/event-stream" in request.headers.get("accept", "")
        origin = reached.origin if reached is not None else Origin(
            run.id, run.created, asked.options.sampling.seed, run.identity if asks_for_ids else "")
        reply = reply_to(run.job.options.answer_id or origin.name, origin.created, run.job, self._gateway.codec,
                         run.identity)
        headers = {"x-slipstream-mode": run.mode, **self._left_out(unknown)}
        if body.stream:
            events = self._events(run, reply, self._ids(request, run, origin, reached), body, request.scope[REQUEST_ID])
            return EventStream(events, client, run.aclose, headers)
        answers = [Gathered(reply.detailed) for _ in range(run.job.num_answers)]
        await _taken(run, client, lambda number, delta: answers[number].add(delta))
        deltas = [answer.deltas for answer in answers]
        written = await self._gateway.lanes.beside(
            run.num_told, lambda: orjson.dumps(reply.whole(deltas, run.usage())), run.place.tenant.id)
        return Response(written, headers=headers, media_type="application/json")

    async def _begun(self, request: Request, asked: Asked) -> tuple[Presence, Run]:
        client = Presence(connection_of(request.scope))
        try:
            with client:
                return client, await self._gateway.start(asked, request.scope[TENANT], request.headers.get(HEADER, ""))
        except BaseException:
            client.close()
            raise

    async def _translated(self, request: Request, chat_of: Callable[[dict[str, Any]], dict[str, Any]],
                          names: Mapping[str, str], reply_to: Callable[[Told], Narrative],
                          told_again: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {},
                          conversation: str = "messages") -> Response:
        """An answer of a dialect that is a translation onto chat. ``conversation``: the field that has it."""
        raw, unknown = await self._json(request)
        with written_as(names):
            body = parse(ChatBody, chat_of(raw), unknown)
            raw = told_again(raw)
            asked, streamed = self._gateway.plan_chat(body), bool(body.stream)
            del body
        if asked.num_answers > 1:
            raise InvalidRequest("n", "must be 1")
        options = asked.options
        for name, wanted in (("prompt_logprobs", options.tells_prompt), ("return_token_ids", options.token_ids),
                             ("return_tokens_as_token_ids", options.by_ids),
                             ("logprobs", options.top_logprobs is not None)):
            if wanted:
                raise InvalidRequest(name, f"is told by {CHAT} and {COMPLETIONS} alone", "unsupported_parameter")
        if request.headers.get(LAST_EVENT_ID):
            raise InvalidRequest(LAST_EVENT_ID, f"is for {CHAT} and {COMPLETIONS}; answers here begin anew")
        with written_as({**names, "messages": conversation}):
            client, run = await self._begun(request, asked)
        markups = run.job.markups(self._gateway.codec)
        reply = reply_to(Told(options.answer_id or run.id, run.created, asked.model, markups[0] if markups else None,
                              raw, options.tell_reasoning))
        headers = {"x-slipstream-mode": run.mode, **self._left_out(unknown)}
        if streamed:
            return EventStream(self._narrated(run, reply, request.scope[REQUEST_ID]), client, run.aclose, headers)
        await _taken(run, client, lambda _, delta: reply.told(delta))
        return json_response(reply.whole(run.usage(), run.completions[0].stopped_by), headers=headers)

    async def _narrated(self, run: Run, reply: Narrative, request_id: str) -> AsyncGenerator[bytes, None]:
        beginning = reply.opening(run.usage())
        try:
            async for _, delta in run:
                data = beginning + reply.told(delta)
                beginning = b""
                if data:
                    yield data
            yield reply.closing(run.usage(), run.completions[0].stopped_by)
        except Exception as error:
            self._broken_off(run, request_id, error)
            yield beginning + reply.broken(problem_of(error))

    def _broken_off(self, run: Run, request_id: str, error: Exception) -> None:
        self._log.warning("stream broken", request_id=request_id, answer_id=run.id, error=type(error).__name__)
        run.fail()
        self._gateway.failed(run.job.endpoint, error)

    def _reached(self, request: Request, asked: Asked, body: Generation) -> Reached | None:
        """What the client shows that it has of the answer. Raises InvalidRequest where it cannot be this request's."""
        shown, options = request.headers.get(LAST_EVENT_ID), asked.options
        if not shown:
            return None
        reached = read(shown)
        if not (body.stream and asked.num_answers == 1 and self._gateway.repeats(options)) or options.tells_prompt:
            raise InvalidRequest(LAST_EVENT_ID, "is for streams of one answer that a seed fixes")
        if ((options.max_tokens is not None and reached.tokens > options.max_tokens)
                or (options.seeded and options.sampling.seed != reached.origin.seed)):
            raise InvalidRequest(LAST_EVENT_ID, "is of another request; send the one that it belongs to")
        return reached

    def _ids(self, request: Request, run: Run, origin: Origin, reached: Reached | None) -> EventIds | None:
        """None: nobody asks for them, or the answer could not be computed again."""
        again = origin.identity and run.job.num_answers == 1 and self._gateway.repeats(run.job.options)
        if run.job.options.tells_prompt or (reached is None and not again):
            return None
        return EventIds(origin, check_of(request.scope[TENANT].namespace, run.job.prompts[0]), reached)

    def _left_out(self, unknown: Unknown) -> dict[str, str]:
        if not unknown:
            return {}
        new = [name for name in unknown if name not in self._left_out_told]
        if new and len(self._left_out_told) < MAX_TOLD:
            self._left_out_told.update(new)
            self._log.info("fields left out that nobody knows", names=new)
        return {"x-slipstream-ignored": ", ".join(unknown)}

    async def _events(self, run: Run, reply: Reply, ids: EventIds | None, body: Generation,
                      request_id: str) -> AsyncGenerator[bytes, None]:
        chunks = Chunks(reply, run.usage if body.continuous_usage else None)
        number = "" if ids is None else ids.after(TextDelta())
        beginning = b"" if ids is not None and ids.behind else b"".join(
            [event(opening, number) for choice in range(run.job.num_answers)
             if (opening := chunks.opening(choice, len(run.job.prompts[choice // run.job.options.n])))])
        try:
            async for choice, delta in run:
                if ids is not None:
                    if ids.behind:
                        had, delta = ids.split(delta)
                        chunks.written(choice, had)  # what comes then counts from there
                        yield COMMENT  # computing all of it again takes time
                    number = ids.after(delta)
                data = (chunks.written(choice, delta) if not delta.prompt else await self._gateway.lanes.beside(
                    run.job.num_scores, partial(chunks.written, choice, delta), run.place.tenant.id))
                if data or beginning:
                    yield beginning + framed(data, number) if data else beginning
                    beginning = b""
            if body.include_usage:
                yield event(reply.usage_chunk(run.usage()))
        except Exception as error:
            self._broken_off(run, request_id, error)
            yield event(problem_of(error).body())
        yield DONE

    def _model(self) -> dict[str, Any]:
        """As OpenAI's clients read it, then as Anthropic's do."""
        name, since = self._gateway.model, datetime.fromtimestamp(self._started_at, UTC)
        return {"id": name, "object": "model", "created": self._started_at, "owned_by": "slipstream",
                "type": "model", "display_name": name, "created_at": since.isoformat(),
                "max_model_len": self._gateway.info.max_context, "slipstream": {"lossy": self._gateway.info.lossy}}


async def _present(request: Request, work: Callable[[Tenant], Awaitable[Made]]) -> Made:
    """What ``work`` gives to whoever asks, as long as he is there."""
    client = Presence(connection_of(request.scope))
    try:
        with client:
            return await work(request.scope[TENANT])
    finally:
        client.close()


async def _taken(run: Run, client: Presence, take: Callable[[int, TextDelta], object]) -> None:
    """All of ``run``, as long as its client is there."""
    try:
        with client:
            async for number, delta in run:
                take(number, delta)
    except Exception as error:
        if not isinstance(error, ClientDisconnect):
            run.fail()
        raise
    finally:
        client.close()
        await run.aclose()


def _near(path: str) -> str:
    """The page that was meant, "" for none known: one that ``path`` begins, or nearly is."""
    begun = (page for page in PAGES if len(path) > 3 and f"{page}/".startswith(f"{path.rstrip('/')}/"))
    return next(begun, "") or next(iter(difflib.get_close_matches(path, PAGES, n=1, cutoff=0.7)), "")


def json_response(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def problem_response(problem: Problem, path: str) -> Response:
    """As the dialect of ``path`` writes it."""
    theirs = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    return json_response(messages.error_of(problem) if theirs else problem.body(), problem.status,
                         dict(problem.headers))


def described(posts: Iterable[str], gets: Iterable[str]) -> dict[str, Any]:
    """The pages as OpenAPI has them, and what those of OpenAI's API take."""
    told: dict[str, Any] = {"responses": {"200": {"description": "what was asked for"}}}
    paths = {path: {"post": dict(told)} for path in posts} | {path: {"get": dict(told)} for path in gets}
    kinds = dict[str, Any]()
    for path, kind in ((CHAT, ChatBody), (COMPLETIONS, CompletionBody)):
        schema = dict(_schema(kind))
        kinds |= schema.pop("$defs", {})
        paths[path]["post"]["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    paths[f"{MODEL}{{model_id}}"] = model = paths.pop(MODEL)
    model["get"]["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return {"openapi": "3.1.0", "info": {"title": "Slipstream", "version": __version__}, "paths": paths,
            "components": {"schemas": kinds}}


@cache
def _schema(kind: type[ChatBody | CompletionBody]) -> Mapping[str, Any]:
    return kind.model_json_schema(ref_template="#/components/schemas/{model}")


class Gate:
    """Wraps ``app``; ``keys`` say who may pass, None: whoever comes. Once ``gateway`` is leaving, each answer ends its
    connection."""

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, gateway: Gateway) -> None:
        self._app = app
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
                ours = [(b"x-request-id", request_id), (b"request-id", request_id), *self._readers(headers),
                        *([(b"connection", b"close")] if self._gateway.leaving else [])]
                message = {**message, "headers": [*message.get("headers", ()), *ours]}
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
        if tenant is not None and (connection := connection_of(scope)) is not None:
            connection.set_tenant(tenant.id)
        origin = headers.get(b"origin", b"")
        if scope["method"] == "POST" and not self._reads(origin):
            refusal = http_problem(403, "a router without API keys takes posts of its own machine's pages alone; set "
                                        "router.api_keys_file to serve this one")
            await problem_response(refusal, scope["path"])(scope, receive, answer)
            return
        try:
            await self._app(scope, receive, answer)
        except Exception as error:
            self._log.error("request failed", request_id=request_id.decode(), error=type(error).__name__,
                            at=_places(error))
            if not started:
                await problem_response(problem_of(error), scope["path"])(scope, receive, answer)

    def _reads(self, origin: bytes) -> bool:
        """Whether a page of it may."""
        return self._keys is not None or HERE.fullmatch(origin) is not None or not PAGE.fullmatch(origin)

    def _readers(self, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """What says to a browser that the page which asks may read the answer."""
        origin = headers.get(b"origin")
        if origin is None or not self._reads(origin):
            return []
        asked = headers.get(ASKED_HEADERS, b"")
        allowed = [(b"access-control-allow-headers", asked)] if DECENT_HEADERS.fullmatch(asked) else []
        return [(b"access-control-allow-origin", origin), (b"vary", b"origin"),
                (b"access-control-expose-headers", EXPOSED), *allowed]


def _methods(path: str) -> dict[str, str]:
    methods = "POST, OPTIONS" if path in POSTED else "GET, HEAD, OPTIONS"
    return {"allow": methods, "access-control-allow-methods": methods, "access-control-max-age": "600"}


def _request_id(shown: bytes) -> bytes:
    return shown if DECENT_ID.fullmatch(shown.decode("latin-1")) else secrets.token_hex(16).encode()


def _key(headers: dict[Any, Any]) -> str:
    shown, other = (bytes(headers.get(name, b"")).decode("utf-8", "surrogateescape")
                    for name in (b"authorization", b"x-api-key"))
    scheme, _, key = shown.partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return other.strip()  # the first may be for a proxy on the way


def _places(error: BaseException) -> list[str]:
    return [f"{basename(frame.filename)}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)[-6:]]
