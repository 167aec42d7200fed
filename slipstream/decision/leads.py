"""Leads: which sessions of a target are drafted for ahead of its commits, chosen by what that gave so far.

Growing ahead hides exchanges; it also costs both ends host work, and the draft time that others may wait for. Which
weighs more depends on load, network, drafter and machines, so it is measured and not guessed.

Rules:
1. None lead (serial rounds), a few, or all. Who leads goes on leading while as many may.
2. What counts is goodput: tokens by seconds from commit to commit, over the rounds of *all* drafted sessions, so that
   what a lead costs the others counts too.
3. Rounds are counted in blocks. The first rounds after a change are in none: trees and waits are still those of before.
4. Now and then one block is played another way. It is compared with the blocks before and after it, as text, load and
   machine drift. A way that looks better is tried again at once; each try after which it looks no better doubles the
   rest until its next, up to ``REST_MOST`` blocks. One that is far worse ends early.
5. The way changes when another is better beyond doubt: after ``TRIES``, by ``SURE`` standard errors of what they show.
6. Each load (number of sessions, in powers of two) is learned for itself. What was learned is forgotten when the
   goodput of the way in use drifts: the world is another one.

It knows no clock, no link and no drafter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NONE, FEW, ALL = 0, 4, 1 << 30  # the ways: sessions that lead
CROWD = 4 * FEW  # sessions above which a load begins with none: others' steps hide an exchange, and four gain little
BLOCK, EACH = 64, 16  # rounds, or so many of each session where that is more
SETTLING = 8  # rounds of each session that follow a change and are not counted: policies learn its exchanges anew
SCATTER = 0.5  # of a round's tokens, by their mean
SURE, TRIES = 2.0, 2.8  # an older try counts for less than one
HOPELESS = 3.0  # standard errors
REST, REST_MOST = 8, 128  # blocks between two tries of the same way
KEEP = 0.97  # of what is known of a way, for each try more
USUAL, RECENT = 0.02, 0.2  # weight of a new block
DRIFT = 0.2  # of the recent goodput against the usual one
ODD = 8.0  # times the usual: a round that took longer counts as so long


@dataclass(frozen=True, slots=True)
class Change:
    """Another number of sessions leads from now on."""

    before: int
    after: int
    sessions: int  # that were drafted for
    gain: float  # goodput by that of before


@dataclass(slots=True)
class Block:
    """Rounds in a row."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def goodput(self) -> float:
        """As a logarithm."""
        return math.log(self.tokens / self.seconds)


@dataclass(slots=True)
class Way:
    """So many sessions lead: what tries of it gave against the way in use, and when the next one comes."""

    most: int
    tries: float = 0.0
    total: float = 0.0  # of logarithms of goodput by that of the way in use
    squares: float = 0.0
    rest: int = REST
    left: int = REST

    def compare(self, gain: float) -> None:
        """A try more; ``gain`` is a logarithm."""
        self.tries = self.tries * KEEP + 1
        self.total = self.total * KEEP + gain
        self.squares = self.squares * KEEP + gain * gain

    @property
    def gain(self) -> float:
        return self.total / self.tries if self.tries else 0.0

    def doubt(self, rounds: int) -> float:
        """One standard error of ``gain``: what blocks of ``rounds`` must scatter by chance, and what these did."""
        chance = SCATTER**2 * 1.5 / rounds
        found = max(0.0, self.squares - self.gain * self.total)
        return math.sqrt((2 * chance + found) / (2 + self.tries) / max(1.0, self.tries))

    def wait(self, rounds: int) -> None:
        """Set when it is tried again."""
        if self.gain <= 0:
            self.rest = min(REST_MOST, 2 * self.rest)
        self.left = 1 if self.gain > self.doubt(rounds) else self.rest

    def forget(self, rest: int = REST) -> None:
        self.tries = self.total = self.squares = 0.0
        self.rest = self.left = rest


