"""The client: what it refuses before it asks anybody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.base.errors import InvalidRequest
from slipstream.client import Client


@pytest.fixture
def client() -> Iterator[Client]:
    with Client("127.0.0.1:1") as client:
        yield client


@pytest.mark.parametrize(("messages", "told"), [
    (3, "messages: must be a string or a list of messages"),
    ({"role": "user", "content": "x"}, "messages: must be a string or a list of messages"),
    ([{"rol": "user", "content": "x"}], "messages[0]: must have role and content, both text, and nothing else"),
    (["x"], "messages[0]: must have role and content, both text, and nothing else"),
    ([{"role": "user", "content": None}], "messages[0]: must have role and content, both text, and nothing else"),
])
def test_messages_that_are_none_are_refused(client: Client, messages: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.chat(messages)
    assert str(caught.value) == told


def test_an_unknown_option_is_named(client: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.chat("x", max_token=4)
    assert caught.value.field == "max_token" and "max_tokens" in str(caught.value)
