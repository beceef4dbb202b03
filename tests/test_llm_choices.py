"""n, min_tokens and penalties through ``LLM`` and the command, on a tiny model in a folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import tiny_folder

from jaxkv import LLM, SamplingParams, generate

WARM = SamplingParams(max_tokens=24, temperature=0.9, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), rows=4, pool_blocks=48, prefill_chunk=16)


def with_(params: SamplingParams, **changes: object) -> SamplingParams:
    return dataclasses.replace(params, **changes)  # type: ignore[arg-type]


def test_continuations_come_in_order_and_are_those_of_seeds_one_after_the_other(llm: LLM) -> None:
    done = llm.generate(["the cat", "a dog"], with_(WARM, n=3, seed=7))
    assert [(one.prompt, one.choice, one.seed) for one in done] == [
        (prompt, choice, 7 + choice) for prompt in ("the cat", "a dog") for choice in range(3)
    ]
    for one in done:
        (alone,) = llm.generate([one.prompt], with_(WARM, seed=one.seed))
        assert alone.text == one.text
        assert alone.choice == 0
    pieces: dict[tuple[int, int], str] = {}
    for delta in llm.stream(["the cat", "a dog"], with_(WARM, n=3, seed=7)):
        name = delta.index, delta.choice
        pieces[name] = pieces.get(name, "") + delta.text
    assert list(dict(sorted(pieces.items())).values()) == [one.text for one in done]


def test_a_stop_string_before_min_tokens_is_part_of_the_text(llm: LLM) -> None:
    (plain,) = llm.generate("the cat", with_(WARM, max_tokens=40))
    texts = [llm.tokenizer.decode(plain.token_ids[:count]) for count in range(41)]
    # A character of the first tokens' text, which would end it at once.
    stop = next(letter for letter in texts[3] if letter.isascii() and letter.strip())
    (early,) = llm.generate("the cat", with_(WARM, max_tokens=40, stop=(stop,)))
    assert stop not in early.text
    (late,) = llm.generate("the cat", with_(WARM, max_tokens=40, stop=(stop,), min_tokens=10))
    assert late.generated_tokens > 10 or late.finish_reason == "length"
    assert late.text.startswith(texts[9].rstrip("\ufffd"))
    assert stop in late.text
    # What comes after the exempt tokens is searched as ever.
    assert late.finish_reason == "length" or stop not in late.text[len(texts[10]) :]


def test_the_second_of_two_like_prompts_finds_the_first_ones_blocks(llm: LLM) -> None:
    prompt = "def f(x): return x + 1 # " * 4
    first, second = llm.generate([prompt, prompt], WARM)
    assert second.cached_tokens > 0
    assert first.text == second.text


def test_the_command_takes_them_and_a_line_may_set_its_own(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": "the cat", "n": 2, "seed": 5}, {"prompt": "x", "repetition_penalty": 1.5, "min_tokens": 3}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    words = ["--model", str(folder), "--temperature", "0.9", "-m", "8", "--json", "-q", "--prompts-file", str(path)]
    assert generate.main(words) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["prompt"], one["choice"], one["seed"]) for one in shown] == [
        ("the cat", 0, 5),
        ("the cat", 1, 6),
        ("x", 0, 1),
    ]
    assert shown[0]["text"] != shown[1]["text"]
    for option, message in (("--n 0", "n=0"), ("--min-tokens 9", "min_tokens=9"), ("--presence-penalty 3", "=3.0")):
        assert generate.main([*words, *option.split()]) == 2
        assert message in capsys.readouterr().err


def test_texts_of_one_prompt_are_shown_one_after_the_other(
    folder: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(folder), "-p", "the cat", "--n", "3", "--temperature", "0.9", "-m", "24", "--ignore-eos"]
    assert generate.main([*words, "--seed", "7", "--prefill-chunk", "16", "--pool-blocks", "48", "--rows", "4"]) == 0
    captured = capsys.readouterr()
    texts = [one.text for one in llm.generate("the cat", with_(WARM, n=3, seed=7))]
    assert captured.out == "".join(f"--- {at} of 3 ---\n{text}\n" for at, text in enumerate(texts, 1))
    assert captured.err.count("finish: length") == 3
