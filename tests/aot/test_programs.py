"""What the engine calls for a small Llama, and a whole trace of it, compiled with the Triton kernels: one pool."""

from __future__ import annotations

import pytest

TARGETS = ["NVIDIA GeForce RTX 4090", "NVIDIA H200"]
LAYERS = 4
CALLS = {
    "decode_round": {"attend_decode": LAYERS},
    "prefill_chunk": {"attend_chunk": LAYERS},
    "decode_trace": {"attend_decode": LAYERS, "score": LAYERS, "compact": LAYERS},
    "compaction_per_head": {"score": LAYERS, "compact": LAYERS},
    "compaction_per_layer_head": {"score": LAYERS, "compact": LAYERS},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("program", list(CALLS))
def test_no_second_pool(aot, program, target):
    found = aot.json("tests/aot/programs.py", program, target)
    assert {kernel: calls for kernel, calls in found["calls"].items() if calls} == CALLS[program]
    assert found["aliased"] >= found["pool"]
    assert found["aliased"] < found["pool"] + 2**20
    assert found["temporaries"] < found["pool"] / 10
    assert found["copies"] == []
    assert set(found["spilled"].values()) == {0}
