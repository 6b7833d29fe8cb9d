"""HTTPS with real handshakes: what is spoken, who may, and how a certificate is replaced."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import ssl
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.authority import Issued, self_signed, signed_by
from tests.e2e.harness import DEADLINE_S, Server, failing, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIM = ("--engine", "sim", "--sim-step-ms", "3", "--served-model-name", "m")
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class SecureServer(Server):
    """A server with a certificate, whose client trusts exactly that."""

    def __init__(self, issued: Issued, *flags: str, client: Issued | None = None) -> None:
        super().__init__(
            *SIM, "--tls-certificate", str(issued.certificate), "--tls-key", str(issued.key), *flags
        )
        self.trust = ssl.create_default_context(cafile=str(issued.certificate))
        if client is not None:
            self.trust.load_cert_chain(client.certificate, client.key)

    @property
    def url(self) -> str:
        return super().url.replace("http:", "https:")

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        with urllib.request.urlopen(
            self.url + path, context=self.trust, timeout=DEADLINE_S
        ) as answer:
            return answer.status, json.loads(answer.read())

    def connect(self, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)
        return (context or self.trust).wrap_socket(raw, server_hostname="127.0.0.1")

    def common_name(self) -> str:
        """The name in the certificate of a new connection, whoever has signed it."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with self.connect(context) as client:
            der = client.getpeercert(binary_form=True)
        assert der is not None
        return next(name for name in ("first", "second") if name.encode() in der)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return self_signed(tmp_path_factory.mktemp("first"), "first")


@pytest.fixture(scope="module")
def secure(first: Issued) -> Iterator[SecureServer]:
    with SecureServer(first, "--tls-handshake-timeout-s", "1") as server:
        yield server


def test_the_ready_line_says_https(secure: SecureServer) -> None:
    assert f"https://127.0.0.1:{secure.port}/v1" in secure.stdout


def test_openais_client_streams_over_it(secure: SecureServer) -> None:
    client = openai.OpenAI(
        base_url=f"{secure.url}/v1",
        api_key="none",
        http_client=openai.DefaultHttpxClient(verify=secure.trust),
    )
    with client:
        chunks = list(client.completions.create(model="m", prompt="a", max_tokens=20, stream=True))
        assert chunks[-1].choices[0].finish_reason == "length"
        whole = client.completions.create(model="m", prompt="a", max_tokens=20)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_these_versions_are_spoken(secure: SecureServer, version: ssl.TLSVersion) -> None:
    context = ssl.create_default_context(cadata=None)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2", "http/1.1"])
    with secure.connect(context) as client:
        assert client.version() == version.name.replace("_", ".")
        assert client.selected_alpn_protocol() == "http/1.1"
        client.sendall(HEALTH + HEALTH)
        received = b""
        while received.count(b'"ready"') < 2:
            received += client.recv(65_536)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_older_ones_are_not(secure: SecureServer) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, OSError)):
        secure.connect(context)


def test_who_speaks_no_tls_is_closed_and_harms_nobody(secure: SecureServer) -> None:
    """Plain HTTP, nonsense, half a handshake, and nothing at all."""
    with secure.connect() as bystander:
        clients = []
        for words in (HEALTH, b"\x00" * 1000, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b""):
            client = socket.create_connection(("127.0.0.1", secure.port), timeout=DEADLINE_S)
            client.sendall(words)
            clients.append(client)
        for client in clients:
            with client:
                began_s = time.monotonic()
                try:
                    while client.recv(4096):
                        pass  # an alert
                except ConnectionResetError:
                    pass
                assert time.monotonic() - began_s < 10  # the handshake's timeout is a second
        bystander.sendall(HEALTH)
        assert bystander.recv(65_536).startswith(b"HTTP/1.1 200")
    assert "raceback" not in secure.log
    assert " ERROR " not in secure.log


