"""Predictions of decode speed: a model small enough to count by hand, and texts of modules written by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import jax
import pytest

from jaxkv import model as models
from jaxkv.config import ModelConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import roofline
import roofline_arithmetic as arithmetic
import roofline_text
from roofline_arithmetic import CHIPS, QWEN3_8B, Case, Chip

SMALL = ModelConfig("llama", vocab_size=10, width=4, mlp_width=6, layers=2, heads=2, kv_heads=1, head_dim=2)
CASE = Case(rows=3, start=8, steps=4, budget=8)
SLOW = Chip("slow", "", bandwidth=100, bfloat16=50, float32=10, memory=2000, source="made up")


def test_a_round_by_hand():
    # A layer: q and o 4 x 4, k and v 2 x 4, three matrices 4 x 6; the head 10 x 4.
    assert arithmetic.matrix_weights(SMALL) == 2 * (16 + 16 + 8 + 8 + 72) + 40 == 280
    assert arithmetic.slot_bytes(SMALL) == 2 * 2 * 1 * 2 * 2 == 16
    # The four steps see 9, 10, 11 and 12 slots.
    assert CASE.seen == (9 + 10 + 11 + 12) / 4
    found = arithmetic.parts(SMALL, CASE)
    assert {name: (part.bytes, part.operations) for name, part in found.items()} == {
        # Weights of 2 bytes, 3 x 10 logits of 4 bytes written and read; 2 operations a weight and row.
        "model": (4 * (560 + 240), 4 * 2 * 3 * 280),
        # 42 slots of 16 bytes a row; q and out of 2 layers x 2 heads x 2 of 2 bytes, one slot written.
        "attention": (3 * 42 * 16 + 4 * 3 * (2 * 16 + 16), 3 * 42 * 2 * 2 * 2 * 4),
        # 12 slots of 8 bytes; 3 numbers multiplied for 2 heads, one magnitude of 3 operations.
        "scoring": (3 * 12 * 8, 3 * 12 * 2 * (2 * 2 * 3 + 3)),
        "moving": (2 * 3 * 8 * 16, 0),
        "selection": (4 * 3 * 12 * 2 * 2 * 4, 0),
    }


def test_the_slower_of_bytes_and_operations_counts():
    got = arithmetic.predict(SLOW, CASE, arithmetic.parts(SMALL, CASE))
    seconds = {"model": 134.4, "attention": 80.64, "scoring": 108.0, "moving": 7.68, "selection": 23.04}
    assert got["seconds"] == pytest.approx(seconds)
    assert got["tokens_per_second"] == pytest.approx(12 / 353.76)
    assert got["compaction_share"] == pytest.approx((108 + 7.68 + 23.04) / 353.76)
    late = {name for name, bound in got["bound"].items() if bound == "operations"}
    assert late == {"model", "attention", "scoring"}
    fast = dataclasses.replace(SLOW, bfloat16=1e9, float32=1e9)
    assert arithmetic.predict(fast, CASE, arithmetic.parts(SMALL, CASE))["seconds"]["model"] == 32


def test_without_a_budget_nothing_is_compacted():
    case = Case(rows=1, start=8, steps=4)
    found = arithmetic.parts(SMALL, case)
    assert set(found) == {"model", "attention"}
    assert arithmetic.predict(SLOW, case, found)["compaction_share"] == 0


def test_weights_are_those_that_the_model_has():
    shapes = models.weight_shapes(QWEN3_8B)
    matrices = [x for x in jax.tree.leaves(shapes.replace(embedding=None)) if x.ndim == 2]
    assert arithmetic.matrix_weights(QWEN3_8B) == sum(x.size for x in matrices)
    case = Case(1, 16, 16)
    every = sum(2 * x.size for x in jax.tree.leaves(shapes) if x.ndim == 2)
    # 32 slots are two blocks: 147,456 bytes a token.
    assert arithmetic.held_bytes(QWEN3_8B, case) == every + 32 * 147456


def test_as_many_rows_as_there_is_memory_for():
    # 280 weights and the embedding's 40 take 640 bytes, a row of 12 slots a block of 16.
    case = dataclasses.replace(CASE, rows=1)
    assert arithmetic.most_rows(SMALL, SLOW, case, spare=0) == (2000 - 640) // 256
    assert arithmetic.most_rows(SMALL, SLOW, case, spare=0.5) == 1
    assert arithmetic.most_rows(SMALL, dataclasses.replace(SLOW, memory=100), case) == 0


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"start": 0}, {"steps": -1}])
def test_empty_rounds_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        dataclasses.replace(CASE, **wrong)


def test_a_budget_above_what_a_row_holds_is_refused():
    with pytest.raises(ValueError, match="budget=12 must be below the 12 slots"):
        arithmetic.parts(SMALL, dataclasses.replace(CASE, budget=12))


# A product that reads weights through vector memory, in a loop, and a branch of two.
MODULE = """HloModule jit_f, is_scheduled=true

