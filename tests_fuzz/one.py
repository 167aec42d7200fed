"""One door under libFuzzer: ``python -m tests_fuzz.one DOOR [flags of libFuzzer] [folders]``."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["slipstream", "router_service", "jinja2"]):
    from tests_fuzz.doors import DOORS


def main() -> None:
    name = sys.argv.pop(1)
    door = DOORS[name]
    folders = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    for folder in folders:
        for number, data in enumerate(door.seeds()):
            (folder / f"seed-{number}").write_bytes(data)

    def enter(data: bytes) -> None:
        door.knock(data)

    atheris.Setup(sys.argv, enter)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
