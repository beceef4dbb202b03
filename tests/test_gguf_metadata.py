"""The GGUF header reader against files that the gguf package writes, and against damage."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.weights.gguf_metadata import read_header, read_metadata

VALUES = {
    "a.uint8": (gguf.GGUFValueType.UINT8, 200),
    "a.int8": (gguf.GGUFValueType.INT8, -100),
    "a.uint16": (gguf.GGUFValueType.UINT16, 60000),
    "a.int16": (gguf.GGUFValueType.INT16, -30000),
    "a.uint32": (gguf.GGUFValueType.UINT32, 4000000000),
    "a.int32": (gguf.GGUFValueType.INT32, -2000000000),
    "a.uint64": (gguf.GGUFValueType.UINT64, 2**63 + 1),
    "a.int64": (gguf.GGUFValueType.INT64, -(2**62)),
    "a.float32": (gguf.GGUFValueType.FLOAT32, 0.5),
    "a.float64": (gguf.GGUFValueType.FLOAT64, 0.1),
    "a.bool": (gguf.GGUFValueType.BOOL, True),
    "a.string": (gguf.GGUFValueType.STRING, "naïve 日本 \n\0"),
}
ARRAYS = {
    "b.strings": ["", "\u0120the", "👩‍👧", "a b"],
    "b.ints": [1, -2, 3],
    "b.floats": [0.5, -1.25],
    "b.bools": [True, False],
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, (kind, value) in VALUES.items():
        writer.add_key_value(key, value, kind)
    for key, values in ARRAYS.items():
        writer.add_array(key, values)
    writer.add_tensor("token_embd.weight", np.arange(15, dtype=np.float32).reshape(3, 5))
    writer.add_tensor("output_norm.weight", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_is_what_was_written(written: Path) -> None:
    metadata = read_metadata(written)
    assert metadata.pop("general.architecture") == "llama"
    assert metadata == {key: value for key, (_, value) in VALUES.items()} | ARRAYS
    assert metadata["a.bool"] is True


def test_tensors_agree_with_the_gguf_package(written: Path) -> None:
    data = written.read_bytes()
    header, reference = read_header(written), gguf.GGUFReader(written)
    assert [entry.name for entry in header.tensors] == ["token_embd.weight", "output_norm.weight"]
    for entry, tensor in zip(header.tensors, reference.tensors, strict=True):
        assert entry.offset == tensor.data_offset
        assert entry.ggml_type == tensor.tensor_type
        assert entry.shape == tensor.data.shape
    found = np.frombuffer(data, np.float32, 15, header.tensors[0].offset).reshape(header.tensors[0].shape)
    np.testing.assert_array_equal(found, np.arange(15).reshape(3, 5))


def test_every_truncation_of_the_header_is_refused(written: Path, tmp_path: Path) -> None:
    data = written.read_bytes()
    end = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8 + 4 + 8
    torn = tmp_path / "torn.gguf"
    for size in range(0, end, 3):
        torn.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"not a GGUF file|truncated"):
            read_header(torn)
    torn.write_bytes(data[:end])
    assert read_header(torn) == read_header(written)


@settings(max_examples=200, deadline=None)
@given(at=st.integers(16, 700), new=st.binary(min_size=1, max_size=8))
def test_damage_raises_nothing_but_value_error(written: Path, at: int, new: bytes) -> None:
    data = bytearray(written.read_bytes())
    data[at : at + len(new)] = new
    damaged = written.with_name("damaged.gguf")
    damaged.write_bytes(data)
    # Any other exception fails the test; damage inside a value goes unseen, as it must.
    with contextlib.suppress(ValueError):
        assert len(read_header(damaged).tensors) == 2


def _file(tmp_path: Path, version: int, *values: bytes, order: str = "<") -> Path:
    path = tmp_path / "made.gguf"
    path.write_bytes(b"GGUF" + struct.pack(f"{order}IQQ", version, 0, len(values)) + b"".join(values))
    return path


def _array(key: bytes, element: int, count: int) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, element, count)


@pytest.mark.parametrize(
    ("version", "order", "message"),
    [(1, "<", "version 1"), (4, "<", "version 4"), (3, ">", "big-endian")],
)
def test_unsupported_versions_are_named(tmp_path: Path, version: int, order: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_header(_file(tmp_path, version, order=order))


def test_version_two_is_read(tmp_path: Path) -> None:
    assert read_metadata(_file(tmp_path, 2, _array(b"k", 5, 1) + struct.pack("<i", -7))) == {"k": [-7]}


@pytest.mark.parametrize("element", [0, 8, 9, 12])
@pytest.mark.parametrize("count", [2**63, 2**40])
def test_a_false_count_allocates_nothing(tmp_path: Path, element: int, count: int) -> None:
    with pytest.raises(ValueError, match="value of 'k' needs"):
        read_header(_file(tmp_path, 3, _array(b"k", element, count)))


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    value = _array(b"k", 0, 0)
    with pytest.raises(ValueError, match="'k' twice"):
        read_header(_file(tmp_path, 3, value, value))


def test_text_that_is_not_utf8_names_its_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="value of 'k' is not UTF-8"):
        read_header(_file(tmp_path, 3, _array(b"k", 8, 1) + struct.pack("<Q", 2) + b"\xff\xfe"))
