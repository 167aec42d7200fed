"""Services as processes. Inside a process: flags, signals, exit. For a launch of all three on this machine: addresses,
start, readiness, restart, drain.

Rules:
1. SIGTERM and SIGINT drain. A second one ends the process at once; so does one before the service is ready, because it
   has nothing to drain and loading a large model takes minutes. Objects that exist when a service is ready are hidden
   from Python's garbage collector (``gc.freeze``), which stops all threads: it took 70 ms of an idle target.
2. Every address is tried before the first process starts; a taken one is named with the flag that changes it.
3. The services get one configuration, written beside their logs. A terminal's Ctrl-C does not reach them: they are
   drained in order (router, target, draft), so that answers finish before the services that they need end. If the
   launch itself is killed, their standard input is closed, and they drain by themselves.
4. A service that dies before it was ready ends the launch with the tail of its log; one that dies later is started
   again.

It knows nothing about what the services do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import uvloop

from slipstream.base.address import host_port, reachable
from slipstream.base.config import Config, dump_yaml, load
from slipstream.base.errors import ConfigError, SlipstreamError, Unavailable
from slipstream.models.folder import resolve_drafter
from slipstream.observe.log import configure, logger

START_S = 7200.0  # enough to load the largest model from a cold disk; a user may end a start that hangs
CLOSE_S = 15.0  # added to the time that a service gives its answers
RESTART_S = 2.0  # doubles with every death of the same service
RESTART_MAX_S = 32.0
TAIL_LINES = 12
STDIN = 0

# Environment variables that libraries read when they are loaded. gRPC reads messages on the thread that waits for them:
# its newer engine passes them between threads, which have to wake up. Where services share the cores, threads of the
# model wait without spinning: a thread that spins on the core of another service makes a step ten times slower.
EVENT_ENGINES = ("client", "listener", "for_all_other_endpoints")
GRPC = {"GRPC_EXPERIMENTS": ",".join(f"-event_engine_{engine}" for engine in EVENT_ENGINES)}
SHARED_CORES = {"GOMP_SPINCOUNT": "0", **GRPC}

Serve = Callable[[Config, asyncio.Event, Callable[[], None]], Awaitable[None]]  # the last is called once it is ready
Report = Callable[[str], None]


def main(name: str, serve: Serve) -> None:
    """Run ``serve`` with the configuration of the command line; an error prints one sentence, with exit code 1."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=f"Run the {name.replace('_', ' ')}.")
    parser.add_argument("--config", type=os.path.expanduser,
                        help="YAML file; `slipstream config` prints all keys with their defaults")
    parser.add_argument("--while-input", action="store_true",
                        help="drain, too, when standard input ends: whoever started this is gone")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides",
                        help="change one setting; may be given often")
    arguments = parser.parse_args()
    try:
        run(resolve_drafter(load(arguments.config, tuple(arguments.overrides))), serve, arguments.while_input)
    except SlipstreamError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(1)


def run(config: Config, serve: Serve, while_input: bool = False) -> None:
    """As ``main``, with a given configuration; errors are raised."""
    configure(config.log)
    raise_open_files_limit()
    # asyncio's own loop takes longer to wake up, and a round wakes loops four times (docs/MEASUREMENTS.md).
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(until_signalled(config, serve, while_input))


