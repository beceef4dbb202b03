"""Files that are torn, flipped, foreign or hostile: a miss, counted, removed or left, and nothing outside is read."""

from __future__ import annotations

import errno
import json
import os
import random
import zlib

import numpy as np
import pytest
import store_cases as cases
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.store import Key, Store, file_format
from jaxkv.store.file_format import DamagedError, Layout

SIZE = cases.FILE_BYTES
BIG = 1 << 30


@pytest.fixture
def folder(tmp_path):
    """Give a store's folder with piece 0 in it."""
    with Store(tmp_path / "store", disk=BIG) as store:
        assert store.put(*cases.piece(0), wait=True)
    return tmp_path / "store"


def write(folder, data):
    cases.path(folder, 0).write_bytes(data)


def assert_missed_and_removed(store, folder):
    before = store.counters
    assert store.get(cases.key(0)) is None
    after = store.counters
    assert after.corrupt_files == before.corrupt_files + 1
    assert after.miss_tokens == before.miss_tokens + cases.TOKENS
    assert after.disk_hit_tokens == before.disk_hit_tokens
    assert not cases.path(folder, 0).exists()


def test_any_flipped_byte_is_noticed(folder):
    data = cases.path(folder, 0).read_bytes()
    rng = random.Random(0)
    with Store(folder, disk=BIG) as store:
        for at in range(len(data)):
            flipped = bytearray(data)
            flipped[at] ^= 1 << rng.randrange(8)
            write(folder, flipped)
            assert_missed_and_removed(store, folder)
        write(folder, data)
        assert cases.same(store.get(cases.key(0)), 0)
        assert store.counters.corrupt_files == len(data)


def test_a_file_cut_anywhere_or_too_long_is_noticed(folder):
    data = cases.path(folder, 0).read_bytes()
    with Store(folder, disk=BIG) as store:
        for size in [*range(0, 700, 7), *range(700, SIZE, 97), SIZE - 1]:
            write(folder, data[:size])
            assert_missed_and_removed(store, folder)
        write(folder, data + b"\0")
        assert_missed_and_removed(store, folder)
        # A put mends it.
        assert store.put(*cases.piece(0), wait=True)
        assert cases.path(folder, 0).read_bytes() == data


def test_a_file_that_shrinks_while_it_is_read_is_noticed(folder, monkeypatch):
    with Store(folder, disk=BIG) as store:
        find = store._disk.find

        def found_then_cut(key):
            opened = find(key)
            os.truncate(cases.path(folder, 0), SIZE - 5)
            return opened

        monkeypatch.setattr(store._disk, "find", found_then_cut)
        assert_missed_and_removed(store, folder)


def test_a_file_under_another_key_is_a_miss_and_goes(folder):
    with Store(folder, disk=BIG) as store:
        for other in (Key.content(bytes(32), np.frombuffer(cases.key(0).ids, "<i4")), cases.key(1)):
            assert store.put(other, cases.piece(5)[1], wait=True)
            source = folder / other.name[:2] / f"{other.name}.safetensors"
            source.replace(cases.path(folder, 0))
            assert_missed_and_removed(store, folder)


def test_a_good_file_that_took_a_damaged_ones_place_stays(folder):
    good = cases.path(folder, 0).read_bytes()
    with Store(folder, disk=BIG) as store:
        write(folder, good[:-1])
        bad = cases.path(folder, 0).stat()
        new = folder / "new"
        new.write_bytes(good)
        new.replace(cases.path(folder, 0))
        store._disk.report(cases.key(0).digest, (bad.st_dev, bad.st_ino))
        assert cases.same(store.get(cases.key(0)), 0)


# -- links and foreign things ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "folder", "socket"])
def test_what_is_no_file_is_neither_followed_nor_removed(folder, tmp_path, kind):
    path, outside = cases.path(folder, 0), tmp_path / "outside"
    path.replace(outside)
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, 0o140600)
    else:
        path.symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    with Store(folder, disk=BIG) as store:
        before = outside.read_bytes(), outside.stat().st_mtime_ns
        assert store.lookup([cases.key(0)]) == [None]
        assert store.get(cases.key(0)) is None
        assert (store.counters.foreign_files, store.counters.read_bytes) == (2, 0)
        assert os.path.lexists(path)
        # A put takes its place where that can be done, and never writes through it.
        assert store.put(*cases.piece(0), wait=True) == (kind != "folder")
        assert (outside.read_bytes(), outside.stat().st_mtime_ns) == before
        assert cases.same(store.get(cases.key(0)), 0) == (kind != "folder")


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_file_that_cannot_be_opened_is_a_miss_and_stays(folder, monkeypatch, code):
    opened = os.open

    def failing(path, *args, **options):
        if str(path).endswith(".safetensors"):
            raise OSError(code, "cannot be opened")
        return opened(path, *args, **options)

    with Store(folder, disk=BIG) as store:
        monkeypatch.setattr(os, "open", failing)
        assert store.get(cases.key(0)) is None
        monkeypatch.undo()
        assert (store.counters.foreign_files, store.counters.miss_tokens) == (1, cases.TOKENS)
        assert cases.same(store.get(cases.key(0)), 0)


