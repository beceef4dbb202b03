"""The engine on a tiny model: who shares it changes nothing, blocks come back, bad requests are refused up front."""

import dataclasses
import itertools

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.request import Request, RequestError
from jaxkv.sampling import SamplingParams


def request(rng, prompt, tokens, **params):
    return Request(rng.integers(0, 97, prompt).tolist(), SamplingParams(max_tokens=tokens, **params))


def mixed(count, seed=0):
    """Requests of mixed lengths, a third of them greedy, the rest sampled in different ways."""
    rng = np.random.default_rng(seed)
    kinds = [
        {},
        {"temperature": 0.7},
        {"temperature": 1.2, "top_p": 0.9, "ignore_eos": True},
        {"temperature": 1.0, "top_k": 5},
    ]
    return [
        request(rng, rng.integers(1, 80), int(rng.integers(1, 60)), seed=i, **kinds[i % len(kinds)])
        for i in range(count)
    ]


@pytest.mark.parametrize("prefill_rows", [1, 3])
def test_every_request_equals_its_solo_run_under_churn_and_poison(prefill_rows):
    requests = mixed(24)
    cache = dataclasses.replace(tiny.CACHE, prefill_rows=prefill_rows)
    alone = [tiny.drain(tiny.engine(cache), [one])[0][0] for one in requests]
    # 90 blocks hold three of the longest: rows are reused, and requests wait for blocks.
    for blocks in (200, 90):
        made = tiny.engine(dataclasses.replace(cache, blocks=blocks), poison=True)
        tokens, reports = tiny.drain(made, requests)
        assert tokens == alone
        assert made.blocks.in_use == 0
        assert [r.generated_tokens for r in reports] == [len(t) for t in tokens]
    assert max(r.queued_seconds for r in reports) > 0


@pytest.mark.parametrize("prefill_rows", [1, 3])
@pytest.mark.parametrize("step_tokens", [1, 40, 1000])
def test_a_step_that_prefills_many_prompts_tells_each_first_token_once(step_tokens, prefill_rows):
    rng = np.random.default_rng(4)
    cache = dataclasses.replace(tiny.CACHE, prefill_rows=prefill_rows)
    shapes = [(1, 5), (16, 1), (50, 12), (17, 9), (33, 1), (5, 20)]
    requests = [request(rng, *shape, seed=i, temperature=0.9, ignore_eos=True) for i, shape in enumerate(shapes)]
    forked = request(rng, 21, 7, seed=9, n=3, temperature=0.9, ignore_eos=True)
    made = tiny.engine(cache, poison=True, step_tokens=step_tokens)
    tokens, reports = tiny.run(made, [*requests, forked], tiny.poison_what_nobody_may_read)
    for at, one in enumerate(requests):
        assert tokens[at, 0] == tiny.drain(tiny.engine(cache), [one])[0][0]
        assert reports[at, 0].generated_tokens == len(tokens[at, 0]) == one.params.max_tokens
    for choice in range(3):
        alone = dataclasses.replace(forked.params, n=1, seed=9 + choice)
        assert tokens[6, choice] == tiny.drain(tiny.engine(cache), [dataclasses.replace(forked, params=alone)])[0][0]
    assert made.totals.prompt_tokens - made.totals.cached_tokens <= sum(prompt for prompt, _ in shapes) + 21
    assert made.blocks.in_use == 0


