"""What a build makes beside the sources: ``proto/`` as ``slipstream/v1`` (never committed), and in a wheel the modules
that each round goes through as machine code.

Rules:
1. ``python build_hook.py`` compiles the protos in place, ``python build_hook.py FOLDER`` the modules into a folder;
   ``pip install`` does both through hatchling.
2. A wheel has ``MODULES`` compiled by mypyc, beside their sources: what a round of many sessions costs the host is
   Python there (``make bench-vllm``, ``make bench-scale``). Where no C compiler is, or ``SLIPSTREAM_PURE`` is set (a
   wheel for any machine), they stay as they are: both give the same decisions, bit for bit
   (``tests/test_machine_code.py``).
3. A ``value`` there is a class of C. Its constructor is written out first, as mypyc leaves one that ``dataclass``
   makes to Python. It stands on the empty line behind the class, so no line of a traceback moves.
4. A checkout (``pip install -e``) has none of it: an edited source would not be what runs.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parent
MODULES = (
    "slipstream/decision/beliefs.py", "slipstream/decision/decide.py", "slipstream/decision/policy.py",
    "slipstream/drafting/tree.py", "slipstream/following/chains.py", "slipstream/following/followed.py",
    "slipstream/following/following.py", "slipstream/following/pool.py",
    "slipstream/protocol/messages.py", "slipstream/protocol/session.py", "slipstream/protocol/tree.py",
    "slipstream/wire/codec.py", "draft_service/worker.py", "target_service/loop.py",
    "target_service/sequence.py", "target_service/step.py")
SHARED = "slipstream.compiled"  # what all of them are in; nothing of ours stands beside other people's packages


def compile_protos(root: Path = ROOT) -> None:
    """Write ``slipstream/v1/*_pb2.py``, ``*_pb2_grpc.py`` and their stubs. Raises RuntimeError if protoc refuses."""
    from grpc_tools import protoc  # a build tool: not there at run time

    include = Path(protoc.__file__).parent / "_proto"
    sources = sorted((root / "proto").rglob("*.proto"))
    arguments = ["protoc", f"-I{root / 'proto'}", f"-I{include}", f"--python_out={root}", f"--grpc_python_out={root}"]
    # pip puts console scripts beside the interpreter, which need not be on PATH.
    plugin = shutil.which("protoc-gen-mypy") or shutil.which("protoc-gen-mypy", path=str(Path(sys.executable).parent))
    if plugin and importlib.util.find_spec("mypy_protobuf"):  # in a build of its own the plugin would find nothing
        arguments += [f"--plugin=protoc-gen-mypy={plugin}", f"--mypy_out={root}"]
    if protoc.main(arguments + [str(path) for path in sources]) != 0:
        raise RuntimeError("protoc refused the files under proto/")
    (root / "slipstream" / "v1" / "__init__.py").write_text('"""Generated from proto/; do not edit."""\n')


def compiler() -> str | None:
    """The C compiler that this Python's extensions are built with; None: it or Python's headers are not here."""
    words = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return shutil.which(words[0]) if words and headers.is_file() else None


def _plain(member: ast.stmt) -> bool:
    """Whether a value may have it: a field with a plain default, or what is no field and makes none."""
    if isinstance(member, ast.AnnAssign):
        special = ast.unparse(member.annotation).startswith(("ClassVar", "InitVar", "KW_ONLY"))
        return not special and not isinstance(member.value, ast.Call)
    return getattr(member, "name", "") not in ("__init__", "__post_init__")


def with_constructors(source: str) -> str:
    """``source`` with its values as dataclasses that have written constructors. Raises ValueError for a value that is
    more than a list of fields with plain defaults."""
    imported = "from slipstream.base.value import value", "from dataclasses import dataclass as value"
    lines = [*source.replace(*imported).splitlines(), ""]
    for kind in ast.parse(source).body:
        if not (isinstance(kind, ast.ClassDef) and any("value" in ast.unparse(one) for one in kind.decorator_list)):
            continue
        fields = [one for one in kind.body if isinstance(one, ast.AnnAssign)]
        plain = not kind.bases and all(map(_plain, kind.body)) and ast.unparse(kind.decorator_list[0]) == "value"
        if not plain or lines[kind.end_lineno or 0]:
            raise ValueError(f"{kind.name}: a value has fields with plain defaults, and an empty line behind it")
        given = ", ".join(map(ast.unparse, fields))
        kept = "; ".join(f"self.{name} = {name}" for name in (ast.unparse(one.target) for one in fields))
        lines[kind.end_lineno or 0] = f"    def __init__(self, {given}) -> None: {kept}"
    return "\n".join(lines) + "\n"


def compile_modules(out: Path, root: Path = ROOT, level: str = "2") -> dict[str, str]:
    """Write ``MODULES`` as extensions below ``out``. level: of the C compiler's optimisation. Returns what each file is
    called in a wheel. Raises SystemExit where a module is not well typed."""
    mypyc, setuptools = importlib.import_module("mypyc.build"), importlib.import_module("setuptools")
    # What modules import may not be there, as in a build of its own: it is untyped then, and no concern of ours.
    wanted = ["--ignore-missing-imports", "--follow-imports=skip", f"--cache-dir={out / 'cache'}",
              f"--config-file={out / 'mypy.ini'}", *MODULES]
    written = out / "sources"
    for package in {name.split("/")[0] for name in MODULES}:
        shutil.copytree(root / package, written / package, dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.safetensors", "*.svg", "*.pyi"))
    # Of types mypy reads ours and numpy's: all that is imported would take it minutes, and the C would be the same.
    # Those of protos are in stubs alone, which a build of its own has not.
    (out / "mypy.ini").write_text("[mypy]\n[mypy-slipstream.*,draft_service.*,target_service.*,numpy.*]\n"
                                  "follow_imports = silent\n[mypy-slipstream.v1.*]\nfollow_imports = skip\n")
    for name in MODULES:
        file = written / name
        file.write_text(with_constructors(file.read_text(encoding="utf-8")), encoding="utf-8")
    with chdir(written):
        found = mypyc.mypycify(wanted, target_dir=str(out / "c"), group_name=SHARED, opt_level=level, debug_level="0")
        # What gcc thinks of made code is nobody's concern, and to look takes it 20 s, also where -w keeps it to itself.
        for extension in found:
            extension.extra_compile_args += ["-w", "-Wno-all"]
        command = setuptools.Distribution({"ext_modules": found}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(out / "lib"), str(out / "temp")
        command.ensure_finalized()
        command.run()
    return {str(file): str(file.relative_to(out / "lib")) for file in sorted((out / "lib").rglob("*"))
            if file.is_file()}


try:
    Interface: Any = importlib.import_module("hatchling.builders.hooks.plugin.interface").BuildHookInterface
except ModuleNotFoundError:
    Interface = object


class CustomBuildHook(Interface):  # type: ignore[misc]
    """hatchling looks for exactly this name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compile_protos(Path(self.root))
        if self.target_name != "wheel" or version == "editable" or os.environ.get("SLIPSTREAM_PURE"):
            return
        if compiler() is None:
            self.app.display_warning("no C compiler is here: the wheel has no compiled modules")
            return
        self.made = TemporaryDirectory()
        errors = importlib.import_module("setuptools.errors")
        try:
            found = compile_modules(Path(self.made.name), Path(self.root))
        except (errors.CompileError, errors.LinkError, errors.PlatformError, errors.ExecError) as error:
            self.app.display_warning(f"the wheel has no compiled modules: {error}")
            return
        build_data["force_include"].update(found)
        build_data["pure_python"], build_data["infer_tag"] = False, True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "made"):
            self.made.cleanup()


if __name__ == "__main__":
    if sys.argv[1:]:
        compile_modules(Path(sys.argv[1]).resolve(), ROOT, *sys.argv[2:3])
    else:
        compile_protos()
