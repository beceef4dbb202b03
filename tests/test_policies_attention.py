"""Policies that rank by attention: against float64, and what the engine gathers for them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_engine_compression as engines
import test_policies as pools
import tiny
from expected import dense
from hypothesis import given
from hypothesis import strategies as st

from jaxkv import model, policies
from jaxkv.compression import CompressionConfig
from jaxkv.policies.base import Observed
from jaxkv.policies.h2o import H2O
from jaxkv.policies.snapkv import KERNEL, SnapKV

METHODS = {"snapkv": SnapKV, "h2o": H2O}
QUERIES = {"snapkv": 32, "h2o": 128}
LAYERS, K, G, D = pools.LAYERS, pools.K, pools.G, pools.D


def attention(q, k, length):
    """Return the attention [T] that queries [G, Q, D] give keys [T, D]; query j stands at slot length - Q + j."""
    total = np.zeros(length)
    groups, count, dim = q.shape
    for g, j in np.ndindex(groups, count):
        seen = length - count + j + 1
        if seen > 0:
            logits = k[:seen].astype(np.float64) @ q[g, j].astype(np.float64) / np.sqrt(dim)
            weights = np.exp(logits - logits.max())
            total[:seen] += weights / weights.sum() / (groups * count)
    return total


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fill", [np.nan, 9.0])
def test_scores_are_the_attention_of_the_last_queries(method, fill):
    policy = policies.make(CompressionConfig(method=method), pools.MODEL)
    assert isinstance(policy, METHODS[method]) and policy.last_queries == QUERIES[method]
    pool, table, k, _ = pools.filled_pool(fill=fill)
    q = np.random.default_rng(1).standard_normal((LAYERS, 2, K * G, policy.last_queries, D)).astype(np.float32)
    cached = pools.view(pool, table, layer=1)
    got = np.asarray(jax.jit(policy.score)(cached, Observed(last_queries=tuple(map(jnp.asarray, q)))))
    assert got.shape[2] == 1
    for b, h in np.ndindex(2, K):
        length = pools.LENGTHS[b]
        want = attention(q[1, b, h * G : (h + 1) * G], k[1, b, h], length)
        if method == "snapkv":
            wide = np.pad(want, KERNEL // 2)
            want = np.array([wide[at : at + KERNEL].mean() for at in range(length)])
        np.testing.assert_allclose(got[b, h, 0, :length], want, rtol=2e-5, atol=1e-8)


def test_scores_without_queries_are_refused_with_the_way_out():
    pool, table, _, _ = pools.filled_pool()
    with pytest.raises(ValueError, match=r"give Observed\.last_queries"):
        policies.make(CompressionConfig(method="snapkv"), pools.MODEL).score(pools.view(pool, table), Observed())


@given(counts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=5), seed=st.integers(0, 9))
def test_the_newest_queries_are_kept_whatever_the_chunks(counts, seed):
    """Rows grow by their own counts, also by nothing and by more than is kept."""
    rng = np.random.default_rng(seed)

    class Four(SnapKV):
        last_queries = 4

    config = dataclasses.replace(tiny.MODEL, layers=2)
    observed = Observed.create(Four(scale=1.0), config, 2)
    told = [[], []]
    for own in counts:
        q = rng.standard_normal((2, 6, config.heads, config.head_dim)).astype(np.float32)
        ones = jnp.ones((2, 6, config.frequencies))
        heads = model.Heads(q=jnp.asarray(q), k=jnp.asarray(q), v=jnp.asarray(q), cos=ones, sin=0 * ones)
        real = np.arange(6) < np.asarray(own)[:, None]
        observed = observed.add(1, heads, jnp.asarray(real))
        for b in range(2):
            told[b] += list(q[b, : own[b]])
    for b in range(2):
        want = [np.zeros((config.heads, config.head_dim))] * 4 + told[b]
        np.testing.assert_array_equal(np.asarray(observed.last_queries[1][b]).swapaxes(0, 1), want[-4:])
    np.testing.assert_array_equal(observed.last_queries[0], 0)
    swapped = observed.put(jnp.asarray([1, 2]), observed.at(jnp.asarray([0, 1])))
    np.testing.assert_array_equal(swapped.last_queries[1][1], observed.last_queries[1][0])
    np.testing.assert_array_equal(swapped.last_queries[1][0], observed.last_queries[1][0])
    cleared = swapped.cleared(jnp.asarray([True, False]))
    np.testing.assert_array_equal(cleared.last_queries[1][0], 0)
    np.testing.assert_array_equal(cleared.last_queries[1][1], swapped.last_queries[1][1])


def test_the_engine_gathers_each_rows_own_last_queries_after_rope():
    config = dataclasses.replace(engines.SMALL, method="snapkv", stats=None, budget=200)
    made = engines.engine(config)
    one = engines.request(np.random.default_rng(0), 37, 20)
    made.add(engines.request(np.random.default_rng(1), 50, 30))
    made.step()
    made.add(one)
    made.step()
    (row,) = [row for row in made.rows if row.request is one]
    index = row.index
    while made.has_work:
        made.step()
    plain = tiny.drain(tiny.engine(), [one])[0][0]
    ids = jnp.asarray([*one.prompt, *plain[:-1]])[None]
    seen = []

    def attend(state, layer, heads):
        seen.append(np.asarray(heads.rotated()[0])[0])
        return dense(state, layer, heads)

    model.forward(tiny.weights(), tiny.MODEL, ids, jnp.arange(ids.shape[1])[None], attend, None)
    for layer, q in enumerate(seen):
        got = np.asarray(made.device.observed.last_queries[layer][index])
        np.testing.assert_allclose(got.swapaxes(0, 1), q[-QUERIES["snapkv"] :], atol=2e-5)


@pytest.mark.parametrize("method", METHODS)
def test_each_request_equals_its_solo_run_under_churn_and_poison(method):
    engines.test_each_request_equals_its_solo_run_under_churn_and_poison(method)


@pytest.mark.parametrize("method", METHODS)
def test_a_budget_of_everything_changes_nothing_and_a_small_one_holds(method):
    config = dataclasses.replace(engines.SMALL, method=method, stats=None)
    one = engines.request(np.random.default_rng(2), 60, 80)
    plain = tiny.drain(tiny.engine(), [one])[0]
    assert tiny.drain(engines.engine(dataclasses.replace(config, budget=1.0)), [one])[0] == plain
    tokens, (report,) = tiny.drain(engines.engine(config), [one])
    # One at the end of the prompt, then one after every eight of the 79 tokens that are written.
    assert report.compactions == 1 + (79 - 1) // 8 and tokens != plain
    assert report.length <= config.budget + config.interval
