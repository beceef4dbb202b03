"""What is jaxkv's own in a request: its budget, and going on from a kept row."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny_folder
from serving import MODEL, Served, served
from tiny_tokenizers import TEMPLATE, byte_level

from jaxkv import LLM, SamplingParams
from jaxkv.compression import CompressionConfig
from jaxkv.server.continuation import new_turn

OPTIONS = {"rows": 4, "pool_blocks": 300, "block_size": 4, "prefill_chunk": 32}
CHAT = [{"role": "user", "content": "the cat"}]
GREEDY = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.make(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1000)


@pytest.fixture(scope="module")
def library(folder: Path) -> LLM:
    """The same model beside the server, to compare with."""
    return LLM(str(folder), **OPTIONS)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(LLM(str(folder), **OPTIONS)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return server.client()


def test_a_request_has_its_own_budget_and_is_told_what_came_back(folder: Path) -> None:
    config = CompressionConfig(method="knorm", budget=64, interval=16, window=8)
    with served(LLM(str(folder), **OPTIONS, compression=config)) as server:
        client = server.client()

        def report(own: dict[str, Any]) -> dict[str, Any]:
            answer = client.completions.create(
                **GREEDY, prompt="abc", max_tokens=200, extra_body={"jaxkv": own, "ignore_eos": True}
            )
            return answer.choices[0].jaxkv  # type: ignore[attr-defined]

        default, own, none = report({}), report({"budget": 32}), report({"method": "none"})
        assert default["blocks_returned"] > 0 and default["blocks_peak"] == 20
        assert own["blocks_returned"] > default["blocks_returned"] and own["blocks_peak"] == 12
        assert none["blocks_returned"] == 0 and none["blocks_peak"] == none["blocks_peak_uncompressed"]
        returned = server.metric("jaxkv:blocks_returned_total")
        assert returned == default["blocks_returned"] + own["blocks_returned"] == server.pool()["blocks_returned"]
        assert server.metric("jaxkv:compactions_total") == default["compactions"] + own["compactions"]
        assert server.metric("jaxkv:tokens_evicted_total") == default["tokens_evicted"] + own["tokens_evicted"]
        assert server.metric("jaxkv:compaction_seconds_count") > 0
        for refused in ({"method": "h2o"}, {"method": "none", "budget": 9}, {"budget": 0}, {"budget": 5}):
            with pytest.raises(openai.BadRequestError):
                report(refused)


def test_a_chat_goes_on_from_its_kept_row(server: Served, client: openai.OpenAI, library: LLM) -> None:
    first = client.chat.completions.create(
        **GREEDY, messages=CHAT, max_tokens=10, logprobs=True, extra_body={"jaxkv": {"keep": True}}
    )
    assert first.choices[0].finish_reason == "length"
    second = client.chat.completions.create(
        **GREEDY,
        messages=[{"role": "user", "content": "and the dog"}],
        max_tokens=10,
        extra_body={"jaxkv": {"continue_from": first.id, "keep": True}},
    )
    (answer,) = library.generate([CHAT], SamplingParams(max_tokens=10))
    suffix = (
        byte_level()
        .backend.encode(
            "<|im_end|>\n<|im_start|>user\nand the dog<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
        )
        .ids
    )
    history = [*library.encode(CHAT), *answer.token_ids]
    (expected,) = library.generate([[*history, *suffix]], SamplingParams(max_tokens=10))
    assert second.choices[0].message.content == expected.text
    assert second.usage.prompt_tokens == len(history) + len(suffix)
    assert second.usage.prompt_tokens_details.cached_tokens == len(history)
    assert second.choices[0].jaxkv["history"] == "whole"  # type: ignore[attr-defined]

    raw = client.completions.create(
        **GREEDY, prompt="", max_tokens=5, extra_body={"jaxkv": {"continue_from": second.id}}
    )
    (more,) = library.generate([[*history, *suffix]], SamplingParams(max_tokens=15))
    assert second.choices[0].message.content + raw.choices[0].text == more.text
    for name in list(server.engine.memory.kept):
        server.engine.forget(name)
    with pytest.raises(openai.BadRequestError, match="no row is kept"):
        client.chat.completions.create(**GREEDY, messages=CHAT, extra_body={"jaxkv": {"continue_from": first.id}})


def test_a_new_turn_is_what_the_template_puts_after_an_answer() -> None:
    tokenizer = byte_level()
    messages = [{"role": "user", "content": "hi"}]
    end = tokenizer.backend.token_to_id("<|im_end|>")
    text = "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    rest = tokenizer.backend.encode(text, add_special_tokens=False).ids
    # The bos that the template writes at a text's beginning is not in there.
    assert new_turn(tokenizer, messages, last_token=end) == rest
    assert new_turn(tokenizer, messages, last_token=end + 1) == [end, *rest]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{{ messages | length }}", "another past"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "special token"),
        ("{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}", "as they are"),
        (TEMPLATE.replace("'tool'", "'user'"), "no tools"),
        (None, "no chat template"),
    ],
)
def test_templates_that_do_not_allow_it_are_refused(template: str | None, message: str) -> None:
    tokenizer = byte_level()
    fast = copy.deepcopy(tokenizer.fast)
    fast.chat_template = template
    with pytest.raises(ValueError, match=message):
        new_turn(dataclasses.replace(tokenizer, fast=fast), [{"role": "user", "content": "hi"}], last_token=0)