def raise_open_files_limit() -> None:
    """Raise the limit of open files to the hard limit. The soft limit, often 1,024, is for programs that use select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # macOS reports no limit, and refuses it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def until_signalled(config: Config, serve: Serve, while_input: bool = False) -> None:
    """Serve until SIGTERM or SIGINT. A second signal, or one before ``serve`` is ready, exits at once with 128 and its
    number, as shells expect. while_input: the end of standard input (a pipe) drains too, and does not count as a
    signal."""
    stop, ready = asyncio.Event(), asyncio.Event()
    stopped_by: set[str] = set()

    def on_ready() -> None:
        ready.set()
        gc.freeze()

    def request_stop(number: int, source: str) -> None:
        if not ready.is_set():
            logger("start").info("ended before it was ready", signal=number)
        if source in stopped_by or not ready.is_set():
            os._exit(128 + number)
        stopped_by.add(source)
        stop.set()

    def on_input() -> None:
        if not os.read(STDIN, 1):
            loop.remove_reader(STDIN)
            request_stop(signal.SIGTERM, "input")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, request_stop, number, "signal")
    if while_input:
        loop.add_reader(STDIN, on_input)
    await serve(config, stop, on_ready)


def prepare_libraries(config: Config) -> None:
    """Set the environment variables that a launch sets for its services; call it before torch and gRPC are loaded."""
    for name, value in (SHARED_CORES if config.target.shared_cores else GRPC).items():
        os.environ.setdefault(name, value)


@dataclass(slots=True)
class Service:
    """One process. ``ready``: whether it has ever taken work."""

    name: str
    metrics_listen: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    ready: bool = False
    restart_at_s: float = 0.0  # 0: it runs
    pause_s: float = RESTART_S

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def exit_code(self) -> int | None:
        return self.process.poll() if self.process is not None else None

    def tail(self) -> str:
        """The last lines of its log."""
        try:
            return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
        except OSError:
            return ""


def with_local_addresses(config: Config) -> Config:
    """``config`` for three services on one machine: ``target.drafts`` and ``router.targets`` become the addresses of
    this launch, unless they are set."""
    target, router = config.target, config.router
    if "drafts" not in target.model_fields_set:
        target = target.model_copy(update={"drafts": (reachable(config.draft.listen),)})
    if "targets" not in router.model_fields_set:
        router = router.model_copy(update={"targets": (reachable(target.listen),)})
    return config.model_copy(update={"target": target, "router": router}).on_one_machine()


def listen_addresses(config: Config) -> dict[str, str]:
    """Every setting with a listening address of the three services -> its address."""
    return {f"{name}.{key}": getattr(section, key)
            for name, section in (("router", config.router), ("target", config.target), ("draft", config.draft))
            for key in ("listen", "grpc_listen", "metrics_listen") if hasattr(section, key)}


def shared_address(wanted: Mapping[str, str]) -> str:
    """A sentence about the first address in ``wanted`` (see ``listen_addresses``) that two settings share; "": none.
    Only the router's API and metrics may share one."""
    for key, address in wanted.items():
        first = next(key for key, other in wanted.items() if other == address)
        if first != key and (first, key) != ("router.listen", "router.metrics_listen"):
            return f"{key}: {address} is {first} already; give each a port of its own"
    return ""


def require_free(config: Config) -> None:
    """Raises ConfigError naming each address that is taken or shared or has no port, with a flag that helps. A draft's
    do not matter where ``target.drafts`` is empty: there is none."""
    wanted = {key: address for key, address in listen_addresses(config).items()
              if config.target.drafts or not key.startswith("draft.")}
    for key, address in wanted.items():
        if host_port(address)[1] == 0:
            raise ConfigError(f"{key}: {address!r} leaves the port open: the services have to find each other; name "
                              f"one with --set {key}=HOST:PORT")
    if shared := shared_address(wanted):
        raise ConfigError(shared)
    _require_bindable(wanted)


def require_own(config: Config, *names: str) -> None:
    """As ``require_free`` for one process, whose ports may be 0. Called before it loads a model, which takes minutes.
    ``names``: of its services, or of settings."""
    own = {key: address for key, address in listen_addresses(config).items()
           if not {key, key.split(".")[0]}.isdisjoint(names)}
    _require_bindable({key: address for key, address in own.items() if host_port(address)[1]})


def _require_bindable(wanted: Mapping[str, str]) -> None:
    lines, ports = [], {host_port(address)[1] for address in wanted.values()}
    for key, address in wanted.items():
        error = listen_error(address)
        if error is None:
            continue
        host, port = host_port(address)
        if error.errno != errno.EADDRINUSE:
            lines.append(f"{key}: cannot listen on {address}: {error.strerror or error}; "
                         f"choose another address with --set {key}=HOST:PORT")
            continue
        free_port = next(p for p in _other_ports(port) if p not in ports and listen_error(f"{host}:{p}") is None)
        ports.add(free_port)
        lines.append(f"{key}: port {port} is taken; stop what uses it, or add --set {key}={host}:{free_port}")
    if sum(" is taken; " in line for line in lines) > 1:
        grpc = wanted.get("router.grpc_listen", "")
        talks = f" `slipstream chat --address {reachable(grpc)}` talks to it" if grpc and listen_error(grpc) else ""
        lines.append(f"is Slipstream running already?{talks}")
    if lines:
        raise ConfigError("\n".join(lines))


