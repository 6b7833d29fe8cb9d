"""Requests as bytes, beside what must become of them, with the rule that says so.

A file of the corpus begins with comments: the rule, then what is expected, one line a message:
`accepted METHOD TARGET VERSION keep-alive|close BODY`, `refused STATUS`, or `incomplete`. The rest
is the bytes: line breaks are dropped, and escapes are Python's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fastserve.http1.limits import Limits
from fastserve.http1.message import ProtocolError, RequestHead
from fastserve.http1.reader import RequestReader

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.http"))


def unescape(text: str) -> bytes:
    return text.encode("latin-1").decode("unicode_escape").encode("latin-1")


def load(path: Path) -> tuple[bytes, list[bytes]]:
    """The bytes of a case and the outcomes expected of them."""
    lines = path.read_text().splitlines()
    comments = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    message = "".join(line for line in lines if not line.startswith("# "))
    expected = [unescape(comment) for comment in comments[1:] if comment != "incomplete"]
    return unescape(message), expected


def outcomes(*pieces: bytes) -> list[bytes]:
    """What becomes of a connection's bytes, in the words of the corpus."""
    reader = RequestReader(Limits())
    found: list[bytes] = []
    head: RequestHead | None = None
    try:
        for piece in pieces:
            reader.feed(piece)
            while True:
                head = head or reader.next_head()
                body = None if head is None else reader.next_body()
                if head is None or body is None:
                    break
                found.append(accepted(head, body))
                head = None
    except ProtocolError as error:
        found.append(b"refused %d" % error.status)
    return found


def accepted(head: RequestHead, body: bytes) -> bytes:
    target = head.path + ("?" + head.query if head.query else "")
    persistence = "keep-alive" if head.keep_alive else "close"
    line = f"accepted {head.method} {target} HTTP/1.{head.minor} {persistence}".encode()
    return line + b" " + body if body else line


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_message_means_what_the_rule_says(path: Path) -> None:
    message, expected = load(path)
    assert outcomes(message) == expected


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_it_means_the_same_one_byte_at_a_time(path: Path) -> None:
    message, expected = load(path)
    assert outcomes(*(bytes([byte]) for byte in message)) == expected


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_it_means_the_same_wherever_it_is_split(path: Path) -> None:
    message, expected = load(path)
    for position in range(1, len(message)):
        found = outcomes(message[:position], message[position:])
        assert found == expected, f"split before byte {position}"


def test_the_corpus_is_there() -> None:
    assert len(CORPUS) > 100
    for path in CORPUS:
        assert path.read_text().startswith(("# RFC ", "# CVE-")), path.name
