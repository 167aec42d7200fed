"""Drafters that read different feature rows of one target: the rows that most of them read are kept, others stand aside
and say so, and whoever came first has no say."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slipstream.following.following import Following
from slipstream.protocol.messages import (
    Close,
    DraftBound,
    FeatureSpec,
    Open,
    Projection,
)
from slipstream.protocol.requests import DraftStatus, Sampling
from tests.test_following import PROMPT, SILENT, following

ODD, USUAL = FeatureSpec((0,), 2), FeatureSpec((1, 2), 4)


@dataclass(eq=False)
class Heard:
    address: str
    items: list[DraftBound] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def send(self, items: Sequence[DraftBound]) -> None:
        self.items += items

    def refuse(self, field: str) -> None:
        self.refused.append(field)


class Engine:
    """Gives any rows but those of layer 9."""

    def __init__(self) -> None:
        self.asked: list[FeatureSpec] = []
        self.target: Following = following(self.gives)

    def gives(self, spec: FeatureSpec) -> bool:
        self.asked.append(spec)
        return 9 not in spec.layers

    def join(self, address: str, spec: FeatureSpec | None) -> Heard:
        link = Heard(address)
        self.target.link_up(link, replace(SILENT, features=spec))
        self.target.inbox.drain()
        return link

    def leave(self, link: Heard) -> None:
        self.target.link_down(link, "closed")
        self.target.inbox.drain()

    def problem(self, link: Heard) -> str:
        return self.target.pool.with_problem(DraftStatus(link.address, True, "head")).problem


def test_two_drafts_of_one_kind_replace_one_that_came_first() -> None:
    engine = Engine()
    odd = engine.join("odd", ODD)
    one = engine.target.open(1, PROMPT, len(PROMPT), Sampling(), 100)
    engine.target.begin([one], 0.0)
    first = engine.join("a", USUAL)
    assert one.link is odd and engine.problem(first) == "features: it reads layers (1, 2), and more drafts read (0,)"
    second = engine.join("b", USUAL)
    assert one.link is None and engine.asked == [ODD, USUAL]
    assert engine.problem(odd) == "features: it reads layers (0,), and more drafts read (1, 2)"
    assert not engine.problem(first) and not engine.problem(second)
    others = [engine.target.open(number, PROMPT, len(PROMPT), Sampling(), 100) for number in range(2, 10)]
    engine.target.begin(others, 0.0)
    assert {other.link for other in others} <= {first, second}
    engine.target.flush()
    assert [type(item) for item in odd.items] == [Open, Close], "it hears that its session is over"


def test_one_that_reads_the_same_in_another_dtype_says_so() -> None:
    """As in a rollout of another ``draft.dtype``: it has no projection, and was told of another one."""
    engine = Engine()
    engine.join("a", USUAL)
    other = engine.join("b", replace(USUAL, dtype="bfloat16"))
    assert engine.problem(other) == "features: it reads rows in bfloat16, and more drafts read them in float32"


def test_drafts_that_read_no_rows_have_no_vote_and_stay() -> None:
    engine = Engine()
    plain = [engine.join(name, None) for name in ("x", "y", "z")]
    engine.join("a", USUAL)
    assert engine.asked == [USUAL] and all(engine.target.pool.is_usable(link) for link in plain)


def test_whoever_stood_aside_takes_over_when_the_others_go() -> None:
    """As in a rollout of another head."""
    engine = Engine()
    new = engine.join("c", ODD)
    old = [engine.join(name, USUAL) for name in ("a", "b")]
    engine.leave(old[0])
    assert not engine.target.pool.is_usable(new), "of two with as many the one in use stays"
    engine.leave(old[1])
    assert engine.target.pool.is_usable(new) and not engine.problem(new) and engine.asked == [ODD, USUAL, ODD]


def test_a_draft_that_goes_may_make_another_stand_aside() -> None:
    """Its sessions were told rows that they do not read."""
    engine = Engine()
    odd = [engine.join(name, ODD) for name in ("x", "y", "z")]
    usual = [engine.join(name, USUAL) for name in ("a", "b")]
    ones = [engine.target.open(number, PROMPT, len(PROMPT), Sampling(), 100) for number in range(24)]
    engine.target.begin(ones, 0.0)
    assert {one.link for one in ones} == {*odd}
    engine.leave(odd[0])
    engine.leave(odd[1])
    assert not any(one.link is odd[2] for one in ones) and engine.target.pool.is_usable(usual[0])


def test_whoever_stood_aside_has_all_of_its_places_again() -> None:
    engine = Engine()
    odd = engine.join("odd", ODD)

    def opened(first: int) -> int:
        ones = [engine.target.open(number, PROMPT, len(PROMPT), Sampling(), 100) for number in range(first, first + 9)]
        engine.target.begin(ones, 0.0)
        return sum(one.link is odd for one in ones)

    assert opened(1) == SILENT.max_sessions
    usual = [engine.join(name, USUAL) for name in ("a", "b")]
    for link in usual:
        engine.leave(link)
    assert opened(11) == SILENT.max_sessions


def test_a_draft_that_leaves_while_it_stands_aside_or_before_gets_no_session_when_it_is_back() -> None:
    engine = Engine()
    odd = engine.join("odd", ODD)
    engine.target.link_leaving(odd, True)
    usual = [engine.join(name, USUAL) for name in ("a", "b")]
    assert not engine.target.pool.is_usable(odd)
    for link in usual:
        engine.leave(link)
    assert engine.target.pool.is_usable(odd) and not engine.target.pool.has_room(0.0), "it leaves all the same"
    engine.target.link_leaving(odd, False)
    engine.target.inbox.drain()
    assert engine.target.pool.has_room(0.0)
    aside = engine.join("aside", USUAL)
    engine.target.link_leaving(aside, True)
    engine.leave(odd)
    assert engine.target.pool.is_usable(aside) and not engine.target.pool.has_room(0.0)
    engine.leave(aside)
    assert engine.join("aside", USUAL) and engine.target.pool.has_room(0.0), "another stream is another draft"


def test_a_head_whose_projection_is_gone_comes_back_with_it() -> None:
    projected = FeatureSpec((0,), 2, projection=Projection(2, 4, "float32", b"digest", b"\0" * 32))
    engine = Engine()
    odd = engine.join("odd", projected)
    usual = [engine.join(name, USUAL) for name in ("a", "b")]
    assert not engine.target.pool.is_usable(odd)
    for link in usual:
        engine.leave(link)
    assert odd.refused and not engine.target.pool.is_usable(odd), "its stream ends, and begins again"
    engine.leave(odd)
    again = engine.join("odd", projected)
    assert engine.target.pool.is_usable(again) and engine.asked == [projected, USUAL, projected]
    assert engine.asked[-1].projection is not None and engine.asked[-1].projection.weights


def test_rows_that_the_engine_has_not_are_refused_by_name() -> None:
    engine = Engine()
    wrong = [engine.join(name, FeatureSpec((9,), 2)) for name in ("x", "y", "z")]
    right = engine.join("a", USUAL)
    assert engine.target.pool.is_usable(right)
    assert {engine.problem(link) for link in wrong} == {
        "features.layers: this engine has no rows of layers (9,), or no memory for them"}
    assert [spec.layers for spec in engine.asked] == [(9,)] * 3 + [USUAL.layers], "once for each"
    engine.leave(wrong[0])
    assert not engine.problem(wrong[0]), "what was found out is about its connection"


def test_of_those_who_stand_aside_with_one_projection_its_weights_are_kept_once() -> None:
    """As in a rollout of another head, where each has brought a hundred megabytes."""
    engine = Engine()
    usual = [engine.join(name, USUAL) for name in ("a", "b", "c")]

    def join(name: str) -> bytes:
        weights = bytes(bytearray(32))
        engine.join(name, FeatureSpec((0,), 2, projection=Projection(2, 4, "float32", b"digest", weights)))
        return weights

    kept, other, alone = join("x"), join("y"), bytes(bytearray(32))
    assert sys.getrefcount(other) == sys.getrefcount(alone) < sys.getrefcount(kept)
    for link in usual:
        engine.leave(link)
    given = engine.asked[-1].projection
    assert given is not None and given.weights == kept
