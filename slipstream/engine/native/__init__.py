"""Our own CPU kernels: bfloat16 forwards at the speed of memory, in which a row's result does not depend on other rows.

torch's operations are the specification (``decoder``, ``attention``), and run where these kernels cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from slipstream.base.errors import ModelError
from slipstream.engine.native.compiled_kernels import kernels
from slipstream.engine.native.program import Team
from slipstream.observe.log import logger

M = TypeVar("M")


def native_or(choice: str, dtype: torch.dtype, device: torch.device, what: str, native: Callable[[Team], M],
              other: Callable[[], M]) -> M:
    """The result of ``native`` with a Team of as many threads as torch has now; or that of ``other``, if choice is
    "torch", or if it is "auto" and the kernels cannot run here. what: its name in the log. Raises ModelError if choice
    is "native" and they cannot run."""
    supported = dtype == torch.bfloat16 and device.type == "cpu"
    if choice == "torch" or (choice == "auto" and not supported):
        return other()
    try:
        if not supported:
            raise ModelError("kernels 'native' are for dtype bfloat16 and device cpu; use kernels: auto")
        return native(Team(kernels(), torch.get_num_threads()))
    except ModelError as error:
        if choice == "native":
            raise
        logger("engine").info("torch computes", what=what, reason=str(error))
        return other()
