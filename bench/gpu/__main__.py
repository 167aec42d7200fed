"""``make gpu``: run the jobs, one after the other, and print a table of their findings.

Each job is a process of its own with its own limit (``job``), so one that dies costs its own rows; it is run once
more for its first case only. Each finding is written to ``gpu.jsonl`` in the folder ``--out`` at once; ``gpu.json``
there is complete after each job, and a table of all is printed at the end. All of it takes at most ten minutes of a
GPU and needs no network. ``--device cpu --rehearse`` runs every line of it anywhere, on shapes so small that the
numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.gpu.job import Job, JobDied, prepare, run_job
from bench.gpu.stage import Finding, StageOptions
from bench.gpu.stages import JOBS, STAGES
from bench.report import Row, exit_on_error, save, write
from slipstream.engine.model import device_of
from slipstream.models.folder import KNOWN
from slipstream.models.folder import prepare as prepare_model

LIMIT_S = 570.0
FAILURES = ("DIED", "FAILED")  # ``what`` of the row that says why a job ended early


def run(jobs: Sequence[Job], options: StageOptions, out: Path, limit_s: float) -> list[Row]:
    """The rows of all jobs. limit_s: of all together; a job with no time left has a row that says so."""
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    prepare(jobs)
    began_s = time.perf_counter()
    with (out / "gpu.jsonl").open("w", encoding="utf-8") as lines:
        for job in jobs:
            at_s = time.perf_counter() - began_s
            print(f"-- {job.name}, {at_s:.0f} s after the start", flush=True)
            for finding in _run_with_retry(job, options, limit_s - at_s):
                rows.append(_row(job.name, finding))
                at_s = time.perf_counter() - began_s
                lines.write(json.dumps({"at_s": round(at_s, 2), **rows[-1]}) + "\n")
                lines.flush()
                print("  ", *(value for value in rows[-1].values() if value != ""), flush=True)
            save("gpu", rows, out)
    return rows


def _run_with_retry(job: Job, options: StageOptions, remaining_s: float) -> Iterator[Finding]:
    """Run a job; if it dies on the device, run its first case again, in half the time."""
    limit_s = min(job.limit_s, remaining_s)
    if limit_s <= 0.0:
        yield Finding("not run", "the time was over")
        return
    for narrow, prefix, try_limit_s in ((False, "", limit_s), (True, "once more: ", limit_s / 2)):
        try:
            for finding in run_job(job, replace(options, shape=job.shape, narrow=narrow), try_limit_s):
                yield replace(finding, what=prefix + finding.what)
            return
        except JobDied as death:
            yield Finding("DIED" if death.on_device else "FAILED", f"{prefix}{death}")
            if not death.on_device:
                return


def _row(stage: str, finding: Finding) -> Row:
    value = finding.value
    if isinstance(value, float):
        value = f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return {"stage": stage, "what": finding.what, "value": value, "unit": finding.unit, "expected": finding.expected}


@exit_on_error()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=" ".join(STAGES), help="names with spaces between; else all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", help="a folder or a known name for answers; else random")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of all jobs together")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes: does it run?")
    options = parser.parse_args(arguments)
    names = options.stages.split()
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"no stage {unknown[0]}; there are {', '.join(STAGES)}")
    model = prepare_model(options.model) if options.model in KNOWN else Path(options.model) if options.model else None
    stage_options = StageOptions(device_of(options.device), not options.rehearse, model, options.repeats)
    rows = run([job for job in JOBS if job.stage in names], stage_options, options.out, options.limit_s)
    title = "a rehearsal: these numbers mean nothing" if options.rehearse else "the engine on one device"
    write("gpu", rows, title, options.out)
    return int(any(row["what"] in FAILURES for row in rows))


if __name__ == "__main__":
    sys.exit(main())
