"""Which clients are tried, and how one is.

A program prints one line of JSON for its version, then one for each thing that it does: ``{"check", "ok", "told"}``.
What it prints besides goes to its log. A program that ends early has failed at what it did not come to.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests_clients.server import Place, Server

PROGRAMS = Path(__file__).parent / "programs"
PATIENCE_S = 900.0  # for all that one client does, on a slow machine
MARK = "conformance: "  # before what a program tells
TOLD_CHARS = 160


@dataclass(frozen=True, slots=True)
class Client:
    """``packages``: the folder of its environment, below the one that is given, or vllm. ``server``: whom it asks."""

    name: str
    program: str
    packages: str = "clients"
    server: Server = "keyed"


CLIENTS = (
    Client("openai-python", "openai_python.py"),
    Client("openai-node", "openai_node.mjs", "node"),
    Client("ai-sdk", "ai_sdk.mjs", "node"),
    Client("anthropic-python", "anthropic_python.py"),
    Client("anthropic-node", "anthropic_node.mjs", "node"),
    Client("langchain", "langchain_openai_.py"),
    Client("llama-index", "llama_index_.py", "older"),
    Client("instructor", "instructor_.py"),
    Client("pydantic-ai", "pydantic_ai_.py"),
    Client("openai-agents", "openai_agents.py"),
    Client("smolagents", "smolagents_.py"),
    Client("dspy", "dspy_.py", "older"),
    Client("outlines", "outlines_.py"),
    Client("litellm", "litellm_.py", "older"),
    Client("llm", "llm_.py"),
    Client("opencode", "opencode.mjs", "node"),
    Client("lm-eval", "lm_eval_.py", "loads"),
    Client("guidellm", "guidellm_.py", "loads"),
    Client("aiperf", "aiperf_.py", "loads"),
    Client("sglang-bench", "sglang_bench.py", "loads"),
    Client("vllm-bench", "vllm_bench.py", "vllm", "open"),
    Client("codex", "codex.mjs", "node", "scripted"),
    Client("canitoolcall", "canitoolcall_.py", server="scripted"),
)


@dataclass(slots=True)
class Outcome:
    """What a client did. ``fails``: check -> why."""

    name: str
    version: str = "?"
    works: list[str] = field(default_factory=list)
    fails: dict[str, str] = field(default_factory=dict)


async def tried(client: Client, rooms: Mapping[str, Path], place: Place, logs: Path) -> Outcome:
    """Run a client's program. ``rooms``: folder of each environment."""
    outcome = Outcome(client.name)
    room = rooms[client.packages]
    if not room.is_dir():
        outcome.fails["start"] = f"nothing is installed in {room}"
        return outcome
    command = await asyncio.to_thread(_command, client, room)
    home = (logs / "home" / client.name).absolute()
    home.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **place.environment, "HOME": str(home), "PWD": str(home),
                   "SLIPSTREAM_SCRATCH": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    for ours in ("PYTHONPATH", "PYTHONSAFEPATH"):  # programs import what stands beside them
        environment.pop(ours, None)
    log = logs / f"{client.program.partition('.')[0].rstrip('_')}.log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(*command, stdout=file, stderr=asyncio.subprocess.STDOUT,
                                                       stdin=asyncio.subprocess.DEVNULL, env=environment, cwd=home,
                                                       start_new_session=True)
        try:
            await asyncio.wait_for(process.wait(), PATIENCE_S)
        except TimeoutError:
            outcome.fails["end"] = f"was not done after {PATIENCE_S:g} s"
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    _read(outcome, log.read_text(encoding="utf-8", errors="replace"))
    if process.returncode and not outcome.fails:
        outcome.fails["end"] = f"ended with {process.returncode}; see {log}"
    return outcome


def _command(client: Client, room: Path) -> list[str]:
    if not client.program.endswith(".mjs"):
        return [str(room / "bin" / "python"), str(PROGRAMS / client.program)]
    for program in PROGRAMS.glob("*.mjs"):
        shutil.copy(program, room)  # node looks for packages beside a program
    return ["node", str(room / client.program)]


def _read(outcome: Outcome, log: str) -> None:
    for line in log.splitlines():
        if not line.startswith(MARK):
            continue
        told = json.loads(line.removeprefix(MARK))
        if "version" in told:
            outcome.version = told["version"]
        elif told["ok"]:
            outcome.works.append(told["check"])
        else:
            outcome.fails[told["check"]] = " ".join(told["told"].split())[:TOLD_CHARS]
