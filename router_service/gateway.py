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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any

import orjson

from router_service.admission import Admission, Limit, Place, PoolFallback
from router_service.balance import Balancer
from router_service.dialects.chat import ChatBody
from router_service.dialects.completions import CompletionBody
from router_service.dialects.openai import MAX_ANSWER_SCORES, SEEDS, Asked, Body, Job, Options
from router_service.dialects.problems import written_as
from router_service.dialects.tools import numbered, told
from router_service.tenants import Tenant
from router_service.text.deltas import Numbered, merged
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
from slipstream.protocol.chat import Begun, Usage
from slipstream.protocol.identity import Identity
from slipstream.protocol.requests import MAX_BAD_WORD, MAX_SCORES, WITHIN, Request, TargetInfo

MAX_N = 128  # answers that one request may ask for to each of its prompts
MAX_ANSWERS = 1024  # to all of its prompts
MAX_SENT = 1 << 21  # tokens of prompts that are sent to targets for one request: as many as its body can hold


class Gateway:
    """Plans and starts requests for one model."""

    def __init__(self, codec: TextCodec, balancer: Balancer, fallback: PoolFallback, metrics: RouterMetrics,
                 section: RouterSection, spans: Spans | None, trials: Trials) -> None:
        """trials: of what answers are to be bound to."""
        self.codec = codec
        self.metrics = metrics
        self.spans = spans
        self.admission = Admission(section.max_in_flight, section.max_wait_s, metrics)
        self.leaving = False
        self.balancer = balancer
        self._fallback = fallback
        self._section = section
        self.lanes = Lanes()
        self._trials = trials  # in a thread of its own: a grammar that takes long holds up no text

    @property
    def ready(self) -> bool:
        return self.balancer.ready and not self.leaving and not self.admission.closed

    @property
    def model(self) -> str:
        """The name that clients use. Raises Unavailable while no target has told its own."""
        return self._section.model_name or self.info.model_id

    def named(self, name: str | None) -> str:
        """The model that ``name`` means; None: the one here. Raises NotFound for another one, or Unavailable."""
        model = self.model
        if name not in (None, model):
            raise NotFound("model", f"no model {str(name)[:100]!r} here; it is {model!r}, or leave the field out",
                           "model_not_found")
        return model

    @property
    def info(self) -> TargetInfo:
        """What a target says of itself. Raises Unavailable while none has."""
        info = self.balancer.info
        if info is None:
            raise Unavailable("no target has answered yet; try again soon")
        return info

    @property
    def strict(self) -> bool:
        """Whether a field that nobody knows is refused."""
        return self._section.strict

    def repeats(self, options: Options) -> bool:
        """Whether a seed fixes the answer here."""
        return options.sampling.temperature == 0 or not (self.info.lossy or "keyed_sampling" in self.info.without)

    def leave(self) -> None:
        """From now on each answer asks its client to send the next request elsewhere; the request itself is still
        answered."""
        self.leaving = True

    async def warm(self) -> None:
        """Have ready what the first grammar would have to wait for."""
        await self._trials.warm()

    def drain(self) -> None:
        """Take no new request; running ones go on."""
        self.admission.close()

    def close(self) -> None:
        """Nothing runs any more."""
        self.lanes.close()
        self._trials.close()
        self.codec.close()

    def plan_chat(self, body: ChatBody, begun: Begun | None = None) -> Asked:
        """Raises InvalidRequest, NotFound or Unavailable."""
        options, names = self._filled(body).options(), body.names()
        messages = [message.given() for message in body.messages]
        called = any(message.role == "tool" or message.tool_calls for message in body.messages)
        if not self.codec.style.takes_tools:
            messages = told(messages, options.use) if called or options.use is not None else messages
        elif options.use is not None:
            names["tools"] = options.use.whole
        if called and self.codec.style.calls_by_id:
            messages = numbered(messages)
        turn = Turn(body.add_generation_prompt is not False, bool(body.continue_final_message), names)
        return self._checked(Asked("chat", self.named(body.model), options, messages=messages, begun=begun, turn=turn))

    def plan_completion(self, body: CompletionBody, begun: Begun | None = None) -> Asked:
        """Raises InvalidRequest, NotFound or Unavailable."""
        return self._checked(Asked("completions", self.named(body.model), self._filled(body).options(),
                                   prompts=body.prompt, begun=begun,
                                   add_special_tokens=body.add_special_tokens is not False))

    def _filled(self, body: Body) -> Body:
        """With the model's own words for how tokens are chosen where the request has none."""
        left = {name: value for name, value in self.codec.defaults.items() if getattr(body, name) is None}
        return body.model_copy(update=left) if left else body

    async def start(self, asked: Asked, tenant: Tenant, trace: str = "") -> Run:
        """Wait for room, start all answers and wait for the first delta, so that errors before it are raised here.
        ``trace``: the client's traceparent. Raises CapacityError, Draining, InvalidRequest, or what answers raise."""
        try:
            run = await self._made(asked, tenant, trace)
        except asyncio.CancelledError as error:  # its client left, and no run is there to count it
            self.failed(asked.endpoint, error)
            raise
        try:
            await run.begin()
        except SlipstreamError as error:
            await run.aclose()
            if not isinstance(error, DeadlineExceeded):  # no target took it, so it took nothing
                run.place.account.spend(-run.job.num_asked)
            if isinstance(error, CapacityError):
                raise self.admission.overloaded(run.place, error) from error
            raise
        except BaseException:
            await run.aclose()
            raise
        return run

    async def _made(self, asked: Asked, tenant: Tenant, trace: str) -> Run:
        """Once there is room for it."""
        arrived_s = time.monotonic()
        span = None if self.spans is None else self.spans.begin(
            "router.request", well_formed(trace), endpoint=asked.endpoint, answers=asked.num_answers)
        limit = Limit(_too_long, self._section.request_timeout_s)
        try:
            with limit:
                place = await self.admission.enter(tenant, asked.num_answers)
                try:
                    waited_s = time.monotonic() - arrived_s
                    asked = replace(asked, options=await self._try(asked.options, tenant))
                    # A conversation may have to wait for the process of its template.
                    job = await self.lanes.run(asked.size, partial(self._job, asked), tenant.id, not asked.messages)
                    place.account.spend(job.num_asked)
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

    async def tokens(self, asked: Asked, tenant: Tenant) -> list[int]:
        """The tokens of the prompt of ``asked``, even if they exceed the context: a client may count them in order to
        cut the prompt. Waits for room as an answer does. Raises as ``start``."""
        place = await self.admission.enter(tenant, 1)
        try:
            return await self.lanes.run(asked.size, partial(self._counted, asked), tenant.id, not asked.messages)
        finally:
            self.admission.leave(place)

    async def text(self, model: Any, tokens: Any, tenant: Tenant) -> str:
        """What ``tokens`` spell, special ones included. It waits for room as an answer would. Raises as ``start``."""
        info = self.info
        self.named(model)
        if not isinstance(tokens, list) or len(tokens) > info.max_context or not set(map(type, tokens)) <= {int}:
            raise InvalidRequest("tokens", f"must be a list of at most {info.max_context} token ids")
        _check_ids("tokens", tokens, info.vocab_size)
        place = await self.admission.enter(tenant, 1)
        try:
            return await self.lanes.run(len(tokens), partial(self.codec.text, tokens), tenant.id, True)
        finally:
            self.admission.leave(place)

    def completion(self, job: Job, tenant: Tenant, request_id: str, number: int, trace: str) -> Completion:
        """Answer ``number`` of a job: choice after choice, prompt after prompt. ``trace``: whose part it is."""
        prompt, choice = divmod(number, job.options.n)
        options = job.options
        seed = options.sampling.seed + choice + (0 if options.seeded else prompt * MAX_N)
        sampling = replace(options.sampling, seed=seed % SEEDS,
                           stop_token_ids=options.ends(self.codec.stop_token_ids, job.vocab_size))
        request = Request(f"{request_id}-{number}", job.prompts[prompt], sampling, job.max_tokens[prompt],
                          options.top_logprobs, options.speculate, trace=trace,
                          namespace=_salted(tenant.namespace, options.salt), identity=job.identity,
                          grammar=options.grammar, prompt_logprobs=options.scored, logprobs_mode=options.logprobs_mode,
                          allowed_token_ids=options.allowed_token_ids, bad_words=job.bad_words).after(job.begun)
        routed = self.balancer.submit(request)
        answer = self._fallback.follow(routed, options.speculate)
        return Completion(request, answer, self.codec, options.stop, job.vocab_size, lambda: routed.identity,
                          options.keep_stop, self._shown(options), self._within(job, prompt), options.tells_all)

    def begun(self, job: Job) -> Iterator[str]:
        """The text of the begun tokens that a client sends, token by token, up to the last whole character."""
        return map(Detokenizer(self.codec, self._shown(job.options), self._within(job, 0)).push, job.begun)

    def failed(self, endpoint: str, error: BaseException) -> None:
        """Count a request that ends with ``error``."""
        _, code, kind = status_of(error)
        if isinstance(error, asyncio.CancelledError):
            code, kind = 499, "cancelled"
        self.metrics.failed(kind)
        self.metrics.request(endpoint, code, "none")

    def _shown(self, options: Options) -> Collection[int]:
        if options.show_specials:
            return self.codec.specials
        return self.codec.marks if options.told_apart(self.codec.style) else ()

    def _within(self, job: Job, prompt: int) -> bool:
        """Whether the answers to a prompt go on from a text."""
        return job.continues and any(token not in self.codec.specials for token in job.prompts[prompt])

    def _checked(self, asked: Asked) -> Asked:
        info = self.info
        if asked.options.n > MAX_N:
            raise InvalidRequest("n", f"must be at most {MAX_N}")
        if asked.num_answers > MAX_ANSWERS:
            raise InvalidRequest("prompt" if asked.options.n == 1 else "n", f"asks for {asked.num_answers} answers, "
                                 f"{asked.options.n} a prompt; one request may ask for {MAX_ANSWERS}: send several")
        most = asked.most_tokens
        if most is not None and (asked.options.max_tokens or 0) > most:
            raise InvalidRequest(asked.options.limited_by, f"must be at most {most} with these log probabilities, so "
                                 f"that no more than {MAX_ANSWER_SCORES} are told; ask for fewer tokens, answers or "
                                 "alternatives")
        asked_by = asked.options.asked_by
        if asked_by and (unmet := self.balancer.unmet(asked_by)) is not None:
            raise InvalidRequest(asked_by[unmet], "the engine that serves this model does not honour it; leave it out",
                                 "unsupported_parameter")
        for need, name in asked_by.items():
            if need in ("allowed_token_ids", "bad_words") and asked.options.grammar is not None:
                raise InvalidRequest(name, f"cannot stand beside {asked.options.bound_by}")
        if asked.options.grammar is not None and asked.options.ignore_eos:
            raise InvalidRequest("ignore_eos", f"cannot stand beside {asked.options.bound_by}: a grammar says where an "
                                 "answer ends")
        sampling = asked.options.sampling
        for param, tokens in (("logit_bias", [token for token, _ in sampling.logit_bias]),
                              ("stop_token_ids", sampling.stop_token_ids),
                              ("allowed_token_ids", asked.options.allowed_token_ids)):
            _check_ids(param, tokens, info.vocab_size)
        if asked.begun is not None and asked.options.tells_prompt:
            raise InvalidRequest("begun", "is for answers without their prompt")
        return _packed(asked)

    async def _try(self, options: Options, tenant: Tenant) -> Options:
        """With the grammar that can be kept to. Raises InvalidRequest where none can, and CapacityError."""
        if options.grammar is not None:
            try:
                await self._trials.check(options.grammar, tenant.namespace)
            except InvalidRequest as error:
                if options.looser is not None:
                    return await self._try(replace(options, grammar=options.looser, looser=None), tenant)
                raise InvalidRequest(options.bound_by, error.message) from None
        return options

    def _job(self, asked: Asked) -> Job:
        """With the tokens of what is asked: seconds of work for a long text."""
        info, asked = self.info, _unpacked(asked)
        prompts = self._prompts(asked, info.max_context)
        limits = tuple(_room(_param(asked, i), prompt, asked.options, info) for i, prompt in enumerate(prompts))
        if (sent := sum(map(len, prompts)) * asked.options.n) > MAX_SENT:
            raise InvalidRequest("n", f"makes {sent} tokens of prompts, each answer's counted; at most {MAX_SENT} go "
                                 "in one request: ask for fewer answers")
        if (most := asked.most_tokens) is not None:
            limits = tuple(min(limit, most) for limit in limits)
        shown = tuple(map(self._text_of, asked.prompts, prompts)) if asked.options.echo else ()
        words = [run for i, word in enumerate(asked.options.bad_words) for run in self._spelt(i, word)]
        job = Job(asked.endpoint, asked.model, tuple(array("i", prompt) for prompt in prompts), limits, asked.options,
                  info.vocab_size, not asked.messages or asked.turn.continued, shown=shown,
                  bad_words=tuple(dict.fromkeys(words)))
        if job.num_scores > MAX_SCORES:
            raise InvalidRequest(asked.options.asked_by["prompt_logprobs"], f"asks for {job.num_scores} log "
                                 f"probabilities; at most {MAX_SCORES} are told: send fewer prompts or alternatives")
        return job if asked.begun is None else self._going_on(job, asked.begun)

    def _counted(self, asked: Asked) -> list[int]:
        (tokens,) = self._prompts(_unpacked(asked), None)
        _check_ids("prompt", tokens, self.info.vocab_size)
        return list(tokens)

    def _prompts(self, asked: Asked, most: int | None) -> list[Sequence[int]]:
        """``most``: tokens of each; None: as many as there are."""
        info, last = self.info, asked.options.truncate
        room = most if last is None else None  # what is cut is read as a whole
        prompts: list[Sequence[int]] = [self.codec.chat(asked.messages, asked.turn, room)] if asked.messages else []
        for i, prompt in enumerate(asked.prompts):
            with written_as({"prompt": _param(asked, i)}):
                prompts.append(self.codec.encode(prompt, room, asked.add_special_tokens) if isinstance(prompt, str)
                               else prompt)
        if last is not None:
            keep = last if last >= 0 else max(info.max_context - (asked.options.max_tokens or 1), 1)
            prompts = [prompt[max(len(prompt) - keep, 0):] for prompt in prompts]
        return prompts

    def _text_of(self, asked: str | Sequence[int], prompt: Sequence[int]) -> str:
        """What an echo shows."""
        whole = self.codec.text(prompt)
        return asked if isinstance(asked, str) and whole.endswith(asked) else whole

    def _spelt(self, number: int, word: str) -> list[tuple[int, ...]]:
        runs = [tuple(self.codec.encode(text, None, False)) for text in (word, f" {word.lstrip()}")]
        if max(map(len, runs)) > MAX_BAD_WORD:
            raise InvalidRequest(f"bad_words[{number}]", f"has more than {MAX_BAD_WORD} tokens")
        return [run for run in runs if run]

    def _going_on(self, job: Job, begun: Begun) -> Job:
        tokens = begun.tokens
        if len(tokens) >= job.max_tokens[0]:
            raise InvalidRequest("begun.tokens", f"must be fewer than the answer's {job.max_tokens[0]}")
        _check_ids("begun.tokens", tokens, job.vocab_size)
        if not set(tokens).isdisjoint(job.options.ends(self.codec.stop_token_ids, job.vocab_size)):
            raise InvalidRequest("begun.tokens", "one of them ends an answer")
        return replace(job, begun=tokens, identity=self.balancer.identity(begun.identity))


