"""What is refused, with an error of OpenAI's shape."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
import tiny_folder
from serving import MODEL, Served, served

from jaxkv import LLM
from jaxkv.server.limits import Limits

OPTIONS = {"rows": 4, "pool_blocks": 300, "block_size": 4, "prefill_chunk": 32}
CHAT = [{"role": "user", "content": "the cat"}]
GREEDY = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.make(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1000)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(LLM(str(folder), **OPTIONS)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return server.client()


REFUSED: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "other"}, 404, "model"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, 400, "messages"),
    ({"messages": [{"role": "user"}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 10**30}, 400, "max_tokens"),
    ({"max_tokens": 1001}, 400, "max_tokens"),
    ({"max_tokens": "5"}, 400, "max_tokens"),
    ({"max_tokens": True}, 400, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_completion_tokens"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": 1e308}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"n": 17}, 400, "n"),
    ({"n": 0}, 400, "n"),
    ({"seed": -1}, 400, "seed"),
    ({"seed": 2**32}, 400, "seed"),
    ({"stop": ["a"] * 17}, 400, "stop"),
    ({"stop": [""]}, 400, None),
    ({"min_tokens": 9, "max_tokens": 5}, 400, None),
    ({"stop_token_ids": [10**6]}, 400, None),
    ({"logit_bias": {"1": 2}}, 400, "logit_bias"),
    ({"tools": []}, 400, "tools"),
    ({"logprobs": True, "top_logprobs": 1}, 400, "top_logprobs"),
    ({"top_logprobs": 0}, 400, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"jaxkv": {"documents": [{"name": "a", "text": "b"}]}}, 400, "jaxkv"),
    ({"jaxkv": {"recompute_ratio": 0.1}}, 400, "jaxkv"),
    ({"jaxkv": {"documents": [], "recompute_ratio": 1.1}}, 400, "jaxkv"),
    ({"jaxkv": {"method": "h2o"}}, 400, "jaxkv"),
    ({"jaxkv": {"budget": 64}}, 400, "jaxkv"),
    ({"jaxkv": {"continue_from": "chatcmpl-0"}}, 400, "jaxkv"),
    ({"jaxkv": {"keep": True}, "n": 2}, 400, None),
    ({"messages": [{"role": "user", "content": "a " * 1500}]}, 400, "messages"),
]


@pytest.mark.parametrize(("change", "status", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_refusals_have_openai_s_shape(server: Served, change: dict[str, Any], status: int, param: str | None) -> None:
    body = {"model": MODEL, "messages": CHAT, "max_tokens": 3, **change}
    # As ASCII, so that half a surrogate pair can be sent.
    answer = server.post("/v1/chat/completions", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert len(error["message"]) < 400 and "Traceback" not in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_completions_are_refused_too(server: Served) -> None:
    wrong: list[dict[str, Any]] = [
        {"prompt": [[1, 2], "x"]},
        {"prompt": [1, "x"]},
        {"prompt": [1, 10**6]},
        {"prompt": [-1]},
        {"prompt": []},
        {"prompt": None},
        {"prompt": {"a": 1}},
        {"prompt": [True]},
        {"prompt": "a", "logprobs": 1},
        {"prompt": "a", "echo": True},
        {"prompt": "a", "best_of": 2},
        {"prompt": ["a"] * 300},
        {"prompt": [1] * 500_000 + ["x"]},
        {"prompt": [True] * 300_000},
    ]
    start = time.monotonic()
    for body in wrong:
        answer = server.post("/v1/completions", json={"model": MODEL, **body})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
    assert time.monotonic() - start < 5


def test_too_many_at_once_are_told_to_come_again(folder: Path) -> None:
    with served(LLM(str(folder), **OPTIONS), limits=Limits(queue=1)) as server:
        client = server.client()
        options = {**GREEDY, "prompt": "a", "max_tokens": 900, "extra_body": {"ignore_eos": True}}
        streams = [client.completions.create(**options, n=n, stream=True) for n in (3, 2)]
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**options)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "queue_full"
        with pytest.raises(openai.BadRequestError, match="6 continuations"):
            client.completions.create(**options, n=6)
        for stream in streams:
            stream.close()
        assert server.holds_nothing()
        assert client.completions.create(**{**options, "max_tokens": 2}).usage.completion_tokens == 2


def test_unknown_paths_and_methods(server: Served) -> None:
    for answer, status in (
        (httpx.get(server.url + "/v2"), 404),
        (httpx.get(server.url + "/v1/completions"), 405),
        (server.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}), 400),
    ):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
