"""``make walk``: how many rooms a round enters, and how many a request does until its first byte of an answer.

A few greedy answers of the default model with its default drafter, by real workers in one process: target and draft are
joined by real gRPC over loopback, the router takes the target itself as its backend, the client is a socket. Every
thread has a profiler, and calls of functions of our own packages count; a coroutine each time that it goes on, a
generator once.

A round: from the commit of a verdict (``TargetWorker._commit`` after ``walk`` returned) to the growth that
answers it, taken by the session. Counted are the engine threads of target and draft and the loop that has nothing but
both ends of their stream; what an engine thread does after it has handed its frame over (counters, clients, the next
schedule) is on nobody's way, as the other end is at work already. Of all rounds of the answer that asked for a tree,
the median one by calls is shown. Whether drafting pays under a profiler is nobody's question: it does not stop.

A request: from its first bytes to the first event on its socket, the median one of a few. Counted are all threads but
the draft's and that stream's; on the loop, tasks that were there before the request (looks at targets, metrics) are
not.

``--calls`` lists functions. It knows nothing about time: a profiler makes everything slow.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import inspect
import json
import threading
import time
from asyncio import selector_events
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from anyio.from_thread import start_blocking_portal

from bench.report import Row, write
from draft_service.assembly import build as build_draft
from router_service.service import RouterService
from slipstream.base.config import Config, WireSection, load
from slipstream.base.errors import SlipstreamError, Unavailable
from slipstream.cli.host import QUESTIONS
from slipstream.models.folder import resolve_drafter
from slipstream.observe.log import configure
from slipstream.protocol import tree
from slipstream.protocol.messages import Growth
from slipstream.protocol.pairing import check_pair
from slipstream.protocol.session import TargetSide
from slipstream.wire.link import DraftLink, Outbox
from slipstream.wire.server import GrpcServer
from slipstream.wire.servicer import DraftServicer
from target_service.assembly import build as build_target

FREE_PORTS = tuple(f"router.{port}=127.0.0.1:0" for port in ("listen", "grpc_listen", "metrics_listen"))
STUBBORN = ("target.policy.always=true",)
MAX_TOKENS = 96
LINK_S = 60.0
ROUND_FILES, ROUND_CALLS, REQUEST_FILES = 20, 250, 30  # at most: the goals
# Where a round begins and ends. Whoever moves these functions names the new ones here.
VERDICT = tree.walk.__code__
TAKEN = TargetSide.receive.__code__
HANDED_OVER = Outbox.send.__code__
GOES_ON = ("Following._receive", "DraftWorker._round", "TargetWorker._commit")

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT / package}/" for package in ("slipstream", "draft_service", "target_service", "router_service"))

Mark = Callable[[FrameType, str], bool]


@dataclass(frozen=True, slots=True)
class Call:
    """One Python call: the file, from the repository's root on, and the function."""

    file: str
    function: str


