"""Stages ``info``, ``kernel``, ``equal`` and ``suite`` of ``make gpu``: what machine is this, is attention right for a
shape of heads, is a captured step the one that it was captured from, do the tests pass?
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata

import numpy as np
import torch

from bench.gpu.pace import decoder_of
from bench.gpu.shapes import LLAMA_8B, config_of
from bench.gpu.stage import Finding, StageOptions, capture_of, copy_rate, median_s, paged_attention, pool_for
from bench.inputs import chains
from slipstream.engine.attention import disagreement, largest_row_error
from slipstream.engine.graphs import TRIAL_LIMIT, GraphedDecoder

DEVICE_TESTS = ("tests/test_device.py", "tests/test_device_drafters.py", "tests/test_attention.py",
                "tests/test_sampling.py")
FEW_LAYERS, CONTEXT = 2, 100
STEPS = ((1, 1), (9, 1), (64, 1), (8, 8), (72, 8), (64, 64))  # rows, sessions
COUNT = re.compile(r"(\d+) (passed|failed|error|skipped)")  # in the last line of pytest
PACKAGES = ("numpy", "transformers", "tokenizers", "safetensors", "triton", "flashinfer-python")


def info_stage(options: StageOptions) -> Iterator[Finding]:
    yield Finding("python", platform.python_version())
    yield Finding("torch", torch.__version__)
    for package in PACKAGES:
        try:
            yield Finding(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Finding(package, "not installed")
    if options.device.type == "cuda":
        properties = torch.cuda.get_device_properties(options.device)
        yield Finding("device", properties.name)
        yield Finding("compute capability", f"{properties.major}.{properties.minor}")
        yield Finding("memory", properties.total_memory / 1e9, "GB")
        yield Finding("CUDA of torch", str(torch.version.cuda))
    yield Finding("copy, bytes read and written", copy_rate(options) / 1e9, "GB/s", "about 3000 on H100, 4300 on H200")
    size = 8192 if options.full else 128
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=options.device) for _ in range(2))
    rate = 2 * size**3 / median_s(lambda: a @ b, options.device, options.repeats)
    yield Finding(f"bfloat16 product of {size} x {size}", rate / 1e12, "TFLOP/s", "770 to 800 on H100")


def kernel_stage(options: StageOptions) -> Iterator[Finding]:
    """``options.shape``: numbers of a head x query heads of a KV head."""
    size, group = map(int, options.shape.split("x"))
    config = replace(config_of(LLAMA_8B), head_dim=size, num_kv_heads=2, num_heads=2 * group)
    problem = disagreement(paged_attention(options, config), config, torch.bfloat16, options.device)
    yield Finding("trial beside torch's attention", problem or "the same", expected="the same")


@torch.inference_mode()
def equal_stage(options: StageOptions) -> Iterator[Finding]:
    """A few layers of the large shape; each number of rows once, on slots in any order."""
    config = replace(options.config, num_layers=FEW_LAYERS)
    attention = paged_attention(options, config)
    plain = decoder_of(config, options, attention)
    graphed = GraphedDecoder(plain, attention, capture_of(options))
    slots = 64 * (CONTEXT + 64)
    pool = pool_for(plain, slots + graphed.spare_slots)
    steps = STEPS[:1] if options.narrow else STEPS
    for rows, sessions in steps:
        rows_each, order = rows // sessions, np.random.default_rng(0).permutation(slots)
        session_slots = np.split(order[: sessions * (CONTEXT + rows_each)], sessions)
        batch = chains(session_slots, rows_each).build(plain.device)
        expected, _ = plain.forward(batch, pool)
        actual, _ = graphed.forward(batch, pool)
        error = largest_row_error(actual, expected)
        yield Finding(f"{rows} rows of {sessions} sessions: off by", error, "of a row's length", f"< {TRIAL_LIMIT}")
    yield Finding("graphs that serve", graphed.num_graphs, f"of {len(steps)}")


def suite_stage(options: StageOptions) -> Iterator[Finding]:
    """Each file in a process of its own: after a process has lost the device, all its later tests fail."""
    began_s, counts, exit_codes = time.perf_counter(), Counter[str](), list[int]()
    for file in DEVICE_TESTS:
        command = ["env", "COLUMNS=240",  # in fewer, reasons are cut off
                   sys.executable, "-u", "-m", "pytest", "-s", "-p", "no:cacheprovider",
                   "--device", str(options.device), file]
        output, summary = list[str](), ""
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as tests:
            assert tests.stdout is not None
            for line in tests.stdout:
                output.append(line)
                yield from _findings_in(line)
                summary = line if COUNT.search(line) and " in " in line else summary
        exit_codes.append(tests.returncode)
        if tests.returncode:  # what failed first says most
            text = "".join(output)
            print(text[text.find("= FAILURES =") :][:4000], text[-2000:], sep="\n")
        for number, word in COUNT.findall(summary):
            counts[word] += int(number)
    yield Finding("tests passed", counts["passed"])
    yield Finding("tests that failed", counts["failed"] + counts["error"], expected="0")
    yield Finding("first exit status that is not 0", next((code for code in exit_codes if code), 0), expected="0")
    yield Finding("took", time.perf_counter() - began_s, "s")


def _findings_in(line: str) -> Iterator[Finding]:
    """From a line of pytest: a number that a test printed, or which test failed and why."""
    if measured := re.match(r"= (.+) \| (.+) \| (.+)$", line):
        what, value, unit = measured.groups()
        yield Finding(what, float(value), unit)
    elif failed := re.match(r"(?:FAILED|ERROR) (\S+\.py.*?)(?: - (.+))?$", line):
        yield Finding(f"failed: {failed[1]}", failed[2] or "", expected="passed")
