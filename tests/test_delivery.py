"""An answer as its reader has it: when it begins, and how its pieces come from the engine's thread."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
import uvloop

from slipstream.protocol.requests import Piece, Request, Sampling
from target_service.loop import TargetWorker
from target_service.sequence import Sink
from target_service.service import Pieces, TargetAnswer, deliver_on_loop
from tests.loop import eventually


class Posted:
    """What a worker is asked, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def add_request(self, number: int, request: Request, sink: Sink, rule: object) -> None:
        self.log.append("ask")

    def set_speculation(self, number: int, allowed: bool) -> None:
        self.log.append(f"switch {allowed}")

    def cancel(self, number: int) -> None:
        self.log.append("cancel")


async def test_an_answer_that_waits_for_its_grammar_begins_as_it_was_switched() -> None:
    cases: list[tuple[bool, list[bool], list[str]]] = [
        (True, [], []), (True, [False], ["switch False"]), (True, [False, True], []), (False, [True], ["switch True"])]
    for speculate, switched, behind in cases:
        posted, compiled = Posted(), asyncio.get_running_loop().create_future()
        request = Request("one", (1,), Sampling(), 3, speculate=speculate)
        answer = TargetAnswer(cast(TargetWorker, posted), 1, request, compiled)
        for allowed in switched:
            answer.set_speculation(allowed)
        assert not posted.log
        compiled.set_result(None)
        await asyncio.sleep(0)
        answer.set_speculation(True)
        assert posted.log == ["ask", *behind, "switch True"]
        await answer.aclose()
    left = asyncio.get_running_loop().create_future()
    await TargetAnswer(cast(TargetWorker, Posted()), 1, Request("one", (1,), Sampling(), 3), left).aclose()
    assert left.cancelled(), "nobody compiles a grammar for who is gone"


@pytest.mark.parametrize("factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_pieces_of_another_thread_come_in_order(factory: Callable[[], asyncio.AbstractEventLoop] | None) -> None:
    taken, failed = list[Piece | Exception](), list[type]()
    lists: list[Pieces] = [[(taken.append, Piece((n,))), (taken.append, Piece((n + 1,)))] for n in range(0, 1000, 2)]

    def failing(_: Piece | Exception) -> None:
        raise ValueError("a reader is broken")

    async def read() -> Callable[[Pieces], None]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failed.append(type(context["exception"])))
        delivery = partial(deliver_on_loop, loop)
        delivery([(failing, Piece((9,)))])
        sending = threading.Thread(target=lambda: deque(map(delivery, lists)))
        sending.start()
        await eventually(lambda: len(taken) == 1000)
        await asyncio.to_thread(sending.join)
        return delivery

    with asyncio.Runner(loop_factory=factory) as runner:
        delivery = runner.run(read())
    assert failed == [ValueError]
    delivery([(taken.append, Piece((1,)))])  # the loop is closed
    assert [piece.tokens[0] for piece in taken if isinstance(piece, Piece)] == list(range(1000))
