"""Keys: the digests of an independent program, and what must differ in them."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv import keys
from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.store import Key

ROOT = bytes(range(32))
MODEL = ModelConfig(
    "llama", vocab_size=97, width=32, mlp_width=64, layers=2, heads=4, kv_heads=2, head_dim=8, eos_token_ids=(1, 2)
)
tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30)


def test_digests_are_those_of_b2sum():
    # coreutils' b2sum -l 256, fed by printf with the domain, then each part after its length in 8 bytes.
    content = "ac03da6b73d3bc622c9f55a2c8a135f8286f224a71e99d62eeaab694fe4ea4bd"
    first = "0d0fcda20f7ccecab946b4ec5f860c134594c81b5ef072cd948a08e8444960f0"
    second = "cb6444b113043ae50d3c9c4b161d5bf12c806cc01b61043bb9c8221cbb839c5e"
    assert keys.content_key(ROOT, [1, 2, 300000]).hex() == content
    assert keys.block_key(ROOT, [1, 2]).hex() == first
    assert [key.hex() for key in keys.prefix_keys(ROOT, [1, 2, 3, 4, 5], 2)] == [first, second]
    assert Key.content(ROOT, [1, 2, 300000]).name == content
    assert [key.name for key in Key.prefix(ROOT, [1, 2, 3, 4, 5], 2)] == [first, second]


def test_a_fingerprint_is_that_of_b2sum():
    assert (
        keys.fingerprint(MODEL, dtype="float32", weights="w", salt="s").hex()
        == "3d81186192e935ac22c117f93c6f6a7ca9a62ad239f37b9ac2642900324d6f00"
    )


@given(tokens, st.integers(1, 8))
def test_prefix_keys_are_chained_block_keys(ids, size):
    expected, parent = [], ROOT
    for start in range(0, len(ids) // size * size, size):
        parent = keys.block_key(parent, ids[start : start + size])
        expected.append(parent)
    assert keys.prefix_keys(ROOT, ids, size) == expected
    blocks = Key.prefix(ROOT, ids, size)
    assert [key.digest for key in blocks] == expected
    assert [key.parent for key in blocks] == [ROOT, *expected][: len(blocks)]
    assert [i for key in blocks for i in np.frombuffer(key.ids, "<i4")] == ids[: len(blocks) * size]


@given(tokens, tokens)
def test_other_tokens_have_another_key(one, two):
    same = one == two
    assert (keys.content_key(ROOT, one) == keys.content_key(ROOT, two)) == same
    assert (keys.block_key(ROOT, one) == keys.block_key(ROOT, two)) == same
    assert keys.content_key(ROOT, one) != keys.block_key(ROOT, one)
    assert keys.content_key(ROOT, one) != keys.content_key(bytes(32), one)


@given(tokens, st.sampled_from([np.int32, np.int64, np.uint32, list, tuple]))
def test_a_key_is_of_the_numbers_whatever_holds_them(ids, kind):
    held = kind(ids) if kind in (list, tuple) else np.asarray(ids, kind)
    assert keys.content_key(ROOT, held) == keys.content_key(ROOT, ids)


@pytest.mark.parametrize("ids", [[1.5], [-1], [2**31], np.array([2**32 + 1]), ["1"], [True], np.array([1.0])])
def test_what_is_no_token_id_is_refused(ids):
    with pytest.raises(ValueError, match="token ids"):
        keys.content_key(ROOT, ids)


CHANGES = {
    **{name: getattr(MODEL, name) * 2 for name in ("vocab_size", "width", "mlp_width", "layers", "heads", "head_dim")},
    "kv_heads": 4,
    "norm_eps": 1e-6,
    "tied_head": True,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "qk_norm": True,
}
ROPES = [
    RopeConfig(theta=5e5),
    RopeConfig(kind="linear", factor=2.0),
    RopeConfig(kind="linear", factor=4.0),
    RopeConfig(kind="llama3", factor=8.0, original_context=64),
    RopeConfig(kind="llama3", factor=8.0, original_context=128),
    RopeConfig(kind="llama3", factor=8.0, original_context=64, high_freq_factor=8.0),
    RopeConfig(kind="yarn", factor=8.0, original_context=64),
    RopeConfig(kind="yarn", factor=8.0, original_context=64, beta_fast=16.0),
    RopeConfig(kind="yarn", factor=8.0, original_context=64, attention_factor=1.0),
    RopeConfig(kind="yarn", factor=8.0, original_context=64, truncate=False),
]


def test_all_that_kv_depends_on_changes_the_fingerprint():
    models = [MODEL, *(dataclasses.replace(MODEL, **{name: value}) for name, value in CHANGES.items())]
    models += [dataclasses.replace(MODEL, rope=rope) for rope in ROPES]
    found = [keys.fingerprint(model, dtype="float32") for model in models]
    found += [keys.fingerprint(MODEL, dtype=dtype) for dtype in ("bfloat16", "float16", "int8")]
    found += [keys.fingerprint(MODEL, dtype="float32", weights=digest) for digest in ("a", "b")]
    found += [keys.fingerprint(MODEL, dtype="float32", salt=salt) for salt in ("a", "b")]
    assert len(set(found)) == len(found)


def test_names_and_special_tokens_do_not():
    other = dataclasses.replace(MODEL, name="other", eos_token_ids=(5,), bos_token_id=3, context=99)
    assert keys.fingerprint(other, dtype="float32") == keys.fingerprint(MODEL, dtype="float32")


def test_fields_that_the_fingerprint_does_not_know_are_in_it():
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    tested = CHANGES.keys() | {"rope"} | keys._NAMES
    assert known == tested, "a new field: say whether KV depends on it, in keys._NAMES or here"


def test_no_hash_seed_matters():
    root = Path(__file__).resolve().parents[1]
    program = (
        "from jaxkv import keys; from jaxkv.config import ModelConfig;"
        f"print(hash('a'), keys.fingerprint({MODEL!r}, dtype='float32', weights='w', salt='s').hex())".replace(
            "RopeConfig", "__import__('jaxkv').RopeConfig"
        )
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert printed[0][0] != printed[1][0]
    assert printed[0][1] == printed[1][1] == keys.fingerprint(MODEL, dtype="float32", weights="w", salt="s").hex()
