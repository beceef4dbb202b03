"""Policies against float64, their one interface, and budgets in integers."""

from __future__ import annotations

import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triattention_oracle as oracle
from flax import struct
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxkv import policies
from jaxkv.compact import compact_rows, plan
from jaxkv.compression import CompressionConfig, RowBudget, freed_blocks, written_blocks
from jaxkv.config import ModelConfig
from jaxkv.policies.base import Cached, Observed, Policy
from jaxkv.pool import KVPool
from jaxkv.select import Budgets, select
from jaxkv.stats import QueryStats, QuerySums, StatsInfo

LAYERS, K, G, D, P, M, N = 2, 2, 2, 16, 8, 9, 40
MODEL = ModelConfig("llama", 10, 64, 8, LAYERS, K * G, K, D, context=4096, name="tiny")
LENGTHS, POSITIONS = (70, 33), (70, 95)


def filled_pool(seed=0, fill=np.nan):
    """Return a pool, tables [2, M], and the rows' keys and values [L, 2, K, T, D]; other slots hold ``fill``."""
    rng = np.random.default_rng(seed)
    table = (rng.permutation(N - 1)[: 2 * M] + 1).reshape(2, M).astype(np.int32)
    values = rng.standard_normal((2, LAYERS, 2, K, M * P, D)).astype(np.float32)
    pages = np.full((2, LAYERS, N, K, P, D), fill, np.float32)
    for b, length in enumerate(LENGTHS):
        for t in range(length):
            pages[:, :, table[b, t // P], :, t % P] = values[:, :, b, :, t]
    pool = KVPool(k=tuple(map(jnp.asarray, pages[0])), v=tuple(map(jnp.asarray, pages[1])))
    return pool, table, values[0], values[1]


def view(pool, table, layer=0, lengths=LENGTHS, positions=POSITIONS):
    arrays = (jnp.asarray(x, jnp.int32) for x in (table, lengths, positions))
    return Cached(pool.k[layer], pool.v[layer], *arrays, layer=layer)


def scores_of(policy, layer=0, fill=np.nan):
    pool, table, k, _ = filled_pool(fill=fill)
    got = jax.jit(policy.score)(view(pool, table, layer), Observed())
    return np.asarray(got), k[layer].astype(np.float64)


def make(method, **options):
    return policies.make(CompressionConfig(method=method, **options), MODEL)


def test_knorm_is_the_norm_negated():
    got, k = scores_of(make("knorm"))
    for b, length in enumerate(LENGTHS):
        np.testing.assert_allclose(got[b, :, 0, :length], -np.linalg.norm(k[b, :, :length], axis=-1), rtol=1e-6)


@pytest.mark.parametrize("fill", [np.nan, 9.0])
def test_keydiff_is_the_distance_from_the_mean_direction_of_the_rows_own_keys(fill):
    got, k = scores_of(make("keydiff"), layer=1, fill=fill)
    for b, length in enumerate(LENGTHS):
        unit = k[b, :, :length] / np.linalg.norm(k[b, :, :length], axis=-1, keepdims=True)
        anchor = unit.mean(axis=1, keepdims=True)
        want = -(unit * anchor).sum(-1) / np.linalg.norm(anchor, axis=-1)
        np.testing.assert_allclose(got[b, :, 0, :length], want, atol=1e-6)


def test_random_draws_again_for_every_seed_layer_head_and_position_and_for_nothing_else():
    pool, table, _, _ = filled_pool()

    def draw(seed=0, layer=0, lengths=LENGTHS, positions=POSITIONS):
        return np.asarray(make("random", seed=seed).score(view(pool, table, layer, lengths, positions), Observed()))

    base = draw()
    assert base.shape == (2, K, 1, M * P) and len(np.unique(base)) > 0.99 * base.size
    np.testing.assert_array_equal(base, draw())
    np.testing.assert_array_equal(base[0], draw(lengths=(70, 1), positions=(70, 1))[0])
    for other in (draw(seed=1), draw(layer=1), draw(positions=(71, 96))):
        assert (base != other).mean() > 0.99
    assert abs(base.mean() - 0.5) < 0.05


@pytest.mark.parametrize("window", [0, 5])
def test_streaming_keeps_sinks_and_the_newest(window):
    pool, table, _, v = filled_pool()
    row = RowBudget(b_row=24, interval=8, window=window, sinks=3, pinned=0)
    policy = make("streaming")
    got, length = run(policy, pool, table, [row, row])
    np.testing.assert_array_equal(length, [24, 24])
    for layer, b in np.ndindex(LAYERS, 2):
        kept = [*range(3), *range(LENGTHS[b] - 21, LENGTHS[b])]
        np.testing.assert_array_equal(oracle.unpaged(np.asarray(got.v[layer]), table[b], 24), v[layer, b][:, kept])


def run(policy, pool, table, rows, mode="per_head", observed=None):
    arguments = [jnp.asarray(x) for x in (table, table, LENGTHS, POSITIONS, (True, True))]
    return jax.jit(compact_rows, static_argnames="mode")(
        pool, *arguments, Budgets.stack(rows), policy, observed, mode=mode
    )


@pytest.mark.parametrize("method", policies.names())
def test_every_policy_keeps_what_is_pinned_and_as_many_as_the_budget_says(method):
    pool, table, _, v = filled_pool()
    rng = np.random.default_rng(3)
    stats = QueryStats(*rng.standard_normal((3, LAYERS, K * G, D // 2)).astype(np.float32))
    policy = policies.make(CompressionConfig(method=method), MODEL, stats)
    rows = [RowBudget(b_row=16, interval=8, window=6, sinks=2, pinned=5)] * 2
    queries = rng.standard_normal((LAYERS, 2, K * G, policy.last_queries, D)).astype(np.float32)
    observed = Observed(last_queries=tuple(map(jnp.asarray, queries)))
    got, length = run(policy, pool, table, rows, mode="per_layer_head", observed=observed)
    np.testing.assert_array_equal(length, [16, 16])
    for layer, b, h in np.ndindex(LAYERS, 2, K):
        kept = oracle.unpaged(np.asarray(got.v[layer]), table[b], 16)[h]
        slots = [int(np.flatnonzero((v[layer, b, h] == x).all(-1))[0]) for x in kept]
        assert slots == sorted(set(slots)) and slots[-1] < LENGTHS[b]
        assert set(slots) >= {*range(5), *range(LENGTHS[b] - 6, LENGTHS[b])}


def test_online_statistics_are_the_rows_own():
    """With each row's sums the scores are those of statistics made from that row alone."""
    pool, table, _, _ = filled_pool()
    rng = np.random.default_rng(4)
    q = rng.standard_normal((LAYERS, 2, 30, K * G, D)).astype(np.float32)
    real = jnp.ones((2, 30), bool)
    sums = tuple(QuerySums.create(2, K * G, D // 2).add(jnp.asarray(q[layer]), real) for layer in range(LAYERS))
    online = make("triattention", stats="online")
    assert online.observes_queries and not make("knorm").observes_queries
    got = np.asarray(online.score(view(pool, table, 1), Observed(query_sums=sums)))
    for b in range(2):
        own = [layer.at(jnp.asarray([b])) for layer in sums]
        stats = QueryStats.from_sums(own, StatsInfo.of_model(MODEL))
        offline = policies.make(CompressionConfig(method="triattention"), MODEL, stats)
        assert not offline.observes_queries
        want = np.asarray(offline.score(view(pool, table, 1), Observed()))
        np.testing.assert_allclose(got[b, ..., : LENGTHS[b]], want[b, ..., : LENGTHS[b]], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="give stats, or Observed.query_sums"):
        online.score(view(pool, table), Observed())


@struct.dataclass
class LastQueries(Policy):
    """What the newest queries look at: stands for the policies that need attention scores."""

    @property
    def last_queries(self):
        return 2

    def score(self, cached, observed):
        queries = observed.last_queries[cached.layer]
        keys = cached.k[cached.table].swapaxes(2, 1).reshape(len(queries), K, -1, D)
        return jnp.einsum("bkgqd,bksd->bkgs", queries.reshape(-1, K, G, 2, D), jnp.nan_to_num(keys))


def test_a_policy_may_look_at_the_last_queries_of_each_row():
    pool, table, k, v = filled_pool()
    q = np.random.default_rng(5).standard_normal((LAYERS, 2, K * G, 2, D)).astype(np.float32)
    rows = [RowBudget(b_row=16, interval=8, window=0, sinks=0, pinned=0)] * 2
    observed = Observed(last_queries=tuple(map(jnp.asarray, q)))
    got, _ = run(LastQueries(), pool, table, rows, mode="per_layer_head", observed=observed)
    for layer, b, h in np.ndindex(LAYERS, 2, K):
        own = q[layer, b, h * G : (h + 1) * G].sum(axis=1).astype(np.float64)
        scores = (own @ k[layer, b, h, : LENGTHS[b]].T)[None, None]
        kept = oracle.pick(oracle.ranks(scores, LENGTHS[b], 0, "per_layer_head")[0, 0], LENGTHS[b], 16, 0, 0)
        values = oracle.unpaged(np.asarray(got.v[layer]), table[b], 16)[h]
        np.testing.assert_array_equal(values, v[layer, b, h, kept])


def test_a_new_policy_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "oldest.py").write_text(
        textwrap.dedent(
            """
            import jax.numpy as jnp
            from flax import struct
            from jaxkv.policies.base import Policy

            @struct.dataclass
            class Oldest(Policy):
                def score(self, cached, observed):
                    ages = -jnp.arange(cached.slots, dtype=jnp.float32)
                    return jnp.broadcast_to(ages, (cached.table.shape[0], 1, 1, cached.slots))

            def make(config, model, stats=None):
                return Oldest()
            """
        )
    )
    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path)])
    assert "oldest" in policies.names()
    pool, table, _, v = filled_pool()
    row = RowBudget(b_row=16, interval=8, window=2, sinks=0, pinned=0)
    got, _ = run(make("oldest"), pool, table, [row, row])
    kept = [*range(14), 68, 69]
    np.testing.assert_array_equal(oracle.unpaged(np.asarray(got.v[0]), table[0], 16), v[0, 0][:, kept])
    sys.modules.pop("jaxkv.policies.oldest")


def test_statistics_of_another_model_are_refused():
    stats = QueryStats(*np.ones((3, LAYERS + 1, K * G, D // 2), np.float32))
    with pytest.raises(ValueError, match=r"\[3, 4, 8\] and the model's \[L, H, F\] is \[2, 4, 8\]"):
        policies.make(CompressionConfig(method="triattention"), MODEL, stats)
    with pytest.raises(ValueError, match="needs no policy"):
        policies.make(CompressionConfig(), MODEL)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "h3o"}, "method='h3o' is unknown; one of none, h2o, keydiff, knorm, .*, triattention is"),
        ({"mode": "per_row"}, "mode='per_row' is unknown; one of per_head"),
        ({"prompt_policy": "drop"}, "prompt_policy='drop'"),
        ({"aggregation": "sum"}, "aggregation='sum'"),
        ({"budget": 0}, "budget=0 must be at least 1 slot"),
        ({"budget": 1.5}, r"budget=1.5 is a ratio, so it must be in \(0, 1\]"),
        ({"budget": 0.0}, r"budget=0.0 is a ratio"),
        ({"budget": True}, "budget=True must be an integer"),
        ({"interval": 0}, "interval=0 must be at least 1"),
        ({"window": -1}, "window=-1 must be at least 0"),
        ({"sinks": -1}, "sinks=-1 must be at least 0"),
        ({"offsets": 100}, "offsets=100 must be a power of two"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        CompressionConfig(**options)


@pytest.mark.parametrize(
    ("options", "prompt", "generated", "want"),
    [
        ({"budget": 512}, 100, 4000, (512, 0)),
        ({"budget": 500}, 100, 4000, (512, 0)),
        ({"budget": 0.5}, 100, 900, (512, 0)),
        ({"budget": 0.55, "window": 20}, 100, 0, (64, 0)),
        ({"budget": 1.0}, 10, 20, (32, 0)),
        ({"budget": 512, "prompt_policy": "pin"}, 256, 4000, (512, 256)),
        ({"budget": 512, "prompt_policy": "pin"}, 257, 4000, (784, 257)),
        ({"budget": 160, "prompt_policy": "pin", "window": 0, "sinks": 0}, 40, 632, (160, 40)),
        ({"budget": 144, "window": 128, "sinks": 15}, 1, 1, (144, 0)),
    ],
)
def test_budgets_resolve_to_whole_blocks(options, prompt, generated, want):
    row = CompressionConfig(method="knorm", **options).resolve(prompt, generated, 16)
    assert (row.b_row, row.pinned) == want
    assert row.trigger == row.b_row + 128 and row.kept(5) == 5 and row.kept(10**6) == row.b_row


@pytest.mark.parametrize(
    ("options", "prompt", "words"),
    [
        ({"budget": 128}, 10, "132 slots are always kept .sinks=4, pinned prompt=0, window=128. and .* budget is 128"),
        ({"budget": 132, "window": 140}, 10, "144 slots are always kept .* budget is 144"),
        ({"budget": 0.1}, 1000, "132 slots are always kept .* budget is 128"),
        ({"budget": 256, "prompt_policy": "pin"}, 128, "256 slots .*pinned prompt=128, window=128. .* budget is 256"),
        ({"budget": 128, "prompt_policy": "pin"}, 128, "256 slots .*pinned prompt=128, window=128. .* budget is 256"),
    ],
)
def test_budgets_that_leave_no_choice_are_refused_with_both_numbers(options, prompt, words):
    with pytest.raises(ValueError, match=words):
        CompressionConfig(method="knorm", **options).resolve(prompt, 280, 16)


def test_a_sliding_window_has_to_fit_and_none_has_no_budget():
    config = CompressionConfig(method="knorm", budget=512)
    assert config.resolve(10, 10, 16, sliding_window=512).b_row == 512
    with pytest.raises(ValueError, match="budget is 512 and the model has a sliding window of 513"):
        config.resolve(10, 10, 16, sliding_window=513)
    with pytest.raises(ValueError, match="keeps every token and has no budget"):
        CompressionConfig().resolve(10, 10, 16)


@given(
    budget=st.integers(1, 3000) | st.floats(0.01, 1.0),
    prompt=st.integers(1, 3000),
    generated=st.integers(1, 3000),
    block=st.sampled_from([1, 8, 16, 64, 256]),
    window=st.integers(0, 300),
    sinks=st.integers(0, 40),
    policy=st.sampled_from(["evict", "pin"]),
)
def test_every_accepted_budget_leaves_room_and_frees_only_what_is_left_over(
    budget, prompt, generated, block, window, sinks, policy
):
    config = CompressionConfig(method="knorm", budget=budget, window=window, sinks=sinks, prompt_policy=policy)
    try:
        row = config.resolve(prompt, generated, block)
    except ValueError:
        assume(False)
    total = prompt + generated
    assert row.b_row % block == 0 and row.b_row >= (budget if isinstance(budget, int) else budget * total - 1e-6)
    assert row.b_row < (budget if isinstance(budget, int) else budget * total + 1) + row.pinned + block
    if row.b_row < total:
        assert len({*range(row.oldest), *range(row.trigger - window, row.trigger)}) < row.b_row
    for length in (0, 1, row.b_row - 1, row.b_row, row.b_row + 1, row.trigger, total):
        length = min(length, total)
        freed, written = freed_blocks(length, row.b_row, block), written_blocks(length, row, block)
        held = -(-length // block)
        assert len(freed) == held - -(-min(length, row.b_row) // block) and set(freed) <= set(range(held))
        assert not set(freed) & set(written) and set(written) <= set(range(held))
        assert all((m + 1) * block > row.oldest for m in written)
        assert bool(written) == (length > row.b_row)


@pytest.mark.parametrize("pinned", [0, 3, 8, 11, 16, 20])
def test_the_host_knows_which_blocks_may_be_written(pinned):
    """Whatever the scores, blocks of pinned slots and freed ones are not among them; nearly all others are."""
    rng = np.random.default_rng(pinned)
    row = RowBudget(b_row=32, interval=8, window=4, sinks=3, pinned=pinned)
    table = jnp.arange(1, M + 1)[None]
    for length in (20, 32, 33, 56, 70):
        (keep,) = select(
            [jnp.asarray(rng.random((1, K, 1, M * P)), jnp.float32)],
            jnp.asarray([length]),
            Budgets.stack([row]),
            "per_head",
        )
        made = plan(keep, jnp.asarray([row.kept(length)]), table)
        written = set(np.flatnonzero(np.asarray(made.target[0]) >= 0).tolist())
        allowed = set(written_blocks(length, row, P))
        assert written <= allowed and not allowed & set(freed_blocks(length, row.b_row, P))
        assert length < 56 or len(allowed - written) <= 2


def test_a_row_without_a_budget_never_reaches_a_trigger():
    row = RowBudget(b_row=64, interval=16, window=8, sinks=4, pinned=30)
    budgets = Budgets.stack([row, None])
    np.testing.assert_array_equal(budgets.oldest, [30, 0])
    assert budgets.trigger[0] == 80 and budgets.trigger[1] > 10**9
    np.testing.assert_array_equal(budgets.at(jnp.asarray([1, 0])).window, [0, 8])


def test_no_two_policies_are_one_pytree():
    """jaxlib takes dataclasses of like fields for equal, and a jitted function then runs another policy's program."""

    @struct.dataclass
    class Mine(Policy):
        pass

    made = [
        policies.make(CompressionConfig(method=name, **({"stats": "online"} if name == "triattention" else {})), MODEL)
        for name in policies.names()
    ]
    structures = [jax.tree.structure(policy) for policy in [*made, Mine()]]
    assert all(a != b for i, a in enumerate(structures) for b in structures[:i])
    assert jax.tree.map(lambda leaf: leaf, Mine()).kind == Mine().kind
    assert Mine().replace(kind="other").kind == Mine().kind
