"""vLLM as a target: its ``AsyncLLM`` behind the wire of ours. ``VllmService`` implements ``requests.Backend``.

Rules:
1. All fields of a request become vLLM's own parameters, or the request is refused and the error names the field
   (``vllm_words``). A grammar is compiled on trial first, because vLLM compiles it in the process of its engine.
2. A piece has the tokens that one step of vLLM gave one answer: all but the newest were drafted and accepted. Scores of
   the prompt come before. If no token is wanted, the one that vLLM computes is dropped.
3. An answer that another target began goes on unchanged if it is greedy, or sampled with keyed noise. Any other begun
   answer is refused.
4. vLLM's workers decide whether an answer is drafted for; this module tells them which must not be. Their report of a
   step (``StepReports``) goes with its pieces; a piece does not wait for it.
5. The engine is polled between steps, whether answers run or not, because vLLM waits for ever for a machine that is
   gone. If the engine does not answer, all answers end with Unavailable, and the service ends.
6. An answer that its reader leaves is aborted. While draining, new requests are refused and running ones finish. When
   time is up, those that another target can continue are handed back (Draining). Begun answers are still taken.

It imports no vLLM (``vllm_start`` does), and knows nothing about gRPC or drafts.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any, Protocol

from slipstream.base.config import TargetSection
from slipstream.base.errors import CapacityError, Draining, InvalidRequest, SlipstreamError, Unavailable
from slipstream.following.chains import PLAIN, SWITCH
from slipstream.following.followed import LOOKED_UP
from slipstream.following.rounds import RequestReport, StepReport, decode
from slipstream.grammar.trial import Trials
from slipstream.observe.log import logger
from slipstream.observe.metrics import Counts, TargetMetrics
from slipstream.observe.spans import HEADER, Spans
from slipstream.observe.vitals import Vitals
from slipstream.protocol.requests import (
    MAX_WAITING,
    DraftStatus,
    Finish,
    Piece,
    Request,
    ServedModel,
    State,
    TargetInfo,
    Without,
)
from target_service.drain import drain
from target_service.vllm_words import (
    SUPPORTED,
    Bounds,
    can_resume,
    check,
    chosen_logprobs,
    field_of,
    parameters,
    prompt,
    prompt_scores,
)

POLL_S = 1.0  # between two checks of the gauges and of the engine's health
BUSY_POLLS = 10  # checks between two calls of the workers while answers run: each call makes all workers wait
IDLE_POLLS = 60  # checks without a reply after which an idle engine counts as stuck
ENDED = "vLLM's engine has ended; the service has to be restarted"
FINISHES: Mapping[str, Finish] = {"stop": "stop", "length": "length"}
# What ``slipstream_vllm.worker.Drafted`` adds to vLLM's workers.
DRAFTS, ALLOW = "slipstream_drafts", "slipstream_allow"
HEALTH = "check_health"  # a method of vLLM's own workers
MAX_READS = 64  # most reports of steps that are read at once


class OutputCollector(Protocol):
    """Where vLLM leaves the outputs of one request."""

    request_id: str  # as vLLM's engine names it
    put: Callable[[Any], None]

    def get_nowait(self) -> Any: ...


class CoreClient(Protocol):
    """What ``collective_rpc`` calls in all cores, to return the answer of the first."""

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        """The answer of each."""
        ...


class Engine(Protocol):
    """The methods of vLLM's ``AsyncLLM`` that are used."""

    @property
    def errored(self) -> bool: ...

    async def add_request(self, request_id: str, prompt: Any, params: Any) -> OutputCollector: ...

    async def abort(self, request_id: str, internal: bool = False) -> None: ...

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Any: ...

    @property
    def engine_core(self) -> CoreClient: ...

    def shutdown(self) -> None: ...


@dataclass(slots=True)
class CacheUsage:
    """How full the KV cache of each core of vLLM is, as its newest step said, and how many requests lost theirs to
    others so far."""

    by_core: dict[int, float] = field(default_factory=dict)
    num_preempted: int = 0