def test_a_file_that_cannot_be_read_is_a_miss_and_stays(folder, monkeypatch):
    def failing(*_):
        raise OSError(errno.EIO, "cannot be read")

    with Store(folder, disk=BIG) as store:
        monkeypatch.setattr(os, "preadv", failing)
        assert store.get(cases.key(0)) is None
        monkeypatch.undo()
        assert (store.counters.corrupt_files, store.counters.miss_tokens) == (1, cases.TOKENS)
        assert cases.same(store.get(cases.key(0)), 0)


@pytest.mark.parametrize("name", ["shard", "parts", ".jaxkv-store"])
def test_a_link_in_the_place_of_a_folder_leads_nowhere(folder, tmp_path, name):
    outside = tmp_path / "outside"
    place = cases.path(folder, 0).parent if name == "shard" else folder / name
    place.replace(outside)
    place.symlink_to(outside)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if outside in (path, *path.parents)}
    if name == ".jaxkv-store":
        with pytest.raises(OSError, match="symbolic link"):
            Store(folder, disk=BIG)
    else:
        with Store(folder, disk=BIG) as store:
            assert (store.get(cases.key(0)) is None) == (name == "shard")
            assert not store.put(*cases.piece(0 if name == "shard" else 1), wait=True)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if outside in (path, *path.parents)}


def test_foreign_files_are_left_alone_and_do_not_count(folder):
    shard = cases.path(folder, 0).parent
    name = cases.path(folder, 0).name
    foreign = [
        folder / "notes.txt",
        shard / "notes.txt",
        shard / f"{name}.bak",
        shard / name.upper(),
        shard / f"{'0' * 63}/".rstrip("/"),
        # The right form, in the wrong folder.
        shard / f"{'00' if shard.name != '00' else '01'}{name[2:]}",
        folder / "parts" / "notes.txt",
        folder / "parts" / "..x",
    ]
    for path in foreign:
        path.write_bytes(bytes(5 * SIZE))
    with Store(folder, disk=2 * SIZE) as store:
        assert all(store.put(*cases.piece(n), wait=True) for n in range(1, 5))
        assert len(cases.files(folder)) - 1 == 2 + sum(path.suffix == ".safetensors" for path in foreign) - 1
    assert all(path.stat().st_size == 5 * SIZE for path in foreign)


# -- headers -----------------------------------------------------------------------------------------------------------


def header_of(folder):
    data = cases.path(folder, 0).read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def assembled(header, data):
    """Return a file whose header has the right check, as another program could write it."""
    header["__metadata__"] = {"check": "00000000"} | header.get("__metadata__", {}) | {"check": "00000000"}
    header = {"__metadata__": header.pop("__metadata__"), **header}
    text = json.dumps(header, separators=(",", ":")).encode()
    at = text.index(b"00000000")
    text = text[:at] + b"%08x" % zlib.crc32(text) + text[at + 8 :]
    return len(text).to_bytes(8, "little") + text + data


def set_fact(name, value):
    return lambda header: header["__metadata__"].__setitem__(name, value)


def set_array(name, value):
    return lambda header: header["k"].__setitem__(name, value)


