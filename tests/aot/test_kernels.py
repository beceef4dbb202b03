"""Every Triton kernel, compiled for two chips that are not here, and kernels with a fault in them."""

from __future__ import annotations

import json
import re

import pytest

from pallas_kernels.device import DEVICES

TARGETS = ["NVIDIA GeForce RTX 4090", "NVIDIA H200"]
KERNELS = ["attend_decode", "attend_chunk", "score", "compact"]


@pytest.fixture(scope="session")
def report(aot, tmp_path_factory):
    """What the report found, by chip; both chips at once."""
    folder = tmp_path_factory.mktemp("report")
    files = [folder / f"{index}.json" for index in range(len(TARGETS))]
    started = [
        aot.start("scripts/kernel_report.py", "--target", target, "--json", str(file))
        for target, file in zip(TARGETS, files, strict=True)
    ]
    finished = [aot.finish(process) for process in started]
    for status, out, errors in finished:
        print(out)
        assert status == 0, errors[-4000:]
    return {target: json.loads(file.read_text()) for target, file in zip(TARGETS, files, strict=True)}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_without_a_spill(report, target, kernel):
    found = [case for case in report[target] if case["kernel"] == kernel]
    assert len(found) >= 10
    for case in found:
        assert case["spilled"] == 0, case["case"]
        assert 0 < case["registers"] <= 255, case["case"]
        assert case["shared_memory"] <= DEVICES[target].shared_memory, case["case"]
        assert case["occupancy"] > 0, case["case"]


@pytest.mark.parametrize("target", TARGETS)
def test_keys_and_values_are_read_sixteen_bytes_a_thread(report, target):
    for case in report[target]:
        if case["kernel"] in ("attend_decode", "attend_chunk", "score"):
            assert re.search(r"cp\.async\.cg\.shared\.global .*, 0x10|ld\.global\.v4\.b32", case["ptx"]), case["case"]


@pytest.mark.parametrize("target", TARGETS)
def test_compaction_is_in_place(report, target):
    for case in report[target]:
        if case["kernel"] == "compact":
            assert case["aliased"] == case["donated"], case["case"]
            assert case["temporaries"] < 2**20, case["case"]
            assert case["copies"] == [], case["case"]


@pytest.mark.parametrize("target", TARGETS)
def test_every_thread_has_read_a_tile_before_any_writes_it(report, target):
    for case in report[target]:
        if case["kernel"] == "compact":
            assert unguarded_stores(case["ptx"]) == [], case["case"]


def unguarded_stores(ptx):
    """Return the stores to global memory before which, in the order of the PTX, a load came later than a barrier."""
    last, found = "load", []
    for line in ptx.splitlines():
        if "ld.global" in line:
            last = "load"
        elif "bar.sync" in line:
            last = "barrier"
        elif "st.global" in line and last != "barrier":
            found.append(line.strip())
    assert "st.global" in ptx
    return found


def test_a_missing_barrier_is_noticed(aot):
    assert unguarded_stores(aot.json("tests/aot/planted.py", "no_barrier")["ptx"])


def test_a_kernel_that_wants_more_shared_memory_than_there_is_fails(aot):
    status, _, errors = aot.finish(aot.start("tests/aot/planted.py", "overflow"))
    assert status != 0
    assert "Shared memory size limit exceeded" in errors


def test_a_spill_fails_the_report(aot):
    status, out, errors = aot.finish(aot.start("tests/aot/planted.py", "spill"))
    assert status == 1, errors[-4000:]
    assert "registers are spilled by" in errors
    assert "attend_chunk   G=2 D=256 P=16 bfloat16" in out


def test_copies_of_a_pool_are_noticed(aot):
    kept = aot.json("tests/aot/planted.py", "copy")
    assert kept["aliased"] == 0
    assert len(kept["copies"]) == 2
    assert aot.json("tests/aot/planted.py", "xla_copy")["copies"]
