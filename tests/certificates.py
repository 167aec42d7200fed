"""Certificates for tests, made with the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from slipstream.wire.tls import FILE_NAMES, TlsFiles

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")

KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


def authority(folder: Path, name: str = "ca") -> Path:
    """A folder that signs."""
    folder.mkdir()
    run(folder, f"req -x509 {KEY} -days 2 -keyout ca.key -out ca.pem -subj /CN={name}")
    return folder


def laid(files: TlsFiles, folder: Path) -> Path:
    """``folder``, with these files in it as a service looks for them."""
    folder.mkdir()
    for name, file in zip(FILE_NAMES, (files.certificate, files.key, files.authority), strict=True):
        (folder / name).write_bytes(file.read_bytes())
    return folder


def issue(folder: Path, name: str, names: str = "IP:127.0.0.1,DNS:localhost", days: float = 2) -> TlsFiles:
    """A certificate for ``names`` (openssl's notation, "" for none), signed by the folder's authority; negative
    ``days``: it ended so long ago."""
    run(folder, f"req {KEY} -keyout {name}.key -out {name}.csr -subj /CN={name}")
    (folder / "ext").write_text(f"subjectAltName={names}\n" if names else "basicConstraints=CA:FALSE\n")
    run(folder, f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial {lasting(days)} -extfile ext "
                f"-out {name}.pem")
    return TlsFiles(folder / f"{name}.pem", folder / f"{name}.key", folder / "ca.pem")


def lasting(days: float) -> str:
    """openssl's words for it. Releases that know dates take no negative days."""
    dated = days < 0 and "-not_after" in run(Path(), "x509 -help")
    return "-not_before 20200101000000Z -not_after 20200102000000Z" if dated else f"-days {days}"


def replace_files(old: TlsFiles, new: TlsFiles) -> None:
    """Put ``new`` in the place of ``old``, a file at a time."""
    for place, source in ((old.certificate, new.certificate), (old.key, new.key), (old.authority, new.authority)):
        fresh = place.with_suffix(".new")
        fresh.write_bytes(source.read_bytes())
        fresh.rename(place)


def run(folder: Path, arguments: str) -> str:
    """What it wrote."""
    done = subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout + done.stderr
