"""Tokenizer on tiny vocabularies, against byte-pair encoding in plain Python."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import (
    CORPUS,
    TEMPLATE,
    TEXTS,
    byte_level,
    byte_level_fields,
    ggml,
    sentencepiece,
    sentencepiece_fields,
)

from jaxkv.tokenizer import Tokenizer

# Each written out from the tokenizer.json of a model that uses it; GPT-2's is in its released encoder.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, Callable[[str], list[str]]] = {
    "gpt-2": lambda text: regex.findall(GPT2, text),
    "smollm": lambda text: [w for part in regex.split(r"(\p{N})", text) for w in regex.findall(GPT2, part)],
    "llama-bpe": lambda text: regex.findall(LLAMA3, text),
    "qwen2": lambda text: regex.findall(LLAMA3.replace("{1,3}", ""), unicodedata.normalize("NFC", text)),
}


@cache
def letters() -> dict[int, str]:
    """Byte -> GPT-2's letter for it, by its definition: unprintable bytes take the letters from U+0100 on, in order."""
    plain = {b: chr(b) for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174}
    return plain | {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in plain)}


def merge(symbols: list[str], value: Callable[[str, str], float | None]) -> list[str]:
    """Merge the adjacent pair of the least value, the leftmost of equals, until no pair has one."""
    while True:
        found = [(v, at) for at in range(len(symbols) - 1) if (v := value(*symbols[at : at + 2])) is not None]
        if not found:
            return symbols
        at = min(found)[1]
        symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]


def plain_byte_level(text: str, pre: str) -> list[int]:
    fields = byte_level_fields()
    ids = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    rank = {tuple(m.split(" ")): at for at, m in enumerate(fields["tokenizer.ggml.merges"])}
    out: list[int] = []
    for word in SPLITS[pre](text):
        spelled = [letters()[byte] for byte in word.encode()]
        whole = "".join(spelled)
        parts = [whole] if pre == "llama-bpe" and whole in ids else merge(spelled, lambda a, b: rank.get((a, b)))
        out += [ids[part] for part in parts]
    return out


def plain_sentencepiece(text: str) -> list[int]:
    fields = sentencepiece_fields()
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    scores = dict(zip(tokens, fields["tokenizer.ggml.scores"], strict=True))
    ids = {token: index for index, token in enumerate(tokens) if types[index] == 1}
    symbols = list(("\u2581" + text.replace(" ", "\u2581")) if text else "")
    parts = merge(symbols, lambda a, b: -scores[a + b] if a + b in ids else None)
    return [i for p in parts for i in ([ids[p]] if p in ids else [3 + byte for byte in p.encode()])]


@pytest.mark.parametrize("pre", SPLITS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
@example(text="a    1\n\n2   34567  ²½ x\n\n\n  \t")
@example(text="It'S the IT'LL they'll e\u0301 \r\n\r\n!!\n x")
def test_byte_level_ids_equal_plain_bpe(pre: str, text: str) -> None:
    text = text.replace("<", "")  # control tokens are matched before any splitting
    tokenizer = byte_level(pre)
    ids = tokenizer.encode(text)
    bos = [tokenizer.fast.bos_token_id] if pre == "llama-bpe" else []
    assert ids == bos + plain_byte_level(text, pre)
    assert tokenizer.decode(ids) == (unicodedata.normalize("NFC", text) if pre == "qwen2" else text)


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="  abcdeé日s>xж😀") | st.text().map(lambda text: text.replace("<", "")))
def test_sentencepiece_ids_equal_plain_merging_by_score(text: str) -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode(text)
    assert ids == [1, *plain_sentencepiece(text)]
    assert tokenizer.decode(ids) == text.replace("\u2581", " ")


def test_pre_tokenizers_differ_where_they_should() -> None:
    pieces = {pre: byte_level(pre).fast.tokenize("x 1234") for pre in SPLITS}
    assert pieces == {
        "gpt-2": ["x", "\u01201234"],
        "smollm": ["x", "\u0120", "1", "2", "3", "4"],
        "llama-bpe": ["x", "\u0120", "12", "3", "4"],
        "qwen2": ["x", "\u0120", "1", "2", "3", "4"],
    }
    # A whole word that no merge makes: Llama 3 takes it as it stands.
    assert byte_level("llama-bpe").fast.tokenize("zq") == ["zq"]
    assert byte_level("qwen2").fast.tokenize("zq") == ["z", "q"]
    assert byte_level("deepseek-r1-qwen").encode("2024 e\u0301") == byte_level("qwen2").encode("2024 é")


def test_default_pre_tokenizer_is_gpt2_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="taken to be GPT-2's"):
        tokenizer = Tokenizer.from_gguf(byte_level_fields() | {"tokenizer.ggml.pre": "default"})
    assert tokenizer.encode("in 2024") == byte_level("gpt-2").encode("in 2024")


