"""The disk tier: its cap, what goes first, what may not go, a full disk, and what it leaves alone."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import store_cases as cases

from jaxkv.store import Store, disk, folder
from jaxkv.store.admin import Admin
from jaxkv.store.lock import FILE, FolderLock

ROOT = Path(__file__).resolve().parents[1]
SIZE = cases.FILE_BYTES


def put(store, *numbers):
    return [store.put(*cases.piece(number), wait=True) for number in numbers]


def there(path, *numbers):
    return [cases.path(path, number).is_file() for number in numbers]


def test_files_are_found_again_and_count(tmp_path):
    with Store(tmp_path, disk=4 * SIZE) as store:
        assert put(store, 0, 1, 2, 3) == [True] * 4
    with Store(tmp_path, disk=4 * SIZE) as store:
        assert store.lookup([cases.key(n) for n in range(5)]) == ["disk"] * 4 + [None]
        assert put(store, 4) == [True]
        assert there(tmp_path, 0, 1, 2, 3, 4) == [False, True, True, True, True]
        assert store.counters.disk_evicted_bytes == SIZE
        assert cases.bytes_now(tmp_path) == 4 * SIZE


def test_a_use_in_either_process_saves_a_file(tmp_path):
    with Store(tmp_path, disk=3 * SIZE) as one, Store(tmp_path, disk=3 * SIZE) as two:
        put(one, 0, 1, 2)
        assert cases.same(two.get(cases.key(0)), 0)
        put(one, 3)
        assert there(tmp_path, 0, 1, 2, 3) == [True, False, True, True]
        assert cases.same(one.get(cases.key(2)), 2)
        put(two, 4)
        assert there(tmp_path, 0, 2, 3, 4) == [False, True, True, True]


def test_a_use_from_memory_saves_the_file(tmp_path):
    with Store(tmp_path, memory=1 << 20, disk=3 * SIZE) as store:
        put(store, 0, 1, 2)
        assert store.get(cases.key(0)) and store.counters.memory_hit_tokens
        put(store, 3)
        assert there(tmp_path, 0, 1, 2, 3) == [True, False, True, True]


def test_a_smaller_cap_is_kept_from_the_start(tmp_path):
    with Store(tmp_path, disk=9 * SIZE) as store:
        put(store, *range(6))
    with Store(tmp_path, disk=2 * SIZE):
        assert there(tmp_path, *range(6)) == [False] * 4 + [True] * 2


def test_a_piece_larger_than_the_cap_evicts_nothing(tmp_path):
    with Store(tmp_path, disk=SIZE) as store:
        put(store, 0)
    with Store(tmp_path, memory=1 << 20, disk=SIZE - 1 + SIZE) as store:
        key, arrays = cases.piece(1)
        large = {name: array.repeat(3, axis=1) for name, array in arrays.items()}
        assert store.put(key, large, wait=True)
        assert store.lookup([key, cases.key(0)]) == ["memory", "disk"]
        assert store.counters.refused_puts == 1


def test_when_all_is_leased_a_put_is_refused_at_once(tmp_path):
    with Store(tmp_path, disk=2 * SIZE) as store:
        put(store, 0, 1)
        with store.lease([cases.key(0), cases.key(1)]) as views:
            begin = time.monotonic()
            assert put(store, 2) == [False]
            assert time.monotonic() - begin < 1
            assert store.counters.refused_puts == 1
            assert all(cases.same(view.arrays(), n) for n, view in enumerate(views))
        assert put(store, 2) == [True]
        assert there(tmp_path, 0, 1, 2).count(True) == 2


def test_a_lease_of_another_process_counts_and_ends_with_it(tmp_path):
    with Store(tmp_path, disk=2 * SIZE) as store:
        put(store, 0, 1)
        with start("hold", tmp_path, 2 * SIZE, 0, 1) as other:
            assert other.stdout.readline() == "held\n"
            assert put(store, 2) == [False]
            other.kill()
            other.wait()
        assert put(store, 2) == [True]


def start(action, folder, *numbers):
    command = [sys.executable, str(ROOT / "tests/store_program.py"), action, str(folder), *map(str, numbers)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def test_files_removed_by_hand_make_room(tmp_path):
    with Store(tmp_path, disk=2 * SIZE) as store:
        put(store, 0, 1)
        with store.lease([cases.key(1)]):
            cases.path(tmp_path, 0).unlink()
            assert put(store, 2) == [True]
        assert there(tmp_path, 0, 1, 2) == [False, True, True]
        assert store.counters.disk_evicted_bytes == 0


def test_parts_of_living_writers_count_and_those_of_dead_ones_go(tmp_path):
    with Store(tmp_path, disk=3 * SIZE) as store:
        put(store, 0)
        living, part = store._disk.folder.create_part(bytes(32), 2 * SIZE)
        (tmp_path / "parts" / f"{'ab' * 32}.{'0' * 16}").write_bytes(bytes(5 * SIZE))
        assert cases.bytes_now(tmp_path) > 3 * SIZE
        assert put(store, 1) == [True]
        assert there(tmp_path, 0, 1) == [False, True]
        assert [path.name for path in (tmp_path / "parts").iterdir()] == [part]
        os.close(living)
    with Store(tmp_path, disk=3 * SIZE):
        assert not list((tmp_path / "parts").iterdir())


def test_two_writers_of_one_key_leave_one_file(tmp_path, monkeypatch):
    both, sync = threading.Barrier(2), os.fsync

    def fsync(file):
        # Neither file has its name before both are written.
        if os.fstat(file).st_size == SIZE:
            both.wait(30)
        sync(file)

    with Store(tmp_path, disk=9 * SIZE) as one, Store(tmp_path, disk=9 * SIZE) as two:
        monkeypatch.setattr(os, "fsync", fsync)
        threads = [threading.Thread(target=put, args=(store, 0)) for store in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert cases.same(one.get(cases.key(0)), 0) and cases.same(two.get(cases.key(0)), 0)
        assert cases.bytes_now(tmp_path) == SIZE


def test_a_full_queue_refuses_and_does_not_wait(tmp_path, monkeypatch):
    gate, write = threading.Event(), disk.DiskTier.write
    monkeypatch.setattr(disk.DiskTier, "write", lambda *args: gate.wait(30) and write(*args))
    with Store(tmp_path, disk=9 * SIZE, queue=2 * cases.NBYTES) as store:
        assert [store.put(*cases.piece(n)) for n in range(3)] == [True, True, False]
        # What waits can be had already.
        assert store.lookup([cases.key(n) for n in range(3)]) == ["memory", "memory", None]
        assert cases.same(store.get(cases.key(1)), 1)
        assert not cases.files(tmp_path)
        # Nor is it refused or queued again.
        assert store.put(*cases.piece(0))
        gate.set()
        store.flush()
        assert there(tmp_path, 0, 1, 2) == [True, True, False]
        assert store.lookup([cases.key(0)]) == ["disk"]
        assert store.counters.refused_puts == 1


def test_a_fault_of_the_writer_is_not_lost(tmp_path, monkeypatch):
    def write(*_):
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(disk.DiskTier, "write", write)
    store = Store(tmp_path, disk=SIZE)
    store.put(*cases.piece(0))
    with pytest.raises(ZeroDivisionError):
        store.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename", "ftruncate", "mkdir"])
def test_a_full_disk_turns_writes_off_and_keeps_reads_on(tmp_path, monkeypatch, call, code):
    with Store(tmp_path, disk=9 * SIZE) as store:
        put(store, 0)
        real = getattr(os, call)

        def full(*args, **options):
            if call == "pwrite" and len(args[1]) > 100:
                real(args[0], args[1][:50], args[2])
            raise OSError(code, "no room")

        monkeypatch.setattr(os, call, full)
        assert put(store, 1) == [False]
        monkeypatch.undo()
        assert "no room" in store.writes_off
        assert put(store, 2) == [False]
        assert store.counters.refused_puts == 2
        assert cases.same(store.get(cases.key(0)), 0)
        assert there(tmp_path, 0, 1, 2) == [True, False, False]
        assert not list((tmp_path / "parts").glob("*"))
    with Store(tmp_path, disk=9 * SIZE) as store:
        assert put(store, 1) == [True]


def test_a_small_file_system_fills_up(tmp_path):
    # A file system of the test's own, in a name space of its own: 64 KiB for files of 2 KiB, which take 4 there.
    program = f"{sys.executable} {ROOT / 'tests/store_program.py'}"
    script = (
        f"mount -t tmpfs -o size=64k tmpfs {tmp_path} && {program} put {tmp_path} {1 << 30} 0 40"
        f" && {program} get {tmp_path} {1 << 30} 0 40"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    wrote, read = map(cases.loads, done.stdout.splitlines())
    assert 5 <= wrote["stored"] < 20
    assert wrote["refused_puts"] == 40 - wrote["stored"]
    assert read["right"] == wrote["stored"]
    assert read["corrupt_files"] == 0


def test_a_folder_without_write_permission_is_read(tmp_path, monkeypatch):
    with Store(tmp_path, disk=9 * SIZE) as store:
        put(store, 0)
    opened = os.open

    def denied(path, flags, *args, **options):
        if flags & (os.O_RDWR | os.O_CREAT):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", denied)
    with Store(tmp_path, disk=SIZE // 2) as store:
        assert "Permission denied" in store.writes_off
        assert cases.same(store.get(cases.key(0)), 0)
        assert put(store, 1) == [False]
    assert there(tmp_path, 0) == [True]


def test_a_lock_that_others_hold_refuses_a_put_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxkv.store.lock._PATIENCE", 0.05)
    with Store(tmp_path, disk=9 * SIZE) as store:
        put(store, 0)
        root = os.open(tmp_path, os.O_RDONLY)
        other = FolderLock(root, writable=True)
        with other.hold():
            assert put(store, 1) == [False]
            # Reading takes no lock.
            assert cases.same(store.get(cases.key(0)), 0)
        assert put(store, 1) == [True]
        other.close()
        os.close(root)


@pytest.mark.parametrize("change", ["removed", "emptied", "replaced"])
def test_a_lost_lock_file_loses_nothing(tmp_path, change):
    with Store(tmp_path, disk=3 * SIZE) as one:
        put(one, 0)
        if change == "emptied":
            (tmp_path / FILE).write_bytes(b"")
        else:
            (tmp_path / FILE).unlink()
        if change == "replaced":
            (tmp_path / FILE).write_bytes(bytes(4096))
        # It locks what is there now, and so must the first store.
        with Store(tmp_path, disk=3 * SIZE) as two:
            put(two, 1)
            put(one, 2)
            put(two, 3)
            put(one, 4)
            assert there(tmp_path, 0, 1, 2, 3, 4) == [False, False, True, True, True]


def test_a_store_in_the_place_of_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(OSError, match="file"):
        Store(tmp_path / "file", disk=SIZE)
    with pytest.raises(OSError, match="nowhere"):
        Admin(tmp_path / "nowhere")
    assert folder.Folder(tmp_path, create=False).path == tmp_path
