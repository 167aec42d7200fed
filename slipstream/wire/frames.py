"""Items that wait for a stream, joined to as few frames as may be.

It knows nothing about what they say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def joined(items: Sequence[bytes], max_bytes: int) -> Iterator[bytes]:
    """``items`` in order, side by side in frames of at most ``max_bytes``; an item that is longer is alone."""
    first, size = 0, 0
    for number, item in enumerate(items):
        if number > first and size + len(item) > max_bytes:
            yield b"".join(items[first:number])
            first, size = number, 0
        size += len(item)
    if first < len(items):
        yield b"".join(items[first:])
