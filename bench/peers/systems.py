"""What ``make bench`` compares: each system as a user would start it, on free loopback ports, and one way to ask them.

Rules:
1. Every system gets the same tokens and computes with the same weights in the same precision.
2. Slipstream and llama.cpp are asked over HTTP; ``generate`` of transformers is a process with a pipe.
3. Each may use all cores. Slipstream gets what ``make run`` gives it; a peer gets as many threads as there are cores.
4. Slipstream's draft model is the target itself where one is needed, and transformers' assistant is, too: no smaller
   model with its vocabulary is at hand. Both show what that costs, not what it could gain.

It knows nothing about questions or tables.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.completions import Server, TimedCompletion
from bench.fleet import Process, free_port, resident_mib, service, wait_for_drafts
from slipstream.base.errors import ConfigError, Unavailable
from slipstream.wire.target import TargetClient

START_S, PEER_START_S = 180.0, 600.0  # vLLM compiles its model
PEER_MODEL = "model"
PIPE_LIMIT = 1 << 20
SHARED = "target.shared_cores=true"  # as `slipstream run` says
SLIPSTREAM: Mapping[str, tuple[str, ...]] = {
    "plain": ("target.policy.max_nodes=0",),
    "alone": (),
    "ngram": (SHARED, "draft.drafter=ngram"),
    "standalone": (SHARED, "draft.drafter=standalone", "draft.model={model}"),
    "default": (SHARED,),
    "colocated": (SHARED,),  # the same, all in one process
}
WITHOUT_DRAFT = ("plain", "alone")  # and plain looks nothing up either
GREEDY: Mapping[str, Any] = MappingProxyType({})
LLAMACPP: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "speculative": ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3",
                    "--spec-ngram-simple-size-m", "10"),
}


@dataclass(slots=True)
class Serving:
    """Processes, of which one serves OpenAI's completions. ``start`` waits until a target is connected to its drafts:
    it would answer without them."""

    name: str
    processes: dict[str, Process]
    server: Server

    async def start(self) -> None:
        """Start one after the other: a target measures its steps while it starts. Raises Unavailable."""
        for process in self.processes.values():
            process.start()
            await process.ready()
        if "draft" in self.processes:
            target = self.processes["target"]
            async with aclosing(TargetClient(target.address)) as client:
                await wait_for_drafts(client, target.log)

    async def ask(self, prompt: Sequence[int], max_tokens: int, extra: Mapping[str, Any] = GREEDY) -> TimedCompletion:
        """extra: further fields of the request."""
        return await self.server.ask(list(prompt), max_tokens, extra)

    def memory(self) -> dict[str, float]:
        """MiB resident, of each process."""
        return {part: resident_mib(process.pid, children=not process.module)
                for part, process in self.processes.items()}

    async def stop(self) -> None:
        for process in reversed(self.processes.values()):
            process.stop()


def slipstream(kind: str, folder: Path, model: str, dtype: str) -> Serving:
    """Draft, target and router, kind as SLIPSTREAM has it."""
    name = f"slipstream-{kind}"
    settings = (f"model.path={model}", f"model.dtype={dtype}", *(part.format(model=model) for part in SLIPSTREAM[kind]))

    def part(role: str, *own: str) -> Process:
        return service(role, f"{name}-{role}", folder, (*own, *settings))

    drafts = {} if kind in WITHOUT_DRAFT else {"draft": part("draft")}
    target = part("target", f"target.drafts={[draft.address for draft in drafts.values()]}")
    router = part("router", f"router.targets=['{target.address}']", f"router.grpc_listen=127.0.0.1:{free_port()}")
    processes = {**drafts, "target": target, "router": router}
    if kind == "colocated":
        settings_of_all = [setting for process in processes.values() for setting in process.settings]
        processes = {"all": replace(router, module="slipstream", settings=settings_of_all,
                                    arguments=("serve", "--colocated"))}
    return Serving(name, processes, Server(int(router.address.rpartition(":")[2]), Path(model).name))


def peer(name: str, folder: Path, command: Sequence[str]) -> Serving:
    """A server of another project. ``command``: without its port, which follows."""
    port = free_port()
    process = Process("", (), port, folder / f"{name}.log", (*command, "--host", "127.0.0.1", "--port", str(port)),
                      page="/health", ready_s=PEER_START_S)
    return Serving(name, {"server": process}, Server(port, PEER_MODEL))


def llamacpp(kind: str, folder: Path, binary: Path, file: Path) -> Serving:
    """llama.cpp's own server, with a model file of the same weights."""
    threads = str(os.cpu_count() or 1)
    command = [str(binary), "-m", str(file), "-t", threads, "-tb", threads, "-np", "1", "-c", "4096", *LLAMACPP[kind]]
    return peer(f"llamacpp-{kind}", folder, command)


