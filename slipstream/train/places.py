"""The folders of a head and of its training data, checked before hours of work.

Rules:
1. A head replaces only an earlier head of ours: its folder is missing, empty, or names the target of its head.
2. What the system says of a folder becomes an error that names the option.
3. Files that cannot be written completely are removed, because they would fill the disk.
4. One run at a time uses a folder, because two would remove each other's temporary files and checkpoints. The lock of a
   killed run is released by the system.

It knows nothing about what is written.
"""

from __future__ import annotations

import fcntl
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
def named(option: str, folder: Path) -> Iterator[None]:
    """Inside, an OSError, or safetensors' word for one, becomes a ConfigError about ``option``."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{option}: cannot write {folder}: {error}; make room there, and the same command goes on "
                          "with what is whole; or choose another folder") from error


@contextmanager
def fresh(folder: Path) -> Iterator[Path]:
    """``folder``, empty and to be filled; removed where that fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def check_work(folder: Path) -> None:
    """Make ``folder`` and write into it. Raises ConfigError."""
    with named("--work", folder):
        folder.mkdir(parents=True, exist_ok=True)
        _try(folder)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside, no other run is at work in ``folder``, which is there. Raises ConfigError."""
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process: those that it forks do not keep it
        except (BlockingIOError, PermissionError) as error:
            raise ConfigError(f"--work: another run is at work in {folder}; wait for it, or choose another folder "
                              "(--data reads its conversations)") from error
        except OSError:
            logger("train").warning("this file system keeps no locks: let no other run work here", folder=str(folder))
        yield


def check_out(folder: Path, target: Path, work: Path) -> None:
    """Whether a head may go into ``folder``; its parent is made. Raises ConfigError, ModelError."""
    for taken, what in ((target, "the target's own folder"), (work, "the folder of --work")):
        if folder.resolve() == taken.resolve():
            raise ConfigError(f"--out: {folder} is {what}; choose another folder")
    with named("--out", folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _try(folder.parent)
        if not folder.exists():
            return
        if any(folder.iterdir()) and not made_for(folder):
            raise ConfigError(f"--out: {folder} holds other things than a head made here, and files of theirs would be "
                              "replaced; choose a new or an empty folder")
        _try(folder)


def _try(folder: Path) -> None:
    """Raises OSError where no file can be made. What permissions say is not asked: it is not all there is to it."""
    with tempfile.TemporaryFile(dir=folder):
        pass
