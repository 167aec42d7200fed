"""An engine, its drafts and the time between them, without clocks: time passes when somebody computes or waits.

The chains are the real ones. Drafts are links that answer by a rule after a time. Each look at the clock takes a
moment, so that what never ends is seen not to end.
"""

from __future__ import annotations

import heapq
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from slipstream_vllm.options import Options

from slipstream.following.chains import Chains, Row
from slipstream.following.following import Inbox
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import PROTOCOL_VERSION, Close, Commit, DraftBound, DraftHello, Growth, Open
from tests.test_following import PROMPT, chosen

MOMENT_S = 1e-5  # of each look at the clock
EVENT_S = 2e-4  # of each thing that drafts told
MOST = 4
Event = Callable[[], None]


def lucky(text: Sequence[int], chance: float, salt: int = 0) -> bool:
    """Drawn by the text: by its first token, which no two answers side by side share, and by its length."""
    drawn = blake2b(bytes((salt, text[0], len(text) & 255, len(text) >> 8)), digest_size=4).digest()
    return int.from_bytes(drawn) < chance * (1 << 32)


def right(chance: float) -> Callable[[Sequence[int]], int]:
    """What a draft says whose tokens are right so often."""
    return lambda text: chosen(text) if lucky(text, chance) else (chosen(text) + 1) % 256