class Choice:
    """Of one load."""

    __slots__ = ("_before", "_block", "_recent", "_try", "_usual", "played", "used", "ways")

    def __init__(self, sessions: int) -> None:
        counts = (FEW, NONE) if sessions <= FEW else (FEW, NONE, ALL) if sessions <= CROWD else (NONE, FEW, ALL)
        self.ways = [Way(count) for count in counts]
        self.used = self.played = self.ways[0]
        self._block = Block()
        self._before = 0.0  # goodput of the latest block of the way in use
        self._try: tuple[Way, float] | None = None  # and what it gave, until the block after it is over
        self._usual = self._recent = math.nan  # goodput of the way in use

    def add(self, tokens: int, seconds: float, sessions: int) -> Change | None:
        """A round more. When it is the last of its block, another way may be played from now on."""
        block = self._block
        if block.rounds:
            seconds = min(seconds, ODD * block.seconds / block.rounds)
        block.rounds, block.tokens, block.seconds = block.rounds + 1, block.tokens + tokens, block.seconds + seconds
        if block.rounds < max(BLOCK, EACH * sessions) and not self._hopeless(block, sessions):
            return None
        self._block = Block()
        if self.played is not self.used:
            self._try, self.played = (self.played, block.goodput), self.used
            return None
        change = self._judge(block, sessions)
        if change is None:
            self._look_for_drift(block.goodput)
            self._next()
        return change

    def _hopeless(self, block: Block, sessions: int) -> bool:
        # A quarter of a try is enough where it shows that the other way is out of the question.
        if self.played is self.used or block.rounds < max(BLOCK, EACH * sessions) // 4:
            return False
        return self._before - block.goodput > HOPELESS * SCATTER / math.sqrt(block.rounds)

    def _judge(self, block: Block, sessions: int) -> Change | None:
        before, self._before = self._before, block.goodput
        if self._try is None:
            return None
        (tried, goodput), self._try = self._try, None
        tried.compare(goodput - (before + block.goodput) / 2)
        if tried.tries < TRIES or tried.gain <= SURE * tried.doubt(block.rounds):
            tried.wait(block.rounds)
            return None
        used, gain = self.used, tried.gain
        # What is known of the two is known the other way round as well.
        used.tries, used.total, used.squares = tried.tries, -tried.total, tried.squares
        for way in self.ways:
            if way is not used:
                way.forget()
        used.rest = used.left = 4 * REST
        self.used = self.played = tried
        self._usual = self._recent = math.nan
        return Change(used.most, tried.most, sessions, math.exp(gain))

    def _look_for_drift(self, goodput: float) -> None:
        if math.isnan(self._usual):
            self._usual = self._recent = goodput
        self._usual += USUAL * (goodput - self._usual)
        self._recent += RECENT * (goodput - self._recent)
        if abs(self._recent - self._usual) > DRIFT:
            self._usual = self._recent
            for way in self.ways:
                way.forget()

    def _next(self) -> None:
        others = [way for way in self.ways if way is not self.used]
        for way in others:
            way.left -= 1
        self.played = next((way for way in others if way.left <= 0), self.used)


class Leads:
    """The choice of one target, over all its drafts. See the module."""

    __slots__ = ("_choices", "_leading", "_load", "_sessions", "_settling")

    def __init__(self) -> None:
        self._sessions: set[int] = set()  # that are drafted for
        self._leading: set[int] = set()
        self._load = 1  # of the latest round
        self._choices = {1: Choice(1)}  # by load
        self._settling = 0  # rounds that are still to be left out

    @property
    def most(self) -> int:
        """Sessions that may lead now."""
        return self._choices[self._load].played.most

    def grant(self, session: int) -> bool:
        """``session`` asks for drafts: whether it leads until it asks again."""
        self._sessions.add(session)
        if session in self._leading and len(self._leading) > self.most:
            self._leading.remove(session)
        elif len(self._leading) < self.most:
            self._leading.add(session)
        return session in self._leading

    def end(self, session: int) -> None:
        """``session`` asks for no drafts, or is over."""
        self._sessions.discard(session)
        self._leading.discard(session)

    def observe(self, tokens: int, seconds: float) -> Change | None:
        """A round of a session that was drafted for made ``tokens``, ``seconds`` after its commit before."""
        sessions = len(self._sessions)
        load = sessions.bit_length()
        if load != self._load:
            self._load, self._settling = load, SETTLING * sessions
            self._choices.setdefault(load, Choice(sessions))
        if self._settling or seconds <= 0:
            self._settling = max(0, self._settling - 1)
            return None
        choice = self._choices[load]
        before = choice.played
        change = choice.add(tokens, seconds, sessions)
        if choice.played is not before:
            self._settling = SETTLING * sessions
        return change
