"""``make walk``: how many files a round goes through, and a request until the first byte of its answer.

A few greedy answers of the default model with its default drafter, by real workers in one process: target and draft are
connected by real gRPC over loopback, the router has the target itself as its backend, the client is a socket. Every
thread has a profiler. Calls of functions of our own packages count: a coroutine each time that it is resumed, a
generator once.

A round: from the commit of a verdict (``TargetWorker._commit`` after ``walk`` returned) until the session has
received the growth that answers it. Counted are the engine threads of target and draft, and the loop that runs both
ends of their stream and nothing else. What an engine thread does after it has handed over its frame (counters, clients,
the next schedule) does not count: the other end is already at work. Of all rounds of the answers that asked for a tree,
the median one by calls is shown. Drafting never stops, though it may not pay under a profiler.

A request: from its first bytes to the first event on its socket, the median one of a few. Counted are all threads but
the draft's and that stream's; on the loop, tasks that ran before the request (polls of targets, metrics) are not.

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

from bench.report import Row, exit_on_error, write
from draft_service.assembly import build as build_draft
from router_service.service import RouterService
from slipstream.base.config import Config, WireSection, load
from slipstream.base.errors import Unavailable
from slipstream.cli.host import QUESTIONS
from slipstream.models.folder import resolve_drafter
from slipstream.observe.log import configure
from slipstream.protocol import tree
from slipstream.protocol.messages import Growth
from slipstream.protocol.session import TargetSide
from slipstream.wire.link import DraftLink, Outbox
from slipstream.wire.server import GrpcServer
from slipstream.wire.servicer import DraftServicer
from target_service.assembly import build as build_target

FREE_PORTS = tuple(f"router.{port}=127.0.0.1:0" for port in ("listen", "grpc_listen", "metrics_listen"))
ALWAYS_DRAFT = ("target.policy.always=true",)
MAX_TOKENS = 96
LINK_S = 60.0
ROUND_FILES, ROUND_CALLS, REQUEST_FILES = 20, 250, 30  # the goals: at most
# Where a round begins and ends. If these functions move, name the new ones here.
VERDICT = tree.walk.__code__
GROWTH_RECEIVED = TargetSide.receive.__code__
HANDED_OVER = Outbox.send.__code__
NEW_WORK = ("Following._receive", "DraftWorker._round", "TargetWorker._commit")

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT / package}/" for package in ("slipstream", "draft_service", "target_service", "router_service"))

Marker = Callable[[FrameType, str], bool]


@dataclass(frozen=True, slots=True)
class Call:
    """One Python call: the file, from the repository's root on, and the function."""

    file: str
    function: str


