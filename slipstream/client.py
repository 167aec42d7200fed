"""What a program that calls Slipstream over gRPC imports: ``from slipstream.client import Client``.

Its place does not change when rooms of the library do. The errors that a call may raise come with it.
"""

from slipstream.base.errors import CapacityError, InvalidRequest, NotFound, SlipstreamError, Unavailable
from slipstream.wire.client import AsyncClient, Client

__all__ = ["AsyncClient", "CapacityError", "Client", "InvalidRequest", "NotFound", "SlipstreamError", "Unavailable"]