class Launch:
    """Draft, target and router as processes, without a draft where ``target.drafts`` is empty. Their logs and
    configuration go to ``folder``."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = with_local_addresses(config)
        self.folder = folder
        listens = listen_addresses(self.config)
        self.services = [Service(name, listens[f"{name}.metrics_listen"], folder / f"{name}.log")
                         for name in ("draft", "target", "router") if name != "draft" or self.config.target.drafts]

    @property
    def names(self) -> str:
        """Of its services, as a sentence has them."""
        *others, last = [service.name for service in self.services]
        return f"{', '.join(others)} and {last}"

    def start(self) -> None:
        """Start all of them. Raises ConfigError when an address is taken or the folder cannot be written."""
        require_free(self.config)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file.write_text(dump_yaml(self.config.model_dump(mode="json")))
            for service in self.services:
                service.log.write_bytes(b"")
        except OSError as error:
            raise ConfigError(f"cannot write logs to {self.folder}: {error}; choose another with --logs") from error
        for service in self.services:
            self._spawn(service)

    def wait_ready(self, report: Report, timeout_s: float = START_S) -> None:
        """Wait until all services are ready; ``report`` gets the names of those that are not. Raises Unavailable with
        the tail of a log."""
        deadline_s = time.monotonic() + timeout_s
        while waited := [service for service in self.services if not self._is_ready(service)]:
            report("waiting for " + " and ".join(service.name for service in waited))
            for service in waited:
                if service.exit_code is not None:
                    raise Unavailable(f"the {service.name} service ended before it was ready "
                                      f"({_exit_reason(service.exit_code)}); its log, {service.log}, ends with:\n"
                                      f"{service.tail()}")
            if time.monotonic() > deadline_s:
                service = waited[0]
                raise Unavailable(f"the {service.name} service was not ready within {timeout_s:.0f} s; its log, "
                                  f"{service.log}, ends with:\n{service.tail()}")
            time.sleep(0.1)

    def watch(self, report: Report) -> Iterator[None]:
        """Supervise for ever, one step at each ``next``: a service that died is started again and reported."""
        while True:
            now_s = time.monotonic()
            for service in self.services:
                self._supervise(service, now_s, report)
            yield

    def drain(self, report: Report) -> None:
        """Drain the services in order and wait for each. One that does not end in time is killed."""
        patience_s = max(self.config.router.drain_s, self.config.target.drain_s) + CLOSE_S
        for service in reversed(self.services):
            if service.process is None or service.exit_code is not None:
                continue
            report(f"draining the {service.name}")
            if service.ready and service.process.stdin is not None:
                service.process.stdin.close()  # no signal: where systemd has sent one to all, it would be the second
            else:
                service.process.send_signal(signal.SIGTERM)
            try:
                service.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                service.process.kill()
                service.process.wait()

    def kill(self) -> None:
        """Kill all services."""
        for service in self.services:
            if service.process is not None and service.exit_code is None:
                service.process.kill()
                service.process.wait()

    @property
    def _file(self) -> Path:
        """The file of the services' configuration. Not ``slipstream.yaml``, which may be the user's; its name has the
        router's port, so that two launches with the same folder differ."""
        return self.folder / f"settings-{host_port(self.config.router.listen)[1]}.yaml"

    def _spawn(self, service: Service) -> None:
        # -P: else a file of the present folder could be imported in place of a module of the same name.
        command = [sys.executable, "-P", "-m", f"{service.name}_service", "--while-input", "--config", str(self._file)]
        found = {"PYTHONPATH": os.pathsep.join(sys.path)}
        with service.log.open("ab") as log:
            service.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log,
                                               start_new_session=True, env={**SHARED_CORES, **os.environ, **found})
        service.restart_at_s = 0.0

    def _is_ready(self, service: Service) -> bool:
        service.ready = service.ready or http_ok(reachable(service.metrics_listen), "/ready")
        return service.ready

    def _supervise(self, service: Service, now_s: float, report: Report) -> None:
        code = service.exit_code
        if code is None:
            return
        if service.restart_at_s == 0.0:
            service.restart_at_s = now_s + service.pause_s
            report(f"the {service.name} service ended ({_exit_reason(code)}); it starts again in "
                   f"{service.pause_s:.0f} s; its log is {service.log}")
            service.pause_s = min(2 * service.pause_s, RESTART_MAX_S)
        elif now_s >= service.restart_at_s:
            self._spawn(service)
            report(f"the {service.name} service is back as process {service.pid}")


def http_ok(address: str, path: str) -> bool:
    """Whether an HTTP GET of ``path`` at ``address`` (host:port) gives 200 within a second."""
    host, port = host_port(address)
    connection = http.client.HTTPConnection(host, port, timeout=1.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def listen_error(address: str) -> OSError | None:
    """The error of listening at ``address`` (host:port); None if that works."""
    host, port = host_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if os.name == "posix":  # a port in TIME_WAIT is free to use
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def _other_ports(port: int) -> Iterator[int]:
    return (1024 + (port + step * 10 - 1024) % (65536 - 1024) for step in range(1, 6000))


def _exit_reason(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
