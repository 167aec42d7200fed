"""``make fuzz``: search for bytes that a door neither lets in nor refuses, led by the code that they reach (atheris).

Rules:
1. Each door is searched by a process of its own, which libFuzzer ends at the first find: the input is printed, and its
   file named.
2. What reached new code when it came is kept (``kept``), the shortest first.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tests_fuzz import kept

MEMORY_MB = 4096  # and so is one that takes more
FINDS = Path("build/fuzz")


def search(door: str, runs: int, seconds: int, seconds_each: int) -> str:
    """A line that says what was done. Exits with libFuzzer's code where it finds something."""
    with tempfile.TemporaryDirectory(prefix=f"fuzz-{door}-") as made:
        for number, data in enumerate(kept.read(door)):
            (Path(made) / f"kept-{number}").write_bytes(data)
        told = _fuzz(door, f"-runs={runs}", f"-max_total_time={seconds}", f"-timeout={seconds_each}",
                     "-print_final_stats=1", made)
        count = kept.write(door, [file.read_bytes() for file in Path(made).iterdir()])
    executed = re.search(r"number_of_executed_units:\s+(\d+)", told)
    reached = re.findall(r"cov: (\d+)", told)
    return (f"{door:16} {int(executed[1]) if executed else 0:>9,} inputs, {reached[-1] if reached else '?':>6} places "
            f"reached, {count} kept")


def _fuzz(door: str, *flags: str) -> str:
    command = [sys.executable, "-m", "tests_fuzz.one", door, f"-rss_limit_mb={MEMORY_MB}",
               f"-artifact_prefix={FINDS}/", *flags]
    FINDS.mkdir(parents=True, exist_ok=True)
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                         check=False)
    if ran.returncode:
        print(ran.stdout[-8000:], file=sys.stderr)
        print(f"{door}: a find; the input is in the file that the last lines name", file=sys.stderr)
        sys.exit(ran.returncode)
    return ran.stdout


def main() -> None:
    from tests_fuzz.doors import DOORS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("doors", nargs="*", default=list(DOORS), metavar="DOOR", help=f"of {', '.join(DOORS)}; all")
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs of each door, at most")
    parser.add_argument("--seconds", type=int, default=300, help="of each door, at most")
    parser.add_argument("--seconds-each", type=int, default=10, help="an input that takes longer is a find: cost comes "
                        "before work; more where others use the machine")
    arguments = parser.parse_args()
    if find_spec("atheris") is None:
        parser.error("atheris is missing: make fuzz installs it")
    for door in arguments.doors:
        if door not in DOORS:
            parser.error(f"no door {door!r}; there are {', '.join(DOORS)}")
    for door in arguments.doors:
        print(search(door, arguments.runs, arguments.seconds, arguments.seconds_each), flush=True)


if __name__ == "__main__":
    main()
