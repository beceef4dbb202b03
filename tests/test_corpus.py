"""Texts as windows of tokens: the same ids as of the whole text, in bounded memory."""

from __future__ import annotations

import os
import threading
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import CORPUS, TEXTS, byte_level, sentencepiece

from jaxkv import corpus
from jaxkv.tokenizer import Tokenizer

WORDS = st.lists(st.sampled_from([*" \n.1a", "the", "日本", "it's", "12", "  "]), max_size=60).map("".join)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
@given(pieces=st.lists(TEXTS | WORDS, max_size=8))
def test_pieces_have_the_ids_of_the_whole_text(pre: str, pieces: list[str]) -> None:
    tokenizer = byte_level(pre)
    cut = list(corpus.cut_between_words(pieces))
    assert "".join(cut) == "".join(pieces)
    assert all(cut)
    assert [i for piece in cut for i in ids_of(tokenizer, piece)] == ids_of(tokenizer, "".join(pieces))


def test_text_is_cut_where_it_can_be() -> None:
    assert list(corpus.cut_between_words(["one two", " three", "four  ", "five six"])) == [
        "one", " two", " threefour  five", " six",
    ]  # fmt: skip


def test_text_without_spaces_is_not_held_whole() -> None:
    pieces = list(corpus.cut_between_words(["日" * corpus.PIECE] * 20))
    assert "".join(pieces) == "日" * corpus.PIECE * 20
    assert max(map(len, pieces)) <= 3 * corpus.PIECE


@given(
    texts=st.lists(TEXTS.filter(str.strip), min_size=1, max_size=3),
    size=st.integers(1, 40),
    limit=st.none() | st.integers(1, 100),
    piece=st.integers(1, 30) | st.just(1000),
)
def test_windows_hold_each_text_in_order(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, limit: int | None, piece: int
) -> None:
    folder, tokenizer = tmp_path_factory.mktemp("texts"), byte_level()
    paths = [folder / f"{index}.txt" for index in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE", piece)
        opened = corpus.open_texts([str(path) for path in paths])
        made = list(corpus.windows(tokenizer, opened, size, limit))
    wanted, left = [], 10**9 if limit is None else limit
    for text in texts:
        ids = ids_of(tokenizer, text.removeprefix("\ufeff"))[:left]
        left -= len(ids)
        wanted += [ids[start : start + size] for start in range(0, len(ids), size)]
    if all(len(text.encode()) < piece for text in texts):
        assert made == wanted
    # A tiny piece forces cuts inside words, as a real one does for a text without spaces: other ids of the same text.
    shown = tokenizer.backend.decode([i for window in made for i in window], skip_special_tokens=False)
    if limit is None:
        assert shown == "".join(text.removeprefix("\ufeff") for text in texts)
    else:
        assert sum(map(len, made)) <= limit
    assert all(0 < len(window) <= size for window in made)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    tokenizer, peaks = byte_level(), []
    for repeats in (1_000, 8_000):
        path = tmp_path / f"{repeats}.txt"
        path.write_text((CORPUS[0] + " ") * repeats)
        tracemalloc.start()
        (text,) = corpus.open_texts([str(path)])
        count = sum(map(len, corpus.windows(tokenizer, [text], 100)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert count > 10 * repeats
        assert text.done == text.size == path.stat().st_size
    assert peaks[1] < 1.2 * peaks[0] < 2 * 2**20


@pytest.mark.parametrize("name", ["file", "pipe"])
def test_bytes_that_are_not_utf8_are_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third byte of a four-byte character is wrong, and a piece ends before it."""
    monkeypatch.setattr(corpus, "PIECE", 6)
    path, content = tmp_path / name, b"\xef\xbb\xbfab\xf0\x9f\x41 tail"
    if name == "pipe":
        os.mkfifo(path)
        threading.Thread(target=path.write_bytes, args=(content,)).start()
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is not UTF-8 text: invalid continuation byte at byte 5"):
        corpus.open_texts([str(path)])
    path.unlink()
    path.write_bytes(b"cut short \xe6\x97")
    with pytest.raises(ValueError, match="unexpected end of data at byte 10"):
        corpus.open_texts([str(path)])


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    threading.Thread(target=path.write_bytes, args=(b"\xef\xbb\xbf" + CORPUS[2].encode(),)).start()
    (text,) = corpus.open_texts([str(path)])
    assert text.size is None
    assert list(corpus.windows(byte_level(), [text], 10_000)) == [ids_of(byte_level(), CORPUS[2])]


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b" \n\t\n" * 10_000])
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "blank.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"blank\.txt holds no text"):
        corpus.open_texts([str(tmp_path / "blank.txt")])


def test_sentencepiece_windows_begin_as_a_text_does(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc dea bcd")
    (window,) = corpus.windows(sentencepiece(), corpus.open_texts([str(tmp_path / "a.txt")]), 1000)
    whole = ids_of(sentencepiece(), "abc dea bcd")
    cut = [i for piece in ("abc dea", " bcd") for i in ids_of(sentencepiece(), piece)]
    assert window == cut
    assert window[: len(ids_of(sentencepiece(), "abc dea"))] == whole[: len(ids_of(sentencepiece(), "abc dea"))]
