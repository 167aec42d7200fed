"""``python -m slipstream.engine.native [FOLDER]``: build the CPU kernels for every kind of processor, beside
their source or into a folder. Images are built with it, as they contain no compiler.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slipstream.engine.native.compiled_kernels import SOURCE, build_all


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m slipstream.engine.native", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=SOURCE.parent)
    for path in build_all(parser.parse_args().folder):
        print(path)


if __name__ == "__main__":
    main()
