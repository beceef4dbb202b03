"""Documents sent to the server: kept for the next request, in any order, and told of."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
import tiny_folder
from serving import MODEL, Served, served

from jaxkv import LLM, SamplingParams
from jaxkv.segments import Prompt, Segment
from jaxkv.store import Store

TEXTS = {"a": "the cat sat on the mat. " * 3, "b": "def f(x): return x", "c": "naïve café 日本語"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, LLM]]:
    folder = tiny_folder.make(tmp_path_factory.mktemp("tiny"))
    with Store(memory=1 << 24) as store:
        llm = LLM(str(folder), rows=2, pool_blocks=64, prefill_chunk=16, store=store)
        with served(llm) as running:
            yield running, LLM(str(folder), rows=2, pool_blocks=64, prefill_chunk=16)


def ask(server: Served, names: str, **extra: object) -> tuple[str, list[tuple[str, str]], list[dict]]:
    documents = [{"name": name, "text": TEXTS[name]} for name in names]
    answer = server.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What?"}],
        max_tokens=10,
        temperature=0,
        extra_body={"jaxkv": {"documents": documents, **extra}},
    )
    told = answer.choices[0].model_extra["jaxkv"]["documents"]
    return answer.choices[0].message.content or "", [(one["name"], one["source"]) for one in told], told


def test_documents_are_computed_once_and_reused_in_any_order(server: tuple[Served, LLM]) -> None:
    running, plain = server
    _, sources, _ = ask(running, "ab")
    assert sources == [("a", "computed"), ("b", "computed")]
    assert running.holds_nothing(10)
    text, sources, told = ask(running, "bac", recompute_ratio=1.0)
    assert sources == [("b", "host"), ("a", "host"), ("c", "computed")]
    assert all(one["tokens_recomputed"] == one["tokens"] for one in told)
    # Everything computed again is a full prefill, which is what an LLM without a store does.
    segments = [Segment(TEXTS[name] + "\n\n") for name in "bac"]
    ids = plain.encode(Prompt(segments, "What?"), system_prompt="Be kind.")
    assert text == plain.generate([ids], SamplingParams(max_tokens=10))[0].text
    _, _, told = ask(running, "ba", recompute_ratio=0.0)
    assert all(one["tokens_recomputed"] == 0 for one in told)
    assert running.holds_nothing(10)


def test_a_completion_takes_them_too_and_salts_are_kept_apart(server: tuple[Served, LLM]) -> None:
    running, _ = server

    def complete(user: str) -> list[str]:
        answer = running.client().completions.create(
            model=MODEL,
            prompt="What?",
            max_tokens=5,
            user=user,
            extra_body={"jaxkv": {"documents": [{"name": "b", "text": TEXTS["b"]}]}},
        )
        return [one["source"] for one in answer.choices[0].model_extra["jaxkv"]["documents"]]

    assert complete("one") == ["computed"]
    assert running.holds_nothing(10)
    assert complete("two") == ["computed"]
    assert running.holds_nothing(10)
    assert complete("one")[0] in ("host", "pool")


@pytest.mark.parametrize(
    ("messages", "extra", "message"),
    [
        ([{"role": "assistant", "content": "x"}], {}, "the user's last message"),
        ([{"role": "user", "content": "x"}], {"recompute_ratio": 2.0}, "recompute_ratio"),
        ([{"role": "user", "content": "x"}], {"continue_from": "chatcmpl-0"}, "jaxkv"),
        ([{"role": "user", "content": "x"}], {"documents": "a"}, "documents"),
    ],
)
def test_what_cannot_be_is_refused(server: tuple[Served, LLM], messages: list[dict], extra: dict, message: str) -> None:
    extra = {"documents": [{"name": "a", "text": "b"}], **extra}
    with pytest.raises(openai.BadRequestError, match=message):
        server[0].client().chat.completions.create(model=MODEL, messages=messages, extra_body={"jaxkv": extra})
