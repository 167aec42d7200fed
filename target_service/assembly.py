"""Makes a target from the configuration: model, KV slots, step costs, worker, service.

It knows nothing about sockets: ``__main__`` serves the target over gRPC, a colocated process calls it directly.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from slipstream.base.config import Config, TargetSection
from slipstream.base.errors import ConfigError, ModelError
from slipstream.decision.beliefs import StepCosts
from slipstream.engine.device import TYPICAL_CONTEXT, Memory, cores, default_slots
from slipstream.engine.graphs import GraphedDecoder
from slipstream.engine.loading import graphed, identity_of, load_model
from slipstream.engine.model import CausalModel
from slipstream.engine.native.decoder import NativeDecoder
from slipstream.engine.ops.races import race_for
from slipstream.engine.ranks import RankedModel, ranked_model
from slipstream.engine.runner import PROFILE_CONTEXT, ModelRunner
from slipstream.grammar.compiling import Vocabulary
from slipstream.grammar.trial import TARGET_CPU_S, Grammars, Trial
from slipstream.models.folder import folder_name, load_tokenizer, resolve, tokenizer_hash, unchanged, weights_hash
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.spans import spans_of
from slipstream.observe.trace import Trace
from slipstream.observe.vitals import Vitals
from slipstream.protocol.messages import PROTOCOL_VERSION, TargetHello
from slipstream.protocol.requests import ServedModel
from slipstream.protocol.tree import MAX_NODES, Thresholds
from target_service.loop import TargetWorker
from target_service.service import TargetService, deliver_on_loop
from target_service.step import Limits

LEAST_SLOTS = PROFILE_CONTEXT + MAX_NODES  # the measurement of steps needs as many


@dataclass(frozen=True, slots=True)
class Target:
    """A target that is ready to be started (``worker.start()``) and joined to drafts and clients."""

    worker: TargetWorker
    service: TargetService
    hello: TargetHello
    metrics: TargetMetrics
    ranks: RankedModel | None = None  # None: the model has only one rank

    @property
    def vitals(self) -> Vitals:
        return self.worker.vitals

    def end(self) -> None:
        """End the worker, and with it the model's ranks."""
        self.worker.stop()
        if self.ranks is not None:
            self.ranks.close()


def build(config: Config, loop: asyncio.AbstractEventLoop) -> Target:
    """Load the model and measure its steps, which takes seconds. ``loop``: the event loop that reads answers. Raises
    ModelError or ConfigError."""
    section = config.model
    if config.target.vllm is not None:
        raise ConfigError("target.engine: vllm is a process of its own: start the services apart")
    folder = resolve(section.path)
    torch.set_num_threads(section.threads or cores())
    name = config.router.model_name or folder_name(folder)
    if section.tensor_parallel == 1:
        with unchanged(folder):
            model, weights = graphed(load_model(folder, section)), weights_hash(folder)
        if isinstance(model, NativeDecoder):
            # It has its own threads. The work left to torch is so small that waking a second thread costs more.
            torch.set_num_threads(1)
        return assemble(config, model, name, tokenizer_hash(folder), loop, weights,
                        grammars(folder, model.config.vocab_size))
    with unchanged(folder):
        ranked, weights = ranked_model(folder, section), weights_hash(folder)
    target = replace(assemble(config, ranked, name, tokenizer_hash(folder), loop, weights,
                              grammars(folder, ranked.config.vocab_size)), ranks=ranked)
    ranked.watch(partial(target.vitals.report_lost, "a rank"))
    return target


