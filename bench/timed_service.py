"""Timed devices as processes: ``python -m bench.timed_service ROLE TIMING.json --set …``. A composition root.

ROLE is target, draft, or colocated: a target whose drafter is in the same process and on the same device.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from draft_service.__main__ import host as host_draft
from draft_service.assembly import Draft
from draft_service.assembly import assemble as assemble_draft
from slipstream.base.config import Config, load
from slipstream.cli.process import until_signalled
from slipstream.observe.log import configure
from slipstream.observe.trace import Trace
from slipstream.protocol.pairing import check_pair
from slipstream.protocol.session import LEASE_S
from slipstream.simulate.timed import Device, TimedDrafter, TimedModel, Timing
from slipstream.wire.local import LocalLink
from target_service.__main__ import host as host_target
from target_service.assembly import assemble as assemble_target
from target_service.drafts import Drafts


async def serve_draft(config: Config, timing: Timing, stop: asyncio.Event) -> None:
    await host_draft(config, draft(config, timing, Device()), stop)


def draft(config: Config, timing: Timing, device: Device) -> Draft:
    """A draft on ``device``."""
    section = config.draft
    drafter = TimedDrafter(timing, device, section.run_ahead > 0, section.max_sessions)
    return assemble_draft(drafter, "", LEASE_S, section.run_ahead, Trace(config.log.trace, "draft"))


async def serve_target(config: Config, timing: Timing, stop: asyncio.Event, colocated: bool = False) -> None:
    """``colocated``: its drafter is here, and ``target.drafts`` are left alone."""
    known: list[Drafts] = []
    local: list[LocalLink] = []
    device, loop = Device(), asyncio.get_running_loop()
    target = await asyncio.to_thread(assemble_target, config, TimedModel(timing, device), "timed", "", loop,
                                     lambda: [*(status for drafts in known for status in drafts.statuses()),
                                              *(link.status() for link in local)])
    if not colocated:
        await host_target(config, target, known, stop)
        return
    beside = draft(config, timing, device)
    beside.worker.start()
    local.append(LocalLink("local", target.hello, target.worker.following, beside.worker, check_pair))
    alone = config.model_copy(update={"target": config.target.model_copy(update={"drafts": ()})})
    await host_target(alone, target, known, stop, ready=local[0].restore)
    await asyncio.to_thread(beside.worker.stop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("target", "draft", "colocated"))
    parser.add_argument("timing", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    # A timed device's text is no text: what it repeats says nothing.
    config = load(None, ("target.prompt_lookup=false", *arguments.overrides))
    timing = Timing.load(arguments.timing)
    configure(config.log)

    async def serve(config: Config, stop: asyncio.Event) -> None:
        if arguments.role == "draft":
            await serve_draft(config, timing, stop)
        else:
            await serve_target(config, timing, stop, arguments.role == "colocated")

    asyncio.run(until_signalled(config, serve))


if __name__ == "__main__":
    main()
