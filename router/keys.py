"""API keys: who may come in.

Rules:
1. Keys come from a file, one a line; empty lines and lines that begin with # do not count.
2. Only digests are kept, and all of them are compared in constant time on every question.

It knows nothing about HTTP or gRPC.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from slipstream.errors import ConfigError


class ApiKeys:
    """The keys that open the door; none at all leave it open."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    @staticmethod
    def load(path: str) -> ApiKeys:
        """The keys of a file, "" for none. Raises ConfigError for a file that cannot be read or holds no key."""
        if not path:
            return ApiKeys()
        try:
            lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"router.api_keys_file: cannot read {path}: {error}") from error
        keys = tuple(line for line in lines if line and not line.startswith("#"))
        if not keys:
            raise ConfigError(f"router.api_keys_file: {path} holds no key; write one a line or leave the setting empty")
        return ApiKeys(keys)

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def open(self, key: str) -> bool:
        """Whether ``key`` opens the door."""
        shown = _digest(key)
        matches = [hmac.compare_digest(shown, digest) for digest in self._digests]
        return any(matches) or not matches


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
