"""The target generates conversations, which are written as shards. Several processes can do it in parallel.

Rules:
1. Process ``rank`` makes the plans whose index has the remainder ``rank`` when divided by the number of processes. So
   processes need not communicate about plans, and an interrupted run can be resumed with any number of them.
2. Each process writes its own shards. The seconds of a shard are divided by the number of processes, so their sum over
   a folder is elapsed time.
3. The first process decides when there is enough, also after its own plans are used up. It then closes its pipes; the
   others check them after every step and end, also if it was killed. If one of the others fails, the first one stops,
   too: else it would go on alone for hours before it reports the failure.

It knows nothing about what is enough.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from slipstream.base.errors import CapacityError, SlipstreamError
from slipstream.engine.model import CausalModel
from slipstream.engine.runner import ModelRunner
from slipstream.train.dialogue import Plan, Prompt, TurnTemplate, make_plan
from slipstream.train.forks import fork
from slipstream.train.generate import Generator, max_slots
from slipstream.train.recipe import Recipe
from slipstream.train.shards import Shards, ShardWriter

SHARD_TOKENS = 16384
SLOTS_PER_CONVERSATION = 512
POLL_EVERY_S = 1.0  # how often the first process, waiting for the others, checks whether there is enough


@dataclass(frozen=True, slots=True)
class Task:
    """The arguments that all processes share."""

    model: CausalModel
    template: TurnTemplate
    prompts: Sequence[Prompt] | None
    folder: Path
    identity: Mapping[str, Any]
    recipe: Recipe

    def plans(self, rank: int) -> Iterator[Plan]:
        """The plans of process ``rank``, without those whose conversations are in the folder."""
        done = Shards([self.folder], self.identity).numbers()
        for index in count(rank, self.recipe.processes):
            plan = make_plan(index, self.recipe.seed, self.prompts, self.template.no_chat_template)
            if plan is None:
                return
            if plan.number not in done:
                yield plan


def generate_shards(task: Task, rank: int, enough: Callable[[int, int], bool]) -> None:
    """Make the conversations of process ``rank`` until there are no more plans, or ``enough`` returns True. It is
    called after each step with two numbers of tokens: finished but not written yet, and of running conversations, which
    are kept as they are at the end."""
    recipe = task.recipe
    max_conversation = min(task.model.config.max_context, max_slots(task.template, recipe.limits, task.prompts))
    runner = ModelRunner(task.model, recipe.conversations_at_once * SLOTS_PER_CONVERSATION + max_conversation)
    runner.set_taps(tuple(task.identity["taps"]))
    generator = Generator(runner, task.template, task.plans(rank), recipe.conversations_at_once, recipe.limits,
                          recipe.seed + rank)
    writer = ShardWriter(task.folder, task.identity, ascii_lowercase[rank] if rank else "",
                         task.prompts is not None)
    began, is_enough = time.monotonic(), False
    while not is_enough and generator.has_work:
        for conversation in generator.step():
            writer.add(conversation)
        is_enough = enough(writer.num_pending, generator.num_active_tokens)
        elapsed = time.monotonic() - began
        if writer.num_pending >= SHARD_TOKENS or (writer.num_pending and elapsed >= recipe.save_every_s):
            writer.flush(elapsed / recipe.processes)
            began = time.monotonic()
    for conversation in generator.stop():
        writer.add(conversation)
    writer.flush((time.monotonic() - began) / recipe.processes)


class OtherProcesses:
    """The processes beside the first one."""

    def __init__(self, task: Task) -> None:
        self._pipes = list[Connection]()
        self._processes = [fork(partial(_generate_beside, task, rank), self._pipes)
                           for rank in range(1, task.recipe.processes)]

    @property
    def failed(self) -> bool:
        """Whether one of them has ended with an error."""
        return any(process.exitcode for process in self._processes)

    def stop(self) -> None:
        """Make the others write what they have and end."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []

    def join(self, enough: Callable[[], bool]) -> None:
        """Wait until all have ended: they are stopped when ``enough`` returns True or one of them fails. Raises
        CapacityError if one has failed."""
        while running := [process.sentinel for process in self._processes if process.is_alive()]:
            if self._pipes and (self.failed or enough()):
                self.stop()
            wait(running, POLL_EVERY_S)
        if self.failed:
            raise CapacityError("a process that talks has ended, for want of memory perhaps, if it did not say why; "
                                "what it finished is kept: go on with the same command and fewer --threads")


def _generate_beside(task: Task, rank: int, pipe: Connection) -> None:
    try:
        generate_shards(task, rank, lambda pending, running: pipe.poll())
    except SlipstreamError as error:
        sys.exit(str(error))
