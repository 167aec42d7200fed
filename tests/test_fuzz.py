"""Everything that takes bytes from outside lets them in whole or refuses them by a typed error (``make fuzz``)."""

from __future__ import annotations

from random import Random

import pytest

from tests_fuzz import kept
from tests_fuzz.doors import DOORS

# Inputs of those that take milliseconds.
SLOW = {"model-folder": 20, "template": 3, "grammar": 10, "http-answer": 50, "http-messages": 50,
        "http-responses": 50, "http-counting": 50, "event-ids": 50, "grpc-answer": 50}


def mutated(random: Random, data: bytes) -> bytes:
    """``data`` with a few bytes turned, cut out, or put in twice."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        place, length = random.randrange(len(changed) + 1), random.randint(1, 9)
        match random.randrange(3):
            case 0:
                changed[place:place + 1] = random.randbytes(1)
            case 1:
                del changed[place:place + length]
            case _:
                changed[place:place] = changed[place:place + length]
    return bytes(changed)


@pytest.mark.parametrize("name", DOORS)
def test_a_door_lets_in_what_is_good_and_refuses_all_else_by_name(name: str) -> None:
    door, random = DOORS[name], Random(name)
    seeds = list(door.seeds())
    assert any(door.knock(data) for data in seeds), "no seed is good"
    known = [*seeds, *kept.read(name)]
    assert len(known) > len(seeds), "no corpus is kept"
    for data in known:
        door.knock(data)
    for _ in range(SLOW.get(name, 1000)):
        door.knock(mutated(random, random.choice(known)))
