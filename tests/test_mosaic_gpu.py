"""The Hopper kernels without a Hopper: interpreted with a look out for races, lowered, chosen and refused."""

from __future__ import annotations

import contextlib
import importlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from attention_oracle import paged_attention, shuffled_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_kernels
from pallas_kernels import device, mosaic_gpu, triton
from pallas_kernels.device import Device
from pallas_kernels.mosaic_gpu import attend_decode, tiles

BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason=f"JAX {jax.__version__} has no public interpreter of Mosaic GPU kernels: 0.11 has (make test-newest)",
)


def case(lengths, *, groups=3, dim=64, block=16, dtype=BFLOAT16, query=None, kv_heads=2, seed=0, **pages):
    """Return q, pages with NaN in every slot that no row holds, the table, and the slot of each row's newest token."""
    rng = np.random.default_rng(seed)
    k, v, table = shuffled_pages(rng, lengths, kv_heads, block, dim, dtype, **pages)
    q = rng.standard_normal((len(lengths), 1, kv_heads * groups, dim)).astype(query or dtype)
    return q, k, v, table, np.asarray(lengths, np.int32)[:, None] - 1


def attend(*args, cores=132, **options):
    """Interpret, and fail where the interpreter sees a race. Few cores make few splits, which interpret faster."""
    run = attending(tuple(sorted((key, value) for key, value in options.items() if key != "sink_logits")))
    with chip(cores):
        out = jax.block_until_ready(run(options.get("sink_logits"), *args))
    assert not interpreter().get_races().races_found, "races were found"
    return out


@contextlib.contextmanager
def chip(cores):
    token = device._TARGET.set(Device("NVIDIA H200", "gpu", (9, 0), cores, interpret=True))
    try:
        yield
    finally:
        device._TARGET.reset(token)


def attending(options):
    def call(sinks, *args):
        return pallas_kernels.attend(*args, sink_logits=sinks, implementation="mosaic_gpu", **dict(options))

    return jax.jit(call)


def interpreter():
    """Its own module: what it found, and how it is set back after it gave up, are not public."""
    return importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call")


@pytest.fixture
def watched(monkeypatch):
    """The interpreter looks for races in what a kernel loads, but not in what wgmma reads: so load that, too."""

    def loading(product):
        def call(left, right, *rest):
            left[...], right[...]
            # A load needs a fence before a copy into what it read, as wgmma's own reads do not.
            plgpu.commit_smem()
            return product(left, right, *rest)

        return call

    for name in ("_logits", "_product"):
        monkeypatch.setattr(attend_decode, name, loading(getattr(attend_decode, name)))


def assert_close(out, expected, dtype, ulps=2):
    ulp = float(ml_dtypes.finfo(dtype).eps) * np.maximum(np.abs(expected), 2.0**-6)
    assert np.all(np.abs(np.asarray(out).astype(np.float64) - expected) <= ulps * ulp)


@interpreted
@pytest.mark.parametrize(
    ("groups", "dim", "block", "dtype", "cores"),
    [
        (1, 64, 16, BFLOAT16, 2),
        (3, 64, 64, FLOAT16, 16),
        (8, 128, 8, BFLOAT16, 16),
        (7, 128, 16, BFLOAT16, 2),
        (32, 64, 256, BFLOAT16, 16),
    ],
    ids=str,
)
def test_lengths_round_the_edges_of_tiles_in_one_split_and_in_many(watched, groups, dim, block, dtype, cores):
    args = case([1, 63, 64, 65, 300], groups=groups, dim=dim, block=block, dtype=dtype, kv_heads=1 + (groups == 3))
    out, lse = attend(*args, cores=cores, return_lse=True)
    expected, expected_lse = paged_attention(*args)
    assert_close(out, expected, dtype)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


@interpreted
@pytest.mark.parametrize(
    "options", [{"window": 1}, {"window": 70, "softcap": 2.0}, {"softcap": 30.0, "scale": 0.4, "sinks": True}], ids=str
)
def test_options(options):
    """Windows that leave whole tiles out, and a row of which nothing is decoded."""
    q, k, v, table, slots = case([7, 33, 300, 333, 5], kv_heads=1)
    slots[4] = -1
    options = dict(options)
    sinks = np.random.default_rng(1).standard_normal(3).astype(np.float32) if options.pop("sinks", False) else None
    out, lse = attend(q, k, v, table, slots, cores=5, return_lse=True, sink_logits=sinks, **options)
    expected, expected_lse = paged_attention(q, k, v, table, slots, sinks=sinks, **options)
    assert_close(out, expected, BFLOAT16)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
    assert np.all(np.asarray(out)[4] == 0)
    assert np.all(np.asarray(lse)[4] == -np.inf)


