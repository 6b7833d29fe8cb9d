"""Certificates for tests, made by the openssl command in a second."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

EXTENSIONS = "subjectAltName=IP:127.0.0.1,DNS:localhost"


@dataclass(frozen=True, slots=True)
class Issued:
    """Two PEM files."""

    certificate: Path
    key: Path


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


def self_signed(directory: Path, name: str, *, password: str | None = None) -> Issued:
    """A certificate that is its own authority, for 127.0.0.1; `name` is its common name."""
    issued = Issued(directory / f"{name}.pem", directory / f"{name}.key")
    encrypted = ["-noenc"] if password is None else ["-passout", f"pass:{password}"]
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *encrypted,
        "-keyout", str(issued.key), "-out", str(issued.certificate), "-days", "2",
        "-subj", f"/CN={name}", "-addext", EXTENSIONS,
    )  # fmt: skip
    return issued


def signed_by(authority: Issued, directory: Path, name: str) -> Issued:
    """A certificate that `authority` has signed."""
    issued = Issued(directory / f"{name}.pem", directory / f"{name}.key")
    request = directory / f"{name}.csr"
    openssl(
        "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc",
        "-keyout", str(issued.key), "-out", str(request), "-subj", f"/CN={name}",
    )  # fmt: skip
    openssl(
        "x509", "-req", "-in", str(request), "-CA", str(authority.certificate),
        "-CAkey", str(authority.key), "-CAcreateserial", "-days", "2",
        "-out", str(issued.certificate),
    )  # fmt: skip
    return issued
