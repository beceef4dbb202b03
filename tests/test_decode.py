"""The jitted steps: logits against a dense forward pass, bits under ragged batches and poison, memory, compiles."""

import dataclasses

import expected as expectations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxkv import decode, model
from jaxkv.config import CacheConfig
from jaxkv.pool import KVPool

BLOCKS = 30


def dense_logits(tokens):
    tokens = jnp.asarray(tokens)[None]
    positions = jnp.arange(tokens.shape[1])[None]
    _, hidden = model.forward(tiny.weights(), tiny.MODEL, tokens, positions, expectations.dense, None)
    return np.asarray(model.logits(tiny.weights(), hidden))[0]


def cache(**changes):
    return dataclasses.replace(tiny.CACHE, blocks=4 * BLOCKS, **changes)


def tables(rows, width, rng):
    """Shuffled blocks of their own for each row."""
    ids = rng.permutation(np.arange(1, 4 * BLOCKS + 1))[: rows * BLOCKS].reshape(rows, BLOCKS)
    return np.pad(ids, ((0, 0), (0, width - BLOCKS))).astype(np.int32)


def prefill(pool, shape, table, prompts):
    """Prefill ragged prompts together, chunk by chunk; return the logits behind each one's last token."""
    last = np.zeros((len(prompts), tiny.MODEL.vocab_size), np.float32)
    size = shape.prefill_chunk
    for start in range(0, max(map(len, prompts)), size):
        chunk = decode.Chunk.idle(shape)
        for b, prompt in enumerate(prompts):
            part = prompt[start : start + size]
            chunk.tokens[b, : len(part)], chunk.count[b] = part, len(part)
            chunk.table[b], chunk.length[b], chunk.position[b] = table[b], start, start
        pool, out = decode.prefill_chunk(tiny.weights(), pool, chunk, config=tiny.MODEL)
        for b in range(len(prompts)):
            if chunk.count[b]:
                last[b] = out.logits[b]
    return pool, last


@pytest.mark.parametrize("chunk", [5, 16, 64])
def test_chunked_ragged_prefill_gives_the_logits_of_a_dense_pass(chunk):
    rng = np.random.default_rng(chunk)
    prompts = [rng.integers(0, 97, n).tolist() for n in (1, 37, 64, 16)]
    shape = cache(prefill_chunk=chunk, prefill_rows=4)
    pool = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), KVPool.create(tiny.MODEL, shape))
    _, logits = prefill(pool, shape, tables(4, shape.table_width, rng), prompts)
    for b, prompt in enumerate(prompts):
        np.testing.assert_allclose(logits[b], dense_logits(prompt)[-1], atol=1e-4)


def test_decoding_gives_the_tokens_and_logprobs_of_a_dense_pass():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 97, n).tolist() for n in (3, 40, 15)]
    shape = cache(prefill_rows=3, rows=3)
    table = tables(3, shape.table_width, rng)
    pool, logits = prefill(KVPool.create(tiny.MODEL, shape), shape, table, prompts)
    rows = decode.Rows.idle(shape)
    rows.token[:], rows.table[:], rows.active[:] = logits.argmax(1), table, True
    rows.length[:] = rows.position[:] = [len(p) for p in prompts]
    pool, after, out = decode.decode_round(tiny.weights(), pool, rows, np.int32(6), config=tiny.MODEL, max_steps=8)
    assert out.tokens.shape == (3, 8)
    assert out.count.tolist() == [6, 6, 6]
    for b, prompt in enumerate(prompts):
        new = out.tokens[b, :6].tolist()
        # Row i of a causal pass over everything answers to the first i + 1 tokens alone.
        expected = dense_logits([*prompt, int(rows.token[b]), *new])[len(prompt) : -1].astype(np.float64)
        assert new == expected.argmax(1).tolist()
        logprobs = expected.max(1) - np.log(np.exp(expected).sum(1))
        np.testing.assert_allclose(out.logprobs[b, :6], logprobs, atol=1e-4)
        assert (int(after.length[b]), int(after.position[b]), int(after.token[b])) == (len(prompt) + 6,) * 2 + (
            new[-1],
        )


