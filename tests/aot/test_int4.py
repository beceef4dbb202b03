"""4-bit and 8-bit products at the shapes of Qwen3-32B, and a whole round of them, compiled for chips that are not
here.
"""

from __future__ import annotations

import re
import subprocess

import pytest

from pallas_kernels.device import DEVICES

TARGETS = ["NVIDIA GeForce RTX 4090", "NVIDIA H200"]
SCRIPT = "tests/aot/int4.py"


@pytest.mark.parametrize("target", TARGETS)
def test_no_product_spills(aot, target):
    found = aot.json(SCRIPT, "kernels", target)
    assert len(found) == 15
    for case in found:
        assert case["spilled"] == 0, case["case"]
        assert 0 < case["registers"] <= 255, case["case"]
        assert 0 < case["shared_memory"] <= DEVICES[target].shared_memory, case["case"]
        if "groups of 128" in case["case"]:
            assert re.search(r"cp\.async\.cg\.shared\.global .*, 0x10", case["ptx"]), case["case"]
        assert re.search(r"mma\.sync|wgmma", case["ptx"]), case["case"]
        # The plain matrix is written nowhere: at most the sums of some runs of groups, no more than the packed bytes.
        assert case["temporaries"] <= case["plain"] / 4, case["case"]


def test_a_round_multiplies_every_matrix_as_it_is_packed(aot):
    found = aot.json(SCRIPT, "decode", TARGETS[0])
    assert found["calls"] == found["matrices"]
    assert found["spilled"] == 0
    assert found["copies"] == []
    assert found["packed"] < 0.27 * found["plain"]


def test_products_compile_for_a_tpu(aot):
    if subprocess.run([aot.python, "-c", "import libtpu"], capture_output=True, check=False).returncode:
        pytest.skip("libtpu could not be installed beside this JAX; scripts/aot_env.sh says why")
    target = "TPU v5 lite"
    for case in aot.json(SCRIPT, "kernels", target):
        assert 0 < case["vector_memory"] <= DEVICES[target].vmem // 2, case["case"]