@lru_cache(maxsize=64)
def _tag(identity: Identity) -> str:
    """Digested once, not once an answer."""
    return identity.tag


def _packed(asked: Asked) -> Asked:
    """What may wait for long, as it came: one character beyond 16 bits makes four bytes of each other of its text, and
    objects of JSON take ten times what they are written in."""
    written = orjson.dumps(asked.messages) if asked.messages else b""  # in sixteen times the room
    prompts = [prompt.encode() if isinstance(prompt, str) else prompt for prompt in asked.prompts]
    return replace(asked, messages=bytes(memoryview(written)), prompts=prompts, num_chars=asked.size)


def _unpacked(asked: Asked) -> Asked:
    """With its prompts as texts."""
    return replace(asked, prompts=[prompt.decode() if isinstance(prompt, bytes) else prompt
                                   for prompt in asked.prompts])


def _param(asked: Asked, number: int) -> str:
    """What a refusal of one prompt names: of many, which one."""
    return "messages" if asked.messages else "prompt" if len(asked.prompts) == 1 else f"prompt[{number}]"


def _salted(namespace: str, salt: str) -> str:
    """A namespace within ``namespace`` for those who name the same ``salt``."""
    if not salt:
        return namespace
    salted = blake2b(salt.encode("utf-8", "surrogatepass"), key=namespace.encode()[:64], digest_size=15).hexdigest()
    return f"{namespace}{WITHIN}{salted}"


