"""Prefixes that are found in the pool: the same tokens as a cold run, whatever has happened to the blocks since."""

import dataclasses

import numpy as np
import pytest
import tiny

from jaxkv.compression import CompressionConfig
from jaxkv.request import Request
from jaxkv.sampling import SamplingParams

P = tiny.CACHE.block_size
COLD = dataclasses.replace(tiny.CACHE, prefix_cache=False)
SMALL = CompressionConfig(method="knorm", budget=32, interval=8, window=8, sinks=2)


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


def request(prompt, answer=30, **options):
    params = {"ignore_eos": True, **{k: options.pop(k) for k in list(options) if k in ("temperature", "seed", "n")}}
    return Request(prompt, SamplingParams(max_tokens=answer, **params), **options)


def cold(one, **options):
    made = tiny.engine(COLD, **options)
    (out,), (report,) = tiny.drain(made, [one])
    assert report.cached_tokens == 0
    assert made.blocks.cached_count == 0
    return out


@pytest.mark.parametrize("compression", [CompressionConfig(), SMALL])
@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (tokens(40), tokens(40, seed=1), 0),
        (tokens(40), tokens(P) + tokens(30, seed=1), P),
        (tokens(40), tokens(40), 36),
        (tokens(41), tokens(41), 40),
        (tokens(41), tokens(41) + tokens(50, seed=1), 40),
        (tokens(90), tokens(61), 60),
        (tokens(P), tokens(P), 0),
    ],
)
def test_cold_and_warm_give_the_same_tokens(first, second, found, compression):
    """Hits of no block, of one, of all but the last token's; a first user that compacted, and one that did not."""
    made = tiny.engine(compression=compression, poison=True)
    tiny.run(made, [request(first)], tiny.poison_what_nobody_may_read)
    for params in ({}, {"temperature": 0.9, "seed": 3}):
        one = request(second, **params)
        out, reports = tiny.run(made, [one], tiny.poison_what_nobody_may_read)
        assert out[0, 0] == cold(one, compression=compression)
        assert reports[0, 0].cached_tokens >= found
    assert made.blocks.in_use == 0