@dataclass(slots=True)
class Way:
    """Records the calls between two marks, each time that they follow one another. ``again``: if the first mark comes
    again in between, recording begins again. ``counts`` returns whether calls of the present thread count."""

    begins: Mark
    ends: Mark
    counts: Callable[[], bool]
    again: bool = False
    folders: tuple[str, ...] = OURS
    found: list[list[Call]] = field(default_factory=list)
    calls: list[Call] | None = None  # since the first mark; None: not recording

    def see(self, frame: FrameType, event: str) -> None:
        """A profiler's event, on any thread."""
        if (self.again or self.calls is None) and self.begins(frame, event):
            self.calls = []
        calls = self.calls
        if calls is None:
            return
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self.folders) and not _goes_on(frame) and self.counts():
            calls.append(Call(str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname))
        if self.ends(frame, event):
            self.found.append(calls)
            self.calls = None

    @property
    def median(self) -> list[Call]:
        """The recording with the median number of calls. Raises Unavailable where there is none."""
        if not self.found:
            raise Unavailable("nothing was seen between the two marks")
        return sorted(self.found, key=len)[len(self.found) // 2]


def _goes_on(frame: FrameType) -> bool:
    """Whether it is a generator's frame that was entered before: the profiler sees a call again."""
    code = frame.f_code
    return code.co_flags & inspect.CO_GENERATOR != 0 and code.co_code[frame.f_lasti + 1] != 0  # RESUME's argument


class Walked:
    """Draft, target and router in this process, and the two ways through them. Use it as a context: inside it, all
    threads that are started have a profiler, and requests are taken."""

    def __init__(self, config: Config) -> None:
        """Loads the models and measures steps, unprofiled."""
        self._ways: tuple[Way, ...] = ()
        self._verdict = False  # one is there and not committed
        self._handed_over = set[int]()  # engine threads that have
        threading.setprofile(self._see)
        self._loops = ExitStack()  # each on a thread of its own
        self._stream, self._clients = [self._loops.enter_context(start_blocking_portal()) for _ in range(2)]
        self._streaming, self._serving = [loop.call(threading.get_ident) for loop in (self._stream, self._clients)]
        self._draft = build_draft(config)
        self._target = build_target(config, self._clients.call(asyncio.get_running_loop))
        self._link = self._stream.call(self._joined, config.wire)
        self._target.service.drafts = lambda: [self._link.status()]
        self._drafting, self._deciding = _started(self._draft.start), _started(self._target.worker.start)
        self._router = self._clients.call(RouterService, config, {"local": self._target.service})
        self._clients.call(self._router.start)
        self._resident = self._clients.call(asyncio.all_tasks)
        self.round = Way(self._commits, self._taken, self._of_a_round, again=True)
        self.request = Way(self._came, self._answered, self._of_a_request)

    async def _joined(self, wire: WireSection) -> DraftLink:
        self._server = GrpcServer("127.0.0.1:0", wire, [DraftServicer(self._draft)])
        port = await self._server.start()
        link = DraftLink(f"127.0.0.1:{port}", self._target.hello, self._target.worker.following, check_pair)
        self._linked = asyncio.create_task(link.run())
        return link

    def __enter__(self) -> Walked:
        deadline_s = time.monotonic() + LINK_S
        while not self._link.status().connected:
            if time.monotonic() > deadline_s:
                raise Unavailable(f"target and draft do not find each other: {self._link.status().problem}")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._ways = ()
        threading.setprofile(None)
        self._clients.call(self._router.drain, 0.1)
        self._stream.call(self._parted)
        self._target.end()
        self._draft.stop()
        self._loops.close()

    async def _parted(self) -> None:
        self._linked.cancel()
        await asyncio.gather(self._linked, return_exceptions=True)
        await self._server.drain(0.1)

    def watch(self) -> None:
        """Record requests from now on."""
        self._ways = (self.round, self.request)

    def ask(self, question: str, max_tokens: int) -> None:
        """Ask for one greedy answer, streamed, and read it to its end."""
        client = http.client.HTTPConnection("127.0.0.1", self._router.http_port, timeout=600)
        client.request("POST", "/v1/chat/completions", json.dumps({
            "model": self._router.gateway.model, "messages": [{"role": "user", "content": question}],
            "temperature": 0, "max_tokens": max_tokens, "stream": True}), {"content-type": "application/json"})
        response = client.getresponse()
        body = response.read()
        client.close()
        if response.status != 200 or b"[DONE]" not in body:
            raise Unavailable(f"no answer: {body[:200]!r}")

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is HANDED_OVER:
            self._handed_over.add(threading.get_ident())
        elif event == "call" and frame.f_code.co_qualname in GOES_ON:
            self._handed_over.discard(threading.get_ident())
        for way in self._ways:
            way.see(frame, event)

    def _commits(self, frame: FrameType, event: str) -> bool:
        if event == "return" and frame.f_code is VERDICT:
            self._verdict = True
        if not (self._verdict and event == "call" and frame.f_code.co_name == "_commit" and (
                threading.get_ident() in self._deciding)):
            return False
        self._verdict = False
        return True

    def _taken(self, frame: FrameType, event: str) -> bool:
        """Whether a growth for the newest commit was taken; a late one answers an earlier round."""
        if event != "return" or frame.f_code is not TAKEN:
            return False
        side = frame.f_locals["self"]
        return any(isinstance(value, Growth) and value.base == side.base for value in frame.f_locals.values())

    def _of_a_round(self) -> bool:
        thread = threading.get_ident()
        return thread == self._streaming or (
            thread in self._deciding | self._drafting and thread not in self._handed_over)

    def _came(self, frame: FrameType, event: str) -> bool:
        return event == "call" and frame.f_code.co_name == "data_received" and (
            threading.get_ident() == self._serving)

    def _answered(self, frame: FrameType, event: str) -> bool:
        code = frame.f_code
        return event == "call" and code.co_name == "write" and code.co_filename == selector_events.__file__ and (
            b"data: " in frame.f_locals["data"])

    def _of_a_request(self) -> bool:
        thread = threading.get_ident()
        if thread == self._serving:
            return asyncio.current_task() not in self._resident
        return thread != self._streaming and thread not in self._drafting


def _started(start: Callable[[], None]) -> set[int]:
    """The threads that ``start`` starts."""
    before = threading.enumerate()
    start()
    return {thread.ident or 0 for thread in threading.enumerate() if thread not in before}


def shown(name: str, what: str, calls: Sequence[Call], goal: str, functions: bool) -> None:
    """Print files (or functions) in order of their first entry, with their calls."""
    counts = Counter(f"{call.file}:{call.function}" if functions else call.file for call in calls)
    rows: list[Row] = [{"entered": entered, "calls": count} for entered, count in counts.items()]
    files = len({call.file for call in calls})
    write(f"walk-{name}", rows, f"{what}: {files} files, {len(calls)} calls (goal: at most {goal})")


def walk(config: Config, max_tokens: int, functions: bool = False) -> None:
    """Print both ways of a few answers. Raises ModelError, or Unavailable where no tree was asked for."""
    first, *others = QUESTIONS[:4]
    with Walked(config) as walked:
        walked.ask(first, max_tokens)  # not recorded: work that is done once in a process does not count
        walked.watch()
        for question in others:
            walked.ask(question, max_tokens)
    shown("round", f"a round, the median of {len(walked.round.found)}", walked.round.median,
          f"{ROUND_FILES} files, {ROUND_CALLS} calls", functions)
    shown("request", "a request to its first event", walked.request.median, f"{REQUEST_FILES} files", functions)


def config_of(*overrides: str) -> Config:
    """Everything in one process, on free ports. Raises ConfigError."""
    return resolve_drafter(load(None, (*FREE_PORTS, *STUBBORN, "log.level=warning", *overrides))).on_one_machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="list functions, not files")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    options = parser.parse_args()
    try:
        config = config_of(*options.overrides)
        configure(config.log)
        walk(config, MAX_TOKENS, options.calls)
    except SlipstreamError as error:
        raise SystemExit(f"bench.host.walk: {error}") from error


if __name__ == "__main__":
    main()
