"""``make conformance``: run every client against one server, print what works and what fails, with versions.

``--write`` puts it into docs/API.md, in short. A client whose packages are not there is told of and counts as failed.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slipstream.base.errors import SlipstreamError
from slipstream.cli.terminal import print_error
from tests_clients.clients import CLIENTS, Client, Outcome, tried
from tests_clients.scripted import scripted
from tests_clients.server import served

PAGE = Path("docs/API.md")
LOGS = Path("build/clients")
MARKS = re.compile(r"<!-- clients -->\n.*?<!-- end -->", re.DOTALL)


def markdown(outcomes: Sequence[Outcome]) -> str:
    """What the page says: who works, with the number of things tried, and a line for each who does not."""
    works = [f"{outcome.name}=={outcome.version} ({len(outcome.works)})" for outcome in outcomes if not outcome.fails]
    fails = [f"- {outcome.name}=={outcome.version} fails: {_failures(outcome)}" for outcome in outcomes
             if outcome.fails]
    return "\n".join((", ".join(works) + ".", *fails))


def _failures(outcome: Outcome) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in outcome.fails.items())


def show(outcomes: Sequence[Outcome]) -> None:
    table = Table("client", "version", "works", "fails")
    for outcome in outcomes:
        table.add_row(outcome.name, outcome.version, ", ".join(outcome.works), _failures(outcome))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


async def run(clients: Sequence[Client], rooms: Mapping[str, Path]) -> list[Outcome]:
    """Raises what a server that does not start raises."""
    outcomes = []
    for server, alike in groupby(clients, key=lambda client: client.server):
        async with (scripted(LOGS) if server == "scripted" else served(LOGS, server == "keyed")) as place:
            for client in alike:
                print(f"{client.name} …", end=" ", flush=True)
                outcomes.append(await tried(client, rooms, place, LOGS))
                print(_failures(outcomes[-1]) or f"{len(outcomes[-1].works)} work", flush=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="what `make conformance` installed")
    parser.add_argument("--vllm", type=Path, help="what `make vllm` installed")
    parser.add_argument("--only", nargs="+", choices=[client.name for client in CLIENTS], help="these clients")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE}")
    arguments = parser.parse_args()
    chosen = [client for client in CLIENTS if not arguments.only or client.name in arguments.only]
    rooms = {name: arguments.packages / name for name in ("clients", "older", "loads", "node")} | {
        "vllm": arguments.vllm or arguments.packages / "vllm"}
    LOGS.mkdir(parents=True, exist_ok=True)
    try:
        outcomes = asyncio.run(run(chosen, rooms))
    except SlipstreamError as error:
        print_error(error)
        sys.exit(1)
    show(outcomes)
    if arguments.write:
        PAGE.write_text(MARKS.sub(lambda _: f"<!-- clients -->\n{markdown(outcomes)}\n<!-- end -->",
                                  PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(any(outcome.fails for outcome in outcomes))


if __name__ == "__main__":
    main()
