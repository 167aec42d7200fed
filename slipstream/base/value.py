"""``value``: an immutable dataclass, for objects that each session creates in each round.

Only the type checker refuses to set a field; Python does not check. Reason: in Python 3.11 a frozen dataclass takes
several times as long to create, and a named tuple's fields take longer to read. In a wheel a value is a class of C
(``build_hook``): it raises TypeError for a field of another type, and ``copy`` and ``pickle`` cannot take it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

Kind = TypeVar("Kind")


@dataclass_transform(frozen_default=True)
def value(kind: type[Kind]) -> type[Kind]:
    return dataclass(slots=True)(kind)
