"""A few histories of ``make test-chaos``, and one in which every target gets other weights under load."""

from __future__ import annotations

from tests_chaos.fleet import NEW, running
from tests_chaos.history import Ask, Fault, History, drawn, streams
from tests_chaos.storm import befall
from tests_chaos.test_chaos import calm, suffered


async def test_random_faults_under_random_traffic() -> None:
    seen = await suffered(first=1, count=5, told=lambda _: None)
    assert seen["whole"] > 5, seen


async def test_other_weights_under_load_and_every_answer_is_wholly_of_one_model() -> None:
    """One target after the other, as a rollout does; in the end all answers are of the new weights."""
    asks = tuple(Ask(number, 0.02 * number, number % 2, ("http", "grpc")[number // 2 % 2], streams()[number % 8], 120,
                     number % 3 > 0, 0) for number in range(12))
    async with running() as fleet:
        for number in range(3):
            rollout = Fault(0.3, "rollout", (f"target-{number}", ""), 0.05, 0)
            outcome = await befall(fleet, History(number, asks, (rollout,)))
            assert not outcome.wrong, outcome.wrong
            await calm(fleet)
        last = await befall(fleet, History(3, asks, ()))
    assert {target.timing for target in fleet.targets} == {NEW}
    assert all(answer.finish for answer in last.answers) and not last.wrong, last


def test_a_history_follows_from_its_seed() -> None:
    assert drawn(5) == drawn(5) != drawn(6)