class StepReports:
    """Reports of vLLM's workers about their steps, received over a local datagram socket and kept until the pieces of
    that step leave. Late or unknown reports are dropped."""

    def __init__(self, path: Path) -> None:
        """path: where the socket is created."""
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        self._by_request: dict[str, dict[int, tuple[StepReport, RequestReport]]] = {}

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Receive reports on the running event loop while the block runs."""
        loop, number = asyncio.get_running_loop(), self._socket.fileno()
        loop.add_reader(number, self._read)
        try:
            yield
        finally:
            loop.remove_reader(number)  # the socket may be closed by now

    def track(self, request: str) -> None:
        self._by_request[request] = {}

    def forget(self, request: str) -> None:
        self._by_request.pop(request, None)

    def take(self, request: str, length: int) -> tuple[StepReport, RequestReport] | None:
        """The report of the step after which ``request`` had so many tokens; None: it has not come, or was lost."""
        by_length = self._by_request.get(request, {})
        report = by_length.pop(length, None)
        for older in [other for other in by_length if other < length]:
            del by_length[older]
        return report

    def close(self) -> None:
        self._socket.close()
        rmtree(self.path.parent, ignore_errors=True)

    def _read(self) -> None:
        for _ in range(MAX_READS):
            try:
                step = decode(self._socket.recv(1 << 20))
            except OSError:  # there is no more
                return
            if step is None:
                continue
            for report in step.requests:
                if report.request in self._by_request:
                    self._by_request[report.request][report.length] = step, report


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is loaded. ``params`` makes its sampling parameters; ``refusal_errors``: those that it raises
    for requests that it refuses."""

    engine: Engine
    params: Callable[..., Any]
    refusal_errors: tuple[type[Exception], ...]
    served: ServedModel
    has_drafts: bool
    keyed: bool  # whether a seed fixes a sampled answer
    cache_usage: CacheUsage
    reports: StepReports
    trials: Trials | None = None  # of grammars; None: vLLM's tokenizer cannot be used for grammars
    bounds: Bounds = field(default_factory=Bounds)
    step_s: float = 300.0  # vLLM's own time limit of a step
    cores: int = 1  # data-parallel: each has its own KV, runs max_sessions answers, and talks to drafts


