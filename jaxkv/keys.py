"""Names of cached KV: BLAKE2b-256 over what it was computed from, the same in every process and on every machine.

There are two key spaces. A content key names a segment by its tokens alone, wherever it stands. A prefix key names a
block by its tokens and all tokens before it: each key is chained to the one of the block before. Both begin from a
fingerprint of everything else that KV depends on, so that what differs in any of it is never found.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence

import numpy as np

from jaxkv.config import ModelConfig

Tokens = Sequence[int] | np.ndarray
KEY_BYTES = 32
_NAMES = frozenset({"name", "architecture", "bos_token_id", "eos_token_ids", "context"})
"""Fields of a model that no key or value depends on."""


def fingerprint(model: ModelConfig, *, dtype: str, weights: str = "", salt: str = "") -> bytes:
    """Return the digest of everything but tokens that KV depends on.

    Args:
      model: shapes, norms and RoPE are in the digest; its name and special tokens are not.
      dtype: of the cached arrays, and their quantisation where there is one.
      weights: digest of the weights. What outlives a process needs it; within one engine there is one set of weights.
      salt: parts tenants who must not find each other's KV.
    """
    facts = {name: value for name, value in dataclasses.asdict(model).items() if name not in _NAMES}
    facts |= {"dtype": dtype, "weights": weights, "salt": salt}
    return _digest("jaxkv fingerprint 1", json.dumps(facts, sort_keys=True).encode())


def content_key(root: bytes, tokens: Tokens) -> bytes:
    """Return the key of a segment; ``root`` is the fingerprint."""
    return _digest("jaxkv content 1", root, token_bytes(tokens))


def block_key(parent: bytes, tokens: Tokens) -> bytes:
    """Return the key of a block of tokens; ``parent`` is the key of the block before it, or the fingerprint."""
    return _digest("jaxkv prefix 1", parent, token_bytes(tokens))


def prefix_keys(root: bytes, tokens: Tokens, block_size: int) -> list[bytes]:
    """Return the chained keys of all full blocks of a text that starts with ``tokens``."""
    keys = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        root = block_key(root, tokens[start : start + block_size])
        keys.append(root)
    return keys


def token_bytes(tokens: Tokens) -> bytes:
    """Return token ids as little-endian int32.

    Raises:
      ValueError: one is not an integer from 0 to 2**31 - 1. Rounded or wrapped ids would give two texts one key.
    """
    array = np.asarray(tokens)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"token ids of dtype {array.dtype}; give integers")
    if array.size and not 0 <= array.min() <= array.max() < 1 << 31:
        raise ValueError(f"token ids from {array.min()} to {array.max()}; they must be at least 0 and below 2**31")
    return array.astype("<i4").tobytes()


def _digest(domain: str, *parts: bytes) -> bytes:
    # The lengths of the parts are in the digest, so no two lists of parts read alike.
    digest = hashlib.blake2b(domain.encode(), digest_size=KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
