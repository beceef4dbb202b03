"""Blending on SmolLM2-135M-Instruct, in float32: the identities, and what documents in another order are worth."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import blend, decode, weights
from jaxkv.blend import BlendOutput, Layout, Piece
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.pool import KVPool
from jaxkv.tokenizer import Tokenizer

CHUNK = 32
CACHE = CacheConfig(blocks=12, context=192, prefill_chunk=CHUNK)
TEXTS = (
    "The lighthouse at Cape Arden was built in 1871 of grey granite, and its keeper, Ines Holt, wrote a diary.",
    "Herring boats left the harbour before dawn; the price of salt rose twice that winter, and half of them stayed in.",
    "A paged cache keeps keys and values in blocks of equal size, so that memory can be given back.",
)
QUESTION = " Question: who kept the lighthouse at Cape Arden? Answer: the keeper was"

KV = tuple[np.ndarray, np.ndarray]


class Demo:
    """The demo model, three documents and a question."""

    def __init__(self) -> None:
        path = weights.locate()
        self.config: ModelConfig
        self.config, self.weights = weights.load(path, jnp.float32)
        encode = Tokenizer.load(path).backend.encode
        self.bos = [self.config.bos_token_id or 0]
        self.documents = [np.asarray(encode(text, add_special_tokens=False).ids, np.int32) for text in TEXTS]
        self.question = np.asarray(encode(QUESTION, add_special_tokens=False).ids, np.int32)
        self.kvs = [self.segment(ids) for ids in self.documents]
        self.behind_bos = self.segment(self.documents[0], self.bos)
        self.tokens = np.concatenate([self.bos, *self.documents, self.question])
        self.pool, self.logits = self.prefill(self.tokens)

    def row(self) -> tuple[KVPool, np.ndarray]:
        """Return a pool of NaN and a table of its blocks in no order."""
        shapes = KVPool.shapes(self.config, CACHE)
        pool = jax.tree.map(lambda x: jnp.asarray(np.full(x.shape, np.nan, x.dtype)), shapes)
        return pool, np.random.default_rng(0).permutation(np.arange(1, 13))[None].astype(np.int32)

    def segment(self, ids: np.ndarray, before: Sequence[int] = ()) -> KV:
        """Return a document's clean KV."""
        options = {"config": self.config, "before": before, "chunk": CHUNK}
        return blend.segment_kv(self.weights, *self.row(), ids, **options)[1:]  # type: ignore[arg-type]

    def prefill(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pool's keys of the row [L, T, K, D], and the logits [V] of a full prefill."""
        pool, table = self.row()
        for start in range(0, tokens.size, CHUNK):
            chunk = decode.Chunk.idle(CACHE)
            part = tokens[start : start + CHUNK]
            chunk.tokens[0, : part.size], chunk.count[0], chunk.table[0] = part, part.size, table[0]
            chunk.length[0] = chunk.position[0] = start
            pool, out = decode.prefill_chunk(self.weights, pool, chunk, config=self.config)
        return self.keys(pool, table, tokens.size), np.asarray(out.logits[0])

    def keys(self, pool: KVPool, table: np.ndarray, count: int) -> np.ndarray:
        """Return a row's keys [L, T, K, D]."""
        pages = np.stack([np.asarray(page)[table[0]].swapaxes(1, 2) for page in pool.k])
        return pages.reshape(len(pool.k), -1, self.config.kv_heads, self.config.head_dim)[:, :count]

    def blend(
        self, pieces: Sequence[Piece], kvs: Sequence[KV], ratio: float, priority: np.ndarray | None = None
    ) -> tuple[np.ndarray, BlendOutput]:
        """Return the row's keys and what blending gave, the question behind the pieces."""
        layout, (pool, table) = Layout.of(pieces, self.question), self.row()
        pool, out = blend.blend_prefill(
            self.weights, pool, table, layout, lambda layer: [(k[layer], v[layer]) for k, v in kvs],
            config=self.config, ratio=ratio, chunk=CHUNK, priority=priority,
        )  # fmt: skip
        return self.keys(pool, table, layout.size), out


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo()


def pieces(demo: Demo, cached: bool = True) -> list[Piece]:
    return [Piece(demo.bos), *(Piece(ids, cached=cached) for ids in demo.documents)]


def assert_same_answer(out: BlendOutput, logits: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(out.logits[0]), logits, rtol=0, atol=1e-4)
    assert int(jnp.argmax(out.logits)) == logits.argmax()


def test_a_ratio_of_one_and_missing_segments_are_a_full_prefill(demo: Demo) -> None:
    keys, out = demo.blend(pieces(demo), demo.kvs, 1)
    assert_same_answer(out, demo.logits)
    np.testing.assert_allclose(keys, demo.pool, rtol=0, atol=1e-4)
    assert_same_answer(demo.blend(pieces(demo, cached=False), [], 0)[1], demo.logits)


def test_a_document_behind_the_bos_it_was_prefilled_behind_is_exact_at_every_ratio(demo: Demo) -> None:
    first = demo.documents[0]
    _, logits = demo.prefill(np.concatenate([demo.bos, first, demo.question]))
    for ratio in (0, 0.15):
        made = [Piece(demo.bos), Piece(first, cached=True, exact=True)]
        _, out = demo.blend(made, [demo.behind_bos], ratio)
        assert_same_answer(out, logits)
        assert out.computed == demo.question.size + 1


def test_layer_0_has_the_bits_of_prefill_and_the_check_layer_is_exact(demo: Demo) -> None:
    keys, _ = demo.blend(pieces(demo), demo.kvs, 0)
    np.testing.assert_array_equal(keys[0], demo.pool[0])
    np.testing.assert_allclose(keys[1], demo.pool[1], rtol=0, atol=1e-4)
    assert np.abs(keys[2:] - demo.pool[2:]).max() > 0.1


def test_a_later_token_changes_no_bit_of_an_earlier_selected_one(demo: Demo) -> None:
    priority = (np.arange(demo.tokens.size) % 4 == 0).astype(np.float32)
    # A token of the last document that is not selected.
    at = 1 + demo.documents[0].size + demo.documents[1].size
    changed = at + 1 + (at % 4 == 3)
    found = []
    for change in (0.0, 2.0):
        k, v = (x.copy() for x in demo.kvs[2])
        k[:, changed - at] += change
        v[:, changed - at] += change
        keys, out = demo.blend(pieces(demo), [*demo.kvs[:2], (k, v)], 0.25, priority)
        selected = np.asarray(out.selected)[: out.computed]
        assert changed not in selected and (selected < at).sum() > 8
        found.append((keys[:, selected[selected < at]], np.asarray(out.logits)))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert np.abs(found[0][1] - found[1][1]).max() > 0


def test_recomputing_brings_the_answer_closer(demo: Demo) -> None:
    full = jax.nn.log_softmax(demo.logits)

    def divergence(out: BlendOutput) -> float:
        return float(jnp.sum(jnp.exp(full) * (full - jax.nn.log_softmax(out.logits[0]))))

    kl = [divergence(demo.blend(pieces(demo), demo.kvs, ratio)[1]) for ratio in (0, 0.15, 0.5)]
    assert kl[0] > 0.01 and kl[1] < 0.75 * kl[0] and kl[2] < kl[1]
