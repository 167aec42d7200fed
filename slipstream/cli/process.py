"""A service as a process: its flags, its signals, its exit.

SIGTERM and SIGINT drain; a second one ends at once. It knows nothing about what is served.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from slipstream.base.config import Config, load
from slipstream.base.errors import SlipstreamError
from slipstream.models.shipped import settled
from slipstream.observe.log import configure

Serve = Callable[[Config, asyncio.Event], Awaitable[None]]


def main(name: str, serve: Serve) -> None:
    """Run ``serve`` with the configuration that the command line names; exit code 1 with one sentence on errors."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=f"Run the {name.replace('_', ' ')}.")
    parser.add_argument("--config", help="YAML file; `slipstream config` prints all keys with their defaults")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides",
                        help="change one setting; may be given often")
    arguments = parser.parse_args()
    try:
        config = settled(load(arguments.config, tuple(arguments.overrides)))
        configure(config.log)
        asyncio.run(until_signalled(config, serve))
    except SlipstreamError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(1)


@asynccontextmanager
async def kept_up(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run ``work`` beside the block, and end it with the block."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_signalled(config: Config, serve: Serve) -> None:
    """Serve until SIGTERM or SIGINT; a second signal exits at once with code 130."""
    stop = asyncio.Event()

    def signalled() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    await serve(config, stop)
