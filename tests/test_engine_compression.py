"""The engine with compaction: blocks come back, neighbours change nothing, and the host reads tokens alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv import compression, decode
from jaxkv.compression import CompressionConfig
from jaxkv.request import Request, RequestError
from jaxkv.sampling import SamplingParams
from jaxkv.stats import QueryStats, StatsInfo

P = tiny.CACHE.block_size
SMALL = CompressionConfig(method="triattention", budget=32, interval=8, window=8, sinks=2, stats="online")
METHODS = ["triattention", "streaming", "knorm", "keydiff", "random"]


def some_stats():
    rng = np.random.default_rng(0)
    shape = (tiny.MODEL.layers, tiny.MODEL.heads, tiny.MODEL.frequencies)
    real, imag = rng.standard_normal((2, *shape)).astype(np.float32)
    return QueryStats(real, imag, np.hypot(real, imag) * 1.5, info=StatsInfo.of_model(tiny.MODEL))


def engine(config=SMALL, cache=tiny.CACHE, poison=False, **options):
    if config.method == "triattention" and config.stats != "online":
        options["stats"] = some_stats()
    return tiny.engine(cache, poison=poison, compression=config, **options)


def until_decoding(made, request_id):
    """Step until a request's prompt is in."""
    while made.state(request_id) != "decoding":
        made.step()


def request(rng, prompt, tokens, **options):
    params = {"ignore_eos": True, **options}
    own = params.pop("compression", None)
    return Request(rng.integers(0, 97, prompt).tolist(), SamplingParams(max_tokens=tokens, **params), own)


