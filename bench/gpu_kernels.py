"""``make gpu-bundle ARGS=--flashinfer``: FlashInfer as small as it runs, with this engine's kernels for sm_90a in it.

Rules:
1. Nothing has a GPU here: ``nvcc`` (CUDA 13, on PATH) and ``ninja`` compile for another machine. Minutes.
2. A module that lies in ``flashinfer/data/aot`` is loaded as it is; with FLASHINFER_DISABLE_JIT=1 nothing is compiled
   where it runs.
3. Of the package go along Python, and the templates from which it would make the kernels' sources; headers do not.
4. The kernels need ``libcudart.so.13`` alone, which a torch for CUDA 13 has loaded before.
5. What was packed is unpacked elsewhere and loaded, with no compiler to be found; what is not for sm_90a is an error.

It knows nothing about how the archive travels.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from slipstream.engine.flashinfer import prebuild, specified

FLASHINFER, TVM = "flashinfer-python==0.7.2.post1", "apache-tvm-ffi==0.1.15.post2"
NVML = "nvidia-ml-py==13.615.71"  # asked for at import, and no part of torch
RUNTIME = "nvidia-cuda-runtime==13.0.*"
# What it imports, but for torch and numpy; without its dependencies on kernels that are not used here.
IMPORTED = (NVML, "filelock", "jinja2", "markupsafe", "packaging", "requests", "tqdm", "urllib3", "idna",
            "certifi", "charset-normalizer")
HEAD_DIMS = (64, 128)
ARCHITECTURE, TARGET = "9.0a", "sm_90a"


def build(folder: Path) -> Path:
    """The archive ``flashinfer.tar.gz`` in ``folder``: a slim package with prebuilt kernels."""
    if shutil.which("nvcc") is None or shutil.which("ninja") is None:
        raise SystemExit("nvcc of CUDA 13 and ninja must be on PATH: kernels are compiled here for a GPU elsewhere")
    builder = folder.with_name("gpu-kernels").resolve()  # what travels is in the folder, and this is not
    _install(builder, FLASHINFER, TVM, RUNTIME, *IMPORTED)
    runtime = next(builder.rglob("libcudart.so.13"))
    # The linker looks for names without a version; nothing of the driver is called, so an empty library stands for it.
    names = builder / "link"
    names.mkdir(exist_ok=True)
    (names / "libcudart.so").unlink(missing_ok=True)
    (names / "libcudart.so").symlink_to(runtime)
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", str(names / "libcuda.so")], check=True)
    # FlashInfer is told by its environment; "env" adds these to what is there.
    world = [f"PYTHONPATH={Path.cwd()}:{builder}", f"FLASHINFER_CUDA_ARCH_LIST={ARCHITECTURE}",
             f"FLASHINFER_WORKSPACE_BASE={builder / 'cache'}",
             f"FLASHINFER_EXTRA_LDFLAGS=-L{names} -Wl,--no-as-needed -lcudart"]
    for head_dim in HEAD_DIMS:
        subprocess.run(["env", *world, sys.executable, "-m", "bench.gpu_kernels", "--kernel", str(head_dim), "--into",
                        str(builder / "aot")], check=True)
    archive = _pack(builder, folder / "flashinfer.tar.gz")
    with tempfile.TemporaryDirectory() as place, tarfile.open(archive) as packed:
        packed.extractall(place, filter="data")
        bare = ["PATH=/nowhere", "FLASHINFER_DISABLE_JIT=1", f"FLASHINFER_CUDA_ARCH_LIST={ARCHITECTURE}",
                f"FLASHINFER_WORKSPACE_BASE={place}", f"PYTHONPATH={Path.cwd()}:{place}:{builder}"]
        for head_dim in HEAD_DIMS:
            subprocess.run(["env", *bare, sys.executable, "-m", "bench.gpu_kernels", "--load", str(head_dim),
                            "--runtime", str(runtime)], check=True)
    return archive


def wanted(package: Path) -> Iterator[Path]:
    """The files of an installed ``flashinfer`` that go along, relative to it (rule 3)."""
    for file in sorted(package.rglob("*")):
        path = file.relative_to(package)
        if not file.is_file() or "__pycache__" in path.parts:
            continue
        is_data = path.parts[0] == "data"
        if path.suffix in (".py", ".json") if not is_data else path.match("data/csrc/batch_prefill*"):
            yield path


def _pack(builder: Path, archive: Path) -> Path:
    package = builder / "flashinfer"
    with tarfile.open(archive, "w:gz") as out:
        for path in wanted(package):
            out.add(package / path, Path("flashinfer") / path)
        for library in sorted((builder / "aot").glob("*.so")):
            out.add(library, Path("flashinfer/data/aot") / library.stem / library.name)
    return archive


def _install(target: Path, *requirements: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target",
                    str(target), *requirements], check=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="one kernel, in an environment that build() has made")
    parser.add_argument("--kernel", type=int, help="compile that of this head size")
    parser.add_argument("--into", type=Path, help="the folder of what is compiled")
    parser.add_argument("--load", type=int, help="load that of this head size")
    parser.add_argument("--runtime", type=Path, help="libcudart, as a torch for CUDA would have loaded it")
    options = parser.parse_args(arguments)
    if options.load:
        ctypes.CDLL(str(options.runtime), mode=ctypes.RTLD_GLOBAL)
        kernel = specified(torch.bfloat16, options.load)
        found = kernel.build_and_load()
        functions = [name for name in ("plan", "paged_run") if getattr(found, name)]
        print(f"{kernel.name}: loads without a compiler ({', '.join(functions)})")
        return
    options.into.mkdir(exist_ok=True)
    library = prebuild(torch.bfloat16, options.kernel)
    if f"-arch {TARGET} ".encode() not in library.read_bytes():
        raise SystemExit(f"{library}: nothing in it is for {TARGET}")
    shutil.copy(library, options.into)
    print(f"{library.name}: compiled for {TARGET}, {library.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
