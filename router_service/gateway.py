"""The gateway: from a checked body to running answers, for HTTP and gRPC.

Rules:
1. Cheap checks (the model's name, counts) come before a request waits. It gets its place before its text is rendered
   and tokenized (beside the event loop), and is checked against the model's context before it takes more.
2. A ``Run`` holds its place and its answers until ``aclose``, which frees all of them at once and is never left out.
3. No run outlives ``request_timeout_s``, which counts from its arrival; nor does what comes before it.
4. An answer that another router began goes on at a target of the same identity, from the tokens that the client sends;
   without tokens it is computed again from its start.
5. Choice i of a prompt is seeded with seed + i, so it does not depend on how many were asked for. If the client gives
   no seed, each prompt gets its own, so that a repeated prompt gets different answers.

It knows nothing about HTTP or gRPC, nor how answers are written.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any

import orjson

from router_service.admission import Admission, Limit, Place, PoolFallback
from router_service.balance import Balancer
from router_service.dialects.chat import ChatBody
from router_service.dialects.completions import CompletionBody
from router_service.dialects.openai import MAX_ANSWER_SCORES, SEEDS, Body, Job, Options, Plan
from router_service.dialects.problems import with_field_names
from router_service.dialects.tools import without_tool_roles
from router_service.tenants import Tenant
from router_service.text.deltas import NumberedDelta, merged
from router_service.text.tokens import Completion, Detokenizer, Lanes, TextCodec, Turn, too_long
from slipstream.base.config import RouterSection
from slipstream.base.errors import (
    CapacityError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    SlipstreamError,
    Unavailable,
    status_of,
)
from slipstream.grammar.trial import Trials
from slipstream.observe.metrics import RouterMetrics
from slipstream.observe.spans import Span, Spans, well_formed
from slipstream.protocol.chat import PartialAnswer, Usage
from slipstream.protocol.identity import Identity
from slipstream.protocol.requests import MAX_BAD_WORD_TOKENS, MAX_SCORES, NAMESPACE_SEPARATOR, Request, TargetInfo

MAX_N = 128  # answers that one request may ask for to each of its prompts
MAX_ANSWERS = 1024  # to all of its prompts
MAX_SENT_TOKENS = 1 << 21  # tokens of prompts that are sent to targets for one request: as many as its body can hold


class Gateway:
    """Plans and starts requests for one model."""

    def __init__(self, codec: TextCodec, balancer: Balancer, fallback: PoolFallback, metrics: RouterMetrics,
                 section: RouterSection, spans: Spans | None, trials: Trials) -> None:
        """trials: compile grammars to check them."""
        self.codec = codec
        self.metrics = metrics
        self.spans = spans
        self.admission = Admission(section.max_in_flight, section.max_wait_s, metrics)
        self.leaving = False
        self.balancer = balancer
        self._fallback = fallback
        self._section = section
        self.lanes = Lanes()
        self._trials = trials  # in a thread of its own: a slow grammar delays no text

    @property
    def ready(self) -> bool:
        return self.balancer.ready and not self.leaving

    @property
    def model(self) -> str:
        """The name that clients use. Raises Unavailable while no target has reported its own."""
        return self._section.model_name or self.info.model_id

    def resolve_model(self, name: str | None) -> str:
        """The name of the model here, which ``name`` is, too, unless it is None or "". Raises NotFound, Unavailable."""
        model = self.model
        if name not in (None, "", model):
            raise NotFound("model", f"no model {str(name)[:100]!r} here; it is {model!r}, or leave the field out",
                           "model_not_found")
        return model

    @property
    def info(self) -> TargetInfo:
        """What a target reports. Raises Unavailable while none has."""
        info = self.balancer.info
        if info is None:
            raise Unavailable("no target has answered yet; try again soon")
        return info

    @property
    def strict(self) -> bool:
        """Whether unknown fields are refused."""
        return self._section.strict

    def is_resumable(self, plan: Plan) -> bool:
        """Whether it is for one answer, without its prompt, that a seed fixes here."""
        fixed = plan.options.sampling.greedy or not (self.info.lossy or "keyed_sampling" in self.info.without)
        return fixed and plan.num_answers == 1 and not plan.options.returns_prompt

    def leave(self) -> None:
        """From now on each answer asks its client to send the next request elsewhere; the request itself is still
        answered."""
        self.leaving = True

    async def warm(self) -> None:
        """Prepare what the first grammar would have to wait for."""
        await self._trials.warm()

    def close(self) -> None:
        """Call it when nothing runs any more."""
        self.lanes.close()
        self._trials.close()
        self.codec.close()

    def plan_chat(self, body: ChatBody, begun: PartialAnswer | None = None) -> Plan:
        """Raises InvalidRequest, NotFound or Unavailable."""
        options, names = self._with_defaults(body).options(), body.template_variables()
        messages = [message.for_template() for message in body.messages]
        has_calls = any(message.role == "tool" or message.tool_calls for message in body.messages)
        if not self.codec.style.takes_tools:
            if has_calls or options.tool_use is not None:
                messages = without_tool_roles(messages, options.tool_use)
        elif options.tool_use is not None:
            names["tools"] = options.tool_use.for_template
        turn = Turn(body.add_generation_prompt is not False, bool(body.continue_final_message), names)
        return self._checked(Plan("chat", self.resolve_model(body.model), options, messages=messages, begun=begun,
                                  turn=turn))

    def plan_completion(self, body: CompletionBody, begun: PartialAnswer | None = None) -> Plan:
        """Raises InvalidRequest, NotFound or Unavailable."""
        return self._checked(Plan("completions", self.resolve_model(body.model), self._with_defaults(body).options(),
                                   prompts=body.prompt, begun=begun,
                                   add_special_tokens=body.add_special_tokens is not False))

    def _with_defaults(self, body: Body) -> Body:
        """With the model's own sampling defaults where the request has none."""
        missing = {name: value for name, value in self.codec.defaults.items() if getattr(body, name) is None}
        return body.model_copy(update=missing) if missing else body

    async def start(self, plan: Plan, tenant: Tenant, trace: str = "") -> Run:
        """Wait for room, start all answers and wait for the first delta, so that errors before it are raised here.
        ``trace``: the client's traceparent. Raises CapacityError, Draining, InvalidRequest, or what answers raise."""
        try:
            run = await self._admitted(plan, tenant, trace)
        except asyncio.CancelledError as error:  # the client left, and there is no run to count it
            self.failed(plan.endpoint, error)
            raise
        try:
            await run.begin()
        except BaseException as error:
            if isinstance(error, Exception):
                run.fail()
            await run.aclose()
            if isinstance(error, SlipstreamError) and not isinstance(error, DeadlineExceeded):
                run.place.account.spend(-run.job.num_prompt_tokens_charged)  # as no target took the request
            if isinstance(error, CapacityError):
                raise self.admission.overloaded(run.place, error) from error
            raise
        return run

    async def _admitted(self, plan: Plan, tenant: Tenant, trace: str) -> Run:
        """Wait for room, then make a run."""
        arrived_s = time.monotonic()
        span = None if self.spans is None else self.spans.begin(
            "router.request", well_formed(trace), endpoint=plan.endpoint, answers=plan.num_answers)
        limit = Limit(self._timed_out, self._section.request_timeout_s)
        try:
            with limit:
                place = await self.admission.enter(tenant, plan.num_answers)
                try:
                    waited_s = time.monotonic() - arrived_s
                    plan = replace(plan, options=await self._with_grammar(plan.options, tenant))
                    # A conversation may have to wait for its template's process.
                    job = await self.lanes.run(plan.size, partial(self._job, plan), tenant.id, not plan.messages)
                    place.account.spend(job.num_prompt_tokens_charged)
                    self.metrics.admitted(waited_s, sum(map(len, job.prompts)) * job.options.n)
                    return Run(self, job, place, arrived_s, limit, span)
                except BaseException:
                    self.admission.leave(place)
                    raise
        except BaseException as error:
            limit.close()
            if span is not None:
                span.end(failed=int(isinstance(error, Exception)))
            raise

    async def tokens(self, plan: Plan, tenant: Tenant) -> list[int]:
        """The tokens of the prompt of ``plan``, even if they exceed the context: a client may count them in order to
        cut the prompt. Waits for room as an answer does. Raises as ``start``."""
        place = await self.admission.enter(tenant, 1)
        try:
            return await self.lanes.run(plan.size, partial(self._prompt_tokens, plan), tenant.id, not plan.messages)
        finally:
            self.admission.leave(place)

    async def text(self, model: Any, tokens: Any, tenant: Tenant) -> str:
        """What ``tokens`` spell, special ones included. It waits for room as an answer would. Raises as ``start``."""
        info = self.info
        self.resolve_model(model)
        if not isinstance(tokens, list) or len(tokens) > info.max_context or not set(map(type, tokens)) <= {int}:
            raise InvalidRequest("tokens", f"must be a list of at most {info.max_context} token ids")
        _check_ids("tokens", tokens, info.vocab_size)
        place = await self.admission.enter(tenant, 1)
        try:
            return await self.lanes.run(len(tokens), partial(self.codec.text, tokens), tenant.id, True)
        finally:
            self.admission.leave(place)

    def completion(self, job: Job, tenant: Tenant, request_id: str, number: int, trace: str) -> Completion:
        """Answer ``number`` of a job: choice after choice, prompt after prompt. ``trace``: the parent's traceparent."""
        prompt, choice = divmod(number, job.options.n)
        options = job.options
        seed = options.sampling.seed + choice + (0 if options.seeded else prompt * MAX_N)
        sampling = replace(options.sampling, seed=seed % SEEDS,
                           stop_token_ids=options.stop_tokens(self.codec.stop_token_ids, job.vocab_size))
        request = Request(f"{request_id}-{number}", job.prompts[prompt], sampling, job.max_tokens[prompt],
                          options.top_logprobs, options.speculate, trace=trace,
                          namespace=_salted(tenant.namespace, options.cache_salt), identity=job.identity,
                          grammar=options.grammar,
                          prompt_logprobs=options.prompt_top_logprobs if choice < job.num_scored else None,
                          logprobs_mode=options.logprobs_mode, allowed_token_ids=options.allowed_token_ids,
                          bad_words=job.bad_words).after(job.resumed_tokens)
        routed = self.balancer.submit(request)
        answer = self._fallback.follow(routed, options.speculate)
        return Completion(request, answer, self._detokenizer(job, prompt), options.stop, job.vocab_size,
                          lambda: routed.identity, options.keep_stop, options.returns_all_tokens)

    def resumed_text(self, job: Job) -> Iterator[str]:
        """The text of the tokens that a client already has, token by token, up to the last whole character."""
        return map(self._detokenizer(job, 0).push, job.resumed_tokens)

    def _timed_out(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the request took longer than {self._section.request_timeout_s:g} s; ask for fewer "
                                "tokens or answers at once, or raise router.request_timeout_s")

    def failed(self, endpoint: str, error: BaseException) -> None:
        """Count a request that ends with ``error``."""
        _, code, kind = status_of(error)
        if isinstance(error, asyncio.CancelledError):
            code, kind = 499, "cancelled"
        self.metrics.failed(kind)
        self.metrics.request(endpoint, code, "none")

    def _detokenizer(self, job: Job, prompt: int) -> Detokenizer:
        """For an answer to a prompt."""
        marks = self.codec.marks if job.options.separates_markup(self.codec.style) else ()
        shown_specials = self.codec.specials if job.options.show_specials else marks
        continues = job.continues and any(token not in self.codec.specials for token in job.prompts[prompt])
        return Detokenizer(self.codec, shown_specials, continues)

    def _checked(self, plan: Plan) -> Plan:
        info = self.info
        if plan.options.n > MAX_N:
            raise InvalidRequest("n", f"must be at most {MAX_N}")
        if plan.num_answers > MAX_ANSWERS:
            raise InvalidRequest("prompt" if plan.options.n == 1 else "n", f"asks for {plan.num_answers} answers, "
                                 f"{plan.options.n} a prompt; one request may ask for {MAX_ANSWERS}: send several")
        limit = plan.max_scored_tokens
        if limit is not None and (plan.options.max_tokens or 0) > limit:
            raise InvalidRequest(plan.options.max_tokens_field,
                                 f"must be at most {limit} with these log probabilities, so that no more than "
                                 f"{MAX_ANSWER_SCORES} are told; ask for fewer tokens, answers or alternatives")
        fields = plan.options.fields_by_need
        if fields and (unmet := self.balancer.unmet(fields)) is not None:
            raise InvalidRequest(fields[unmet], "the engine that serves this model does not honour it; leave it out",
                                 "unsupported_parameter")
        for need, name in fields.items():
            if need in ("allowed_token_ids", "bad_words") and plan.options.grammar is not None:
                raise InvalidRequest(name, f"cannot stand beside {plan.options.grammar_field}")
        if plan.options.grammar is not None and plan.options.ignore_eos:
            raise InvalidRequest("ignore_eos", f"cannot stand beside {plan.options.grammar_field}: a grammar says "
                                 "where an answer ends")
        sampling = plan.options.sampling
        for param, tokens in (("logit_bias", [token for token, _ in sampling.logit_bias]),
                              ("stop_token_ids", sampling.stop_token_ids),
                              ("allowed_token_ids", plan.options.allowed_token_ids)):
            _check_ids(param, tokens, info.vocab_size)
        if plan.begun is not None and plan.options.returns_prompt:
            raise InvalidRequest("begun", "is for answers without their prompt")
        return _packed(plan)

    async def _with_grammar(self, options: Options, tenant: Tenant) -> Options:
        """With the first grammar that can be compiled. Raises InvalidRequest if none can, and CapacityError."""
        if options.grammar is not None:
            try:
                await self._trials.check(options.grammar, tenant.namespace)
            except InvalidRequest as error:
                if options.fallback_grammar is not None:
                    options = replace(options, grammar=options.fallback_grammar, fallback_grammar=None)
                    return await self._with_grammar(options, tenant)
                raise InvalidRequest(options.grammar_field, error.message) from None
        return options

    def _job(self, plan: Plan) -> Job:
        """With the prompts as tokens: seconds of work for a long text."""
        info, plan = self.info, _unpacked(plan)
        prompts = self._prompts(plan, info.max_context)
        limits = tuple(_max_tokens(_field_of(plan, i), prompt, plan.options, info) for i, prompt in enumerate(prompts))
        if (num_sent := sum(map(len, prompts)) * plan.options.n) > MAX_SENT_TOKENS:
            raise InvalidRequest("n", f"makes {num_sent} tokens of prompts, each answer's counted; at most "
                                 f"{MAX_SENT_TOKENS} go in one request: ask for fewer answers")
        if (most := plan.max_scored_tokens) is not None:
            limits = tuple(min(limit, most) for limit in limits)
        echoed = tuple(map(self._echoed_text, plan.prompts, prompts)) if plan.options.echo else ()
        bad_words = [tokens for i, word in enumerate(plan.options.bad_words)
                     for tokens in self._bad_word_tokens(i, word)]
        job = Job(plan.endpoint, plan.model, tuple(array("i", prompt) for prompt in prompts), limits, plan.options,
                  info.vocab_size, not plan.messages or plan.turn.continue_final_message, echoed_texts=echoed,
                  bad_words=tuple(dict.fromkeys(bad_words)))
        if job.num_scores > MAX_SCORES:
            raise InvalidRequest(plan.options.fields_by_need["prompt_logprobs"], f"asks for {job.num_scores} log "
                                 f"probabilities; at most {MAX_SCORES} are told: send fewer prompts or alternatives")
        return job if plan.begun is None else self._resumed_job(job, plan.begun)

    def _prompt_tokens(self, plan: Plan) -> list[int]:
        (tokens,) = self._prompts(_unpacked(plan), None)
        _check_ids("prompt", tokens, self.info.vocab_size)
        return list(tokens)

    def _prompts(self, plan: Plan, max_tokens: int | None) -> list[Sequence[int]]:
        """``max_tokens``: of each prompt; None: no limit."""
        last = plan.options.truncate
        room = max_tokens if last is None else None  # a prompt that is truncated may be longer
        prompts: list[Sequence[int]] = [self.codec.chat(plan.messages, plan.turn, room)] if plan.messages else []
        for i, prompt in enumerate(plan.prompts):
            with with_field_names({"prompt": _field_of(plan, i)}):
                prompts.append(self.codec.encode(prompt, room, plan.add_special_tokens) if isinstance(prompt, str)
                               else prompt)
        if last is not None:
            context = self.info.max_context
            most, left = context - 1, context - (plan.options.max_tokens or 1)
            # -1: what fits is kept (as in vLLM), else the answer keeps its room, unless that is most of the context.
            keep = last if last >= 0 else left if 2 * left >= context else most
            prompts = [prompt[-keep:] if len(prompt) > (last if last >= 0 else most) else prompt for prompt in prompts]
        return prompts

    def _echoed_text(self, given: str | Sequence[int], prompt: Sequence[int]) -> str:
        text = self.codec.text(prompt)
        return given if isinstance(given, str) and text.endswith(given) else text

    def _bad_word_tokens(self, number: int, word: str) -> list[tuple[int, ...]]:
        spellings = [tuple(self.codec.encode(text, None, False)) for text in (word, f" {word.lstrip()}")]
        if max(map(len, spellings)) > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(f"bad_words[{number}]", f"has more than {MAX_BAD_WORD_TOKENS} tokens")
        return [tokens for tokens in spellings if tokens]

    def _resumed_job(self, job: Job, begun: PartialAnswer) -> Job:
        tokens = begun.tokens
        if len(tokens) >= job.max_tokens[0]:
            raise InvalidRequest("begun.tokens", f"must be fewer than the answer's {job.max_tokens[0]}")
        _check_ids("begun.tokens", tokens, job.vocab_size)
        if not set(tokens).isdisjoint(job.options.stop_tokens(self.codec.stop_token_ids, job.vocab_size)):
            raise InvalidRequest("begun.tokens", "one of them ends an answer")
        return replace(job, resumed_tokens=tokens, identity=self.balancer.identity(begun.identity))


