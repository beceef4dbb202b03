"""Text from a stream of tokens: shown as soon as it is certain, and never past a stop string.

Two things make the end of a text uncertain: a character whose bytes have not all come, and the beginning of a stop
string. Both are held back. A token costs the same wherever in the text it stands.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from jaxkv.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

__all__ = ["TextStream"]

_REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextStream:
    """Turns one row's tokens into text, piece by piece.

    All pieces joined equal ``tokenizer.decode`` of the tokens, cut before the stop string that is complete first (the
    longer of two that end together), so the token that completes one is the last that counts. Special tokens give no
    text, so a stop string cannot be one.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] = (), min_tokens: int = 0) -> None:
        """Begin a text.

        Args:
          tokenizer: of the model that makes the tokens.
          stop: strings that end the text and are not part of it.
          min_tokens: how many tokens belong to the text whatever they spell.

        Raises:
          ValueError: a stop string is empty.
        """
        self._stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in self._stops:
            raise ValueError("a stop string is empty, which would end every text at once; leave it out")
        self._longest = max(map(len, self._stops), default=0)
        self._exempt = min_tokens
        self._tokens = _decoder(tokenizer)
        self._held = ""
        self._shown: list[str] = []
        self._finished = False
        self.stopped = False

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._shown)

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that has become certain; "" once stopped.

        Raises:
          RuntimeError: after ``finish``.
        """
        if self._finished:
            raise RuntimeError("the text is finished; begin another TextStream for another text")
        if self.stopped:
            return ""
        self._exempt -= 1
        return self._certain(self._tokens.push(token_id), last=False)

    def finish(self) -> str:
        """Return the text still held back: nothing more will come."""
        if self._finished or self.stopped:
            self._finished = True
            return ""
        self._finished = True
        return self._certain(self._tokens.finish(), last=True)

    def _certain(self, new: str, last: bool) -> str:
        if not new and not last:
            return ""
        self._held += new
        if self._exempt >= 0:
            piece, self._held = self._held, ""
            self._shown.append(piece)
            return piece
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            piece, self._held = self._held[: min(found)[1]], ""
        else:
            cut = len(self._held) if last else self._open_at()
            piece, self._held = self._held[:cut], self._held[cut:]
        self._shown.append(piece)
        return piece

    def _open_at(self) -> int:
        """Where the earliest stop string that the text's end may belong to begins."""
        size = len(self._held)
        for at in range(max(0, size - self._longest + 1), size):
            tail = self._held[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return size


def _decoder(tokenizer: Tokenizer) -> _ByteLevelDecoder | _WindowDecoder:
    decoder = tokenizer.backend.decoder
    kind = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
    if kind["type"] == "ByteLevel":
        return _ByteLevelDecoder(tokenizer.backend)
    steps = [step["type"] for step in kind.get("decoders", [kind])]
    return _WindowDecoder(tokenizer, byte_fallback="ByteFallback" in steps)


def _special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    return frozenset(index for index, token in backend.get_added_tokens_decoder().items() if token.special)


class _ByteLevelDecoder:
    """Byte-level tokens are bytes: they go through an incremental UTF-8 decoder, each once."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._piece = backend.id_to_token
        self._special = _special_ids(backend)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        piece = None if token_id in self._special else self._piece(token_id)
        if not piece:
            return ""
        letters = byte_letters()
        try:
            raw = bytes([letters[letter] for letter in piece])
        except KeyError:  # an added token is spelled as itself
            raw = piece.encode()
        return self._utf8.decode(raw)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


@cache
def byte_letters() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


class _WindowDecoder:
    """Decodes the newest tokens together with one before them, which tells the decoder that the text has begun.

    A SentencePiece decoder drops the space at a text's beginning, so the newest tokens alone would lose theirs.
    """

    def __init__(self, tokenizer: Tokenizer, byte_fallback: bool) -> None:
        self._decode = tokenizer.decode
        self._piece = tokenizer.backend.id_to_token
        self._special = _special_ids(tokenizer.backend)
        self._byte_fallback = byte_fallback
        self._window: list[int] = []
        self._known = 0  # characters of the window's text that have been returned

    def push(self, token_id: int) -> str:
        piece = None if token_id in self._special else self._piece(token_id)
        if not piece:
            return ""
        self._window.append(token_id)
        # One invalid byte makes replacement characters of its whole run, so a run is certain only at its end.
        if self._byte_fallback and _BYTE_PIECE.fullmatch(piece):
            return ""
        text = self._decode(self._window)
        if not self._byte_fallback and text.endswith(_REPLACEMENT):
            return ""
        new = text[self._known :]
        self._window = [token_id]
        self._known = len(self._decode(self._window))
        return new

    def finish(self) -> str:
        return self._decode(self._window)[self._known :]
