"""Keys and certificates: what is read, what is refused, and what stays when a file turns bad."""

from __future__ import annotations

import re
import ssl
from typing import TYPE_CHECKING, Any

import pytest

from fastserve.credentials import CredentialFiles, Credentials, server_context
from fastserve.errors import ConfigError
from tests.authority import Issued, self_signed

if TYPE_CHECKING:
    from pathlib import Path

KEY_RULE = "a key is 1 to 1024 visible ASCII characters"


def files(**given: Any) -> CredentialFiles:
    nothing: dict[str, Any] = {
        "api_keys": (), "api_key_file": None, "certificate": None, "key": None, "client_ca": None,
    }  # fmt: skip
    return CredentialFiles(**nothing | {name: str(v) if v else v for name, v in given.items()})


def file_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return self_signed(tmp_path_factory.mktemp("server"), "server")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return self_signed(tmp_path_factory.mktemp("other"), "other")


def test_keys_come_from_the_settings_and_the_file(tmp_path: Path) -> None:
    path = file_of(tmp_path, "# the team's\n\n  second \r\nthird#3\n")
    found = CredentialFiles(
        api_keys=("first",), api_key_file=str(path), certificate=None, key=None, client_ca=None
    ).read()
    assert found.api_keys == ("first", "second", "third#3")
    assert found.certificates is None
    assert "second" not in repr(found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no key"),
        ("# only a comment\n\n", "has no key"),
        ("two words\n", KEY_RULE),
        ("schlüssel\n", KEY_RULE),
        ("k" * 1025, KEY_RULE),
        ("\n".join(f"key-{number}" for number in range(1025)), "more than 1024 keys"),
        ("k\n" * (3 << 20), "larger than 4194304 bytes"),
    ],
    ids=["empty", "no key", "a space", "not ASCII", "long", "many", "large"],
)
def test_a_file_without_proper_keys_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as refusal:
        files(api_key_file=file_of(tmp_path, text))
    assert "two words" not in str(refusal.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^server\.api_key_file: /no/such: No such file"):
        files(api_key_file="/no/such")
    with pytest.raises(ConfigError, match="Is a directory"):
        files(api_key_file=tmp_path)


def test_a_changed_file_is_read_and_a_bad_one_changes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = file_of(tmp_path, "first")
    credentials = files(api_key_file=path)
    path.write_text("second")
    assert credentials.read() == Credentials(api_keys=("second",))
    for text in ("", "with a space"):
        path.write_text(text)
        assert credentials.read() == Credentials(api_keys=("second",))
    path.unlink()
    assert credentials.read() == Credentials(api_keys=("second",))


def test_a_certificate_and_its_key_make_a_context(server: Issued) -> None:
    found = files(certificate=server.certificate, key=server.key).read().certificates
    assert found is not None
    context = server_context(found)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.verify_mode is ssl.CERT_NONE
    assert "PRIVATE" not in repr(found)


def test_both_may_be_in_one_file(server: Issued, tmp_path: Path) -> None:
    path = tmp_path / "both.pem"
    path.write_bytes(server.certificate.read_bytes() + server.key.read_bytes())
    found = files(certificate=path).read().certificates
    assert found is not None
    assert "PRIVATE" not in repr(found)


def test_with_an_authority_clients_need_a_certificate(server: Issued, other: Issued) -> None:
    found = files(
        certificate=server.certificate, key=server.key, client_ca=other.certificate
    ).read()
    assert found.certificates is not None
    assert server_context(found.certificates).verify_mode is ssl.CERT_REQUIRED


def test_certificates_that_will_not_do_are_refused(
    server: Issued, other: Issued, tmp_path: Path
) -> None:
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("no PEM")
    secret = self_signed(tmp_path, "secret", password="password")
    for given, problem in (
        ({"certificate": "/no/such"}, "tls.certificate: /no/such: No such file or directory"),
        ({"certificate": nonsense}, "tls.certificate: no certificate with its key"),
        ({"certificate": server.certificate}, "tls.certificate: no certificate with its key"),
        ({"certificate": server.certificate, "key": other.key}, "KEY_VALUES_MISMATCH"),
        ({"certificate": secret.certificate, "key": secret.key}, "its key is encrypted"),
        (
            {"certificate": server.certificate, "key": server.key, "client_ca": nonsense},
            "tls.client_ca: no certificates",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(problem)):
            files(**given)


def test_a_certificate_that_turns_bad_is_not_taken(
    server: Issued, other: Issued, tmp_path: Path
) -> None:
    certificate, key = tmp_path / "now.pem", tmp_path / "now.key"
    certificate.write_bytes(server.certificate.read_bytes())
    key.write_bytes(server.key.read_bytes())
    credentials = files(certificate=certificate, key=key)
    certificate.write_bytes(other.certificate.read_bytes())  # and not yet its key
    half_way = credentials.read().certificates
    assert half_way is not None
    assert half_way.certificate == server.certificate.read_bytes()
    key.write_bytes(other.key.read_bytes())
    done = credentials.read().certificates
    assert done is not None
    assert done.certificate == other.certificate.read_bytes()
