"""What the tests here start: vLLM in a process of its own, and draft services."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slipstream.cli.process import http_ok
from slipstream.models.folder import resolve

MODEL = "smollm2-135m"
ENGINE = Path(__file__).with_name("engine.py")
ROOT = ENGINE.parent.parent
QUIET = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "KMP_BLOCKTIME": "0",
         "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
         "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
PROMPTS = ["Explain in simple words how a bicycle stays upright.", "List five facts about the moon.",
           "Write a Python function that returns the n-th Fibonacci number, and explain it.",
           "Repeat this three times: The quick brown fox jumps over the lazy dog near the river bank."]
TOKENS = 40
ASKED = 12  # answers, before no draft token will come


def quiet() -> dict[str, str]:
    """The environment of a process in vLLM's environment that leaves room to others."""
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **QUIET}


class Server:
    """A process that serves, with its children. ``page``: host:port that says 200 to /``path`` when it takes work."""

    def __init__(self, command: Sequence[Any], log: Path, page: str, path: str, environment: dict[str, str] | None,
                 folder: Path) -> None:
        self._log, self._page, self._path = log, page, path
        with log.open("ab") as out:
            self.process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                            env=environment, cwd=folder, start_new_session=True)

    def wait(self, within_s: float = 300.0) -> None:
        """Until it takes work."""
        deadline_s = time.monotonic() + within_s
        while not http_ok(self._page, self._path):
            assert self.process.poll() is None and time.monotonic() < deadline_s, self._log.read_text()[-3000:]
            time.sleep(0.2)

    def signal(self, number: signal.Signals) -> None:
        """To it alone, not to its children."""
        self.process.send_signal(number)

    def end(self) -> None:
        """At once, with its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Engine:
    """vLLM in a process of its own."""

    def __init__(self, python: Path, drafting: dict[str, Any] | None, log: Path | None = None,
                 script: Path = ENGINE, model: str | Path = MODEL, **settings: Any) -> None:
        """``drafting``: our options in vLLM; None: it drafts nothing. ``log``: for what it says besides its answers.
        ``settings``: of vLLM's ``LLM``."""
        self._log = log.open("ab") if log is not None else None
        command = [python, script, str(resolve(str(model))), json.dumps(drafting), json.dumps(settings)]
        self._process = subprocess.Popen(list(map(str, command)), text=True, cwd=ENGINE.parent, env=quiet(),
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log)
        assert self._said()["ready"]

    def order(self, prompts: Sequence[str | list[int]], batch: int, tokens: int = TOKENS,
              each: Sequence[dict[str, Any]] = (), chat: bool = True, abort: int = 0,
              **sampling: Any) -> None:
        """``sampling``: of vLLM's ``SamplingParams``; greedy where it says nothing. ``each``: more of it, one a prompt.
        chat: prompts are a user's words, not text or tokens as they are. abort: see ``engine``."""
        assert self._process.stdin is not None
        given = {"temperature": 0.0, "ignore_eos": True, "max_tokens": tokens, **sampling}
        self._process.stdin.write(json.dumps({"prompts": prompts, "batch": batch, "sampling": given, "each": each,
                                              "chat": chat, "abort": abort}) + "\n")
        self._process.stdin.flush()

    def answers(self) -> dict[str, Any]:
        return self._said()

    def ask(self, prompts: Sequence[str | list[int]], batch: int, tokens: int = TOKENS,
            **more: Any) -> dict[str, Any]:
        self.order(prompts, batch, tokens, **more)
        return self._said()

    def _said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                said: dict[str, Any] = json.loads(line[1:])
                return said
        raise AssertionError(f"vLLM ended with {self._process.wait()}")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        if self._log is not None:
            self._log.close()


@contextmanager
def engine(python: Path, drafting: dict[str, Any] | None, **settings: Any) -> Iterator[Engine]:
    running = Engine(python, drafting, **settings)
    try:
        yield running
    finally:
        running.end()


def draft(port: int, *settings: str) -> subprocess.Popen[bytes]:
    """A draft service that listens; n-grams, where ``settings`` say nothing else. The caller kills it."""
    given = ["draft.drafter=ngram", f"draft.listen=127.0.0.1:{port}", "draft.metrics_listen=127.0.0.1:0", *settings]
    words = [word for one in given for word in ("--set", one)]
    process = subprocess.Popen([sys.executable, "-m", "draft_service", *words], cwd=ROOT, stderr=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 300
    while not listens(port):
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            raise AssertionError(f"the draft does not listen; it ended with {process.wait()}")
        time.sleep(0.1)
    return process


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def accepts(drafted: Engine, before: int) -> int:
    """Asks until a draft token was used. A machine that is busy may take minutes for one answer: the time counts from
    when the draft listens, and so do answers."""
    deadline_s, asked = time.monotonic() + 120, 0
    while time.monotonic() < deadline_s or asked < ASKED:
        said, asked = drafted.ask(PROMPTS[3:], 1), asked + 1
        if (accepted := int(said["accepted"])) > before:
            return accepted
    raise AssertionError(f"no draft token was used in {asked} answers; {said['drafted']} were verified")
