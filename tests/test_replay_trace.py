"""Replaying a trace: a trace computed by hand, a plain simulation, and an exhaustive search for the best there is."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import replay_trace


def line(at: float, ids: list[int]) -> str:
    return json.dumps({"chat_id": 0, "parent_chat_id": -1, "timestamp": at, "hash_ids": ids, "turn": 1})


def test_a_block_is_what_it_holds_and_all_before_it_and_requests_are_in_order_of_time():
    # The ids of the trace name contents: 7 after 5 and 7 after 6 are two blocks.
    requests = replay_trace.read([line(2, [6, 7]), "\n", line(1, [5, 7]), line(3, [5, 7, 5])])
    assert requests == [[0, 1], [2, 3], [0, 1, 4]]


# Four prompts: A B C | A D | A B C | A D, with room for three blocks.
HAND = [[0, 1, 2], [0, 3], [0, 1, 2], [0, 3]]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        # ABC; A hits, D takes C's place: ABD; A and B hit, C takes D's: ABC; A hits.
        ("lru", 0 + 1 + 2 + 1),
        # The same: C goes before A and B, which came with it, and D before them, since request 3 itself uses them.
        ("fifo", 0 + 1 + 2 + 1),
        # Counts A 2, B 1, D 1 after request 2, as under LRU.
        ("lfu", 0 + 1 + 2 + 1),
        # D is not taken in at request 2: C is needed sooner.
        ("belady", 0 + 1 + 3 + 1),
    ],
)
def test_a_trace_computed_by_hand(policy, expected):
    assert replay_trace.hits(HAND, 3, policy) == expected


def test_policies_differ_where_they_should():
    # X Y X Z X, room for two: FIFO puts the oldest, X, out for Z and misses the last X.
    requests = [[0], [1], [0], [2], [0]]
    assert [replay_trace.hits(requests, 2, policy) for policy in replay_trace.POLICIES] == [2, 1, 2, 2]
    # X X Y Z X, room for two: LRU puts X out for Z, LFU keeps it since it was used twice.
    requests = [[0], [0], [1], [2], [0]]
    assert [replay_trace.hits(requests, 2, policy) for policy in replay_trace.POLICIES] == [1, 1, 2, 2]
    assert replay_trace.hits(requests, 0, "belady") == replay_trace.hits(requests, 0, "lru") == 0


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=7)


def blocks_of(prompts: list[list[int]]) -> list[list[int]]:
    return replay_trace.read([line(at, ids) for at, ids in enumerate(prompts)])


def best(requests: list[list[int]], capacity: int) -> int:
    """Return the most hits of any cache: all choices of what to keep after each request."""
    states = {frozenset[int](): 0}
    for blocks in requests:
        after: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            hits += sum(1 for _ in itertools.takewhile(held.__contains__, blocks))
            there = held | set(blocks)
            for kept in itertools.combinations(there, min(capacity, len(there))):
                after[frozenset(kept)] = max(hits, after.get(frozenset(kept), 0))
        states = after
    return max(states.values())


@given(prompts, st.integers(1, 4))
def test_belady_is_the_best_there_is(prompts, capacity):
    requests = blocks_of(prompts)
    most = replay_trace.hits(requests, capacity, "belady")
    assert most == best(requests, capacity)
    for policy in ("lru", "fifo", "lfu"):
        assert replay_trace.hits(requests, capacity, policy) <= most


@given(prompts, st.integers(1, 5))
def test_lru_is_a_list_in_order_of_use(prompts, capacity):
    requests, cached, hits = blocks_of(prompts), [], 0
    for blocks in requests:
        hits += sum(1 for _ in itertools.takewhile(cached.__contains__, blocks))
        others = [block for block in cached if block not in blocks]
        room = max(0, capacity - len(blocks))
        # Most recently used first; of one prompt the earlier blocks count as more recent.
        held = [b for b in blocks if b in cached]
        new = [b for b in blocks if b not in cached][: max(0, capacity - len(held))]
        kept = [b for b in blocks if b in held or b in new]
        cached = (kept + others[: max(room, capacity - len(kept))])[:capacity]
    assert replay_trace.hits(requests, capacity, "lru") == hits


@given(prompts)
def test_a_cache_that_holds_all_reaches_the_ideal(prompts):
    requests = blocks_of(prompts)
    seen, ideal = set(), 0
    for blocks in requests:
        ideal += len(seen & set(blocks))
        seen |= set(blocks)
    for policy in replay_trace.POLICIES:
        assert replay_trace.hits(requests, len(seen), policy) == ideal
    assert sum(replay_trace.reuses(requests)) == ideal


def test_how_few_blocks_serve_most_hits():
    reuse = [60, 17, 10, 5, 5, 3, 0, 0, 0, 0]
    assert replay_trace.served_by(reuse, 0.1) == 0.6
    assert replay_trace.served_by(reuse, 0.2) == 0.77
    assert replay_trace.serving(reuse, 0.77) == 0.2
    assert replay_trace.serving(reuse, 0.78) == 0.3
    assert replay_trace.serving([0, 0], 0.77) == 0


def test_the_script_replays_a_trace_that_it_made(tmp_path, capsys):
    file = tmp_path / "trace.jsonl"
    assert replay_trace.main(["--synthetic", "300", "--write", str(file), "--json", "--sizes", "5%", "100%"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert replay_trace.main([str(file), "--json", "--sizes", "5%", "100%"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == made
    requests = [json.loads(text) for text in file.read_text().splitlines()]
    assert report["requests"] == 300
    assert report["blocks_asked"] == sum(len(request["hash_ids"]) for request in requests)
    small, whole = report["hit_rates"]
    assert {whole[policy] for policy in replay_trace.POLICIES} == {report["ideal_hit_rate"]}
    assert 0 < small["lru"] <= small["belady"] < report["ideal_hit_rate"]
    # A later turn begins with what its parent's prompt was.
    by_chat = {request["chat_id"]: request for request in requests}
    later = [request for request in requests if request["turn"] > 1]
    assert later
    for request in later:
        before = by_chat[request["parent_chat_id"]]["hash_ids"]
        assert request["hash_ids"][: len(before)] == before
    assert replay_trace.main([str(file)]) == 0
    assert "ideal hit rate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "one of them"),
        (["--synthetic", "0"], "at least 1"),
        (["--synthetic", "5", "--sizes", "none"], "5% of all distinct blocks"),
        (["--synthetic", "5", "--sizes", "0"], "5% of all distinct blocks"),
        (["trace.jsonl", "--write", "x"], "--synthetic"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        replay_trace._run(replay_trace.parser().parse_args(args))
    assert not list(tmp_path.iterdir())


def test_the_command_says_it_in_a_line(tmp_path):
    command = [sys.executable, replay_trace.__file__, str(tmp_path / "nowhere.jsonl")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nowhere.jsonl" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"timestamp": 1, "hash_ids": ["a"]}'])
def test_a_line_that_is_no_request_is_named(text):
    with pytest.raises(ValueError, match="line 2 "):
        replay_trace.read([line(0, [1]), text])
