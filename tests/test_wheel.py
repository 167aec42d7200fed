"""What `pip install slipstream` brings is little enough to live beside vLLM and SGLang, and is enough."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from slipstream import __version__

ROOT = Path(__file__).parent.parent
# As their wheels say; gRPC through OpenTelemetry's exporter there, and smg-grpc-servicer here.
VLLM_0_32 = (
    "protobuf!=6.30.*,!=6.31.*,!=6.32.*,!=6.33.0.*,!=6.33.1.*,!=6.33.2.*,!=6.33.3.*,!=6.33.4.*,>=5.29.6", "numpy",
    "pydantic>=2.12.0", "prometheus_client>=0.18.0", "tokenizers>=0.23.2", "pyyaml", "fastapi<0.137.0,>=0.133.0",
    "transformers<5.20.0,>=5.16.1", "torch==2.13.0", "grpcio<2.0.0,>=1.63.2")
SGLANG_0_5_23 = (
    "protobuf>=6.33.5", "numpy", "pydantic", "prometheus-client>=0.20.0", "tokenizers==0.23.2", "fastapi",
    "transformers==5.19.0", "torch==2.14.1", "grpcio>=1.81.1", "grpcio-health-checking>=1.81.1")
RAISED = {"grpcio"}  # what they are content with older
# Modules beside those that another engine needs: a service's own gRPC server, Kubernetes, OpenTelemetry's own packages.
APART = {"slipstream.wire.server", "slipstream.wire.inference", "slipstream.wire.cluster", "slipstream.observe.otel"}
IMPORTS = """
import importlib, pkgutil, sys
blocked, apart, wanted = set({blocked!r}), set({apart!r}), {wanted!r}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
for name in wanted:
    room = importlib.import_module(name)
    for _, module, _ in pkgutil.walk_packages(getattr(room, "__path__", ()), name + "."):
        if module not in apart and "adapter_" not in module:
            importlib.import_module(module)
"""


def project(folder: str = ".") -> dict[str, Any]:
    with (ROOT / folder / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file))


def required(lines: list[str] | tuple[str, ...], python: str = "3.11") -> dict[str, Requirement]:
    """What ``lines`` ask for by name, on so old a Python."""
    return {canonicalize_name(one.name): one for one in map(Requirement, lines)
            if one.marker is None or one.marker.evaluate({"python_version": python})}


def floor(requirement: Requirement) -> Version | None:
    """The lowest version that ``requirement`` takes, as far as it names one."""
    found = [Version(one.version) for one in requirement.specifier if one.operator in (">=", "==")]
    return max(found, default=None)


def brought(lines: list[str]) -> set[str]:
    """The distributions that ``lines`` bring, with what those need."""
    found, ahead = set[str](), [Requirement(line) for line in lines]
    while ahead:
        one = ahead.pop()
        if (name := canonicalize_name(one.name)) in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        ahead += [Requirement(line) for line in distribution(name).requires or ()]
    return found


def imported(wanted: tuple[str, ...], allowed: set[str]) -> subprocess.CompletedProcess[str]:
    """Import ``wanted`` where only the distributions ``allowed`` are."""
    ours = {"slipstream", "slipstream-vllm", "slipstream-sglang"}
    blocked = sorted(module for module, holders in packages_distributions().items()
                     if not {canonicalize_name(name) for name in holders} & (allowed | ours))
    script = IMPORTS.format(blocked=blocked, apart=sorted(APART), wanted=wanted)
    return subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"],
                          capture_output=True, text=True, timeout=300)


def test_what_other_engines_import_needs_the_base_dependencies_alone() -> None:
    allowed = brought(project()["project"]["dependencies"])
    assert not allowed & {"starlette", "torch", "transformers", "typer", "uvicorn"}
    rooms = tuple(f"slipstream.{room}" for room in ("base", "protocol", "decision", "observe", "following", "wire"))
    done = imported(rooms, allowed)
    assert done.returncode == 0, done.stderr
    done = imported(("slipstream_vllm", "slipstream_sglang"), allowed | brought(["torch"]))  # which every engine has
    assert done.returncode == 0, done.stderr


def test_a_dependency_that_is_not_there_would_be_seen() -> None:
    done = imported(("slipstream.wire",), brought(project()["project"]["dependencies"]) - {"structlog"})
    assert done.returncode != 0 and "structlog" in done.stderr


def test_without_its_extra_the_command_line_says_what_to_install() -> None:
    without = brought(project()["project"]["dependencies"])
    done = imported(("slipstream.__main__",), without)
    assert done.returncode == 0, done.stderr  # importing it costs nothing
    script = IMPORTS.format(blocked=["typer"], apart=[], wanted=()) + "from slipstream.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode != 0 and "pip install 'slipstream[" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("service", "lacks"), [("draft", "torch"), ("target", "torch"), ("router", "orjson")])
def test_without_its_extra_a_service_says_what_to_install(service: str, lacks: str) -> None:
    run = f"runpy.run_module('{service}_service', run_name='__main__')"
    script = f"import runpy, sys; sys.modules[{lacks!r}] = None; {run}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert (done.returncode, done.stderr) == (
        1, f"this command needs {lacks}; run: pip install 'slipstream[router,engine]'\n")


def test_type_checkers_read_the_types_of_the_client() -> None:
    assert (ROOT / "slipstream" / "py.typed").is_file(), "without this mark (PEP 561) they take all of it for Any"


@pytest.mark.parametrize("engine", [VLLM_0_32, SGLANG_0_5_23], ids=["vllm", "sglang"])
def test_the_oldest_of_an_engines_own_packages_are_new_enough(engine: tuple[str, ...]) -> None:
    theirs = required(engine)
    extras = project()["project"]["optional-dependencies"]
    for name, one in required([*project()["project"]["dependencies"], *extras["service"]]).items():
        lowest, ours = floor(theirs[name]) if name in theirs else None, floor(one)
        if lowest is None or ours is None:
            continue  # they take any
        raised = name in RAISED and ours in theirs[name].specifier
        assert lowest in one.specifier or raised, f"{name}: {one.specifier} here, {lowest} is enough for the engine"


@pytest.mark.parametrize("python", ["3.11", "3.14"])
def test_generated_code_is_as_old_as_the_floors(python: str) -> None:
    whole = project()["project"]
    ours = required([*whole["dependencies"], *whole["optional-dependencies"]["service"]], python)
    tools = floor(required(project()["build-system"]["requires"], python)["grpcio-tools"])
    assert tools is not None
    for name in ("grpcio", "grpcio-health-checking", "grpcio-reflection"):
        assert floor(ours[name]) == tools, f"generated code asks for gRPC {tools} and newer"


@pytest.mark.parametrize(("engine", "needs"), [("vllm", {"slipstream"}), ("sglang", {"slipstream", "slipstream-vllm"})])
def test_the_wheel_for_an_engine_is_of_the_same_release(engine: str, needs: set[str]) -> None:
    theirs = project(f"integrations/{engine}")["project"]
    assert theirs["version"] == __version__ == project()["project"]["version"]
    assert set(theirs["dependencies"]) == {f"{name}=={__version__}" for name in needs}
