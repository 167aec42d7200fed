"""``make bench-load``: aiperf, a public load client, against the router: plain and as ``make run`` configures it.

Requests arrive by chance (Poisson) at a few rates; prompts are our own chat and copy questions in turn. What aiperf
says is printed as it is: time to the first token, time between tokens, tokens a second of all answers. It and the
services share the machine, so it takes some of what it measures. Beyond the rate that the machine can serve, answers
share its steps and slow one another down.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from rich.progress import track

from bench.asking import SETS, own, read
from bench.peers.systems import Slipstream
from bench.report import Row, finished, write
from slipstream.base.config import ModelSection
from slipstream.base.errors import ConfigError, Unavailable
from slipstream.models.folder import resolve

LOGS = Path("build/bench/logs/load")
KINDS = ("plain", "default")
MODEL = ModelSection().path
FIGURES = {"first_p50_ms": ("time_to_first_token", "p50"), "first_p99_ms": ("time_to_first_token", "p99"),
           "between_p50_ms": ("inter_token_latency", "p50"), "between_p99_ms": ("inter_token_latency", "p99"),
           "tokens_per_s": ("output_token_throughput", "avg"), "answers": ("request_count", "avg")}


def questions(file: Path) -> Path:
    """Chat and copy questions in turn, as aiperf reads them."""
    texts = [q.text for pair in zip([q for q in own() if q.set == "chat"] * 2, read(SETS, "copy", 12), strict=True)
             for q in pair]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return file


def command(aiperf: Path, port: int, rate: float, count: int, file: Path, out: Path, max_tokens: int) -> list[str]:
    """How aiperf is called."""
    return [str(aiperf), "profile", "--model", MODEL, "--url", f"http://127.0.0.1:{port}", "--endpoint-type", "chat",
            "--streaming", "--tokenizer", str(resolve(MODEL)), "--use-server-token-count", "--request-rate", str(rate),
            "--request-rate-mode", "poisson", "--request-count", str(count), "--input-file", str(file),
            "--custom-dataset-type", "single_turn", "--artifact-dir", str(out), "--ui", "none", "--random-seed", "7",
            "--extra-inputs", f"max_tokens:{max_tokens}", "--extra-inputs", "temperature:0"]


def row_of(system: str, rate: float, exported: dict[str, Any]) -> Row:
    """What aiperf exported, as a row. Raises Unavailable for a run without answers."""
    try:
        return {"system": system, "requests_per_s": rate,
                **{name: float(exported[metric][which]) for name, (metric, which) in FIGURES.items()}}
    except KeyError as error:
        raise Unavailable(f"aiperf has no {error} of {system} at {rate:g} requests a second; see {LOGS}") from error


async def loaded(system: Slipstream, rate: float, arguments: argparse.Namespace, file: Path) -> Row:
    """One run of aiperf. Raises Unavailable."""
    out = LOGS / f"{system.name}-{rate:g}"
    count = max(8, round(rate * arguments.seconds))
    aiperf = arguments.peers / "bin" / "aiperf"
    call = command(aiperf, system.server.port, rate, count, file, out, arguments.max_tokens)
    process = await asyncio.create_subprocess_exec(*call, stdout=asyncio.subprocess.PIPE,
                                                   stderr=asyncio.subprocess.STDOUT)
    said, _ = await process.communicate()
    exported = out / "profile_export_aiperf.json"
    if process.returncode or not await asyncio.to_thread(exported.is_file):
        raise Unavailable(f"aiperf ended with {process.returncode}:\n{said.decode(errors='replace')[-1500:]}")
    return row_of(system.name, rate, json.loads(await asyncio.to_thread(exported.read_text)))


async def run(arguments: argparse.Namespace) -> list[Row]:
    """Both systems at all rates, in turn."""
    if not (arguments.peers / "bin" / "aiperf").is_file():
        raise ConfigError(f"no aiperf in {arguments.peers}; `make bench-peers` installs it")
    file, rows = questions(LOGS / "questions.jsonl"), list[Row]()
    systems = [Slipstream(kind, LOGS, MODEL, ModelSection().dtype) for kind in KINDS]
    try:
        for system in systems:
            await system.start()
        for rate, system in track([(r, s) for r in arguments.rates for s in systems], "loading"):
            rows.append(await loaded(system, rate, arguments, file))
    finally:
        for system in systems:
            await system.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="what `make bench-peers` installed")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="requests a second")
    parser.add_argument("--seconds", type=float, default=16.0, help="of arrivals, for each rate")
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    rows = finished(run(arguments))
    write("load", rows, f"bench-load: aiperf, chat completions, answers of at most {arguments.max_tokens} tokens")


if __name__ == "__main__":
    main()
