"""The Hopper kernel, compiled for an H200 that is not here, and a decode round that picks it."""

from __future__ import annotations

import json
import re

import pytest

from pallas_kernels.device import DEVICES

H200 = DEVICES["NVIDIA H200"]
LAYERS = 4


@pytest.fixture(scope="module")
def report(aot, tmp_path_factory):
    file = tmp_path_factory.mktemp("report") / "hopper.json"
    arguments = "--target", H200.kind, "--only", "attend_hopper", "--json", str(file)
    status, out, errors = aot.finish(aot.start("scripts/kernel_report.py", *arguments))
    print(out)
    assert status == 0, errors[-4000:]
    return json.loads(file.read_text())


def test_it_compiles_without_a_spill(report):
    assert len(report) >= 8
    for case in report:
        assert case["spilled"] == 0, case["case"]
        assert 0 < case["registers"] <= 255, case["case"]
        assert 64 * 1024 <= case["shared_memory"] <= H200.shared_memory, case["case"]
        assert case["threads"] == 128, case["case"]


def test_two_programs_fit_a_multiprocessor(report):
    """What the number of splits counts on; queries in a wider type take more room."""
    for case in report:
        if "float32 queries" not in case["case"]:
            assert case["occupancy"] == 2 * 128 / H200.threads_core, case["case"]


def test_products_and_pages_go_through_the_units_that_hopper_has_for_them(report):
    for case in report:
        ptx, dim = case["ptx"], int(re.search(r"D=(\d+)", case["case"])[1])
        kind = "f16.f16" if "float16" in case["case"].split() else "bf16.bf16"
        assert f"wgmma.mma_async.sync.aligned.m64n64k16.f32.{kind}" in ptx, case["case"]
        # Two stages or four at first, and one more in each loop, a piece of K and one of V at a time.
        pieces = 64 // min(64, int(re.search(r"P=(\d+)", case["case"])[1]))
        loops = 3 if "options" in case["case"] else 2
        copies = len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global", ptx))
        assert copies >= 2 * pieces * (256 // dim + loops), case["case"]
        # Of a table in global memory one number is read at a time; of pages, nothing is.
        assert not re.search(r"ld\.global\.(v\d|b128|b64)", ptx), case["case"]


def test_a_decode_round_picks_it_and_leaves_the_pool_in_place(aot):
    found = aot.json("tests/aot/hopper.py", "decode_round")
    assert found["calls"] == {"mosaic_gpu": LAYERS, "triton": 0}
    assert found["aliased"] >= found["pool"]
    assert found["temporaries"] < found["pool"] / 10
    assert found["copies"] == []
    assert set(found["spilled"].values()) == {0}


def test_tiles_that_are_too_large_are_noticed(aot):
    status, _, errors = aot.finish(aot.start("tests/aot/hopper.py", "cut", "64", "8"))
    assert status != 0
    assert "exceeds available shared memory" in errors
    assert aot.json("tests/aot/hopper.py", "cut", "128", "2") > 0
