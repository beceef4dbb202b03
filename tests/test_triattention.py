"""Scores against the cosine formula in float64 and the authors' golden arrays; query statistics in and out of files."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triattention_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv import rope, triattention
from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.stats import LayerMeans, QueryStats, QuerySums, StatsInfo
from jaxkv.stats_pt import read_pt

OFFSETS = 2 ** np.arange(17)

_score = jax.jit(triattention.score)


def means_of(real, imag, magnitude):
    return LayerMeans(*(jnp.asarray(x, jnp.float32)[None] for x in (real, imag, magnitude)))


def score_row(k_roped, means, phases, position, block_size=16, seed=0):
    """Return scores [H, T] of keys [K, T, D] put into shuffled blocks, everything else in the pool being NaN."""
    tokens = k_roped.shape[1]
    width = -(-tokens // block_size) + 1
    table = np.random.default_rng(seed).permutation(width + 3)[:width] + 1
    pages = oracle.paged(np.asarray(k_roped, np.float32), table, width + 4, block_size)
    length, position = jnp.asarray([tokens]), jnp.asarray([position])
    out = _score(jnp.asarray(pages), jnp.asarray(table[None]), length, position, means, phases)
    return np.asarray(out[0]).reshape(-1, out.shape[-1])[:, :tokens]


def worst(got, want):
    """Return the largest difference in shares of each row's largest score."""
    return (np.abs(got - want).max(-1) / np.abs(want).max(-1)).max()


@pytest.mark.parametrize("aggregation", ["mean", "max"])
def test_scores_equal_the_golden_ones(aggregation):
    data = oracle.golden("A_scores_qwen3_8b.npz")
    phases = triattention.Phases.create(data["omega"], 1.0, 100_000, aggregation=aggregation)
    table = jnp.arange(1, 17)[None]
    for layer in range(2):
        pages = jnp.asarray(oracle.paged(data["k_roped"][layer], np.arange(1, 17), 17, 16))
        means = means_of(*(data[name][layer] for name in ("q_mean_real", "q_mean_imag", "q_abs_mean")))
        for index, start in enumerate(data["round_starts"]):
            phases.check(int(start))
            got = _score(pages, table, jnp.asarray([256]), jnp.asarray([int(start)]), means, phases)
            got = np.asarray(got).reshape(8, 256)
            for kind in ("hf64", "vllm64"):
                assert worst(got, data[f"{kind}_{aggregation}"][index, layer].astype(np.float64)) < 1e-5


@pytest.mark.parametrize("name", ["yarn_qwen3", "llama3", "yarn_gptoss"])
@pytest.mark.parametrize("aggregation", ["mean", "max"])
def test_scores_equal_the_golden_ones_under_rope_scaling(name, aggregation):
    data = oracle.golden("D_rope_scaling.npz")
    scaling = float(data[f"{name}_attention_scaling"])
    phases = triattention.Phases.create(data[f"{name}_inv_freq"], scaling, 10_000, aggregation=aggregation)
    means = means_of(*(data[f"{name}_q_{part}"][0] for part in ("mean_real", "mean_imag", "abs_mean")))
    got = score_row(data[f"{name}_k_roped"][0], means, phases, int(data[f"{name}_round_start"]))
    assert worst(got, data[f"{name}_hf64_{aggregation}"][0].astype(np.float64)) < 1e-5


