"""How vLLM is started as a target: our settings as its arguments, our proposer beside its model.

Rules:
1. A setting that applies to vLLM keeps its meaning. Another one, if it was set, is refused by name.
2. vLLM's own arguments are given by their names (``target.engine``). An unknown one is refused, with the nearest name.
3. vLLM and ``slipstream_vllm`` are imported only when it starts, because our own engine needs neither.
4. Where several machines compute one model (``nnodes``), the first serves; each other one is a ``Node``, started from
   the same settings but for its ``node_rank``.

It knows nothing about answers.
"""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import slipstream
from slipstream.base.config import Config, ModelSection, TargetSection
from slipstream.base.errors import ConfigError, InvalidRequest, ModelError, Unavailable
from slipstream.following.rounds import SOCKET
from slipstream.grammar.trial import TARGET_CPU_S, Trial, Trials
from slipstream.models.folder import code_digest, folder_name, resolve, tokenizer_hash, weights_hash
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.spans import spans_of
from slipstream.observe.vitals import Vitals
from slipstream.protocol.grammar import JSON_OBJECT
from slipstream.protocol.identity import Identity
from slipstream.protocol.requests import ServedModel
from target_service.vllm import CacheUsage, LoadedEngine, StepReports, VllmService
from target_service.vllm_words import Bounds

EXTENSION = "slipstream_vllm.worker.Drafted"
# Arguments that only set sizes and the address where machines meet: they do not change answers.
SIZE_ARGUMENTS = ("gpu_memory_utilization", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "master_addr",
                  "master_port", "node_rank")
ROOT, CHOOSING = Path(slipstream.__file__).parent, ("choosing",)
RAW = "raw_logprobs"
V2_SCORES = 1024  # rows of a prompt that vLLM's second model runner scores at once; the first one scores all of a step
MEET_S = 30.0
# A machine that is lost silently is noticed after a minute.
KEEPALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 4}
NOT_FOR_VLLM = {  # settings that do not apply to vLLM -> what to do instead
    "model.engine": "vLLM has its own", "model.kernels": "vLLM has its own",
    "model.threads": "set OMP_NUM_THREADS and VLLM_CPU_OMP_THREADS_BIND", "target.slots":
    "write {vllm: {gpu_memory_utilization: 0.9}}, or VLLM_CPU_KVCACHE_SPACE on a CPU",
    "target.accept_threshold_single": "vLLM's answers are the model's own",
    "target.accept_threshold_acc": "vLLM's answers are the model's own",
}


def arguments(config: Config, folder: Path, name: str, known: Sequence[str]) -> dict[str, Any]:
    """The arguments of vLLM's engine; ``known``: the names that it has. They are the same at each start, because vLLM
    caches compiled code by its arguments. Raises ConfigError naming the key."""
    model, target, given = config.model, config.target, dict(config.target.vllm or {})
    for setting, instead in NOT_FOR_VLLM.items():
        section, field = setting.split(".")
        value = getattr(getattr(config, section), field)
        if value != (ModelSection() if section == "model" else TargetSection()).model_dump()[field]:
            raise ConfigError(f"{setting}: {value} means nothing with target.engine vllm: {instead}")
    if model.quantize == "int8":
        raise ConfigError("model.quantize: int8 is our own engine's; vLLM takes checkpoints that are quantised, or fp8")
    for key in given:
        if key not in known or key in ("model", "tokenizer"):
            near = get_close_matches(key, known, n=1, cutoff=0.5)
            instead = "model.path says it" if key in ("model", "tokenizer") else f"did you mean {near[0]}?" if near \
                else "vLLM has no such argument"
            raise ConfigError(f"target.engine.vllm.{key}: {instead}")
    ours: dict[str, Any] = {"model": str(folder), "served_model_name": name, "dtype": model.dtype,
                            "max_num_seqs": target.max_sessions, "tensor_parallel_size": model.tensor_parallel}
    if target.max_context:
        ours["max_model_len"] = target.max_context
    if model.quantize == "fp8":
        ours["quantization"] = "fp8"
    # One that reads what the router has tried; vLLM would take what the first request needs, for all that follow.
    grammars = given.pop("structured_outputs_config", {})
    if (mode := given.get("logprobs_mode", RAW)) != RAW:
        raise ConfigError(f"target.engine.vllm.logprobs_mode: {str(mode)[:64]} is not what requests ask for: leave it "
                          "out")
    if given.get("stream_interval", 1) != 1:
        raise ConfigError("target.engine.vllm.stream_interval: tokens are told step by step, with what the step gave: "
                          "leave it out")
    if not isinstance(grammars, Mapping):
        raise ConfigError("target.engine.vllm.structured_outputs_config: must be a table, as {backend: guidance}")
    return {**ours, **_drafting(config, given), **given,
            "structured_outputs_config": {"backend": "guidance", **grammars}}


