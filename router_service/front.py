"""The public gRPC service's answers: the same bodies, checks and runs as over HTTP, in other messages.

Rules:
1. Options become a body and pass through ``openai.parse``: both surfaces have the same defaults and limits.
2. Calls and reasoning are separated by the same parser as over HTTP. For a resumed answer the parser first reads the
   part that the client has.
3. The first delta has the answer's identity, so that another router can go on with it (``PartialAnswer``).
4. An empty model name means the one that is here.

It knows nothing about gRPC; ``slipstream.wire.inference`` carries it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from router_service.dialects.chat import ChatBody
from router_service.dialects.completions import CompletionBody
from router_service.dialects.openai import MAX_CONTAINERS, Plan, num_containers, parse, read_json
from router_service.gateway import Gateway, Run
from router_service.tenants import Tenant
from router_service.text.calls import new_call_id
from router_service.text.deltas import AnswerToken
from router_service.text.markup import Markup, NamedCall, finish_reason
from slipstream.base.errors import InvalidRequest
from slipstream.protocol.chat import ChatOptions, Delta, Function, Message, TextToken, ToolCall
from slipstream.protocol.grammar import Grammar

# Options that a body has in another form: ``_raw`` converts them.
CONVERTED_OPTIONS = ("logit_bias", "begun", "grammar", "logprobs_mode", "chat_template_kwargs", "tools", "function")
OPTION_NAMES = {"structured_outputs": "grammar", "logprobs": "top_logprobs"}


class GatewayFront:
    """Implements the wire's ``Front`` on a gateway, for one tenant. ``trace``: the client's traceparent."""

    def __init__(self, gateway: Gateway, tenant: Tenant, trace: str = "") -> None:
        self._gateway = gateway
        self._tenant = tenant
        self._trace = trace

    def chat(self, model: str, messages: tuple[Message, ...], options: ChatOptions) -> AsyncGenerator[Delta, None]:
        """Its iteration raises errors of slipstream.base.errors, like all here."""
        def make_plan() -> Plan:
            raw = self._raw(model, options)
            raw["messages"] = list(map(_message, messages))
            if options.top_logprobs is not None:
                raw["logprobs"] = True
            return self._gateway.plan_chat(parse(ChatBody, raw), options.begun)

        return self._run("chat", make_plan, _names(options))

    def complete(self, model: str, prompt: str | Sequence[int],
                 options: ChatOptions) -> AsyncGenerator[Delta, None]:
        def make_plan() -> Plan:
            raw = self._raw(model, options)
            raw["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
            raw["logprobs"] = raw.pop("top_logprobs", None)
            if others := raw.keys() - CompletionBody.model_fields.keys():
                raise InvalidRequest(min(others), "is for Chat alone")
            return self._gateway.plan_completion(parse(CompletionBody, raw), options.begun)

        return self._run("completions", make_plan, _names(options))

    async def models(self) -> list[str]:
        return [self._gateway.model]

    def _raw(self, model: str, options: ChatOptions) -> dict[str, Any]:
        given = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in CONVERTED_OPTIONS}
        raw = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()
               if value not in (None, ())}
        raw |= {"model": model or self._gateway.model, "return_token_ids": True, **_read(options)}
        if options.logit_bias:
            raw["logit_bias"] = {str(token): bias for token, bias in options.logit_bias}
        if options.logprobs_mode is not None:
            raw["logprobs_mode"] = f"{options.logprobs_mode}_logprobs"
        if options.grammar is not None:
            raw |= fields_of(options.grammar)
        return raw

    async def _run(self, endpoint: str, make_plan: Callable[[], Plan],
                   names: Mapping[str, str]) -> AsyncGenerator[Delta, None]:
        try:
            plan = make_plan()
            del make_plan  # and what it refers to, which may be large, and may wait
            run = await self._gateway.start(plan, self._tenant, self._trace)
            try:
                identity, markup = run.identity, await self._markup(run)
                prompts = run.job.returned_prompts(self._gateway.codec)
                async for _, delta in run:
                    if prompts is not None:
                        parts, delta = prompts.scored(delta.prompt), delta._replace(text=prompts.text(0) + delta.text)
                        prompts = None
                        for part in parts:
                            yield Delta(prompt=part)
                    if delta.text or delta.tokens or delta.finish or identity:
                        yield _separated(Delta(delta.text, tuple(map(self._token, delta.tokens)), delta.finish,
                                          run.usage() if delta.finish else None, identity),
                                    markup, run.job.options.return_reasoning)
                        identity = ""
            except Exception:
                run.fail()
                raise
            finally:
                await run.aclose()
        except Exception as error:
            self._gateway.failed(endpoint, error)
            if isinstance(error, InvalidRequest) and (name := names.get(error.field.partition(".")[0])):
                raise InvalidRequest(name, error.message, error.code) from error
            raise

    def _token(self, token: AnswerToken) -> TextToken:
        if token.logprob is None:
            return TextToken(token.id, token.text, token.drafted)
        text = self._gateway.codec.token_text
        top = tuple([(i, text(i), value) for i, value in token.logprob.top])
        return TextToken(token.id, token.text, token.drafted, token.logprob.logprob, top)

    async def _markup(self, run: Run) -> Markup | NamedCall | None:
        job = run.job
        markups = job.markups(self._gateway.codec)
        if not markups:
            return None
        if job.resumed_tokens:
            # Piece by piece, as it came: the search for marks goes over a long text again and again.
            await self._gateway.lanes.off_loop(
                len(job.resumed_tokens), lambda: deque(map(markups[0].push, self._gateway.resumed_text(job)), 0),
                self._tenant.id)
        return markups[0]


def _names(options: ChatOptions) -> Mapping[str, str]:
    """Of a body's fields -> of the options that a client gave."""
    return OPTION_NAMES if options.function is None else OPTION_NAMES | {"tool_choice": "function"}