def test_ragged_batch_with_the_longest_finishing_first_and_its_row_reused():
    rng = np.random.default_rng(8)
    prompts, answers = [100, 9, 41, 3, 77, 16, 17, 1], [2, 40, 35, 50, 30, 44, 38, 41]
    for params in ({"ignore_eos": True}, {"ignore_eos": True, "temperature": 0.9}):
        first = [request(rng, p, a, seed=i, **params) for i, (p, a) in enumerate(zip(prompts, answers, strict=True))]
        late = request(rng, 30, 20, seed=99, **params)
        made = tiny.engine(poison=True)
        ids = [made.add(one) for one in first]
        tokens = {i: [] for i in ids}
        newcomer = None
        while made.has_work:
            for event in made.step():
                tokens[event.request_id] += event.token_ids
                if event.report is not None and newcomer is None:
                    assert event.request_id == ids[0]
                    newcomer = made.add(late)
                    tokens[newcomer] = []
        expected = [tiny.drain(tiny.engine(), [one])[0][0] for one in [*first, late]]
        assert [tokens[i] for i in [*ids, newcomer]] == expected


@pytest.mark.parametrize("count", [1, 4, 16])
def test_greedy_is_the_same_among_1_4_or_16_requests(count):
    requests = mixed(16, seed=4)
    cache = dataclasses.replace(tiny.CACHE, rows=16, blocks=600)
    assert tiny.drain(tiny.engine(cache), requests[:count])[0] == tiny.drain(tiny.engine(cache), requests)[0][:count]


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=12), st.integers(33, 80))
def test_blocks_are_counted_right_at_every_step(shapes, blocks):
    rng = np.random.default_rng(1)
    # Two pool sizes would compile twice; the manager alone is made smaller.
    made = tiny.engine()
    made.blocks.allocate(200 - blocks)
    made.cache = dataclasses.replace(made.cache, blocks=blocks)
    made.terms = dataclasses.replace(made.terms, cache=made.cache)
    sizes = {}
    for prompt, tokens in shapes:
        one = request(rng, prompt, tokens, ignore_eos=True)
        sizes[made.add(one)] = (prompt, tokens)
    while made.has_work:
        for event in made.step():
            if event.report is not None:
                prompt, tokens = sizes[event.request_id]
                report = event.report
                assert (report.prompt_tokens, report.generated_tokens) == (prompt, tokens)
                assert report.position == report.length == prompt + tokens - 1
                assert report.blocks_now == -(-report.length // 4)
                assert report.blocks_now <= report.blocks_peak <= -(-(prompt + tokens - 1) // 4)
        assert made.blocks.in_use <= 200
    assert made.blocks.in_use == 200 - blocks


def test_32_mixed_requests_compile_nothing_after_warmup(capsys):
    from jaxkv.engine import Engine

    cache = dataclasses.replace(tiny.CACHE, blocks=211)
    made = Engine(tiny.weights(), tiny.MODEL, cache, eos_token_ids=(5,))
    compiled = made.warmup()
    _, more = tiny.counted(lambda: tiny.drain(made, mixed(32, seed=7)))
    with capsys.disabled():
        print(f"\nprograms compiled by warmup: {compiled.programs}")
    assert 1 <= compiled.programs <= 12
    assert more == 0


def test_watch_ends_a_request_and_what_was_drawn_after_it_is_nobodys():
    rng = np.random.default_rng(3)
    plain = request(rng, 10, 40, ignore_eos=True)
    (tokens,), _ = tiny.drain(tiny.engine(), [plain])
    seen = []

    def watch(token):
        seen.append(token)
        return len(seen) == 11

    (stopped,), (report,) = tiny.drain(tiny.engine(), [dataclasses.replace(plain, watch=watch)])
    assert stopped == seen == tokens[:11]
    assert (report.finish_reason, report.generated_tokens) == ("stop", 11)
    assert report.position == report.length == 10 + 11 - 1


def test_eos_and_stop_tokens_end_a_request_and_count():
    rng = np.random.default_rng(3)
    plain = request(rng, 10, 40, ignore_eos=True)
    (tokens,), _ = tiny.drain(tiny.engine(), [plain])
    stop = tokens[7]
    first = tokens.index(stop) + 1
    for params, eos in (
        (dataclasses.replace(plain.params, stop_token_ids=(stop,)), ()),
        (dataclasses.replace(plain.params, ignore_eos=False), (stop, 96)),
    ):
        made = tiny.engine(eos_token_ids=eos)
        (ended,), (report,) = tiny.drain(made, [dataclasses.replace(plain, params=params)])
        assert ended == tokens[:first]
        assert (report.finish_reason, report.position) == ("stop", 10 + first - 1)


def test_the_context_ends_a_request_and_says_so():
    rng = np.random.default_rng(3)
    (tokens,), (report,) = tiny.drain(tiny.engine(), [request(rng, 250, 40, ignore_eos=True)])
    assert len(tokens) == 6
    assert report.finish_reason == "length"
    assert report.reached_context
    (_,), (report,) = tiny.drain(tiny.engine(), [request(rng, 250, 6, ignore_eos=True)])
    assert not report.reached_context


def test_cancel_frees_running_and_queued_requests_and_ignores_the_rest():
    rng = np.random.default_rng(0)
    made = tiny.engine(dataclasses.replace(tiny.CACHE, rows=1))
    running, queued = made.add(request(rng, 10, 60, ignore_eos=True)), made.add(request(rng, 20, 8))
    made.step()
    made.step()
    assert (made.state(running), made.state(queued)) == ("decoding", "queued")
    assert made.queued == [queued]
    (event,) = made.cancel(running)
    assert event.report.finish_reason == "cancelled"
    assert event.report.generated_tokens == 1 + tiny.CACHE.round_steps
    (event,) = made.cancel(queued)
    assert (event.report.finish_reason, event.report.prompt_tokens, event.report.blocks_peak) == ("cancelled", 20, 0)
    assert made.cancel(running) == made.cancel(999) == []
    assert made.blocks.in_use == 0
    assert not made.has_work
    assert made.state(running) == "finished"


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt has no tokens"),
        ([1, 97], {}, "token 97 of the prompt is not one of the model's 0 to 96"),
        ([-1], {}, "token -1 of the prompt"),
        ([1] * 256, {}, "the prompt has 256 tokens and the context is 256"),
        (
            [1] * 100,
            {"max_tokens": 100},
            "needs 50 blocks of 4 for 100 prompt tokens and max_tokens=100, and the pool has 40",
        ),
        ([1], {"stop_token_ids": tuple(range(10, 18))}, "9 stop tokens are more than the 8"),
    ],
)
def test_requests_that_can_never_be_served_are_refused_and_nothing_is_queued(prompt, params, message):
    made = tiny.engine(dataclasses.replace(tiny.CACHE, blocks=40))
    with pytest.raises(RequestError, match=message):
        made.add(Request(prompt, SamplingParams(**params)))
    assert not made.has_work


