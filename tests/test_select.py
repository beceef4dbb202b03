"""Kept slots against sorted tuples in float64, and the authors' four rounds."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triattention_oracle as oracle
from hypothesis import given
from hypothesis import strategies as st

from jaxkv import triattention
from jaxkv.compact import compact_rows
from jaxkv.compression import MODES, RowBudget
from jaxkv.policies.triattention import TriAttention
from jaxkv.pool import KVPool
from jaxkv.select import Budgets, newest, normalise, select
from jaxkv.stats import QueryStats

LAYERS, KV_HEADS, GROUPS, SLOTS = 2, 2, 3, 48

_select = {mode: jax.jit(functools.partial(select, mode=mode)) for mode in MODES}


def run_select(scores, length, rows, mode):
    """Return kept slots [B, L, K, count] as lists, having checked their form. scores is [B, L, K, G, S]."""
    layers = [jnp.asarray(scores[:, layer], jnp.float32) for layer in range(scores.shape[1])]
    keeps = [np.asarray(keep) for keep in _select[mode](layers, jnp.asarray(length), Budgets.stack(rows))]
    assert len(keeps) == (scores.shape[1] if mode == "per_layer_head" else 1)
    assert {keep.shape[1] for keep in keeps} == {1 if mode in ("union", "shared") else scores.shape[2]}
    out = []
    for b, row in enumerate(rows):
        count = min(length[b], row.b_row)
        for keep in keeps:
            assert (np.diff(keep[b, :, :count]) > 0).all() and (keep[b, :, :count] >= np.arange(count)).all()
            assert (keep[b, :, :count] < max(length[b], 1)).all() and (keep[b, :, count:] == keep.shape[2]).all()
        shape = (scores.shape[1], scores.shape[2], count)
        out.append(np.broadcast_to(np.stack([keep[b, :, :count] for keep in keeps]), shape))
    return out


@st.composite
def problems(draw, ties):
    """Rows of scores and budgets. Small integers tie often; what is pinned always fits, as admission sees to."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, lengths = [], []
    for _ in range(2):
        b_row = draw(st.integers(1, SLOTS))
        oldest = draw(st.integers(0, b_row))
        window = draw(st.integers(0, b_row - oldest))
        pinned = draw(st.integers(0, oldest))
        rows.append(RowBudget(b_row=b_row, interval=8, window=window, sinks=oldest, pinned=pinned))
        lengths.append(draw(st.integers(0, SLOTS)))
    shape = (2, LAYERS, KV_HEADS, GROUPS, SLOTS)
    scores = rng.integers(0, 4, shape) * 1.0 if ties else rng.standard_normal(shape)
    if draw(st.booleans()):
        scores[rng.random(shape) < 0.2] = np.nan
    return scores, lengths, rows


@given(problem=problems(ties=False), mode=st.sampled_from(MODES))
def test_kept_slots_equal_the_oracles(problem, mode):
    scores, lengths, rows = problem
    scores = scores.astype(np.float32)
    got = run_select(scores, lengths, rows, mode)
    for b, row in enumerate(rows):
        rank = oracle.ranks(scores[b], lengths[b], row.oldest, mode)
        for layer, head in np.ndindex(LAYERS, KV_HEADS):
            want = oracle.pick(rank[layer, head], lengths[b], row.b_row, row.window, row.oldest)
            differing = sorted(set(want) ^ set(got[b][layer, head].tolist()))
            # Float32 may order two slots otherwise only where float64 can hardly tell them apart.
            assert not differing or np.ptp(rank[layer, head, differing]) < 1e-5


@given(problem=problems(ties=True))
def test_equal_scores_keep_the_lowest_slots(problem):
    """One head and one layer, so that equal scores stay equal; of the slots that are not pinned the oldest win."""
    scores, lengths, rows = problem
    scores = scores[:, :1, :1, :1]
    got = run_select(scores, lengths, rows, "per_layer_head")
    for b, row in enumerate(rows):
        length, kept = lengths[b], set(got[b].reshape(-1).tolist())
        pinned = {j for j in range(length) if j < row.oldest or j >= length - row.window}
        assert len(kept) == min(length, row.b_row)
        assert pinned <= kept
        value = np.where(np.isnan(scores[b].reshape(-1)), -np.inf, scores[b].reshape(-1))
        order = sorted(set(range(length)) - pinned, key=lambda j: (-value[j], j))
        assert kept - pinned == set(order[: len(kept) - len(pinned)])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0])
def test_no_score_changes_how_many_are_kept(mode, value):
    scores = np.full((1, LAYERS, KV_HEADS, GROUPS, SLOTS), value)
    row = RowBudget(b_row=20, interval=8, window=5, sinks=3, pinned=0)
    (got,) = run_select(scores, [40], [row], mode)
    np.testing.assert_array_equal(got, np.broadcast_to([*range(15), *range(35, 40)], got.shape))


