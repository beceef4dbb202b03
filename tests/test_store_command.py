"""``python -m jaxkv.store``: what it says, what it removes, and what it refuses."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import store_cases as cases

from jaxkv.store import Key, Store, __main__
from jaxkv.store.admin import Admin

SIZE = cases.FILE_BYTES
OTHER = bytes(32)


@pytest.fixture
def folder(tmp_path):
    """Give a store of pieces 0 to 2, one of another fingerprint, and a block of a prefix."""
    path = tmp_path / "store"
    with Store(path, disk=1 << 30) as store:
        for number in range(3):
            assert store.put(*cases.piece(number), wait=True)
        assert store.put(*cases.piece(3, root=OTHER), wait=True)
        assert store.put(BLOCK, {"k": np.zeros((2, 5), np.uint8)}, wait=True)
    return path


BLOCK = Key.prefix(OTHER, range(16), 16)[0]


def run(capsys, *args):
    """Return exit code, stdout and stderr of a command."""
    code = __main__.main([str(arg) for arg in args])
    return code, *capsys.readouterr()


def report(capsys, *args, code=0):
    """Return the JSON object that a command prints."""
    got, out, err = run(capsys, *args, "--json")
    assert (got, err, out.count("\n")) == (code, "", 1)
    return json.loads(out)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_shows_every_file(folder, capsys):
    code, out, err = run(capsys, "ls", folder, "--json")
    assert (code, err) == (0, "")
    items = {item["key"]: item for item in map(json.loads, out.splitlines())}
    assert len(items) == 5
    assert items[cases.key(1).name] | {"used": 0} == {
        "key": cases.key(1).name,
        "bytes": SIZE,
        "used": 0,
        "space": "content",
        "tokens": cases.TOKENS,
        "fingerprint": cases.ROOT.hex(),
        "arrays": {name: {"dtype": "F32", "shape": list(cases.SHAPE)} for name in ("k", "v")},
        "damage": None,
    }
    assert items[BLOCK.name]["space"] == "prefix" and items[BLOCK.name]["tokens"] == 16
    assert items[BLOCK.name]["used"] == cases_time(folder, BLOCK)
    lines = run(capsys, "ls", folder)[1].splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(items)
    assert "2.0 KiB" in next(line for line in lines if line.startswith(cases.key(1).name))


def cases_time(folder, key):
    return (folder / key.name[:2] / f"{key.name}.safetensors").stat().st_mtime_ns / 1e9


def test_stat_adds_up(folder, capsys):
    shard = folder / cases.key(0).name[:2]
    (shard / "foreign").touch()
    # The name of a key that belongs elsewhere.
    (shard / f"{'0' * 64}.safetensors").write_bytes(cases.path(folder, 0).read_bytes())
    cases.path(folder, 2).write_bytes(b"torn")
    found = report(capsys, "stat", folder)
    assert (found["files"], found["damaged_headers"], found["foreign"]) == (5, 1, 2)
    assert found["bytes"] == sum(path.stat().st_size for path in cases.files(folder)) - SIZE
    assert (found["content_tokens"], found["prefix_tokens"]) == (3 * cases.TOKENS, 16)
    assert found["fingerprints"][cases.ROOT.hex()] == {"files": 2, "bytes": 2 * SIZE, "tokens": 2 * cases.TOKENS}
    assert "5 files" in run(capsys, "stat", folder)[1]


def test_verify_finds_damage_and_removes_it_when_told(folder, capsys):
    assert report(capsys, "verify", folder) == {"folder": str(folder), "files": 5, "damaged": 0, "removed": 0}
    flip(cases.path(folder, 0))
    cases.path(folder, 1).write_bytes(b"torn")
    cases.path(folder, 2).replace(folder / "kept")
    (folder / "kept").replace(cases.path(folder, 2).with_name(cases.path(folder, 2).name[:-13] + "0.safetensors"))
    assert report(capsys, "verify", folder, code=1)["damaged"] == 3
    code, out, _ = run(capsys, "verify", folder)
    assert code == 1
    assert f"{cases.key(0).name}  layer 2 was changed" in out
    assert f"the file is of key {cases.key(2).name}" in out
    assert len(cases.files(folder)) == 5
    assert report(capsys, "verify", folder, "--remove", code=1)["removed"] == 3
    assert len(cases.files(folder)) == 2
    assert report(capsys, "verify", folder)["files"] == 2


def test_gc_removes_what_dead_writers_left_and_the_oldest_files(folder, capsys):
    dead, living = (folder / "parts" / f"{'ab' * 32}.{i:016x}" for i in range(2))
    dead.write_bytes(bytes(100))
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = report(capsys, "gc", folder)
        assert (found["parts"], found["files"], found["evicted_bytes"]) == (1, 0, 0)
        assert (dead.exists(), living.exists()) == (False, True)
    with Store(folder, disk=1 << 30) as store, store.lease([cases.key(1)]):
        before = sum(path.stat().st_size for path in cases.files(folder))
        found = report(capsys, "gc", folder, "--disk", "2.5K")
    assert found["evicted_bytes"] == before - found["bytes"]
    # Piece 1 is leased; the block is newer than the others, and fits.
    assert {path.stem for path in cases.files(folder)} == {cases.key(1).name, BLOCK.name}
    assert found["files"] == 3
    assert "left" in run(capsys, "gc", folder)[1]


def test_rm_removes_by_key_by_fingerprint_and_all(folder, capsys):
    assert report(capsys, "rm", folder, cases.key(0).name, cases.key(1).name[:8])["files"] == 2
    assert not cases.path(folder, 0).exists() and not cases.path(folder, 1).exists()
    assert report(capsys, "rm", folder, "--fingerprint", OTHER.hex())["files"] == 2
    assert [path.stem for path in cases.files(folder)] == [cases.key(2).name]
    assert report(capsys, "rm", folder, "--all") == {"folder": str(folder), "files": 1, "bytes": SIZE}
    assert not cases.files(folder)


def test_a_store_in_use_notices_what_was_removed(folder, capsys):
    with Store(folder, disk=1 << 30) as store:
        assert store.lookup([cases.key(0)]) == ["disk"]
        run(capsys, "rm", folder, "--all")
        assert store.lookup([cases.key(0)]) == [None]
        assert store.put(*cases.piece(0), wait=True)
        assert store.lookup([cases.key(0)]) == ["disk"]
        assert store._disk._index.total == SIZE


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["rm"], "one of them"),
        (["rm", "00000000", "--all"], "one of them"),
        (["rm", "../../../../etc/passwd"], "hexadecimal"),
        (["rm", "abc"], "hexadecimal"),
        (["rm", "--fingerprint", "*"], "hexadecimal"),
        (["rm", "00000000"], "0 keys"),
        (["rm", "--fingerprint", "11111111"], "0 keys"),
        (["gc", "--disk", "much"], "memory size"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(folder, capsys, args, message):
    code, out, err = run(capsys, args[0], folder, *args[1:])
    assert (code, out) == (2, "")
    assert message in err and err.startswith("error: ") and err.count("\n") == 1
    assert len(cases.files(folder)) == 5


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc", "rm"])
def test_a_folder_that_is_no_store_is_left_as_it_is(tmp_path, capsys, command):
    (tmp_path / "ab").mkdir()
    more = ["--all"] if command == "rm" else []
    code, _, err = run(capsys, command, tmp_path, *more)
    assert code == 2 and "is no store" in err
    assert [path.name for path in tmp_path.iterdir()] == ["ab"]
    code, _, err = run(capsys, command, tmp_path / "nowhere", *more)
    assert code == 2 and "nowhere" in err
    assert not (tmp_path / "nowhere").exists()


def test_unknown_words_are_usage_errors(folder, capsys):
    for args in ([], ["list", str(folder)], ["ls"], ["verify", str(folder), "--rem"]):
        with pytest.raises(SystemExit) as exit_:
            __main__.main(args)
        assert exit_.value.code == 2
    assert "usage: python -m jaxkv.store" in capsys.readouterr().err


def test_looking_takes_no_lock_and_changes_nothing(folder, capsys):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with (folder / ".jaxkv-store").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for command in ("ls", "stat", "verify"):
            assert run(capsys, command, folder)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_file_replaced_after_it_was_looked_at_is_not_removed(folder, monkeypatch):
    good = cases.path(folder, 0).read_bytes()
    flip(cases.path(folder, 0))
    with Admin(folder) as admin:
        discard = admin._index.discard

        def replaced_first(digest, inode):
            (folder / "new").write_bytes(good)
            (folder / "new").replace(cases.path(folder, 0))
            return discard(digest, inode)

        monkeypatch.setattr(admin._index, "discard", replaced_first)
        assert sum(item.damage is not None for item in admin.verify(remove=True)) == 1
    assert cases.path(folder, 0).read_bytes() == good


def test_control_c_ends_a_real_process(folder):
    root = Path(__file__).resolve().parents[1]
    program = (
        "import signal, sys, time; from jaxkv.store import __main__, disk;"
        # A shell that started the tests in the background has it ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "disk.OpenFile.check = lambda *_: (print('reading', flush=True), time.sleep(60));"
        f"sys.exit(__main__.main(['verify', {str(folder)!r}]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == "\ninterrupted\n"
    assert process.returncode == 130


def test_the_module_runs(folder):
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "jaxkv.store", "stat", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == 5
