"""Moves bit for bit, in place, and nowhere else; and attention over what a compaction leaves."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triattention_oracle as oracle
from hypothesis import given
from hypothesis import strategies as st

import pallas_kernels
from jaxkv import compact as compaction
from jaxkv import rope, triattention
from jaxkv.compact import compact_rows, plan
from jaxkv.compression import MODES, RowBudget, freed_blocks, written_blocks
from jaxkv.config import RopeConfig
from jaxkv.policies.base import Policy
from jaxkv.policies.knorm import KNorm
from jaxkv.policies.triattention import TriAttention
from jaxkv.pool import KVPool
from jaxkv.select import Budgets
from jaxkv.stats import QueryStats
from pallas_kernels import compact_reference

N, K, P, M = 60, 2, 4, 12
"""Small blocks, and a table wide enough for rows to span several tiles where those are made small."""


def bits(array):
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def random_pages(rng):
    """Return pages of every kind that moves: keys with NaN in them, codes, and scales with and without heads."""
    keys = rng.standard_normal((N, K, P, 8)).astype(np.float32)
    keys[rng.random(keys.shape) < 0.1] = np.nan
    keys[rng.random(keys.shape) < 0.1] = -0.0
    return {
        "k": keys,
        "codes": rng.integers(-128, 128, (N, K, P, 8), dtype=np.int8),
        "scales": jnp.asarray(rng.standard_normal((N, K, P)), jnp.bfloat16),
    }


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(compact_reference, "TILE_SLOTS", 4 * P)


@functools.cache
def _move():
    return jax.jit(lambda pages, *arguments: compaction.compact(pages, plan(*arguments)), donate_argnums=0)


@st.composite
def moves(draw):
    """Return keep [B, X, S], counts, a table and its target, some of its blocks shared."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, heads, slots = 2, draw(st.sampled_from([1, K])), M * P
    keep, counts = np.full((rows, heads, slots), slots), []
    for b in range(rows):
        length = draw(st.integers(0, slots))
        count = draw(st.integers(0, length))
        kind = draw(st.sampled_from(["any", "first", "last", "one hole"]))
        for x in range(heads):
            if kind == "any":
                keep[b, x, :count] = np.sort(rng.choice(length, count, replace=False))
            elif kind == "first":
                keep[b, x, :count] = np.arange(count)
            elif kind == "last":
                keep[b, x, :count] = np.arange(length - count, length)
            else:
                hole = rng.integers(0, count + 1)
                keep[b, x, :count] = np.delete(np.arange(count + 1), hole) if count < length else np.arange(count)
        counts.append(count)
    blocks = rng.permutation(N - 1) + 1
    source = blocks[: rows * M].reshape(rows, M)
    target = np.where(
        rng.random((rows, M)) < draw(st.sampled_from([0, 0.4])), blocks[-rows * M :].reshape(rows, M), source
    )
    return rng, keep.astype(np.int32), np.asarray(counts, np.int32), source.astype(np.int32), target.astype(np.int32)


@given(problem=moves())
def test_slots_move_bit_for_bit_and_nothing_else_does(problem):
    rng, keep, counts, source, target = problem
    before = random_pages(rng)
    if keep.shape[1] == 1:
        before["positions"] = rng.integers(0, 2**31, (N, P), dtype=np.int32)
    saved = {name: bits(pages).copy() for name, pages in before.items()}
    after = _move()({name: jnp.asarray(pages) for name, pages in before.items()}, keep, counts, source, target)
    made = plan(*(jnp.asarray(x) for x in (keep, counts, source, target)))
    written = set(np.asarray(made.target).ravel().tolist()) - {-1}
    shared = set(source[source != target].tolist())
    assert not written & shared and 0 not in written
    for b, count in enumerate(counts):
        for j in range(count):
            for x in range(keep.shape[1]):
                heads = [x] if keep.shape[1] == K else range(K)
                old, new = divmod(int(keep[b, x, j]), P), divmod(j, P)
                for name, pages in after.items():
                    got, want = bits(pages), saved[name]
                    if name == "positions":
                        assert got[target[b, new[0]], new[1]] == want[source[b, old[0]], old[1]]
                    else:
                        for h in heads:
                            np.testing.assert_array_equal(
                                got[target[b, new[0]], h, new[1]], want[source[b, old[0]], h, old[1]]
                            )
    rest = sorted(set(range(N)) - written)
    for name, pages in after.items():
        np.testing.assert_array_equal(bits(pages)[rest], saved[name][rest])


