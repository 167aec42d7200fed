"""The compiled kernels: found, or built once with the machine's C++ compiler, and loaded.

Rules:
1. There is one source, and a set of flags for each kind of processor. The library's file name is a hash of both, so a
   new version or another machine never loads a library that does not fit.
2. A library is looked for beside this module (images have it there, see ``python -m slipstream.engine.native``), then
   in the user's cache; else it is built into the cache, first under another name: two services may start at once.
3. A missing compiler stops nobody: ``kernels`` raises an error with the reason, and torch computes.

It knows nothing about models or lists of operations.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slipstream.base.errors import ModelError
from slipstream.models.folder import default_root
from slipstream.observe.log import logger

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18  # numbers of Linux on x86-64
COMPILE_S = 300  # time limit of one build

# Features that a processor must name, and the compiler's flags for it; the first match is used. Only AMD's processors
# get avx512bf16: Intel's cores without tiles (measured: family 6, model 207) multiply float32 faster.
X86 = (({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "amx_tile", "amx_bf16", "amx_int8"},
        ("-march=x86-64-v4", "-mavx512vbmi", "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
       ({"AuthenticAMD", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512vbmi",
         "avx512_vnni"}, ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni")),
       ({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}, ("-march=x86-64-v4", "-mavx512vnni")),
       ({"avx512f", "avx512bw", "avx512dq", "avx512vl"}, ("-march=x86-64-v4",)),
       ({"avx2", "fma", "bmi2"}, ("-march=x86-64-v3",)))


@dataclass(frozen=True, slots=True)
class Kernels:
    """The loaded library; see ``kernels.cpp`` for what its functions do."""

    functions: ctypes.CDLL
    flags: tuple[str, ...]
    lanes: int  # float32 numbers of a vector
    tiles: bool  # whether products use tiles (AMX)

    @staticmethod
    def of(path: Path, flags: tuple[str, ...]) -> Kernels:
        functions, pointer, size = ctypes.CDLL(str(path)), ctypes.c_void_p, ctypes.c_int64
        for name, result, arguments in (
                ("team_new", pointer, (ctypes.c_int32,)), ("team_delete", None, (pointer,)),
                ("run", None, (pointer, pointer, size, pointer)), ("grow", None, (pointer, pointer)),
                ("pack", None, (pointer, size, size, pointer)), ("pack_int8", None, (pointer, size, size, pointer)),
                ("screen", ctypes.c_int32, (pointer, size, size, pointer, pointer))):
            function = getattr(functions, f"slipstream_{name}")
            function.restype, function.argtypes = result, arguments
        return Kernels(functions, flags, functions.slipstream_lanes(), bool(functions.slipstream_tiles()))


@cache
def kernels(flags: tuple[str, ...] | None = None) -> Kernels:
    """The kernels for this machine, or those built with ``flags``; built if necessary (once, some seconds). If the
    compiler does not know this kind of processor, those of a simpler kind. Raises ModelError with the reason if there
    are none."""
    kinds, refused = kinds_of(processor()) if flags is None else [flags], list[ModelError]()
    for kind in kinds:
        name = file_name(kind)
        cached = _cache() / name
        found = next((path for path in (SOURCE.with_name(name), cached) if path.exists()), cached)
        try:
            if not found.exists():
                build(kind, found)
            return Kernels.of(found, kind)
        except ModelError as error:
            refused.append(error)
        except OSError as error:  # a folder mounted noexec, a file of another system or an incomplete one
            refused.append(ModelError(f"{found} cannot be loaded ({error}); remove it, or set model.kernels=torch"))
    raise refused[0]


def build_all(folder: Path) -> list[Path]:
    """Build into ``folder`` for every known kind of processor of this architecture, for an image that may run on any of
    them. Returns the files. Raises ModelError."""
    kinds = [flags for _, flags in X86] if platform.machine() == "x86_64" else [()]
    paths = [folder / file_name(flags) for flags in kinds]
    for flags, path in zip(kinds, paths, strict=True):
        build(flags, path)
    return paths


def kinds_of(processor: set[str]) -> list[tuple[str, ...]]:
    """The compiler's flags for a processor with these features, the best first; the last are none at all."""
    return [*(flags for needed, flags in X86 if needed <= processor), ()]


def file_name(flags: tuple[str, ...]) -> str:
    """The name of the compiled library (rule 1)."""
    sources = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    content = b"".join(path.read_bytes() for path in sources) + " ".join((*FLAGS, *flags)).encode()
    return f"kernels-{hashlib.sha256(content).hexdigest()[:16]}.so"


def build(flags: tuple[str, ...], path: Path) -> None:
    """Compile the source with ``flags`` into the file ``path``. Raises ModelError."""
    compiler = next((found for name in ("g++", "clang++", "c++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise ModelError("no C++ compiler was found (g++, clang++); install one, or set model.kernels=torch")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            done = subprocess.run([compiler, *FLAGS, *flags, str(SOURCE), "-o", str(made)], capture_output=True,
                                  text=True, timeout=COMPILE_S, check=False)
            if done.returncode:
                raise ModelError(f"{compiler} could not build {SOURCE.name}: {done.stderr.strip()[:300]}")
            made.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"{compiler} could not build {SOURCE.name} into {path.parent}: {error}") from error
    logger("engine").info("kernels built", file=path.name, flags=" ".join(flags))


def processor() -> set[str]:
    """The maker and the features that this machine's processor names in /proc/cpuinfo; empty if it is no x86-64."""
    if platform.machine() != "x86_64":
        return set()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    features = set(" ".join(next((line.partition(":")[2] for line in lines if line.startswith(name)), "")
                            for name in ("vendor_id", "flags")).split())
    return features if "amx_tile" in features and _tiles_granted() else features - {"amx_tile"}


def _tiles_granted() -> bool:
    """Whether Linux lets this process and its threads use tiles; the process has to request it (arch_prctl(2))."""
    try:
        return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0)
    except (OSError, AttributeError):
        return False


def _cache() -> Path:
    return default_root().with_name("kernels")
