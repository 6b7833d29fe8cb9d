"""The page at `/`: one file, which asks nothing of anybody but this server.

The page itself needs no key: it holds nothing, and asks for one when the server wants it. Its
policy lets a browser run its own script and style, known by their digests, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastserve.http1.message import Response

_FILE = Path(__file__).with_name("page.html")


def page() -> Response:
    """The answer to GET /."""
    body = _FILE.read_bytes()
    # Content Security Policy Level 3, 6.7.3: the digest of what is between the tags.
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        f"script-src {_digests(body, 'script')}; style-src {_digests(body, 'style')}; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return Response(
        200,
        body=body,
        content_type=b"text/html; charset=utf-8",
        headers=(
            (b"Content-Security-Policy", policy.encode()),
            (b"X-Content-Type-Options", b"nosniff"),
            (b"Referrer-Policy", b"no-referrer"),
            (b"Cache-Control", b"no-cache"),
        ),
    )


def _digests(body: bytes, tag: str) -> str:
    inner = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), body, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(one).digest()).decode() for one in inner]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