@pytest.mark.parametrize("length", [0, 1, 5, 40, 48])
def test_keeping_everything_writes_nothing(length):
    keep = jnp.broadcast_to(jnp.where(jnp.arange(M * P) < length, jnp.arange(M * P), M * P), (1, K, M * P))
    made = plan(keep, jnp.asarray([length]), jnp.arange(1, M + 1)[None])
    np.testing.assert_array_equal(made.target, -1)


def test_moves_span_tiles(small_tiles):
    """Rows of 48 slots in tiles of 16, so that a tile reads what the next one will overwrite."""
    rng = np.random.default_rng(0)
    keep = np.full((2, K, M * P), M * P, np.int32)
    for b, x in np.ndindex(2, K):
        keep[b, x, :37] = np.sort(rng.choice(M * P, 37, replace=False))
    table = (rng.permutation(N - 1)[: 2 * M] + 1).reshape(2, M)
    values = rng.standard_normal((N, K, P, 8)).astype(np.float32)
    counts = jnp.asarray([37, 37])
    got = jax.jit(lambda pages: compaction.compact(pages, plan(jnp.asarray(keep), counts, jnp.asarray(table))))(values)
    for b, x in np.ndindex(2, K):
        row = oracle.unpaged(values, table[b], M * P)[x]
        np.testing.assert_array_equal(oracle.unpaged(np.asarray(got), table[b], 37)[x], row[keep[b, x, :37]])


def test_pages_that_do_not_fit_are_refused():
    keep, table = jnp.zeros((1, K, 8), jnp.int32), jnp.zeros((1, 2), jnp.int32)
    made = plan(keep, jnp.asarray([4]), table)
    with pytest.raises(ValueError, match=r"\(9, 4\) have no heads, and 2 heads keep different slots"):
        compaction.compact(jnp.zeros((9, 4)), made)
    with pytest.raises(ValueError, match="are neither"):
        compaction.compact(jnp.zeros((9, 3, 4, 8)), made)
    with pytest.raises(ValueError, match="S must be M"):
        plan(keep, jnp.asarray([4]), jnp.zeros((1, 3), jnp.int32))