def assemble(config: Config, model: CausalModel, name: str, digest: str, loop: asyncio.AbstractEventLoop,
             weights: str = "", grammars: Grammars | None = None) -> Target:
    """Make a target around any model and measure its steps. ``digest``: hash of its tokenizer; ``weights``: hash of its
    weights, "" where unknown. ``grammars``: None refuses requests with a grammar."""
    shape = model.config
    max_context = min(config.target.max_context or shape.max_context, shape.max_context)
    runner = _runner(config, model, max_context)
    costs = StepCosts(*runner.profile())
    max_context = min(max_context, runner.slots.num_slots - MAX_NODES)  # a tree may go beyond the last token
    metrics = TargetMetrics(name)
    trace = Trace(config.log.trace, "target")
    worker = TargetWorker(runner, config.target, costs, metrics, partial(deliver_on_loop, loop), trace=trace,
                          spans=spans_of(config.log, "target"))
    lossy = _warn_if_lossy(config.target)
    identity = identity_of(model, config.model, weights)
    served = ServedModel(name, shape.vocab_size, max_context, digest, runner.slots.num_slots, identity, lossy)
    hello = TargetHello(PROTOCOL_VERSION, 0, name, shape.vocab_size, digest, shape.hidden_size, shape.num_layers,
                        max_context, identity)
    logger("target").info("model ready", model=name, dtype=str(model.dtype), device=str(model.device),
                          kernels="native" if isinstance(model, NativeDecoder) else "torch",
                          threads=model.threads if isinstance(model, NativeDecoder) else torch.get_num_threads(),
                          weights=identity.weights[:16], slots=served.num_slots, max_context=max_context,
                          step_ms={str(rows): round(1e3 * costs.cost(rows), 2) for rows in (1, 8, 64)})
    return Target(worker, TargetService(worker, served, grammars), hello, metrics)


def grammars(folder: Path, vocab_size: int) -> Grammars | None:
    """The grammar compiler for the model in ``folder``; None where its tokenizer cannot be used for grammars."""
    try:
        return Grammars(Vocabulary(load_tokenizer(folder), vocab_size), Trial(folder, TARGET_CPU_S))
    except ModelError as error:
        logger("target").warning("answers are bound to no grammar", problem=str(error))
        return None


def _runner(config: Config, model: CausalModel, max_context: int) -> ModelRunner:
    slots = slots_for(config.target, model, max_context)
    race = race_for(config.model.kernels, model.config, model.device)
    if not isinstance(model, GraphedDecoder | RankedModel):
        return ModelRunner(model, slots, race=race)
    runner = ModelRunner(model, slots, model.spare_slots, race)
    # Each session may have two segments in a step: the last rows of its prompt, and the root after them.
    if model.spare_slots:
        logger("target").info("graphs captured", count=model.warm(runner.pool, 2 * config.target.max_sessions))
    return runner


def _warn_if_lossy(config: TargetSection) -> bool:
    thresholds = Thresholds(config.accept_threshold_single, config.accept_threshold_acc)
    if thresholds.lossy:
        logger("target").warning("LOSSY: accept thresholds below 1; sampled answers are not the model's own, and not "
                                 "repeatable", accept_threshold_single=thresholds.single,
                                 accept_threshold_acc=thresholds.acc)
    return thresholds.lossy


def gathers(model: CausalModel) -> bool:
    """Whether attention copies the KV of a step first (torch's), and does not read it in its slots."""
    if isinstance(model, GraphedDecoder | RankedModel):
        return not model.spare_slots  # ranks whose attention can be captured have some
    return not isinstance(model, NativeDecoder)


def slots_for(config: TargetSection, model: CausalModel, max_context: int) -> int:
    """KV slots: those of the configuration, or if 0 enough for all sessions of a typical length, and at least for one
    whole context with its tree. Raises ConfigError where they do not fit into memory or are too few for one answer."""
    memory = Memory.of(model.config, model.dtype, model.device,
                       Limits.on(model.device.type, config.max_sessions).max_step_rows,
                       max_context if gathers(model) else 0)
    if isinstance(model, GraphedDecoder | RankedModel):  # it has spare slots that no answer gets
        memory = replace(memory, free=memory.free - model.spare_slots * memory.slot)
    if 0 < config.slots < LEAST_SLOTS:
        raise ConfigError(f"target.slots: {config.slots} are too few for one answer and its tree: at least "
                          f"{LEAST_SLOTS}, or 0 for as many as there is room for")
    slots = config.slots or max(_slots(config, model, max_context, memory), LEAST_SLOTS)
    # A CPU's memory is only taken when it is written, so only more than the machine has is refused.
    if model.device.type == "cuda" or slots * memory.slot > memory.total:
        memory.check(slots)
    logger("target").info("memory", device=str(model.device), gb=memory.report(slots), slots=slots)
    return slots


def _slots(config: TargetSection, model: CausalModel, max_context: int, memory: Memory) -> int:
    if model.device.type == "cuda":
        wanted = config.max_sessions * min(TYPICAL_CONTEXT, max_context)
        return max(memory.slots(wanted), max_context + MAX_NODES)
    typical = default_slots(model.config, model.dtype, config.max_sessions, max_context, device=model.device)
    return max(typical, max_context + MAX_NODES)
