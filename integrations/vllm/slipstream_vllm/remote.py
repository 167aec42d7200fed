"""RemoteDrafter: what stands where vLLM expects a proposer, and asks draft services for chains.

The sessions are ``Chains``; this puts them together with links and states.

Rules:
1. vLLM's scheduler takes the proposals of one rank, the first of the last pipeline stage, and hands them to all ranks
   with the next step. So that rank alone drafts, the others propose nothing, and nothing has to be broadcast.
2. Where each rank has a scheduler of its own (``external_launcher``), drafts that come a moment later on one of them
   would part them: that is refused.

It knows nothing of vLLM's batch: an adapter reads that.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from slipstream.base.errors import ConfigError
from slipstream.following.chains import Chains
from slipstream.following.rounds import SOCKET, ToldStep, encode
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import PROTOCOL_VERSION, TargetHello
from slipstream.protocol.requests import DraftStatus
from slipstream_vllm.lines import adopt
from slipstream_vllm.links import Links
from slipstream_vllm.options import Options
from slipstream_vllm.tokenizer import digest_of
from slipstream_vllm.versions import adapt


class RemoteDrafter:
    """What ``--speculative-config`` names. vLLM makes one in each worker."""

    def __init__(self, vllm_config: Any) -> None:
        """Raises ConfigError naming the field, or what is wrong with this vLLM."""
        adopt()
        adapt()
        model, speculative = vllm_config.model_config, vllm_config.speculative_config
        options = Options.of((vllm_config.additional_config or {}).get("slipstream"))
        self.speaks = speaks(vllm_config.parallel_config)  # with drafts; other ranks of the engine propose nothing
        self.keyed = options.keyed  # wanted; an adapter puts it in place
        self.chooser: Any = None  # the adapter's
        text, name = model.hf_text_config, str(model.served_model_name)  # as vLLM's own metrics call it
        hello = TargetHello(PROTOCOL_VERSION, 0, name, model.get_vocab_size(),
                            digest_of(str(model.tokenizer), getattr(model, "tokenizer_revision", None)),
                            text.hidden_size, text.num_hidden_layers, model.max_model_len)
        self.metrics = metrics = TargetMetrics(name)
        # Only here: who imports this package needs no torch.
        from slipstream_vllm.features import States, Taps

        taps = Taps(options.layers, text.num_hidden_layers)
        self.states = States(taps, int(options.features_gb * (1 << 30))) if options.layers else None
        self.chains = Chains(options.section(speculative.num_speculative_tokens), metrics, states=self.states,
                             tell=listener())
        self._links = Links(options, hello, self.chains.following, metrics, taps.check, self.speaks)

    @property
    def expected(self) -> int:
        """Drafts that there should be."""
        return self._links.expected

    def statuses(self) -> list[DraftStatus]:
        """Of all drafts that are known, with what was found out about them."""
        return [self.chains.following.pool.with_problem(status) for status in self._links.statuses()]

    def load_model(self, *_: Any, **__: Any) -> None:
        """vLLM calls it; the model is elsewhere."""

    def propose(self, *_: Any, **__: Any) -> list[list[int]]:
        """What a runner calls that no adapter stands in."""
        raise ConfigError("slipstream-vllm stands in vLLM's GPUModelRunner alone, and this is another one: leave out "
                          "what chooses it, or --speculative-config")


def speaks(parallel: Any) -> bool:
    """Whether the rank that ``parallel`` (vLLM's ``ParallelConfig``) describes is the one that drafts (rule 1). Stages
    of a pipeline before the last have no proposer. Raises ConfigError."""
    if parallel.world_size > 1 and parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError("distributed_executor_backend: external_launcher runs a scheduler in each rank, which remote "
                          "drafts would part; use mp or ray")
    last = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    return bool(parallel.rank == parallel.world_size - last)


def listener() -> Callable[[ToldStep], None] | None:
    """Who hears of each step; None: nobody. What vLLM compiles it keeps by its arguments, and a socket is another one
    at each start, so it is no option."""
    path = os.environ.get(SOCKET)
    return Teller(path).tell if path else None


class Teller:
    """Tells a target what became of a step, where one serves the engine's answers (``target.engine: vllm``). It never
    blocks and never raises: what cannot be told at once is not told."""

    def __init__(self, path: str) -> None:
        """path: of its socket."""
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def tell(self, step: ToldStep) -> None:
        with suppress(OSError):
            self._socket.sendto(encode(step), self._path)