def test_golden_paged_compaction():
    """The authors' pool is [N, P, K, D] and has a block 0 in use; here it is [N, K, P, D] with ids one higher."""
    data = oracle.golden("C_paged_vllm.npz")
    table = jnp.asarray(data["block_ids"] + 1, jnp.int32)[None]
    keep = np.full((1, 2, 288), 288, np.int32)
    keep[0, :, :160] = data["keep_per_head_noprotect"]
    pages = np.pad(data["kv_before"].transpose(0, 1, 2, 4, 3, 5), ((0, 0), (0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))
    want = data["kv_after_per_head_noprotect"].transpose(0, 1, 2, 4, 3, 5)[:, :, data["block_ids"][:10]]
    made = plan(jnp.asarray(keep), jnp.asarray([160]), table)
    got = compaction.compact([[jnp.asarray(x) for x in layer] for layer in pages], made)
    for layer, kind in np.ndindex(2, 2):
        kept = np.asarray(got[layer][kind])[data["block_ids"][:10] + 1]
        np.testing.assert_array_equal(bits(kept), bits(np.ascontiguousarray(want[layer, kind])))
        others = [0, *(data["block_ids"][10:] + 1)]
        np.testing.assert_array_equal(np.asarray(got[layer][kind])[others], pages[layer, kind][others])


class Case:
    """Three rows of real RoPE keys in shuffled blocks, every other slot NaN: 100, 61 and 37 tokens, 16-slot budgets."""

    layers, kv_heads, groups, dim, block, width, blocks = 3, 2, 2, 64, 8, 13, 50
    lengths, positions = (100, 61, 37), (340, 61, 37)

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.omega = rope.inverse_frequencies(RopeConfig(), self.dim)
        self.tables = np.zeros((3, self.width), np.int32)
        ids = rng.permutation(self.blocks - 1) + 1
        for b, length in enumerate(self.lengths):
            count = -(-length // self.block)
            self.tables[b, :count], ids = ids[:count], ids[count:]
        shape = (self.layers, 3, self.kv_heads, max(self.lengths), self.dim)
        self.k, self.v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        # Row 0 was compacted before: its tokens have gaps, and each head holds others.
        self.at = np.stack([np.stack([self._positions(rng, b) for _ in range(self.kv_heads)]) for b in range(3)])
        means = rng.standard_normal((3, self.layers, self.kv_heads * self.groups, self.dim // 2)).astype(np.float32)
        self.stats = QueryStats(*(jnp.asarray(x) for x in means))
        self.policy = TriAttention(phases=triattention.Phases.create(self.omega, 1.0, 1000), stats=self.stats)
        budgets = [
            RowBudget(b_row=b, interval=8, window=w, sinks=s, pinned=0)
            for b, w, s in ((48, 9, 4), (24, 0, 0), (40, 8, 2))
        ]
        self.budgets = Budgets.stack(budgets)

    def _positions(self, rng, b):
        out = np.zeros(max(self.lengths), np.int64)
        out[: self.lengths[b]] = np.sort(rng.choice(self.positions[b], self.lengths[b], replace=False))
        return out

    def roped(self, layer, b):
        length = self.lengths[b]
        heads = [
            oracle.roped(self.k[layer, b, h, :length], self.at[b, h, :length], self.omega) for h in range(self.kv_heads)
        ]
        return np.stack(heads).astype(np.float32)

    def pool(self):
        shape = (self.blocks, self.kv_heads, self.block, self.dim)
        pages = np.full((2, self.layers, *shape), np.nan, np.float32)
        for layer, b in np.ndindex(self.layers, 3):
            for kind, values in enumerate((self.roped(layer, b), self.v[layer, b])):
                for t in range(self.lengths[b]):
                    pages[kind, layer, self.tables[b, t // self.block], :, t % self.block] = values[:, t]
        return KVPool(k=tuple(map(jnp.asarray, pages[0])), v=tuple(map(jnp.asarray, pages[1])))

    def kept(self, mode, b, policy_scores):
        rank = oracle.ranks(policy_scores, self.lengths[b], int(self.budgets.oldest[b]), mode)
        row = (self.lengths[b], int(self.budgets.b_row[b]), int(self.budgets.window[b]), int(self.budgets.oldest[b]))
        return [[oracle.pick(rank[layer, h], *row) for h in range(self.kv_heads)] for layer in range(self.layers)]

    def scores(self, b):
        """Return float64 scores [L, K, G, T] by the cosine formula."""
        out = []
        for layer in range(self.layers):
            means = [np.asarray(x[layer], np.float64) for x in jax.tree.leaves(self.stats)]
            mu, nu, heads = means[0] + 1j * means[1], means[2], []
            for h in range(self.kv_heads):
                own = slice(h * self.groups, (h + 1) * self.groups)
                arguments = (self.k[layer, b, h : h + 1, : self.lengths[b]], self.at[b, h, : self.lengths[b]])
                offsets = 2 ** np.arange(17)
                heads.append(
                    oracle.cosine_scores(
                        *arguments, mu[own], nu[own], self.omega, 1.0, self.positions[b], offsets, "mean"
                    )
                )
            out.append(heads)
        return np.asarray(out)

    def run(self, mode, due=(True, True, True), target=None, pool=None, policy=None, **options):
        step = _step(mode, tuple(sorted(options.items())))
        target = self.tables if target is None else target
        rows = (jnp.asarray(x) for x in (self.tables, target, self.lengths, self.positions, due))
        return step(self.pool() if pool is None else pool, *rows, self.budgets, policy or self.policy)


@functools.cache
def _step(mode, options):
    return jax.jit(functools.partial(compact_rows, mode=mode, **dict(options)), donate_argnums=0)


@pytest.fixture(scope="module")
def case():
    return Case()


@pytest.mark.parametrize("mode", MODES)
def test_attention_after_compaction_is_attention_over_the_kept_tokens(case, mode):
    pool, length = case.run(mode)
    np.testing.assert_array_equal(length, [48, 24, 37])
    rng = np.random.default_rng(1)
    q = rng.standard_normal((3, case.kv_heads * case.groups, case.dim)).astype(np.float32)
    q_roped = np.stack([oracle.roped(q[b, :, None], [case.positions[b]], case.omega)[:, 0] for b in range(3)])
    scores = [case.scores(b) for b in range(3)]
    for layer in range(case.layers):
        slots = jnp.asarray(length)[:, None] - 1
        queries = jnp.asarray(q_roped, jnp.float32)[:, None]
        got = pallas_kernels.attend(queries, pool.k[layer], pool.v[layer], jnp.asarray(case.tables), slots)
        for b in range(3):
            kept = case.kept(mode, b, scores[b])[layer]
            own = [
                oracle.roped(case.k[layer, b, h, kept[h]], case.at[b, h, kept[h]], case.omega)
                for h in range(case.kv_heads)
            ]
            values = np.stack([case.v[layer, b, h, kept[h]] for h in range(case.kv_heads)])
            want = oracle.attention(q_roped[b], np.stack(own), values)
            np.testing.assert_allclose(np.asarray(got)[b, 0], want, atol=1e-5)


@pytest.mark.parametrize("mode", ["per_head", "per_layer_head"])
def test_only_rows_that_are_due_change_whoever_their_neighbours_are(case, mode):
    start = case.pool()
    before = [bits(x).copy() for x in jax.tree.leaves(start)]
    every, _ = case.run(mode)
    for b in range(3):
        due = np.arange(3) == b
        alone, length = case.run(mode, due=due)
        np.testing.assert_array_equal(length, np.where(due, [48, 24, 37], case.lengths))
        kept = case.tables[b, : int(length[b]) // case.block]
        rest = np.setdiff1d(np.arange(case.blocks), kept)
        for x, y, old in zip(jax.tree.leaves(alone), jax.tree.leaves(every), before, strict=True):
            np.testing.assert_array_equal(bits(x)[kept], bits(y)[kept])
            np.testing.assert_array_equal(bits(x)[rest], old[rest])
            # Row 2 is below its budget: a compaction that keeps all of it is the identity.
            assert (b == 2) == np.array_equal(bits(x), old)


@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_any_number_of_lanes_keeps_the_same(case, lanes):
    one, _ = case.run("per_head")
    many, length = case.run("per_head", lanes=lanes)
    np.testing.assert_array_equal(length, [48, 24, 37])
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))


def test_shared_blocks_are_copied_out_of_and_never_written(case):
    """Row 0's first five blocks have other holders. Only those that may be written need a fresh one."""
    private, _ = case.run("per_head")
    row = RowBudget(b_row=48, interval=8, window=9, sinks=4, pinned=0)
    target = case.tables.copy()
    used = set(case.tables.ravel().tolist())
    fresh = iter([i for i in range(1, case.blocks) if i not in used])
    for m in set(range(5)) & set(written_blocks(100, row, case.block)):
        target[0, m] = next(fresh)
    before = [bits(x).copy() for x in jax.tree.leaves(case.pool())]
    got, _ = case.run("per_head", target=target)
    for x, y, old in zip(jax.tree.leaves(got), jax.tree.leaves(private), before, strict=True):
        np.testing.assert_array_equal(bits(x)[target[0, :6]], bits(y)[case.tables[0, :6]])
        np.testing.assert_array_equal(bits(x)[case.tables[0, :5]], old[case.tables[0, :5]])


@pytest.mark.parametrize("mode", MODES)
def test_scores_that_are_nan_free_the_same_blocks(case, mode):
    pool, length = case.run(mode, policy=_Nothing())
    np.testing.assert_array_equal(length, [48, 24, 37])
    want = oracle.pick(np.full(100, -np.inf), 100, 48, 9, 4)
    got = oracle.unpaged(np.asarray(pool.v[1]), case.tables[0], 48)
    np.testing.assert_array_equal(got, case.v[1, 0][:, want])
    freed = [case.tables[0, m] for m in freed_blocks(100, 48, case.block)]
    assert len(freed) == 7 and not set(freed) & set(case.tables[0, :6].tolist())


class _Nothing(Policy):
    def score(self, cached, observed):
        return jnp.full((cached.table.shape[0], 1, 1, cached.slots), jnp.nan)


jax.tree_util.register_static(_Nothing)


def test_sliding_layers_keep_their_newest_slots_and_have_no_say(case):
    pool, _ = case.run("per_head", sliding=(1,))
    got = oracle.unpaged(np.asarray(pool.v[1]), case.tables[0], 48)
    np.testing.assert_array_equal(got, case.v[1, 0][:, 52:100])
    scores = case.scores(0)
    two = oracle.ranks(scores[[0, 2]], 100, 4, "per_head")
    want = [oracle.pick(two[0, h], 100, 48, 9, 4) for h in range(case.kv_heads)]
    for layer in (0, 2):
        got = oracle.unpaged(np.asarray(pool.v[layer]), case.tables[0], 48)
        for h in range(case.kv_heads):
            np.testing.assert_array_equal(got[h], case.v[layer, 0, h, want[h]])


def test_nothing_recompiles_when_budgets_lengths_or_rows_change(case):
    step = jax.jit(functools.partial(compact_rows, mode="per_head"))
    pool = case.pool()
    for b_row, length, due in ((48, 100, True), (24, 61, False), (8, 30, True)):
        row = RowBudget(b_row=b_row, interval=8, window=2, sinks=1, pinned=length // 20)
        rows = [jnp.asarray(x) for x in (case.tables, case.tables, [length, 5, 9], [200, 5, 9], [due, False, True])]
        step(pool, *rows, Budgets.stack([row, None, row]), case.policy)
    assert step._cache_size() == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("looped", [False, True])
def test_no_second_pool_is_made(mode, looped):
    """Compiled only. The pools are 100 MiB; what comes on top is a tile of every layer."""
    shape = jax.ShapeDtypeStruct((2048, 3, 16, 64), jnp.float32)
    pool = KVPool(k=(shape,) * 4, v=(shape,) * 4)
    size = 8 * 2048 * 3 * 16 * 64 * 4
    table = jax.ShapeDtypeStruct((4, 40), jnp.int32)
    integers = jax.ShapeDtypeStruct((4,), jnp.int32)
    due = jax.ShapeDtypeStruct((4,), jnp.bool_)
    budgets = Budgets(*(integers,) * 5)

    def run(pool, table, length, position, due, budgets):
        def body(step, carry):
            pool, length = carry
            return compact_rows(pool, table, table, length, position, due, budgets, KNorm(), mode=mode)

        return jax.lax.fori_loop(0, length[0], body, (pool, length)) if looped else body(0, (pool, length))

    compiled = jax.jit(run, donate_argnums=0).lower(pool, table, integers, integers, due, budgets).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < 8 * 2**20
    assert not re.findall(r"= \S*f32\[2048,3,16,64\]\S* (?:copy|transpose)\(", compiled.as_text())
