"""The store: what is put comes back bit for bit, under its own key alone; tiers, leases, layers, counters."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import random
import threading
import zlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import store_cases as cases
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.keys import fingerprint
from jaxkv.store import Key, LostError, Store
from jaxkv.store.disk import OpenFile

BIG = 1 << 30
KINDS = {"memory": {"memory": BIG}, "disk": {"disk": BIG}, "both": {"memory": BIG, "disk": BIG}}


@pytest.fixture(params=KINDS)
def store(request, tmp_path):
    with Store(tmp_path / "store", **KINDS[request.param]) as store:
        yield store


def put(store, *numbers):
    for number in numbers:
        assert store.put(*cases.piece(number), wait=True)


# -- arrays and files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint8"])
def test_every_bit_pattern_comes_back(store, dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    bits = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3, 8 * dtype.itemsize), np.uint8).view(dtype)
    key = Key.content(cases.ROOT, [1, 2, 3, 4, 5])
    assert store.put(key, {"k": bits[0], "v": bits[1]}, wait=True)
    found = store.get(key)
    assert [array.dtype for array in found.values()] == [dtype, dtype]
    assert [array.tobytes() for array in found.values()] == [bits[0].tobytes(), bits[1].tobytes()]
    assert not any(array.flags.writeable for array in found.values())


def test_a_file_is_safetensors_and_says_what_it_is(tmp_path):
    key, arrays = cases.piece(0)
    with Store(tmp_path, disk=BIG) as store:
        put(store, 0)
        assert store.counters.written_bytes == cases.path(tmp_path, 0).stat().st_size == cases.FILE_BYTES
    loaded = load_file(cases.path(tmp_path, 0))
    assert {name: array.tobytes() for name, array in loaded.items()} == {n: a.tobytes() for n, a in arrays.items()}
    with safe_open(cases.path(tmp_path, 0), "np") as file:
        said = file.metadata()
    assert said.pop("check") in cases.path(tmp_path, 0).read_bytes().decode("latin")
    assert said == {
        "format": "jaxkv store 1",
        "space": "content",
        "root": cases.ROOT.hex(),
        "parent": cases.ROOT.hex(),
        "tokens": base64.b64encode(key.ids).decode(),
        "crc32": "".join(f"{zlib.crc32(arrays['k'][n].tobytes() + arrays['v'][n].tobytes()):08x}" for n in range(3)),
    }


def test_files_and_folders_are_the_users_alone(tmp_path):
    with Store(tmp_path / "new" / "store", disk=BIG) as store:
        put(store, 0)
    for path in (tmp_path / "new" / "store").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
    assert (tmp_path / "new" / "store").stat().st_mode & 0o777 == 0o700


def test_put_copies_jax_arrays_and_any_strides(store):
    k = np.arange(48, dtype=np.float32).reshape(2, 4, 6)
    key = Key.content(cases.ROOT, [9])
    assert store.put(key, {"k": jnp.asarray(k, jnp.bfloat16), "v": k.transpose(0, 2, 1), "scale": k[:, 0, :1]})
    k_put = k.copy()
    k[:] = -1
    found = store.get(key)
    assert np.array_equal(found["k"], k_put.astype(ml_dtypes.bfloat16))
    assert np.array_equal(found["v"], k_put.transpose(0, 2, 1))
    assert np.array_equal(found["scale"], k_put[:, 0, :1])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "no array"),
        ({"k": np.zeros((2, 3))}, "float64"),
        ({"k": np.zeros((2, 3), np.float32), "v": np.zeros((3, 3), np.float32)}, "differ in layers"),
        ({"k": np.float32(1)}, r"\[L, ...\]"),
        ({"k": np.zeros((2, 0), np.float32)}, r"\[L, ...\]"),
        ({"__metadata__": np.zeros((2, 1), np.float32)}, "__metadata__"),
    ],
)
def test_arrays_that_cannot_be_stored_are_refused(store, arrays, message):
    with pytest.raises(ValueError, match=message):
        store.put(Key.content(cases.ROOT, [1]), arrays)


# -- keys --------------------------------------------------------------------------------------------------------------


def test_what_was_computed_otherwise_is_a_miss(store):
    other = bytes(32)
    put(store, 0)
    for missing in (
        cases.piece(0, root=other)[0],
        Key.content(cases.ROOT, [0]),
        *Key.prefix(cases.ROOT, np.frombuffer(cases.key(0).ids, "<i4"), cases.TOKENS),
    ):
        assert store.lookup([missing]) == [None]
        assert store.get(missing) is None


def test_another_model_dtype_rope_salt_or_weights_is_a_miss(store):
    model = ModelConfig("llama", vocab_size=9, width=8, mlp_width=8, layers=1, heads=1, kv_heads=1, head_dim=8)
    turned = dataclasses.replace(model, rope=RopeConfig(theta=5e5))
    facts = {"model": model, "dtype": "float32", "weights": "digest", "salt": "tenant"}
    changes = [{"model": turned}, {"dtype": "bfloat16"}, {"weights": "other"}, {"salt": "other"}, {"salt": ""}]
    roots = [fingerprint(**(facts | change)) for change in ({}, *changes)]
    put_key, *others = [cases.piece(0, root)[0] for root in roots]
    assert store.put(put_key, cases.piece(0)[1], wait=True)
    assert store.lookup(others) == [None] * 5
    assert cases.same(store.get(put_key), 0)


def test_blocks_of_a_prefix_are_found_after_what_they_followed_alone(store):
    text, other = Key.prefix(cases.ROOT, range(12), 4), Key.prefix(cases.ROOT, [99, *range(1, 12)], 4)
    for key in text:
        store.put(key, {"k": np.full((2, 2, 4, 1), key.digest[0], np.uint8)}, wait=True)
    assert None not in store.lookup(text)
    assert store.lookup(other) == [None, None, None]
    assert [store.get(key)["k"].max() for key in text] == [key.digest[0] for key in text]


def test_tokens_are_compared_on_a_hit(store):
    put(store, 0)
    forged = Key.content(cases.ROOT, [5] * cases.TOKENS)
    object.__setattr__(forged, "digest", cases.key(0).digest)
    assert store.lookup([forged]) == [None]
    assert store.get(forged) is None
    # It was no fault of the file's.
    assert cases.same(store.get(cases.key(0)), 0)
    assert store.counters.corrupt_files == 0


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("elsewhere", bytes(32), bytes(32), bytes(4)), "space"),
        (("content", bytes(31), bytes(31), bytes(4)), "31 bytes"),
        (("content", bytes(32), bytes(range(32)), bytes(4)), "parent"),
        (("content", bytes(32), bytes(32), b""), "at least one token"),
    ],
)
def test_keys_that_make_no_sense_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        Key(*parts)


def test_ten_thousand_permutations_of_six_documents_are_six_entries(tmp_path):
    rng, pieces = random.Random(0), [cases.piece(number) for number in range(6)]
    with Store(tmp_path, memory=BIG, disk=BIG) as store:
        for _ in range(10_000):
            for key, arrays in rng.sample(pieces, 6):
                assert store.put(key, arrays)
        store.flush()
        assert store.memory_bytes == 6 * cases.NBYTES
        assert store.counters.puts == 60_000
        assert store.counters.written_bytes == 6 * cases.FILE_BYTES
    assert len(cases.files(tmp_path)) == 6


# -- lookups, tiers and counters ---------------------------------------------------------------------------------------


def test_a_miss_in_the_middle_loses_nothing(store):
    put(store, 0, 2)
    tier = "memory" if store.memory_bytes else "disk"
    assert store.lookup([cases.key(n) for n in (0, 1, 2)]) == [tier, None, tier]
    with store.lease([cases.key(n) for n in (0, 1, 2)]) as views:
        assert [view is None for view in views] == [False, True, False]
        assert cases.same(views[0].arrays(), 0) and cases.same(views[2].arrays(), 2)


def test_counters_say_what_was_found_where(tmp_path):
    with Store(tmp_path, disk=BIG) as store:
        put(store, 0, 1)
    with Store(tmp_path, memory=BIG, disk=BIG) as store:
        assert store.get(cases.key(0)) and store.get(cases.key(0)) and store.get(cases.key(7)) is None
        with store.lease([cases.key(n) for n in (0, 1, 8)]):
            pass
        store.lookup([cases.key(0), cases.key(9)])
    counters = store.counters
    assert counters.lookups == 8
    assert (counters.disk_hit_tokens, counters.memory_hit_tokens) == (2 * cases.TOKENS, 2 * cases.TOKENS)
    assert counters.miss_tokens == 2 * cases.TOKENS
    assert counters.read_bytes == 2 * cases.NBYTES
    assert counters.load_seconds > 0
    assert counters.written_bytes == counters.corrupt_files == counters.refused_puts == 0


def test_the_host_tier_evicts_what_was_used_longest_ago():
    with Store(memory=3 * cases.NBYTES) as store:
        put(store, 0, 1, 2)
        store.get(cases.key(0))
        put(store, 3)
        assert store.lookup([cases.key(n) for n in range(4)]) == ["memory", None, "memory", "memory"]
        assert store.memory_bytes == 3 * cases.NBYTES
        assert store.counters.memory_evicted_bytes == cases.NBYTES


def test_what_is_leased_stays_and_a_put_that_finds_no_room_is_refused():
    with Store(memory=2 * cases.NBYTES) as store:
        put(store, 0, 1)
        with store.lease([cases.key(0), cases.key(1)]) as views:
            assert not store.put(*cases.piece(2))
            assert store.counters.refused_puts == 1
            assert cases.same(views[0].arrays(), 0)
        with store.lease([cases.key(0)]):
            store.get(cases.key(1))
            put(store, 2)
        # Though piece 1 was used last.
        assert store.lookup([cases.key(n) for n in range(3)]) == ["memory", None, "memory"]
        assert not store.put(Key.content(cases.ROOT, [3]), {"k": np.zeros((1, cases.NBYTES), np.float32)})


def test_a_lease_ends_on_any_exception(store):
    put(store, 0)
    for error in (RuntimeError, KeyboardInterrupt, GeneratorExit):
        with pytest.raises(error), store.lease([cases.key(0)]) as (view,):
            raise error
        with pytest.raises(ValueError, match="has ended"):
            view.layer(0)
    store.close()
    assert [entry.leases for entry in store._memory._entries.values()] in ([], [0])
    assert store._pinned == 0


def test_a_lease_that_fails_half_way_holds_nothing(tmp_path, monkeypatch):
    with Store(tmp_path, disk=BIG) as store:
        put(store, 0)
        with pytest.raises(AttributeError), store.lease([cases.key(0), None]):
            pass
        assert store._pinned == 0
        assert cases.same(store.get(cases.key(0)), 0)


def test_more_leases_than_files_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxkv.store.store.MOST_PINNED", 2)
    with Store(tmp_path, disk=BIG) as store:
        put(store, *range(5))
        with store.lease([cases.key(n) for n in range(5)]) as views:
            assert store._pinned == 2
            assert all(cases.same(view.arrays(), n) for n, view in enumerate(views))
        assert store._pinned == 0


def test_without_a_disk_no_folder_is_made(tmp_path):
    with Store(tmp_path / "store", memory=BIG) as store:
        put(store, 0)
        assert store.lookup([cases.key(0)]) == ["memory"]
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "no room"),
        ({"memory": -1}, "memory=-1"),
        ({"disk": 5}, "needs a path"),
        ({"memory": 1, "queue": -2}, "queue"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        Store(None, **args)


def test_a_closed_store_says_so(tmp_path):
    store = Store(tmp_path, disk=BIG)
    store.put(*cases.piece(0))
    store.close()
    store.close()
    assert len(cases.files(tmp_path)) == 1
    with pytest.raises(ValueError, match="closed"):
        store.lookup([cases.key(0)])


# -- layers ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
    """Give a semaphore of which every reading of a layer takes one, and a list of what was read."""
    allowed, order = threading.Semaphore(0), []
    read_layer = OpenFile.read_layer

    def gated(self, buffer, layer):
        assert allowed.acquire(timeout=30)
        order.append((self.header.key, layer))
        return read_layer(self, buffer, layer)

    monkeypatch.setattr(OpenFile, "read_layer", gated)
    allowed.order = order
    return allowed


@pytest.mark.parametrize("memory", [0, BIG])
def test_a_layer_can_be_used_before_the_next_one_is_read(tmp_path, gate, memory):
    with Store(tmp_path, disk=BIG) as store:
        put(store, 0)
    with Store(tmp_path, memory=memory, disk=BIG) as store, store.lease([cases.key(0)]) as (view,):
        assert (view.ready, view.layers, view.tier, view.nbytes) == (0, 3, "disk", cases.NBYTES)
        for layer in range(3):
            gate.release()
            k, v = view.layer(layer)
            assert np.array_equal(k, cases.piece(0)[1]["k"][layer]) and np.array_equal(v, cases.piece(0)[1]["v"][layer])
            assert view.ready == layer + 1
        with pytest.raises(IndexError):
            view.layer(3)


def test_all_leased_keys_have_their_first_layer_before_any_has_its_second(tmp_path, gate):
    with Store(tmp_path, disk=BIG) as store:
        put(store, 0, 1)
        gate.release(6)
        with store.lease([cases.key(0), cases.key(1)]) as views:
            for view in views:
                view.arrays()
        assert gate.order == list(itertools.product([cases.key(0), cases.key(1)], range(3)))[::3] + [
            (cases.key(n), layer) for layer in (1, 2) for n in (0, 1)
        ]


def test_two_leases_share_one_reading(tmp_path, gate):
    with Store(tmp_path, memory=BIG, disk=BIG) as store:
        put(store, 0)
    with Store(tmp_path, memory=BIG, disk=BIG) as store:
        with store.lease([cases.key(0)]) as (one,), store.lease([cases.key(0)]) as (two,):
            gate.release(3)
            assert one.tier == two.tier == "disk"
            assert cases.same(two.arrays(), 0) and cases.same(one.arrays(), 0)
        assert len(gate.order) == 3
    assert store.counters.disk_hit_tokens == 2 * cases.TOKENS


def test_damage_is_met_at_its_layer_and_is_a_miss(tmp_path):
    with Store(tmp_path, disk=BIG) as store:
        put(store, 0)
    path = cases.path(tmp_path, 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with Store(tmp_path, memory=BIG, disk=BIG) as store:
        with store.lease([cases.key(0)]) as (view,):
            assert np.array_equal(view.layer(1)[0], cases.piece(0)[1]["k"][1])
            for _ in range(2):
                with pytest.raises(LostError, match="afresh"):
                    view.layer(2)
            assert store.memory_bytes == 0
        assert not path.exists()
        counters = store.counters
        assert (counters.corrupt_files, counters.miss_tokens, counters.disk_hit_tokens) == (1, cases.TOKENS, 0)
        put(store, 0)
        assert cases.same(store.get(cases.key(0)), 0)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 9))
def test_layers_are_those_of_the_arrays_whatever_their_shapes(tails, layers, tokens):
    rng = np.random.default_rng(tokens)
    arrays = {
        f"array {i}": rng.integers(-9, 9, (layers, *tails[: i + 1])).astype(dtype)
        for i, dtype in enumerate([np.int8, np.float32, ml_dtypes.bfloat16])
    }
    key = Key.content(cases.ROOT, range(tokens))
    with Store(memory=BIG) as store:
        assert store.put(key, arrays)
        with store.lease([key]) as (view,):
            for layer in range(layers):
                for found, put_in in zip(view.layer(layer), arrays.values(), strict=True):
                    assert found.dtype == put_in.dtype and np.array_equal(found, put_in[layer])
