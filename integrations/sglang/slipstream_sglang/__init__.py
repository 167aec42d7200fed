"""Slipstream drafts for SGLang: its own engine asks a draft service for the trees that it verifies.

    pip install . ./integrations/vllm ./integrations/sglang   # in a checkout: they are on no public index
    python -m sglang.launch_server --model-path MODEL --speculative-algorithm SLIPSTREAM \
        --speculative-num-draft-tokens 12 --speculative-adaptive-config slipstream.json   # {"drafts": ["draft:8052"]}

It is written for the interface of SGLang 0.5.23 and tested only with a stub of it: **it has never run** in SGLang.
"""

from slipstream_vllm.versions import installed

from slipstream.base.errors import ConfigError

KNOWN = "0.5.23"

__all__ = ["register"]


def register() -> None:
    """Called by SGLang in each process, before its arguments are read. Raises ConfigError."""
    from slipstream_sglang.adapter_0_5_23 import adapt

    adapter_fits(installed(("sglang",)))
    adapt()


def adapter_fits(version: str) -> None:
    """Raises ConfigError, which names the supported version, for another one."""
    if version.split("+")[0].split(".post")[0] != KNOWN:
        raise ConfigError(f"SGLang {version or '(none installed)'} is not known to slipstream-sglang, which was "
                          f"written for {KNOWN}: install that one, or take another --speculative-algorithm")