class VllmAnswer:
    """One running answer as its reader sees it. Implements ``requests.Answer``. It begins with its iteration."""

    def __init__(self, loaded: LoadedEngine, name: str, request: Request, metrics: TargetMetrics,
                 spans: Spans | None, on_end: Callable[[VllmAnswer], None]) -> None:
        """on_end: called when the answer ends or is handed back. Raises InvalidRequest."""
        self._loaded, self._name, self._request = loaded, name, request
        self._span = None if spans is None else spans.begin(
            "target.answer", request.trace, prompt=len(request.tokens) - request.answered, answered=request.answered)
        try:
            check(request, loaded.has_drafts, loaded.keyed, loaded.bounds)
            self._params = self._make_params() if request.grammar is None else None  # made once it was tried
        except Exception:
            if self._span is not None:
                self._span.end(tokens=0, failed=1)
            raise
        self._metrics, self._on_end = metrics, on_end
        self._allowed = request.speculate
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._engine_id = ""  # its id in the engine; "": it does not run
        self._tokens = self._pieces = self._accepted = self._verified = self._looked_up = 0
        self._first_piece_sent = self._closed = False
        self._outcome = "cancelled"

    def set_speculation(self, allowed: bool) -> None:
        if allowed != self._allowed:
            self._allowed = allowed
            self._send_allowed()

    def hand_back(self) -> None:
        """End it with Draining, if another target can continue it."""
        # Its tokens may still be behind its prompt's scores, or unread.
        begun = self._first_piece_sent or not self._outputs.empty()
        if begun and not can_resume(self._request, self._loaded.keyed):
            return
        self._outcome = "handed_back"
        self._on_end(self)  # whether its reader is quick or slow
        self._outputs.put_nowait(Draining("the target is shutting down; another one will go on"))

    def fail(self, error: Unavailable) -> None:
        self._outputs.put_nowait(error)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._span is not None:
            self._span.end(tokens=self._tokens, failed=int(self._outcome in ("failed", "refused")))
        self._metrics.request(self._outcome)
        self._on_end(self)
        engine_id, self._engine_id = self._engine_id, ""
        self._loaded.reports.forget(engine_id)
        if engine_id:
            with suppress(Exception):  # an engine that has ended; its reader is told so
                await self._loaded.engine.abort(engine_id, internal=True)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            await self._begin()
            while not self._closed:
                output = await self._outputs.get()
                if isinstance(output, Exception):
                    raise output
                for part in prompt_scores(output.prompt_logprobs, self._request.prompt_logprobs or 0) \
                        if output.prompt_logprobs else ():
                    yield self._first(Piece((), prompt=part, state=self._state), output)
                completion = output.outputs[0]
                if completion.token_ids or output.finished:
                    piece = self._piece(output, completion)
                    if piece.finish:
                        self._outcome = piece.finish
                        self._loaded.reports.forget(self._engine_id)
                        self._engine_id = ""
                        await self.aclose()
                    yield piece
        except Exception as error:
            if self._outcome == "cancelled":
                self._outcome = "failed"
            if self._loaded.engine.errored:
                raise Unavailable(ENDED) from error
            raise
        finally:
            await self.aclose()

    async def _begin(self) -> None:
        engine, request = self._loaded.engine, self._request
        try:
            if request.grammar is not None and self._loaded.trials is not None:
                self._params = await self._loaded.trials.run_after_check(request.grammar, request.owner,
                                                                         self._make_params)
            with self._naming_refusals():
                collected = await engine.add_request(self._name, prompt(request), self._params)
        except SlipstreamError:
            self._outcome = "refused"
            raise
        except asyncio.CancelledError:  # it may be there already, and has not said what it calls it
            with suppress(Exception):
                await engine.abort(self._name)
            raise
        self._engine_id = collected.request_id
        self._loaded.reports.track(self._engine_id)
        # Take each step's output separately: vLLM joins unread outputs, and then the counts of drafts are lost.
        collected.put = self._outputs.put_nowait
        if (early := collected.get_nowait()) is not None:
            self._outputs.put_nowait(early)
        if self._allowed is not request.speculate:
            self._send_allowed()

    def _make_params(self) -> Any:
        """vLLM's parameters. Raises InvalidRequest."""
        arguments, extra = parameters(self._request, self._loaded.keyed), dict[str, str]()
        if self._span is not None and self._span.parent:
            extra[HEADER] = self._span.parent
        if not self._request.speculate:
            extra[SWITCH] = PLAIN
        if self._loaded.has_drafts and extra:
            arguments["extra_args"] = extra
        with self._naming_refusals():
            return self._loaded.params(**arguments)

    @contextmanager
    def _naming_refusals(self) -> Iterator[None]:
        try:
            yield
        except self._loaded.refusal_errors as error:
            refused = field_of(getattr(error, "parameter", None), self._request)
            raise InvalidRequest(refused, f"vLLM refuses it: {error}") from error

    @property
    def _state(self) -> State:
        return "speculate" if self._loaded.has_drafts and self._allowed else "plain"

    def _send_allowed(self) -> None:
        """Tell the workers whether they may draft for it."""
        if self._engine_id and self._loaded.has_drafts:
            task = asyncio.get_running_loop().create_task(self._call_allow(self._engine_id, self._allowed))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _call_allow(self, engine_id: str, allowed: bool) -> None:
        with suppress(Exception):  # an engine that has ended tells its answers so
            await self._loaded.engine.collective_rpc(ALLOW, args=(engine_id, allowed))

    def _piece(self, output: Any, completion: Any) -> Piece:
        wanted = self._request.max_tokens > 0
        tokens = tuple(map(int, completion.token_ids)) if wanted else ()
        ranked = chosen_logprobs(tokens, completion.logprobs, self._request.top_logprobs) if wanted else ()
        piece = Piece(tokens, max(0, len(tokens) - 1), 0, ranked, state=self._state)
        self._tokens += len(tokens)
        found = self._loaded.reports.take(self._engine_id, len(self._request.tokens) + self._tokens)
        if found is not None:
            step, report = found
            self._looked_up += report.looked_up and report.drafted > 0
            piece = piece._replace(drafted=report.drafted, verify_s=step.seconds, wait_s=report.waited_s,
                                   state=report.state, plain_s=0.0 if report.looked_up else step.plain_s,
                                   late=report.late)
            if self._span is not None:
                self._span.event("round", drafted=report.drafted, accepted=piece.accepted, step_s=step.seconds,
                                 wait_s=report.waited_s, mode=report.state)
        if output.finished:
            piece = self._last(piece, completion)
        self._pieces += 1
        self._accepted += piece.accepted
        self._verified += piece.drafted
        return self._first(piece, output)

    def _first(self, piece: Piece, output: Any) -> Piece:
        """Add the fields of an answer's first piece."""
        if self._first_piece_sent:
            return piece
        self._first_piece_sent = True
        cached = output.num_cached_tokens or 0
        self._metrics.prompt(len(self._request.tokens), cached)
        return piece._replace(cached_tokens=cached)

    def _last(self, piece: Piece, completion: Any) -> Piece:
        """Add the finish, and count rounds by vLLM's own counts of drafted and accepted tokens: the last step may have
        had more tokens than the answer keeps, and reports of other steps may be lost. Raises Unavailable where vLLM
        ended the answer with an error."""
        if completion.finish_reason not in FINISHES:
            raise Unavailable(f"vLLM ended the answer: {completion.finish_reason}")
        if not self._request.max_tokens:
            return piece._replace(finish="length")
        counts, drafts = completion.spec_decode_metrics, list[tuple[int, int, str]]()
        if counts is not None:
            accepted = list(counts.per_step_accepted)
            behind = sum(accepted) + self._pieces + 1 - self._tokens  # tokens after the end, which the answer drops
            if accepted and behind > 0:
                accepted[-1] = max(0, accepted[-1] - behind)
            both = zip(counts.per_step_drafted, accepted, strict=True)
            # The order of looked-up and drafted rounds does not matter for the counters.
            drafts = [(drafted, kept, LOOKED_UP if at < self._looked_up else "used")
                      for at, (drafted, kept) in enumerate(both)]
            left = max(0, sum(counts.per_step_accepted) - self._accepted)
            piece = piece._replace(accepted=min(len(piece.tokens), left),
                                   drafted=max(0, counts.num_draft_tokens - self._verified))
        plain = (0, 0, "plain")
        self._metrics.rounds([*drafts, *[plain] * (self._pieces + 1 - len(drafts))])
        return piece._replace(finish=FINISHES[completion.finish_reason])


