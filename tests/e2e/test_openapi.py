"""The document that a server gives of itself, held against that server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.api.bodies import FINE, WRONG
from tests.api.json_schema import fits
from tests.e2e.wire import Wire

if TYPE_CHECKING:
    from tests.e2e.harness import Server


@pytest.fixture(scope="module")
def document(sim: Server) -> Any:
    status, body = sim.get("/openapi.json")
    assert status == 200
    return body


@pytest.mark.parametrize("path", FINE)
def test_bodies_that_fit_are_answered(
    sim: Server, embedder: Server, document: Any, path: str
) -> None:
    server = _server_of(path, sim, embedder)
    operation = document["paths"][path]["post"]
    [media] = operation["requestBody"]["content"].values()
    for body in FINE[path]:
        # Without a limit of its own an answer fills the context, which is not what we wait for.
        short = {"sim": {"token_ids": [100]}} if "sim" in _properties(document, media) else {}
        assert fits(body | short, media["schema"], document=document)
        with Wire(server.port) as wire:
            answer = wire.post(path, **body, **short).read_json()
            if wire.status == 400:
                # What needs a grammar does so on any server, but this engine can follow none.
                assert "this engine cannot follow" in str(answer)
                continue
            assert wire.status == 200, answer
            [told, *_] = operation["responses"]["200"]["content"].values()
            assert wire.headers["content-type"] in operation["responses"]["200"]["content"]
            assert fits(answer, told["schema"], document=document), answer


@pytest.mark.parametrize("path", WRONG)
def test_bodies_that_do_not_fit_are_refused_as_it_says(
    sim: Server, embedder: Server, document: Any, path: str
) -> None:
    server = _server_of(path, sim, embedder)
    operation = document["paths"][path]["post"]
    [media] = operation["requestBody"]["content"].values()
    [error] = operation["responses"]["default"]["content"].values()
    for body in WRONG[path]:
        assert not fits(body, media["schema"], document=document)
        with Wire(server.port) as wire:
            answer = wire.post(path, **body).read_json()
            assert wire.status == 400, answer
            assert fits(answer, error["schema"], document=document)


def test_every_route_that_is_read_answers(sim: Server, document: Any) -> None:
    for path, item in document["paths"].items():
        if "get" not in item or path == "/metrics":
            continue
        status, answer = sim.get(path.replace("{model}", "x").replace("{response}", "x"))
        assert status == (404 if "{" in path else 200), path
        told = item["get"]["responses"]["default" if "{" in path else "200"]["content"]
        assert fits(answer, told["application/json"]["schema"], document=document), answer


def test_a_stored_response_answers_as_it_says(sim: Server, document: Any) -> None:
    with Wire(sim.port) as wire:
        response = wire.post(
            "/v1/responses",
            input="Hi",
            max_output_tokens=2,
            include=["message.output_text.logprobs"],
        ).read_json()
    for path, item in document["paths"].items():
        if "{response}" in path and "get" in item:
            _, answer = sim.get(path.replace("{response}", response["id"]))
            told = item["get"]["responses"]["200"]["content"]["application/json"]
            assert fits(answer, told["schema"], document=document), answer


def _server_of(path: str, sim: Server, embedder: Server) -> Server:
    """Whichever of the two has the route."""
    return embedder if path == "/v1/embeddings" else sim


def _properties(document: Any, media: Any) -> Any:
    name = media["schema"]["$ref"].rpartition("/")[2]
    return document["components"]["schemas"][name]["properties"]
