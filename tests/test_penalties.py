"""Penalties and the tokens that may not end a text yet, against a replay of the text in plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from expected import dense

from jaxkv import decode, model
from jaxkv.batch import Rows
from jaxkv.compression import CompressionConfig
from jaxkv.request import Request, RequestError
from jaxkv.sampling import Sampling, SamplingParams, Seen, sample

V = tiny.MODEL.vocab_size


def penalised(logits, prompt, generated, presence=0.0, frequency=0.0, repetition=1.0):
    out = np.asarray(logits, np.float64).copy()
    for token in range(len(out)):
        count = generated.count(token)
        if token in prompt or count:
            out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        out[token] -= frequency * count + presence * (count > 0)
    return out


@pytest.mark.parametrize(
    "options",
    [
        {"presence": 1.5},
        {"frequency": 0.5},
        {"repetition": 1.7},
        {"repetition": 0.6},
        {"presence": -1.0, "frequency": 0.25, "repetition": 1.2},
    ],
    ids=str,
)
def test_logits_are_penalised_as_the_formulas_say_and_log_probabilities_are_the_models(options):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 40)).astype(np.float32) * 3
    prompt, generated = [1, 2, 3, 3], [5, 5, 5, 2, 9]
    arrays, seen = Sampling.idle(3), Seen.create(3, 40)
    for name, value in options.items():
        getattr(arrays, name)[1] = value
    seen = Seen(seen.prompt.at[:, np.asarray(prompt)].set(True), seen.generated)
    for token in generated:
        seen = seen.add(jnp.full(3, token), jnp.array([True, True, False]))
    # The likeliest tokens of the row are among those that it has had.
    logits[:, [5, 2, 3, 9]] += 2
    tokens, logprobs = jax.jit(sample)(logits, arrays, seen)
    expected = [logits[0], penalised(logits[1], prompt, generated, **options), logits[2]]
    assert tokens.tolist() == [int(np.argmax(row)) for row in expected]
    plain = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(logprobs, plain[np.arange(3), tokens], rtol=1e-5)


@jax.jit
def logits_of(weights, ids):
    _, hidden = model.forward(weights, tiny.MODEL, ids, jnp.arange(ids.shape[1])[None], dense, None)
    return model.logits(weights, hidden[0])


def next_logits(tokens):
    ids = np.zeros((1, 96), np.int32)
    ids[0, : len(tokens)] = tokens
    return np.asarray(logits_of(tiny.weights(), ids))[len(tokens) - 1]


def replay(prompt, count, **options):
    """Greedy decoding of a whole text again for each token."""
    generated = []
    for _ in range(count):
        logits = penalised(next_logits([*prompt, *generated]), prompt, generated, **options)
        generated.append(int(np.argmax(logits)))
    return generated


OPTIONS = [
    {"repetition": 1.5},
    {"presence": 2.0},
    {"frequency": 1.0},
    {"presence": 0.5, "frequency": 0.7, "repetition": 1.1},
]


def request(prompt, tokens, **options):
    fields = {"presence": "presence_penalty", "frequency": "frequency_penalty", "repetition": "repetition_penalty"}
    params = {fields.get(name, name): value for name, value in options.items()}
    return Request(prompt, SamplingParams(max_tokens=tokens, **{"ignore_eos": True, **params}))


def test_rows_with_and_without_penalties_leave_each_other_alone():
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, V, 12 + at).tolist() for at in range(5)]
    expected = [replay(prompts[0], 30), *(replay(p, 30, **o) for p, o in zip(prompts[1:], OPTIONS, strict=True))]
    requests = [request(prompts[0], 30), *(request(p, 30, **o) for p, o in zip(prompts[1:], OPTIONS, strict=True))]
    made = tiny.engine()
    assert tiny.drain(made, requests)[0] == expected
    # Rows change hands: what the one before had seen is forgotten.
    assert tiny.drain(made, requests[::-1])[0] == expected[::-1]
    # Without penalties a tiny model says the same again and again.
    assert len(set(expected[0])) < len(set(expected[2]))


def test_penalties_survive_giving_way_forks_and_a_second_turn():
    rng = np.random.default_rng(1)
    options = {**OPTIONS[-1], "temperature": 0.8}
    prompts = [rng.integers(0, V, 20).tolist() for _ in range(8)]
    requests = [request(prompt, 60, seed=at, **options) for at, prompt in enumerate(prompts)]
    alone = [tiny.drain(tiny.engine(), [one])[0][0] for one in requests]
    made = tiny.engine(dataclasses.replace(tiny.CACHE, blocks=60), poison=True)
    assert tiny.drain(made, requests)[0] == alone
    assert made.totals.preemptions > 0

    out, _ = tiny.run(tiny.engine(), [request(prompts[0], 30, n=4, **options)])
    for choice in range(4):
        one = request(prompts[0], 30, seed=choice, **options)
        assert out[0, choice] == tiny.drain(tiny.engine(), [one])[0][0]

    made = tiny.engine()
    first = made.add(dataclasses.replace(request(prompts[0], 20, repetition=1.5), keep=True))
    answer = []
    while made.has_work:
        answer += [token for event in made.step() for token in event.token_ids]
    more = dataclasses.replace(request(prompts[1][:5], 20, repetition=1.5), continue_from=first)
    assert tiny.drain(made, [more])[0][0] == replay([*prompts[0], *answer, *prompts[1][:5]], 20, repetition=1.5)


def test_a_whole_trace_in_one_program_penalises_too():
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, V, 17).tolist()
    cache = dataclasses.replace(tiny.CACHE, rows=1, prefix_cache=False)
    made = tiny.engine(cache)
    made.add(request(prompt, 25, repetition=1.5))
    while not (made.rows and made.rows[0].decoding):
        made.step()
    (row,) = made.rows
    made.memory.grow(row, 60)
    rows = Rows.idle(cache).replace(seen=made.device.seen)
    rows.token[0], rows.length[0], rows.position[0] = row.tokens[-1], row.length, row.position
    rows.table[0, : len(row.blocks)], rows.active[0] = row.blocks, True
    rows.sampling.put(0, row.request.params, 0, 1, ())
    _, _, out = decode.decode_trace(tiny.weights(), made.device.pool, rows, n=24, config=tiny.MODEL)
    assert [row.tokens[-1], *out.tokens[0].tolist()] == replay(prompt, 25, repetition=1.5)


def test_no_stop_token_ends_a_text_before_min_tokens():
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, V, 10).tolist()
    plain = tiny.drain(tiny.engine(), [request(prompt, 40)])[0][0]
    stops = (plain[2], plain[5])
    for least in (0, 1, 3, 12):
        one = request(prompt, 40, min_tokens=least, stop_token_ids=stops)
        (out,), (report,) = tiny.drain(tiny.engine(), [one])
        expected = []
        while len(expected) < 40 and not (expected and expected[-1] in stops):
            logits = next_logits([*prompt, *expected]).astype(np.float64)
            if len(expected) < least:
                logits[list(stops)] = -np.inf
            expected.append(int(np.argmax(logits)))
        assert out == expected
        assert report.generated_tokens > least or report.finish_reason == "length"


def test_stop_tokens_outside_the_vocabulary_are_refused():
    with pytest.raises(RequestError, match="stop token 97 is not one of the model's 0 to 96"):
        tiny.engine().add(Request([1], SamplingParams(stop_token_ids=(97,))))


def test_penalties_need_nothing_compiled():
    made = tiny.engine(compression=CompressionConfig(method="knorm", budget=32, interval=8, window=8, sinks=2))
    requests = [request([1, 2, 3], 30, **options, n=2) for options in OPTIONS]
    _, compiled = tiny.counted(lambda: tiny.run(made, requests))
    assert compiled == 0
