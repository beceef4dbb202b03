"""Going on after the end: a second turn on what compaction has left of the first, as if it had never stopped."""

import dataclasses

import numpy as np
import pytest
import tiny

from jaxkv.compression import CompressionConfig
from jaxkv.request import Request, RequestError
from jaxkv.sampling import SamplingParams

P = tiny.CACHE.block_size
SMALL = CompressionConfig(method="knorm", budget=32, interval=8, window=8, sinks=2)
CONFIGS = {
    "none": CompressionConfig(),
    "knorm": SMALL,
    "keydiff": dataclasses.replace(SMALL, method="keydiff"),
    "h2o": dataclasses.replace(SMALL, method="h2o"),
    "triattention": dataclasses.replace(SMALL, method="triattention", stats="online"),
}
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


def prompt(count, seed=0):
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


def two_turns(made, first, second, **options):
    """Run a turn, keep it, run the next from it; return both outputs and the second's report."""
    name = made.add(dataclasses.replace(first, keep=True))
    one, two, report = [], [], None
    while made.has_work:
        one += [token for event in made.step() for token in event.token_ids]
    made.add(dataclasses.replace(second, continue_from=name))
    while made.has_work:
        for event in made.step():
            two += event.token_ids
            report = event.report or report
    return one, two, report


def forced(config, first, answer, second, count):
    """The same two turns through one row that never ends: the second prompt's tokens are put in as if drawn."""
    made = tiny.engine(compression=config)
    text = [*first, *answer, *second]
    real, taken = made._take, []

    def take(row, tokens, logprobs):
        at = len(row.tokens)
        # One token at a time, so that the next step is fed what the text says.
        wanted = text[at] if at < len(text) else tokens[0]
        taken.append(wanted)
        return real(row, [wanted], logprobs[:1])

    made._take = take
    made.add(Request(first, SamplingParams(max_tokens=len(answer) + len(second) + count, ignore_eos=True)))
    while made.has_work:
        made.step(1)
    return taken[len(answer) + len(second) :]


