"""Every TPU kernel, compiled by libtpu for TPUs that are not here, and whole programs of two small models: one pool."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess

import pytest

from pallas_kernels.device import DEVICES

# All cases on one chip, and on the others fewer, of every kernel.
REPORTS = {
    "TPU v5 lite": "",
    "TPU v6 lite": "P=16 ",
    "TPU v5": "D=128 P=16 bfloat16",
    "TPU7x": "D=128 P=16 bfloat16",
}
KERNELS = ["attend_decode", "attend_chunk", "score", "compact"]
LAYERS = 2
CALLS = {
    "decode_round": {"attend_decode": LAYERS},
    "prefill_chunk": {"attend_chunk": LAYERS},
    "compaction_per_head": {"score": LAYERS, "compact": LAYERS},
}
MODELS = ["llama", "smollm2"]


@pytest.fixture(scope="session")
def tpu(aot, tmp_path_factory):
    """What the report, the programs and the planted faults gave, each a process, as many at once as there are cores."""
    if subprocess.run([aot.python, "-c", "import libtpu"], capture_output=True, check=False).returncode:
        pytest.skip("libtpu could not be installed beside this JAX; scripts/aot_env.sh says why")
    folder = tmp_path_factory.mktemp("tpu")

    def report(target):
        file = folder / f"{target}.json"
        options = ("--target", target, "--only", REPORTS[target], "--json", str(file))
        status, _, errors = aot.finish(aot.start("scripts/kernel_report.py", *options))
        assert status == 0, errors[-4000:]
        return json.loads(file.read_text())

    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = {target: pool.submit(report, target) for target in REPORTS}
        for model in MODELS:
            for program in CALLS:
                args = ("tests/aot/programs.py", program, "TPU v5 lite", model)
                found[program, model] = pool.submit(aot.json, *args)
        found["planted"] = pool.submit(aot.json, "tests/aot/planted.py", "tpu_copy")
    return found


@pytest.mark.parametrize("target", list(REPORTS))
def test_kernels_compile_within_vector_memory(tpu, target):
    found = tpu[target].result()
    for kernel in KERNELS:
        cases = [case for case in found if case["kernel"] == kernel]
        assert len(cases) >= (1 if REPORTS[target] else 6)
        for case in cases:
            assert 0 < case["vector_memory"] <= DEVICES[target].vmem / 4, case["case"]


@pytest.mark.parametrize("target", list(REPORTS))
def test_compaction_is_in_place(tpu, target):
    moves = [case for case in tpu[target].result() if case["kernel"] == "compact"]
    assert moves
    for case in moves:
        assert case["aliased"] == case["donated"], case["case"]
        assert case["temporaries"] < 2**23, case["case"]
        assert case["copies"] == [], case["case"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("program", list(CALLS))
def test_no_second_pool(tpu, program, model):
    found = tpu[program, model].result()
    assert {kernel: calls for kernel, calls in found["calls"].items() if calls} == CALLS[program]
    assert found["pool"] >= 2 * LAYERS * 150 * 2**20
    assert found["pool"] <= found["aliased"] < found["pool"] + 2**20
    assert found["temporaries"] < found["pool"] / 50
    assert found["copies"] == []


def test_copies_of_a_pool_are_noticed(tpu):
    """Where pages are kept, and where they are as narrow as the heads: each call copies K and V in, and out again."""
    found = tpu["planted"].result()
    assert len(found["kept"]) == 2
    assert len(found["narrow"]) == 4
