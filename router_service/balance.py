"""Where a request goes: the targets that are known, and the balancer over them.

Rules:
1. Least load wins, load being what the target last reported plus what this router has sent since. A target that has
   probably seen the prompt's beginning in its namespace is preferred until it is markedly more loaded (rendezvous
   hashing: a target that comes or goes moves only its own share). Where contexts differ, as while they are changed, a
   request goes where it fits.
2. A target that fails several requests in a row is ejected for a time that doubles; then one request probes it, and
   until that is answered others go elsewhere. If no other target is left, ejected ones are used all the same, and so
   are those that discovery no longer lists but that still answer.
3. A request whose target fails or drains moves to another one. Before its first token that is a retry: at most a fifth
   of the requests, so that an outage is not multiplied. After it the answer is resumed, where it stopped: tokens are a
   function of prompt, seed, position and the target's identity. A begun answer goes only to a target of the same
   identity; if there is none left, it ends with ModelChanged. Resuming waits until another target has room, or one
   whose connection broke answers again; but an answer that loses several targets in a row without a new token ends. If
   no other target has its model and only the connection broke, the same target is asked again once it answers. A target
   that drains takes no new work and hands begun answers back; such a move does not count as a retry. If no other has
   the model, the draining target takes a begun answer again.
4. If a target answers no poll for long, or has left and misses one, the requests that still wait there for their first
   piece fail there and may be retried elsewhere.
5. Targets of a fixed list stay, whatever happens to them. Discovered ones follow the roster's rules: one that left gets
   new work only when no other answers, and is closed when its last answer is over.

It knows nothing about how targets are found, HTTP, text or speculation.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from router_service.admission import Limit
from slipstream.base.errors import (
    CallLost,
    CapacityError,
    Draining,
    InvalidRequest,
    ModelChanged,
    SlipstreamError,
    Unavailable,
)
from slipstream.observe.log import logger
from slipstream.observe.metrics import RouterMetrics
from slipstream.protocol.identity import Identity
from slipstream.protocol.requests import Answer, Backend, Need, Piece, Request, TargetInfo
from slipstream.wire.roster import Roster, RosterRules
from slipstream.wire.status import ReportedProblems


class RemoteBackend(Backend, Protocol):
    """A backend that was opened for us."""

    async def aclose(self) -> None: ...


POLL_BATCH = 16  # polls that are started one after another; then the event loop serves the streams
Connect = Callable[[str, str], RemoteBackend]  # (address, name that its certificate bears)


@dataclass(slots=True, eq=False)
class Target:
    """What is known of one target."""

    name: str
    backend: Backend
    delisted: bool = False  # discovery does not list it any more
    info: TargetInfo | None = None
    in_flight: int = 0
    in_flight_at_poll: int = 0
    missed_polls: int = 0
    answered_polls: int = 0
    failures: int = 0
    ejections: int = 0
    ejected_until: float = 0.0
    probe: RoutedAnswer | None = None  # that tries it after it was ejected
    problem: str = "not asked yet"  # why it gets no work; "" for none
    reported: ReportedProblems = field(default_factory=ReportedProblems)
    draining: bool = False
    unreachable: bool = False  # it answers no polls
    first_piece_limits: set[Limit] = field(default_factory=set)  # of answers that still wait for their first piece

    @property
    def ready(self) -> bool:
        """It answers polls, fits and is not draining."""
        return not self.problem and not self.draining

    @property
    def identity(self) -> Identity | None:
        return None if self.info is None else self.info.identity

    def supports(self, needs: Collection[Need]) -> bool:
        """Whether the target supports all ``needs``. An older release would ignore unknown fields and answer as if they
        were not set."""
        return not needs or (self.info is not None and set(needs).issubset(self.info.takes))

    def fits(self, request: Request) -> bool:
        """Whether the request fits the target's context, as far as that is known."""
        num_tokens = len(request.tokens) - request.answered + request.max_tokens
        return self.info is None or num_tokens <= self.info.max_context

    def is_ejected(self, now_s: float) -> bool:
        """Whether the target is ejected, or a probe of it runs: another request would probably fail, too."""
        return self.ejected_until > now_s or self.probe is not None

    @property
    def load(self) -> int:
        reported = self.info.sessions_running + self.info.sessions_waiting if self.info else 0
        return max(reported + self.in_flight - self.in_flight_at_poll, self.in_flight)

    def poll_answered(self, info: TargetInfo, problem: str) -> None:
        """``problem``: why the target gets no work all the same; "" for none."""
        self.info, self.problem, self.draining = info, problem, info.draining
        self.missed_polls, self.in_flight_at_poll, self.unreachable = 0, self.in_flight, False
        self.answered_polls += 1

    def set_unreachable(self) -> None:
        """The target answers nobody: end the waits for a first piece, so that these requests may be retried
        elsewhere."""
        self.unreachable = True
        for limit in list(self.first_piece_limits):
            limit.fire()

    def affinity(self, prefix: bytes) -> bytes:
        """The rendezvous score of this target for prompts that begin with ``prefix``."""
        return hashlib.blake2b(prefix, digest_size=8, key=self.name.encode()[:64]).digest()


