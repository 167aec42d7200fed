"""Claims: what rows of ``bench-network`` say of the claims that are made of schedules.

Rules:
1. A claim about rows that are not there is not judged, and says so.
2. The worst row decides, and is named.
3. Two rows scatter against each other by some 3 %. A case within ``CLOSE`` of its bound, be it above or below, is
   therefore judged by the median of its repeats, where there are some (``bench.repeats``).

It knows nothing about how rows were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from bench.report import Row

KEPT, WON, NEVER_WORSE, OVERLAP = 0.95, 1.10, 0.95, 1.10
DEAR, HITS, NEAR_MS = 0.15, 0.70, 1.0  # drafting's share of a round; rounds whose tree was there; a short round trip
CLOSE = 0.05  # of the bound
KEYS = ("schedule", "rtt_ms", "draft_ms", "batch", "acceptance")


@dataclass(frozen=True, slots=True)
class Case:
    """One row, and its figure against what it is compared with: its speed by that of ``rival``, if it has one."""

    figure: float
    row: Row
    rival: Row | None = None
    ratios: tuple[float, ...] = ()  # of the repeats; ``figure`` is their median then

    @property
    def key(self) -> Row:
        """What it is about."""
        rival = {} if self.rival is None else {f"rival_{name}": self.rival[name] for name in ("schedule", "rtt_ms")}
        return {name: self.row[name] for name in KEYS} | rival

    def is_of(self, repeats: Row) -> bool:
        """Whether ``repeats`` are of this case."""
        return all(name in repeats and repeats[name] == value for name, value in self.key.items())

    def settled(self, repeats: Sequence[Row]) -> Case:
        """With its repeats, if it has some."""
        found = next((row for row in repeats if self.rival is not None and self.is_of(row)), None)
        if found is None:
            return self
        ratios = tuple(one / other for one, other in zip(_numbers(found, "speeds"), _numbers(found, "rival_speeds"),
                                                         strict=True))
        return replace(self, figure=median(ratios), ratios=ratios)

    def __str__(self) -> str:
        row, ratios = self.row, self.ratios
        spread = f", median of {len(ratios)} from {min(ratios):.3f} to {max(ratios):.3f}" if ratios else ""
        return (f"{self.figure:.3f} ({row['schedule']}, round trip {row['rtt_ms']:g} ms, tree {row['draft_ms']:g} ms, "
                f"batch {row['batch']}, acceptance {row['acceptance']}{spread})")


def close(rows: Sequence[Row]) -> list[Case]:
    """The cases that are to be repeated, of claims that compare two rows. Each once."""
    found: list[Case] = []
    for case in (*_kept(rows), *_never_worse(rows)):
        if case.rival is not None and abs(case.figure / NEVER_WORSE - 1) <= CLOSE and case not in found:
            found.append(case)
    return found


def verdicts(rows: Sequence[Row], step_ms: float, repeats: Sequence[Row] = ()) -> list[str]:
    """One line a claim."""
    kept, never_worse = ([case.settled(repeats) for case in cases] for cases in (_kept(rows), _never_worse(rows)))
    return [
        _line("run-ahead at 1 ms keeps >= 95 % of its own speed at 0, batch 1", kept, lambda f: f >= KEPT, min),
        _line("run-ahead is >= 10 % faster than colocated where drafting is >= 15 % of a round, hits >= 70 %, batch 1",
              _won(rows, step_ms), lambda f: f >= WON, min),
        _line("what the policy chose is never > 5 % below the best of plain and serial", never_worse,
              lambda f: f >= NEVER_WORSE, min),
        _line("rounds whose tree was there take <= 1.1 of max(verify, draft) as measured, batch 1", _overlap(rows),
              lambda f: f <= OVERLAP, max),
    ]


def _line(claim: str, cases: Iterable[Case], holds: Callable[[float], bool],
          worst: Callable[..., Case]) -> str:
    found = list(cases)
    if not found:
        return f"not judged: {claim}: no such rows"
    failed = [case for case in found if not holds(case.figure)]
    repeated = sum(bool(case.ratios) for case in found)
    first = (f"{'FAILS' if failed else 'holds'}: {claim}: worst of {len(found)} rows"
             f"{f', {repeated} of them repeated,' if repeated else ''} {worst(found, key=lambda case: case.figure)}")
    return "\n".join([first, *(f"  also {case}" for case in failed[:12])] if len(failed) > 1 else [first])


def _numbers(row: Row, name: str) -> Sequence[float]:
    value = row[name]
    assert isinstance(value, Sequence) and not isinstance(value, str)
    return value


def _number(row: Row, name: str) -> float:
    value = row[name]
    assert isinstance(value, float | int)
    return float(value)


def _speed(row: Row) -> float:
    return _number(row, "tokens_per_s")


def _like(rows: Sequence[Row], row: Row, **other: str | float) -> Row | None:
    """The row that differs from ``row`` in nothing but ``other``."""
    wanted = {key: row[key] for key in KEYS} | other
    if wanted["schedule"] in ("plain", "colocated"):
        del wanted["rtt_ms"]
    if wanted["schedule"] == "plain":
        del wanted["draft_ms"]
    return next((r for r in rows if all(r[key] == value for key, value in wanted.items())), None)


def _of(rows: Sequence[Row], schedule: str, batch: int | None = None) -> list[Row]:
    return [row for row in rows if row["schedule"] == schedule and batch in (None, row["batch"])]


def _kept(rows: Sequence[Row]) -> Iterable[Case]:
    for row in _of(rows, "run-ahead", 1):
        near = _like(rows, row, rtt_ms=0.0)
        if row["rtt_ms"] == NEAR_MS and near is not None:
            yield Case(_speed(row) / _speed(near), row, near)


def _won(rows: Sequence[Row], step_ms: float) -> Iterable[Case]:
    for row in _of(rows, "run-ahead", 1):
        beside, draft_ms = _like(rows, row, schedule="colocated"), _number(row, "draft_ms")
        dear = draft_ms / (step_ms + draft_ms) >= DEAR
        if beside is not None and dear and _number(row, "hit_rate") >= HITS and _number(row, "rtt_ms") <= NEAR_MS:
            yield Case(_speed(row) / _speed(beside), row, beside)


def _never_worse(rows: Sequence[Row]) -> Iterable[Case]:
    for row in (*_of(rows, "serial"), *_of(rows, "run-ahead")):
        plain, serial = _like(rows, row, schedule="plain"), _like(rows, row, schedule="serial")
        if plain is not None and serial is not None:
            best = max(plain, serial, key=_speed)
            yield Case(_speed(row) / _speed(best), row, None if best is row else best)


def _overlap(rows: Sequence[Row]) -> Iterable[Case]:
    for row in _of(rows, "run-ahead", 1):
        if _number(row, "hit_rate") > 0:
            yield Case(_number(row, "hit_round_ms") / max(_number(row, "verify_ms"), _number(row, "draft_ms")), row)
