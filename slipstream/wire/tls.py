"""Mutual TLS from PEM files: what both ends of a channel show and whom they trust.

Rules:
1. Both sides show a certificate; a server refuses clients whose certificate its CA did not sign, or (``doorman``) whose
   certificate bears none of the allowed names.
2. Replaced files need no restart: a server looks at them at every new connection, a client when it opens a channel,
   which a draft link does for every stream and a target's client when the files change. Connections that are open stay.
3. A client checks the server's name: the one dialled, unless ``server_name`` says another.

It knows nothing about addresses or services.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import structlog

from slipstream.base.config import TlsSection
from slipstream.base.errors import ConfigError
from slipstream.base.stamp import Stamp, stamp
from slipstream.wire.certificate import ends_at

LOOK_S = 10.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the certificate chain shown, its private key, and the authorities trusted; and names.

    ``server_name``: what servers must show, "" for the name that is dialled. ``allowed_names``: of which clients must
    show one, () for anybody whom the authority signed."""

    certificate: Path
    key: Path
    authority: Path
    server_name: str = ""
    allowed_names: tuple[str, ...] = ()

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(certificate, key, authority). Raises ConfigError naming the file."""
        try:
            return self.certificate.read_bytes(), self.key.read_bytes(), self.authority.read_bytes()
        except OSError as error:
            raise ConfigError(f"tls: cannot read {error.filename}: {error.strerror}; "
                              "mount the file or correct its path") from error

    def stamp(self) -> Stamp | None:
        """Changes when a file is replaced."""
        return stamp(self.certificate, self.key, self.authority)


def tls_files(section: TlsSection) -> TlsFiles | None:
    """The files that the configuration names; None for plain text."""
    if not section.certificate:
        return None
    return TlsFiles(Path(section.certificate), Path(section.key), Path(section.authority), section.server_name,
                    section.allowed_names)


def dialling(files: TlsFiles | None, name: str) -> TlsFiles | None:
    """The same for a peer that is dialled by IP address and shows a certificate for ``name``; the configuration's
    ``server_name`` comes first."""
    return files if files is None or files.server_name else replace(files, server_name=name)


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """For a client. Raises ConfigError for a file that cannot be read."""
    certificate, key, authority = files.read()
    return grpc.ssl_channel_credentials(authority, key, certificate)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """For a server that insists on client certificates. Raises ConfigError for a file that cannot be read."""
    first = _configuration(files.read())

    def fetch() -> grpc.ServerCertificateConfiguration:
        try:
            return _configuration(files.read())
        except ConfigError:
            return first  # in the middle of being replaced

    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=True)


async def export_end(files: TlsFiles | None, export: Callable[[float], None], look_s: float = LOOK_S) -> None:
    """Hand the Unix time at which our certificate ends to ``export``, again when it is replaced, until cancelled."""
    log = structlog.get_logger(part="wire")
    known: Stamp | None = None
    while files is not None:
        found = stamp(files.certificate)
        if found is not None and found != known:
            try:
                export(ends_at(files.certificate.read_bytes()))
                if known is not None:
                    log.info("certificate replaced")
                known = found
            except (ConfigError, OSError) as error:
                log.warning("certificate cannot be read", problem=str(error))
        await asyncio.sleep(look_s)


def _configuration(pem: tuple[bytes, bytes, bytes]) -> grpc.ServerCertificateConfiguration:
    certificate, key, authority = pem
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)
