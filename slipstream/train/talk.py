"""Talking: the target makes conversations, and they become shards. Several processes can do it side by side.

Rules:
1. The process with ``rank`` makes the plans whose place leaves ``rank`` when divided by how many there are: they need
   not agree on anything, and an interrupted run goes on with any number of them.
2. Each process writes shards of its own. A shard's seconds are its share of what all of them spent, so that the sum
   over a folder is the time that a clock showed.
3. The first process decides when there is enough, also after its own plans are used up. The others check after every
   step and end with it, however it ends. If one of them fails, the first ends too; alone it would run for hours before
   the error showed.

On a CPU this scales where threads inside an operation do not. It knows nothing about what is enough.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch

from slipstream.base.errors import CapacityError, SlipstreamError
from slipstream.engine.model import CausalModel
from slipstream.engine.runner import ModelRunner
from slipstream.train.dialogue import Plan, Prompt, Turns, plan_of
from slipstream.train.generate import Generator, slots_at_most
from slipstream.train.recipe import Recipe
from slipstream.train.shards import Shards, ShardWriter

SHARD_TOKENS = 16384
SLOTS_PER_TALK = 512
LOOK_EVERY_S = 1.0  # for what others made meanwhile


@dataclass(frozen=True, slots=True)
class Task:
    """What is common to all processes."""

    model: CausalModel
    turns: Turns
    prompts: Sequence[Prompt] | None
    folder: Path
    identity: Mapping[str, Any]
    recipe: Recipe

    def plans(self, rank: int) -> Iterator[Plan]:
        """Of process ``rank``, those that are made already left out."""
        made = Shards([self.folder], self.identity).numbers()
        for place in count(rank, self.recipe.processes):
            plan = plan_of(place, self.recipe.seed, self.prompts, self.turns.plain)
            if plan is None:
                return
            if plan.number not in made:
                yield plan


def talk(task: Task, rank: int, enough: Callable[[int, int], bool]) -> None:
    """Make the conversations of process ``rank`` until there are no more plans, or ``enough`` says so after a step: it
    gets the tokens of the shard in the making, and of what is unfinished. That is kept then."""
    recipe = task.recipe
    longest = min(task.model.config.max_context, slots_at_most(task.turns, recipe.limits, task.prompts))
    runner = ModelRunner(task.model, recipe.conversations_at_once * SLOTS_PER_TALK + longest)
    runner.set_taps(tuple(task.identity["layers"]))
    generator = Generator(runner, task.turns, task.plans(rank), recipe.conversations_at_once, recipe.limits,
                          recipe.seed + rank)
    writer = ShardWriter(task.folder, task.identity, ascii_lowercase[rank] if rank else "",
                         task.prompts is not None)
    began, over = time.monotonic(), False
    while not over and generator.running:
        for conversation in generator.step():
            writer.add(conversation)
        over = enough(writer.num_waiting, generator.num_running)
        spent = time.monotonic() - began
        if writer.num_waiting >= SHARD_TOKENS or (writer.num_waiting and spent >= recipe.save_every_s):
            writer.flush(spent / recipe.processes)
            began = time.monotonic()
    for conversation in generator.stop():
        writer.add(conversation)
    writer.flush((time.monotonic() - began) / recipe.processes)


class Others:
    """The processes beside the first one."""

    def __init__(self, task: Task) -> None:
        context = multiprocessing.get_context("fork")
        self._processes, self._pipes = [], list[Connection]()
        for rank in range(1, task.recipe.processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_follow, args=(task, rank, theirs, [*self._pipes, ours]), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def failed(self) -> bool:
        """Whether one of them has, so far."""
        return any(process.exitcode for process in self._processes)

    def stop(self) -> None:
        """The others keep what they have and end."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []

    def join(self, enough: Callable[[], bool]) -> None:
        """Wait until they have ended: by themselves, or as ``enough`` says so or one of them failed. Raises
        CapacityError in the last case."""
        while running := [process.sentinel for process in self._processes if process.is_alive()]:
            if self._pipes and (self.failed or enough()):
                self.stop()
            wait(running, LOOK_EVERY_S)
        if self.failed:
            raise CapacityError("a process that talks has ended, for want of memory perhaps, if it did not say why; "
                                "what it finished is kept: go on with the same command and fewer --threads")


def _follow(task: Task, rank: int, pipe: Connection, inherited: Sequence[Connection]) -> None:
    for end in inherited:  # while anybody holds them, the end of the first process would not be seen
        end.close()
    torch.set_num_threads(1)
    try:
        talk(task, rank, lambda waiting, running: pipe.poll())
    except KeyboardInterrupt:
        return  # the first process is interrupted too, and says so
    except SlipstreamError as error:
        sys.exit(str(error))