@lru_cache(maxsize=64)
def _tag(identity: Identity) -> str:
    """Computed once, not for each answer."""
    return identity.tag


def _packed(plan: Plan) -> Plan:
    """In little memory, as it may wait for long: one character beyond 16 bits makes all of its text four bytes wide,
    and JSON takes ten times as much as objects as it does as text."""
    written = orjson.dumps(plan.messages) if plan.messages else b""  # in a buffer of sixteen times its size
    prompts = [prompt.encode() if isinstance(prompt, str) else prompt for prompt in plan.prompts]
    return replace(plan, messages=bytes(memoryview(written)), prompts=prompts, num_chars=plan.size)


def _unpacked(plan: Plan) -> Plan:
    """With its prompts as texts."""
    return replace(plan, prompts=[prompt.decode() if isinstance(prompt, bytes) else prompt
                                   for prompt in plan.prompts])


def _field_of(plan: Plan, number: int) -> str:
    """The field that a refusal of one prompt names."""
    return "messages" if plan.messages else "prompt" if len(plan.prompts) == 1 else f"prompt[{number}]"


def _salted(namespace: str, salt: str) -> str:
    """A namespace within ``namespace`` for requests with the same ``salt``."""
    if not salt:
        return namespace
    salted = blake2b(salt.encode("utf-8", "surrogatepass"), key=namespace.encode()[:64], digest_size=15).hexdigest()
    return f"{namespace}{NAMESPACE_SEPARATOR}{salted}"