def test_position_reaches_rope_alone_and_length_the_slots_alone():
    """Rows whose position runs ahead of their length, as after a compaction: every key one token late is every key as
    it was.
    """
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 97, 20).tolist()
    shape = cache(rows=1)
    table = tables(1, shape.table_width, rng)
    answers = []
    for ahead in (0, 100):
        pool = KVPool.create(tiny.MODEL, shape)
        for start in (0, 16):
            chunk = decode.Chunk.idle(shape)
            part = prompt[start : start + 16]
            chunk.tokens[0, : len(part)], chunk.count[0] = part, len(part)
            chunk.table[0], chunk.length[0], chunk.position[0] = table[0], start, start + ahead
            pool, out = decode.prefill_chunk(tiny.weights(), pool, chunk, config=tiny.MODEL)
        rows = decode.Rows.idle(shape)
        rows.token[:], rows.table[:], rows.active[:] = int(out.token[0]), table, True
        rows.length[:], rows.position[:] = 20, 20 + ahead
        _, after, out = decode.decode_round(tiny.weights(), pool, rows, np.int32(8), config=tiny.MODEL, max_steps=8)
        assert (int(after.length[0]), int(after.position[0])) == (28, 28 + ahead)
        answers.append((out.tokens.tolist(), np.asarray(out.logprobs)))
    assert answers[0][0] == answers[1][0]
    # RoPE is relative, so a shift of all positions changes rounding and nothing else.
    np.testing.assert_allclose(answers[0][1], answers[1][1], atol=1e-4)


def test_a_stop_token_ends_its_row_and_all_of_them_the_round():
    shape = cache(rows=3)
    rows = decode.Rows.idle(shape)
    rows.active[:] = [True, True, False]
    rows.table[:, 0] = [1, 2, 3]
    rows.token[:] = [10, 20, 30]

    def one_round(stop_ids):
        pool = KVPool.create(tiny.MODEL, shape)
        for b, ids in enumerate(stop_ids):
            rows.sampling.stop_ids[b] = -1
            rows.sampling.stop_ids[b, : len(ids)] = ids
        return decode.decode_round(tiny.weights(), pool, rows, np.int32(4), config=tiny.MODEL, max_steps=4)

    _, _, free = one_round([[], [], []])
    assert free.count.tolist() == [4, 4, 0]
    first, second = free.tokens[0].tolist(), free.tokens[1].tolist()
    _, after, out = one_round([[96, first[1]], [second[0]], []])
    stopped = first.index(first[1]) + 1
    assert out.count.tolist() == [stopped, 1, 0]
    assert out.tokens[0, :stopped].tolist() == first[:stopped]
    assert not np.any(np.asarray(out.tokens[0, stopped:]))
    assert after.active.tolist() == [False, False, False]
    assert after.length.tolist() == [stopped, 1, 0]


def test_steps_lengths_and_tables_recompile_nothing():
    shape = cache(rows=2)
    rng = np.random.default_rng(0)
    pool = KVPool.create(tiny.MODEL, shape)
    rows = decode.Rows.idle(shape)
    rows.active[:], rows.table[:] = True, tables(2, shape.table_width, rng)
    pool, *_ = decode.decode_round(tiny.weights(), pool, rows, np.int32(1), config=tiny.MODEL, max_steps=8)

    def more():
        nonlocal pool
        for steps in (0, 3, 8, 50):
            rows.length[:], rows.position[:] = steps, 2 * steps
            pool, _, out = decode.decode_round(
                tiny.weights(), pool, rows, np.int32(steps), config=tiny.MODEL, max_steps=8
            )
            assert out.count.tolist() == [min(steps, 8)] * 2

    assert tiny.counted(more)[1] == 0


@pytest.mark.parametrize("step", ["prefill", "round"])
def test_no_second_pool_in_memory(step):
    """Invariant 9. The pool is far larger than everything else, so a copy of one layer of it would show."""
    shape = CacheConfig(blocks=20_000, context=256, rows=4, prefill_chunk=16, block_size=16)
    pool = KVPool.shapes(tiny.MODEL, shape)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool))
    if step == "prefill":
        lowered = decode.prefill_chunk.lower(tiny.weights(), pool, decode.Chunk.idle(shape), config=tiny.MODEL)
    else:
        args = (tiny.weights(), pool, decode.Rows.idle(shape), np.int32(8))
        lowered = decode.decode_round.lower(*args, config=tiny.MODEL, max_steps=8)
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 50
    page = f"f32[{','.join(map(str, pool.k[0].shape))}]"
    copies = [line for line in compiled.as_text().splitlines() if page in line.split("(")[0] and " copy(" in line]
    assert not copies
