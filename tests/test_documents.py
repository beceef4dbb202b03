"""Documents through the engine: stored once, blended anywhere, and what follows them as ever."""

import dataclasses
import time

import numpy as np
import pytest
import tiny

from jaxkv.compression import CompressionConfig
from jaxkv.documents import DocumentsConfig
from jaxkv.request import Request, RequestError
from jaxkv.sampling import SamplingParams
from jaxkv.segments import Span
from jaxkv.store import Store, disk

DEEP = dataclasses.replace(tiny.MODEL, layers=4)
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SMALL = CompressionConfig(method="knorm", budget=32, interval=8, window=8, sinks=2)


def tokens(count, seed):
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


DOCUMENTS = {"a": tokens(40, 1), "b": tokens(23, 2), "c": tokens(31, 3), "one": [7], "empty": []}
HEAD, QUESTION = tokens(5, 8), tokens(9, 9)


def ask(names, params=GREEDY, reuse="blend", head=HEAD, **options):
    prompt, spans = list(head), []
    for name in names:
        spans.append(Span(len(prompt), len(prompt) + len(DOCUMENTS[name]), reuse, name))
        prompt += DOCUMENTS[name]
    return Request([*prompt, *QUESTION], params, segments=tuple(spans), **options)


def deep(cache=tiny.CACHE, **options):
    """An engine over a model with layers after the check layer."""
    return tiny.engine(cache, model=DEEP, **options)


@pytest.fixture
def store():
    with Store(memory=1 << 24) as made:
        yield made


def engine(store, ratio=0.15, poison=False, cache=tiny.CACHE, **options):
    return deep(cache, poison=poison, documents=DocumentsConfig(store, ratio), **options)


def run(made, *requests, after=lambda made: None):
    out, reports = tiny.run(made, requests, after)
    names = sorted(out)
    return [out[name] for name in names], [reports[name] for name in names]


def plain(request, **options):
    return tiny.drain(deep(**options), [dataclasses.replace(request, segments=())])[0][0]


def test_the_first_request_computes_and_the_next_reuse_in_any_order(store):
    made = engine(store)
    (first,), (report,) = run(made, ask("ab"))
    assert first == plain(ask("ab"))
    assert [(d.name, d.source, d.tokens, d.tokens_reused) for d in report.documents] == [
        ("a", "computed", 40, 0),
        ("b", "computed", 23, 0),
    ]
    (_,), (report,) = run(made, ask("bac"))
    assert [(d.name, d.source) for d in report.documents] == [("b", "host"), ("a", "host"), ("c", "computed")]
    # A share of 0.15 of the 63 tokens that were there: ten, the first of each document among them.
    assert sum(d.tokens_recomputed for d in report.documents[:2]) == 10
    assert all(d.tokens_reused + d.tokens_recomputed == d.tokens for d in report.documents)
    assert report.documents[2].tokens_recomputed == 31
    (_,), (report,) = run(made, ask("c"))
    assert [d.source for d in report.documents] == ["host"]
    assert report.first_token_seconds > 0
    assert report.full_prefill_seconds > 0
    assert made.blocks.in_use == 0


def test_everything_recomputed_is_a_full_prefill_and_nothing_recomputed_is_not(store):
    requests = [ask("bac"), ask("cab"), ask("abc", dataclasses.replace(GREEDY, temperature=0.8, seed=4))]
    run(engine(store), ask("abc"))
    expected = [plain(one) for one in requests]
    got, reports = run(engine(store, 1.0, poison=True), *requests, after=tiny.poison_what_nobody_may_read)
    assert got == expected
    assert all(d.source == "host" and d.tokens_recomputed == d.tokens for r in reports for d in r.documents)
    reused, reports = run(engine(store, 0.0), *requests)
    assert reused != expected
    # The last token of the prompt is the question's, so no document's token has to be computed.
    assert all(d.tokens_recomputed == 0 for r in reports for d in r.documents)


def test_a_blended_request_does_not_depend_on_its_neighbours(store):
    requests = [ask(names) for names in ("ab", "bca", "c", "acb")]
    run(engine(store), ask("abc"))
    alone = [run(engine(store), one)[0][0] for one in requests]
    rng = np.random.default_rng(0)
    others = [Request(rng.integers(0, 97, 60).tolist(), GREEDY) for _ in range(4)]
    mixed = [one for pair in zip(requests, others, strict=True) for one in pair]
    made = engine(store, poison=True)
    got, _ = run(made, *mixed, after=tiny.poison_what_nobody_may_read)
    assert got[::2] == alone
    assert got[1::2] == [plain(one) for one in others]


