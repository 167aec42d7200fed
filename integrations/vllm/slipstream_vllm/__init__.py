"""Slipstream drafts for vLLM: its own engine asks a draft service for the tokens that it verifies.

    pip install . ./integrations/vllm   # in a checkout: it is on no public index
    vllm serve MODEL --speculative-config '{"method": "custom_class", "model": "slipstream_vllm.RemoteDrafter",
        "num_speculative_tokens": 4}' --additional-config '{"slipstream": {"drafts": ["draft:8052"]}}'

vLLM finds ``register`` by its entry point in each of its processes. A minor version that is not known is refused by
name, where drafts are asked for.
"""

from slipstream_vllm.remote import RemoteDrafter

__all__ = ["RemoteDrafter", "register"]


def register() -> None:
    """Called by vLLM in each process, before anything is loaded. It must not raise: that would end any vLLM, also one
    without drafts."""
    from slipstream_vllm.versions import adapt_if_known

    adapt_if_known(RemoteDrafter)
