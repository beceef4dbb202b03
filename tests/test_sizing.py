"""How large a pool is: what users write, what requests need, what memory has."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from jaxkv import RequestError, sizing
from jaxkv.pool import KVPool
from jaxkv.request import Request
from jaxkv.sampling import SamplingParams
from jaxkv.terms import Terms

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
BLOCK_BYTES = KVPool.create(tiny.MODEL, tiny.CACHE).nbytes // (tiny.CACHE.blocks + 1)


@given(st.integers(1, 2**52), st.sampled_from(sorted(UNITS)), st.sampled_from(["", "B", "iB", "b"]), st.booleans())
def test_a_size_is_read_back(number: int, unit: str, ending: str, spaced: bool) -> None:
    text = f" {number}{' ' if spaced else ''}{unit}{ending if unit else ''} "
    assert sizing.parse_bytes(text) == sizing.parse_bytes(text.lower()) == number * UNITS[unit]


@pytest.mark.parametrize(("text", "size"), [("1.5GiB", 3 << 29), ("0.5k", 512), ("512M", 1 << 29), ("1e3", 1000)])
def test_a_size_may_be_a_fraction(text: str, size: int) -> None:
    assert sizing.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", " ", "G", "GB", "0", "-1G", "0.1", "nan", "inf", "1X", "1GM", "a lot", "1,5G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a memory size; write 512M, 1.5G or a number of bytes") as caught:
        sizing.parse_bytes(text)
    assert repr(text) in str(caught.value)


@given(st.integers(1, 2**40), st.integers(0, 2**40))
def test_rounding_up_costs_a_quarter_at_most_and_is_done_once(blocks: int, more: int) -> None:
    rounded = sizing.rounded_up(blocks)
    assert blocks <= rounded <= 1.25 * blocks
    assert sizing.rounded_up(rounded) == rounded
    assert sizing.rounded_up(blocks + more) >= rounded


def test_sizes_of_like_requests_become_few() -> None:
    assert len({sizing.rounded_up(blocks) for blocks in range(1, 1025)}) <= 4 * 10


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The host's free memory, for a test to set."""
    free = types.SimpleNamespace(available=0)
    monkeypatch.setattr(sizing.psutil, "virtual_memory", lambda: free)
    return free


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_pool_takes_half_of_the_free_memory_and_no_more(available: int, replaced: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizing.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=available))
        blocks = sizing.most_blocks(tiny.weights(), tiny.MODEL, tiny.CACHE, replaced=replaced)
    half = (available + replaced) / 2
    assert blocks >= 0
    # The null block is one more.
    assert (blocks + 1) * BLOCK_BYTES <= half or blocks == 0
    assert (blocks + 2) * BLOCK_BYTES > half


def choose(slots: list[int], **options: Any) -> int:
    """For the tiny cache: blocks of 4 slots, 8 rows."""
    terms = Terms(tiny.MODEL, dataclasses.replace(tiny.CACHE, context=2**20))
    requests = [Request([1] * count, SamplingParams(max_tokens=1)) for count in slots]
    return sizing.choose_blocks(tiny.weights(), terms, requests, **options)


def test_a_pool_holds_the_largest_requests_that_its_rows_can(memory: types.SimpleNamespace) -> None:
    memory.available = 2 * 1001 * BLOCK_BYTES
    assert choose([40]) == 10
    assert choose([41]) == sizing.rounded_up(11) == 12
    assert choose([0]) == 1
    assert choose([40, 4, 8]) == 14
    assert choose([4] * 20 + [40]) == sizing.rounded_up(10 + 7) == 20
    assert choose([4000] * 2) == 1000


def test_a_pool_that_will_do_is_kept(memory: types.SimpleNamespace) -> None:
    assert (choose([40], present=10), choose([40], present=999)) == (10, 999)
    # It is the pool itself that took the memory.
    memory.available = 0
    assert choose([40, 40], present=20, replaced=21 * BLOCK_BYTES) == 20
    assert choose([40, 40], present=19, replaced=20 * BLOCK_BYTES) == 19
    with pytest.raises(
        RequestError, match=r"largest request needs 20 blocks of 4 and free memory has room for 9; lower"
    ):
        choose([80], present=19, replaced=20 * BLOCK_BYTES)


def test_a_pool_short_of_memory_grows_only_where_it_pays(memory: types.SimpleNamespace) -> None:
    for room, blocks in ((50, 100), (110, 100), (124, 100), (125, 125), (300, 300), (600, 512)):
        memory.available = 2 * (room + 1) * BLOCK_BYTES
        assert choose([400] * 5, present=100) == blocks
    memory.available = 2 * 101 * BLOCK_BYTES
    assert choose([40] * 8, present=20) == 80


def test_a_request_larger_than_memory_is_refused(memory: types.SimpleNamespace) -> None:
    with pytest.raises(RequestError, match="needs 10 blocks of 4 and free memory has room for 0; lower max_tokens"):
        choose([4, 40])


def test_the_steps_need_memory_beside_the_pool_whatever_its_size() -> None:
    large = dataclasses.replace(tiny.CACHE, blocks=4000)
    needed = sizing.temporaries(tiny.weights(), tiny.MODEL, tiny.CACHE)
    # At least the logits of every row.
    assert needed >= large.rows * tiny.MODEL.vocab_size * 4
    assert sizing.temporaries(tiny.weights(), tiny.MODEL, large) == needed