def mixed(count, seed=0):
    """Rows that compact at different times, some many times, some never; some end early."""
    rng = np.random.default_rng(seed)
    kinds = [{}, {"temperature": 0.8}, {"temperature": 1.1, "top_p": 0.9, "ignore_eos": False}]
    own = [None, dataclasses.replace(SMALL, budget=24, interval=4), dataclasses.replace(SMALL, method="none")]
    return [
        request(
            rng, rng.integers(1, 100), int(rng.integers(1, 120)), seed=i, compression=own[i % 4 % 3], **kinds[i % 3]
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("method", ["online", *METHODS])
def test_each_request_equals_its_solo_run_under_churn_and_poison(method):
    changes = {"stats": "online"} if method == "online" else {"method": method, "stats": None}
    config = dataclasses.replace(SMALL, **changes)

    def fitted(one):
        own = one.compression
        same = None if own is None else dataclasses.replace(own, stats=config.stats)
        if same is not None and same.method != "none":
            same = dataclasses.replace(same, method=config.method)
        return dataclasses.replace(one, compression=same)

    requests = [fitted(one) for one in mixed(18)]
    alone = [tiny.drain(engine(config), [one])[0][0] for one in requests]
    made = engine(config, dataclasses.replace(tiny.CACHE, blocks=110), poison=True)
    tokens, reports = tiny.drain(made, requests)
    assert tokens == alone
    assert made.blocks.in_use == 0
    assert sum(report.compactions for report in reports) > 10


@pytest.mark.parametrize("mode", compression.MODES)
def test_a_budget_that_is_never_reached_changes_no_bit(mode):
    requests = [dataclasses.replace(one, compression=None) for one in mixed(8)]
    config = dataclasses.replace(SMALL, budget=252, mode=mode)
    tokens, reports = tiny.drain(engine(config), requests)
    assert tokens == tiny.drain(tiny.engine(), requests)[0]
    assert all(report.compactions == report.tokens_evicted == 0 for report in reports)


@settings(max_examples=15)
@given(
    prompt=st.integers(1, 120),
    tokens=st.integers(1, 130),
    budget=st.integers(3, 15).map(lambda n: n * P),
    interval=st.integers(1, 40),
    compact_prefill=st.booleans(),
)
def test_counts_follow_from_lengths_alone(prompt, tokens, budget, interval, compact_prefill):
    """The whole life of a row, replayed in integers."""
    config = dataclasses.replace(SMALL, budget=budget, interval=interval, compact_prefill=compact_prefill)
    chunk = tiny.CACHE.prefill_chunk
    one = request(np.random.default_rng(0), prompt, tokens, compression=config)
    (out,), (report,) = tiny.drain(shared_engine(), [one])
    trigger, length, compactions, evicted, peak = budget + interval, 0, 0, 0, 0
    blocks, returned = 0, 0

    def compact():
        nonlocal length, compactions, evicted, blocks, returned
        evicted += length - budget
        returned += blocks - budget // P
        length, blocks, compactions = budget, budget // P, compactions + 1

    for start in range(0, prompt, chunk):
        if compact_prefill and prompt >= trigger and length >= trigger:
            compact()
        length += min(chunk, prompt - start)
        blocks = -(-length // P)
        peak = max(peak, blocks)
    for _ in range(tokens - 1):
        if length >= trigger:
            compact()
        length += 1
        blocks = -(-length // P)
        peak = max(peak, blocks)
    assert len(out) == tokens
    assert (report.length, report.compactions, report.tokens_evicted) == (length, compactions, evicted)
    assert (report.blocks_now, report.blocks_returned) == (blocks, returned)
    assert report.position == prompt + tokens - 1
    assert report.blocks_peak_uncompressed == -(-report.position // P)
    # A round takes its blocks ahead, but never beyond the trigger.
    assert peak <= report.blocks_peak <= max(peak, -(-min(trigger, report.position) // P))
    compacted = compact_prefill and prompt >= trigger
    assert report.prefill == ("compacted" if compacted else "dense")
    bound = trigger + chunk if compacted else max(trigger, prompt)
    assert report.blocks_peak <= -(-bound // P) + 1
    assert report.blocks_history[-1][1] == report.blocks_history[-1][1]
    assert max(held for _, held in report.blocks_history) == report.blocks_peak


_shared = []


def shared_engine():
    if not _shared:
        _shared.append(engine())
    assert not _shared[0].has_work
    assert _shared[0].blocks.in_use == 0
    return _shared[0]


def test_8000_tokens_stay_within_the_budget_and_every_id_is_held_once():
    cache = dataclasses.replace(tiny.CACHE, context=8192, blocks=30, rows=2, round_steps=32)
    made = engine(SMALL, cache)
    made.add(request(np.random.default_rng(0), 20, 8000))
    made.add(request(np.random.default_rng(1), 50, 500))
    while made.has_work:
        held = [block for row in made.rows for block in row.blocks]
        assert len(held) == len(set(held)) == made.blocks.in_use
        for event in made.step():
            if event.report is not None and event.report.generated_tokens == 8000:
                report = event.report
    assert made.blocks.in_use == 0
    bound = -(-(SMALL.budget + SMALL.interval) // P) + 1
    assert report.blocks_peak <= bound < report.blocks_peak_uncompressed / 100
    assert report.compactions == (20 + 8000 - 1 - SMALL.budget) // SMALL.interval


@pytest.mark.parametrize("asked", [True, False])
def test_a_prompt_five_times_the_budget_is_compacted_between_chunks(asked):
    """Because it was asked for, or because the prompt fits in no other way: 160 slots in a pool of 80."""
    config = dataclasses.replace(SMALL, compact_prefill=asked)
    one = request(np.random.default_rng(0), 160, 30)
    made = engine(config, dataclasses.replace(tiny.CACHE, blocks=200 if asked else 20), poison=True)
    (tokens,), (report,) = tiny.drain(made, [one])
    assert report.prefill == "compacted"
    assert report.blocks_peak <= -(-(SMALL.budget + SMALL.interval + tiny.CACHE.prefill_chunk) // P) + 1
    # The other way to the same decision gives the same tokens.
    other = engine(dataclasses.replace(SMALL, compact_prefill=True), poison=True)
    assert tiny.drain(other, [one])[0] == [tokens]


def test_a_dense_prompt_that_lacks_room_waits_for_it():
    """What a request gets depends on the pool's size, never on what is free at the moment."""
    made = engine(SMALL, dataclasses.replace(tiny.CACHE, blocks=44))
    rng = np.random.default_rng(0)
    running, waiting = made.add(request(rng, 100, 60)), made.add(request(rng, 160, 10))
    until_decoding(made, running)
    assert (made.state(running), made.state(waiting)) == ("decoding", "queued")
    reports = {}
    while made.has_work:
        reports.update({event.request_id: event.report for event in made.step() if event.report is not None})
    assert reports[waiting].prefill == "dense"
    assert reports[waiting].queued_seconds > 0


def test_shared_blocks_are_copied_out_of_and_dropped_never_written():
    """Invariant 5, with another holder put in by hand, as prefix caching and forks will."""
    made = engine(poison=True)
    one = request(np.random.default_rng(0), 30, 60)
    plain = tiny.drain(engine(), [one])
    until_decoding(made, made.add(one))
    (row,) = made.rows
    shared = list(row.blocks[:5])
    made.blocks.share(shared)
    before = [np.asarray(x)[shared] for x in jax.tree.leaves(made.device.pool)]
    tokens, report = [], None
    while made.has_work:
        for event in made.step():
            tokens += event.token_ids
            report = event.report
    after = [np.asarray(x)[shared] for x in jax.tree.leaves(made.device.pool)]
    for was, now in zip(before, after, strict=True):
        np.testing.assert_array_equal(was, now)
    assert tokens == plain[0][0][-len(tokens) :]
    # Blocks that only the pinned sinks fill stay shared; the rest were dropped, not returned.
    assert made.blocks.in_use == 5
    assert report.compactions == plain[1][0].compactions
    assert report.blocks_returned == plain[1][0].blocks_returned


@pytest.mark.parametrize("mode", ["per_head", "per_layer_head"])
def test_nan_in_every_slot_past_the_length_just_after_a_compaction(mode, monkeypatch):
    """Stale survivors of a move, the tail of the last block and all blocks given back: nobody reads them again."""
    config = dataclasses.replace(SMALL, mode=mode)
    requests = [dataclasses.replace(one, compression=None) for one in mixed(8)]
    plain = tiny.drain(engine(config), requests)[0]
    made = engine(config, poison=True)
    compact = made.device.compact
    poisoned = 0

    def compact_and_poison(moves):
        nonlocal poisoned
        compact(moves)
        held = np.zeros((tiny.CACHE.blocks + 1, P), bool)
        for row in made.rows:
            slots = np.arange(row.length)
            held[np.asarray(row.blocks, int)[slots // P], slots % P] = True
        mask = held[:, None, :, None]
        made.device.pool = jax.tree.map(lambda pages: jnp.where(mask, pages, jnp.nan), made.device.pool)
        poisoned += 1

    monkeypatch.setattr(made.device, "compact", compact_and_poison)
    assert tiny.drain(made, requests)[0] == plain
    assert poisoned > 5


def test_what_comes_free_is_settled_before_anything_is_scored_whatever_the_scores_are(monkeypatch):
    one = request(np.random.default_rng(0), 30, 100)
    (_,), (plain,) = tiny.drain(engine(), [one])
    order = []
    real = compression.freed_blocks

    def freed(length, b_row, block_size):
        assert all(type(x) is int for x in (length, b_row, block_size))
        order.append("freed")
        return real(length, b_row, block_size)

    compact_round = decode.compact_round

    def compacted(*args, **options):
        order.append("scored")
        return compact_round(*args, **options)

    made = engine()
    monkeypatch.setattr("jaxkv.memory.freed_blocks", freed)
    monkeypatch.setattr(decode, "compact_round", compacted)
    _, (report,) = tiny.drain(made, [one])
    assert order == ["freed", "scored"] * report.compactions
    assert report.compactions > 5
    # Scores that are NaN throughout change which tokens stay, and no count.
    nan = dataclasses.replace(some_stats(), q_mean_real=np.full((2, 6, 4), np.nan, np.float32))
    monkeypatch.setattr("jaxkv.stats.QueryStats.check", lambda *_: None)
    broken = tiny.engine(compression=dataclasses.replace(SMALL, stats="nan"), stats=nan)
    _, (other,) = tiny.drain(broken, [one])
    for name in ("length", "position", "tokens_evicted", "compactions", "blocks_returned", "blocks_history"):
        assert getattr(other, name) == getattr(plain, name)


def test_the_host_reads_one_thing_a_round(monkeypatch):
    """Every way from the device to NumPy ends in the array's ``_value``; it is read for tokens and nothing else."""
    from jax._src.array import ArrayImpl

    made = engine()
    made.add(request(np.random.default_rng(0), 30, 100))
    rounds = 0
    reads = []
    value = ArrayImpl._value
    monkeypatch.setattr(ArrayImpl, "_value", property(lambda self: reads.append(self.shape) or value.fget(self)))
    while made.has_work:
        made.step()
        rounds += 1
    # Tokens, log probabilities and counts come in one call; a step that has prefilled a part of a prompt reads nothing.
    assert rounds - 1 <= made.device.reads <= rounds
    assert set(reads) <= {(8,), (8, 8), (1,)}
    assert len(reads) <= 3 * made.device.reads


def test_everything_is_compiled_by_warmup():
    cache = dataclasses.replace(tiny.CACHE, blocks=223, context=4096, rows=3)
    from jaxkv.engine import Engine

    made = Engine(tiny.weights(), tiny.MODEL, cache, compression=SMALL)
    compiled = made.warmup()
    rng = np.random.default_rng(0)
    odd = [dataclasses.replace(SMALL, budget=20 + 4 * i, interval=1 + i, window=i, sinks=i) for i in range(8)]
    requests = [request(rng, 1 + 13 * i, 60, compression=own) for i, own in enumerate(odd)]
    _, more = tiny.counted(lambda: tiny.drain(made, requests))
    # Prefill, round, one compaction a width (1,024 and 4,096 slots), and the small ones of swaps, copies and forks.
    assert compiled.programs <= 16
    assert more == 0


def test_online_statistics_are_those_of_the_rows_own_queries():
    from jaxkv import model

    one = request(np.random.default_rng(0), 37, 20)
    made = engine(dataclasses.replace(SMALL, budget=200))
    other = request(np.random.default_rng(1), 50, 30)
    made.add(other)
    made.step()
    made.add(one)
    (row,) = made.step()[:0] or [row for row in made.rows if row.request is one]
    index, tokens = row.index, []
    while made.has_work:
        tokens += [t for event in made.step() if event.request_id == row.request_id for t in event.token_ids]
    everything = [*one.prompt, *tiny.drain(tiny.engine(), [one])[0][0][:-1]]
    assert len(everything) == row.position
    seen = []

    def attend(state, layer, heads):
        seen.append(np.asarray(heads.q, np.float64)[0])
        return None, dense(state, layer, heads)[1]

    from expected import dense

    ids = jnp.asarray(everything)[None]
    model.forward(tiny.weights(), tiny.MODEL, ids, jnp.arange(ids.shape[1])[None], attend, None)
    for layer, q in enumerate(seen):
        x, y = np.split(q, 2, axis=-1)
        means = made.device.observed.query_sums[layer].means()
        for got, want in ((means.real, x), (means.imag, y), (means.magnitude, np.hypot(x, y))):
            np.testing.assert_allclose(got[index], want.mean(0), atol=2e-5)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"method": "streaming"}, "method='streaming' and the engine was made for method='triattention'"),
        ({"mode": "shared"}, "mode='shared' and the engine was made for mode='per_head'"),
        ({"budget": 8}, "10 slots are always kept .* the row's budget is 8"),
        ({"budget": 0.05}, "the row's budget is 4"),
        ({"budget": 60, "prompt_policy": "pin", "window": 45}, "slots are always kept"),
    ],
)
def test_compression_that_cannot_be_is_refused_with_its_numbers(own, message):
    made = shared_engine()
    with pytest.raises(RequestError, match=message):
        made.add(request(np.random.default_rng(0), 30, 30, compression=dataclasses.replace(SMALL, **own)))
    assert not made.has_work


@pytest.mark.parametrize("prompt", [31, 32, 33, 39, 40, 41])
def test_prompts_at_the_edges_of_budget_and_trigger(prompt):
    one = request(np.random.default_rng(0), prompt, 20)
    (tokens,), (report,) = tiny.drain(shared_engine(), [one])
    assert len(tokens) == 20
    assert report.position == prompt + 19
    assert SMALL.budget <= report.length <= SMALL.budget + SMALL.interval
