"""The server by the official client: what it says is what the library says."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny_folder
from serving import MODEL, Served, eventually, say, served
from tiny_tokenizers import byte_level

from jaxkv import LLM, SamplingParams

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


def streamed(stream: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """Return texts and finish reasons by choice, and the usage."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            new = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (new or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


# -- chat and completion -----------------------------------------------------------------------------------------------


def test_a_chat_is_what_the_library_makes_of_it(client: openai.OpenAI, library: LLM) -> None:
    (expected,) = library.generate([CHAT], SamplingParams(max_tokens=20))
    answer = client.chat.completions.create(messages=CHAT, max_tokens=20, **GREEDY)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (expected.prompt_tokens, 20)
    assert answer.usage.total_tokens == expected.prompt_tokens + 20


def test_completions_of_several_prompts_come_in_order(client: openai.OpenAI, library: LLM) -> None:
    prompts: list[Any] = ["the dog", "x" * 50]
    params = [SamplingParams(max_tokens=9, temperature=0.8, seed=seed, n=2) for seed in (7, 9)]
    expected = library.generate(prompts, params, raw=True)
    options = {"model": MODEL, "temperature": 0.8, "seed": 7, "n": 2, "max_tokens": 9}
    answer = client.completions.create(prompt=prompts, **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [one.text for one in expected]
    assert answer.usage.prompt_tokens == expected[0].prompt_tokens + expected[2].prompt_tokens
    assert answer.usage.completion_tokens == sum(one.generated_tokens for one in expected)
    ids = [library.encode(prompt, raw=True) for prompt in prompts]
    assert [c.text for c in client.completions.create(prompt=ids, **options).choices] == [one.text for one in expected]
    (alone,) = client.completions.create(prompt=ids[1], **{**options, "n": 1, "seed": 10}).choices
    assert alone.text == expected[3].text
    texts, reasons, _ = streamed(client.completions.create(prompt=prompts, stream=True, **options))
    assert [texts[at] for at in range(4)] == [one.text for one in expected]
    assert [reasons[at] for at in range(4)] == [one.finish_reason for one in expected]


def test_seeds_make_a_text_again_and_none_does_not(client: openai.OpenAI) -> None:
    def text(**options: Any) -> str:
        return (
            client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=24, **options)
            .choices[0]
            .message.content
        )

    assert text(seed=3) == text(seed=3) != text(seed=4)
    assert text() != text()


def test_a_stream_says_the_same_and_ends_with_its_usage(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": CHAT, "max_tokens": 30, "seed": 1, "n": 2}
    whole = client.chat.completions.create(**options)
    texts, reasons, usage = streamed(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert reasons[choice.index] == choice.finish_reason
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert streamed(client.chat.completions.create(**options, stream=True))[2] is None


def test_events_are_as_they_should_be(server: Served) -> None:
    body = {"model": MODEL, "messages": CHAT, "max_tokens": 5, "stream": True}
    answer = server.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith('data: {"id":"chatcmpl-') for line in lines[:-2])
    assert '"delta":{"role":"assistant","content":""}' in lines[0]


TEXT = "안녕하세요 naïve 😀👩‍👩‍👧 日本語 끝"
FAMILY = "👩‍👧"


@pytest.mark.parametrize(
    ("stop", "expected"), [(None, TEXT), ("세요 n", "안녕하"), (["語 끝!", FAMILY], TEXT.partition(FAMILY)[0])]
)
def test_characters_and_stop_strings_over_many_tokens(
    server: Served, client: openai.OpenAI, stop: Any, expected: str
) -> None:
    ids = byte_level().encode(TEXT)
    assert len(ids) > len(TEXT)
    options = {**GREEDY, "messages": CHAT, "max_tokens": len(ids), "stop": stop}
    with say(server.engine, ids):
        whole = client.chat.completions.create(**options).choices[0]
        texts, reasons, _ = streamed(client.chat.completions.create(**options, stream=True))
    assert whole.message.content == texts[0] == expected
    assert whole.finish_reason == reasons[0] == ("length" if stop is None else "stop")


def test_sixteen_clients_at_once_each_get_their_solo_text(client: openai.OpenAI, library: LLM) -> None:
    def text(seed: int) -> str:
        options = {
            "model": MODEL,
            "max_tokens": 20 + seed,
            "seed": seed,
            "messages": [{"role": "user", "content": "a" * (1 + 9 * seed)}],
        }
        if seed % 2:
            return streamed(client.chat.completions.create(**options, stream=True))[0][0]
        return client.chat.completions.create(**options).choices[0].message.content

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        texts = list(threads.map(text, range(16)))
    for seed in range(16):
        params = SamplingParams(max_tokens=20 + seed, seed=seed, temperature=1.0)
        assert texts[seed] == library.generate("a" * (1 + 9 * seed), params)[0].text


def test_logprobs_are_the_library_s(client: openai.OpenAI, library: LLM) -> None:
    (expected,) = library.generate([CHAT], SamplingParams(max_tokens=12, logprobs=True))
    options = {**GREEDY, "messages": CHAT, "max_tokens": 12, "logprobs": True, "top_logprobs": 0}
    content = client.chat.completions.create(**options).choices[0].logprobs.content
    assert [one.logprob for one in content] == pytest.approx(expected.logprobs, abs=1e-6)
    assert b"".join(bytes(one.bytes or b"") for one in content).decode() == expected.text
    parts = [
        one
        for event in client.chat.completions.create(**options, stream=True)
        for choice in event.choices
        if choice.logprobs
        for one in choice.logprobs.content
    ]
    assert parts == content

    (raw,) = library.generate(["the cat"], SamplingParams(max_tokens=12, logprobs=True), raw=True)
    answer = client.completions.create(**GREEDY, prompt="the cat", max_tokens=12, logprobs=0).choices[0]
    assert answer.text == raw.text
    assert answer.logprobs.token_logprobs == pytest.approx(raw.logprobs, abs=1e-6)
    assert "".join(answer.logprobs.tokens) == raw.text
    for token, offset in zip(answer.logprobs.tokens, answer.logprobs.text_offset, strict=True):
        assert raw.text.startswith(token, offset)


def test_what_vllm_has_beyond_openai_reaches_the_engine(client: openai.OpenAI, library: LLM) -> None:
    extra = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.3, "min_tokens": 4, "ignore_eos": True}
    params = SamplingParams(
        max_tokens=25, temperature=0.9, seed=2, top_p=0.9, presence_penalty=0.5, frequency_penalty=-0.5, **extra
    )
    (expected,) = library.generate("the", params)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "the"}]}],
        max_completion_tokens=25,
        temperature=0.9,
        seed=2,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        extra_body=extra,
    )
    assert answer.choices[0].message.content == expected.text


