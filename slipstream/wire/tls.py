"""Mutual TLS from PEM files: the certificates of both ends of a channel, whom they trust, and when a certificate ends.

Rules:
1. Both sides present a certificate; a server refuses clients whose certificate its CA did not sign, or (``NameGuard``)
   whose certificate has none of the allowed names. Alternative names (DNS, URI, IP) are compared without regard to
   upper and lower case; the common name counts only where there is no alternative name.
2. Replaced files need no restart: a server checks them at every new connection, a client when it opens a channel, which
   a draft link does for every stream and a target's client when the files change. Open connections stay.
3. A client checks the server's name: the one dialled or, for a pod, its service's.
4. Files without a certificate or key, or with a key of another certificate, are refused by name before gRPC gets them,
   which would only say that it cannot listen or connect. The files before stay in use.
5. Of our own certificate only the end date is parsed (RFC 5280, section 4.1: Certificate, tbsCertificate, validity,
   notAfter); TLS checks the rest.

It knows nothing about addresses or services.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from slipstream.base.config import TlsSection
from slipstream.base.errors import ConfigError
from slipstream.base.stamp import Stamp, stamp
from slipstream.observe.log import logger

FILE_NAMES = ("tls.crt", "tls.key", "ca.crt")  # as Kubernetes' secrets have them
CHECK_INTERVAL_S = 10.0
MAX_REMEMBERED = 256  # clients that were refused
SEQUENCE, UTC_TIME, GENERALIZED_TIME, VERSION = 0x30, 0x17, 0x18, 0xA0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: our certificate chain, its private key, and the trusted authorities; and names.

    ``allowed_names``: a client's certificate must have one of them; () allows any that the authority signed.
    ``server_name``: the name in the certificate of a dialled server; "": the name that is dialled."""

    certificate: Path
    key: Path
    authority: Path
    allowed_names: tuple[str, ...] = ()
    server_name: str = ""

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(certificate, key, authority). Raises ConfigError naming the file that cannot be read, or used."""
        try:
            contents = self.certificate.read_bytes(), self.key.read_bytes(), self.authority.read_bytes()
        except OSError as error:
            raise ConfigError(f"tls: cannot read {error.filename}: {error.strerror}; "
                              "mount the file or correct its path") from error
        self._check_usable()
        return contents

    def _check_usable(self) -> None:
        """Raises ConfigError for files that TLS cannot use."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_ciphers("ALL:@SECLEVEL=0")  # the handshake checks whether they are strong enough
        for trusted in (self.authority, self.certificate):
            try:
                context.load_verify_locations(trusted)
            except OSError as error:  # OpenSSL's errors are OSErrors
                raise ConfigError(f"tls: {trusted} holds no certificate that can be read; it must be PEM") from error
        try:
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise ConfigError(f"tls: {self.key} is not the key of {self.certificate}; it must be PEM, without a "
                              "passphrase") from error

    def stamp(self) -> Stamp | None:
        """Changes when a file is replaced."""
        return stamp(self.certificate, self.key, self.authority)


def tls_files(section: TlsSection) -> TlsFiles | None:
    """The files in the configured folder; None: plain text."""
    if not section.folder:
        return None
    certificate, key, authority = (Path(section.folder) / name for name in FILE_NAMES)
    return TlsFiles(certificate, key, authority, section.allowed_names)


def with_server_name(files: TlsFiles | None, name: str) -> TlsFiles | None:
    """``files`` for a peer that is dialled by IP address and has a certificate for ``name``."""
    return None if files is None else replace(files, server_name=name)


def channel_credentials(files: TlsFiles | bool) -> grpc.ChannelCredentials:
    """For a client; without files it uses gRPC's trusted roots (a file that GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names, or
    its own list). Raises ConfigError for a file that cannot be read."""
    if not isinstance(files, TlsFiles):
        return grpc.ssl_channel_credentials()
    certificate, key, authority = files.read()
    return grpc.ssl_channel_credentials(authority, key, certificate)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """For a server that requires client certificates. Raises ConfigError for a file that cannot be read."""
    seen, known = files.stamp(), _configuration(files.read())

    def fetch() -> grpc.ServerCertificateConfiguration:
        nonlocal seen, known
        if (found := files.stamp()) != seen:
            with suppress(ConfigError):  # in the middle of being replaced
                known, seen = _configuration(files.read()), found
        return known

    return grpc.dynamic_ssl_server_credentials(known, fetch, require_client_authentication=True)


