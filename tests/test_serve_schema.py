"""schemathesis reads the OpenAPI document and sends what it allows, and what it does not: no 5xx, and no surprise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
import schemathesis
import tiny_folder
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving import MODEL, Served, served

from jaxkv import LLM
from jaxkv.server.limits import Limits

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
POSTS = ["/v1/completions", "/v1/chat/completions"]
PLAIN = frozenset({"model", "prompt", "messages", "temperature", "top_p", "seed", "top_k", "stream"})
LIMITS = Limits(max_tokens=8, n=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tiny_folder.make(tmp_path_factory.mktemp("tiny"))
    with served(LLM(str(folder), rows=2, pool_blocks=130, block_size=4, prefill_chunk=32), limits=LIMITS) as running:
        yield running


def schema(server: Served, fields: frozenset[str] | None = None) -> Any:
    """The document as it is, or with these fields of the bodies alone, so that more of what is sent gets through."""
    document = httpx.get(server.url + "/openapi.json").json()
    for name in ("CompletionRequest", "ChatRequest"):
        properties = document["components"]["schemas"][name]["properties"]
        # Without this nearly every request would end at a model that is unknown.
        properties["model"] = {"type": "string", "enum": [MODEL] if fields else [MODEL, "other"]}
        for field in set(properties) - (fields or set(properties)):
            del properties[field]
    made = schemathesis.openapi.from_dict(document)
    made.config.update(base_url=server.url)
    return made


def send(operation: Any, mode: GenerationMode) -> set[int]:
    """Send what a document makes of one operation; return the statuses that came back."""
    answered: set[int] = set()

    # What schemathesis has for pytest does not know pytest 9, so its strategies are drawn from directly.
    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def every(case: Any) -> None:
        answer = case.call()
        answered.add(answer.status_code)
        case.validate_response(answer, checks=CHECKS)

    every()
    return answered


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", POSTS)
def test_no_body_is_answered_with_a_5xx_or_in_another_shape(server: Served, path: str, mode: GenerationMode) -> None:
    assert 400 in send(schema(server)[path]["POST"], mode)
    assert server.holds_nothing()


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_get_through_are_answered_as_the_document_says(server: Served, path: str) -> None:
    assert 200 in send(schema(server, PLAIN)[path]["POST"], GenerationMode.POSITIVE)
    assert server.holds_nothing()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{model}", "/health", "/metrics", "/pool"])
def test_what_is_looked_at_is_as_the_document_says(server: Served, path: str) -> None:
    assert send(schema(server)[path]["GET"], GenerationMode.POSITIVE) <= {200, 404}


def test_the_document_is_of_this_server(server: Served) -> None:
    document = httpx.get(server.url + "/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/health",
        "/metrics",
        "/pool",
    }
    assert "422" not in str(document)
    assert server.holds_nothing()