def test_cached_tokens_and_whose_they_are(client: openai.OpenAI) -> None:
    def cached(**options: Any) -> int:
        messages = [{"role": "user", "content": "it is 12, 123, 1234 or 2024"}]
        answer = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=2, **options)
        return answer.usage.prompt_tokens_details.cached_tokens

    # What the template begins with may be there from other tests.
    assert cached() <= 4 < (found := cached())
    assert found % 4 == 0
    assert cached(user="somebody") == 0
    assert cached(user="somebody") == found
    assert cached(user="somebody", extra_body={"cache_salt": "a"}) == 0


def test_max_tokens_is_what_fits_if_nobody_says(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, messages=CHAT, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 1000
    assert answer.choices[0].finish_reason == "length"
    assert (
        client.completions.create(**GREEDY, prompt="a", extra_body={"ignore_eos": True}).usage.completion_tokens == 16
    )


# -- models, metrics, pool ---------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_metrics_have_vllm_s_names_and_count(server: Served, client: openai.OpenAI) -> None:
    before = {name: server.metric(name) for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")}
    lengths = server.metric("vllm:request_success_total", finished_reason="length")
    first = server.metric("vllm:time_to_first_token_seconds_count")
    between = server.metric("vllm:inter_token_latency_seconds_count")
    usage = client.completions.create(**GREEDY, prompt="abc", n=2, max_tokens=7, extra_body={"ignore_eos": True}).usage
    assert server.metric("vllm:prompt_tokens_total") - before["vllm:prompt_tokens_total"] == usage.prompt_tokens
    assert server.metric("vllm:generation_tokens_total") - before["vllm:generation_tokens_total"] == 14
    assert server.metric("vllm:request_success_total", finished_reason="length") - lengths == 2
    assert server.metric("vllm:time_to_first_token_seconds_count") - first == 2
    assert server.metric("vllm:inter_token_latency_seconds_count") - between == 12
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert server.metric(f"vllm:{name}") == 0
    hits, queries = (server.metric(f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries"))
    assert 0 <= hits <= queries == server.metric("vllm:prompt_tokens_total")
    assert server.metric("vllm:e2e_request_latency_seconds_sum") > 0
    for name in ("tokens_evicted", "blocks_returned", "blocks_dropped_shared", "compactions", "preemptions"):
        assert server.metric(f"jaxkv:{name}_total") == 0
    assert server.metric("jaxkv:compaction_seconds_count") == 0


def test_the_pool_is_shown_while_a_request_runs(server: Served, client: openai.OpenAI) -> None:
    prompt, extra = "the cat's hat, the dog's log", {"ignore_eos": True}
    stream = client.completions.create(**GREEDY, prompt=prompt, n=2, max_tokens=580, stream=True, extra_body=extra)
    pools: list[dict[str, Any]] = []
    assert eventually(lambda: pools.append(server.pool()) or len(pools[-1]["requests"]) == 2)  # type: ignore[func-returns-value]
    stream.close()
    pool = pools[-1]
    assert sum(pool["counts"].values()) == sum(count for _, count in pool["blocks"]) == 300
    assert pool["counts"]["private"] > 0
    assert pool["counts"]["shared"] == len(byte_level().encode(prompt)) // 4 > 0
    assert [one["choice"] for one in pool["requests"]] == [0, 1]
    assert all(one["id"].startswith("cmpl-") and one["blocks_held"] > 0 for one in pool["requests"])
    assert pool["speed"]["tokens_per_second"] > 0
    assert server.holds_nothing()
    assert server.pool()["counts"]["private"] == 0


def test_an_engine_for_requests_that_are_not_known_has_what_was_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "_engine_of", lambda self, shape: shape)
    whole = LLM(str(folder)).serving_engine()
    assert (whole.rows, whole.blocks) == (8, 8 * 63)  # type: ignore[attr-defined]
    own = LLM(str(folder), rows=3, pool_blocks=17).serving_engine()
    assert (own.rows, own.blocks) == (3, 17)  # type: ignore[attr-defined]
    # A block is 2 layers of k and v, 2 heads, 16 slots and 16 dimensions in float32; one more is the null block.
    sized = LLM(str(folder), pool_memory=10 * 2 * 2 * 2 * 16 * 16 * 4).serving_engine()
    assert (sized.rows, sized.blocks) == (8, 9)  # type: ignore[attr-defined]
    monkeypatch.setattr("jaxkv.sizing.most_blocks", lambda *_, **__: 100)
    assert LLM(str(folder)).serving_engine().blocks == 100
