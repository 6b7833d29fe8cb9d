"""Which models a server lists: the first thing a client asks."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastserve.load.plan import Target

_ASK_TIMEOUT_S = 2.0


def ask_model(target: Target) -> str | None:
    """The first model that a server lists, or None while it lists none."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=_ASK_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    try:
        connection.request("GET", target.models_path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        return str(json.loads(body)["data"][0]["id"]) if answer.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return None
    finally:
        connection.close()
