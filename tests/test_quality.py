"""Quality, freed blocks and concentration on a tiny model: the numbers that scripts report, against plain NumPy."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from expected import dense

from jaxkv import model
from jaxkv.compression import RowBudget

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import concentration
import freed_blocks
import quality
import quality_facts
import quality_report
import quality_steps as steps
from quality_texts import Reader

READER = Reader(tiny.MODEL, tiny.weights(), tokenizer=None)
IDS = np.random.default_rng(0).integers(0, 97, 385).astype(np.int32)


def observe(ids):
    """Return what dense attention sees: log probabilities [T, V], and a layer's attention [H, T, T]."""
    seen = []

    def attend(state, layer, heads):
        q, k = (np.asarray(x[0], np.float64) for x in heads.rotated())
        logits = np.einsum("thd,shd->hts", q, np.repeat(k, q.shape[1] // k.shape[1], axis=1)) / np.sqrt(q.shape[-1])
        weights = np.exp(np.where(np.tri(len(q), dtype=bool), logits, -np.inf))
        seen.append(weights / weights.sum(axis=-1, keepdims=True))
        return dense(state, layer, heads)

    _, hidden = model.forward(READER.weights, READER.config, ids[None], jnp.arange(ids.size)[None], attend, None)
    return np.asarray(jax.nn.log_softmax(model.logits(READER.weights, hidden[0])), np.float64), seen


def test_a_row_has_what_dense_attention_sees():
    row = quality.prefilled(READER, IDS[:200], 128, mass=True)
    assert (row.length, row.position) == (200, 200)
    log_p, attention = observe(IDS[:200])
    for layer, weights in enumerate(attention):
        want = weights.reshape(2, 3, 200, 200).mean(axis=1).sum(axis=1)
        got = np.asarray(row.mass[layer])[row.table[0]].swapaxes(0, 1).reshape(2, -1)
        np.testing.assert_allclose(got[:, :200], want, rtol=1e-4)
        np.testing.assert_array_equal(got[:, 200:], 0)
    _, hidden = steps.run(READER.weights, READER.config, dataclasses.replace(row, length=72, position=72), IDS[72:200])
    np.testing.assert_allclose(steps.log_probabilities(READER.weights, hidden), log_p[72:], atol=1e-4)


def test_numbers_of_a_comparison():
    log_p, _ = observe(IDS[:40])
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal((40, tiny.MODEL.width)).astype(np.float32)
    own = np.asarray(jax.nn.log_softmax(model.logits(READER.weights, hidden)), np.float64)
    targets = IDS[1:41]
    got = np.asarray(steps.compare(READER.weights, hidden, jnp.asarray(log_p, jnp.float32), targets))
    np.testing.assert_allclose(got[0], (np.exp(log_p) * (log_p - own)).sum(-1), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(got[1], own.argmax(-1) == log_p.argmax(-1))
    np.testing.assert_allclose(got[2:], [-x[np.arange(40), targets] for x in (own, log_p)], rtol=1e-5)


def measured(case, row, prompt=128):
    full = quality.full_log_probabilities(READER, row, IDS[128:384])
    return quality.measure(READER, row, IDS[prompt:], full, case, seed=0)


@pytest.mark.parametrize("method", ["knorm", "snapkv", quality.ALL])
def test_a_budget_of_everything_has_no_distance_and_a_small_one_has(method):
    row = quality.prefilled(READER, IDS[:128], 256, mass=True)
    same, most = measured(quality.Case(method, budget=384, window=8), row)
    assert (same["kl"], same["top1"], same["ppl_ratio"], most) == (0, 1, 1, 384)
    small, most = measured(quality.Case(method, budget=32, window=8), row)
    assert small["kl"] > 1e-3 and small["top1"] < 1 and most == 32 + 128


def test_streaming_from_the_start_never_holds_more_than_budget_and_chunk():
    row = quality.prefilled(READER, IDS[:128], 256, mass=False)
    full = quality.full_log_probabilities(READER, row, IDS[128:384])
    empty = steps.Row.empty(READER.config, 64 + 128)
    case = quality.Case("streaming", sinks=4, budget=64, window=8)
    numbers, most = quality.measure(READER, empty, IDS, full, case, seed=0)
    assert most == 64 + 128 and numbers["nll_full"] == pytest.approx(-_target_log_p(IDS).mean(), rel=1e-5)


def _target_log_p(ids):
    log_p, _ = observe(ids[:-1])
    return log_p[np.arange(128, 384), ids[129:]]


@pytest.mark.parametrize("mode", ["per_head", "per_layer_head"])
def test_h2o_over_every_query_keeps_the_most_attended_and_moves_their_mass(mode):
    row = quality.prefilled(READER, IDS[:128], 128, mass=True)
    budget = RowBudget(b_row=32, interval=8, window=4, sinks=0, pinned=0)
    cut = steps.compress(row, budget, None, mode)

    def slots(pages):
        pages = np.asarray(pages)[row.table[0]]
        return pages.swapaxes(0, 1).reshape(pages.shape[1], -1, *pages.shape[3:])

    mass = np.stack([slots(pages)[:, :128] for pages in row.mass])
    rank = (mass - mass.mean(-1, keepdims=True)) / mass.std(-1, keepdims=True)
    for layer, head in np.ndindex(mass.shape[:2]):
        own = rank[:, head].mean(axis=0) if mode == "per_head" else rank[layer, head]
        keep = np.sort(np.append(np.argsort(-own[:124])[:28], range(124, 128)))
        np.testing.assert_array_equal(slots(cut.pool.k[layer])[head, :32], slots(row.pool.k[layer])[head, keep])
        np.testing.assert_array_equal(slots(cut.mass[layer])[head, :32], mass[layer, head, keep])
        np.testing.assert_array_equal(slots(cut.mass[layer])[head, 32:], 0)


def line(kl, passage, method="knorm", sinks=0):
    case = quality.Case(method, sinks=sinks)
    about = {"regime": "prompt", "text": "a", "passage": passage, "of": 2, "prompt": 128, "scored": 128, "dtype": "x"}
    return {**about, **dataclasses.asdict(case), "kl": kl, "top1": 0.5, "ppl_ratio": 1.5}


def test_the_table_has_means_standard_errors_and_geometric_ratios(tmp_path):
    lines = [line(0.1, 0), line(0.3, 1), line(0.2, 0, "streaming", 4), line(0.2, 1, "streaming", 4)]
    text = quality_report.table(lines)
    assert "| 1024 | knorm per_head sinks 0 | 2 | 0.200 ± 0.100 | 0.500 ± 0.000 | 1.500 ± 0.000 | 0.87 | nan |" in text
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines) + '{"cut')
    found = quality_report.read(path)
    assert found == lines and len({quality.identity(one) for one in found}) == 4


def test_finished_lines_are_not_computed_again(monkeypatch):
    args = quality.parser().parse_args(["--out", "x", "--passages", "2", "--prompt", "128", "--scored", "128"])
    monkeypatch.setattr(Reader, "passage", lambda *_: IDS[:257])
    cases = [quality.Case("knorm", budget=32, window=8), quality.Case("random", budget=32, window=8)]
    first = list(quality.lines(READER, {"a": "", "b": ""}, cases, args, set()))
    assert len(first) == 8
    done = {quality.identity(one) for one in first[:5]}
    again = list(quality.lines(READER, {"a": "", "b": ""}, cases, args, done))
    without = [{key: value for key, value in one.items() if key != "seconds"} for one in again]
    assert without == [{key: value for key, value in one.items() if key != "seconds"} for one in first[5:]]


@pytest.mark.parametrize("text", ["h3o", "knorm:per_row", "knorm:per_head:budgets=3"])
def test_a_case_that_makes_no_sense_is_refused(text):
    with pytest.raises((ValueError, TypeError), match="is unknown|budgets"):
        quality.Case.parse(text)


def test_blocks_that_come_free():
    mask = np.zeros((2, 20), bool)
    mask[0, 3], mask[1, 17] = True, True
    freed = [freed_blocks.freed_alone(mask, block) for block in (1, 4, 8, 32)]
    np.testing.assert_allclose(freed, [0.9, 0.6, 1 / 3, 0], atol=1e-12)
    assert freed_blocks.freed_by_compaction(2048, 192, 256) == 7 / 8
    assert freed_blocks.independent(0.1, 16, 1) == pytest.approx(0.185, abs=5e-4)
    assert freed_blocks.independent(0.1, 16, 3) == pytest.approx(0.9**48)


def test_correlations_of_queries_that_never_change_are_one():
    rng = np.random.default_rng(0)
    omega, mean = 10.0 ** -np.arange(4), rng.standard_normal((2, 4)) + 1j * rng.standard_normal((2, 4))
    turned = mean[:, None] * np.exp(1j * np.outer(30 + np.arange(6), omega))
    q = np.concatenate([turned.real, turned.imag], axis=-1)
    k = rng.standard_normal((1, 30, 8))
    found = concentration.correlations(q, k, mean, omega)
    np.testing.assert_allclose([found["by_key"], found["by_query"]], 1, atol=1e-12)
    centre = rng.standard_normal(4) + 1j * rng.standard_normal(4)
    keys = centre * np.exp(1j * np.outer(np.arange(30), omega))
    same = np.concatenate([keys.real, keys.imag], axis=-1)[None]
    np.testing.assert_allclose(concentration.correlations(q, same, mean, omega)["by_distance"], 1, atol=1e-12)
    other = concentration.correlations(rng.standard_normal(q.shape), k, mean, omega)
    assert np.abs(other["by_key"]).max() < 0.9


def test_a_fact_is_recovered_only_if_every_digit_is_the_likeliest():
    row = quality.prefilled(READER, IDS[:128], 128, mass=False)
    digits = []
    for _ in range(3):
        _, hidden = steps.run(READER.weights, READER.config, row, np.append(IDS[128:132], digits).astype(np.int32))
        digits.append(int(np.argmax(steps.log_probabilities(READER.weights, hidden[-1:])[0])))
    asked = quality_facts.Question("thing", 0.5, IDS[:128], IDS[128:132], np.array(digits, np.int32))
    assert quality_facts.recovered(READER, row, asked)[0]
    wrong = dataclasses.replace(asked, digits=np.array([*digits[:2], (digits[2] + 1) % 97], np.int32))
    found, nll = quality_facts.recovered(READER, row, wrong)
    assert not found and nll > 0