class World:
    """The clock of all. It is a queue too, in which whoever waits lets the time pass."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._due: list[tuple[float, int, Event]] = []
        self._numbers = 0
        self._posted: list[Event | None] = []
        self.flood: Event | None = None  # it comes again and again

    def clock(self) -> float:
        self.now_s += MOMENT_S
        return self.now_s

    def at(self, at_s: float, event: Event) -> None:
        self._numbers += 1
        heapq.heappush(self._due, (at_s, self._numbers, event))

    def passes(self, seconds: float) -> None:
        """Somebody computes."""
        until_s = self.now_s + seconds
        while self._due and self._due[0][0] <= until_s:
            at_s, _, event = heapq.heappop(self._due)
            self.now_s = max(self.now_s, at_s)
            event()
        self.now_s = max(self.now_s, until_s)

    def put(self, item: Event | None, /) -> None:
        self._posted.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Event | None:
        self.passes(0.0)
        if not self._posted and self.flood is not None:
            self.flood()
        until_s = self.now_s + (timeout or 0.0)
        while block and not self._posted and self.now_s < until_s:
            self.passes(min(until_s, self._due[0][0] if self._due else until_s) - self.now_s)
        if not self._posted:
            raise queue.Empty
        self.now_s += EVENT_S
        return self._posted.pop(0)

    def qsize(self) -> int:
        return len(self._posted)


@dataclass(eq=False)
class Draft:
    """Answers after ``delay_s`` with what ``says`` makes of a text, while it ``lives``."""

    address: str
    world: World
    chains: Chains
    delay_s: float = 0.002
    says: Callable[[Sequence[int]], int] = chosen
    matches: float = 1.0  # share of texts for which it has something to say
    lives: bool = True
    texts: dict[int, list[int]] = field(default_factory=dict)
    _ids: int = 0

    def up(self) -> None:
        self.texts.clear()
        self.lives = True
        hello = DraftHello(PROTOCOL_VERSION, 0, self.address, 260, "", None, 0, 4096, 16, 64)
        self.chains.following.link_up(self, hello)

    def down(self) -> None:
        self.lives = False
        self.chains.following.link_down(self, "unavailable")

    def send(self, items: Sequence[DraftBound]) -> None:
        for item in items if self.lives else ():
            if isinstance(item, Close):
                self.texts.pop(item.session, None)
            elif isinstance(item, Open):
                self._hears(item.session, list(map(int, item.tokens)), item.wanted)
            elif isinstance(item, Commit):
                self._hears(item.session, [*self.texts[item.session], *map(int, item.tokens)], item.wanted)

    def _hears(self, session: int, text: list[int], wanted: int) -> None:
        self.texts[session] = text
        if wanted:
            growth = self.growth(session, text, min(wanted, MOST))
            self.world.at(self.world.now_s + self.delay_s, lambda: self._answers(growth))

    def _answers(self, growth: Growth) -> None:
        if self.lives:
            self.chains.following.received(self, [growth], [])

    def growth(self, session: int, text: list[int], count: int) -> Growth:
        if not lucky(text, self.matches, salt=1):
            return Growth.empty(session, len(text))
        tokens = list[int]()
        for _ in range(count):
            tokens.append(self.says([*text, *tokens]))
        ids = np.arange(self._ids + 1, self._ids + 1 + count, dtype=np.int32)
        self._ids += count
        return Growth(session, len(text), ids, np.array([-len(text), *ids[:-1]], np.int32),
                      np.array(tokens, np.int32), -0.1 * np.arange(1, count + 1, dtype=np.float32))


class Engine:
    """Requests side by side, each answered ``length`` tokens long and followed by the next. A step takes ``step_s``,
    and ``row_s`` more for each of its rows."""

    def __init__(self, world: World, requests: int = 1, step_s: float = 0.02, row_s: float = 0.0002,
                 length: int = 300, deadline_s: float = 0.05, always: bool = False) -> None:
        self.world, self.length = world, length
        self._step_s, self._row_s = step_s, row_s
        options = Options(("a:1",), deadline_s=deadline_s, prompt_lookup=False, always=always)
        self.metrics = TargetMetrics("function")
        self.chains = Chains(options.section(MOST), self.metrics, world.clock, inbox=Inbox(world.clock, world))
        self.says: dict[str, Callable[[Sequence[int]], int]] = {}  # of each place, where it is not ``chosen``
        self.able: set[str] = set()  # places that may be drafted for; none: all
        self._answers = 0
        self.texts = {f"{place}.0": self._prompt() for place in range(requests)}
        self._chains: dict[str, list[int]] = {}
        self.longest_s = 0.0  # proposal
        self.accepted = self.steps = 0
        self.drafted: Counter[str] = Counter()  # by place

    def draft(self, address: str = "a:1", **given: float | Callable[[Sequence[int]], int]) -> Draft:
        one = Draft(address, self.world, self.chains, **given)  # type: ignore[arg-type]
        one.up()
        return one

    def runs(self, seconds: float) -> int:
        """For so long. Returns how many draft tokens were accepted."""
        until_s, before = self.world.now_s + seconds, self.accepted
        while self.world.now_s < until_s:
            self.step()
        return self.accepted - before

    def tokens_per_s(self, seconds: float) -> float:
        """Of all, over so long."""
        steps, began_s, accepted = self.steps, self.world.now_s, self.runs(seconds)
        return (accepted + len(self.texts) * (self.steps - steps)) / (self.world.now_s - began_s)

    def rests(self, seconds: float) -> None:
        """All requests end, and others come after a while."""
        ended = list(self.texts)
        self._next(ended)
        self.chains.close_finished(ended)
        self.world.passes(seconds)

    def _next(self, ended: Sequence[str]) -> None:
        for name in ended:
            place, number = name.split(".")
            del self.texts[name]
            self.texts[f"{place}.{int(number) + 1}"] = self._prompt()

    def _prompt(self) -> list[int]:
        self._answers += 1
        return [self._answers % 251, *PROMPT[1:]]

    def step(self) -> None:
        finished = [name for name, text in self.texts.items() if len(text) >= len(PROMPT) + self.length]
        self._next(finished)
        rows = [self._row(name, text, self._chains.get(name, [])) for name, text in self.texts.items()]
        scheduled = sum(1 + row.drafted for row in rows)
        self.world.passes(self._step_s + self._row_s * scheduled)
        self.steps += 1
        began_s = self.world.now_s
        chains = self.chains.step(rows, finished, scheduled)
        self.longest_s = max(self.longest_s, self.world.now_s - began_s)
        self._chains = dict(zip(self.texts, chains, strict=True))

    def _row(self, name: str, text: list[int], chain: list[int]) -> Row:
        place = name.split(".")[0]
        new, says = list[int](), self.says.get(place, chosen)
        for token in chain:
            if says([*text, *new]) != token:
                break
            new.append(token)
        new.append(says([*text, *new]))
        text += new
        self.drafted[place] += len(chain)
        self.accepted += len(new) - 1
        return Row(name, len(text), tuple(new), len(chain), len(PROMPT), len(PROMPT) + self.length + MOST + 1,
                   lambda: list(text), not self.able or place in self.able)

    def right(self) -> bool:
        """Whether all answers are what they are without drafts."""
        return all(text[at] == self.says.get(name.split(".")[0], chosen)(text[:at])
                   for name, text in self.texts.items() for at in range(len(PROMPT), len(text)))
