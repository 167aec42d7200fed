"""Tries a grammar in a process of its own before it is compiled in one that others depend on.

llguidance counts most of its work but not all: a few thousand ``.?`` take seconds to compile, and names that refer to
one another thousands deep exceed a thread's stack, which ends the process.

Rules:
1. A trial is what the target does with a grammar: it is compiled with the model's own tokens, and followed for
   ``STEPS`` tokens; and so is each pattern of a schema alone, until ``PARTS_S`` are over: an answer would end with an
   error where it comes to one that costs too much. Each trial has a fork of the process, ``CPU_S`` of the processor
   (more for a long source) and a part of the usual stack. A target allows ``TARGET_CPU_S``: what just passed at a
   router passes there.
2. Whatever ends a trial is a refusal of that grammar; the process with the tokens lives on.
3. The process is started by the first grammar, or before (``warm``), because that takes a second, and again if it has
   ended. A service waits for it before it takes requests, because its start would slow the first answers' steps and
   falsify the measured step costs.
4. Beside an event loop grammars are tried and compiled in one thread, and namespaces take turns: many grammars of one
   hold up another's by one at a time. At a router ``MAX_WAITING_EACH`` of a namespace may wait, its share of that while
   others wait too, and ``MAX_WAITING`` of all: the others are refused. A target has a bound for all answers that wait,
   of which one request may bring many. A client that leaves before its turn is skipped. A target compiles a grammar in
   the turn in which it tried it: requests may come without a router.
5. Every answer has its own compilation: states that llguidance builds during an answer count against a limit, and an
   answer must not end early because of another's states.
6. Results are remembered by the grammar's digest, for each namespace apart, so that the time of a trial does not reveal
   what others asked for. A trial that took too long is not remembered: it may have been a slow moment.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from slipstream.base.errors import InvalidRequest, ModelError, Unavailable
from slipstream.base.fair_executor import FairExecutor
from slipstream.base.offload import ChildProcess, limit_resources
from slipstream.grammar.compiling import MAX_MESSAGE, Vocabulary, costly_parts
from slipstream.grammar.matcher import Matcher, StopTokens
from slipstream.protocol.grammar import JSON_OBJECT, Grammar
from slipstream.protocol.requests import Request
from slipstream.protocol.tree import DraftTree

CPU_S = 0.06  # of one trial: common grammars take a tenth of it; a refusal should come within 100 ms
TARGET_CPU_S = 2 * CPU_S
LONG_SOURCE = 20 << 10  # bytes, for which as much is allowed again: eighty tools of 55 KB take 0.08 s of a fast core
MEMORY = 1 << 30  # bytes that the process may map
STACK = 2 << 20  # bytes: a thread that answers has four times as much
STEPS, PART_STEPS = 8, 4
PARTS_S = CPU_S / 3
WARM_S = 30.0
MAX_REMEMBERED = 512
MAX_WAITING_EACH, MAX_WAITING = 64, 256
TOO_COSTLY = "cannot be compiled: it takes more work than a request may"
Result = TypeVar("Result")


class Trial:
    """Tries grammars for one model. Threads may share it; they wait for one another."""

    def __init__(self, folder: Path, cpu_s: float = CPU_S) -> None:
        """folder: of the model, with a tokenizer.json; cpu_s: of a trial."""
        self._opening = json.dumps([str(folder / "tokenizer.json"), cpu_s]).encode()
        self._lock = threading.Lock()
        self.child: ChildProcess | None = None
        self._results: OrderedDict[bytes, str] = OrderedDict()  # digest -> problem

    def warm(self) -> threading.Thread:
        """Start the process; returns at once. The thread ends when the process is ready."""
        thread = threading.Thread(target=self._start, daemon=True, name="trial")
        thread.start()
        return thread

    def wait(self) -> None:
        """Wait until the process is ready; at most WARM_S, as answers without a grammar do not need it."""
        self.warm().join(WARM_S)

    def _start(self) -> None:
        with self._lock, suppress(ModelError, Unavailable, OSError):  # the next grammar reports it
            self._running_child()

    def has_passed(self, grammar: Grammar, namespace: str = "") -> bool:
        """Whether the grammar passed a trial before. It does not wait."""
        return self._results.get(_digest(grammar, namespace)) == ""

    def check(self, grammar: Grammar, namespace: str = "") -> None:
        """Raises InvalidRequest, also for a grammar that costs too much; blocks meanwhile."""
        digest = _digest(grammar, namespace)
        with self._lock:
            problem = self._results.get(digest)
            if problem is None:
                problem = self._ask(grammar)
                if problem != TOO_COSTLY:
                    self._results[digest] = problem
                if len(self._results) > MAX_REMEMBERED:
                    self._results.popitem(last=False)
        if problem:
            raise InvalidRequest("grammar", problem)

    def close(self) -> None:
        """End the process, which would else end with this object."""
        if self.child is not None:
            self.child.kill()

    def _running_child(self) -> ChildProcess:
        if self.child is None or self.child.ended:
            self.child = ChildProcess(__spec__.name)
            reply = self.child.ask(self._opening)
            if reply is None:
                raise Unavailable("the process that tries grammars has ended; try again")
            if reply:
                self.child.kill()
                raise ModelError(f"tokenizer.json: grammars cannot use it: {reply}")
        return self.child

    def _ask(self, grammar: Grammar) -> str:
        reply = self._running_child().ask(json.dumps([grammar.kind, grammar.source]).encode())
        if reply is None:
            self.warm()
            raise Unavailable("the process that tries grammars has ended; try again")
        return str(reply)


class Trials:
    """``trial`` beside an event loop, in turns. Make it anywhere, use it on one event loop."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._executor = FairExecutor("grammars", 0.1, "too many grammars wait to be compiled; try again later",
                                      MAX_WAITING_EACH, MAX_WAITING)

    async def warm(self) -> None:
        """Have the process for trials ready."""
        await asyncio.to_thread(self._trial.wait)

    async def check(self, grammar: Grammar, namespace: str = "") -> None:
        """As ``Trial.check``, in its turn; a grammar that passed before does not wait. Raises CapacityError, too."""
        if not self._trial.has_passed(grammar, namespace):
            await self.run_after_check(grammar, namespace, lambda: None, never_refuse=False)

    def run_after_check(self, grammar: Grammar, namespace: str, work: Callable[[], Result],
                        never_refuse: bool = True) -> asyncio.Future[Result]:
        """Run ``work`` in its turn, after a trial of ``grammar``. never_refuse: see ``FairExecutor.submit``."""
        return self._executor.submit(namespace, partial(self._check_and_run, grammar, namespace, work),
                                     never_refuse=never_refuse)

    def close(self) -> None:
        """Cancel all that wait, and end the process."""
        self._executor.close()
        self._trial.close()

    def _check_and_run(self, grammar: Grammar, namespace: str, work: Callable[[], Result]) -> Result:
        self._trial.check(grammar, namespace)
        return work()