%fused (p: bf16[4,8]) -> bf16[4,8] {
  %p = bf16[4,8]{1,0:T(8,128)S(1)} parameter(0)
  ROOT %n = bf16[4,8]{1,0:T(8,128)S(1)} negate(%p)
}

%small (a: f32[2]) -> f32[2] {
  %a = f32[2]{0:T(128)S(1)} parameter(0)
  ROOT %b = f32[2]{0:T(128)S(1)} negate(%a)
}

%large (c: f32[2]) -> f32[2] {
  %c = f32[2]{0:T(128)S(1)} parameter(0)
  %d = f32[2]{0:T(128)S(1)} negate(%c)
  ROOT %e = f32[2]{0:T(128)S(1)} negate(%d)
}

%body (t: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %t = (s32[], bf16[4,8]{1,0:T(8,128)}) parameter(0)
  %w = bf16[4,8]{1,0:T(8,128)} get-tuple-element(%t), index=1
  %start = (bf16[4,8]{1,0:T(8,128)S(1)}, bf16[4,8]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%w)
  %done = bf16[4,8]{1,0:T(8,128)S(1)} copy-done(%start)
  %whole = bf16[4,8]{1,0:T(8,128)S(1)} custom-call(%done), custom_call_target="ConcatBitcast"
  %out = bf16[4,8]{1,0:T(8,128)} fusion(%whole), kind=kLoop, calls=%fused
  ROOT %r = (s32[], bf16[4,8]{1,0:T(8,128)}) tuple(%w, %out)
}

ENTRY %main (x: (s32[], bf16[4,8])) -> f32[2] {
  %x = (s32[], bf16[4,8]{1,0:T(8,128)}) parameter(0)
  %loop = (s32[], bf16[4,8]{1,0:T(8,128)}) while(%x), condition=%cond, body=%body
  %y = f32[2]{0:T(128)S(1)} constant({1, 2})
  ROOT %branch = f32[2]{0:T(128)} conditional(%flag, %y, %y), branch_computations={%small, %large}
}
"""


def test_bytes_in_vector_memory():
    # 64 bytes are copied there, are a custom call's result and are read; of the branches the one with two negations of
    # 8 bytes, in and out.
    assert roofline_text.vector_memory_bytes(MODULE) == 3 * 64 + 2 * 2 * 8
    assert roofline_text.vector_memory_bytes(MODULE.replace("S(1)", "")) == 0
    with pytest.raises(ValueError, match="no ENTRY"):
        roofline_text.vector_memory_bytes("HloModule nothing")


@pytest.mark.parametrize(("value", "known"), [(0.25, 0.25), (-0.75, 0.25), (-2.996, 0.004), (-3.0, None), (None, None)])
def test_seconds_that_the_compiler_knows(value, known):
    analysis = {} if value is None else {"optimal_seconds": value}
    assert roofline_text.known_seconds(analysis) == (known if known is None else pytest.approx(known))


def run(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["roofline.py", *args])
    monkeypatch.setattr(roofline, "COMPILERS", False)
    assert roofline.main() == 0
    return capsys.readouterr().out


def test_the_command(monkeypatch, capsys, tmp_path):
    file = tmp_path / "found.json"
    out = run(monkeypatch, capsys, "--chip", "H200", "--chip", "v5e", "--batch", "8", "--json", str(file))
    assert "predictions, no measurements" in out
    assert "H200, arithmetic" in out
    found = json.loads(file.read_text())
    none, budget, *small = found["results"]
    # 36 layers of 192,937,984 and the head's 622,329,856 weights, of 2 bytes; 147,456 bytes a slot.
    weights = 36 * 192937984 + 622329856
    steps = weights * 2 + 2 * 8 * 151936 * 4 + 8 * (32768 + 64.5) * 147456 + 8 * (2 * 36 * 32 * 128 * 2 + 147456)
    assert none["tokens_per_second"] == pytest.approx(8 * 4.8e12 / steps)
    kept = 128 * (steps - 8 * (32768 - 3072) * 147456) + 8 * 147456 * (3200 / 2 + 2 * 3072) + 4 * 8 * 36 * 32 * 3200 * 4
    assert budget["tokens_per_second"] == pytest.approx(128 * 8 * 4.8e12 / kept)
    assert f"{budget['tokens_per_second'] / none['tokens_per_second']:.2f}" in out
    assert [result["fits"] for result in small] == [False, False]
    assert out.count("does not fit into one chip") == 2


def test_compilers_that_are_not_there_are_not_made_up(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, capsys, "--mode", "compiled", "--chip", "H100")
    assert "no compiler for H100: scripts/aot_env.sh" in capsys.readouterr().err


def test_chips_are_described():
    for chip in CHIPS.values():
        assert chip.source
        assert chip.bandwidth < chip.float32 < chip.bfloat16 < math.inf