def _too_long() -> DeadlineExceeded:
    return DeadlineExceeded("the request took longer than this server allows; ask for fewer tokens")


def _check_ids(param: str, tokens: Sequence[int], vocab_size: int) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise InvalidRequest(param, f"a token id is outside the vocabulary of {vocab_size}")


def _room(param: str, prompt: Sequence[int], options: Options, info: TargetInfo) -> int:
    """The tokens that the answer to ``prompt`` may have. Many ask for a fixed number behind every prompt, so that is
    the most; more than the whole context is refused."""
    if not prompt:
        raise InvalidRequest(param, "is empty")
    left, most = info.max_context - len(prompt), options.max_tokens
    if left < 1:
        raise too_long(param, info.max_context, f"{len(prompt)} tokens")
    _check_ids(param, prompt, info.vocab_size)
    if most is not None and most > info.max_context:  # in the words by which agents know it, and ask for less
        raise InvalidRequest(
            options.limited_by, f"input length and `max_tokens` exceed context limit: {len(prompt)} + {most} > "
            f"{info.max_context}; this model's maximum context length is {info.max_context} tokens",
            "context_length_exceeded")
    return left if most is None else min(most, left)


class Run:
    """The answers of one admitted job: iterate for (answer number, delta) as they come. Raises what an answer raises,
    and DeadlineExceeded."""

    def __init__(self, gateway: Gateway, job: Job, place: Place, arrived_s: float, limit: Limit,
                 span: Span | None) -> None:
        """limit: on all of it; who closes the run closes it, and ends the span."""
        self.id = secrets.token_hex(16)
        self.created = int(time.time())
        self.job = job
        self.mode = "plain"  # how the first answer began: speculative when its target meant to and a draft is there
        self._gateway = gateway
        self.place = place
        self._arrived_s = arrived_s
        self._first: Numbered | None = None  # which ``begin`` has waited for
        self._came: tuple[float, int, int] | None = None  # the latest delta: when, of which answer, how many tokens
        self._commits_s: dict[int, float] = {}
        self._closing: asyncio.Future[None] | None = None
        self._failed = False
        self._limit = limit
        self._span = span
        self.completions: list[Completion] = []  # those that have begun, in their order
        begun = self._begun("" if self._span is None else self._span.parent)
        self._many = None
        if job.num_answers > 1:
            self._many = merged(begun, min(place.num_answers, job.num_answers))
        else:  # no queue between a single answer and its reader
            next(begun)

    def _begun(self, parent: str) -> Iterator[Completion]:
        """Each answer as it begins: one whose turn has not come is nothing that others share steps with."""
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

    async def __anext__(self) -> Numbered:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        self._time()  # the delta before is on its way by now
        try:
            with self._limit:
                found = (0, await anext(self.completions[0])) if self._many is None else await anext(self._many)
        except StopAsyncIteration:
            raise
        except Exception as error:
            self.fail()
            bound_by = self.job.options.bound_by
            if isinstance(error, InvalidRequest) and error.field == "grammar" and bound_by:  # that is a target's word
                raise InvalidRequest(bound_by, error.message, error.code) from error
            raise
        if not self._commits_s:
            meant = self.completions[found[0]].tally.first_state == "speculate"
            self.mode = "speculative" if meant and self._gateway.balancer.has_draft else "plain"
        self._came = time.monotonic(), found[0], found[1].num_tokens
        return found

    def fail(self) -> None:
        """Mark the run as failed; the caller counts the error."""
        self._failed = True

    @property
    def num_told(self) -> int:
        """Tokens of the answers so far, and log probabilities: how much there is to write."""
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
            completion_tokens=sum(tally.tokens for tally in tallies) + len(self.job.begun),
            accepted_prediction_tokens=sum(tally.accepted for tally in tallies),
            rejected_prediction_tokens=sum(max(tally.drafted - tally.accepted, 0) for tally in tallies),
            cached_tokens=sum(tally.cached_tokens for tally in tallies[:: self.job.options.n]),
            rounds=sum(tally.rounds for tally in tallies),
            lossy=any(tally.lossy for tally in tallies),
            reached=tuple(reached[length] for length in range(max(reached, default=-1) + 1)),
        )

    async def aclose(self) -> None:
        """Free everything; idempotent. Who is cancelled meanwhile leaves nothing behind: it goes on without him."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._limit.close()
        self._time()
        try:
            if self._many is not None:
                await self._many.aclose()
            await asyncio.gather(*(completion.aclose() for completion in self.completions))
        finally:
            used = self.usage()
            self.place.account.spend(self._generated())
            self._gateway.admission.leave(self.place)
            self._count()
            if self._span is not None:
                self._span.end(mode=self.mode, tokens=used.completion_tokens, accepted=used.accepted_prediction_tokens,
                               failed=int(self._failed))

    def _generated(self) -> int:
        return sum(completion.tally.tokens for completion in self.completions)

    def _time(self) -> None:
        if self._came is None:
            return
        (now_s, number, num_tokens), self._came = self._came, None
        before_s = self._commits_s.get(number)
        if not self._commits_s:  # its others may wait for their turn
            self._gateway.metrics.first_token(now_s - self._arrived_s, self.mode)
        elif before_s is not None:
            self._gateway.metrics.commit(now_s - before_s, num_tokens, self.mode)
        self._commits_s[number] = now_s

    def _count(self) -> None:
        metrics = self._gateway.metrics
        for tally in (completion.tally for completion in self.completions):
            metrics.answered(tally.tokens, tally.drafted, tally.accepted, self.mode)
            if metrics.for_vllm is not None:
                metrics.for_vllm.answered(tally.drafts, tally.drafted, tally.accepted, tally.reached)
        if self._failed:
            return
        done = (len(self.completions) == self.job.num_answers
                and all(completion.finished for completion in self.completions))
        metrics.request(self.job.endpoint, 200 if done else 499, self.mode)
        if done:
            metrics.finished(time.monotonic() - self._arrived_s, self.mode)
        else:
            metrics.failed("cancelled")
