"""The device check: all of it at toy sizes, wrong kernels that it has to notice, and what it makes of numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import device_cases
import device_table
import device_timing
from device_timing import Report, Times

ROOT = Path(__file__).resolve().parents[1]


def test_dry_run(tmp_path):
    file = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "scripts" / "device_check.py"), "--dry-run", "--out", str(file)]
    # Nothing here is timed, so the compiler need not try.
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    found = json.loads(file.read_text())
    assert found["dry_run"] is True
    assert not found.get("skipped")
    assert not found.get("failures")
    passed = {(e["op"], e["heads"], e["implementation"]) for e in found["checks"] if e["status"] == "passed"}
    for op in ("attend_decode", "attend_chunk", "score", "compact"):
        assert {(op, "Qwen3-8B", "xla"), (op, "Qwen3-8B", "triton"), (op, "SmolLM2", "triton")} <= passed
    assert {("int4_matmul", "Qwen3-8B", "triton"), ("int8_matmul", "Qwen3-8B", "triton")} <= passed
    for section in ("attention", "scoring", "moving"):
        timed = {(e["heads"], e["implementation"]): e for e in found[section] if "share" in e}
        assert {(h, i) for h in ("Qwen3-8B", "SmolLM2") for i in ("xla", "triton")} <= set(timed)
        for entry in timed.values():
            seconds = entry["seconds"]
            assert 0 < seconds["p10"] <= seconds["median"] <= seconds["p90"]
            assert entry["share"] == pytest.approx(entry["floor_seconds"] / seconds["median"])
    # K and V of 8 rows of 32 slots, of 8 heads of 128, in 2 bytes.
    sizes = {e["bytes"] for e in found["attention"] if e["heads"] == "Qwen3-8B" and "bytes" in e}
    assert sizes == {2 * 8 * 32 * 8 * 128 * 2}
    assert any(e["implementation"] == "contiguous xla" and "cudnn_refused" in e for e in found["attention"])
    decoded = [(e["method"], e["rows"]) for e in found["decode"]]
    assert decoded == [("none", 1), ("triattention", 1), ("triattention", decoded[2][1])]
    assert decoded[2][1] > 1
    for entry in found["decode"]:
        assert entry["tokens_per_second"] == pytest.approx(16 * entry["rows"] / entry["round_seconds"]["median"])
    assert all(goal["met"] is None for goal in found["goals"])
    assert "DRY RUN" in done.stdout
    assert "wrong: nothing" in done.stdout
    assert "decode triattention" in done.stderr


def checked(monkeypatch, op, wrong):
    """Return what the check of an op says where Triton's result is XLA's after ``wrong``."""
    original = getattr(device_cases.pallas_kernels, op)

    def planted(*args, implementation, **options):
        if implementation == "mosaic_gpu":
            raise NotImplementedError("not today")
        out = original(*args, implementation="xla", **options)
        return wrong(out) if implementation == "triton" else out

    monkeypatch.setattr(device_cases.pallas_kernels, op, planted)
    report = Report(None, {}, 1000)
    name = {"attend": "attend_decode"}.get(op, op)
    device_cases._check(report, name, device_cases.SMOLLM2, "bfloat16", True)
    return {entry["implementation"]: entry["status"] for entry in report.found["checks"]}, report.found


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        ("attend", lambda out: out.at[1, 0, 4].multiply(1.2)),
        ("attend", lambda out: out.at[2, 0, 8, 63].set(jnp.nan)),
        ("score", lambda out: out.at[1, 2, 0, 7].multiply(1.01)),
        # Block 5 may be free or not, but of block 1 to 6 some slot of a row is there.
        ("compact", lambda out: out.at[1:, 2, 3, 9].add(1)),
        ("int4_matmul", lambda out: out.at[1].multiply(1.05)),
    ],
)
def test_a_wrong_result_is_noticed(monkeypatch, op, wrong):
    status, found = checked(monkeypatch, op, wrong)
    assert status == {"xla": "passed", "triton": "failed", "mosaic_gpu": "refused"}
    assert len(device_table.failed(found)) == 1


def test_a_kernel_that_does_not_compile_fails_alone(monkeypatch):
    def broken(out):
        raise RuntimeError("ptxas exited")

    status, found = checked(monkeypatch, "score", broken)
    assert status == {"xla": "passed", "triton": "failed", "mosaic_gpu": "refused"}
    (entry,) = (e for e in found["checks"] if e["implementation"] == "triton")
    assert "ptxas exited" in entry["reason"]


def test_the_file_grows_and_a_failure_stops_nothing(tmp_path):
    file = tmp_path / "found.json"
    report = Report(file, {"chip": "a chip"}, 100)
    report.run("first", 1, lambda: report.add("checks", {"op": "x"}))
    assert json.loads(file.read_text())["checks"] == [{"op": "x"}]
    report.run("long", 101, lambda: pytest.fail("there is no time for it"))
    report.run("broken", 1, lambda: 1 / 0)
    found = json.loads(file.read_text())
    assert [entry["case"] for entry in found["skipped"]] == ["long"]
    assert [entry["case"] for entry in found["failures"]] == ["broken"]
    assert "ZeroDivisionError" in found["failures"][0]["reason"]
    assert list(tmp_path.iterdir()) == [file]


def test_times():
    times = Times.of([5.0, 1.0, 2.0, 3.0, 4.0], 7.0)
    assert (times.median, times.compile) == (3.0, 7.0)
    assert (times.p10, times.p90) == pytest.approx((1.4, 4.6))
    calls = []
    got = device_timing.clock(lambda: calls.append(0), calls=4, compile_seconds=0, repeats=3, warm=1)
    assert len(calls) == 4
    assert 0 <= got.p10 <= got.p90


def entry(load, implementation, share):
    return {"heads": "Qwen3-8B", "load": load, "implementation": implementation, "share": share}


def test_goals_go_by_the_implementation_that_is_picked():
    found = {
        "dry_run": False,
        "candidates": ["mosaic_gpu", "triton", "xla"],
        "attention": [
            entry("1 x 32768", "triton", 0.1),
            entry("8 x 8192", "xla", 0.99),
            entry("8 x 8192", "triton", 0.84),
            {"heads": "Qwen3-8B", "load": "8 x 8192", "implementation": "mosaic_gpu", "refused": "too old"},
            entry("32 x 4096", "triton", 0.2),
            entry("32 x 4096", "mosaic_gpu", 0.9),
        ],
        "scoring": [entry("1 x 32768", "triton", 0.8)],
        "decode": [{"method": "none", "rows": 4}, {"method": "triattention", "rows": 4, "compaction_share": 0.021}],
    }
    got = [(goal["name"], goal["measured"], goal["met"]) for goal in device_table.goals(found)]
    assert got == [
        ("attention Qwen3-8B 8 x 8192", 0.84, False),
        ("attention Qwen3-8B 32 x 4096", 0.9, True),
        ("scoring Qwen3-8B 1 x 32768", 0.8, True),
        ("compaction, 4 rows", 0.021, False),
    ]
    assert {goal["met"] for goal in device_table.goals({**found, "dry_run": True})} == {None}
    (missing,) = device_table.goals({"dry_run": False, "candidates": ["xla"]})
    assert missing["met"] is None


def test_tables_share_no_block():
    got = device_cases.tables(np.random.default_rng(0), rows=3, slots=33, copies=2)
    assert got.shape == (2, 3, 3)
    assert sorted(got.ravel()) == list(range(1, 19))
