"""API keys: who may come in.

Rules:
1. Keys come from a file, one a line; empty lines and lines that begin with # do not count.
2. Only digests are kept, and all of them are compared in constant time on every question.
3. The file is read again when it changes. One that cannot be read or holds no key changes nothing: keys never go, and
   the door never opens, by a mistake. No key is ever logged, nor a line of the file.

It knows nothing about HTTP or gRPC.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from pathlib import Path

from slipstream.base.errors import ConfigError
from slipstream.base.stamp import stamp
from slipstream.observe.log import logger

LOOK_S = 2.0


class ApiKeys:
    """The keys that open the door; none at all leave it open."""

    def __init__(self, keys: tuple[str, ...] = (), file: Path | None = None) -> None:
        self._digests = tuple(_digest(key) for key in keys)
        self._file = file
        self._stamp = stamp(file) if file is not None else None
        self._log = logger("keys")

    @staticmethod
    def load(path: str) -> ApiKeys:
        """The keys of a file, "" for none. Raises ConfigError for a file that cannot be read or holds no key."""
        return ApiKeys(_read(Path(path)), Path(path)) if path else ApiKeys()

    async def follow(self, look_s: float = LOOK_S) -> None:
        """Take the keys of the file again whenever it changes, until cancelled."""
        while self._file is not None:
            await asyncio.sleep(look_s)
            found = stamp(self._file)
            if found == self._stamp:
                continue
            self._stamp = found
            try:
                self._digests = tuple(_digest(key) for key in _read(self._file))
                self._log.info("keys read again", count=len(self._digests))
            except ConfigError as error:
                self._log.error("keys not read again; the old ones stay", problem=str(error))

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def open(self, key: str) -> bool:
        """Whether ``key`` opens the door."""
        if not self._digests:
            return True
        shown = _digest(key)
        matches = [hmac.compare_digest(shown, digest) for digest in self._digests]
        return any(matches)


def _read(file: Path) -> tuple[str, ...]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"router.api_keys_file: cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"router.api_keys_file: {file} is not UTF-8 text") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"router.api_keys_file: {file} holds no key; write one a line or leave the setting empty")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
