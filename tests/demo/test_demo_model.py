"""SmolLM2-135M-Instruct against transformers, in float32 (expected values: scripts/make_reference.py)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expected import dense, load

from jaxkv import LLM, SamplingParams, decode, model, weights
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.dims import Array, ceil_div
from jaxkv.pool import KVPool

EXPECTED = load("demo_model")
TEXT = EXPECTED.pop("text")
PROMPTS = list(EXPECTED.values())
TOKENS = TEXT["token_ids"]
TOLERANCE = 1e-3
CHUNK = 96

Demo = tuple[ModelConfig, model.Weights]


@pytest.fixture(scope="module")
def demo() -> Demo:
    return weights.load(weights.locate(), jnp.float32)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(weights.locate()), dtype="float32", kv_dtype="float32")


def assert_agrees(logits: Array, positions: np.ndarray) -> None:
    """Compare logits [T, V] with what transformers gave at these positions of the text."""
    assert logits.dtype == jnp.float32
    ours = {
        "logits": logits[:, TEXT["columns"]],
        "logsumexp": jax.nn.logsumexp(logits, axis=-1),
        "top_logit": logits.max(axis=-1),
    }
    for name, values in ours.items():
        np.testing.assert_allclose(values, TEXT[name][positions], rtol=0, atol=TOLERANCE, err_msg=name)
    theirs = logits[np.arange(len(positions)), TEXT["top_id"][positions]]
    np.testing.assert_allclose(theirs, TEXT["top_logit"][positions], rtol=0, atol=TOLERANCE)


def scattered_pool(config: ModelConfig) -> tuple[CacheConfig, KVPool, np.ndarray]:
    """Return a pool full of NaN, and a table [1, M] of blocks in no order for the whole text."""
    cache = CacheConfig(blocks=100, context=len(TOKENS) + 16, prefill_chunk=CHUNK)
    pool = jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), KVPool.create(config, cache))
    table = np.zeros((1, cache.table_width), np.int32)
    used = ceil_div(len(TOKENS), cache.block_size)
    table[0, :used] = 1 + np.random.default_rng(0).permutation(cache.blocks)[:used]
    return cache, pool, table


@pytest.mark.parametrize("where", ["dense", "paged"])
def test_logits_agree_on_text(demo: Demo, where: str) -> None:
    config, loaded = demo
    positions = np.arange(len(TOKENS), dtype=np.int32)
    _, pool, table = scattered_pool(config)
    attend, state = (dense, None) if where == "dense" else (decode.paged_attend(table, positions[None]), pool)

    @jax.jit
    def run(loaded: model.Weights, state: KVPool | None) -> Array:
        _, hidden = model.forward(loaded, config, TOKENS[None], positions[None], attend, state)
        return model.logits(loaded, hidden[0])

    assert_agrees(run(loaded, state), positions)


def test_logits_after_each_prefill_chunk_agree(demo: Demo) -> None:
    config, loaded = demo
    cache, pool, table = scattered_pool(config)
    ends, rows = [], []
    for start in range(0, len(TOKENS), CHUNK):
        chunk = decode.Chunk.idle(cache)
        new = TOKENS[start : start + CHUNK]
        chunk.tokens[0, : len(new)] = new
        at = np.full(1, start, np.int32)
        chunk = chunk.replace(table=table, count=np.full(1, len(new), np.int32), length=at, position=at)
        pool, out = decode.prefill_chunk(loaded, pool, chunk, config=config)
        ends.append(start + len(new) - 1)
        rows.append(out.logits[0])
    assert ends[-1] == len(TOKENS) - 1
    assert_agrees(jnp.stack(rows), np.array(ends))


def test_chat_prompts_are_tokenised_as_by_transformers(llm: LLM) -> None:
    for prompt in PROMPTS:
        assert llm.encode(str(prompt["content"])) == prompt["prompt_ids"].tolist()


def test_greedy_tokens_equal_transformers(llm: LLM) -> None:
    assert len(PROMPTS) == 3
    steps = min(len(prompt["token_ids"]) for prompt in PROMPTS)
    assert steps >= 64
    params = SamplingParams(max_tokens=steps, ignore_eos=True)
    completions = llm.generate([prompt["prompt_ids"].tolist() for prompt in PROMPTS], params)
    for completion, prompt in zip(completions, PROMPTS, strict=True):
        # The closest runner-up in the data is several times the tolerance away, so there is no tie to forgive.
        assert prompt["gaps"].min() > 2 * TOLERANCE
        assert completion.token_ids == prompt["token_ids"].tolist()


def test_a_prompt_alone_gives_what_it_gave_among_others(llm: LLM) -> None:
    prompt = PROMPTS[1]
    (completion,) = llm.generate([prompt["prompt_ids"].tolist()], SamplingParams(max_tokens=64, ignore_eos=True))
    assert completion.token_ids == prompt["token_ids"][:64].tolist()
