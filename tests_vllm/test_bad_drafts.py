"""vLLM beside drafts that are absent, killed, stopped, swallowed, lying, slow, and two of which one dies.

Its greedy tokens stay, a proposal ends with its deadline, and drafts are used again by themselves. One engine lives
through all of it. ``always``, so that a good draft is used whatever it costs here: whether it pays is for
``tests/test_bad_drafts.py``, where time is counted and no machine is busy. There proposals end within 10 ms of the
deadline; here, where the engine's thread may be kept from the core by others, within ``BUSY_S``. A flood is tried there
alone: on two cores whoever floods takes one of them, and here a proposal then took up to 0.5 s more than its deadline.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.fleet import free_port
from tests_vllm.relay import Relay
from tests_vllm.running import PROMPTS, ROOT, Engine, accepts, draft, engine

DEADLINE_S, BUSY_S = 0.25, 0.5
BACK_S = 60.0  # whole answers of an engine that shares two cores with others: seconds where it does not
TOKENS = 32
pytestmark = pytest.mark.timeout(1500)


def bad(port: int, kind: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests_vllm.bad_draft", str(port), kind], cwd=ROOT,
                            env={**os.environ, "PYTHONPATH": str(ROOT)})


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Trial:
    """One engine, the network before its two drafts, and what plain vLLM says."""

    def __init__(self, drafted: Engine, relays: list[Relay], plain: list[list[int]]) -> None:
        self.drafted, self.relays, self.plain = drafted, relays, plain
        self.accepted = 0

    def survives(self, name: str, meanwhile: Callable[[], None] = lambda: None, times: int = 2) -> int:
        """Answers while ``meanwhile`` happens and after. Returns how many draft tokens were accepted."""
        accepted, longest_s = 0, 0.0
        began_s = time.monotonic()
        for number in range(times):
            self.drafted.order(PROMPTS, len(PROMPTS), TOKENS)
            if number == 0:
                time.sleep(0.4)
                meanwhile()
            said = self.drafted.answers()
            assert said["tokens"] == self.plain, name
            longest_s = max(longest_s, said["longest_s"])
            accepted, self.accepted = int(said["accepted"]) - self.accepted + accepted, int(said["accepted"])
        print(f"{name}: {accepted} draft tokens accepted, {time.monotonic() - began_s:.1f} s, longest proposal "
              f"{1e3 * longest_s:.0f} ms of {1e3 * DEADLINE_S:.0f}")
        assert longest_s < DEADLINE_S + BUSY_S, name
        return accepted

    def wants_none(self) -> None:
        """Who says so in vllm_xargs."""
        said = self.drafted.ask(PROMPTS, len(PROMPTS), TOKENS, extra_args={"slipstream": False})
        assert said["tokens"] == self.plain
        assert int(said["accepted"]) == self.accepted, "it was drafted for"
        assert int(self.drafted.ask(PROMPTS, len(PROMPTS), TOKENS)["accepted"]) > self.accepted

    def is_back(self, name: str) -> None:
        began_s = time.monotonic()
        self.accepted = accepts(self.drafted, self.accepted)
        took_s = time.monotonic() - began_s
        print(f"{name}: drafts are used again after {took_s:.1f} s")
        assert took_s < BACK_S, name


def test_bad_drafts_change_no_token_and_hold_no_step_past_the_deadline(vllm_python: Path) -> None:
    with engine(vllm_python, None) as alone:
        plain = alone.ask(PROMPTS, len(PROMPTS), TOKENS)["tokens"]
    relays = [Relay(), Relay()]
    options = {"drafts": [f"127.0.0.1:{relay.port}" for relay in relays], "prompt_lookup": False, "always": True,
               "deadline_s": DEADLINE_S}
    try:
        with engine(vllm_python, options) as drafted:
            trial = Trial(drafted, relays, plain)
            assert trial.survives("absent", times=1) == 0
            _silent_ones(trial)
            _busy_ones(trial)
            _two_of_which_one_dies(trial)
    finally:
        for relay in relays:
            relay.close()


def _silent_ones(trial: Trial) -> None:
    port, relay = free_port(), trial.relays[0]
    relay.leads(port)
    with ended(draft(port)) as service:
        trial.is_back("there at last")
        trial.survives("killed", service.kill)
    with ended(draft(port)) as service:
        trial.is_back("killed")
        trial.survives("stopped", lambda: service.send_signal(signal.SIGSTOP))
        service.send_signal(signal.SIGCONT)
        trial.is_back("stopped")
        trial.survives("swallowed", relay.swallow)
        relay.heal()
        trial.is_back("swallowed")
    relay.leads(None)


def _busy_ones(trial: Trial) -> None:
    good, port, relay = free_port(), free_port(), trial.relays[0]
    with ended(draft(good)):
        for kind in ("lying", "slow"):
            with ended(bad(port, kind)):
                relay.leads(port)
                time.sleep(4.0)  # until it is up, and dialled again
                trial.survives(kind)
            relay.leads(good)
            trial.is_back(kind)
    relay.leads(None)


def _two_of_which_one_dies(trial: Trial) -> None:
    ports = [free_port(), free_port()]
    for relay, port in zip(trial.relays, ports, strict=True):
        relay.leads(port)
    with ended(draft(ports[0])) as service, ended(draft(ports[1])):
        trial.is_back("two drafts")
        time.sleep(4.0)
        trial.wants_none()
        assert trial.survives("one of two dies", service.kill) > 0
