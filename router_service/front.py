"""The public gRPC service's answers: the same bodies, checks and runs as over HTTP, other clothes.

Rules:
1. Options become a body and pass through ``openai.parse``: both surfaces have the same defaults and limits.
2. The first delta says whose the answer is, so that another router can go on with it (``Begun``).
3. An empty model name means the one that is here.

It knows nothing about gRPC; ``slipstream.wire.inference`` carries it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import fields
from typing import Any

from router_service.dialects.formats import fields_of
from router_service.dialects.openai import ChatBody, CompletionBody, parse
from router_service.gateway import Asked, Gateway
from router_service.tenants import Tenant
from router_service.text.tokens import TextDelta
from slipstream.base.errors import SlipstreamError
from slipstream.protocol.chat import ChatOptions, Delta, Message, TextToken, Usage


class GatewayFront:
    """Implements the wire's ``Front`` on a gateway, for one tenant."""

    def __init__(self, gateway: Gateway, tenant: Tenant) -> None:
        self._gateway = gateway
        self._tenant = tenant

    def chat(self, model: str, messages: tuple[Message, ...], options: ChatOptions) -> AsyncGenerator[Delta, None]:
        """Its iteration raises errors of slipstream.base.errors, like all here."""
        def plan() -> Asked:
            raw = self._raw(model, options)
            raw["messages"] = [{"role": message.role, "content": message.content} for message in messages]
            if options.top_logprobs is not None:
                raw["logprobs"] = True
            return self._gateway.plan_chat(parse(ChatBody, raw), options.begun)

        return self._run("chat", plan)

    def complete(self, model: str, prompt: str, options: ChatOptions) -> AsyncGenerator[Delta, None]:
        def plan() -> Asked:
            raw = self._raw(model, options)
            raw["prompt"] = prompt
            raw["logprobs"] = raw.pop("top_logprobs", None)
            return self._gateway.plan_completion(parse(CompletionBody, raw), options.begun)

        return self._run("completions", plan)

    async def models(self) -> list[str]:
        return [self._gateway.model]

    def _raw(self, model: str, options: ChatOptions) -> dict[str, Any]:
        raw = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in ("begun", "grammar")}
        raw["stop"] = list(options.stop)
        raw["allowed_token_ids"] = list(options.allowed_token_ids) or None
        raw["bad_words"] = list(options.bad_words) or None
        raw["logit_bias"] = {str(token): bias for token, bias in options.logit_bias}
        if options.logprobs_mode is not None:
            raw["logprobs_mode"] = f"{options.logprobs_mode}_logprobs"
        raw["model"] = model or self._gateway.model
        if options.grammar is not None:
            raw |= fields_of(options.grammar)
        return {name: value for name, value in raw.items() if value is not None}

    async def _run(self, endpoint: str, plan: Callable[[], Asked]) -> AsyncGenerator[Delta, None]:
        try:
            run = await self._gateway.start(plan(), self._tenant)
            identity = run.identity
            told = run.job.told(self._gateway.codec)
            try:
                async for _, delta in run:
                    if told is not None:
                        parts, delta = told.scored(delta.prompt), delta._replace(text=told.text(0) + delta.text)
                        told = None
                        for part in parts:
                            yield Delta(prompt=part)
                    if delta.text or delta.tokens or delta.finish or identity:
                        yield _delta(delta, run.usage() if delta.finish else None, identity)
                        identity = ""
            finally:
                await run.aclose()
        except SlipstreamError as error:
            self._gateway.failed(endpoint, error)
            raise


def _delta(delta: TextDelta, usage: Usage | None, identity: str) -> Delta:
    tokens = [TextToken(token.id, token.text, token.drafted,
                        token.logprob.logprob if token.logprob is not None else None) for token in delta.tokens]
    return Delta(delta.text, tuple(tokens), delta.finish, usage, identity)