def test_two_requests_of_one_prefix_in_one_step_and_later_ones_share_its_blocks():
    prompt = tokens(64)
    requests = [request([*prompt, at]) for at in range(6)]
    alone = [cold(one) for one in requests]
    made = tiny.engine(poison=True)
    most = 0

    def watch(made):
        nonlocal most
        most = max(most, made.blocks.in_use)
        tiny.poison_what_nobody_may_read(made)

    out, reports = tiny.run(made, requests, watch)
    assert [out[at, 0] for at in range(6)] == alone
    # The first computes the prefix in four chunks, and each of the others finds all of it as its turn comes.
    assert [reports[at, 0].cached_tokens for at in range(6)] == [0, 64, 64, 64, 64, 64]
    assert most <= 16 + 6 * -(-31 // P)


def test_churn_beyond_the_pool_evicts_the_least_recently_used_and_changes_nothing():
    rng = np.random.default_rng(0)
    heads = [tokens(40, seed=seed) for seed in range(5)]
    requests = [
        request(heads[rng.integers(5)] + tokens(int(rng.integers(1, 20)), seed=9 + at), 10, temperature=at % 2, seed=at)
        for at in range(30)
    ]
    alone = [cold(one) for one in requests]
    made = tiny.engine(dataclasses.replace(tiny.CACHE, blocks=50, rows=3), poison=True)
    out, reports = tiny.run(made, requests, tiny.poison_what_nobody_may_read)
    assert [out[at, 0] for at in range(30)] == alone
    assert made.blocks.evicted > 20
    assert sum(report.cached_tokens for report in reports.values()) > 400
    assert made.blocks.in_use == 0


@pytest.mark.parametrize("compact_prefill", [True, False])
def test_a_prefix_whose_first_user_compacts_while_others_begin_with_it(compact_prefill):
    config = dataclasses.replace(SMALL, compact_prefill=compact_prefill)
    prompt = tokens(75)
    requests = [request(prompt, 60), request(prompt[:60], 60), request([*prompt, 1], 30), request(prompt[:47], 40)]
    alone = [cold(one, compression=config) for one in requests]
    made = tiny.engine(compression=config, poison=True)
    for _ in range(2):
        out, reports = tiny.run(made, requests, tiny.poison_what_nobody_may_read)
        assert [out[at, 0] for at in range(4)] == alone
    # A compacted prompt takes nothing past its first compaction, which is after 48 tokens: three chunks reach 40.
    limit = 48 if compact_prefill else 75
    assert all(0 < report.cached_tokens <= limit for report in reports.values())
    assert all(report.compactions for report in reports.values())
    # What others hold too is dropped, and not called returned.
    assert any(report.blocks_dropped for report in reports.values())


def test_returned_blocks_are_those_that_nobody_holds_any_more():
    prompt = tokens(80)
    made = tiny.engine(compression=SMALL)
    _, plain = tiny.run(made, [request(prompt, 5)])
    assert plain[0, 0].blocks_returned == 20 - 8
    assert plain[0, 0].blocks_dropped == 0
    first, second = (made.add(request(prompt, 40)) for _ in range(2))
    del first, second
    made.step()
    before = made.blocks.in_use
    reports = []
    while made.has_work:
        reports += [event.report for event in made.step() if event.report is not None]
    assert before <= 21
    # Two held the same 20 blocks. The first compaction drops references to blocks that the other goes on holding; what
    # the second lets go of comes back.
    assert sum(report.blocks_dropped for report in reports) > 0
    assert made.blocks.in_use == 0


def test_generated_blocks_are_found_by_the_next_turn():
    made = tiny.engine()
    out, _ = tiny.run(made, [request(tokens(30), 40)])
    history = tokens(30) + out[0, 0] + tokens(10, seed=5)
    _, reports = tiny.run(made, [request(history, 4)])
    # The last token's K and V are not computed: 69 are, 17 blocks of them full.
    assert reports[0, 0].cached_tokens == 68


def test_what_compaction_has_touched_is_never_found():
    made = tiny.engine(compression=SMALL)
    out, reports = tiny.run(made, [request(tokens(30), 80)])
    assert reports[0, 0].compactions > 3
    history = tokens(30) + out[0, 0]
    _, reports = tiny.run(made, [request(history, 4)])
    # Forty slots were a plain prefix when they were first compacted.
    assert reports[0, 0].cached_tokens <= 40


def test_tokens_after_a_stop_string_are_in_no_found_block():
    one = request(tokens(30), 40)
    plain = cold(one)
    count = iter(range(1, 100))
    made = tiny.engine()
    tiny.run(made, [dataclasses.replace(one, watch=lambda token: next(count) == 7)])
    _, reports = tiny.run(made, [request(tokens(30) + plain, 4)])
    assert reports[0, 0].cached_tokens == (30 + 7 - 1) // P * P


def test_salts_and_policies_that_observe_queries_find_nothing():
    made = tiny.engine()
    tiny.run(made, [request(tokens(60), salt="a")])
    for salt, found in (("a", 56), ("b", 0), ("", 0)):
        _, reports = tiny.run(made, [request(tokens(60), salt=salt)])
        assert reports[0, 0].cached_tokens == found
    for method in ("snapkv", "h2o"):
        config = dataclasses.replace(SMALL, method=method)
        made = tiny.engine(compression=config)
        out = [tiny.run(made, [request(tokens(60))])[0][0, 0] for _ in range(2)]
        assert out[0] == out[1] == cold(request(tokens(60)), compression=config)
        # A row that keeps every token needs no such observation.
        _, reports = tiny.run(made, [request(tokens(60), compression=CompressionConfig())])
        assert reports[0, 0].cached_tokens == 56


def test_the_cache_can_be_switched_off():
    made = tiny.engine(COLD)
    for _ in range(2):
        _, reports = tiny.run(made, [request(tokens(60))])
    assert reports[0, 0].cached_tokens == 0
    assert made.blocks.free_count == COLD.blocks
