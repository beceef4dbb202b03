"""What stored KV is found by: a digest, and what the digest was made of."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from jaxkv import keys
from jaxkv.keys import Tokens

Space = Literal["content", "prefix"]


@dataclasses.dataclass(frozen=True)
class Key:
    """A digest of BLAKE2b-256 and its parts, which are compared on a hit. Make one with ``content`` or ``prefix``.

    Attributes:
      space: ``content``: a segment wherever it stands; ``prefix``: a block and all that comes before it.
      root: fingerprint of what else the KV depends on (``jaxkv.keys.fingerprint``).
      parent: what the digest is chained to: the block before, or the fingerprint where there is none.
      ids: token ids as little-endian int32.
      digest: ``jaxkv.keys.content_key`` or ``block_key`` of the rest.
    """

    space: Space
    root: bytes
    parent: bytes
    ids: bytes
    digest: bytes = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if self.space not in ("content", "prefix"):
            raise ValueError(f"space={self.space!r} is unknown; content and prefix are")
        for name in ("root", "parent"):
            if len(getattr(self, name)) != keys.KEY_BYTES:
                raise ValueError(f"{name} of {len(getattr(self, name))} bytes; keys.fingerprint gives {keys.KEY_BYTES}")
        if self.space == "content" and self.parent != self.root:
            raise ValueError("a content key is chained to nothing but its fingerprint; give it as parent too")
        if not self.ids or len(self.ids) % 4:
            raise ValueError("a key needs at least one token; leave empty segments out")
        tokens = np.frombuffer(self.ids, "<i4")
        key_of = keys.content_key if self.space == "content" else keys.block_key
        object.__setattr__(self, "digest", key_of(self.parent, tokens))

    @classmethod
    def content(cls, root: bytes, tokens: Tokens) -> Key:
        """Return the key of a segment; ``root`` is the fingerprint."""
        return cls("content", root, root, keys.token_bytes(tokens))

    @classmethod
    def prefix(cls, root: bytes, tokens: Tokens, block_size: int) -> list[Key]:
        """Return the chained keys of all full blocks of a text that starts with ``tokens``."""
        out, parent, size = [], root, 4 * block_size
        ids = keys.token_bytes(tokens)
        for start in range(0, len(ids) - size + 1, size):
            out.append(cls("prefix", root, parent, ids[start : start + size]))
            parent = out[-1].digest
        return out

    @property
    def tokens(self) -> int:
        """How many tokens the KV is of."""
        return len(self.ids) // 4

    @property
    def name(self) -> str:
        """The digest in hexadecimal digits."""
        return self.digest.hex()
