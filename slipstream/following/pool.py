"""DraftPool: the drafts of one target.

Rules:
1. A head whose shapes fit may have been made for another model: then it is right no more often than by chance
   (``Agreement``). That is reported by a warning once a connection, a gauge, and ``problem`` in its status. A drafter
   without a vocabulary (n-gram) was not trained and is not judged.
2. A drafter that leaves, by its own word or by discovery's, gets no new session.
3. All drafters that read features share one FeatureSpec: the one that most of them read; of two with as many, the one
   in use. The other drafters are not used (their ``problem`` says so) until they are the majority; a spec that the
   engine cannot give is refused by name.
4. A drafter that takes more than SLOW_FACTOR times as long as another gets a new session only where no other has room.
   It loses sessions that stopped drafting because of it, or that had it for FORGET_S. Its measured time is forgotten
   after FORGET_S too, because the cause may be over.
5. Where a drafter had no room after all, as others hold its places, nobody is told of for FULL_S, unless a session of
   ours leaves it: each would send its whole text for nothing.

It knows nothing about what is said to them, what is drafted, how it is verified, or what a session decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from random import Random

from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import DraftHello, FeatureSpec, Link
from slipstream.protocol.requests import DraftStatus

# A head that learned nothing but which tokens are frequent is right in some 5 % of all rounds, one with random weights
# in hardly any; the worst that are published, on the text that they are worst at, in 30 % and more.
SUSPECT_BELOW = 0.10
SUSPECT_ROUNDS = 32  # before any judgement
FORGET_ROUNDS = 1024  # at so many, all counts are halved: a draft model may be exchanged behind its address
ONE_SIDED_95 = 1.645  # standard deviations
SLOW_FACTOR = 2.0
FORGET_S = 10.0
FULL_S = 1.0
LATENCY_WEIGHT = 0.2  # weight of the newest exchange
SetFeatureSpec = Callable[[FeatureSpec], bool]


def no_feature_rows(_: FeatureSpec) -> bool:
    """Of an engine that has no feature rows to give."""
    return False


@dataclass(slots=True)
class Agreement:
    """How often the target accepted one of the tokens that a drafter proposed directly below the root, counted in
    ordinary rounds."""

    rounds: int = 0
    agreed: int = 0

    def add(self, agreed: int, rounds: int = 1) -> None:
        """Rounds in which something was drafted, and in how many of them they agreed."""
        if self.rounds >= FORGET_ROUNDS:
            self.rounds, self.agreed = self.rounds // 2, self.agreed // 2
        self.rounds += rounds
        self.agreed += agreed

    @property
    def at_most(self) -> float:
        """An upper bound of the true share, with 95 % confidence (Wilson's score interval)."""
        if not self.rounds:
            return 1.0
        n, z = self.rounds, ONE_SIDED_95
        share = self.agreed / n
        middle, spread = share + z * z / (2 * n), z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        return (middle + spread) / (1 + z * z / n)

    @property
    def suspect(self) -> bool:
        """Whether chance explains it better than a head that was made for this target."""
        if self.rounds < SUSPECT_ROUNDS or self.agreed >= SUSPECT_BELOW * self.rounds:  # at most is no less than it is
            return False
        return self.at_most < SUSPECT_BELOW

    def problem(self) -> str:
        """Why it is suspect, and what to do, in a sentence."""
        return (f"only {self.agreed} of {self.rounds} first draft tokens were right: the head or draft model was "
                "probably made for another target; check draft.model")


@dataclass(slots=True, eq=False)
class Member:
    """A drafter that is there. ``leaving``: it gets no new session."""

    hello: DraftHello
    sidelined: bool  # it reads other rows than are kept
    leaving: bool = False
    sessions: int = 0
    agreement: Agreement | None = None  # None: it is not judged
    warned: bool = False
    latency_s: float = 0.0  # from a commit to its growth, as a moving mean
    measured_at_s: float = -inf  # when it was last measured
    full_until_s: float = -inf  # as it said itself

    def recent_latency_s(self, now_s: float) -> float:
        """Its latency, if it was measured lately; else 0."""
        return self.latency_s if now_s - self.measured_at_s < FORGET_S else 0.0


class DraftPool:
    """The ready drafts of one target. ``set_feature_spec``: called with the rows that drafters read; whether the
    engine makes them from now on."""

    def __init__(self, metrics: TargetMetrics, set_feature_spec: SetFeatureSpec = no_feature_rows) -> None:
        self._set_feature_spec = set_feature_spec
        self._random = Random()
        self._metrics = metrics
        self._log = logger("target")
        self._members: dict[Link, Member] = {}
        self._best_latency_s = inf  # no drafter is known to take less
        self._spec: FeatureSpec | None = None
        self._problems: dict[str, str] = {}  # by address; read by other threads

    def link_up(self, link: Link, hello: DraftHello) -> None:
        """A drafter is there. Rows that it reads are kept from now on; older tokens have none for it. It may make
        others stand aside (see ``is_usable``)."""
        member = self._members[link] = Member(self._with_known_weights(hello), sidelined=True)
        if hello.features is None:
            self._activate(link, member)
        else:
            self._choose_spec()
        self._update_gauge()

    def _with_known_weights(self, hello: DraftHello) -> DraftHello:
        """The same with the weights of a projection that another drafter has brought: they are kept once."""
        spec = hello.features
        complete = (member.hello for member in self._members.values()
                    if member.hello.features == spec and _has_weights(member.hello))
        return replace(hello, features=next(complete, hello).features)

    def is_usable(self, link: Link) -> bool:
        """Whether sessions may have it: it is there, and does not stand aside."""
        return self._usable_member(link) is not None

    def _usable_member(self, link: Link | None) -> Member | None:
        member = self._members.get(link) if link is not None else None
        return None if member is None or member.sidelined else member

    def _activate(self, link: Link, member: Member) -> None:
        hello, spec = member.hello, member.hello.features
        member.hello = hello if spec is None else replace(hello, features=spec.without_weights())
        member.sidelined, member.sessions = False, 0
        self._problems.pop(link.address, None)
        if hello.vocab_size:
            member.agreement = Agreement()
            self._metrics.pairing_suspect(link.address, False)
        self._update_gauge()

    def _choose_spec(self) -> None:
        """Keep rows for those that are most, and activate them."""
        votes = Counter(spec for member in self._members.values() if (spec := member.hello.features) is not None)
        for spec in sorted(votes, key=lambda spec: (-votes[spec], spec != self._spec)):
            if spec == self._spec or self._apply_spec(spec):
                self._spec = spec.without_weights()
                break
        for link, member in self._members.items():
            spec = member.hello.features
            if spec is None:
                continue
            if spec == self._spec and member.sidelined:
                self._activate(link, member)
            elif spec != self._spec:
                if not member.sidelined:
                    member.sidelined = True
                    self._problems.pop(link.address, None)
                    self._deactivated(link)
                self._report_sidelined(link, spec)

    def _apply_spec(self, spec: FeatureSpec) -> bool:
        """Have rows for ``spec`` kept. False: not now, or never."""
        links = [link for link, member in self._members.items() if member.hello.features == spec]
        complete = [hello.features for link in links if _has_weights(hello := self._members[link].hello)]
        if not complete:
            links[0].refuse("features")  # it stood aside once, and its projection is gone: it comes back with it
            return False
        if complete[0] is not None and self._set_feature_spec(complete[0]):
            return True
        for link in links:
            del self._members[link]
            self._log.warning("draft refused", address=link.address, field="features", found=str(spec.layers))
            self._problems[link.address] = (f"features.layers: this engine has no rows of layers {spec.layers}, or "
                                            "no memory for them")
        return False

    def _report_sidelined(self, link: Link, found: FeatureSpec) -> None:
        kept = self._spec
        if kept is None or link.address in self._problems:
            return
        same = " through another projection" if found.layers == kept.layers else ""
        problem = f"features: it reads layers {found.layers}{same}, and more drafts read {kept.layers}"
        if same and found.dtype != kept.dtype:
            problem = f"features: it reads rows in {found.dtype}, and more drafts read them in {kept.dtype}"
        self._log.warning("draft stands aside", address=link.address, problem=problem)
        self._problems[link.address] = problem

    def link_down(self, link: Link, reason: str) -> None:
        """A drafter is gone, and others may take part."""
        member = self._members.pop(link, None)
        if member is not None and not member.sidelined:
            self._deactivated(link)
            self._metrics.drafter_lost(reason)
        self._problems.pop(link.address, None)  # what was found out is about this connection
        self._choose_spec()
        self._update_gauge()

    def _deactivated(self, link: Link) -> None:
        """It gets no sessions any more."""
        self._metrics.draft_forgotten(link.address)
        self._update_gauge()

    def _update_gauge(self) -> None:
        self._metrics.drafts_connected(sum(not member.sidelined for member in self._members.values()))

    def set_leaving(self, link: Link, leaving: bool) -> None:
        """Give a drafter no new session any more, or again: also where it stands aside meanwhile."""
        if (member := self._members.get(link)) is not None:
            member.leaving = leaving

    def has_room(self, now_s: float) -> bool:
        """Whether some drafter would take one more session."""
        return any(_has_room(member, now_s) for member in self._members.values())

    def assign(self, now_s: float, left: Link | None = None) -> Link | None:
        """A drafter for one more session: of two drawn at random the one that is less busy for its size. Targets that
        do not know of each other spread their sessions so. ``left``: who was too slow for it, taken where no other has
        room."""
        members = self._members
        links = [link for link, member in members.items() if _has_room(member, now_s)]
        links = [link for link in links if link != left] or links
        if not links:
            return None
        max_latency_s = SLOW_FACTOR * min(members[link].recent_latency_s(now_s) or inf for link in links)
        links = [link for link in links if members[link].recent_latency_s(now_s) <= max_latency_s]
        chosen = min(self._random.sample(links, min(2, len(links))),
                     key=lambda link: members[link].sessions / members[link].hello.max_sessions)
        members[chosen].sessions += 1
        return chosen

    def observe_latency(self, link: Link, seconds: float, now_s: float) -> None:
        """A drafter answered a commit after so many ``seconds``, or had not by then."""
        if (member := self._members.get(link)) is not None:
            before_s = member.recent_latency_s(now_s) or seconds
            member.latency_s, member.measured_at_s = before_s + LATENCY_WEIGHT * (seconds - before_s), now_s
            self._best_latency_s = min(self._best_latency_s, member.latency_s)

    def is_slow(self, link: Link, gave_up: bool, now_s: float) -> bool:
        """Whether another with room takes so much less or, for a session that ``gave_up`` drafting, may take less."""
        members = self._members
        own_s = members[link].recent_latency_s(now_s) if link in members else 0.0
        # Sessions that waited ask this after each step, and there may be many.
        if not gave_up and SLOW_FACTOR * self._best_latency_s >= own_s:
            return False
        self._best_latency_s = min([member.recent_latency_s(now_s) or inf for member in members.values()], default=inf)
        others = [member.recent_latency_s(now_s) for other, member in members.items()
                  if other != link and _has_room(member, now_s)]
        return any(0.0 < SLOW_FACTOR * other_s < own_s or (gave_up and not (other_s and own_s)) for other_s in others)

    def release(self, link: Link | None) -> None:
        """A session leaves the drafter."""
        if (member := self._usable_member(link)) is not None:
            member.sessions -= 1
            member.full_until_s = -inf

    def refused(self, link: Link | None, now_s: float) -> None:
        """The drafter had no room for a session, which has left it."""
        if (member := self._usable_member(link)) is not None:
            member.full_until_s = now_s + FULL_S

    def hello(self, link: Link | None) -> DraftHello | None:
        """The drafter's half of the handshake; None: it is not there."""
        member = self._usable_member(link)
        return member.hello if member is not None else None

    def judge(self, verified: Sequence[tuple[Link, int, int]]) -> None:
        """Trees that drafters proposed were verified in one step: whose, draft tokens, accepted ones."""
        sums_by_link = dict[Link, list[int]]()
        for link, drafted, accepted in verified:
            sums = sums_by_link.setdefault(link, [0, 0, 0, 0])
            sums[0] += 1
            sums[1] += accepted > 0
            sums[2] += drafted
            sums[3] += accepted
        for link, (rounds, agreed, drafted, accepted) in sums_by_link.items():
            if (member := self._usable_member(link)) is not None:
                self._metrics.verified(member.hello.drafter, drafted, accepted)
                self._update_agreement(link, member, rounds, agreed)

    def _update_agreement(self, link: Link, member: Member, rounds: int, agreed: int) -> None:
        agreement = member.agreement
        if agreement is None:
            return
        suspected = agreement.suspect
        agreement.add(agreed, rounds)
        if agreement.suspect == suspected:
            return
        self._metrics.pairing_suspect(link.address, agreement.suspect)
        if suspected:
            self._problems.pop(link.address, None)
            return
        if not member.warned:
            member.warned = True
            self._log.warning("DRAFTER SUSPECT: " + agreement.problem(), address=link.address,
                              drafter=member.hello.drafter, agreed=agreement.agreed, rounds=agreement.rounds)
        self._problems[link.address] = agreement.problem()

    def with_problem(self, status: DraftStatus) -> DraftStatus:
        """A link's status with what was found out about its drafter. From any thread."""
        return replace(status, problem=self._problems.get(status.address, status.problem))


def _has_weights(hello: DraftHello) -> bool:
    """Whether its projection, if it has one, came with its weights."""
    spec = hello.features
    return spec is not None and (spec.projection is None or bool(spec.projection.weights))


def _has_room(member: Member, now_s: float) -> bool:
    return (member.sessions < member.hello.max_sessions and now_s >= member.full_until_s
            and not member.sidelined and not member.leaving)