class Grammars(Trials):
    """Compiles grammars of one model for our own engine."""

    def __init__(self, vocabulary: Vocabulary, trial: Trial) -> None:
        super().__init__(trial)
        self._vocabulary = vocabulary

    def compile(self, request: Request) -> asyncio.Future[Matcher]:
        """A new matcher that begins where ``request`` continues; it may fail with InvalidRequest."""
        assert request.grammar is not None
        sampling = request.sampling
        stop = StopTokens(sampling.stop_token_ids, sampling.min_tokens)
        answered = request.tokens[len(request.tokens) - request.answered :]
        return self.run_after_check(request.grammar, request.owner,
                                    partial(self._vocabulary.compile, request.grammar, stop, answered))


def _digest(grammar: Grammar, namespace: str) -> bytes:
    return sha256(f"{namespace} {grammar.kind} {grammar.source}".encode()).digest()


def refusal_reason(vocabulary: Vocabulary, grammar: Grammar) -> str:
    """Why ``grammar`` is refused; "" if it is not."""
    began_s = time.thread_time()
    try:
        matcher = vocabulary.compile(grammar, StopTokens((0,)))
    except InvalidRequest as error:
        return error.message
    if not _can_follow(matcher, STEPS):
        return TOO_COSTLY
    for name, part in costly_parts(grammar):
        if time.thread_time() - began_s > PARTS_S:
            break
        with suppress(InvalidRequest):  # a part that cannot be compiled alone was checked with the whole above
            if not _can_follow(vocabulary.compile(part, StopTokens((0,))), PART_STEPS):
                return f"cannot be followed: {name[:MAX_MESSAGE]} takes more work than a token may"
    return ""


def _can_follow(matcher: Matcher, steps: int) -> bool:
    root, rng = DraftTree.root_only(1, 0), np.random.default_rng(0)
    for _ in range(steps):
        masks, known_nodes = matcher.masks(root)
        if not known_nodes:
            return False
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
        if not matcher.commit([int(rng.choice(allowed))]) or matcher.ended:
            break
    return True


def allowed_s(grammar: Grammar, cpu_s: float) -> float:
    """Seconds of the processor for a trial, where a short grammar has ``cpu_s``."""
    return cpu_s * (1 + len(grammar.source) / LONG_SOURCE)


def _refusal_reason_in_fork(vocabulary: Vocabulary, grammar: Grammar, cpu_s: float) -> str:
    """``refusal_reason`` in a fork of this process."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        # Its signal ends the process, whatever that is doing.
        signal.setitimer(signal.ITIMER_PROF, allowed_s(grammar, cpu_s))
        reasons: list[str] = []
        threading.stack_size(STACK)
        thread = threading.Thread(target=lambda: reasons.append(refusal_reason(vocabulary, grammar)))
        thread.start()
        thread.join()
        os.write(write_end, (reasons[0] if reasons else TOO_COSTLY).encode() + b"\n")
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        problem = pipe.read()
    os.waitpid(child, 0)
    return problem[:-1].decode() if problem.endswith(b"\n") else TOO_COSTLY


def main() -> None:
    """Answer line by line. The first line has the path of the tokenizer and the time limit of a trial; each other line
    has a grammar."""
    limit_resources(MEMORY)
    file, cpu_s = json.loads(sys.stdin.buffer.readline())
    try:
        tokenizer = Tokenizer.from_file(file)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = Vocabulary(tokenizer, tokenizer.get_vocab_size())
        # The first grammar builds tables that each fork would else build again.
        refusal_reason(vocabulary, JSON_OBJECT)
    except Exception as error:
        _reply(str(error)[:200] or type(error).__name__)
        return
    _reply("")
    for line in sys.stdin.buffer:
        _reply(_refusal_reason_in_fork(vocabulary, Grammar(*json.loads(line)), cpu_s))


def _reply(problem: str) -> None:
    print(json.dumps(problem), flush=True)
