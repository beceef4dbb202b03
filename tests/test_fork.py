"""n > 1: continuations share the prompt's blocks, copy the half-full last one on write, and draw as if alone."""

import dataclasses

import numpy as np
import pytest
import tiny

from jaxkv.compression import CompressionConfig
from jaxkv.request import Request, RequestError
from jaxkv.sampling import SamplingParams

SMALL = CompressionConfig(method="knorm", budget=32, interval=8, window=8, sinks=2)
METHODS = {"none": CompressionConfig(), "knorm": SMALL, "h2o": dataclasses.replace(SMALL, method="h2o")}


def prompt(count, seed=0):
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


def solo(tokens, params, choice, **options):
    one = dataclasses.replace(params, n=1, seed=params.seed + choice)
    return tiny.drain(tiny.engine(**options), [Request(tokens, one)])[0][0]


@pytest.mark.parametrize("count", [1, 15, 16, 47])
@pytest.mark.parametrize("method", METHODS)
def test_each_continuation_is_that_of_a_request_of_its_own(method, count):
    """Prompts of a part of a block, of whole blocks, and above the budget; five compact in shared blocks."""
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=5, n=5, ignore_eos=True)
    config = METHODS[method]
    made = tiny.engine(compression=config, poison=True)
    other = Request(prompt(30, seed=9), SamplingParams(max_tokens=60, ignore_eos=True))
    out, reports = tiny.run(made, [Request(prompt(count), params), other], tiny.poison_what_nobody_may_read)
    for choice in range(5):
        assert out[0, choice] == solo(prompt(count), params, choice, compression=config)
        assert reports[0, choice].generated_tokens == 40
    assert made.blocks.in_use == 0


def test_continuations_share_blocks_and_copy_one_each():
    params = SamplingParams(max_tokens=3, temperature=1.0, n=6, ignore_eos=True)
    made = tiny.engine(dataclasses.replace(tiny.CACHE, prefix_cache=False))
    copies = []
    real = made.device.copy
    made.device.copy = lambda source, target: copies.append((source, target)) or real(source, target)
    held = []
    decode = made.device.decode
    made.device.decode = lambda *args: held.append(made.blocks.in_use) or decode(*args)
    tiny.run(made, [Request(prompt(30), params)])
    # 30 slots take eight blocks, the last of them half full: the first five rows to write to it copy it.
    assert max(held) == 8 + 5
    assert len(copies) == 5
    assert made.blocks.in_use == 0


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_continuations_without_a_place_wait_for_one(rows):
    params = SamplingParams(max_tokens=20, temperature=0.9, n=5, ignore_eos=True)
    made = tiny.engine(dataclasses.replace(tiny.CACHE, rows=rows), poison=True)
    out, reports = tiny.run(made, [Request(prompt(30), params)], tiny.poison_what_nobody_may_read)
    expected = tiny.engine(dataclasses.replace(tiny.CACHE, rows=rows))
    for choice in range(5):
        one = dataclasses.replace(params, n=1, seed=choice)
        assert out[0, choice] == tiny.drain(expected, [Request(prompt(30), one)])[0][0]
    # Those that came later found the prompt's full blocks.
    assert [reports[0, choice].cached_tokens for choice in range(rows, 5)] == [28] * (5 - rows)


def test_continuations_give_way_and_come_back():
    params = SamplingParams(max_tokens=90, temperature=0.9, n=6, ignore_eos=True)
    made = tiny.engine(dataclasses.replace(tiny.CACHE, blocks=60), poison=True)
    out, reports = tiny.run(made, [Request(prompt(33), params)], tiny.poison_what_nobody_may_read)
    assert sum(report.preemptions for report in reports.values()) > 0
    for choice in range(6):
        assert out[0, choice] == solo(prompt(33), params, choice)


def test_a_first_token_that_ends_one_continuation_ends_no_other():
    params = SamplingParams(max_tokens=1, temperature=1.5, n=4)
    made = tiny.engine()
    out, reports = tiny.run(made, [Request(prompt(10), params)])
    assert {name: len(tokens) for name, tokens in out.items()} == {(0, choice): 1 for choice in range(4)}
    assert len(reports) == 4
    assert made.blocks.in_use == 0


def test_each_continuation_has_its_own_watch():
    counts = [0, 0, 0]

    def watch(choice):
        def saw(token):
            counts[choice] += 1
            return counts[choice] == 5 + choice

        return saw

    params = SamplingParams(max_tokens=40, temperature=1.0, n=3, ignore_eos=True)
    made = tiny.engine()
    out, reports = tiny.run(made, [Request(prompt(10), params, watch=[watch(i) for i in range(3)])])
    assert [len(out[0, choice]) for choice in range(3)] == [5, 6, 7]
    assert {report.finish_reason for report in reports.values()} == {"stop"}


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancelling_ends_all_of_them(steps):
    params = SamplingParams(max_tokens=40, temperature=1.0, n=10, ignore_eos=True)
    made = tiny.engine()
    name = made.add(Request(prompt(20), params))
    for _ in range(steps):
        made.step()
    events = made.cancel(name)
    assert [event.choice for event in events] == list(range(10))
    assert {event.report.finish_reason for event in events} == {"cancelled"}
    assert not made.has_work
    assert made.blocks.in_use == 0


def test_what_cannot_be_is_refused():
    made = tiny.engine()
    for request, message in (
        (Request([1], SamplingParams(n=2), keep=True), "keep=True is for one continuation, and n=2"),
        (Request([1], SamplingParams(n=2), watch=lambda token: False), "n=2 continuations need a watch each"),
        (Request([1], SamplingParams(n=2), watch=[lambda token: False]), "n=2 continuations need a watch each"),
    ):
        with pytest.raises(RequestError, match=message):
            made.add(request)
    with pytest.raises(ValueError, match="n=0 must be from 1 to 128"):
        SamplingParams(n=0)
    assert not made.has_work