def _check_ids(param: str, tokens: Sequence[int], vocab_size: int) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise InvalidRequest(param, f"a token id is outside the vocabulary of {vocab_size}")


def _max_tokens(param: str, prompt: Sequence[int], options: Options, info: TargetInfo) -> int:
    """How many tokens the answer to ``prompt`` may have. Many clients ask for a fixed number whatever the prompt's
    length, so what the context leaves is the limit; only more than the whole context is refused."""
    if not prompt:
        raise InvalidRequest(param, "is empty")
    remaining, requested = info.max_context - len(prompt), options.max_tokens
    if remaining < 1:
        raise too_long(param, info.max_context, f"{len(prompt)} tokens")
    _check_ids(param, prompt, info.vocab_size)
    if requested is not None and requested > info.max_context:  # agents know these words, and ask for less
        raise InvalidRequest(
            options.max_tokens_field,
            f"input length and `max_tokens` exceed context limit: {len(prompt)} + {requested} > {info.max_context}; "
            f"this model's maximum context length is {info.max_context} tokens",
            "context_length_exceeded")
    return remaining if requested is None else min(requested, remaining)


class Run:
    """The answers of one admitted job: iterate for (answer number, delta) as they come. Raises what an answer raises,
    and DeadlineExceeded."""

    def __init__(self, gateway: Gateway, job: Job, place: Place, arrived_s: float, limit: Limit,
                 span: Span | None) -> None:
        """limit: on all of the run, which closes it and ends the span."""
        self.id = secrets.token_hex(16)
        self.created = int(time.time())
        self.job = job
        self.mode = "plain"  # how the first answer began: speculative if its target did so and a draft is connected
        self._gateway = gateway
        self.place = place
        self._arrived_s = arrived_s
        self._first: NumberedDelta | None = None  # from ``begin``, not yet returned
        self._latest: tuple[float, int, int] | None = None  # delta: when, of which answer, how many tokens
        self._committed_s: dict[int, float] = {}  # when each answer's latest delta came
        self._closing: asyncio.Future[None] | None = None
        self._failed = False
        self._limit = limit
        self._span = span
        self.completions: list[Completion] = []  # those that have begun, in their order
        answers = self._start_answers("" if self._span is None else self._span.parent)
        self._merged = None
        if job.num_answers > 1:
            self._merged = merged(answers, min(place.num_answers, job.num_answers))
        else:  # no queue between a single answer and its reader
            next(answers)

    def _start_answers(self, parent: str) -> Iterator[Completion]:
        """Each answer when it is its turn: before that, no target knows of it."""
        for number in range(self.job.num_answers):
            completion = self._gateway.completion(self.job, self.place.tenant, self.id, number, parent)
            self.completions.append(completion)
            yield completion

    @property
    def identity(self) -> str:
        """The tag of the first answer's identity; "" where it is unknown."""
        identity = self.completions[0].identity()
        return "" if identity is None else _tag(identity)

    async def begin(self) -> None:
        """Wait for the first delta; call it once, before iterating."""
        self._first = await anext(self)

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> NumberedDelta:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        self._record_latest()  # by now that delta is on its way
        try:
            with self._limit:
                latest = (0, await anext(self.completions[0])) if self._merged is None else await anext(self._merged)
        except InvalidRequest as error:
            grammar_field = self.job.options.grammar_field
            if error.field == "grammar" and grammar_field:  # as a target calls it
                raise InvalidRequest(grammar_field, error.message, error.code) from error
            raise
        if not self._committed_s:
            speculates = self.completions[latest[0]].tally.first_state == "speculate"
            self.mode = "speculative" if speculates and self._gateway.balancer.has_draft else "plain"
        self._latest = time.monotonic(), latest[0], latest[1].num_tokens
        return latest

    def fail(self) -> None:
        """Mark the run as failed; the caller counts the error."""
        self._failed = True

    @property
    def num_returned(self) -> int:
        """Tokens of the answers so far, and log probabilities: how much there is to serialize."""
        return self.job.num_scores + self._generated() * (1 + (self.job.options.top_logprobs or 0))

    def usage(self, number: int | None = None) -> Usage:
        """The usage of one answer, or of all together; then each prompt counts once, however many choices it has."""
        prompts, completions = self.job.prompts, self.completions
        if number is not None:
            prompts, completions = (prompts[number // self.job.options.n],), [completions[number]]
        tallies = [completion.tally for completion in completions]
        reached = sum((tally.reached for tally in tallies), Counter[int]())
        return Usage(
            prompt_tokens=sum(map(len, prompts)),
            completion_tokens=sum(tally.tokens for tally in tallies) + len(self.job.resumed_tokens),
            accepted_prediction_tokens=sum(tally.accepted for tally in tallies),
            rejected_prediction_tokens=sum(max(tally.drafted - tally.accepted, 0) for tally in tallies),
            cached_tokens=sum(tally.cached_tokens for tally in tallies[:: self.job.options.n]),
            rounds=sum(tally.rounds for tally in tallies),
            lossy=any(tally.lossy for tally in tallies),
            reached=tuple(reached[length] for length in range(max(reached, default=-1) + 1)),
        )

    async def aclose(self) -> None:
        """Free everything; idempotent. It goes on if the caller is cancelled meanwhile."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._limit.close()
        self._record_latest()
        try:
            if self._merged is not None:
                await self._merged.aclose()
            await asyncio.gather(*(completion.aclose() for completion in self.completions))
        finally:
            usage = self.usage()
            self.place.account.spend(self._generated())
            self._gateway.admission.leave(self.place)
            self._count_metrics()
            if self._span is not None:
                self._span.end(mode=self.mode, tokens=usage.completion_tokens,
                               accepted=usage.accepted_prediction_tokens, failed=int(self._failed))

    def _generated(self) -> int:
        return sum(completion.tally.tokens for completion in self.completions)

    def _record_latest(self) -> None:
        if self._latest is None:
            return
        (now_s, number, num_tokens), self._latest = self._latest, None
        before_s = self._committed_s.get(number)
        if not self._committed_s:  # of the first answer alone: others may wait for their turn
            self._gateway.metrics.first_token(now_s - self._arrived_s, self.mode)
        elif before_s is not None:
            self._gateway.metrics.commit(now_s - before_s, num_tokens, self.mode)
        self._committed_s[number] = now_s

    def _count_metrics(self) -> None:
        metrics = self._gateway.metrics
        for tally in (completion.tally for completion in self.completions):
            metrics.answered(tally.tokens, tally.drafted, tally.accepted, self.mode)
            if metrics.for_vllm is not None:
                metrics.for_vllm.answered(tally.reached.total(), tally.drafted, tally.accepted, tally.reached)
        if self._failed:
            return
        complete = (len(self.completions) == self.job.num_answers
                and all(completion.finished for completion in self.completions))
        metrics.request(self.job.endpoint, 200 if complete else 499, self.mode)
        if complete:
            metrics.finished(time.monotonic() - self._arrived_s, self.mode)
        else:
            metrics.failed("cancelled")
