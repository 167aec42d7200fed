"""What a program that calls Slipstream over gRPC imports: ``from slipstream.client import Client``.

Its place does not change when rooms of the library do. The errors that a call may raise come with it.

    with Client() as client:
        answer = whole(client.chat(messages, tools=tools))
        messages = [*messages, answer.message, Message("tool", result, tool_call_id=answer.message.tool_calls[0].id)]
"""

from slipstream.base.errors import (
    CapacityError,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    ModelChanged,
    NotFound,
    QuotaExceeded,
    SlipstreamError,
    TooLarge,
    Unavailable,
)
from slipstream.protocol.chat import Function, Message, ToolCall, whole
from slipstream.protocol.grammar import Grammar
from slipstream.wire.client import AsyncClient, Client

__all__ = ["AsyncClient", "CapacityError", "Client", "DeadlineExceeded", "Draining", "Function", "Grammar",
           "InvalidRequest", "Message", "ModelChanged", "NotFound", "QuotaExceeded", "SlipstreamError", "TooLarge",
           "ToolCall", "Unavailable", "whole"]