def fields_of(grammar: Grammar) -> dict[str, Any]:
    """The field of a body that asks for ``grammar``. Raises InvalidRequest."""
    if grammar.kind == "choice":
        return {"structured_outputs": {"choice": read_json("grammar", grammar.source.encode())}}
    key = {"json_schema": "json", "regex": "regex", "lark": "grammar", "ebnf": "grammar"}[grammar.kind]
    return {"structured_outputs": {key: grammar.source}}


def _message(message: Message) -> dict[str, Any]:
    calls = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
             for call in message.tool_calls]
    names = ("tool_call_id", "reasoning_content", "name")
    others = {name: value for name in names if (value := getattr(message, name))}
    return {"role": message.role, "content": message.content, **others, **({"tool_calls": calls} if calls else {})}


def _read(options: ChatOptions) -> dict[str, Any]:
    """The options that are written in JSON, parsed; all of them are bounded together before. Raises InvalidRequest."""
    written = [*(function.parameters for function in options.tools), options.chat_template_kwargs or ""]
    if num_containers(",".join(written).encode()) > MAX_CONTAINERS:
        raise InvalidRequest("tools", f"and chat_template_kwargs hold more than {MAX_CONTAINERS} lists and objects")
    raw: dict[str, Any] = {}
    if options.tools:
        raw["tools"] = [_tool(f"tools[{i}].function", function) for i, function in enumerate(options.tools)]
    if options.chat_template_kwargs is not None:
        raw["chat_template_kwargs"] = read_json("chat_template_kwargs", options.chat_template_kwargs.encode())
    if options.function is not None:
        if options.tool_choice is not None:
            raise InvalidRequest("function", "cannot stand beside tool_choice")
        raw["tool_choice"] = {"type": "function", "function": {"name": options.function}}
    return raw


def _tool(at: str, function: Function) -> dict[str, Any]:
    described = {"description": function.description} if function.description else {}
    schema = ({"parameters": read_json(f"{at}.parameters", function.parameters.encode())}
              if function.parameters else {})
    return {"type": "function", "function": {"name": function.name, **described, **schema}}


def _separated(delta: Delta, markup: Markup | NamedCall | None, return_reasoning: bool) -> Delta:
    """``delta`` with calls and reasoning separated from its text."""
    if markup is None:
        return delta
    parts = markup.push(delta.text, bool(delta.finish), delta.finish == "length")
    calls = [ToolCall(call.name, call.arguments, new_call_id() if call.name else "", call.index)
             for call in parts.calls]
    return delta._replace(text=parts.content, finish=finish_reason(delta.finish, markup),
                          reasoning=parts.reasoning if return_reasoning else "", tool_calls=tuple(calls))