@pytest.mark.parametrize("second", [1, 7, 30, 90])
@pytest.mark.parametrize("name", CONFIGS)
def test_two_turns_equal_one_uninterrupted_row(name, second):
    config = CONFIGS[name]
    made = tiny.engine(compression=config, poison=True)
    first, more = Request(prompt(30), GREEDY), Request(prompt(second, seed=1), GREEDY)
    one, two, report = two_turns(made, first, more)
    assert two == forced(config, first.prompt, one, more.prompt, len(two))
    assert report.continued_tokens == 70
    assert report.prompt_tokens == second
    assert report.position == 70 + second + 40 - 1
    assert report.history == ("whole" if name == "none" else "compressed")
    # A second prompt of three times what is left of the budget is compacted as it comes in.
    if name != "none":
        assert report.blocks_peak <= -(-(SMALL.budget + SMALL.interval) // P) + 1
    assert made.blocks.in_use == sum(len(kept.blocks) for kept in made.memory.kept.values()) > 0
    made.forget(0)
    assert made.blocks.in_use == 0


def test_a_row_can_be_continued_again_and_by_several_at_once():
    made = tiny.engine(compression=SMALL, poison=True)
    name = made.add(Request(prompt(30), GREEDY, keep=True))
    while made.has_work:
        made.step()
    more = [
        Request(prompt(10, seed=seed), dataclasses.replace(GREEDY, seed=seed, temperature=0.8), continue_from=name)
        for seed in (1, 2, 1)
    ]
    out, reports = tiny.run(made, more, tiny.poison_what_nobody_may_read)
    again, _ = tiny.run(made, more[:1], tiny.poison_what_nobody_may_read)
    assert out[0, 0] == out[2, 0] == again[0, 0] != out[1, 0]
    # The kept row's blocks were copied out of, and are what they were.
    assert all(report.blocks_dropped for report in reports.values())


def test_an_empty_prompt_goes_on_with_the_answer():
    whole = tiny.drain(tiny.engine(), [Request(prompt(30), dataclasses.replace(GREEDY, max_tokens=80))])[0][0]
    one, two, _ = two_turns(tiny.engine(), Request(prompt(30), GREEDY), Request([], GREEDY))
    assert one + two == whole


def test_a_turn_that_ended_by_a_stop_string_goes_on_after_it():
    whole = tiny.drain(tiny.engine(), [Request(prompt(30), dataclasses.replace(GREEDY, max_tokens=80))])[0][0]
    count = iter(range(1, 100))
    first = Request(prompt(30), GREEDY, watch=lambda token: next(count) == 13)
    one, two, report = two_turns(tiny.engine(), first, Request([], GREEDY))
    assert len(one) == 13
    assert one + two == whole[:53]
    assert report.continued_tokens == 43


def test_three_turns_and_a_clean_history_is_still_found_by_others():
    made = tiny.engine()
    name, text = None, []
    for turn in range(3):
        new = prompt(20, seed=turn)
        name = made.add(Request(new, dataclasses.replace(GREEDY, max_tokens=10), keep=True, continue_from=name))
        text += new
        while made.has_work:
            text += [token for event in made.step() for token in event.token_ids]
    assert len(made.memory.kept[name].tokens) == len(text) == 90
    _, reports = tiny.run(made, [Request([*text, 1], GREEDY)])
    assert reports[0, 0].cached_tokens == 88


def test_kept_rows_are_bounded_and_go_before_anybody_gives_way():
    cache = dataclasses.replace(tiny.CACHE, blocks=60, kept_rows=2)
    made = tiny.engine(cache, poison=True)
    names = [made.add(Request(prompt(40, seed=seed), GREEDY, keep=True)) for seed in range(3)]
    while made.has_work:
        made.step()
    assert list(made.memory.kept) == names[1:]
    with pytest.raises(RequestError, match=f"continue_from={names[0]}: no such row is kept.*kept_rows=2"):
        made.add(Request([1], GREEDY, continue_from=names[0]))
    out, _ = tiny.run(made, [Request(prompt(150), GREEDY)], tiny.poison_what_nobody_may_read)
    assert made.totals.preemptions == 0
    assert len(made.memory.kept) < 2
    assert out[0, 0] == tiny.drain(tiny.engine(), [Request(prompt(150), GREEDY)])[0][0]


def test_a_kept_row_that_a_queued_request_needs_goes_to_host_memory_and_comes_back():
    cache = dataclasses.replace(tiny.CACHE, blocks=60, rows=1)
    plain = two_turns(tiny.engine(cache, compression=SMALL), Request(prompt(30), GREEDY), Request(prompt(9), GREEDY))
    made = tiny.engine(cache, compression=SMALL, poison=True)
    first = made.add(Request(prompt(30), GREEDY, keep=True))
    while made.has_work:
        made.step()
    # The first in the queue needs nearly all of the pool; the second continues what is kept there.
    big = Request(prompt(200, seed=1), dataclasses.replace(GREEDY, max_tokens=2), CompressionConfig())
    made.add(big)
    second = made.add(Request(prompt(9), GREEDY, continue_from=first))
    tokens, swapped = [], False
    while made.has_work:
        for event in made.step():
            tokens += event.token_ids if event.request_id == second else ()
        swapped = swapped or made.memory.kept[first].swapped is not None
        tiny.poison_what_nobody_may_read(made)
    assert swapped
    assert tokens == plain[1]


def test_a_continued_row_that_gives_way_comes_back():
    made = tiny.engine(dataclasses.replace(tiny.CACHE, blocks=60), poison=True)
    long = dataclasses.replace(GREEDY, max_tokens=100)
    first = made.add(Request(prompt(30), GREEDY, keep=True))
    while made.has_work:
        made.step()
    alone = two_turns(tiny.engine(), Request(prompt(30), GREEDY), Request(prompt(9), long))[1]
    out, reports = tiny.run(
        made,
        [Request(prompt(60, seed=7), long), Request(prompt(9), long, continue_from=first)],
        tiny.poison_what_nobody_may_read,
    )
    assert reports[1, 0].preemptions > 0
    assert out[1, 0] == alone


def test_cancelling_a_queued_continuation_lets_its_row_go_again():
    made = tiny.engine(dataclasses.replace(tiny.CACHE, rows=1))
    first = made.add(Request(prompt(30), GREEDY, keep=True))
    while made.has_work:
        made.step()
    made.add(Request(prompt(30), GREEDY))
    queued = made.add(Request([1], GREEDY, continue_from=first))
    made.step()
    made.forget(first)
    assert made.memory.kept[first].waiting == 1
    made.cancel(queued)
    assert made.memory.kept[first].waiting == 0
    made.forget(first)
    assert not made.memory.kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": SMALL}, "keeps that row's budget; leave compression as None"),
        ({"salt": "b"}, "salt='b' is not that of the row it continues"),
        ({"params": dataclasses.replace(GREEDY, n=2)}, "continue_from is for one continuation, and n=2"),
        ({"prompt": [1] * 190}, "the prompt has 190 tokens after 70 that it continues and the context is 256"),
        ({"prompt": [97]}, "token 97 of the prompt"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_lost(options, message):
    made = tiny.engine(compression=SMALL)
    first = made.add(Request(prompt(30), GREEDY, keep=True))
    while made.has_work:
        made.step()
    with pytest.raises(RequestError, match=message):
        made.add(dataclasses.replace(Request([1], GREEDY, continue_from=first), **options))
    assert made.memory.kept[first].waiting == 0
    assert not made.has_work
    with pytest.raises(RequestError, match="kept_rows=0"):
        tiny.engine(dataclasses.replace(tiny.CACHE, kept_rows=0)).add(Request([1], GREEDY, keep=True))


def test_nothing_of_it_compiles_after_warmup():
    made = tiny.engine(compression=SMALL)
    _, compiled = tiny.counted(lambda: two_turns(made, Request(prompt(30), GREEDY), Request(prompt(50), GREEDY)))
    assert compiled == 0