def _drafting(config: Config, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments that put our proposer beside vLLM's model; empty without drafts. Raises ConfigError."""
    target, policy = config.target, config.target.policy
    if not drafts(config):
        return {}
    for key in ("speculative_config", "worker_extension_cls"):
        if key in given:
            raise ConfigError(f"target.engine.vllm.{key}: drafts of target.drafts need it; set target.drafts to [] for "
                              "vLLM's own")
    if given.get("pipeline_parallel_size", 1) != 1:
        raise ConfigError("target.engine.vllm.pipeline_parallel_size: vLLM mixes up the draft tokens of a pipeline's "
                          "batches: take model.tensor_parallel, or set target.drafts to []")
    more = given.pop("additional_config", {})
    if not isinstance(more, Mapping) or not isinstance(own := more.get("slipstream", {}), Mapping):
        raise ConfigError("target.engine.vllm.additional_config: must be a table, as {slipstream: {layers: [2]}}")
    options = {"drafts": list(target.drafts), "deadline_s": policy.deadline_max_s,
               "prompt_lookup": target.prompt_lookup, "always": policy.always,
               "tls": config.wire.tls.model_dump(mode="json"), "kubeconfig": config.wire.kubeconfig,
               **own}
    from slipstream_vllm.options import Options

    try:  # checked here, because of an error in vLLM's processes the service would only see that they ended
        Options.of(options)
    except ConfigError as error:
        raise ConfigError(f"target.engine.vllm.additional_config.{error}") from error
    return {"speculative_config": {"method": "custom_class", "model": "slipstream_vllm.RemoteDrafter",
                                   "num_speculative_tokens": policy.max_nodes},
            "additional_config": {**more, "slipstream": options},
            "worker_extension_cls": EXTENSION, "per_request_spec_decode_metrics": "detailed"}


def drafts(config: Config) -> bool:
    """Whether drafts are configured, and at least one node may be verified."""
    return bool(config.target.drafts) and config.target.policy.max_nodes > 0


def vllm_version() -> str:
    """vLLM's version. Raises ConfigError where vLLM or ``slipstream_vllm`` is missing, or the version is not known."""
    try:
        import vllm  # noqa: F401
        from slipstream_vllm.versions import adapter_fits, installed
    except ImportError as error:
        raise ConfigError(f"target.engine: vllm needs vLLM and slipstream-vllm in this environment: {error}") from error
    version = installed()
    adapter_fits(version)
    return version


def _args(config: Config, folder: Path, name: str) -> Any:
    """vLLM's engine arguments object, made from ``arguments``."""
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    wanted = arguments(config, folder, name, [field.name for field in fields(AsyncEngineArgs)])
    grammars = StructuredOutputsConfig(**wanted.pop("structured_outputs_config"))
    return AsyncEngineArgs(**wanted, structured_outputs_config=grammars)


def start(config: Config) -> LoadedEngine:
    """Load the model into vLLM. Takes minutes for a large one; raises ConfigError or ModelError."""
    version = vllm_version()
    from slipstream_vllm.sampling import refusal
    from vllm import envs
    from vllm.exceptions import VLLMClientError
    from vllm.v1.metrics.loggers import StatLoggerBase

    folder = resolve(config.model.path)
    name = config.router.model_name or folder_name(folder)
    cache_usage, reports = CacheUsage(), StepReports(Path(tempfile.mkdtemp(prefix="slipstream-")) / "rounds")

    class UsageLogger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._core = engine_index

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                cache_usage.by_core[self._core] = scheduler_stats.kv_cache_usage
            if iteration_stats is not None:
                cache_usage.num_preempted += iteration_stats.num_preempted_reqs

        def log_engine_initialized(self) -> None: ...

    try:
        os.environ[SOCKET] = str(reports.path)  # for its processes
        engine = _engine(config, folder, name, UsageLogger)
    except Exception as error:
        reports.close()
        if isinstance(error, ConfigError):
            raise
        raise ModelError(f"vLLM {version} did not start: {error}") from error
    model, cache = engine.vllm_config.model_config, engine.vllm_config.cache_config
    cores = len(engine.engine_core.core_engines)
    slots = num_slots(cache, cores)
    options = (engine.vllm_config.additional_config or {}).get("slipstream", {})
    keyed = drafts(config) and options.get("keyed", True) and not refusal(engine.vllm_config)
    served = ServedModel(name, model.get_vocab_size(), model.max_model_len, tokenizer_hash(folder), slots,
                    identity_of(engine.vllm_config, folder, version, config.target.vllm or {}, keyed))
    logger("target").info("model ready", model=name, engine=f"vllm {version}", dtype=str(model.dtype), slots=slots,
                          max_context=served.max_context, drafts=drafts(config))
    return LoadedEngine(engine, params_of(), (VLLMClientError, ValueError), served, drafts(config), keyed,
                        cache_usage, reports, trials_of(folder), _bounds(engine.vllm_config),
                        envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, cores)


def num_slots(cache: Any, cores: int) -> int:
    """Tokens that the caches of all cores hold. Blocks do not say it: ranks may have a part of each context, and layers
    of other kinds take blocks of the same pool."""
    held: int | None = getattr(cache, "kv_cache_size_tokens", None)  # of one core
    return (cache.num_gpu_blocks or 0) * cache.block_size if held is None else held * cores


def _engine(config: Config, folder: Path, name: str, stat_logger: type) -> Any:
    """vLLM's, as its own ``from_engine_args`` makes it. ``stat_logger``: of its steps."""
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    args = _args(config, folder, name)
    vllm_config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    if drafts(config):
        check_layers(vllm_config)
    return AsyncLLM.from_vllm_config(vllm_config, stat_loggers=[stat_logger],
                                     enable_log_requests=args.enable_log_requests,
                                     disable_log_stats=args.disable_log_stats)


def check_layers(vllm_config: Any) -> None:
    """Raises ConfigError for states of layers that vLLM's model has not: a worker would name them, but the service,
    minutes later, would say no more than that vLLM did not start."""
    from slipstream_vllm.features import Taps

    options = vllm_config.additional_config["slipstream"]
    try:
        Taps(tuple(options.get("layers", ())), vllm_config.model_config.hf_text_config.num_hidden_layers)
    except ConfigError as error:
        raise ConfigError(f"target.engine.vllm.additional_config.{error}") from error


def params_of() -> Callable[..., Any]:
    """The function that makes vLLM's ``SamplingParams`` from the values of ``vllm_words.parameters``."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    class RequestParams(SamplingParams):  # type: ignore[misc]
        def update_from_generation_config(self, *given: Any, **named: Any) -> None:
            """Skip it where ends are ignored: vLLM would still forbid its tokenizer's end tokens before ``min_tokens``.
            The wanted ones are among the stop tokens already."""
            if not self.ignore_eos:
                SamplingParams.update_from_generation_config(self, *given, **named)

    def make(structured_outputs: Mapping[str, Any] | None, bad_words: list[list[int]], **others: Any) -> Any:
        grammar = None if structured_outputs is None else StructuredOutputsParams(**structured_outputs)
        params = RequestParams(output_kind=RequestOutputKind.DELTA, detokenize=False, structured_outputs=grammar,
                               flat_logprobs=others["prompt_logprobs"] is not None, **others)
        if bad_words:  # set afterwards: vLLM would tokenize words, but these are tokens already
            params._bad_words_token_ids = bad_words
        return params

    return make


def _bounds(running: Any) -> Bounds:
    """The limits of an engine; ``running``: vLLM's configuration."""
    from vllm import envs

    rows = running.scheduler_config.max_num_batched_tokens
    if running.use_v2_model_runner:
        rows = min(rows, V2_SCORES)
    scored = Bounds.scores(running.model_config.get_vocab_size(), rows)
    if running.cache_config.kv_sharing_fast_prefill:  # vLLM would end
        scored = 0
    return Bounds(envs.VLLM_MAX_NUM_BAD_WORDS, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS, scored)


def trials_of(folder: Path) -> Trials | None:
    """Trials of grammars for the model in ``folder``; None where its tokenizer cannot be used for them, or crashes the
    process that tries it."""
    trial = Trial(folder, TARGET_CPU_S)
    try:
        trial.check(JSON_OBJECT)
    except (ModelError, InvalidRequest, Unavailable) as error:
        trial.close()
        logger("target").warning("no grammars", why=str(error))
        return None
    return Trials(trial)


def node_rank(config: Config) -> int:
    """The rank of this machine among those that compute one model; 0: the one that serves. Raises ConfigError."""
    rank = (config.target.vllm or {}).get("node_rank", 0)
    if not isinstance(rank, int):
        raise ConfigError(f"target.engine.vllm.node_rank: {str(rank)[:64]!r} is no number")
    return rank


class Node:
    """A machine that computes its part of a model and takes no requests."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError."""
        self._version = vllm_version()
        folder = resolve(config.model.path)
        # No process on this machine serves the answers, so there is no socket for reports of steps.
        self._args = _args(config, folder, config.router.model_name or folder_name(folder))
        self._executor: Any = None
        self._ended = False

    def run(self, begun: Callable[[], object]) -> None:
        """Run until ``end``. ``begun`` is called when the model is loaded on all machines. Raises ModelError when it
        cannot begin, Unavailable when one of its processes has ended."""
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        try:
            shape = self._args.create_engine_config(headless=True)
            self._executor = MultiprocExecutor(shape, monitor_workers=False)
        except Exception as error:
            raise ModelError(f"vLLM {self._version} did not start: {error}") from error
        begun()
        first = shape.parallel_config.master_addr, shape.parallel_config.master_port
        threading.Thread(target=self._follow, args=(first,), name="vllm-first", daemon=True).start()
        self._executor.start_worker_monitor(inline=True)
        if not self._ended:
            raise Unavailable("a process of vLLM on this machine has ended, or another machine has")

    def _follow(self, first: tuple[str, int]) -> None:
        """End this machine when ``first``, the address where the machines met, is gone: else vLLM's processes here wait
        for it for ever, and the first machine cannot start again."""
        try:
            met = socket.create_connection(first, timeout=MEET_S)
        except OSError as error:
            logger("target").warning("the first machine cannot be followed", address=first, problem=str(error))
            return
        with met, suppress(OSError):  # it is silent
            met.settimeout(None)
            met.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                met.setsockopt(socket.IPPROTO_TCP, option, value)
            while met.recv(1):
                pass
        if not self._ended:
            self._executor.shutdown()

    def end(self) -> None:
        self._ended = True
        if self._executor is not None:
            self._executor.shutdown()


def identity_of(running: Any, folder: Path, version: str, given: Mapping[str, Any], keyed: bool) -> Identity:
    """``running``: vLLM's configuration. ``given``: its arguments that somebody wrote. ``keyed``: code of ours chooses
    sampled tokens."""
    import slipstream_vllm
    import torch
    from vllm.platforms import current_platform

    model, told = running.model_config, {name: given[name] for name in sorted(given) if name not in SIZE_ARGUMENTS}
    kernels = (f"vllm {version}, torch {torch.__version__}, {current_platform.get_device_name()}, "
               f"ranks {running.parallel_config.world_size}")
    if keyed:
        beside = Path(slipstream_vllm.__file__).parent
        kernels += f", slipstream {code_digest(ROOT, CHOOSING)} {code_digest(beside.parent, (beside.name,))}"
    if told:
        kernels += f", arguments {hashlib.sha256(repr(told).encode()).hexdigest()[:16]}"
    return Identity(weights_hash(folder), str(model.dtype).removeprefix("torch."), str(model.quantization or "none"),
                    kernels)


@dataclass(frozen=True, slots=True)
class VllmTarget:
    """A target whose engine is vLLM, ready to be joined to clients."""

    service: VllmService
    metrics: TargetMetrics

    @property
    def vitals(self) -> Vitals:
        return self.service.vitals

    def end(self) -> None:
        self.service.end()


def build(config: Config) -> VllmTarget:
    """Raises ConfigError or ModelError."""
    running = start(config)
    metrics = TargetMetrics(running.served.model_id)
    return VllmTarget(VllmService(running, config.target, metrics, spans_of(config.log, "target")), metrics)