@interpreted
def test_slots_before_the_window_may_hold_nan():
    q, k, v, table, slots = case([200], kv_heads=1)
    expected, _ = paged_attention(q, k, v, table, slots, window=40)
    for slot in range(160):
        k[table[0, slot // 16], :, slot % 16] = v[table[0, slot // 16], :, slot % 16] = np.nan
    assert_close(attend(q, k, v, table, slots, cores=1, window=40), expected, BFLOAT16)


@interpreted
def test_wider_queries_keep_their_precision():
    args = case([5, 130], query=np.float32)
    out = attend(*args, cores=4)
    np.testing.assert_allclose(out, paged_attention(*args)[0], atol=2e-5)


@interpreted
def test_weights_keep_more_than_the_pages_precision():
    """Two keys of weights of about 1/3 and 2/3, which bfloat16 rounds by up to 2^-9, and values that cancel."""
    q, k, v, table, slots = case([2], groups=1, kv_heads=1)
    k[table[0, 0], 0, :2] = 0
    k[table[0, 0], 0, 1, 0] = 1
    q[:], v[table[0, 0], 0, 0], v[table[0, 0], 0, 1] = 0, -2, 1
    q[..., 0] = 0.69140625
    out = attend(*(np.asarray(x, np.float32) if x is q else x for x in (q, k, v, table, slots)), scale=1.0, cores=1)
    expected, _ = paged_attention(q, k, v, table, slots, scale=1.0)
    assert np.abs(expected).max() < 2e-3
    np.testing.assert_allclose(out, expected, atol=2e-5)


@interpreted
def test_pages_wider_than_the_heads():
    q, k, v, table, slots = case([40, 3], dim=128)
    k[..., 80:], v[..., 80:] = np.where(np.isnan(k[..., 80:]), np.nan, 0), np.where(np.isnan(v[..., 80:]), np.nan, 0)
    out = attend(q[..., :80], k, v, table, slots, cores=4)
    expected, _ = paged_attention(q[..., :80], k[..., :80], v[..., :80], table, slots)
    assert_close(out, expected, BFLOAT16)


@interpreted
@settings(max_examples=4)
@given(lengths=st.lists(st.integers(1, 200), min_size=3, max_size=3), seed=st.integers(0, 99))
def test_neighbours_and_table_width_change_no_bit(lengths, seed):
    q, k, v, table, slots = case(lengths, kv_heads=1, seed=seed, width=24, blocks=64)
    with chip(cores=6):
        together = np.asarray(WIDE(None, q, k, v, table, slots))
        for row in range(3):
            alone = np.full_like(slots, -1)
            alone[row] = slots[row]
            only = np.asarray(NARROW(None, q, k, v, table[:, :13], alone))
            np.testing.assert_array_equal(only[row], together[row])


WIDE, NARROW = attending(()), attending(())


@interpreted
@pytest.mark.parametrize("fault", ["queries", "keys", "values", "stage", "fence"])
def test_a_planted_race_is_noticed(watched, monkeypatch, fault):
    """A wait that is left out, a stage that is filled while it is in use, and a copy out of what no fence has shown."""
    wait, waits = plgpu.barrier_wait, []

    def waiting(barrier):
        # As they are written down: the queries', then for each of two loops the keys' and the values'.
        waits.append(("values", "keys")[len(waits) % 2] if waits else "queries")
        if waits[-1] != fault:
            wait(barrier)

    def starting(loader, stage, places):
        for ref, stages, arrived in loader.routes:
            for piece, place in enumerate(places):
                part = stages.at[0, pl.ds(piece * loader.spec.piece, loader.spec.piece)]
                plgpu.copy_gmem_to_smem(ref.at[place], part, arrived.at[stage])

    monkeypatch.setattr(plgpu, "barrier_wait", waiting)
    if fault == "stage":
        monkeypatch.setattr(attend_decode.Loader, "start", starting)
    if fault == "fence":
        monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    try:
        with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match="races were found|RACE DETECTED"):
            attend(*case([300], kv_heads=1), cores=1)
    finally:
        interpreter().reset_gpu_interpret_mode_state()


def shapes(dim=64, block=16, groups=2, dtype="bfloat16", queries=1):
    pages = jax.ShapeDtypeStruct((8, 2, block, dim), dtype)
    q = jax.ShapeDtypeStruct((1, queries, 2 * groups, dim), dtype)
    return q, pages, pages, *(jax.ShapeDtypeStruct((1, n), "int32") for n in (4, queries))


@pytest.mark.parametrize("dim", tiles.DIMS)
def test_the_kernel_is_lowered_for_hopper(dim):
    # Newer versions of JAX ask the mesh which chip they lower for.
    chip = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=chip)
    with device.target("NVIDIA H200"), jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(pallas_kernels.attend).trace(*shapes(dim=dim))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert "triton" not in text