def merged_statuses(statuses_by_core: Iterable[Iterable[DraftStatus]]) -> tuple[DraftStatus, ...]:
    """The drafts of all cores as one list: of a draft that some lack, the status of the first of these."""
    merged = dict[str, DraftStatus]()
    for draft in itertools.chain.from_iterable(statuses_by_core):
        if draft.address not in merged or merged[draft.address].connected:
            merged[draft.address] = draft
    return tuple(merged.values())


def summed_counts(counts_by_core: Sequence[Counts]) -> Counts:
    """The sums of all cores' counts. When a series began is no count."""
    sums = dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]]()
    for family, samples in itertools.chain.from_iterable(counts_by_core):
        family_sums = sums.setdefault(family, {})
        for name, labels, value in samples:
            key = name, tuple(labels.items())
            family_sums[key] = (min(family_sums.get(key, value), value) if name.endswith("_created")
                                else family_sums.get(key, 0.0) + value)
    return [(family, [(name, dict(labels), value) for (name, labels), value in family_sums.items()])
            for family, family_sums in sums.items()]


class VllmService:
    """Takes requests for one vLLM. Make and use it on one event loop."""

    def __init__(self, loaded: LoadedEngine, config: TargetSection, metrics: TargetMetrics, spans: Spans | None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._loaded, self._config, self._metrics, self._spans = loaded, config, metrics, spans
        self._clock = clock
        self._max_running = config.max_sessions * loaded.cores  # answers that run at once
        # Where all layers see a window, or blocks were given by number, the cache may hold less than the model reads.
        self._max_context = min(loaded.served.max_context, loaded.served.num_slots // loaded.cores)
        self._numbers = itertools.count(1)
        self._answers: set[VllmAnswer] = set()
        self._drafts = tuple(DraftStatus(address, False, problem="not connected yet") for address in config.drafts
                             if loaded.has_drafts)
        self._draining = False
        self.vitals = Vitals("target", clock)
        self._fatal_error: Unavailable | None = None
        self._had_answers = True  # whether an answer ran since the last question to the engine
        self._idle = False  # whether none has run since the last question that it answered
        self._preempted = 0  # preemptions that are counted already

    def submit(self, request: Request) -> VllmAnswer:
        """Begin an answer. Raises InvalidRequest, CapacityError, Draining or Unavailable."""
        if self._draining and not request.answered:
            raise Draining("the target is shutting down; another one will take the request")
        if self._fatal_error is not None or self._loaded.engine.errored:
            raise self._fatal_error or Unavailable(ENDED)
        if request.grammar is not None and self._loaded.trials is None:  # and ``info`` says so
            raise InvalidRequest("grammar", "this model's tokenizer is of no use for one", "unsupported_parameter")
        served = self._loaded.served
        served.check(request, self._max_context)
        if (waiting := self._running_and_waiting[1]) > MAX_WAITING:
            raise CapacityError(f"{waiting} requests are waiting already")
        name = f"{request.request_id or 'request'}-{next(self._numbers)}"
        answer = VllmAnswer(self._loaded, name, request, self._metrics, self._spans, self._answers.discard)
        self._answers.add(answer)
        self._had_answers, self._idle = True, False
        return answer

    async def info(self) -> TargetInfo:
        served, (running, waiting) = self._loaded.served, self._running_and_waiting
        without: tuple[Without, ...] = () if self._loaded.keyed else ("keyed_sampling",)
        return TargetInfo(served.model_id, served.vocab_size, self._max_context, served.tokenizer_hash, running,
                          waiting, self._draining, self._drafts, without=without, identity=served.identity,
                          takes=tuple(need for need in SUPPORTED
                                      if need != "grammar" or self._loaded.trials is not None))

    @property
    def _running_and_waiting(self) -> tuple[int, int]:
        """Answers that run, and those that wait for their turn in vLLM."""
        running = min(len(self._answers), self._max_running)
        return running, len(self._answers) - running

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests and wait for the running ones. After ``grace_s`` seconds those that another vLLM can
        continue are handed back; they run to their end if they come back. Returns whether all finished in time."""
        self._draining = True
        return await drain(lambda: len(self._answers), self._hand_back, grace_s, self._clock)

    def _hand_back(self) -> None:
        logger("target").info("answers handed back", running=len(self._answers))
        for answer in list(self._answers):
            answer.hand_back()

    async def watch(self) -> None:
        """Watch the engine until cancelled. Raises Unavailable when it has ended or is stuck, after ending all answers
        with that error."""
        pulse = self.vitals.pulse("vLLM")
        try:
            with self._loaded.reports.receiving():
                for polls in itertools.count():
                    pulse.last_beat_s = self.vitals.clock()
                    self._check_engine()
                    if not self._answers or polls % BUSY_POLLS == 0:
                        await self.poll_workers()
                    await asyncio.sleep(POLL_S)
        except Unavailable as error:
            self._fatal_error = error
            for answer in list(self._answers):
                answer.fail(error)
            raise

    async def poll_workers(self) -> None:
        """Ask the workers for the status of their drafts, which they give between two steps. Raises Unavailable if the
        engine has ended, or if no answer comes within the time that its present work may take."""
        self._had_answers = bool(self._answers)
        has_drafts = self._loaded.has_drafts
        reply = asyncio.ensure_future(self._loaded.engine.engine_core.call_utility_all_async(
            "collective_rpc", DRAFTS if has_drafts else HEALTH, None, (), None))
        try:
            await self._wait_for_reply(reply)
        finally:
            reply.cancel()
        self._idle = not self._had_answers
        if reply.exception() or not has_drafts:
            return
        # Of the workers of a core one connects to drafts; where that is on another machine, none may report.
        if answers := [answer for core in reply.result() for answer in core if answer]:
            self._drafts = merged_statuses([[DraftStatus(*draft) for draft in known] for _, known, _ in answers])
            self._metrics.drafts_expected(max(expected for expected, _, _ in answers))
            self._metrics.drafts_connected(sum(draft.connected for draft in self._drafts))
            self._metrics.registry.show_external(summed_counts([counts for _, _, counts in answers]))

    async def _wait_for_reply(self, reply: asyncio.Future[Any]) -> None:
        """Wait for ``reply``. Polls are counted and not seconds, because while this process is stopped the engine may
        have replied in time."""
        await asyncio.sleep(0)  # requests that were submitted before go first
        idle = self._idle
        max_polls = IDLE_POLLS if idle else round(2 * self._loaded.step_s / POLL_S)  # one step runs, another is queued
        for _ in range(max_polls):
            await asyncio.wait({reply}, timeout=POLL_S)
            if reply.done():
                return
            self._check_engine()
        does = "with nothing to do" if idle else "while answers ran"
        more = "" if idle else ". Where a step may take so long, raise VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
        raise Unavailable(f"vLLM's engine is stuck: no sign for {max_polls * POLL_S:.0f} s {does}. A process or a "
                          f"machine of it may be gone; the service has to be restarted, on all its machines{more}")

    def _check_engine(self) -> None:
        if self._loaded.engine.errored:
            raise Unavailable(ENDED)
        total = self._loaded.served.num_slots
        free = round(total * (1.0 - sum(self._loaded.cache_usage.by_core.values()) / self._loaded.cores))
        self._metrics.sessions(*self._running_and_waiting)
        self._metrics.slots(total, free, 0)  # vLLM counts cached prompts as free
        preempted, self._preempted = self._preempted, self._loaded.cache_usage.num_preempted
        self._metrics.preempted(self._preempted - preempted)

    def end(self) -> None:
        self._loaded.reports.close()  # first: while it is there, vLLM's processes leave a signal to this one
        self._loaded.engine.shutdown()
        self.vitals.disarm_exit()
