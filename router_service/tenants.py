"""Tenants: which keys are valid, the limits of each tenant, and the namespace in which its prompts are cached.

Rules:
1. Keys come from a file, one a line, each followed by what its tenant may have as ``field=value`` (``Grant``). Empty
   lines and lines that begin with # do not count. Without a file whoever asks is one tenant, ``ANYONE``.
2. Keys of one name are one tenant. A key without a name is a tenant of its own.
3. A tenant's prompts are cached in its own namespace, so the cost of a prompt does not reveal what others asked. Only
   tenants with the same ``cache`` share one. The namespace is a keyed digest: it reveals nothing of a key, and cannot
   be computed without the key.
4. Only digests of keys are kept. A key is looked up by its digest: the time does not depend on the number of keys, and
   could reveal only parts of a digest, which do not help to find a key.
5. The file is read again when it changes. A file that cannot be read, has no key or has a mistake changes nothing: a
   mistake never removes keys and never lets everyone in. No key or line of the file is ever logged.

It knows nothing about HTTP, gRPC or how a tenant's share is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipstream.base.errors import ConfigError
from slipstream.base.stamp import stamp
from slipstream.observe.log import logger

CHECK_INTERVAL_S = 2.0  # between two looks at the file of keys
NAME = r"^[A-Za-z0-9._-]{1,64}$"


class Grant(BaseModel):
    """The fields of a line of the file, except the key."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field("", pattern=NAME)
    weight: float = Field(1.0, gt=0, le=1000)  # of its share of the places and the queue, where others wait too
    requests: int = Field(0, ge=1)  # answers at once; absent: no limit of its own
    tokens_per_minute: int = Field(0, ge=1)  # of prompts and answers; absent: no limit
    cache: str = Field("", pattern=NAME)  # tenants that say the same share what is kept of prompts; absent: its name


@dataclass(frozen=True, slots=True)
class Tenant:
    """``id`` tells tenants apart, ``name`` is for people; limits of 0 are none."""

    id: str = ""
    name: str = "anyone"
    namespace: str = ""
    weight: float = 1.0
    requests: int = 0
    tokens_per_minute: int = 0


ANYONE = Tenant()


class KeyLine(NamedTuple):
    number: int
    key: str
    grant: Grant


class ApiKeys:
    """The valid keys of a file, and the tenant of each."""

    def __init__(self, file: Path) -> None:
        """Raises ConfigError for a file that cannot be read, holds no key, or has a line that is wrong."""
        self._file = file
        self._tenants = _read_keys(file)  # by the digests of their keys
        self._stamp = stamp(file)
        self._log = logger("keys")

    async def reload_on_change(self, interval_s: float = CHECK_INTERVAL_S) -> None:
        """Read the file again whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            found = stamp(self._file)
            if found == self._stamp:
                continue
            self._stamp = found
            try:
                self._tenants = await asyncio.to_thread(_read_keys, self._file)  # many take long
                self._log.info("keys read again", count=len(self._tenants))
            except ConfigError as error:
                self._log.error("keys not read again; the old ones stay", problem=str(error))

    def tenant(self, key: str) -> Tenant | None:
        """The tenant of ``key``; None: the key is not valid."""
        return self._tenants.get(_digest(key))


def _read_keys(file: Path) -> dict[bytes, Tenant]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"router.api_keys_file: cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"router.api_keys_file: {file} is not UTF-8 text") from error
    try:
        tenants = _tenants(list(_lines(text)))
    except ValueError as error:
        raise ConfigError(f"router.api_keys_file: {file}: {error}") from None
    if not tenants:
        raise ConfigError(f"router.api_keys_file: {file} holds no key; write one a line or leave the setting empty")
    return tenants


def _lines(text: str) -> Iterable[KeyLine]:
    """Raises ValueError, which shows nothing of a line but the names of our own fields."""
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0].partition("=")[0] in Grant.model_fields and "=" in words[0]:  # else it would open the door itself
            raise ValueError(f"line {number}: has no key, which stands before its fields")
        pairs = [word.partition("=") for word in words[1:]]
        given = {field: value for field, _, value in pairs}
        if len(given) < len(pairs) or not given.keys() <= Grant.model_fields.keys():
            known = ", ".join(Grant.model_fields)
            raise ValueError(f"line {number}: after the key come fields as in name=alice, each once: {known}")
        try:
            yield KeyLine(number, words[0], Grant.model_validate(given))
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            raise ValueError(f"line {number}: {problem['loc'][0]}: {problem['msg']}") from None


def _tenants(lines: list[KeyLine]) -> dict[bytes, Tenant]:
    tenants: dict[bytes, Tenant] = {}
    first_lines: dict[str, KeyLine] = {}  # of each name
    first_keys: dict[str, str] = {}  # of each cache
    for line in lines:
        grant, digest = line.grant, _digest(line.key)
        if grant.name and (earlier := first_lines.setdefault(grant.name, line)).grant != grant:
            raise ValueError(f"line {line.number}: gives name {grant.name} other fields than line {earlier.number}")
        cache = grant.cache or grant.name
        namespace = _namespace(first_keys.setdefault(cache, line.key) if cache else line.key, cache)
        tenant = Tenant(grant.name or digest.hex(), grant.name or "unnamed", namespace, grant.weight, grant.requests,
                        grant.tokens_per_minute)
        if tenants.setdefault(digest, tenant) != tenant:
            raise ValueError(f"line {line.number}: the same key stands above with other fields")
    return tenants


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _namespace(key: str, name: str) -> str:
    return hashlib.blake2b(name.encode(), key=_digest(key), digest_size=16, person=b"slipstream-cache").hexdigest()