@dataclass(slots=True)
class CallRecorder:
    """Records the calls from a first event to a last one, each time. ``restarts``: if the first event happens again in
    between, recording restarts. ``is_counted`` returns whether calls of the current thread count."""

    is_first: Marker
    is_last: Marker
    is_counted: Callable[[], bool]
    restarts: bool = False
    folders: tuple[str, ...] = OURS
    recordings: list[list[Call]] = field(default_factory=list)
    calls: list[Call] | None = None  # since the first event; None: not recording

    def on_event(self, frame: FrameType, event: str) -> None:
        """Handle a profiler's event, of any thread."""
        if (self.restarts or self.calls is None) and self.is_first(frame, event):
            self.calls = []
        calls = self.calls
        if calls is None:
            return
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self.folders) and (
                not _is_resumed_generator(frame) and self.is_counted()):
            calls.append(Call(str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname))
        if self.is_last(frame, event):
            self.recordings.append(calls)
            self.calls = None

    @property
    def median(self) -> list[Call]:
        """The recording with the median number of calls. Raises Unavailable where there is none."""
        if not self.recordings:
            raise Unavailable("nothing was recorded between the two events")
        return sorted(self.recordings, key=len)[len(self.recordings) // 2]


def _is_resumed_generator(frame: FrameType) -> bool:
    """Whether a generator is resumed: the profiler reports that as a call, too."""
    code = frame.f_code
    return code.co_flags & inspect.CO_GENERATOR != 0 and code.co_code[frame.f_lasti + 1] != 0  # RESUME's argument


class ProfiledServices:
    """Draft, target and router in this process, and recorders of a round and a request. Use it as a context: inside it,
    all threads that are started have a profiler, and requests are served."""

    def __init__(self, config: Config) -> None:
        """Loads the models and measures steps, unprofiled."""
        self._recorders: tuple[CallRecorder, ...] = ()
        self._verdict_pending = False  # a verdict is not committed yet
        self._handed_over = set[int]()  # engine threads that have handed over their frame
        threading.setprofile(self._profile)
        self._loops = ExitStack()  # each on a thread of its own
        self._stream_loop, self._client_loop = [self._loops.enter_context(start_blocking_portal()) for _ in range(2)]
        self._stream_thread = self._stream_loop.call(threading.get_ident)
        self._client_thread = self._client_loop.call(threading.get_ident)
        self._draft = build_draft(config)
        self._target = build_target(config, self._client_loop.call(asyncio.get_running_loop))
        self._link = self._stream_loop.call(self._connect, config.wire)
        self._target.service.drafts = lambda: [self._link.status()]
        self._draft_threads = _start_threads(self._draft.start)
        self._target_threads = _start_threads(self._target.worker.start)
        self._router = self._client_loop.call(RouterService, config, {"local": self._target.service})
        self._client_loop.call(self._router.start)
        self._background_tasks = self._client_loop.call(asyncio.all_tasks)
        self.round = CallRecorder(self._is_commit, self._is_growth_received, self._counts_for_round, restarts=True)
        self.request = CallRecorder(self._is_request_received, self._is_first_event_sent, self._counts_for_request)

    async def _connect(self, wire: WireSection) -> DraftLink:
        self._server = GrpcServer("127.0.0.1:0", wire, [DraftServicer(self._draft)])
        port = await self._server.start()
        link = DraftLink(f"127.0.0.1:{port}", self._target.hello, self._target.worker.following)
        self._link_task = asyncio.create_task(link.run())
        return link

    def __enter__(self) -> ProfiledServices:
        deadline_s = time.monotonic() + LINK_S
        while not self._link.status().connected:
            if time.monotonic() > deadline_s:
                raise Unavailable(f"target and draft do not connect: {self._link.status().problem}")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._recorders = ()
        threading.setprofile(None)
        self._client_loop.call(self._router.drain, 0.1)
        self._stream_loop.call(self._disconnect)
        self._target.end()
        self._draft.stop()
        self._loops.close()

    async def _disconnect(self) -> None:
        self._link_task.cancel()
        await asyncio.gather(self._link_task, return_exceptions=True)
        await self._server.drain(0.1)

    def watch(self) -> None:
        """Record requests from now on."""
        self._recorders = (self.round, self.request)

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

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is HANDED_OVER:
            self._handed_over.add(threading.get_ident())
        elif event == "call" and frame.f_code.co_qualname in NEW_WORK:
            self._handed_over.discard(threading.get_ident())
        for recorder in self._recorders:
            recorder.on_event(frame, event)

    def _is_commit(self, frame: FrameType, event: str) -> bool:
        if event == "return" and frame.f_code is VERDICT:
            self._verdict_pending = True
        if not (self._verdict_pending and event == "call" and frame.f_code.co_name == "_commit" and (
                threading.get_ident() in self._target_threads)):
            return False
        self._verdict_pending = False
        return True

    def _is_growth_received(self, frame: FrameType, event: str) -> bool:
        """Whether a growth for the newest commit was received; a late one answers an earlier round."""
        if event != "return" or frame.f_code is not GROWTH_RECEIVED:
            return False
        side = frame.f_locals["self"]
        return any(isinstance(value, Growth) and value.base == side.base for value in frame.f_locals.values())

    def _counts_for_round(self) -> bool:
        thread = threading.get_ident()
        return thread == self._stream_thread or (
            thread in self._target_threads | self._draft_threads and thread not in self._handed_over)

    def _is_request_received(self, frame: FrameType, event: str) -> bool:
        return event == "call" and frame.f_code.co_name == "data_received" and (
            threading.get_ident() == self._client_thread)

    def _is_first_event_sent(self, frame: FrameType, event: str) -> bool:
        code = frame.f_code
        return event == "call" and code.co_name == "write" and code.co_filename == selector_events.__file__ and (
            b"data: " in frame.f_locals["data"])

    def _counts_for_request(self) -> bool:
        thread = threading.get_ident()
        if thread == self._client_thread:
            return asyncio.current_task() not in self._background_tasks
        return thread != self._stream_thread and thread not in self._draft_threads


def _start_threads(start: Callable[[], None]) -> set[int]:
    """Call ``start``. Returns the threads that it starts."""
    before = threading.enumerate()
    start()
    return {thread.ident or 0 for thread in threading.enumerate() if thread not in before}


def print_calls(name: str, what: str, calls: Sequence[Call], goal: str, functions: bool) -> None:
    """Print files (or functions) in order of their first entry, with their calls."""
    counts = Counter(f"{call.file}:{call.function}" if functions else call.file for call in calls)
    rows: list[Row] = [{"entered": entered, "calls": count} for entered, count in counts.items()]
    files = len({call.file for call in calls})
    write(f"walk-{name}", rows, f"{what}: {files} files, {len(calls)} calls (goal: at most {goal})")


def walk(config: Config, max_tokens: int, functions: bool = False) -> None:
    """Print a round and a request of a few answers. Raises ModelError, or Unavailable where no tree was asked for."""
    first, *others = QUESTIONS[:4]
    with ProfiledServices(config) as services:
        services.ask(first, max_tokens)  # not recorded: work done once in a process does not count
        services.watch()
        for question in others:
            services.ask(question, max_tokens)
    print_calls("round", f"a round, the median of {len(services.round.recordings)}", services.round.median,
          f"{ROUND_FILES} files, {ROUND_CALLS} calls", functions)
    print_calls("request", "a request to its first event", services.request.median, f"{REQUEST_FILES} files", functions)


def config_of(*overrides: str) -> Config:
    """Everything in one process, on free ports. Raises ConfigError."""
    return resolve_drafter(load(None, (*FREE_PORTS, *ALWAYS_DRAFT, "log.level=warning", *overrides))).on_one_machine()


@exit_on_error()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="list functions, not files")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    options = parser.parse_args()
    config = config_of(*options.overrides)
    configure(config.log)
    walk(config, MAX_TOKENS, options.calls)


if __name__ == "__main__":
    main()
