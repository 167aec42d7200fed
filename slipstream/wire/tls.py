"""Mutual TLS from PEM files: what both ends of a channel show and whom they trust.

Rules:
1. Both sides show a certificate; a server refuses clients whose certificate its CA did not sign.
2. A server looks at its files again at every new connection, so replaced certificates need no restart; connections
   that are open stay. A client reads them when it opens a channel, which a draft link does for every stream.

It knows nothing about addresses or services. Names of peers are checked by TLS itself, against the address dialled.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from slipstream.config import TlsSection
from slipstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the certificate chain shown, its private key, and the authorities trusted."""

    certificate: Path
    key: Path
    authority: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(certificate, key, authority). Raises ConfigError naming the file."""
        try:
            return self.certificate.read_bytes(), self.key.read_bytes(), self.authority.read_bytes()
        except OSError as error:
            raise ConfigError(f"tls: cannot read {error.filename}: {error.strerror}; "
                              "mount the file or correct its path") from error


def tls_files(section: TlsSection) -> TlsFiles | None:
    """The files that the configuration names; None for plain text."""
    if not section.certificate:
        return None
    return TlsFiles(Path(section.certificate), Path(section.key), Path(section.authority))


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


def _configuration(pem: tuple[bytes, bytes, bytes]) -> grpc.ServerCertificateConfiguration:
    certificate, key, authority = pem
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)
