"""Texts as windows of tokens, read and tokenised in pieces: memory does not grow with a text's length."""

from __future__ import annotations

import codecs
import io
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from jaxkv.config import ModelConfig
from jaxkv.tokenizer import Tokenizer

PIECE = 4 * 1024
"""Bytes that are read at once. A piece is tokenised whole."""

_BETWEEN_WORDS = re.compile(r"(?<=\w) (?=\w)")


class Text:
    """A UTF-8 file, or stdin by the name ``-``; a byte order mark at its start is dropped.

    A file is read through once when this is made, so that nothing can be wrong with it later. What can be read only
    once, stdin or a pipe, has its beginning looked at.

    Args:
      name: the file's path, or ``-``.

    Raises:
      ValueError: it cannot be read, is not UTF-8, or holds nothing but white space.

    Attributes:
      size: bytes of the file; None for a stream.
      done: bytes read so far.
    """

    def __init__(self, name: str) -> None:
        self.name = "stdin" if name == "-" else name
        self.size: int | None = None
        self.done = 0
        self._path = Path(name)
        self._stream: io.BufferedReader | None = None
        try:
            if name == "-":
                self._stream = cast(io.BufferedReader, sys.stdin.buffer)
            elif not self._path.is_file():
                self._stream = self._path.open("rb")
            if self._stream is None:
                self.size = self._path.stat().st_size
                with self._path.open("rb") as file:
                    found = max((bool(text.strip()) for text in self._decoded(file)), default=False)
            else:
                beginning = self._stream.peek(PIECE)
                found = bool(beginning)
                for _ in self._decoded(io.BytesIO(beginning), whole=False):
                    pass
        except OSError as error:
            raise ValueError(f"{self.name} cannot be read: {error.strerror or error}; give a text file") from None
        if not found:
            raise ValueError(f"{self.name} holds no text; give a file that has some, or leave it out")
        self.done = 0

    def pieces(self) -> Iterator[str]:
        """Yield the text in pieces, once; raises ValueError where a stream is not UTF-8."""
        if self._stream is not None:
            yield from self._decoded(self._stream)
            return
        with self._path.open("rb") as file:
            yield from self._decoded(file)

    def _decoded(self, file: BinaryIO, whole: bool = True) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.done = 0
        while True:
            piece = file.read(PIECE)
            start = self.done - len(decoder.getstate()[0])
            try:
                text = decoder.decode(piece, whole and not piece)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{self.name} is not UTF-8 text: {error.reason} at byte {start + error.start}; convert it first"
                ) from None
            self.done += len(piece)
            if text:
                yield text
            if not piece:
                return


def open_texts(names: Sequence[str]) -> list[Text]:
    """Return the texts of these names, each checked.

    Raises:
      ValueError: one cannot be read, or stdin is named twice.
    """
    if list(names).count("-") > 1:
        raise ValueError("- is given more than once, and stdin can be read only once; give it once")
    return [Text(name) for name in names]


def windows(tokenizer: Tokenizer, texts: Iterable[Text], size: int, limit: int | None = None) -> Iterator[list[int]]:
    """Yield the ids of texts in windows of ``size`` tokens. A text's last window is shorter; none spans two texts.

    No BOS is put anywhere: see ``first_token``.

    Args:
      tokenizer: whose ids.
      texts: read one after the other.
      size: tokens of a window.
      limit: most tokens in all; None is no limit.
    """
    left = sys.maxsize if limit is None else limit
    for text in texts:
        held: list[int] = []
        for piece in cut_between_words(text.pieces()):
            held += tokenizer.backend.encode(piece, add_special_tokens=False).ids
            while len(held) >= min(size, left):
                take = min(size, left)
                yield held[:take]
                del held[:take]
                left -= take
                if not left:
                    return
        if held:
            yield held
            left -= len(held)


def cut_between_words(texts: Iterable[str]) -> Iterator[str]:
    """Yield the same text in pieces that begin with the one space between two words, where there is one.

    Byte-level tokenizers of every kind supported here give such pieces the ids that they give the whole text. A
    tokenizer that writes a space before each text (SentencePiece's) has one more at a cut.
    """
    held = ""
    for text in texts:
        held += text
        spaces = [match.start() for match in _BETWEEN_WORDS.finditer(held, max(0, len(held) - 1000))]
        # A text without spaces is cut anywhere rather than held whole.
        cut = spaces[-1] if spaces else len(held) if len(held) > 2 * PIECE else 0
        if cut:
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def first_token(tokenizer: Tokenizer, config: ModelConfig) -> int | None:
    """Return the token to put before a window: the tokenizer's BOS if it adds one, else the model's if it has one.

    Some tokenizers (SmolLM2's, Qwen's) add none to raw text though the model has one; SmolLM2's begins every chat.
    Without it the first word of a window becomes the attention sink; on the demo model that moves the mean queries by
    0.7 %.
    """
    if tokenizer.adds_bos:
        return int(tokenizer.fast.bos_token_id)
    bos = config.bos_token_id
    return bos if bos is not None and 0 <= bos < config.vocab_size else None