def test_a_nan_in_one_query_head_leaves_the_others_their_say():
    scores = np.tile(np.arange(SLOTS, dtype=np.float64), (1, LAYERS, KV_HEADS, GROUPS, 1))
    scores[:, :, 0, 0] = np.nan
    scores[:, :, 1, :, 30] = np.nan
    row = RowBudget(b_row=10, interval=8, window=0, sinks=0, pinned=0)
    (got,) = run_select(scores, [40], [row], "per_head")
    np.testing.assert_array_equal(got[0, 0], range(30, 40))
    np.testing.assert_array_equal(got[0, 1], [29, *range(31, 40)])


@pytest.mark.parametrize(("length", "oldest"), [(48, 0), (31, 4), (5, 4), (4, 4), (3, 4), (0, 0)])
def test_z_scores_leave_the_oldest_slots_and_the_tail_out(length, oldest):
    rng = np.random.default_rng(0)
    scores = (rng.standard_normal((1, KV_HEADS, GROUPS, SLOTS)) * 1e3 + 1e5).astype(np.float32)
    scores[..., length:] = np.nan
    got = np.asarray(normalise(jnp.asarray(scores), jnp.asarray([length]), jnp.asarray([oldest])))
    assert (got[..., length:] == -np.inf).all()
    want = oracle.z_scores(scores, length, oldest)[..., :length]
    if length - oldest > 1:
        # The mean of 1e5 rounds at 0.004, and one sigma is 1e3.
        np.testing.assert_allclose(got[..., :length], want, atol=3e-5)
    else:
        assert np.isfinite(got[..., :length]).all()


def test_a_constant_row_has_z_scores_of_zero_and_not_of_noise():
    scores = np.full((1, 1, 1, 16), 7.25, np.float32)
    got = normalise(jnp.asarray(scores), jnp.asarray([16]), jnp.asarray([0]))
    np.testing.assert_array_equal(got, 0)


def test_negative_and_positive_zero_tie():
    scores = np.asarray([-0.0, 0.0] * 8, np.float32).reshape(1, 1, 1, 1, 16)
    row = RowBudget(b_row=3, interval=8, window=0, sinks=0, pinned=0)
    (got,) = run_select(scores, [16], [row], "per_head")
    np.testing.assert_array_equal(got[0, 0], [0, 1, 2])


def test_sliding_layers_keep_the_newest():
    rows = [RowBudget(b_row=b, interval=8, window=0, sinks=4, pinned=0) for b in (8, 16, 32)]
    keep = np.asarray(newest(jnp.asarray([20, 16, 3]), Budgets.stack(rows), 24))[:, 0]
    np.testing.assert_array_equal(keep[0], [*range(12, 20), *[24] * 16])
    np.testing.assert_array_equal(keep[1], [*range(16), *[24] * 8])
    np.testing.assert_array_equal(keep[2], [0, 1, 2, *[24] * 21])


@pytest.mark.parametrize("prompt", ["pinprefill", "evictprefill"])
@pytest.mark.parametrize(
    ("mode", "name"), [("per_head", "per_head"), ("union", "union"), ("per_layer_head", "per_layer_perhead")]
)
def test_four_rounds_keep_the_golden_tokens(mode, name, prompt):
    """The whole pass, in a pool of shuffled blocks; V carries each token's id, so what moved can be read off it."""
    data = oracle.golden("B_selection_hf_rounds.npz")
    keys, block = data["k_roped"], 16
    budget, interval, prefill = (int(data[k]) for k in ("budget", "divide_length", "prefill_len"))
    pinned = prefill if prompt == "pinprefill" else 0
    budgets = Budgets.stack([RowBudget(b_row=budget, interval=interval, window=0, sinks=0, pinned=pinned)])
    stats = QueryStats(*(jnp.asarray(data[k]) for k in ("q_mean_real", "q_mean_imag", "q_abs_mean")))
    policy = TriAttention(phases=triattention.Phases.create(data["omega"], 1.0, 1000), stats=stats)
    table = jnp.asarray(np.random.default_rng(0).permutation(20)[None, :18] + 1)
    shape = (21, 2, block, keys.shape[-1])
    pool = KVPool(k=(jnp.full(shape, jnp.nan),) * 2, v=(jnp.full(shape, jnp.nan),) * 2)
    step = jax.jit(functools.partial(compact_rows, mode=mode))
    length = seen = 0
    for index, start in enumerate(data["trigger_round_starts"]):
        tokens = np.arange(seen, start)
        slots = jnp.asarray(length + np.arange(tokens.size))[None]
        blocks = jnp.take_along_axis(table, slots // block, axis=1)
        for layer in range(2):
            k = jnp.asarray(keys[layer][:, tokens].swapaxes(0, 1))[None]
            v = jnp.broadcast_to(jnp.asarray(tokens, jnp.float32)[None, :, None, None], k.shape)
            pool = pool.write(layer, k, v, blocks, slots % block)
        length, seen = length + tokens.size, int(start)
        due = jnp.asarray([True])
        pool, after = step(pool, table, table, jnp.asarray([length]), jnp.asarray([seen]), due, budgets, policy)
        length = int(after[0])
        assert length == budget
        for layer in range(2):
            kept = oracle.unpaged(np.asarray(pool.v[layer]), np.asarray(table[0]), length)[..., 0]
            np.testing.assert_array_equal(kept, data[f"kept_{name}_{prompt}"][index, layer])
