"""Sampling against its distributions, computed plainly in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.sampling import Sampling, SamplingParams, sample

DRAWS = 4000
sample_jit = jax.jit(sample)


def rows(count, **fields):
    arrays = Sampling.idle(count)
    for name, value in fields.items():
        getattr(arrays, name)[...] = value
    return arrays


def distribution(logits, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """The probabilities that a token is drawn with; ties are not among the test's inputs."""
    order = np.argsort(-logits, kind="stable")
    p = np.exp((logits - logits.max()) / temperature)
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"temperature": 1.7, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 100},
        {"top_p": 1e-9},
    ],
    ids=str,
)
def test_tokens_come_with_the_probabilities_that_were_asked_for(options):
    logits = np.random.default_rng(2).standard_normal(11).astype(np.float32) * 2
    arrays = rows(DRAWS, **{"temperature": 1.0, **options}, generated=np.arange(DRAWS), seed=7)
    tokens, _ = sample_jit(jnp.tile(logits, (DRAWS, 1)), arrays)
    counts = np.bincount(tokens, minlength=11)
    expected = distribution(logits.astype(np.float64), **options)
    assert not np.any(counts[expected == 0])
    # Four standard deviations of a binomial count.
    assert np.all(np.abs(counts / DRAWS - expected) <= 4 * np.sqrt(expected * (1 - expected) / DRAWS) + 1e-9)


def test_temperature_0_is_the_argmax_and_logprobs_are_the_models_own():
    logits = np.random.default_rng(3).standard_normal((5, 33)).astype(np.float32)
    tokens, logprobs = sample_jit(logits, rows(5, temperature=[0, 0, 1, 2, 0], top_k=[0, 0, 1, 1, 5], min_p=0.5))
    np.testing.assert_array_equal(tokens, logits.argmax(1))
    wide = logits.astype(np.float64)
    expected = wide.max(1) - np.log(np.exp(wide).sum(1))
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@given(st.data())
def test_a_row_draws_the_same_whoever_stands_beside_it(data):
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 4},
    ]
    chosen = data.draw(st.lists(st.sampled_from(kinds), min_size=4, max_size=4))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    logits, seeds = rng.standard_normal((4, 64)).astype(np.float32), rng.integers(0, 2**32, 4, dtype=np.uint32)
    together = rows(4, seed=seeds, generated=[0, 1, 2, 3])
    for at, kind in enumerate(chosen):
        for name, value in kind.items():
            getattr(together, name)[at] = value
    tokens, logprobs = sample_jit(logits, together)
    for at in range(4):
        # Alone, and in another row: everybody else is greedy.
        alone = rows(4)
        other = (at + 1) % 4
        for field in dataclasses.fields(alone):
            getattr(alone, field.name)[other] = getattr(together, field.name)[at]
        moved = np.zeros_like(logits)
        moved[other] = logits[at]
        again, same = sample_jit(moved, alone)
        assert (int(again[other]), float(same[other])) == (int(tokens[at]), float(logprobs[at]))


def test_seed_and_count_make_the_key():
    logits = jnp.zeros((6, 1000))
    tokens, _ = sample_jit(logits, rows(6, temperature=1.0, seed=[1, 1, 2, 2, 1, 2], generated=[0, 1, 0, 1, 0, 1]))
    tokens = tokens.tolist()
    assert tokens[0] == tokens[4]
    assert tokens[3] == tokens[5]
    assert len(set(tokens[:4])) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2**31}, "top_k=2147483648"),
        ({"stop_token_ids": (5, -1)}, "stop_token_ids has -1"),
        ({"stop_token_ids": (2**31,)}, "stop_token_ids has 2147483648"),
        ({"min_p": 2.0}, "min_p=2.0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "seed=4294967296"),
        ({"stop": ("a", "")}, "a stop string is empty"),
        ({"min_tokens": 257}, "min_tokens=257 must be from 0 to max_tokens=256"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"presence_penalty": 2.1}, "presence_penalty=2.1 must be between -2 and 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be above 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty=inf"),
        ({"n": 129}, "n=129 must be from 1 to 128"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**change)


def test_one_stop_string_needs_no_list():
    assert SamplingParams(stop="###").stop == ("###",)
