"""Compile ``proto/`` into ``slipstream/v1`` (never committed): a build hook, and a command of its own.

``python build_protos.py`` does it in place; ``pip install`` does it through hatchling.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent


def compile_protos(root: Path = ROOT) -> None:
    """Write ``slipstream/v1/*_pb2.py``, ``*_pb2_grpc.py`` and their stubs. Raises RuntimeError if protoc refuses."""
    from grpc_tools import protoc  # a build tool: not there at run time

    include = Path(protoc.__file__).parent / "_proto"
    sources = sorted((root / "proto").rglob("*.proto"))
    arguments = ["protoc", f"-I{root / 'proto'}", f"-I{include}", f"--python_out={root}", f"--grpc_python_out={root}"]
    # pip puts console scripts beside the interpreter, which need not be on PATH.
    plugin = shutil.which("protoc-gen-mypy") or shutil.which("protoc-gen-mypy", path=str(Path(sys.executable).parent))
    if plugin:
        arguments += [f"--plugin=protoc-gen-mypy={plugin}", f"--mypy_out={root}"]
    if protoc.main(arguments + [str(path) for path in sources]) != 0:
        raise RuntimeError("protoc refused the files under proto/")
    (root / "slipstream" / "v1" / "__init__.py").write_text('"""Generated from proto/; do not edit."""\n')


try:
    Interface: Any = importlib.import_module("hatchling.builders.hooks.plugin.interface").BuildHookInterface
except ModuleNotFoundError:
    Interface = object


class CustomBuildHook(Interface):  # type: ignore[misc]
    """hatchling looks for exactly this name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compile_protos(Path(self.root))


if __name__ == "__main__":
    compile_protos()
