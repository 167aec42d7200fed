"""Stages ``info`` and ``suite`` of ``make gpu``: what machine this is, and do its tests pass?"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata

import torch

from bench.gpu.stage import Finding, Given, copy_rate, seconds

DEVICE_TESTS = ("tests/test_device.py", "tests/test_attention.py", "tests/test_sampling.py")
PACKAGES = ("numpy", "transformers", "tokenizers", "safetensors", "triton", "flashinfer-python")


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


def suite_stage(given: Given) -> Iterator[Finding]:
    began = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "--device", str(given.device)]
    done = subprocess.run([*command, *DEVICE_TESTS], capture_output=True, text=True, check=False)
    print(done.stdout[-4000:] + done.stderr[-2000:] if done.returncode else "")
    for what, value, unit in re.findall(r"^= (.+) \| (.+) \| (.+)$", done.stdout, re.MULTILINE):
        yield Finding(what, float(value), unit)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", done.stdout)}
    yield Finding("tests passed", counts.get("passed", 0))
    yield Finding("tests that failed", sum(n for word, n in counts.items() if word in ("failed", "error", "errors")),
                  expected="0")
    yield Finding("exit status", done.returncode, expected="0")
    yield Finding("took", time.perf_counter() - began, "s")