async def export_expiry(files: TlsFiles | None, export: Callable[[float], None], interval_s: float = CHECK_INTERVAL_S,
                        clock: Callable[[], float] = time.time) -> None:
    """Call ``export`` with the Unix time at which our certificate ends, again when it is replaced, until cancelled. A
    replacement that cannot be used, and the end itself, are logged once. ``clock``: Unix time."""
    log, expires_s, was_logged = logger("wire"), math.inf, False
    stamp_seen: Stamp | None = None
    while files is not None:
        stamp_now = files.stamp()
        if stamp_now is not None and stamp_now != stamp_seen:
            try:
                new_expiry_s = expiry_s(files.read()[0])
            except ConfigError as error:
                log.warning("certificate not replaced; the one before stays in use", problem=str(error))
            else:
                export(new_expiry_s)
                if expires_s != math.inf:
                    log.info("certificate replaced")
                expires_s, was_logged = new_expiry_s, False
            stamp_seen = stamp_now
        if clock() >= expires_s and not was_logged:
            was_logged = True
            log.error("certificate has ended: peers refuse it; replace it", certificate=str(files.certificate),
                      ended=datetime.fromtimestamp(expires_s, UTC).isoformat())
        await asyncio.sleep(interval_s)


def _configuration(pem: tuple[bytes, bytes, bytes]) -> grpc.ServerCertificateConfiguration:
    certificate, key, authority = pem
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


def expiry_s(pem: bytes) -> float:
    """Unix time, in seconds, at which the first certificate of ``pem`` ends. Raises ConfigError."""
    try:
        first = pem.decode("latin-1").split("-----BEGIN CERTIFICATE-----")[1].partition("-----END")[0]
        der = ssl.PEM_cert_to_DER_cert(f"-----BEGIN CERTIFICATE-----{first}-----END CERTIFICATE-----")
        return _not_after(der)
    except (ValueError, IndexError) as error:
        raise ConfigError("tls.crt: holds no certificate that can be read; it must be PEM") from error


def _not_after(der: bytes) -> float:
    certificate, _ = _content(der, SEQUENCE)
    fields, _ = _content(certificate, SEQUENCE)
    if fields[0] == VERSION:
        fields = _content(fields)[1]
    for _ in ("serialNumber", "signature", "issuer"):
        fields = _content(fields)[1]
    validity, _ = _content(fields, SEQUENCE)
    _, after = _content(validity)
    text, _ = _content(after)
    if after[0] not in (UTC_TIME, GENERALIZED_TIME):
        raise ValueError("no time")
    layout = "%y%m%d%H%M%SZ" if after[0] == UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode("ascii"), layout).replace(tzinfo=UTC).timestamp()


def _content(der: bytes, tag: int | None = None) -> tuple[bytes, bytes]:
    """(content of the first element, what follows it)."""
    if tag is not None and der[0] != tag:
        raise ValueError("not the element that belongs here")
    length, start = der[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[2:start], "big")
    if start + length > len(der):
        raise ValueError("cut off")
    return der[start : start + length], der[start + length :]


class NameGuard(aio.ServerInterceptor):
    """Before all services of a server: refuses calls of clients whose certificate has no allowed name. A refusal names
    the certificate's names; each set of names is logged once."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(name.lower() for name in allowed)
        self._refused: set[tuple[str, ...]] = set()
        self._log = logger("wire")

    async def intercept_service(self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
                                handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        for make, behavior in ((grpc.unary_unary_rpc_method_handler, handler.unary_unary),
                               (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
                               (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
                               (grpc.stream_stream_rpc_method_handler, handler.stream_stream)):
            if behavior is not None:
                return make(self._guarded(behavior), handler.request_deserializer, handler.response_serializer)
        return handler

    def _guarded(self, behavior: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            await self._check(context)
            return await behavior(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._check(context)
            async for response in behavior(request, context):
                yield response

        return stream if inspect.isasyncgenfunction(behavior) else call

    async def _check(self, context: Any) -> None:
        shown = certificate_names(context.auth_context())
        if any(name.lower() in self._allowed for name in shown):
            return
        if shown not in self._refused and len(self._refused) < MAX_REMEMBERED:
            self._refused.add(shown)
            self._log.warning("client refused: no allowed name in its certificate", shown=list(shown),
                              client=context.peer())
        await context.abort(grpc.StatusCode.PERMISSION_DENIED,
                            f"the certificate is for {', '.join(shown) or 'nobody'}; none of its names is allowed here")


def certificate_names(properties: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """The names in a client's certificate, from gRPC's properties of the connection."""
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        found = tuple(value.decode(errors="replace") for value in properties.get(key, ()))
        if found:
            return found
    return ()
