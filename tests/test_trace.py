"""A whole trace in one program: the tokens of the engine, in constant memory."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from test_engine_compression import SMALL, engine, some_stats

from jaxkv import decode, policies
from jaxkv.compression import MODES, CompressionConfig
from jaxkv.config import CacheConfig
from jaxkv.policies.base import Observed
from jaxkv.pool import KVPool
from jaxkv.request import Request
from jaxkv.sampling import SamplingParams
from jaxkv.select import Budgets

P = tiny.CACHE.block_size
ROWS = 4


def requests(tokens, seed=0, **params):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 97, n).tolist() for n in (3, 16, 9, 1)]
    kinds = [{}, {"temperature": 0.8}, {"temperature": 1.2, "top_p": 0.9}, {}]
    return [
        Request(prompt, SamplingParams(max_tokens=tokens, seed=i, **{**kinds[i], **params}))
        for i, prompt in enumerate(prompts)
    ]


def trace(asked, n, config: CompressionConfig, width, stop=()):
    """Prefill in one chunk a row, then one call of ``decode_trace``; return its tokens and log probabilities."""
    shape = CacheConfig(ROWS * width, context=width * P, rows=ROWS, prefill_chunk=16, block_size=P)
    pool = KVPool.create(tiny.MODEL, shape)
    rows = decode.Rows.idle(shape)
    rows.table[:] = 1 + np.arange(ROWS * width).reshape(ROWS, width)
    policy, budgets = None, None
    if config.method != "none":
        stats = None if config.stats == "online" else some_stats()
        model = dataclasses.replace(tiny.MODEL, context=1 << 14)
        policy = policies.make(config, model, stats)
        budgets = Budgets.stack([config.resolve(len(one.prompt), n, P) for one in asked])
        rows = rows.replace(observed=Observed.create(policy, tiny.MODEL, ROWS))
    first = np.zeros((ROWS, 1), np.int32)
    logprobs = np.zeros((ROWS, 1), np.float32)
    for at, one in enumerate(asked):
        chunk = decode.Chunk.idle(shape)
        chunk.tokens[0, : len(one.prompt)], chunk.count[0], chunk.row[0] = one.prompt, len(one.prompt), at
        chunk.table[0] = rows.table[at]
        for sampling in (chunk.sampling, rows.sampling):
            index = 0 if sampling is chunk.sampling else at
            for name in ("temperature", "top_p", "seed"):
                getattr(sampling, name)[index] = getattr(one.params, name)
        pool, out = decode.prefill_chunk(tiny.weights(), pool, chunk.replace(observed=rows.observed), config=tiny.MODEL)
        rows = rows.replace(observed=out.observed)
        first[at], logprobs[at] = out.token, out.logprob
        rows.length[at] = rows.position[at] = len(one.prompt)
    rows.token[:], rows.active[:], rows.sampling.generated[:] = first[:, 0], True, 1
    rows.sampling.stop_ids[:, : len(stop)] = stop
    pool, rows, out = decode.decode_trace(
        tiny.weights(), pool, rows, n=n - 1, config=tiny.MODEL, budgets=budgets, policy=policy, mode=config.mode
    )
    return first, rows, out


@pytest.mark.parametrize("config", [SMALL, dataclasses.replace(SMALL, stats=None), CompressionConfig()], ids=str)
def test_tokens_are_those_of_the_engine(config):
    n = 150
    asked = requests(n, ignore_eos=True)
    width = -(-(16 + n) // P) if config.method == "none" else -(-(SMALL.budget + SMALL.interval) // P)
    first, rows, out = trace(asked, n, config, width)
    cache = dataclasses.replace(tiny.CACHE, rows=ROWS)
    tokens, reports = tiny.drain(engine(config, cache), asked)
    assert np.concatenate([first, out.tokens], axis=1).tolist() == tokens
    assert rows.length.tolist() == [report.length for report in reports]
    assert rows.position.tolist() == [report.position for report in reports]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_and_constant_memory_over_2000_tokens(mode):
    """Rows reach their triggers at different steps; 40 slots a row serve 2,000 tokens."""
    n = 2000
    config = dataclasses.replace(SMALL, mode=mode)
    asked = requests(n, ignore_eos=True)
    first, rows, out = trace(asked, n, config, (SMALL.budget + SMALL.interval) // P)
    made = engine(config, dataclasses.replace(tiny.CACHE, rows=ROWS, context=2048))
    tokens, _ = tiny.drain(made, asked)
    assert np.concatenate([first, out.tokens], axis=1).tolist() == tokens
    assert np.all(np.asarray(rows.length) <= SMALL.budget + SMALL.interval)


def test_stop_tokens_end_rows_and_then_the_trace():
    asked = requests(60, ignore_eos=True)
    plain = tiny.drain(engine(cache=dataclasses.replace(tiny.CACHE, rows=ROWS)), asked)[0]
    stop = [tokens[5 + 3 * i] for i, tokens in enumerate(plain)]
    first, rows, out = trace(asked, 60, SMALL, (SMALL.budget + SMALL.interval) // P, stop)
    for i, tokens in enumerate(plain):
        ended = next(at for at, token in enumerate(tokens[1:]) if token in stop) + 1
        assert out.count[i] == ended
        assert [*first[i], *out.tokens[i, :ended].tolist()] == tokens[: ended + 1]
    assert not np.any(rows.active)


def test_no_second_pool_in_memory():
    """Compaction inside the loop, and still no copy of the pool."""
    shape = CacheConfig(blocks=20_000, context=256, rows=ROWS, block_size=16)
    pool = KVPool.shapes(tiny.MODEL, shape)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool))
    config = dataclasses.replace(SMALL, stats=None)
    policy = policies.make(config, tiny.MODEL, some_stats())
    budgets = Budgets.stack([config.resolve(8, 100, 16)] * ROWS)
    lowered = decode.decode_trace.lower(
        tiny.weights(), pool, decode.Rows.idle(shape), n=100, config=tiny.MODEL, budgets=budgets, policy=policy
    )
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 20


def test_half_a_compression_is_refused():
    with pytest.raises(ValueError, match="budgets and policy go together"):
        decode.decode_trace(
            tiny.weights(),
            KVPool.create(tiny.MODEL, tiny.CACHE),
            decode.Rows.idle(tiny.CACHE),
            n=4,
            config=tiny.MODEL,
            budgets=Budgets.stack([None] * tiny.CACHE.rows),
        )
