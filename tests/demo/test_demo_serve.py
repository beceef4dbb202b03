"""The demo model behind the server, by the official client and by the command a user types."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from jaxkv import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
MODEL = "SmolLM2-135M-Instruct"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
SIZES = {"rows": 4, "pool_blocks": 512}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    words = ["--port", "0", "--rows", "4", "--pool-blocks", "512", "--method", "triattention", "--budget", "256"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxkv.serve", *words], cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        found = None
        for line in process.stderr:
            found = re.search(r"http://\S+", line)
            if found:
                break
        assert found is not None
        for _ in range(200):
            with contextlib.suppress(httpx.TransportError):
                assert httpx.get(found[0] + "/health").status_code == 200
                break
            time.sleep(0.05)
        yield found[0]
        # All of it was said before: nothing went wrong meanwhile.
        process.terminate()
        assert process.communicate(timeout=60)[1] == "stopped\n"
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def library() -> LLM:
    return LLM(**SIZES)


def streamed(events: Any) -> str:
    return "".join(choice.delta.content or "" for event in events for choice in event.choices)


def test_a_chat_whole_and_streamed(client: openai.OpenAI, library: LLM) -> None:
    (expected,) = library.generate([FRANCE], SamplingParams(max_tokens=24))
    answer = client.chat.completions.create(**GREEDY, messages=FRANCE, max_tokens=24)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.usage.completion_tokens == expected.generated_tokens
    assert (
        streamed(client.chat.completions.create(**GREEDY, messages=FRANCE, max_tokens=24, stream=True)) == expected.text
    )
    again = client.chat.completions.create(**GREEDY, messages=FRANCE, max_tokens=24)
    assert again.usage.prompt_tokens_details.cached_tokens == (expected.prompt_tokens - 1) // 16 * 16


def test_completions_stop_seeds_and_logprobs(client: openai.OpenAI, library: LLM) -> None:
    prompt = "One, two, three, four,"
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=11, n=2, logprobs=True)
    expected = library.generate([prompt], params, raw=True)
    options: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0.8, "seed": 11}
    answer = client.completions.create(**options, n=2, logprobs=0)
    assert [choice.text for choice in answer.choices] == [one.text for one in expected]
    for choice, one in zip(answer.choices, expected, strict=True):
        assert choice.logprobs.token_logprobs == pytest.approx(one.logprobs, abs=1e-4)
    stop = expected[0].text[3:6]
    cut = client.completions.create(**options, stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (expected[0].text.partition(stop)[0], "stop")


def test_emoji_and_korean_stream_whole(client: openai.OpenAI) -> None:
    line = "Hello in Korean is 안녕하세요. Smile is 😀."
    options = {**GREEDY, "prompt": f"{line}\n{line}\nHello in Korean is", "max_tokens": 24, "stop": "zzz"}
    whole = client.completions.create(**options).choices[0].text
    pieces = [choice.text for event in client.completions.create(**options, stream=True) for choice in event.choices]
    assert "".join(pieces) == whole
    assert "안녕하세요. Smile is 😀." in whole
    assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_sixteen_clients_at_once(client: openai.OpenAI, library: LLM) -> None:
    def messages(number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Count from {number}."}]

    def text(number: int) -> str:
        options = {**GREEDY, "messages": messages(number), "max_tokens": 6 + number % 4}
        if number % 2:
            return streamed(client.chat.completions.create(**options, stream=True))
        return client.chat.completions.create(**options).choices[0].message.content

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        texts = list(threads.map(text, range(16)))
    for number in range(16):
        (alone,) = library.generate([messages(number)], SamplingParams(max_tokens=6 + number % 4))
        assert texts[number] == alone.text


def test_a_second_turn_goes_on_from_the_first(client: openai.OpenAI, library: LLM) -> None:
    first = client.chat.completions.create(
        **GREEDY, messages=FRANCE, max_tokens=24, extra_body={"jaxkv": {"keep": True}}
    )
    second = client.chat.completions.create(
        **GREEDY,
        messages=[{"role": "user", "content": "And of Italy?"}],
        max_tokens=16,
        extra_body={"jaxkv": {"continue_from": first.id}},
    )
    whole = [
        *FRANCE,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And of Italy?"},
    ]
    (expected,) = library.generate([whole], SamplingParams(max_tokens=16))
    assert second.choices[0].message.content == expected.text
    assert second.usage.prompt_tokens == expected.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens


def test_blocks_come_back_while_a_long_answer_is_made(client: openai.OpenAI, url: str) -> None:
    # What another test has kept stays.
    before = httpx.get(url + "/pool").json()["counts"]["private"]
    answer = client.chat.completions.create(
        **GREEDY, messages=FRANCE, max_tokens=260, extra_body={"ignore_eos": True, "jaxkv": {"budget": 160}}
    )
    report = answer.choices[0].jaxkv  # type: ignore[attr-defined]
    assert report["compactions"] == (report["position"] - 160) // 128
    assert report["blocks_returned"] == 8 * report["compactions"] > 0
    metrics = httpx.get(url + "/metrics").text
    assert f'jaxkv:blocks_returned_total{{model_name="{MODEL}"}} {report["blocks_returned"]}.0\n' in metrics
    assert httpx.get(url + "/pool").json()["counts"]["private"] == before


def test_errors_reach_the_client_as_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=FRANCE)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**GREEDY, messages=[], max_tokens=3)
    assert wrong.value.param == "messages"


def test_the_load_script_measures_it(url: str) -> None:
    words = ["--url", url, "--clients", "1", "4", "--requests", "4", "--max-tokens", "6", "--json"]
    done = subprocess.run(
        [sys.executable, "scripts/load_serve.py", *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [load["clients"] for load in report["loads"]] == [1, 4]
    for load in report["loads"]:
        assert (load["answers"], load["failed"]) == (4, 0)
        assert load["tokens_per_second"] == pytest.approx(24 / load["seconds"], rel=0.05)
        assert 0 < load["first_token_ms"]["p50"] <= load["answer_ms"]["p99"]
