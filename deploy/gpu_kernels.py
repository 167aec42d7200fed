"""Compiles FlashInfer's kernel on a machine without a GPU: for the bundle of ``make gpu``, and for the cuda image.

Rules:
1. ``nvcc`` (CUDA 13) and ``ninja`` are on PATH, and take minutes. One library for each size of heads, for all the GPUs
   that are asked for; a library that was compiled for others is an error.
2. The libraries need ``libcudart.so.13`` alone, which a torch for CUDA 13 has loaded before. Nothing of the driver is
   called when they are linked.
3. FlashInfer loads a library in ``flashinfer/data/aot`` as it is. ``check`` tries that in another folder, without a
   compiler.

It knows nothing about archives or images.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from deploy.pip import pip
from slipstream.engine.flashinfer import kernel_spec, prebuild

FLASHINFER, TVM = "flashinfer-python==0.7.2.post1", "apache-tvm-ffi==0.1.15.post2"
NVML = "nvidia-ml-py==13.615.71"  # asked for at import, and no part of torch
RUNTIME = "nvidia-cuda-runtime==13.0.*"
# What it imports, but for torch and numpy; without its dependencies on kernels that are not used here.
IMPORTED = (NVML, "filelock", "jinja2", "markupsafe", "packaging", "requests", "tqdm", "urllib3", "idna",
            "certifi", "charset-normalizer")
HEAD_DIMS = (64, 128)


def missing_tools() -> str:
    """A sentence about missing tools; "": none is missing."""
    missing = [name for name in ("nvcc", "ninja") if shutil.which(name) is None]
    return f"{' and '.join(missing)} must be on PATH: kernels are compiled here for a GPU elsewhere" if missing else ""


def compile_libraries(builder: Path, gpus: str) -> list[Path]:
    """Compile the libraries and return their paths. builder: a work folder, which then has FlashInfer's package; gpus:
    compute capabilities separated by spaces, such as ``8.0 9.0a``. Raises SystemExit, CalledProcessError."""
    if problem := missing_tools():
        raise SystemExit(problem)
    pip("install", "--no-deps", "--upgrade", "--target", str(builder), FLASHINFER, TVM, RUNTIME, *IMPORTED)
    # The linker looks for names without a version; an empty library stands for the driver.
    link_folder, libraries = builder / "link", builder / "aot"
    link_folder.mkdir(exist_ok=True)
    (link_folder / "libcudart.so").unlink(missing_ok=True)
    (link_folder / "libcudart.so").symlink_to(runtime(builder))
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", str(link_folder / "libcuda.so")],
                   check=True)
    # FlashInfer reads these; "env" adds them to the variables that are set.
    environment = [f"PYTHONPATH={Path.cwd()}:{builder}", f"FLASHINFER_CUDA_ARCH_LIST={gpus}",
                   f"FLASHINFER_WORKSPACE_BASE={builder / 'cache'}",
                   f"FLASHINFER_EXTRA_LDFLAGS=-L{link_folder} -Wl,--no-as-needed -lcudart"]
    shutil.rmtree(libraries, ignore_errors=True)  # of other kernels
    for head_dim in HEAD_DIMS:
        subprocess.run(["env", *environment, sys.executable, "-m", "deploy.gpu_kernels", "compile", str(head_dim),
                        str(libraries), gpus], check=True)
    return sorted(libraries.glob("*.so"))


def runtime(builder: Path) -> Path:
    return next(builder.rglob("libcudart.so.13"))


def check(builder: Path, packages: Path, gpus: str) -> None:
    """Load what ``packages`` has of FlashInfer, its libraries in their places. Raises CalledProcessError."""
    environment = ["PATH=/nowhere", "FLASHINFER_DISABLE_JIT=1", f"FLASHINFER_CUDA_ARCH_LIST={gpus}",
                   f"FLASHINFER_WORKSPACE_BASE={packages}", f"PYTHONPATH={Path.cwd()}:{packages}:{builder}"]
    for head_dim in HEAD_DIMS:
        subprocess.run(["env", *environment, sys.executable, "-m", "deploy.gpu_kernels", "load", str(head_dim),
                        str(runtime(builder))], check=True)


def _compile(head_dim: int, into: Path, gpus: str) -> None:
    """One kernel, in an environment that ``compile_libraries`` has made."""
    into.mkdir(exist_ok=True)
    library = prebuild(torch.bfloat16, head_dim)
    build_file = library.with_name("build.ninja").read_text(encoding="utf-8")  # the code itself is compressed
    for gpu in gpus.split():
        if f"code=sm_{gpu.replace('.', '')}" not in build_file:
            raise SystemExit(f"{library}: it was not compiled for {gpu}")
    shutil.copy(library, into)
    print(f"{library.name}: compiled for {gpus}, {library.stat().st_size / 2**20:.1f} MiB")


def _load(head_dim: int, runtime: Path) -> None:
    """One kernel, as a torch for CUDA would have it. ``runtime``: its libcudart."""
    ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    kernel = kernel_spec(torch.bfloat16, head_dim)
    module = kernel.build_and_load()
    functions = [name for name in ("plan", "paged_run") if getattr(module, name)]
    print(f"{kernel.name}: loads without a compiler ({', '.join(functions)})")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.gpu_kernels", description="compile or load one kernel")
    parser.add_argument("do", choices=("compile", "load"))
    parser.add_argument("head_dim", type=int)
    parser.add_argument("path", type=Path, help="a folder for it, or libcudart")
    parser.add_argument("gpus", nargs="?", default="")
    options = parser.parse_args()
    if options.do == "compile":
        _compile(options.head_dim, options.path, options.gpus)
    else:
        _load(options.head_dim, options.path)


if __name__ == "__main__":
    main()
