"""API keys and certificates: how they are read, checked and handed to the acceptors.

The supervisor reads the files, anew for each acceptor that it spawns, and hands their content over
in the spawn arguments, never in argv, the environment or a file. So SIGHUP, which replaces the
acceptors, brings in new keys and a new certificate; and a file that has turned bad takes nothing
down: what was read before stays, and the log says why.

The only file that knows ssl.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from fastserve.errors import ConfigError
from fastserve.log import get_logger

log = get_logger("credentials")

# Each key costs a comparison for each request.
API_KEYS_MAX = 1024
API_KEY_CHARS_MAX = 1024
# No list of authorities is nearly as long; a device or a log file named by mistake may be.
_FILE_BYTES_MAX = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """PEM, as read. `key` None: it is with the certificate; `client_ca` None: clients need none."""

    certificate: bytes = field(repr=False)
    key: bytes | None = field(repr=False)
    client_ca: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What an acceptor is given. No `api_keys`: nobody needs one. No `certificates`: no TLS."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    certificates: Certificates | None = None


class CredentialFiles:
    """Where credentials come from. Paths are those of the settings; None where one is not set."""

    def __init__(
        self,
        *,
        api_keys: tuple[str, ...],
        api_key_file: str | None,
        certificate: str | None,
        key: str | None,
        client_ca: str | None,
    ) -> None:
        """Read everything once. Raises ConfigError."""
        self._api_keys = api_keys
        self._api_key_file = api_key_file
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self._last = self._read()

    def read(self) -> Credentials:
        """Read everything anew; whatever is wrong with it, return what was good last."""
        try:
            self._last = self._read()
        except ConfigError as error:
            log.error("credentials unchanged", reason=error.message)
        return self._last

    def _read(self) -> Credentials:
        keys = list(self._api_keys)
        _check_keys(keys, setting="server.api_key")
        if self._api_key_file is not None:
            keys += _keys_in(self._api_key_file)
        if len(keys) > API_KEYS_MAX:
            raise ConfigError(f"server.api_key: more than {API_KEYS_MAX} keys")
        return Credentials(api_keys=tuple(keys), certificates=self._read_certificates())

    def _read_certificates(self) -> Certificates | None:
        if self._certificate is None:
            return None
        found = Certificates(
            certificate=_read_file(self._certificate, setting="tls.certificate"),
            key=_read_file(self._key, setting="tls.key") if self._key else None,
            client_ca=_read_file(self._client_ca, setting="tls.client_ca")
            if self._client_ca
            else None,
        )
        server_context(found)
        return found


def server_context(certificates: Certificates) -> ssl.SSLContext:
    """Make what the port speaks TLS with. Raises ConfigError if the certificates will not do."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # RFC 8996: what came before is not to be spoken any more.
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        with _as_file(certificates.certificate) as chain, _as_file(certificates.key or b"") as key:
            context.load_cert_chain(
                chain.path, key.path if certificates.key else None, password=_no_password
            )
    except (ssl.SSLError, ValueError) as error:
        reason = "its key is encrypted" if isinstance(error, _EncryptedError) else error
        raise ConfigError(f"tls.certificate: no certificate with its key: {reason}") from None
    if certificates.client_ca is not None:
        try:
            context.load_verify_locations(cadata=certificates.client_ca.decode())
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"tls.client_ca: no certificates: {error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class _EncryptedError(ValueError):
    """A password was asked for."""


def _no_password() -> str:
    # Without this OpenSSL would ask the terminal, and the server would wait there.
    raise _EncryptedError


class _as_file:  # noqa: N801 - used as a function
    """Bytes with a path, for ssl reads certificates from files alone. Nothing touches a disk."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __enter__(self) -> _as_file:
        self._fd = os.memfd_create("fastserve-pem", os.MFD_CLOEXEC)
        os.write(self._fd, self._content)
        self.path = f"/proc/self/fd/{self._fd}"
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _keys_in(path: str) -> list[str]:
    """The keys of a file: one a line; empty lines and those that begin with # are passed over."""
    name = f"server.api_key_file: {path}"
    try:
        text = _read_file(path, setting="server.api_key_file").decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: not UTF-8") from None
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    # An emptied file must not open the server to everyone.
    if not keys:
        raise ConfigError(f"{name}: has no key")
    _check_keys(keys, setting=name)
    return keys


def _check_keys(keys: list[str], *, setting: str) -> None:
    for key in keys:
        visible = all("!" <= character <= "~" for character in key)
        if not visible or not 0 < len(key) <= API_KEY_CHARS_MAX:
            raise ConfigError(
                f"{setting}: a key is 1 to {API_KEY_CHARS_MAX} visible ASCII characters"
            )


def _read_file(path: str, *, setting: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: {path}: {error.strerror}") from None
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigError(f"{setting}: {path}: larger than {_FILE_BYTES_MAX} bytes")
    return content
