"""Several processes and many threads on one store, and processes that are killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import store_cases as cases

from jaxkv.store import Store

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import store_crash

ROOT = Path(__file__).resolve().parents[1]
SIZE = cases.FILE_BYTES


def start(action, folder, *numbers, seed="random"):
    """Start a process of store_program on a folder."""
    command = [sys.executable, str(ROOT / "tests/store_program.py"), action, str(folder), *map(str, numbers)]
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": str(seed)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def reports(processes):
    """Return what processes printed, all of which must end well."""
    out = [cases.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return out


def watched(folder, processes):
    """Return the bytes in a folder each time that it was looked at while processes ran."""
    seen = []
    while any(process.poll() is None for process in processes):
        if (folder / ".jaxkv-store").exists():
            seen.append(cases.bytes_now(folder))
        time.sleep(0.01)
    return seen


def test_another_process_with_another_hash_seed_finds_everything(tmp_path):
    (wrote,) = reports([start("put", tmp_path, 1 << 30, 0, 50, seed=1)])
    (read,) = reports([start("get", tmp_path, 1 << 30, 0, 50, seed=2)])
    assert wrote["hash"] != read["hash"]
    assert (wrote["stored"], read["right"], read["miss_tokens"]) == (50, 50, 0)
    assert read["disk_hit_tokens"] == 50 * cases.TOKENS
    # A process that only reads and writes KV need not load JAX.
    assert not wrote["jax"]


def test_eight_writers_keep_one_cap_with_files_already_there(tmp_path):
    cap = 20 * SIZE + SIZE // 2
    with Store(tmp_path, disk=cap) as store:
        assert all(store.put(*cases.piece(number), wait=True) for number in range(1000, 1030))
    # Half of what each writes, others write too.
    writers = [start("put", tmp_path, cap, 20 * n, 40) for n in range(8)]
    seen = watched(tmp_path, writers)
    done = reports(writers)
    assert len(seen) > 3 and max(seen) <= cap
    assert cases.bytes_now(tmp_path) == 20 * SIZE
    assert not list((tmp_path / "parts").iterdir())
    # At most 8 parts are under way, so there is always something to evict.
    assert sum(report["refused_puts"] for report in done) == 0
    assert all(report["stored"] == 40 for report in done)
    assert sum(report["corrupt_files"] + report["foreign_files"] for report in done) == 0
    (read,) = reports([start("get", tmp_path, cap, 0, 200)])
    assert read["right"] == 20


def test_two_processes_put_get_and_evict_for_ten_seconds(tmp_path):
    cap = 15 * SIZE
    workers = [start("churn", tmp_path, cap, seed, 10) for seed in (1, 2)]
    seen = watched(tmp_path, workers)
    done = reports(workers)
    assert max(seen) <= cap
    for report in done:
        assert report["done"] > 50
        assert report["wrong"] == report["corrupt_files"] == report["foreign_files"] == 0
        assert min(report["disk_evicted_bytes"], report["disk_hit_tokens"], report["miss_tokens"]) > 0


@pytest.mark.parametrize("memory", [0, 10 * cases.NBYTES])
def test_a_hundred_threads_look_up_while_others_put(tmp_path, memory):
    begin, faults = threading.Barrier(101), []

    def ask(store, number):
        begin.wait(60)
        for turn in range(5):
            keys = [cases.key((number + turn + other) % 40) for other in range(3)]
            tiers = store.lookup(keys)
            found = store.get(keys[0])
            if len(tiers) != 3 or (found is not None and not cases.same(found, (number + turn) % 40)):
                faults.append((number, turn))
            with store.lease(keys) as views:
                for view in views:
                    if view is not None:
                        view.arrays()

    def guarded(store, number):
        try:
            ask(store, number)
        except BaseException as error:
            faults.append(error)

    with Store(tmp_path, memory=memory, disk=30 * SIZE) as store:
        for number in range(20):
            store.put(*cases.piece(number))
        store.flush()
        threads = [threading.Thread(target=guarded, args=(store, number)) for number in range(100)]
        for thread in threads:
            thread.start()
        begin.wait(60)
        for number in range(20, 40):
            store.put(*cases.piece(number), wait=number % 2 == 0)
        for thread in threads:
            thread.join(60)
        assert not faults
    counters = store.counters
    assert counters.corrupt_files == 0
    assert counters.lookups == 100 * 5 * 7
    # Every token that was asked for was a hit or a miss, and never both.
    answered = counters.memory_hit_tokens + counters.disk_hit_tokens + counters.miss_tokens
    assert answered == 100 * 5 * 4 * cases.TOKENS
    assert counters.disk_hit_tokens > 0
    assert counters.memory_hit_tokens > 0 or not memory
    assert store._pinned == 0


def test_a_store_does_not_follow_a_fork(tmp_path):
    with Store(tmp_path, disk=1 << 30) as store:
        store._process += 1
        with pytest.raises(RuntimeError, match="threads do not fork"):
            store.put(*cases.piece(0))
        store._process -= 1


def test_fifty_deaths_in_the_middle_of_puts_leave_no_damage(tmp_path):
    outcome = store_crash.timed(tmp_path, 50)
    assert outcome.kills == 50
    assert outcome.midway > 0
    assert outcome.faults == 0, outcome


def test_a_death_before_any_system_call_of_a_put_leaves_no_damage(tmp_path):
    outcome = store_crash.stepped(tmp_path)
    # Opening, locking, evicting, writing, syncing, naming: each of them was a death.
    assert outcome.kills > 20
    assert outcome.midway > 5
    assert outcome.faults == 0, outcome


@pytest.mark.parametrize("broken", ["torn", "lost", "wrong", "left behind", "over the cap"])
def test_the_look_at_what_a_death_left_sees_damage(tmp_path, broken):
    with Store(tmp_path, disk=1 << 30) as store:
        for number in range(30 if broken == "over the cap" else 2):
            assert store.put(*store_crash.piece(number), wait=True)
        if broken == "wrong":
            assert store.put(store_crash.piece(2)[0], store_crash.piece(3)[1], wait=True)
    key = store_crash.piece(1)[0]
    file = tmp_path / key.name[:2] / f"{key.name}.safetensors"
    if broken == "torn":
        os.truncate(file, file.stat().st_size - 1)
    if broken == "lost":
        file.unlink()
    if broken == "left behind":
        (tmp_path / "parts" / "unknown").touch()
    outcome = store_crash.Outcome()
    if broken == "over the cap":
        # Opening the store would bring it under the cap; so would it a fault that this is to find.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jaxkv.store.disk.DiskTier._trim", lambda self: None)
            store_crash.check(tmp_path, [0, 1], range(4), outcome)
    else:
        store_crash.check(tmp_path, [0, 1], range(4), outcome)
    assert outcome.faults > 0
