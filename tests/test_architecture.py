"""The house keeps its rules: sizes, what is banned, and import contracts that say what the design says."""

from __future__ import annotations

import ast
import configparser
from collections.abc import Collection, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("slipstream", "draft_service", "target_service", "router_service", "bench", "deploy")
SOURCES = sorted(path for room in (*ROOMS, "integrations") for path in (ROOT / room).rglob("*.py")
                 if path.parent.name != "v1")
FILE_LINES = 600
FUNCTION_LINES = 45
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
BANNED_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "os.system"}
FORBIDDEN_NAMES = ("util", "helper", "manager", "common", "misc", "_v2", "impl")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_one_noun_of_readable_size(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= FILE_LINES, f"{path} has more than {FILE_LINES} lines: split it by noun"
    assert not [word for word in FORBIDDEN_NAMES if word in path.stem], f"{path}: name the noun that lives here"
    tree = ast.parse(text)
    assert ast.get_docstring(tree), f"{path} has no docstring: what it is, its rules, what it does not know"
    long = {node.name: size for node in functions(tree)
            if (size := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES}
    assert not long, f"{path}: functions of more than {FUNCTION_LINES} lines: {long}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_unpickles_or_evaluates(path: Path) -> None:
    assert not list(violations(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("source", [
    "import pickle", "from marshal import loads", "import shelve as s", "eval('1')", "torch.load(path)",
    "AutoModel.from_pretrained(path, trust_remote_code=True)", "yaml.load(text)",
])
def test_the_ban_sees_what_it_bans(source: str) -> None:
    assert list(violations(ast.parse(source)))


def test_settings_do_not_come_from_the_environment() -> None:
    readers = {str(path.relative_to(ROOT)) for path in SOURCES for node in ast.walk(ast.parse(path.read_text("utf-8")))
               if isinstance(node, ast.Attribute) and dotted(node) in ("os.environ", "os.getenv", "os.putenv")}
    assert readers <= {"slipstream/models/folder.py", "slipstream/base/offload.py", "slipstream/cli/process.py",
                       "bench/fleet.py", "deploy/pip.py", "build_hook.py", "target_service/vllm_start.py",
                       "integrations/vllm/slipstream_vllm/remote.py",
                       "integrations/vllm/slipstream_vllm/signals.py"}, (
        "the environment names the user's cache folder, is passed on to child processes, and tells a build and vLLM's "
        "processes what they can be told in no other way")


def test_no_files_import_one_another_in_a_circle() -> None:
    """Inside functions too, and for types alone; a package stands for its ``__init__``."""
    modules = {module_of(path): path for path in SOURCES}
    TopologicalSorter({module: set(imports(path, modules)) for module, path in modules.items()}).prepare()


def test_import_contracts_cover_the_design() -> None:
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    assert set(contracts["importlinter"]["root_packages"].split()) == set(ROOMS)

    def words(contract: str, key: str) -> set[str]:
        return set(contracts[f"importlinter:contract:{contract}"][key].split())

    assert {"slipstream.engine", "slipstream.drafting"} <= words("wire", "forbidden_modules")
    assert {"slipstream.wire", "slipstream.decision"} <= words("engine", "forbidden_modules")
    assert words("target", "forbidden_modules") == {"slipstream.drafting"}
    assert words("draft", "forbidden_modules") == {"slipstream.decision"}
    assert "torch" in words("router", "forbidden_modules") & words("pure", "forbidden_modules")
    assert words("grpc", "ignore_imports") == {
        "->", "grpc", "grpc_health", "grpc_reflection", "kubernetes", "slipstream.wire.*", "slipstream.wire.cluster",
        "slipstream.v1.*"}
    assert words("transformers", "ignore_imports") == {"slipstream.engine.hf", "->", "transformers"}
    assert words("prometheus", "ignore_imports") == {"slipstream.observe.metrics", "->", "prometheus_client"}
    layers = contracts["importlinter:contract:layers"]["layers"].replace(":", " ").replace("|", " ").split()
    rooms = [f"slipstream.{path.name}" for path in (ROOT / "slipstream").iterdir()
             if path.name not in ("v1", "__pycache__") and path.is_dir()]
    assert set(rooms) <= set(layers), "give every folder of the library its layer in .importlinter"
    loose = sorted(path.name for path in (ROOT / "slipstream").glob("*.py"))
    assert loose == ["__init__.py", "__main__.py", "client.py"], "a module of the library lives in a folder"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "integrations":
        parts = parts[2:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, modules: Collection[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            # What is no module of the package stands in its ``__init__``.
            names = [inner if (inner := f"{node.module}.{name}") in modules else str(node.module) for name in names]
        yield from (name for name in names if name in modules)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def violations(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.partition(".")[0] in BANNED_MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in BANNED_MODULES:
                yield module
            case ast.Call(func=func, keywords=keywords):
                if dotted(func) in BANNED_CALLS:
                    yield dotted(func)
                yield from (key.arg for key in keywords if key.arg == "trust_remote_code"
                            and not (isinstance(key.value, ast.Constant) and key.value.value is False))


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
