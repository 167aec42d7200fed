"""The folders of a head and of intermediate files, checked before hours of work depend on them.

Rules:
1. A head replaces only an earlier head that was trained here: its folder must be missing, empty, or have a config.json
   that names its target's hash.
2. An OSError about a folder becomes a ConfigError that names the option.
3. Files that cannot be written completely are removed: they would take disk space that is needed.
4. Only one run works in a folder at a time: two would remove each other's partial files and checkpoints. The lock ends
   with its process, also after a kill.

It knows nothing about the content of files.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from slipstream.base.errors import ConfigError
from slipstream.models.folder import made_for
from slipstream.observe.log import logger

LOCK = "lock"  # a file beside what is made


@contextmanager
def write_errors(option: str, folder: Path) -> Iterator[None]:
    """A context in which an OSError or SafetensorError becomes a ConfigError about ``option``."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{option}: cannot write {folder}: {error}; make room there, and the same command goes on "
                          "with what is whole; or choose another folder") from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A context with ``folder``, made anew and empty; it is removed if the context fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def work_files(folder: Path) -> Iterator[Path]:
    """A context with a new folder beside ``folder``, which gets that name when its files are on the disk: a kill leaves
    only complete folders. Raises ConfigError if they cannot be written."""
    with write_errors("--work", folder.parent), new_folder(folder.with_suffix(".partial")) as partial:
        yield partial
        for file in partial.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        partial.rename(folder)


def check_work(folder: Path) -> None:
    """Make ``folder`` and write into it. Raises ConfigError."""
    with write_errors("--work", folder):
        folder.mkdir(parents=True, exist_ok=True)
        _check_writable(folder)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """A context in which no other run works in ``folder``, which must exist. Raises ConfigError if one does."""
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # owned by this process: forked ones do not inherit it
        except (BlockingIOError, PermissionError) as error:
            raise ConfigError(f"--work: another run is at work in {folder}; wait for it, or choose another folder "
                              "(--data reads its conversations)") from error
        except OSError:
            logger("train").warning("this file system keeps no locks: let no other run work here", folder=str(folder))
        yield


def check_out(folder: Path, target: Path, work: Path) -> None:
    """Check that a head may be written into ``folder`` (rule 1), and make its parent. Raises ConfigError,
    ModelError."""
    for taken, what in ((target, "the target's own folder"), (work, "the folder of --work")):
        if folder.resolve() == taken.resolve():
            raise ConfigError(f"--out: {folder} is {what}; choose another folder")
    with write_errors("--out", folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _check_writable(folder.parent)
        if not folder.exists():
            return
        if any(folder.iterdir()) and not made_for(folder):
            raise ConfigError(f"--out: {folder} holds other things than a head made here, and files of theirs would be "
                              "replaced; choose a new or an empty folder")
        _check_writable(folder)


def _check_writable(folder: Path) -> None:
    """Raises OSError if no file can be made in ``folder``. It makes one: permissions alone do not tell (a read-only
    disk)."""
    with tempfile.TemporaryFile(dir=folder):
        pass