@pytest.mark.parametrize("add", [False, True])
def test_bos_is_added_once_at_most(add: bool) -> None:
    tokenizer = byte_level(add_bos_token=add)
    bos = tokenizer.fast.bos_token_id
    assert tokenizer.encode("the cat") == [bos] * add + plain_byte_level("the cat", "smollm")
    assert tokenizer.encode("<|bos|>the cat").count(bos) == 1
    assert tokenizer.encode("") == [bos] * add
    assert tokenizer.encode_chat([{"role": "user", "content": "the cat"}]).count(bos) == 1
    assert sentencepiece().encode("ab").count(1) == 1
    assert sentencepiece(add_bos_token=False).encode("ab").count(1) == 0


def test_a_gguf_template_without_bos_gets_it_as_the_file_says() -> None:
    fields = byte_level_fields() | {"tokenizer.chat_template": TEMPLATE.removeprefix("{{ bos_token }}")}
    messages = [{"role": "user", "content": "hi"}]
    without, with_bos = (Tokenizer.from_gguf(fields | ggml({"add_bos_token": add})) for add in (False, True))
    assert with_bos.encode_chat(messages) == [with_bos.fast.bos_token_id, *without.encode_chat(messages)]


def test_chat_ids_are_those_of_the_template() -> None:
    tokenizer = byte_level()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the <think> cat"}]
    text = (
        "<|bos|><|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nthe <think> cat<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.encode_chat(messages)
    assert ids == tokenizer.encode(text)
    assert tokenizer.backend.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "system\nbe brief\nuser\nthe <think> cat\nassistant\n"
    tokens = byte_level_fields()["tokenizer.ggml.tokens"]
    assert tokens.index("<think>") in ids
    assert ids.count(tokens.index("<|im_start|>")) == 3


def test_a_chat_that_cannot_be_written_says_why() -> None:
    with pytest.raises(ValueError, match=r"no tools.*--raw"):
        byte_level().encode_chat([{"role": "tool", "content": "x"}])
    with pytest.raises(ValueError, match=r"no chat template.*--raw"):
        sentencepiece().encode_chat([{"role": "user", "content": "x"}])


def test_eos_is_a_union() -> None:
    tokens = byte_level_fields()["tokenizer.ggml.tokens"]
    eos, turn = tokens.index("<|eos|>"), tokens.index("<|im_end|>")
    assert set(byte_level().eos_token_ids) == {eos, turn}
    assert set(byte_level(eot_token_id=7, eom_token_id=9).eos_token_ids) == {eos, turn, 7, 9}
    assert byte_level().eos_union((50, eos), (60,)) == tuple(sorted({eos, turn, 50, 60}))
    assert sentencepiece().eos_token_ids == (2,)
    assert byte_level().vocab_size == len(tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "model='t5' is not supported"),
        ({"pre": "poro-chat"}, "pre='poro-chat' is not supported; one of .*smollm"),
        ({"tokens": None}, "tokens is missing"),
        ({"merges": 3}, "merges is a int"),
        ({"merges": ["nothere the"]}, "merges do not fit the tokens"),
        ({"merges": ["nospace"]}, "merges do not fit the tokens"),
        ({"token_type": [1, 1]}, "2 token types"),
        ({"eos_token_id": 100000}, "eos_token_id=100000 is outside"),
        ({"model": "llama"}, "scores is missing"),
        ({"model": "llama", "scores": [0.0]}, "1 scores"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_way_out(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*tokenizer.json"):
        Tokenizer.from_gguf(byte_level_fields() | ggml(changes))


def test_bos_to_add_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="adds a BOS token but has none"):
        Tokenizer.from_gguf(byte_level_fields() | ggml({"bos_token_id": None, "add_bos_token": True}))


def test_a_folder_gives_the_same_ids(tmp_path: Path) -> None:
    made = byte_level()
    bos, eos = made.fast.bos_token_id, made.fast.eos_token_id
    made.fast.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "tokenizer.json").read_text())
    pieces = [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    written["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*pieces, {"SpecialToken": {"id": "<|eos|>", "type_id": 0}}],
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in (("<|bos|>", bos), ("<|eos|>", eos))},
    }
    written["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    # As SmolLM2's folder is declared: transformers' own GPT2Tokenizer would not set digits apart.
    declared = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": "GPT2Tokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert (tmp_path / "chat_template.jinja").is_file()
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded.adds_bos
    assert not loaded.chat_adds_bos
    for text in CORPUS:
        assert loaded.encode(text) == [bos, *made.encode(text)]
    messages = [{"role": "user", "content": CORPUS[1]}]
    assert loaded.encode_chat(messages) == made.encode_chat(messages)
    assert loaded.eos_token_ids == (eos,)
    assert loaded.vocab_size == made.vocab_size


def test_a_folder_without_bos_cuts_no_text(tmp_path: Path) -> None:
    made = Tokenizer.from_gguf(byte_level_fields() | ggml({"bos_token_id": None}))
    made.backend.enable_truncation(4)
    made.backend.enable_padding(length=100)
    made.backend.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_folder(tmp_path)
    assert not loaded.adds_bos
    assert loaded.eos_token_ids == ()
    assert loaded.encode(CORPUS[2]) == plain_byte_level(CORPUS[2], "smollm")


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json.*gguf"):
        Tokenizer.from_folder(tmp_path)