@settings(max_examples=12, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (3, 1), (3, 3), (2, 4), (1, 8)]),
    dim=st.sampled_from([64, 80, 96, 128]),
    tokens=st.integers(1, 40),
    t=st.integers(0, 4000),
    kind=st.sampled_from(["default", "linear", "llama3", "yarn"]),
    aggregation=st.sampled_from(["mean", "max"]),
    largest=st.sampled_from([1, 2**7, 2**16]),
    seed=st.integers(0, 99),
)
def test_scores_equal_the_cosine_formula(heads, dim, tokens, t, kind, aggregation, largest, seed):
    (kv_heads, groups), rng = heads, np.random.default_rng(seed)
    config = RopeConfig(theta=1e4, kind=kind, factor=1.0 if kind == "default" else 4.0, original_context=1024)
    omega, scaling = rope.inverse_frequencies(config, dim), rope.attention_scaling(config)
    positions = np.sort(rng.choice(t + 41, tokens, replace=False))
    k = rng.standard_normal((kv_heads, tokens, dim))
    mu = rng.standard_normal((kv_heads * groups, dim // 2, 2)) @ [1, 1j]
    nu = np.abs(mu) * rng.uniform(0.9, 2, mu.shape)
    offsets = [d for d in OFFSETS if d <= largest]
    want = oracle.cosine_scores(k, positions, mu, nu, omega, scaling, t, offsets, aggregation)
    phases = triattention.Phases.create(omega, scaling, 5000, offsets=largest, aggregation=aggregation)
    got = score_row(oracle.roped(k, positions, omega, scaling), means_of(mu.real, mu.imag, nu), phases, t, 8)
    scale = np.abs(np.abs(split_products(k, mu, nu, groups)) * scaling**2)
    assert (np.abs(got - want) / scale).max() < 1e-6
    if tokens > 8:
        assert worst(got, want) < 1e-5


def split_products(k, mu, nu, groups):
    """Return sum_f max(nu, |mu|) |k_f|, [H, T]: the size of the terms that a score is a sum of."""
    magnitude = np.abs(oracle.split(k))
    return np.stack([magnitude[h // groups] @ (np.abs(mu[h]) + nu[h]) for h in range(len(mu))])


def test_a_rows_scores_are_its_own():
    """Neither a longer neighbour nor a NaN in its keys changes a bit."""
    rng = np.random.default_rng(0)
    pages = rng.standard_normal((80, 2, 8, 64)).astype(np.float32)
    table = rng.permutation(79)[:78].reshape(2, 39) + 1
    pages[table[1]] = np.nan
    omega = rope.inverse_frequencies(RopeConfig(), 64)
    phases = triattention.Phases.create(omega, 1.0, 1000)
    means = means_of(*rng.standard_normal((3, 6, 32)))

    def run(neighbour):
        length = jnp.asarray([37, neighbour])
        out = _score(jnp.asarray(pages), jnp.asarray(table), length, jnp.asarray([500, 700]), means, phases)
        return np.asarray(out)[0, :, :, :37]

    np.testing.assert_array_equal(run(0), run(312))
    assert np.isfinite(run(312)).all()


def test_virtual_query_has_the_same_bits_alone_and_inside_a_larger_program():
    rng = np.random.default_rng(1)
    phases = triattention.Phases.create(rope.inverse_frequencies(RopeConfig(), 64), 1.1, 4000)
    means = means_of(*rng.standard_normal((3, 6, 32)))
    t = jnp.asarray([1234, 3999])
    alone = jax.jit(triattention.virtual_query)(phases, means, t)

    @jax.jit
    def inside(phases, means, t):
        def body(step, carry):
            w, c = triattention.virtual_query(phases, means, t + step - step)
            return carry[0] * 0 + w * 1.0, carry[1] * 0 + c

        start = jnp.zeros((2, 1, 6, 64)), jnp.zeros((2, 6, 32))
        return jax.lax.fori_loop(0, t[0] // 617, body, start)

    for x, y in zip(alone, inside(phases, means, t), strict=True):
        np.testing.assert_array_equal(x, y)


def test_positions_past_the_tables_are_refused():
    phases = triattention.Phases.create(rope.inverse_frequencies(RopeConfig(), 64), 1.0, 1000)
    phases.check(1000 + 128)
    with pytest.raises(ValueError, match=rf"position={phases.limit} is past the {phases.limit}"):
        phases.check(phases.limit)
    exact = np.exp(1j * rope.inverse_frequencies(RopeConfig(), 64) * (phases.limit - 1))
    at = (phases.limit - 1) >> 7, (phases.limit - 1) & 127
    table = (phases.coarse_real + 1j * phases.coarse_imag)[at[0]] * (phases.fine_real + 1j * phases.fine_imag)[at[1]]
    assert np.abs(table - exact).max() < 3e-7


def model(layers=2, heads=4, dim=8, **rope_options):
    return ModelConfig("llama", 10, 32, 8, layers, heads, 2, dim, rope=RopeConfig(**rope_options), name="tiny")


def random_stats(config, seed=0, **info):
    shape = (3, config.layers, config.heads, config.frequencies)
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return QueryStats(*values, info=StatsInfo.of_model(config, **info))


def test_stats_survive_a_file(tmp_path):
    config = model(kind="yarn", factor=4.0, original_context=512)
    stats = random_stats(config, revision="main", tokens=50_000, dtype="bfloat16")
    stats.save(tmp_path / "stats.safetensors")
    back = QueryStats.load(tmp_path / "stats.safetensors", config)
    assert back.info == stats.info and back.info.attention_scaling == pytest.approx(1.1386294)
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(stats), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (model(layers=3), r"q_mean_real is \[2, 4, 4\] and the model's \[L, H, F\] is \[3, 4, 4\]"),
        (model(theta=1e6), r"inv_freq\[3\]=0.001 and the model's is 3.16228e-05"),
        (model(kind="yarn", factor=4.0, original_context=512), "attention scaling 1 and the model's is 1.13863"),
    ],
)
def test_stats_of_another_model_are_refused(tmp_path, other, words):
    random_stats(model()).save(tmp_path / "s.safetensors")
    with pytest.raises(ValueError, match=words):
        QueryStats.load(tmp_path / "s.safetensors", other)


def test_stats_that_are_none_are_refused(tmp_path):
    path = tmp_path / "s.safetensors"
    path.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="holds no query statistics"):
        QueryStats.load(path, model())
    stats = random_stats(model())
    stats.q_abs_mean[0, 0, 0] = np.nan
    with pytest.raises(ValueError, match="q_abs_mean has values that are not finite"):
        stats.check(model())


class _Global:
    """Pickles as a reference to an importable name, called with arguments if there are any."""

    def __init__(self, module, name):
        self.module, self.name = module, name


class _Call:
    def __init__(self, function, *args):
        self.function, self.args = function, args


def write_pt(path, content, storages, byteorder=b"little"):
    """Write a file as torch.save does: a zip of a protocol 2 pickle and one member a storage."""

    class Pickler(pickle._Pickler):
        def persistent_id(self, item):
            return item.args if isinstance(item, _Call) and item.function == "storage" else None

        def save(self, item, **options):
            if isinstance(item, _Global):
                self.write(f"c{item.module}\n{item.name}\n".encode())
            elif isinstance(item, _Call) and item.function != "storage":
                self.save(item.function)
                self.save(item.args)
                self.write(pickle.REDUCE)
            else:
                super().save(item, **options)

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(content)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
        archive.writestr("archive/byteorder", byteorder)
        for key, values in storages.items():
            archive.writestr(f"archive/data/{key}", np.asarray(values, "<f4").tobytes())


def tensor(key, count, offset, shape, stride):
    storage = _Call("storage", "storage", _Global("torch", "FloatStorage"), key, "cpu", count)
    hooks = _Call(_Global("collections", "OrderedDict"))
    return _Call(_Global("torch._utils", "_rebuild_tensor_v2"), storage, offset, shape, stride, False, hooks)


def authors_file(path, config, leave_out=(), **metadata):
    """Write statistics in the authors' format and return the arrays [3, L, H, F]."""
    bands = config.frequencies
    values = np.random.default_rng(5).standard_normal((3, config.layers, config.heads, bands)).astype(np.float32)
    heads, storages = {}, {}
    for i in range(config.layers):
        for j in range(config.heads):
            if (i, j) in leave_out:
                continue
            key = str(len(storages))
            storages[key] = np.concatenate([[9.0], values[:, i, j].reshape(-1)])
            names = ("q_mean_real", "q_mean_imag", "q_abs_mean")
            parts = {n: tensor(key, 1 + 3 * bands, 1 + k * bands, (bands,), (1,)) for k, n in enumerate(names)}
            heads[f"layer{i:02d}_head{j:02d}"] = parts
    write_pt(path, {"metadata": metadata, "stats": heads}, storages)
    return values


def test_the_authors_files_are_read(tmp_path):
    config = model(layers=11, heads=12)
    values = authors_file(tmp_path / "s.pt", config, model_name="some/model", rope_style="half", rope_theta=10000)
    stats = QueryStats.load(tmp_path / "s.pt", config)
    np.testing.assert_array_equal(np.stack([stats.q_mean_real, stats.q_mean_imag, stats.q_abs_mean]), values)
    assert stats.info.model == "some/model"


@pytest.mark.parametrize(
    ("metadata", "leave_out", "words"),
    [
        ({"rope_theta": 1e6}, (), "rope theta 1e\\+06 and the model's is 10000"),
        ({"rope_style": "interleaved"}, (), "rope_style='interleaved'"),
        ({}, ((0, 2),), "no statistics of 1 heads, layer00_head02"),
        ({}, ((1, 0), (1, 1), (1, 2), (1, 3)), r"\[1, 4, 4\] and the model's \[L, H, F\] is \[2, 4, 4\]"),
    ],
)
def test_the_authors_files_are_refused_where_they_do_not_fit(tmp_path, metadata, leave_out, words):
    authors_file(tmp_path / "s.pt", model(), leave_out, **metadata)
    with pytest.raises(ValueError, match=words):
        QueryStats.load(tmp_path / "s.pt", model())


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "torch._utils._rebuild_parameter", "numpy.load"])
def test_a_pickle_that_asks_for_more_than_tensors_is_refused(tmp_path, name):
    marker = tmp_path / "ran"
    module, function = name.rsplit(".", 1)
    attack = _Call(_Global(module, function), f"touch {marker}")
    write_pt(tmp_path / "s.pt", {"stats": attack}, {})
    with pytest.raises(ValueError, match=f"asks for {name}, which no tensor needs"):
        read_pt(tmp_path / "s.pt")
    assert not marker.exists()


def test_a_plain_malicious_pickle_is_refused(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    with zipfile.ZipFile(tmp_path / "s.pt", "w") as archive:
        archive.writestr("s/data.pkl", pickle.dumps(collections.OrderedDict(stats=Attack()), protocol=4))
    with pytest.raises(ValueError, match="system, which no tensor needs"):
        QueryStats.load(tmp_path / "s.pt", model())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("count", "offset", "shape", "stride"),
    [(4, 2, (3,), (1,)), (4, -1, (2,), (1,)), (4, 0, (2,), (-1,)), (4, 0, (2, 3), (0, 1)), (9, 0, (1,), (1,))],
)
def test_a_tensor_outside_its_storage_is_refused(tmp_path, count, offset, shape, stride):
    write_pt(tmp_path / "s.pt", tensor("0", count, offset, shape, stride), {"0": np.arange(4)})
    with pytest.raises(ValueError, match="storage"):
        read_pt(tmp_path / "s.pt")


def test_damaged_files_are_refused(tmp_path):
    (tmp_path / "s.pt").write_bytes(struct.pack("<4I", 1, 2, 3, 4))
    with pytest.raises(ValueError, match="cannot be read"):
        read_pt(tmp_path / "s.pt")
    write_pt(tmp_path / "big.pt", {}, {}, byteorder=b"big")
    with pytest.raises(ValueError, match="byte order"):
        read_pt(tmp_path / "big.pt")


def test_running_sums_keep_what_float32_would_lose():
    """20,000 chunks onto a large sum: plain float32 is off in the fourth digit, the sums by less than one in 10^7."""
    rng = np.random.default_rng(2)
    q = (rng.standard_normal((50, 1, 4, 2, 8)) * 1e-3 + 1).astype(np.float32)
    real = jnp.asarray([[True, True, False, True]])
    q[:, :, 2] = np.nan

    @jax.jit
    def run(sums, q):
        def body(step, sums):
            return sums.add(q[step % 50], real)

        return jax.lax.fori_loop(0, 20_000, body, sums)

    sums = run(QuerySums.create(1, 2, 4), jnp.asarray(q))
    z = oracle.split(np.delete(q, 2, axis=2))
    want = np.stack([z.real, z.imag, np.abs(z)]).mean(axis=(1, 2, 3))
    stats = QueryStats.from_sums([sums], StatsInfo())
    got = np.stack([stats.q_mean_real, stats.q_mean_imag, stats.q_abs_mean])[:, 0]
    assert int(sums.count[0]) == 60_000
    assert np.abs(got / want - 1).max() < 1e-7
    means = sums.means()
    got = np.stack([means.real, means.imag, means.magnitude])[:, 0]
    assert np.abs(got / want - 1).max() < 3e-7
    assert np.abs(np.asarray(sums.total)[:, 0] / 60_000 / want - 1).max() > 1e-6, "the residue would not be needed"


def test_sums_of_a_row_are_its_own_and_can_be_cleared():
    rng = np.random.default_rng(3)
    q = jnp.asarray(rng.standard_normal((3, 5, 2, 8)).astype(np.float32))
    real = jnp.asarray(np.arange(5) < np.asarray([5, 2, 0])[:, None])
    sums = QuerySums.create(3, 2, 4).add(q, real)
    cleared = sums.cleared(jnp.asarray([True, False, False]))
    np.testing.assert_array_equal(cleared.count, [0, 2, 0])
    np.testing.assert_array_equal(cleared.means().real[1], sums.means().real[1])
    np.testing.assert_allclose(sums.means().magnitude[1], np.abs(oracle.split(q[1, :2])).mean(0), rtol=1e-6)
    np.testing.assert_array_equal(cleared.means().magnitude[0], 0)
    np.testing.assert_array_equal(cleared.at(jnp.asarray([1])).total[:, 0], sums.total[:, 1])
    stats = QueryStats.from_sums([sums], StatsInfo())
    z = np.concatenate([oracle.split(q[0]), oracle.split(q[1, :2])])
    np.testing.assert_allclose(stats.concentration()[0], np.abs(z.mean(0)) / np.abs(z).mean(0), rtol=1e-6)
    with pytest.raises(ValueError, match="at least one token"):
        QueryStats.from_sums([QuerySums.create(2, 2, 4)], StatsInfo())
