"""Single tokens as text and as bytes, for log probabilities."""

from __future__ import annotations

import json
import re
from typing import Any

from jaxkv.text import byte_letters
from jaxkv.tokenizer import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class TokenText:
    """Spells tokens of one tokenizer. A special token is spelled by its name, and has no bytes in any text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = tokenizer.backend
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        self._piece = backend.id_to_token
        self._added = backend.get_added_tokens_decoder()
        self._byte_level = decoder.get("type") == "ByteLevel"

    def raw(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text."""
        added = self._added.get(token)
        piece = self._piece(token) or ""
        if added is not None:
            return b"" if added.special else piece.encode()
        if self._byte_level:
            return bytes(byte_letters()[letter] for letter in piece)
        byte = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()

    def spelled(self, token: int) -> dict[str, Any]:
        """Return ``token`` as text, and ``bytes``: where characters span tokens, only these tell what was said."""
        raw = self.raw(token)
        added = self._added.get(token)
        if added is not None and added.special:
            return {"token": added.content, "bytes": None}
        return {"token": raw.decode("utf-8", "replace"), "bytes": list(raw)}
