"""``python -m deploy.image router|cpu|cuda|vllm``: gather the wheels of an image, then build it.

Rules:
1. All wheels come from the index that pip is set up for, in the versions of ``requirements.lock``; the build itself has
   no network.
2. cpu wants torch without CUDA, cuda with it: ``--torch`` names the folder or index page that has the right one, where
   pip's own index has the other.
3. The cpu image has no C++ compiler: its kernels are built here, for every kind of x86-64 processor.
4. cuda has FlashInfer, its kernel compiled here for ``GPUS`` where nvcc is, and a base with a C compiler, which Triton
   asks for. Without nvcc attention is torch's there, and this says so.

It knows nothing about registries.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from deploy.gpu_kernels import FLASHINFER, IMPORTED, TVM, check, compile_libraries, missing_tools
from deploy.pip import pip
from slipstream import __version__
from slipstream.engine.native.compiled_kernels import build_all
from slipstream.models.folder import KNOWN

ROOT = Path(__file__).parent.parent
BUILDERS = ("docker", "podman", "buildah")
# What the image's base can install: manylinux wheels of one interpreter, whatever runs here. vLLM's image has its own.
PYTHON = {"vllm": "3.12"}
GLIBC = range(36, 16, -1)  # minor versions up to that of Debian 12; pip takes each by its own name
PLATFORM = tuple(f"--platform=manylinux{kind}_x86_64" for kind in (*(f"_2_{n}" for n in GLIBC), "2014", "_2_12", "_2_5",
                                                                   "1"))
WHEELS_FOR = ("--implementation=cp", "--only-binary=:all:", *PLATFORM, "--platform=linux_x86_64")  # ours, the last
GPUS = "8.0 8.9 9.0a 10.0a"  # compute capabilities: A100, L4 and L40, H100 and H200, B200
BASES = {"cuda": "docker.io/library/python:3.11-bookworm"}  # where another than that of the Dockerfile is better
DOCKERFILES = {"vllm": "vllm.Dockerfile"}  # where another than the one of all
LOCKED = ("-c", str(ROOT / "requirements.lock"))
EXTRAS = {"router": "[router,kubernetes,otel]", "cpu": "[engine,kubernetes,otel]", "cuda": "[engine,kubernetes,otel]",
          "vllm": "[service,kubernetes]"}


def gather(variant: str, torch: str | None) -> Path:
    """All wheels of an image. Raises CalledProcessError, after pip has said why."""
    folder = ROOT / "build/image" / variant
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    own_packages = (ROOT, ROOT / "integrations/vllm") if variant == "vllm" else (ROOT,)
    python = PYTHON.get(variant, "3.11")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    this_python = (sys.implementation.name, version, sysconfig.get_platform())
    same_python = this_python == ("cpython", python, "linux-x86_64")
    if not same_python:
        print(f"the image has Python {python} on x86-64 Linux, this is {' '.join(this_python)}: no compiled modules")
    pip("wheel", "--no-deps", "-w", str(folder), *map(str, own_packages),
        variables={} if same_python else {"SLIPSTREAM_PURE": "1"})
    wheel = next(folder.glob("slipstream-*.whl"))
    requirement = f"{wheel}{EXTRAS[variant]}"
    wheels_for = (f"--python-version={python}", *WHEELS_FOR)
    find_links = ("--find-links", torch) if torch else ()
    pip("download", *wheels_for, *find_links, *LOCKED, "-d", str(folder), requirement)
    pip("download", "--no-deps", *wheels_for, "-d", str(folder), "pip")
    if variant == "cpu":
        build_all(folder / "kernels")
        for model in KNOWN.values():
            pip("download", "--no-deps", *wheels_for, "-d", str(folder), model.install.split()[-1])
    if variant == "cuda":
        _flashinfer(folder, wheels_for)
    return folder


def _flashinfer(folder: Path, wheels_for: Sequence[str]) -> None:
    """Gather FlashInfer's wheels, and in ``kernels`` the compiled libraries and the list of packages for them."""
    if problem := missing_tools():
        print(f"attention will be torch's in this image, slower and without graphs: {problem}")
        return
    kernels, packages = folder / "kernels", (FLASHINFER, TVM, *IMPORTED)
    builder = (ROOT / "build/image/gpu-kernels").resolve()
    libraries = compile_libraries(builder, GPUS)
    for library in libraries:  # where the Dockerfile puts them
        place = builder / "flashinfer/data/aot" / library.stem
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, place)
    check(builder, builder, GPUS)
    pip("download", "--no-deps", *wheels_for, *LOCKED, "-d", str(folder), *packages)
    kernels.mkdir()
    for library in libraries:
        shutil.copy(library, kernels)
    (kernels / "packages.txt").write_text("\n".join(packages) + "\n", encoding="utf-8")


def builder(names: Sequence[str] = BUILDERS) -> str:
    """The first builder that works; a client without its daemon does not. Raises SystemExit if none works."""
    problems = []
    for name in names:
        if shutil.which(name) is None:
            problems.append(f"{name} is not installed")
            continue
        done = subprocess.run([name, "info"], capture_output=True, text=True)
        if done.returncode == 0:
            return name
        problems.append(f"{name}: {(done.stderr.strip() or 'does not work').splitlines()[-1]}")
    sys.exit(f"no builder works here ({'; '.join(problems)}): install or start one of {', '.join(BUILDERS)}")


def build(variant: str, base: str | None, tool: str, tag: str) -> None:
    """Build the image. Raises CalledProcessError, after the builder has said why."""
    values = [f"BASE={base}"] if base else []
    if variant != "vllm":
        values += [f"VARIANT={variant}", f"PACKAGE=slipstream{EXTRAS[variant]}"]
    file = DOCKERFILES.get(variant, "Dockerfile")
    subprocess.run([tool, "build", "-t", tag, "-f", f"deploy/docker/{file}",
                    *(word for value in values for word in ("--build-arg", value)), "."], cwd=ROOT, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.image", description="Build an image.")
    parser.add_argument("variant", choices=("router", "cpu", "cuda", "vllm"))
    parser.add_argument("--base", help="an image with Python 3.11, or vLLM's; default: as in deploy/docker, "
                        "for cuda one with a C compiler")
    parser.add_argument("--builder", choices=BUILDERS, help="default: the first that works")
    parser.add_argument("--tag", help="default: slipstream:VERSION-VARIANT, which is what the chart asks for")
    parser.add_argument("--torch", metavar="PLACE", help="folder or page with the torch wheel of this variant")
    parser.add_argument("--wheels-only", action="store_true", help="gather, but do not build")
    options = parser.parse_args()
    try:
        build_image(options)
    except subprocess.CalledProcessError as error:
        sys.exit(f"no image: {' '.join(map(str, error.cmd[:5]))} ... ended with {error.returncode}")


def build_image(options: argparse.Namespace) -> None:
    """Make the image of the command line. It looks for a builder first, because wheels are gigabytes."""
    tool = "" if options.wheels_only else builder((options.builder,) if options.builder else BUILDERS)
    folder = gather(options.variant, options.torch)
    wheels = list(folder.glob("*.whl"))
    size = sum(file.stat().st_size for file in wheels) / 2**20
    print(f"{len(wheels)} wheels in {folder.relative_to(ROOT)}, {size:.0f} MiB")
    if tool:
        base = options.base or BASES.get(options.variant)
        build(options.variant, base, tool, options.tag or f"slipstream:{__version__}-{options.variant}")


if __name__ == "__main__":
    main()