def test_blended_blocks_are_found_by_nobody_and_a_clean_prefix_is_found_by_all(store):
    made = engine(store, 0.0)
    run(made, ask("abc"))
    run(made, ask("cba"))
    (got,), (report,) = run(made, ask("cba", reuse="never"))
    # Of the blended prompt only the head's one full block is clean, and the first request has that too.
    assert report.cached_tokens == 4
    run(made, ask("b", head=tokens(30, 50)))
    (_,), (report,) = run(made, ask("a", reuse="never", head=tokens(30, 50)))
    # What stands before the first document is clean, also where that is blended.
    assert report.cached_tokens == 28
    assert got == plain(ask("cba"))
    (got,), (report,) = run(made, ask("abc"))
    # The first request was computed whole, so its prefix is there, without loss.
    assert report.cached_tokens == (len(ask("abc").prompt) - 1) // 4 * 4
    assert [d.source for d in report.documents] == ["pool"] * 3
    assert got == plain(ask("abc"))
    (got,), (report,) = run(made, ask("ab", reuse="exact"))
    assert [d.source for d in report.documents] == ["pool", "pool"]
    assert got == plain(ask("ab"))


def test_a_found_prefix_and_blended_documents_behind_it_are_told_apart(store):
    made = engine(store)
    run(made, ask("abc"))
    (_,), (report,) = run(made, ask("acb"))
    # The head and the first document are in the pool but for the last tokens, whose block the second begins in.
    assert report.cached_tokens == 44
    assert [(d.source, d.tokens_reused, d.tokens_recomputed) for d in report.documents[:1]] == [("host", 39, 1)]
    assert [d.source for d in report.documents] == ["host"] * 3
    assert all(0 <= d.tokens_recomputed <= d.tokens for d in report.documents)
    assert sum(d.tokens_recomputed for d in report.documents) == -(-15 * (1 + 31 + 23) // 100)


def test_documents_of_any_length_and_twice(store):
    made = engine(store, 0.3)
    for names in (["one", "empty", "a"], ["a", "one", "a", "empty"], ["empty"], ["one"]):
        (out,), (report,) = run(made, ask(names))
        assert len(out) == 20
        assert [d.name for d in report.documents] == names
        assert all(d.tokens_reused + d.tokens_recomputed == d.tokens for d in report.documents)
    _, (report,) = run(made, ask(["b", "a", "one", "a"]))
    assert [d.source for d in report.documents] == ["computed", "host", "host", "host"]
    # Every order of every document: as many entries as documents, the empty one aside.
    run(made, *(ask([x, y]) for x in "abc" for y in "abc"))
    assert store.counters.puts == 4


def test_compaction_forks_and_giving_way_after_a_blend(store):
    run(engine(store), ask("abc"))
    long = dataclasses.replace(GREEDY, max_tokens=120)
    made = engine(store, compression=SMALL, poison=True)
    (alone,), (report,) = run(made, ask("bca", long), after=tiny.poison_what_nobody_may_read)
    # The prompt is compacted before the first of 119 tokens is written, and then every eight.
    assert report.compactions == 1 + 118 // 8
    assert report.blocks_now <= -(-(SMALL.budget + SMALL.interval) // 4)
    assert report.position == len(ask("bca").prompt) + 119
    made = engine(store, compression=SMALL, poison=True, cache=dataclasses.replace(tiny.CACHE, blocks=60))
    keep = CompressionConfig()
    requests = [ask("bca", long), *(ask(n, long, compression=keep) for n in ("ab", "ba", "cb"))]
    expected = [run(engine(store, compression=SMALL), one)[0][0] for one in requests]
    got, reports = run(made, *requests, after=tiny.poison_what_nobody_may_read)
    assert got == expected
    assert got[0] == alone
    assert sum(report.preemptions for report in reports) > 0
    warm = dataclasses.replace(long, temperature=0.9, n=3)
    got, _ = run(engine(store, poison=True), ask("cab", warm), after=tiny.poison_what_nobody_may_read)
    for choice in range(3):
        one = dataclasses.replace(warm, n=1, seed=choice)
        assert got[choice] == run(engine(store), ask("cab", one))[0][0]


def test_a_store_on_disk_serves_the_next_process_and_lost_files_are_computed_again(tmp_path, monkeypatch):
    with Store(tmp_path, disk=1 << 24) as store:
        run(engine(store), ask("abc"))
    with Store(tmp_path, disk=1 << 24) as store:
        made = engine(store, 1.0)
        (got,), (report,) = run(made, ask("cab"))
        assert [d.source for d in report.documents] == ["disk"] * 3
        assert got == plain(ask("cab"))
    with Store(tmp_path, disk=1 << 24) as store:
        made = engine(store, 1.0, poison=True)
        # A slow disk: the damage in one file is found long before the others have been read.
        read = disk.OpenFile.read_layer
        monkeypatch.setattr(disk.OpenFile, "read_layer", lambda *args: time.sleep(0.05) or read(*args))
        for path in tmp_path.rglob("*.safetensors"):
            # The tail of the last layer: found damaged when the blend is nearly done.
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(bytes(data))
        (got,), (report,) = run(made, ask("bca"), after=tiny.poison_what_nobody_may_read)
        assert got == plain(ask("bca"))
        assert {d.source for d in report.documents} == {"computed"}
        # And all stored again, behind the one prompt that found the damage.
        assert store.counters.corrupt_files == 3
        (_,), (report,) = run(made, ask("acb"))
        assert {d.source for d in report.documents} <= {"host", "disk", "pool"}


def test_other_salts_and_other_preparations_find_nothing(store):
    made = engine(store)
    run(made, ask("ab", salt="x"))
    _, (report,) = run(made, ask("ba"))
    assert [d.source for d in report.documents] == ["computed"] * 2
    behind = deep(documents=DocumentsConfig(store, before=(3,)))
    _, (report,) = run(behind, ask("ab"))
    assert [d.source for d in report.documents] == ["computed"] * 2
    _, (report,) = run(behind, ask("ba"))
    assert [d.source for d in report.documents] == ["host"] * 2


def test_documents_prepared_behind_a_token_are_exact_behind_that_token(store):
    made = deep(documents=DocumentsConfig(store, 0.0, before=(3,)))
    run(made, ask("ab"))
    (got,), (report,) = run(made, ask("a", head=[3]))
    assert got == plain(ask("a", head=[3]))
    assert [(d.source, d.tokens_recomputed) for d in report.documents] == [("host", 0)]


def test_auto_blends_or_prefills_by_what_is_predicted(store):
    run(engine(store), ask("abc"))
    made = engine(store, "auto")
    speeds = made.documents.speeds
    assert speeds.token_seconds > 0
    _, (report,) = run(made, ask("cab"))
    assert {d.source for d in report.documents} == {"host"} or all(d.tokens_reused == 0 for d in report.documents)
    # Putting cached tokens back that takes longer than computing them.
    made.documents.speeds = dataclasses.replace(speeds, restore_seconds=100 * speeds.token_seconds)
    (got,), (report,) = run(made, ask("bca"))
    assert {d.source for d in report.documents} == {"computed"}
    assert got == plain(ask("bca"))


def test_nothing_compiles_after_warmup(store):
    made = engine(store, compression=SMALL, cache=dataclasses.replace(tiny.CACHE, blocks=190, prefill_rows=2))
    _, compiled = tiny.counted(lambda: run(made, *(ask(n) for n in ("ab", "bac", "c", "cab", ["one"]))))
    assert compiled == 0


def test_what_cannot_be_is_refused(store):
    with pytest.raises(RequestError, match="the engine has no store"):
        deep().add(ask("a"))
    made = engine(store)
    for spans, message in (
        ((Span(3, 9), Span(5, 12)), "a segment from token 5 to 12 does not follow the one before, which ends at 9"),
        ((Span(0, 99),), "a segment from token 0 to 99 .* within the prompt's 54 tokens"),
    ):
        with pytest.raises(RequestError, match=message):
            made.add(dataclasses.replace(ask("a"), segments=spans))
    with pytest.raises(RequestError, match="method='h2o' gathers the queries of the whole prompt"):
        engine(store, compression=dataclasses.replace(SMALL, method="h2o")).add(ask("a"))
    with pytest.raises(ValueError, match=r"recompute ratio=1.5 must be from 0 to 1, or auto"):
        DocumentsConfig(store, 1.5)
    with pytest.raises(ValueError, match="reuse='always' is unknown"):
        Span(0, 1, "always")
    first = made.add(ask("a", keep=True))
    while made.has_work:
        made.step()
    with pytest.raises(RequestError, match="a request that continues has none"):
        made.add(ask("a", continue_from=first))
