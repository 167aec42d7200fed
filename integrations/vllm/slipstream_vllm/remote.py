"""RemoteDrafter: a proposer for vLLM that gets its draft tokens from draft services.

``Chains`` holds the sessions; this class connects it with the links and the target's states.

Rules:
1. vLLM's scheduler takes the proposals of one rank, the first, and gives them to all ranks with the next step. So only
   that rank drafts, the others propose nothing, and nothing has to be broadcast.
2. With ``external_launcher`` each rank has its own scheduler. Drafts that arrive later on one rank would make their
   steps differ, so that is refused. So is a pipeline: vLLM schedules draft tokens behind a token that it does not
   know yet, because the step before is still computed, and then ends.

It knows nothing of vLLM's batch: an adapter reads that.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slipstream.base.errors import ConfigError
from slipstream.following.chains import Chains
from slipstream.following.rounds import SOCKET, StepReport, encode
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import PROTOCOL_VERSION, TargetHello
from slipstream.protocol.requests import DraftStatus
from slipstream_vllm.lines import configure_logging
from slipstream_vllm.links import Links
from slipstream_vllm.options import Options
from slipstream_vllm.tokenizer import digest_of
from slipstream_vllm.versions import adapt

if TYPE_CHECKING:  # importing this package does not import torch
    from slipstream_vllm.sampling import KeyedSampling


class RemoteDrafter:
    """The class that ``--speculative-config`` names. vLLM makes one object in each worker."""

    def __init__(self, vllm_config: Any) -> None:
        """Raises ConfigError naming the field, or the problem with this vLLM."""
        configure_logging()
        adapt(RemoteDrafter)
        model, speculative = vllm_config.model_config, vllm_config.speculative_config
        options = Options.of((vllm_config.additional_config or {}).get("slipstream"))
        self.connects = is_drafting_rank(vllm_config.parallel_config)  # to drafts (rule 1)
        if not self.connects:
            options = replace(options, drafts=(), metrics_listen=None)
        self.keyed = options.keyed  # whether keyed sampling is wanted; the adapter installs it as ``chooser``
        self.chooser: KeyedSampling | None = None
        text, name = model.hf_text_config, str(model.served_model_name)  # as vLLM's own metrics call it
        hello = TargetHello(PROTOCOL_VERSION, 0, name, model.get_vocab_size(),
                            digest_of(str(model.tokenizer), model.tokenizer_revision),
                            text.hidden_size, text.num_hidden_layers, model.max_model_len)
        self.metrics = metrics = TargetMetrics(name)
        # Imported here, so that importing this package does not import torch.
        from slipstream_vllm.features import FeatureStore, Taps

        taps = Taps(options.layers, text.num_hidden_layers)
        self.states = FeatureStore(taps, int(options.features_gb * (1 << 30))) if options.layers else None
        self.chains = Chains(options.section(speculative.num_speculative_tokens), metrics, states=self.states,
                             on_step=step_reporter())
        self._links = Links(options, hello, self.chains.following, metrics, taps.check)

    @property
    def expected(self) -> int:
        """Number of drafts that there should be."""
        return self._links.expected

    def statuses(self) -> list[DraftStatus]:
        """The states of all known drafts, with the problems found with them."""
        return [self.chains.following.pool.with_problem(status) for status in self._links.statuses()]

    def load_model(self, *_: Any, **__: Any) -> None:
        """Called by vLLM; nothing to load, as the model is in the draft service."""

    def propose(self, *_: Any, **__: Any) -> list[list[int]]:
        """Called only by a runner that no adapter has patched. Raises ConfigError."""
        raise ConfigError("slipstream-vllm stands in vLLM's GPUModelRunner alone, and this is another one: leave out "
                          "what chooses it, or --speculative-config")


def is_drafting_rank(parallel: Any) -> bool:
    """Whether the rank that ``parallel`` (vLLM's ``ParallelConfig``) describes is the one that drafts (rule 1). Raises
    ConfigError (rule 2)."""
    if parallel.world_size > 1 and parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError("distributed_executor_backend: external_launcher runs a scheduler in each rank, which remote "
                          "drafts would part; use mp or ray")
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError("pipeline_parallel_size: vLLM 0.32 mixes up the draft tokens of a pipeline's batches; use "
                          "tensor parallelism, or leave out --speculative-config")
    return bool(parallel.rank % parallel.world_size == 0)  # a trainer counts its processes, each with an engine


def step_reporter() -> Callable[[StepReport], None] | None:
    """The function that reports each step to the target; None: no target listens. The socket's path is in the
    environment and not in vLLM's arguments: it differs at each start, and vLLM caches compiled code by arguments."""
    path = os.environ.get(SOCKET)
    return StepReporter(path).send if path else None


class StepReporter:
    """Reports the results of steps to the target that serves the engine's answers (``target.engine: vllm``). It never
    blocks and never raises: a report that cannot be sent at once is dropped."""

    def __init__(self, path: str) -> None:
        """path: of the target's socket."""
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def send(self, step: StepReport) -> None:
        with suppress(OSError):
            self._socket.sendto(encode(step), self._path)