def vllm(folder: Path, environment: Path, model: Path, dtype: str) -> Serving:
    """vLLM's own server. environment: what ``make vllm`` has made. Raises ConfigError."""
    python = environment / "bin" / "python"
    if not python.exists():
        raise ConfigError(f"no vLLM in {environment}; `make vllm` installs it there (minutes, once)")
    command = ["env", "-u", "PYTHONPATH", "VLLM_CPU_KVCACHE_SPACE=1", str(python), "-m",
               "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", PEER_MODEL,
               "--dtype", dtype, "--max-model-len", "4096", "--max-num-seqs", "16"]
    return peer("vllm-plain", folder, command)


@dataclass(slots=True)
class Transformers:
    """``generate`` of transformers, kind as ``bench.peers.generating`` has it."""

    kind: str
    folder: Path
    model: Path
    dtype: str
    name: str = field(init=False)
    process: asyncio.subprocess.Process | None = None

    def __post_init__(self) -> None:
        self.name = f"transformers-{self.kind}"

    async def start(self) -> None:
        """Raises Unavailable."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{self.name}.log").open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bench.peers.generating", str(self.model), self.kind, "--dtype", self.dtype,
                "--threads", str(os.cpu_count() or 1), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                limit=PIPE_LIMIT)
        await self._line()

    async def ask(self, prompt: Sequence[int], max_tokens: int, extra: Mapping[str, Any] = GREEDY) -> TimedCompletion:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompt": list(prompt), "max_tokens": max_tokens}).encode() + b"\n")
        return TimedCompletion(**await self._line())

    async def _line(self) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), START_S)
        except TimeoutError as error:
            self.process.kill()  # a late line would be taken for the next answer
            raise Unavailable(f"{self.name} has printed nothing for {START_S:g} s") from error
        if not line:
            raise Unavailable(f"{self.name} ended; see {self.folder / self.name}.log")
        content: dict[str, Any] = json.loads(line)
        return content

    def memory(self) -> dict[str, float]:
        return {"generate": resident_mib(self.process.pid)} if self.process is not None else {}

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()


System = Serving | Transformers


def llama_server(peers: Path) -> Path:
    """The server that ``make bench-peers`` has built. Raises ConfigError."""
    found = sorted(path for path in peers.glob("**/llama-server") if os.access(path, os.X_OK) and path.is_file())
    if not found:
        raise ConfigError(f"no llama.cpp in {peers}; `make bench-peers` builds it there (minutes, once)")
    return found[-1]


def in_bfloat16(quantize: Path, source: Path, file: Path) -> Path:
    """The GGUF file ``source`` as ``file``, which is whole when it exists, with the weights that Slipstream serves, as
    llama.cpp's own ``quantize`` writes them: matrices in bfloat16, norms in float32. Raises Unavailable."""
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".part")
    command: list[str | Path] = [quantize, "--allow-requantize", source, fresh, "BF16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{quantize} did not write {file}: {done.stderr[-500:]}")
    return fresh.rename(file)
