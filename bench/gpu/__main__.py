"""``make gpu``: the stages, one after the other, and a table of what they found.

Stages run one after the other, each by itself: one that fails loses nothing of the others. All of it takes minutes on a
GPU and needs no network. Numbers come as they are found; a table of all stands at the end, and ``gpu.json`` in the
folder ``--out`` is complete after each stage. ``--device cpu --rehearse`` runs every line of it anywhere, on shapes so
small that the numbers mean nothing.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch

from bench.gpu.answers import answers_stage
from bench.gpu.pace import choose_stage, decode_stage, fp8_stage, fused_stage, graphs_stage, tree_stage
from bench.gpu.stage import Finding, Given, copy_rate, free, seconds
from bench.report import Row, save, write
from slipstream.engine.model import device_of
from slipstream.models.folder import KNOWN, prepare

Stage = Callable[[Given], Iterator[Finding]]

DEVICE_TESTS = ("tests/test_device.py", "tests/test_attention.py", "tests/test_sampling.py")
PACKAGES = ("numpy", "transformers", "tokenizers", "safetensors", "triton", "flashinfer-python")
SUITE_S = 300
LIMIT_S = 500.0


def info_stage(given: Given) -> Iterator[Finding]:
    yield Finding("python", platform.python_version())
    yield Finding("torch", torch.__version__)
    for package in PACKAGES:
        try:
            yield Finding(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Finding(package, "not installed")
    if given.device.type == "cuda":
        properties = torch.cuda.get_device_properties(given.device)
        yield Finding("device", properties.name)
        yield Finding("compute capability", f"{properties.major}.{properties.minor}")
        yield Finding("memory", properties.total_memory / 1e9, "GB")
        yield Finding("CUDA of torch", str(torch.version.cuda))
    yield Finding("copy, bytes read and written", copy_rate(given) / 1e9, "GB/s", "about 3000 on H100, 4300 on H200")
    size = 8192 if given.full else 128
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=given.device) for _ in range(2))
    rate = 2 * size**3 / seconds(lambda: a @ b, given.device, given.repeats)
    yield Finding(f"bfloat16 product of {size} x {size}", rate / 1e12, "TFLOP/s", "770 to 800 on H100")
    free()


def suite_stage(given: Given) -> Iterator[Finding]:
    began = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "--device", str(given.device)]
    done = subprocess.run([*command, *DEVICE_TESTS], capture_output=True, text=True, timeout=SUITE_S, check=False)
    print(done.stdout[-4000:] + done.stderr[-2000:] if done.returncode else "")
    for what, value, unit in re.findall(r"^= (.+) \| (.+) \| (.+)$", done.stdout, re.MULTILINE):
        yield Finding(what, float(value), unit)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", done.stdout)}
    yield Finding("tests passed", counts.get("passed", 0))
    yield Finding("tests that failed", sum(n for word, n in counts.items() if word in ("failed", "error", "errors")),
                  expected="0")
    yield Finding("exit status", done.returncode, expected="0")
    yield Finding("took", time.perf_counter() - began, "s")


STAGES: dict[str, Stage] = {
    "info": info_stage, "suite": suite_stage, "fused": fused_stage, "graphs": graphs_stage, "choose": choose_stage,
    "decode": decode_stage, "fp8": fp8_stage, "tree": tree_stage, "answers": answers_stage,
}


def run(names: Sequence[str], given: Given, out: Path, limit_s: float) -> list[Row]:
    """The rows of all stages; a stage that fails, or comes too late, has a row that says so."""
    rows: list[Row] = []
    began = time.perf_counter()
    for name in names:
        if time.perf_counter() - began > limit_s:
            rows.append(_row(name, Finding("not run", f"{limit_s:.0f} s were over")))
            continue
        print(f"-- {name}, {time.perf_counter() - began:.0f} s after the start", flush=True)
        try:
            for finding in STAGES[name](given):
                rows.append(_row(name, finding))
                print("  ", *(value for value in rows[-1].values() if value != ""), flush=True)
        except Exception as error:  # whatever a stage meets, the others are still worth their time
            traceback.print_exc()
            rows.append(_row(name, Finding("FAILED", f"{type(error).__name__}: {str(error)[:200]}")))
        free()
        save("gpu", rows, out)
    return rows


def _row(stage: str, found: Finding) -> Row:
    value = found.value
    if isinstance(value, float):
        value = f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return {"stage": stage, "what": found.what, "value": value, "unit": found.unit, "expected": found.expected}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=" ".join(STAGES), help="names with spaces between; else all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", help="a folder or a known name for answers; else random")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="no stage begins later than this")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes: does it run?")
    options = parser.parse_args(arguments)
    names = options.stages.split()
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"no stage {unknown[0]}; there are {', '.join(STAGES)}")
    model = prepare(options.model) if options.model in KNOWN else Path(options.model) if options.model else None
    given = Given(device_of(options.device), not options.rehearse, model, options.repeats)
    rows = run(names, given, options.out, options.limit_s)
    title = "a rehearsal: these numbers mean nothing" if options.rehearse else "the engine on one device"
    write("gpu", rows, title, options.out)
    return int(any(row["what"] == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
