"""How a program in Python tells what works: ``begin`` once, then ``check`` before each function that tries a thing."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

URL, MODEL, SCRATCH, TOKENIZER = (os.environ[f"SLIPSTREAM_{name}"] for name in ("URL", "MODEL", "SCRATCH", "TOKENIZER"))
API = os.environ["OPENAI_BASE_URL"]
KEY = os.environ["OPENAI_API_KEY"]


def begin(package: str) -> None:
    """``package``: whose version is told."""
    _tell({"version": version(package)})


def check(name: str) -> Callable[[Callable[[], Any]], None]:
    """Call what is decorated at once; it raises, or asserts, where ``name`` does not work."""
    def tried(function: Callable[[], Any]) -> None:
        try:
            result = function()
            if inspect.isawaitable(result):
                asyncio.run(_awaited(result))
        except Exception as error:
            traceback.print_exc()
            _tell({"check": name, "ok": False, "told": f"{type(error).__name__}: {error}"})
        else:
            _tell({"check": name, "ok": True})
    return tried


def command(*words: str, **environment: str) -> str:
    """What a command printed; it raises if that failed."""
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment}, timeout=600,
                          stdin=subprocess.DEVNULL)
    print(done.stdout, done.stderr, flush=True)
    if done.returncode:
        last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise RuntimeError(f"ended with {done.returncode}: {last[-1] if last else ''}")
    return done.stdout


async def _awaited(result: Any) -> None:
    await result


def _tell(told: dict[str, Any]) -> None:
    sys.stderr.flush()
    print("\nconformance: " + json.dumps(told), flush=True)
