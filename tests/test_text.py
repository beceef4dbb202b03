"""TextStream on tiny vocabularies: its pieces joined are the text decoded at once, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import TEXTS, byte_level, sentencepiece
from tokenizers import decoders

from jaxkv.text import TextStream
from jaxkv.tokenizer import Tokenizer


def cut(text: str, stops: Sequence[str]) -> str:
    """The batch answer: the text before the stop string that is complete first, or the longer of two such."""
    for end in range(1, len(text) + 1):
        ending = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: min(ending)]
    return text


def check_stream(tokenizer: Tokenizer, ids: list[int], stops: list[str], prompt: bool = True) -> None:
    whole = tokenizer.decode(ids)
    stream = TextStream(tokenizer, stops)
    pieces = []
    for count, token in enumerate(ids, start=1):
        pieces.append(stream.push(token))
        so_far = tokenizer.decode(ids[:count])
        if stream.stopped:
            assert any(stop in so_far for stop in stops)
        elif prompt and tokenizer.decode([token]) and not tokenizer.backend.id_to_token(token).startswith("<0x"):
            # The token that completes a stop string is the one that ends the text.
            assert not any(stop in so_far.rstrip("\ufffd") for stop in stops)
            held = so_far[len(stream.text) :].rstrip("\ufffd")
            assert held == "" or any(stop.startswith(held) for stop in stops), "held back without a reason"
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text == cut(whole, stops)
    assert stream.stopped == any(stop in whole for stop in stops)


@st.composite
def streams(draw: st.DrawFn, tokenizer: Tokenizer, byte_ids: list[int]) -> tuple[list[int], list[str]]:
    anything = st.integers(0, tokenizer.vocab_size + 2)
    ids = draw(st.one_of(TEXTS.map(tokenizer.encode), st.lists(st.one_of(anything, st.sampled_from(byte_ids)))))
    whole = tokenizer.decode(ids) or "ab"
    spans = st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 6)).map(lambda s: whole[s[0] : s[0] + s[1]])
    longer = st.tuples(spans, st.sampled_from([*whole, "a", "\u200d"])).map("".join)
    return ids, draw(st.lists(st.one_of(spans, longer, st.text(min_size=1, max_size=3)), max_size=4))


@settings(max_examples=400, deadline=None)
@given(case=st.deferred(lambda: streams(byte_level("gpt-2"), list(range(4, 260)))))
def test_streamed_byte_level_text_equals_the_batch_answer(case: tuple[list[int], list[str]]) -> None:
    check_stream(byte_level("gpt-2"), *case)


@pytest.mark.parametrize("prefix", [True, False])
@settings(max_examples=300, deadline=None)
@given(case=st.deferred(lambda: streams(sentencepiece(), list(range(3, 259)))))
def test_streamed_sentencepiece_text_equals_the_batch_answer(prefix: bool, case: tuple[list[int], list[str]]) -> None:
    check_stream(sentencepiece(add_space_prefix=prefix), *case)


@settings(max_examples=100, deadline=None)
@given(case=st.deferred(lambda: streams(byte_level("gpt-2"), list(range(4, 260)))))
def test_streamed_text_of_an_unknown_decoder_equals_the_batch_answer(case: tuple[list[int], list[str]]) -> None:
    tokenizer = byte_level("gpt-2", add_bos_token=False)
    tokenizer.backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    check_stream(tokenizer, *case, prompt=False)


def push_all(tokenizer: Tokenizer, text: str, stop: str | list[str]) -> tuple[str, bool]:
    stream = TextStream(tokenizer, stop)
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    return "".join([*pieces, stream.finish()]), stream.stopped


def test_no_half_character_is_shown() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a 🏽ж")
    assert len(ids) > 5
    stream = TextStream(tokenizer)
    assert [p for token in ids if (p := stream.push(token))] == ["a", " ", "🏽", "ж"]
    half = TextStream(tokenizer)
    assert "".join(half.push(token) for token in ids[:-1]) == "a 🏽"
    assert half.finish() == "\ufffd"
    assert half.text == tokenizer.decode(ids[:-1])


def test_stop_strings_across_tokens() -> None:
    tokenizer = byte_level()
    assert len(tokenizer.encode("say STOP")) > len("say") + 1
    assert push_all(tokenizer, "say STOP now", "STOP") == ("say ", True)
    assert push_all(tokenizer, "say STO", ["STOP"]) == ("say STO", False)
    assert push_all(tokenizer, "STSTOP", ["STOP"]) == ("ST", True)
    assert push_all(tokenizer, "xaby", ["ab", "abc"]) == ("x", True)
    assert push_all(tokenizer, "a 🏽 b", ["🏽"]) == ("a ", True)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    tokenizer = byte_level()
    assert push_all(tokenizer, "1234", ["23", "1234"]) == ("1", True)
    assert push_all(tokenizer, "1234", ["34", "1234"]) == ("", True)
    assert push_all(tokenizer, "124", ["23", "1234"]) == ("124", False)


def test_after_the_end() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer, "2")
    assert [stream.push(token) for token in tokenizer.encode("123")] == ["1", "", ""]
    assert stream.stopped
    assert stream.finish() == ""
    assert stream.text == "1"
    with pytest.raises(RuntimeError, match="finished"):
        stream.push(4)
    with pytest.raises(ValueError, match="empty"):
        TextStream(tokenizer, ["a", ""])


def test_a_token_costs_the_same_wherever_it_stands() -> None:
    widths: list[int] = []

    class Recording(Tokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            widths.append(len(ids))
            return super().decode(ids)

    plain = sentencepiece()
    tokenizer = Recording(plain.fast, plain.adds_bos, plain.eos_token_ids, plain.vocab_size)
    stream = TextStream(tokenizer, ["never in there"])
    for token in plain.encode("ab é 😀 cd" * 100):
        stream.push(token)
    assert stream.text + stream.finish() == "ab é 😀 cd" * 100
    assert len(widths) > 300
    assert max(widths) <= 6
