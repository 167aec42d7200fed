"""``value``: a dataclass that nobody changes, for what each session makes anew each round.

The type checker refuses to set a field; Python does not look. That is what it is for: in Python 3.11 a frozen dataclass
takes several times as long to make, and a named tuple's fields take longer to read. In a wheel its
constructor is compiled (``build_hook``): it checks types, and nobody copies it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

Kind = TypeVar("Kind")


@dataclass_transform(frozen_default=True)
def value(kind: type[Kind]) -> type[Kind]:
    return dataclass(slots=True)(kind)
