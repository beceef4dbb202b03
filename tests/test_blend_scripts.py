"""The scripts about blending: the FLOP bound against the specification's, and what is said of measured lines."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxkv.blend import Layout, Piece
from jaxkv.config import ModelConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import bench_blend
import quality_blend

SMOL = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, tied_head=True)
LLAMA = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128)


def prompt(documents=12, tokens=256, suffix=32):
    return Layout.of([Piece(np.zeros(tokens, np.int32), cached=True)] * documents, np.zeros(suffix, np.int32))


@pytest.mark.parametrize(
    ("model", "ratio", "bound"), [(SMOL, 0.15, 5.2), (LLAMA, 0.15, 5.3), (SMOL, 0.05, 10.3), (SMOL, 0.30, 3.0)]
)
def test_the_flop_bound_is_that_of_the_specification(model, ratio, bound):
    full, blended = bench_blend.flops(model, prompt(), ratio)
    assert full / blended == pytest.approx(bound, rel=0.02)


def test_operations_are_those_of_a_count_by_hand():
    small = dataclasses.replace(SMOL, vocab_size=10, width=4, mlp_width=3, layers=2, heads=2, kv_heads=1, head_dim=2)
    # A token: q and o 2 x 16, k and v 2 x 8, MLP 36. A pair: 2 x 4.
    full, blended = bench_blend.flops(small, Layout.of([Piece([1, 2], cached=True)], [3]), 0)
    assert full == 2 * (2 * (3 * 84 + 6 * 8) + 40)
    assert blended == 2 * (3 * 84 + 6 * 8 + 3 * 16 + 84 + 3 * 8 + 40)


def lines(kl, preparation="none"):
    """Two prompts of two texts, with a mean KL for each way."""
    out = []
    for way, value in kl.items():
        for text, factor in (("a", 0.5), ("b", 1.5)):
            line = {"preparation": preparation, "way": way, "text": text, "prompt": 0, "order": "scattered"}
            out.append({**line, "kl": factor * value, "top1": 0.5, "recomputed": 3, "eligible": 12})
    return out


FALLING = {"0": 1.0, "0.05": 0.8, "0.15": 0.6, "0.3": 0.65, "0.5": 0.2, "1": 0.0, "0.15 at random": 0.9}
FALLING |= {"first tokens": 0.7, "0, not rotated": 2.0, "0.15, not rotated": 1.9}


def test_what_holds_is_read_off_the_means():
    made = quality_blend.summary(lines(FALLING))
    assert (made["prompts"], "bos" in made) == (2, False)
    rows, holds = made["none"]["ways"], made["none"]["holds"]
    assert rows["0.15"]["kl"] == pytest.approx(0.6)
    # Half the distance of two values is their standard error.
    assert rows["0.15"]["error"] == pytest.approx(0.3)
    assert rows["0.15"]["texts"] == {"a": pytest.approx(0.3), "b": pytest.approx(0.9)}
    assert rows["0.15"]["recomputed"] == 0.25
    assert holds["falls"] and holds["below_random_in_every_text"]
    assert holds["removed_at_0.15"] == pytest.approx(0.4)
    assert holds["not_rotated_costs"] == pytest.approx(2)
    assert not quality_blend.summary(lines(FALLING | {"0.3": 0.67}))["none"]["holds"]["falls"]
    worse = quality_blend.summary(lines(FALLING | {"0.15 at random": 0.5}))
    assert not worse["none"]["holds"]["below_random_in_every_text"]
    assert "none" not in quality_blend.summary(lines({"0": 1.0}))