class Targets:
    """All known targets. ``connect`` opens a discovered one; without it none may be discovered."""

    def __init__(self, fixed: Mapping[str, Backend], connect: Connect | None = None,
                 clock: Callable[[], float] = time.monotonic, rules: RosterRules | None = None) -> None:
        self.by_name = {name: Target(name, backend) for name, backend in fixed.items()}
        self._connect = connect
        self._opened: dict[str, RemoteBackend] = {}  # those that were discovered
        self._roster = Roster(clock, rules, fixed)
        self._log = logger("balance")

    def __iter__(self) -> Iterator[Target]:
        return iter(list(self.by_name.values()))

    def update(self, ready: Mapping[str, str]) -> None:
        """Discovery's present list: addresses that take work, each with the name that its certificate bears."""
        new, changed = self._roster.update(ready)
        for address in new:
            self._add(address, ready[address])
        for address, delisted in changed.items():
            target = self.by_name[address]
            target.delisted = delisted
            self._log.info("target left" if delisted else "target back", target=address, running=target.in_flight)

    def poll_answered(self, target: Target) -> None:
        self._roster.mark_alive(target.name)

    async def sweep(self) -> list[Target]:
        """Close and forget targets whose time is over. Returns them."""
        expired = [self.by_name[name] for name in self._roster.expired() if self.by_name[name].in_flight == 0]
        for target in expired:  # all of them before any is closed, so that none of them gets a request
            self._log.info("target forgotten", target=target.name, left=target.delisted)
            self._roster.forget(target.name)
            del self.by_name[target.name]
        for backend in [self._opened.pop(target.name) for target in expired]:
            await backend.aclose()
        return expired

    async def aclose(self) -> None:
        """Close those that were discovered."""
        for backend in list(self._opened.values()):  # others may be discovered meanwhile
            await backend.aclose()

    def _add(self, address: str, name: str) -> None:
        assert self._connect is not None
        try:
            backend = self._connect(address, name)
        except SlipstreamError as error:
            self._log.warning("target not opened", target=address, problem=str(error))
            self._roster.forget(address)  # discovery will list it again
            return
        self._opened[address] = backend
        self.by_name[address] = Target(address, backend)
        self._log.info("target found", target=address)


@dataclass(frozen=True, slots=True)
class BalanceRules:
    poll_every_s: float = 1.0
    poll_timeout_s: float = 5.0
    polls_until_unreachable: int = 3
    failures_until_ejected: int = 3
    ejected_min_s: float = 1.0
    ejected_max_s: float = 30.0
    affinity_tokens: int = 64
    affinity_slack: int = 4  # answers that the preferred target may have beyond 1.25 times the least loaded one's
    retry_share: float = 0.2
    retry_reserve: float = 3.0
    resume_tries: int = 3  # targets that a begun answer may lose in a row: if it crashes them, it would crash them all


