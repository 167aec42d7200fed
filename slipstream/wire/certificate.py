"""When a certificate ends, read from its PEM file.

Only the way to that one field is parsed (RFC 5280, section 4.1): Certificate, tbsCertificate, validity, notAfter. The
file is our own; that it holds together is TLS's business. It knows nothing about names, keys or who signed.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime

from slipstream.base.errors import ConfigError

SEQUENCE, UTC_TIME, GENERALIZED_TIME, VERSION = 0x30, 0x17, 0x18, 0xA0


def ends_at(pem: bytes) -> float:
    """Unix time, in seconds, at which the first certificate of ``pem`` ends. Raises ConfigError."""
    try:
        first = pem.decode("ascii").split("-----BEGIN CERTIFICATE-----")[1].partition("-----END")[0]
        der = ssl.PEM_cert_to_DER_cert(f"-----BEGIN CERTIFICATE-----{first}-----END CERTIFICATE-----")
        return _not_after(der)
    except (ValueError, IndexError) as error:
        raise ConfigError("tls.certificate: holds no certificate that can be read; it must be PEM") from error


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