def test_a_request_that_fits_but_not_now_is_queued_and_not_overtaken():
    rng = np.random.default_rng(0)
    made = tiny.engine(dataclasses.replace(tiny.CACHE, blocks=40))
    big, second, small = (made.add(request(rng, n, 40, ignore_eos=True)) for n in (60, 100, 2))
    for _ in range(4):
        made.step()
    assert [made.state(i) for i in (big, second, small)] == ["decoding", "queued", "queued"]
    order = []
    while made.has_work:
        order += [event.request_id for event in made.step() if event.report is not None]
    assert order == [big, second, small]


def test_a_long_prompt_lets_decoding_rows_wait_for_one_chunk_at_most():
    rng = np.random.default_rng(0)
    made = tiny.engine()
    first = made.add(request(rng, 10, 100, ignore_eos=True))
    made.step()
    made.add(request(rng, 200, 5, ignore_eos=True))
    calls = []
    for name in ("prefill", "decode"):
        real = getattr(made.device, name)
        setattr(made.device, name, lambda *args, real=real, name=name: calls.append(name) or real(*args))
    while made.state(first) == "decoding":
        made.step()
    assert calls.count("prefill") == -(-200 // tiny.CACHE.prefill_chunk)
    assert ("prefill", "prefill") not in itertools.pairwise(calls)