def test_a_client_that_goes_away_frees_its_place(secure: SecureServer) -> None:
    """By a proper end, and by a bare close."""
    body = json.dumps({"model": "m", "prompt": "a", "max_tokens": 4000, "stream": True})
    post = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()
    for properly in (True, False):
        client = secure.connect()
        client.sendall(post)
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        wait_until(lambda: secure.num_in_engine() == 1)
        if properly:
            with client, contextlib.suppress(OSError):
                client.unwrap()  # what the server was writing may come first, an error here
        else:
            client.close()
        wait_until(lambda: secure.num_in_engine() == 0, deadline_s=10.0)
    assert "raceback" not in secure.log
    assert "eof_received" not in secure.log


def test_who_stops_reading_is_aborted_and_failed_handshakes_hold_no_place(first: Issued) -> None:
    with SecureServer(
        first, "--frontends", "1", "--http-write-stall-timeout-s", "1",
        "--http-connections-max", "4", "--http-connections-refused-max", "0",
    ) as server:  # fmt: skip
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as client:
                client.sendall(HEALTH)
                with contextlib.suppress(ConnectionResetError):
                    while client.recv(4096):
                        pass
        asked = json.dumps(
            {"model": "m", "prompt": "a", "max_tokens": 8000, "stream": True, "n": 8, "logprobs": 5}
        )
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        raw.settimeout(DEADLINE_S)
        raw.connect(("127.0.0.1", server.port))
        with server.trust.wrap_socket(raw, server_hostname="127.0.0.1") as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(asked), asked.encode())
            )
            wait_until(lambda: server.num_in_engine() == 8)
            # The kernel's buffers take a few megabytes first.
            wait_until(lambda: server.num_in_engine() == 0, deadline_s=50.0)
        assert "raceback" not in server.log


def test_clients_need_a_certificate_if_told_so(first: Issued, tmp_path: Path) -> None:
    authority = self_signed(tmp_path, "authority")
    friend = signed_by(authority, tmp_path, "friend")
    stranger = self_signed(tmp_path, "stranger")
    with SecureServer(
        first, "--tls-client-ca", str(authority.certificate), client=friend
    ) as server:
        assert server.get("/health")[0] == 200
        for chain in (None, stranger):
            context = ssl.create_default_context(cafile=str(first.certificate))
            if chain is not None:
                context.load_cert_chain(chain.certificate, chain.key)
            server.trust = context
            with pytest.raises(OSError):  # noqa: PT011 - ssl's, or a reset
                server.get("/health")


def test_a_new_certificate_comes_in_with_hup_and_a_bad_one_does_not(
    first: Issued, tmp_path: Path
) -> None:
    second = self_signed(tmp_path, "second")
    issued = Issued(tmp_path / "now.pem", tmp_path / "now.key")

    def put(source: Issued) -> None:
        issued.certificate.write_bytes(source.certificate.read_bytes())
        issued.key.write_bytes(source.key.read_bytes())

    def replace_acceptors(server: SecureServer) -> None:
        before = {server.find("acceptor 0").pid, server.find("acceptor 1").pid}
        server.process.send_signal(signal.SIGHUP)

        def replaced() -> bool:
            now = {server.find("acceptor 0").pid, server.find("acceptor 1").pid}
            return len(now) == 2 and not now & before

        wait_until(replaced)

    put(first)
    with SecureServer(issued) as server:
        assert server.common_name() == "first"
        client = openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key="x",
            http_client=openai.DefaultHttpxClient(verify=server.trust),
        )
        with client:
            stream = iter(
                client.completions.create(model="m", prompt="a", max_tokens=400, stream=True)
            )
            next(stream)
            put(second)
            replace_acceptors(server)
            # The stream that was open when the certificate changed has lost nothing.
            assert len(list(stream)) >= 399
        wait_until(lambda: server.common_name() == "second")
        issued.certificate.write_text("no certificate any more")
        replace_acceptors(server)
        assert server.common_name() == "second"
        assert "credentials unchanged" in server.log
        assert server.process.poll() is None
        server.trust = ssl.create_default_context(cafile=str(second.certificate))
        assert server.get("/ready")[0] == 200


def test_a_bad_certificate_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "bad.pem"
    path.write_text("nothing")
    with failing(*SIM, "--tls-certificate", str(path)) as server:
        assert server.wait_exit() == 2
        assert "tls.certificate" in server.log
        assert server.log.count("\n") == 1, server.log
