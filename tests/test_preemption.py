"""A full pool: the newest row gives way, comes back bit for bit, and nobody's tokens change."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from jaxkv.compression import CompressionConfig
from jaxkv.request import Request
from jaxkv.sampling import SamplingParams

SMALL = CompressionConfig(method="knorm", budget=32, interval=8, window=8, sinks=2)
TIGHT = dataclasses.replace(tiny.CACHE, blocks=60)


def request(rng, prompt, answer, **options):
    own = options.pop("compression", None)
    params = SamplingParams(max_tokens=answer, **{"ignore_eos": True, **options})
    return Request(rng.integers(0, 97, prompt).tolist(), params, own)


def long_answers(count=10, **options):
    rng = np.random.default_rng(0)
    return [
        request(rng, int(rng.integers(5, 40)), int(rng.integers(60, 120)), seed=at, temperature=at % 2, **options)
        for at in range(count)
    ]


@pytest.mark.parametrize("method", ["none", "knorm", "h2o", "snapkv", "triattention"])
def test_every_request_equals_its_solo_run_while_rows_give_way(method):
    config = dataclasses.replace(SMALL, method=method, stats="online" if method == "triattention" else None)
    requests = long_answers()
    if method == "none":
        config = CompressionConfig()
    else:
        # Half of them keep everything, so that the pool is fought over.
        keep = CompressionConfig()
        requests = [dataclasses.replace(one, compression=keep if at % 2 else None) for at, one in enumerate(requests)]
    alone = [tiny.drain(tiny.engine(compression=config), [one])[0][0] for one in requests]
    made = tiny.engine(TIGHT, compression=config, poison=True)
    out, reports = tiny.run(made, requests, tiny.poison_what_nobody_may_read)
    assert [out[at, 0] for at in range(len(requests))] == alone
    assert made.totals.preemptions == sum(report.preemptions for report in reports.values()) > 2
    assert made.blocks.in_use == 0
    # The oldest never gives way.
    assert reports[0, 0].preemptions == 0


def test_a_prompt_that_gives_way_before_its_first_token_begins_again():
    rng = np.random.default_rng(0)
    old, new = request(rng, 30, 150), request(rng, 100, 30)
    alone = [tiny.drain(tiny.engine(), [one])[0][0] for one in (old, new)]
    made = tiny.engine(dataclasses.replace(tiny.CACHE, blocks=49), poison=True)
    made.add(old)
    while made.rows[:1] == [] or made.rows[0].length < 60:
        made.step()
    made.add(new)
    made.step()
    (_, late) = made.rows
    assert not late.decoding
    taken = made.blocks.allocate(made.blocks.available)
    tokens = {0: [], 1: []}
    tokens[0] += list(made.rows[0].tokens[30:])
    for event in made.step():
        tokens[event.request_id] += event.token_ids
    assert made.queued == [1]
    assert (late.length, late.blocks, late.swapped) == (0, [], None)
    made.blocks.release(taken)
    while made.has_work:
        for event in made.step():
            tokens[event.request_id] += event.token_ids
    assert [tokens[0], tokens[1]] == alone


def test_what_comes_back_is_what_went_out_bit_for_bit():
    config = dataclasses.replace(SMALL, method="h2o")
    made = tiny.engine(compression=config)
    rng = np.random.default_rng(0)
    made.add(request(rng, 50, 100))
    made.add(request(rng, 60, 100))
    while not (len(made.rows) == 2 and all(row.compactions for row in made.rows)):
        made.step()
    old, new = made.rows

    def held(row):
        slots = np.arange(row.length)
        pages = [np.asarray(page) for page in jax.tree.leaves(made.device.pool)]
        blocks = np.asarray(row.blocks)[slots // 4]
        gathered = [np.asarray(x[row.index]) for x in jax.tree.leaves(made.device.observed)]
        return [page[blocks, :, slots % 4] for page in pages] + gathered

    before, counts = held(new), (new.length, new.position, new.budget, new.generated, list(new.tokens))
    was = list(new.blocks)
    made.scheduler._preempt(new)
    assert made.queued == [1]
    assert made.blocks.in_use == len(old.blocks)
    # Its blocks are somebody else's meanwhile.
    others = made.blocks.allocate(len(was))
    made.device.pool = jax.tree.map(lambda page: page.at[np.asarray(others)].set(np.nan), made.device.pool)
    made.scheduler.admit()
    assert new.placed
    assert not set(new.blocks) & set(was)
    assert counts == (new.length, new.position, new.budget, new.generated, list(new.tokens))
    for one, other in zip(before, held(new), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_oldest_leave_the_queue_first_and_everybody_ends():
    """Pools so small that rows give way again and again: no livelock, and the order of ends is that of arrivals."""
    rng = np.random.default_rng(3)
    requests = [request(rng, 20, 60) for _ in range(12)]
    made = tiny.engine(dataclasses.replace(tiny.CACHE, blocks=30))
    ids = [made.add(one) for one in requests]
    ends, steps = [], 0
    while made.has_work:
        # A queue is in order of age, and whoever runs is older than whoever waits.
        order = [row.order for row in (*made.rows, *made.scheduler.queue)]
        assert order == sorted(order)
        ends += [event.request_id for event in made.step() if event.report is not None]
        steps += 1
    assert ends == ids
    assert steps < 12 * 40
    assert made.blocks.in_use == 0


def test_admission_counts_on_what_compaction_frees():
    """Eight rows of 40 slots at most fit where each would hold 120 without compaction."""
    rng = np.random.default_rng(0)
    requests = [request(rng, 20, 100) for _ in range(8)]
    made = tiny.engine(dataclasses.replace(tiny.CACHE, blocks=90), compression=SMALL)
    most = 0

    def watch(made):
        nonlocal most
        most = max(most, len([row for row in made.rows if row.decoding]))

    tiny.run(made, requests, watch)
    assert most == 8
    assert made.totals.preemptions == 0


def test_64_requests_through_8_rows_and_a_quarter_of_the_pool_they_would_need():
    rng = np.random.default_rng(1)
    own = [None, dataclasses.replace(SMALL, budget=24, interval=4), CompressionConfig()]
    requests = [
        request(
            rng,
            int(rng.integers(1, 100)),
            int(rng.integers(1, 120)),
            seed=at,
            temperature=(0, 0.8)[at % 2],
            compression=own[at % 3],
        )
        for at in range(64)
    ]
    full = sum(-(-(len(one.prompt) + one.params.max_tokens) // 4) for one in requests[:8])
    alone_engine = tiny.engine(compression=SMALL, cache=dataclasses.replace(tiny.CACHE, prefix_cache=False))
    alone = [tiny.drain(alone_engine, [one])[0][0] for one in requests]
    cache = dataclasses.replace(tiny.CACHE, blocks=max(full // 4, 56))
    made = tiny.engine(cache, compression=SMALL, poison=True)
    (out, reports), compiled = tiny.counted(lambda: tiny.run(made, requests))
    assert compiled == 0
    assert [out[at, 0] for at in range(64)] == alone
    assert made.blocks.in_use == 0
    assert sum(report.compactions for report in reports.values()) > 50
    assert made.totals.preemptions > 0
