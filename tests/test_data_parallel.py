"""Processes that compute a training step together give the step of one."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import cast

import pytest
from click import Group
from typer.main import get_command

from slipstream.cli.commands import app
from slipstream.train.data_parallel import StepResult, merge_results, split_evenly

# In a process of its own: a group forks, which only works before the first backward pass of a process.
SCRIPT = """
import torch
from slipstream.train.data_parallel import StepResult, WorkerGroup

torch.set_num_threads(1)
rows = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
weights = {"a": torch.ones(5, dtype=torch.float64, requires_grad=True),
           "b": torch.zeros(1, dtype=torch.float64, requires_grad=True)}

def compute(batch):
    for weight in weights.values():
        weight.grad = None
    if not batch:
        return StepResult(0, 0, 0.0, ())
    loss = ((rows[batch] @ weights["a"] + weights["b"]) ** 2).mean()
    loss.backward()
    return StepResult(len(batch), len(batch), float(loss.detach()), (0.5,))

group = WorkerGroup(weights, compute, SIZE)
for batch in ([0, 1, 2, 3, 4, 5, 6], [7], [8, 2]):
    part = group.run(batch, [1] * len(batch))
    print(part.rows, part.weight, f"{part.loss:.12f}", *(f"{g:.12f}" for w in weights.values() for g in w.grad))
    with torch.no_grad():
        for weight in weights.values():
            weight.sub_(0.1 * weight.grad)
"""


def test_a_group_steps_as_one_process_does() -> None:
    alone, three = (subprocess.run([sys.executable, "-c", SCRIPT.replace("SIZE", size)], capture_output=True, text=True,
                                   check=True, timeout=300).stdout.split() for size in "13")
    assert len(alone) == 27
    assert [float(word) for word in three] == pytest.approx([float(word) for word in alone], abs=1e-11)


# A process that is gone between two steps, and one that goes in the middle of one.
LOST = """
import multiprocessing
import os
import signal
import sys
import torch
from slipstream.train.data_parallel import StepResult, WorkerGroup

main = os.getpid()

def compute(batch):
    if os.getpid() != main and sys.argv[1] == "within" and batch == [9]:
        os.kill(os.getpid(), signal.SIGKILL)
    return StepResult(len(batch), 0, 0.0, ())

group = WorkerGroup({"a": torch.ones(1, requires_grad=True)}, compute, 2)
group.run([0, 1], [1, 1])
if sys.argv[1] == "between":
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()
try:
    group.run([8, 9], [2, 1])
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("when", ["between", "within"])
def test_a_process_that_is_lost_is_told_with_an_option_that_there_is(when: str) -> None:
    told = subprocess.run([sys.executable, "-c", LOST, when], capture_output=True, text=True, check=True, timeout=300)
    assert told.stdout.startswith("CapacityError a process that trains has ended"), told
    there = {name for option in cast(Group, get_command(app)).commands["train-head"].params for name in option.opts}
    named = set(re.findall(r"--[a-z-]+", told.stdout))
    assert named and named <= there


def test_items_are_divided_by_size() -> None:
    assert split_evenly([10, 11, 12, 13], [5, 1, 2, 3], 2) == [[10, 11], [13, 12]]
    assert split_evenly([10], [5], 3) == [[10], [], []]


def test_parts_weigh_their_rows() -> None:
    merged = merge_results([StepResult(4, 3, 1.0, (0.5, 0.0)), StepResult(2, 1, 3.0, (0.1, 0.4)),
                            StepResult(1, 0, 0.0, ())])
    assert (merged.rows, merged.weight, merged.loss) == (7, 4, 1.5)
    assert merged.agreement == pytest.approx((0.4, 0.1))