HOSTILE = {
    "format": set_fact("format", "jaxkv store 2"),
    "space": set_fact("space", "../../etc"),
    "root": set_fact("root", "../../../etc/passwd"),
    "root is another": set_fact("root", "00" * 32),
    "parent": set_fact("parent", "00" * 32),
    "tokens": set_fact("tokens", "!"),
    "tokens are others": set_fact("tokens", "AAAAAA=="),
    "tokens are a list": set_fact("tokens", [1, 2]),
    "crc32": set_fact("crc32", "00" * 11),
    "crc32 is no number": set_fact("crc32", "zz" * 12),
    "no crc32": lambda header: header["__metadata__"].pop("crc32"),
    "dtype": set_array("dtype", "F64"),
    "dtype of another size": set_array("dtype", "BF16"),
    "shape": set_array("shape", [3, 8, 2, -4]),
    "shape of floats": set_array("shape", [3.0, 8, 2, 4]),
    "shape of truths": set_array("shape", [True, 192]),
    "no shape": set_array("shape", []),
    "huge shape": set_array("shape", [3, 1 << 62, 1 << 62]),
    "offsets": set_array("data_offsets", [0, 764]),
    "offsets overlap": lambda header: header["v"].__setitem__("data_offsets", [0, 768]),
    "layers differ": lambda header: header["v"].__setitem__("shape", [1, 24, 2, 4]),
    "no arrays": lambda header: [header.pop(name) for name in ("k", "v")],
    "array is text": lambda header: header.__setitem__("k", "text"),
}


def test_a_header_put_together_again_is_good(folder):
    write(folder, assembled(*header_of(folder)))
    with Store(folder, disk=BIG) as store:
        assert cases.same(store.get(cases.key(0)), 0)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_wrong_header_with_a_right_check_is_noticed(folder, name):
    header, data = header_of(folder)
    HOSTILE[name](header)
    write(folder, assembled(header, data))
    with Store(folder, disk=BIG) as store:
        assert_missed_and_removed(store, folder)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 4096,
        (1 << 63).to_bytes(8, "little") + bytes(100),
        (1 << 30).to_bytes(8, "little") + b'{"__metadata__":{"check":"' + bytes(100),
        (5000).to_bytes(8, "little") + b'{"__metadata__":{"check":"00000000",' + b"[" * 4964 + bytes(99),
    ],
)
def test_what_is_no_header_is_noticed(folder, data):
    write(folder, data)
    with Store(folder, disk=BIG) as store:
        assert_missed_and_removed(store, folder)


def test_a_header_as_deep_as_it_is_long_is_noticed(folder):
    text = b'{"__metadata__":{"check":"00000000",' + b"[" * 200_000
    text = text.replace(b"00000000", b"%08x" % zlib.crc32(text), 1)
    write(folder, len(text).to_bytes(8, "little") + text)
    with Store(folder, disk=BIG) as store:
        assert_missed_and_removed(store, folder)


def test_a_sparse_file_of_terabytes_costs_nothing(folder):
    data = cases.path(folder, 0).read_bytes()
    write(folder, data)
    os.truncate(cases.path(folder, 0), 1 << 42)
    with Store(folder, disk=1 << 50) as store:
        assert_missed_and_removed(store, folder)


def test_a_file_larger_than_the_store_is_not_read(folder):
    header, _ = header_of(folder)
    for begin, name in ((0, "k"), (3 << 38, "v")):
        header[name] |= {"shape": [3, 1 << 36, 1, 1], "data_offsets": [begin, begin + (3 << 38)]}
    data = assembled(header, b"")
    with Store(folder, disk=BIG) as store:
        write(folder, data)
        os.truncate(cases.path(folder, 0), len(data) + (6 << 38))
        assert_missed_and_removed(store, folder)
        assert store.counters.read_bytes == 0


@given(st.binary(max_size=300), st.integers(0, 10_000))
def test_no_bytes_make_the_reader_fail_otherwise(data, more):
    size = len(data) + more
    try:
        length = file_format.header_bytes(data, size)
        file_format.decode(data[:length], size)
    except DamagedError:
        return
    raise AssertionError("arbitrary bytes were taken for a file")


@given(
    st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=4),
    st.integers(1, 5),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40),
    st.sampled_from(sorted(file_format.DTYPES)),
)
def test_headers_come_back(tails, layers, tokens, dtype):
    names = ["k", "v", "\N{SNOWMAN}", 'a "name"']
    layout = Layout(tuple((names[i], dtype, (layers, *tail)) for i, tail in enumerate(tails)))
    key = Key.prefix(cases.ROOT, tokens, len(tokens))[0]
    crcs = [random.Random(layer).getrandbits(32) for layer in range(layers)]
    begin = file_format.encode(key, layout, crcs)
    size = len(begin) + layout.nbytes
    assert len(begin) % file_format.ALIGNMENT == 0
    assert file_format.header_bytes(begin, size) == len(begin)
    header = file_format.decode(begin, size)
    assert (header.key, header.layout, header.crcs, header.size) == (key, layout, tuple(crcs), size)
