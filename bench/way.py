"""A way through the code: which functions of our own packages are called between two marks, as a profiler sees it.

A coroutine counts each time that it goes on, a generator once. It knows nothing about threads or services.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from slipstream.base.errors import Unavailable

ROOT = Path(__file__).parent.parent
PACKAGES = ("slipstream", "draft_service", "target_service", "router_service")
OURS = tuple(f"{ROOT / package}/" for package in PACKAGES)

Mark = Callable[[FrameType, str], bool]


@dataclass(frozen=True, slots=True)
class Call:
    """One Python call: the file, from the repository's root on, and the function."""

    file: str
    function: str


class Way:
    """The calls between two marks, each time that one leads to the other; ``again``: the first mark may be met again on
    the way, and all begins anew. ``counts`` tells whether the thread that runs is on the way."""

    def __init__(self, begins: Mark, ends: Mark, counts: Callable[[], bool], again: bool = False,
                 folders: tuple[str, ...] = OURS) -> None:
        self.found: list[list[Call]] = []
        self._begins = begins
        self._ends = ends
        self._counts = counts
        self._again = again
        self._folders = folders
        self._calls: list[Call] | None = None

    def see(self, frame: FrameType, event: str) -> None:
        """A profiler's event, on any thread."""
        if (self._again or self._calls is None) and self._begins(frame, event):
            self._calls = []
        calls = self._calls
        if calls is None:
            return
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self._folders) and not _goes_on(frame) and self._counts():
            calls.append(Call(str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname))
        if self._ends(frame, event):
            self.found.append(calls)
            self._calls = None

    @property
    def median(self) -> list[Call]:
        """Raises Unavailable where nobody went this way."""
        if not self.found:
            raise Unavailable("nothing was seen between the two marks")
        return sorted(self.found, key=len)[len(self.found) // 2]


def _goes_on(frame: FrameType) -> bool:
    """Whether it is a generator's frame that was entered before: the profiler sees a call again."""
    code = frame.f_code
    return code.co_flags & inspect.CO_GENERATOR != 0 and code.co_code[frame.f_lasti + 1] != 0  # RESUME's argument
