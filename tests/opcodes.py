"""How much Python a call executes, whatever the machine: for what must not grow with the number of others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def opcodes(call: Callable[[], object]) -> int:
    """Instructions of Python that ``call`` executes, in all that it calls."""
    count = 0

    def see(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return see

    before = sys.gettrace()
    sys.settrace(see)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