@pytest.mark.parametrize(
    ("capability", "change", "expected"),
    [
        ((9, 0), {}, "mosaic_gpu"),
        ((9, 0), {"dim": 128, "block": 8, "dtype": "float16", "groups": 16}, "mosaic_gpu"),
        ((9, 0), {"queries": 2}, "triton"),
        ((9, 0), {"dim": 80}, "triton"),
        ((9, 0), {"dtype": "float32"}, "triton"),
        ((8, 9), {}, "triton"),
        ((10, 0), {}, "triton"),
        ((12, 0), {}, "triton"),
    ],
    ids=str,
)
def test_who_serves_what(monkeypatch, capability, change, expected):
    monkeypatch.setattr(device, "current", lambda: Device("a chip", "gpu", capability, 132))
    monkeypatch.setattr(attend_decode, "attend_decode", lambda *_, **__: ("mosaic_gpu", None))
    monkeypatch.setattr(triton, "attend", lambda *_, **__: "triton")
    assert pallas_kernels.attend(*shapes(**change)) == expected


@pytest.mark.parametrize("op", ["score", "compact"])
def test_ops_without_a_kernel_here_go_on_to_triton(monkeypatch, op):
    monkeypatch.setattr(triton, op, lambda *_, **__: "triton")
    q, k, _, table, _ = shapes()
    args = {
        "score": (k, table, jax.ShapeDtypeStruct((1,), "int32"), q, jax.ShapeDtypeStruct((1, 4, 32), "float32")),
        "compact": (k, jnp.zeros((1, 2, 64), int), jnp.ones(1, int), jnp.zeros((1, 4), int), jnp.zeros((1, 4), int)),
    }[op]
    with device.target("NVIDIA H200"):
        assert getattr(pallas_kernels, op)(*args) == "triton"
        with pytest.raises(NotImplementedError, match="mosaic_gpu: .* implementation='triton' has one"):
            getattr(pallas_kernels, op)(*args, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "pages of float32; wgmma multiplies bfloat16 and float16 exactly"),
        ({"dtype": "int8"}, "pages of int8; wgmma multiplies bfloat16 and float16 exactly"),
        ({"dim": 256}, "head_dim=256 is none of 64, 128"),
        ({"block": 4}, "block_size=4 is not a power of two of at least 8"),
        ({"block": 24}, "block_size=24 is not a power of two of at least 8"),
        ({"groups": 33}, "33 query heads a KV head are more than 32"),
        ({"queries": 5}, "5 queries a row; this kernel decodes one"),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_serve_is_named(change, message):
    with device.target("NVIDIA H200"), pytest.raises(NotImplementedError, match=f"mosaic_gpu: {message}"):
        pallas_kernels.attend(*shapes(**change), implementation="mosaic_gpu")


def test_scaled_pages_are_refused():
    scale = jax.ShapeDtypeStruct((8, 2, 16), "float32")
    with device.target("NVIDIA H200"), pytest.raises(NotImplementedError, match="mosaic_gpu: k_scale and v_scale"):
        pallas_kernels.attend(*shapes(), k_scale=scale, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("platform", "capability", "message"),
    [
        ("cpu", (0, 0), "platform=cpu .a chip.; these kernels run on NVIDIA GPUs"),
        ("gpu", (8, 9), r"a chip has compute capability 8\.9; these kernels need 9\.0"),
        ("gpu", (10, 0), r"a chip has compute capability 10\.0, and wgmma is on 9\.x alone"),
    ],
)
def test_kernels_say_which_chip_they_need(monkeypatch, platform, capability, message):
    monkeypatch.setattr(device, "current", lambda: Device("a chip", platform, capability))
    with pytest.raises(NotImplementedError, match=f"mosaic_gpu: {message}"):
        pallas_kernels.attend(*shapes(), implementation="mosaic_gpu")


def test_without_an_interpreter_it_says_so(monkeypatch):
    monkeypatch.delattr(plgpu, "InterpretGPUParams", raising=False)
    with device.target("NVIDIA H200", interpret=True), pytest.raises(NotImplementedError, match="cannot interpret"):
        pallas_kernels.attend(*shapes(), implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"slots": 96}, "slots=96"), ({"slots": 64, "splits": 0}, "splits=0"), ({"slots": 64, "stages": 1}, "stages=1")],
)
def test_tiles_that_cannot_be_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        tiles.TileConfig(**fields)


@pytest.mark.parametrize("programs", [1, 8, 64, 100, 1024])
@pytest.mark.parametrize("dim", tiles.DIMS)
def test_splits_fill_the_chip_and_stages_the_shared_memory(programs, dim):
    chip = device.DEVICES["NVIDIA H200"]
    config = tiles.attend_decode(chip, dim, programs)
    assert programs * config.splits >= min(2 * chip.cores, 64 * programs)
    assert config.splits == 1 or programs * config.splits < 4 * chip.cores
    assert config.stages * config.slots * dim * 2 * 2 == 64 * 1024
    assert mosaic_gpu.attend.__module__ == "pallas_kernels.mosaic_gpu"
