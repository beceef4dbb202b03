"""The planner's figures beside the compiler's: two layers of Qwen3-32B in 4 bits on an RTX 4090 that is not here."""

from __future__ import annotations

import pytest

SCRIPT = "scripts/plan_proof.py"
CASES = {"every token kept": "0", "budget of 12,000": "1"}


@pytest.fixture(scope="module")
def found(aot):
    numbers = [option for number in CASES.values() for option in ("--case", number)]
    return dict(zip(CASES, aot.json(SCRIPT, *numbers, "--layers", "2", "--json"), strict=True))


@pytest.mark.parametrize("case", list(CASES))
def test_weights_and_pool_are_the_planners_to_the_byte(found, case):
    assert found[case]["planned_weights"] == found[case]["weights"]
    assert found[case]["planned_pool"] == found[case]["pool"]
    # Two layers: 512 bytes a slot, head and layer, of 32,768 slots or 12,128, and the null block's 16.
    slots = {"every token kept": 32768, "budget of 12,000": 12128}[case] + 16
    assert found[case]["pool"] == slots * 8 * 512 * 2
    assert found[case]["copies"] == []


@pytest.mark.parametrize("case", list(CASES))
def test_the_whole_is_within_three_in_a_hundred(found, case):
    assert abs(found[case]["planned"] / found[case]["compiled"] - 1) < 0.03


def test_each_programs_temporaries_are_near_the_planners(found):
    for case in found.values():
        for name, size in case["temporaries"].items():
            assert size == pytest.approx(case["planned_temporaries"][name], rel=0.2, abs=2**21), name
    assert set(found["budget of 12,000"]["temporaries"]) == {"decode", "prefill", "compaction"}