class Balancer:
    """Spreads requests over ``targets``; ``tokenizer_hash`` "" fits every target."""

    def __init__(self, targets: Targets, metrics: RouterMetrics, tokenizer_hash: str = "",
                 rules: BalanceRules | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.rules = rules or BalanceRules()
        self._targets = targets
        self._all = targets.by_name.values()  # a live view
        self._metrics = metrics
        self._tokenizer_hash = tokenizer_hash
        self._clock = clock
        self._retries = self.rules.retry_reserve
        self._capacity_waiters: deque[asyncio.Future[None]] = deque()  # begun answers that wait for a free place
        self._polls: dict[Target, asyncio.Task[None]] = {}  # that run
        self._log = logger("balance")

    @property
    def ready(self) -> bool:
        return any(target.ready for target in self._all)

    @property
    def info(self) -> TargetInfo | None:
        """What the first ready target says of itself; None while none has answered."""
        info = None
        for target in self._all:
            if target.ready:
                return target.info
            info = info or target.info
        return info

    def unmet(self, needs: Collection[Need]) -> Need | None:
        """None if one target supports all ``needs``; else one that the best target does not support."""
        unmet = [[need for need in needs if need not in target.info.takes]
                   for target in self._all if target.info is not None]
        fewest = min(unmet, key=len)
        return fewest[0] if fewest else None

    @property
    def has_draft(self) -> bool:
        """Whether any target has a draft connected."""
        return any(draft.connected for target in self._all if target.info is not None for draft in target.info.drafts)

    def identity(self, tag: str) -> Identity:
        """The identity that ``tag`` is the digest of, among known targets. Raises ModelChanged, or Unavailable."""
        identities = [target.identity for target in self._all if target.identity is not None]
        found = next((identity for identity in identities if identity.tag == tag), None)
        if found is None:
            raise _model_changed() if identities else Unavailable("no target has answered yet; try again soon")
        return found

    def submit(self, request: Request) -> RoutedAnswer:
        """Never raises; the answer's iteration does."""
        self._retries = min(self._retries + self.rules.retry_share, 10.0)
        return RoutedAnswer(self, request)

    async def run(self) -> None:
        """Poll all targets until cancelled."""
        try:
            while True:
                await self.poll()
                await asyncio.sleep(self.rules.poll_every_s)
        finally:
            for poll in self._polls.values():
                poll.cancel()

    async def poll(self) -> None:
        """Poll all targets, and forget those that discovery has lost. A slow answer is waited for beside the next polls
        of the others."""
        self._polls = {target: poll for target, poll in self._polls.items() if not poll.done()}
        for count, target in enumerate(self._targets, start=1):
            self._metrics.target_known(target.name)
            if target not in self._polls:
                self._polls[target] = asyncio.create_task(self._poll_one(target))
            if count % POLL_BATCH == 0:
                await asyncio.sleep(0)
        if self._polls:
            await asyncio.wait(self._polls.values(), timeout=self.rules.poll_every_s)
        for target in await self._targets.sweep():
            self._metrics.target_forgotten(target.name)
        self._metrics.targets(sum(target.ready and not target.delisted for target in self._targets))
        while self._capacity_waiters:
            self._wake_next()

    async def _poll_one(self, target: Target) -> None:
        before = target.problem
        try:
            async with asyncio.timeout(self.rules.poll_timeout_s):
                info = await target.backend.info()
        except Exception as error:  # whatever a target does, the others are still polled
            target.missed_polls += 1
            reason = str(error) if isinstance(error, SlipstreamError) else ""
            target.problem = reason or "does not answer"
            if target.missed_polls >= self.rules.polls_until_unreachable or target.delisted:
                target.set_unreachable()
        else:
            target.poll_answered(info, self._mismatch(info))
            self._targets.poll_answered(target)
        if target.problem != before and target.reported.is_new(target.problem):
            self._log.info("target changed", target=target.name, ready=target.ready, problem=target.problem)

    def _mismatch(self, info: TargetInfo) -> str:
        if self._tokenizer_hash and info.tokenizer_hash and info.tokenizer_hash != self._tokenizer_hash:
            return "has another tokenizer than this router; give both the same model"
        return ""

    def pick(self, request: Request, tried: Collection[str] = ()) -> Target:
        """The target for ``request``, never one of ``tried``; if the request names an identity (a begun answer), only a
        target of that identity. Raises Draining, ModelChanged or Unavailable."""
        needs = request.needs  # once: there may be hundreds of targets
        supporting = [t for t in self._all if t.supports(needs)]
        able = [t for t in supporting if t.name not in tried]
        if able and (request.answered or request.identity is not None):
            able = [t for t in able if request.identity is not None and t.identity == request.identity]
            if not able:
                raise _model_changed()
        fitting = [t for t in able if t.fits(request)]
        if fitting or any(t.fits(request) for t in supporting):  # a smaller one would refuse it for good
            able = fitting
        now_s = self._clock()
        usable = ([t for t in able if t.ready and not t.delisted and not t.is_ejected(now_s)]
                  or [t for t in able if t.ready]
                  or [t for t in able if not t.draining and (t.info is None or not self._mismatch(t.info))])
        if usable:
            return usable[0] if len(usable) == 1 else self._choose(usable, request)
        if request.answered and (draining := [t for t in able if t.draining and not t.unreachable]):
            return self._choose(draining, request)
        if self._all and all(t.draining for t in self._all):
            raise Draining("all targets are shutting down or gone; try again soon")
        raise Unavailable("no target can take the request now; try again soon")

    def _choose(self, usable: list[Target], request: Request) -> Target:
        tokens = request.tokens
        prefix = request.namespace.encode() + np.array(tokens[: self.rules.affinity_tokens], np.int32).tobytes()
        least = min(t.load for t in usable)
        if len(tokens) >= self.rules.affinity_tokens:
            preferred = max(usable, key=lambda t: t.affinity(prefix))
            if preferred.load <= least * 1.25 + self.rules.affinity_slack:
                return preferred
        return max((t for t in usable if t.load == least), key=lambda t: t.affinity(prefix))

    def count_sent(self, target: Target, answer: RoutedAnswer) -> None:
        """Count ``answer``, sent to ``target``. It is the target's probe if the time of an ejection is over."""
        target.in_flight += 1
        if target.ejections and not target.is_ejected(self._clock()):
            target.probe = answer
            self._metrics.breaker(target.name, 1)

    def count_success(self, target: Target) -> None:
        if target.ejections:
            self._metrics.breaker(target.name, 0)
            self._log.info("target back", target=target.name)
        target.failures = target.ejections = 0
        target.ejected_until, target.probe = 0.0, None

    def count_failure(self, target: Target, error: SlipstreamError) -> None:
        """Count a failure that is the target's fault; a full or draining one does what it should."""
        if isinstance(error, Draining):
            target.draining = True  # before a poll says so
        if isinstance(error, InvalidRequest | ModelChanged | CapacityError | Draining):
            return
        if target.ejected_until > self._clock():
            return  # all answers of a target that dies fail at once, which is one failure
        target.failures += 1
        if target.failures < self.rules.failures_until_ejected and not target.ejections:
            return
        pause = min(self.rules.ejected_min_s * 2.0**target.ejections, self.rules.ejected_max_s)
        target.ejections += 1
        target.ejected_until = self._clock() + pause
        self._metrics.breaker(target.name, 2)
        self._log.warning("target ejected", target=target.name, seconds=pause, error=type(error).__name__)

    def may_retry(self, request: Request, tried: Collection[str], error: SlipstreamError) -> bool:
        """Whether ``request``, not begun, may go to a target besides ``tried``; takes it from the budget."""
        if isinstance(error, InvalidRequest) or not self.can_pick(request, tried):
            return False
        if isinstance(error, Draining):
            return True
        if self._retries < 1.0:
            self._metrics.retry_refused()
            return False
        self._retries -= 1.0
        return True

    async def wait_for_return(self, request: Request, tried: set[str], target: Target) -> bool:
        """Wait until ``target``, one of ``tried`` whose call broke off, answers polls again and can go on with
        ``request``, or another can; no longer than until it counts as unreachable. Returns whether one can."""
        for _ in range(self.rules.polls_until_unreachable):
            await asyncio.sleep(self.rules.poll_every_s)
            if not target.problem and target.identity == request.identity is not None:
                tried.discard(target.name)
            if self.can_pick(request, tried):
                return True
        return False

    async def wait_for_capacity(self, request: Request, full: Collection[str]) -> bool:
        """Wait while only targets in ``full`` could take ``request``. Returns whether it had to wait."""
        if self.can_pick(request, full):
            return False
        waiter = asyncio.get_running_loop().create_future()
        self._capacity_waiters.append(waiter)
        await waiter
        return True

    def can_pick(self, request: Request, tried: Collection[str]) -> bool:
        """Whether ``request`` may go to a target besides ``tried``."""
        try:
            self.pick(request, tried)
        except SlipstreamError:
            return False
        return True

    def release(self, target: Target, answer: RoutedAnswer) -> None:
        """``answer`` is over, or goes on elsewhere: whoever has waited longest for capacity tries again."""
        target.in_flight -= 1
        if target.probe is answer:  # it was given up before its first piece: the next answer is the probe
            target.probe = None
        self._wake_next()

    def _wake_next(self) -> None:
        while self._capacity_waiters:
            waiter = self._capacity_waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def count_move(self, target: Target) -> None:
        if target.name in self._targets.by_name:  # the series of a forgotten target would stay for ever
            self._metrics.retried(target.name)

    async def identity_changed(self, target: Target, expected: Identity | None) -> bool:
        """``target`` refused because its model is not the ``expected`` one. Returns whether its known identity has
        changed now; polls the target again unless another request did."""
        if target.identity == expected:
            await self._poll_one(target)
        return target.identity != expected

    def client_error(self, request: Request, tried: Collection[str], target: Target,
                     error: SlipstreamError) -> SlipstreamError:
        """The error for the client when ``request`` cannot go on after ``error``. It names no inner address."""
        if not request.answered:
            return (Unavailable("the target did not take the request; try again soon")
                    if isinstance(error, Unavailable) else error)
        if isinstance(error, InvalidRequest) and error.field != "answered":  # which a target says that cannot go on
            return error
        self._log.warning("answer lost", answer_id=request.request_id, target=target.name, problem=str(error))
        try:
            self.pick(request, tried)
        except ModelChanged as changed:
            return changed
        except SlipstreamError:
            pass
        return Unavailable("the target was lost before the answer's end; ask again")


def _model_changed() -> ModelChanged:
    return ModelChanged("the model that began this answer is no longer served; ask again for one of the model that is "
                        "here now")


class RoutedAnswer:
    """An answer that picks a target, and another one when the first cannot finish it."""

    def __init__(self, balancer: Balancer, request: Request) -> None:
        self._balancer = balancer
        self._request = self._sent = request  # whole, and as the present target got it
        # Since the last new token:
        self._tried: set[str] = set()  # targets that failed or refused
        self._full: set[str] = set()  # targets that had no room for the begun answer, or drain
        self._cut: dict[Target, int] = {}  # targets whose call broke off, and how many polls they had answered by then
        self._num_lost = 0  # targets that were lost
        self._target: Target | None = None
        self._answer: Answer | None = None
        self._pieces: AsyncIterator[Piece] | None = None
        self._speculate = request.speculate
        self._target_began = False  # whether the present target has sent a piece
        self._emitted: list[int] = []
        self.identity = request.identity  # of the target that began it; None: it is not begun, or that is unknown
        self._finished = False

    def __aiter__(self) -> RoutedAnswer:
        return self

    async def __anext__(self) -> Piece:
        while not self._finished:
            target = self._target or self._pick()
            try:
                piece = await (self._first_piece(target) if self._pieces is None else anext(self._pieces))
            except StopAsyncIteration:
                await self._failed(target, Unavailable("the target ended the answer before its end"))
                continue
            except SlipstreamError as error:
                await self._failed(target, error)
                continue
            if not self._target_began:
                self._target_began = True
                self.identity = self._sent.identity
                self._tried.clear()  # a target that failed or refused before may have changed by now
                self._full.clear()
                self._cut.clear()
                self._num_lost = 0
                self._balancer.count_success(target)
            self._emitted.extend(piece.tokens)
            if piece.finish:
                await self.aclose()
            return piece
        raise StopAsyncIteration

    def set_speculation(self, allowed: bool) -> None:
        self._speculate = allowed
        if self._answer is not None:
            self._answer.set_speculation(self._speculate)

    async def aclose(self) -> None:
        self._finished = True
        await self._leave()

    def _pick(self) -> Target:
        remaining = self._remaining()
        self._target = target = self._balancer.pick(remaining, self._tried | self._full)
        self._balancer.count_sent(target, self)
        self._target_began = False
        self._sent = replace(remaining, identity=target.identity)
        return target

    def _remaining(self) -> Request:
        """The request for what is still missing."""
        return replace(self._request.after(self._emitted), identity=self.identity)

    async def _first_piece(self, target: Target) -> Piece:
        """Ask ``target`` for the answer. Returns its first piece; Unavailable when the target stops answering polls
        before it (rule 4)."""
        self._answer = target.backend.submit(self._sent)
        if self._speculate != self._request.speculate:
            self._answer.set_speculation(self._speculate)
        self._pieces = aiter(self._answer)
        limit = Limit(lambda: Unavailable(f"target {target.name} does not answer"))
        if target.unreachable:
            limit.fire()
        target.first_piece_limits.add(limit)
        try:
            with limit:
                return await anext(self._pieces)
        finally:
            target.first_piece_limits.discard(limit)

    async def _failed(self, target: Target, error: SlipstreamError) -> None:
        """Leave ``target``; raises what the client is told unless the request may move on."""
        self._balancer.count_failure(target, error)  # before it leaves, so that no other becomes the probe
        await self._leave()
        remaining = self._remaining()
        if not await self._may_move(remaining, target, error):
            raise self._balancer.client_error(remaining, self._tried, target, error) from error
        self._balancer.count_move(target)

    async def _may_move(self, remaining: Request, target: Target, error: SlipstreamError) -> bool:
        if isinstance(error, ModelChanged) and await self._balancer.identity_changed(target, self._sent.identity):
            return True
        if not remaining.answered:
            self._tried.add(target.name)
            return self._balancer.may_retry(remaining, self._tried, error)
        if isinstance(error, InvalidRequest):
            return False
        if isinstance(error, Draining) and self._target_began:
            return True  # if no other has its model, the same target takes it again
        full = isinstance(error, CapacityError | Draining)
        (self._full if full else self._tried).add(target.name)
        self._num_lost += not full
        if self._num_lost >= self._balancer.rules.resume_tries:
            return False
        if isinstance(error, CallLost):
            self._cut[target] = target.answered_polls
        while self._balancer.can_pick(remaining, self._tried):
            if not await self._balancer.wait_for_capacity(remaining, self._tried | self._full):
                return True
            self._full.clear()
            self._tried -= {cut.name for cut, polls in self._cut.items() if cut.ready and cut.answered_polls > polls}
        return isinstance(error, CallLost) and await self._balancer.wait_for_return(remaining, self._tried, target)

    async def _leave(self) -> None:
        answer, target = self._answer, self._target
        self._answer = self._target = self._pieces = None
        if target is not None:
            self._balancer.release(target, self)
        if answer is not None:
            await answer.aclose()
