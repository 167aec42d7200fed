"""JSON from outside, bounded before it is read.

Rules:
1. Lists and objects are counted: two bytes of one take hundred of memory, and a million keep everybody waiting.
2. They lie in one another ``MAX_DEPTH`` deep at most: whatever walks or writes them again calls itself for each level.

It knows nothing about what the JSON says.
"""

from __future__ import annotations

from typing import Any

import orjson

from slipstream.base.errors import InvalidRequest
from slipstream.protocol.chat import MAX_ITEMS

MAX_CONTAINERS = 4 * MAX_ITEMS  # lists and objects of one body: messages, their contents and parts, and some more
MAX_DEPTH = 128
OPENING, CLOSING = b"[{", b"]}"
OTHERS = bytes(set(range(256)) - set(OPENING + CLOSING))


def read(field: str, data: bytes | bytearray) -> Any:
    """What ``data`` says. Raises InvalidRequest for ``field``."""
    if num_containers(data) > MAX_CONTAINERS:
        raise InvalidRequest(field, f"holds more than {MAX_CONTAINERS} lists and objects")
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(field, f"is not JSON: {error.msg} at byte {error.pos}", "invalid_json") from None
    if _count(data) > MAX_DEPTH and _deeper(_outside_strings(data)):
        raise InvalidRequest(field, f"has lists and objects in one another more than {MAX_DEPTH} deep")
    return found


def num_containers(data: bytes | bytearray) -> int:
    """The lists and objects of a JSON text, or enough of them; those in its strings count only where there are few."""
    num = _count(data)
    if num <= MAX_CONTAINERS:
        return num
    early = _count(_outside_strings(data[:len(data) // 4]))
    return early if early > MAX_CONTAINERS else _count(_outside_strings(data))


def _count(data: bytes | bytearray) -> int:
    return data.count(b"[") + data.count(b"{")


def _outside_strings(data: bytes | bytearray) -> bytes:
    return b"".join(data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])


def _deeper(outside: bytes) -> bool:
    """Than ``MAX_DEPTH``."""
    left = outside.translate(None, OTHERS)
    for _ in range(MAX_DEPTH):
        if not left:
            return False
        left = left.replace(b"[]", b"").replace(b"{}", b"")
    return left != b""
