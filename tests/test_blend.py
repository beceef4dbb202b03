"""Blending in its parts: layouts, the choice of tokens, deviations, rotation, the controller, and what is refused."""

import dataclasses
import itertools
import json
import math

import jax
import numpy as np
import pytest
from blend_cases import CHUNK, MODEL, ROPES, blended, config, ids, layers_of, prefill, row, rows_of, segment, weights
from hypothesis import given
from hypothesis import strategies as st

from jaxkv import blend, blend_steps, rope
from jaxkv import weights as weights_module
from jaxkv.blend import Layout, LoadError, Piece, Speeds, choose
from jaxkv.blend_layout import CACHED, EXACT, FIRST, FRESH, widths
from jaxkv.config import CacheConfig, RopeConfig
from jaxkv.pool import KVPool

DOCUMENTS = [ids(23, 1), ids(1, 2), ids(40, 3)]
SUFFIX = ids(7, 5)


def layout_of(documents=DOCUMENTS, suffix=SUFFIX, **options):
    return Layout.of([Piece(tokens, cached=True) for tokens in documents], suffix, **options)


# -- layouts -----------------------------------------------------------------------------------------------------------


def test_a_layout_says_what_every_token_is():
    made = [Piece([1, 2], cached=True, exact=True), Piece([3]), Piece([4, 5, 6], cached=True), Piece([], cached=True)]
    layout = Layout.of([*made, Piece([7], cached=True)], [8, 9])
    assert layout.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert layout.kind.tolist() == [EXACT, EXACT, FRESH, FIRST, CACHED, CACHED, FIRST, FRESH, FRESH]
    assert layout.spans == ((0, 2), (3, 6), (6, 7))
    assert (layout.size, layout.exact, layout.skipped, layout.fresh, layout.eligible) == (9, 2, 2, 3, 4)
    assert (layout.clean, Layout.of([Piece([1, 2])], [3]).clean) == (3, 3)
    behind = Layout.of([Piece([1]), Piece([2, 3], cached=True, exact=True), Piece([4], cached=True)], [5])
    assert behind.kind.tolist() == [FRESH, EXACT, EXACT, FIRST, FRESH]
    assert (behind.exact, behind.skipped, behind.clean) == (2, 0, 3)


def test_the_first_segment_of_a_prompt_begins_with_a_sink_of_its_own():
    assert layout_of().kind[[0, 23, 24]].tolist() == [CACHED, FIRST, FIRST]
    assert layout_of(start=4).kind[[0, 23, 24]].tolist() == [FIRST, FIRST, FIRST]
    assert layout_of(first_tokens=False).kind[[0, 23, 24]].tolist() == [CACHED, CACHED, CACHED]


def test_the_last_token_is_always_computed():
    assert Layout.of([Piece([1, 2], cached=True, exact=True)]).kind.tolist() == [EXACT, FRESH]
    assert Layout.of([Piece([1], cached=True)]).kind.tolist() == [FRESH]


@given(eligible=st.integers(0, 5000), percent=st.integers(0, 100))
def test_as_many_tokens_are_recomputed_as_the_ratio_says_when_it_is_read_as_written(eligible, percent):
    layout = Layout.of([Piece(np.zeros(eligible, np.int32), cached=True)], [0])
    assert layout.recomputed(percent / 100) == -(-percent * eligible // 100)


@given(most=st.integers(1, 9000), chunk=st.sampled_from([16, 100, 128]))
def test_widths_are_few_and_hold_every_length(most, chunk):
    found = widths(most, chunk)
    assert found == sorted(found) and all(width % chunk == 0 for width in found)
    assert most <= found[-1] < most + chunk
    assert len(found) <= max(0, math.log2(most / chunk)) + 2


# -- the choice of tokens ----------------------------------------------------------------------------------------------


def selected_by_sorting(kind, priority, count):
    """Return the positions of the tokens that are chosen: Python's sort over what the specification says."""
    value = [-math.inf if math.isnan(x) else x for x in priority]
    order = sorted(range(len(kind)), key=lambda i: (kind[i], -value[i] if kind[i] in (FIRST, CACHED) else 0, i))
    return sorted(order[:count])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0, 2.5, math.inf, math.nan])), max_size=48),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_selection_is_that_of_sorting(tokens, share, start):
    kind = np.full(48, EXACT, np.int8)
    priority = np.full(48, 7.0, np.float32)
    for at, (one, value) in enumerate(tokens):
        kind[at], priority[at] = one, value
    may = int((kind != EXACT).sum())
    count = int((kind == FRESH).sum())
    count += round(share * (may - count))
    hidden = np.arange(96, dtype=np.float32).reshape(48, 2)
    out, slots, chosen = blend_steps.select(hidden, priority, kind, np.int32(count), np.int32(start))
    expected = selected_by_sorting(kind.tolist(), priority.tolist(), count)
    assert np.asarray(chosen).tolist() == expected + [-1] * (48 - count)
    assert np.asarray(slots)[:count].tolist() == [start + at for at in expected]
    assert (np.asarray(slots)[count:] == -1).all()
    np.testing.assert_array_equal(np.asarray(out)[:count], hidden[expected])


def test_fresh_tokens_come_first_then_first_ones_then_those_that_are_furthest_off():
    _, _, out = blended(layout_of(), [segment(tokens) for tokens in DOCUMENTS], 0.2)
    far = np.asarray(out.deviation, np.float64)[:64]
    assert out.recomputed == 13
    expected = {23, 24, *(int(i) for i in np.argsort(-np.where(np.isin(np.arange(64), (23, 24)), -1, far))[:11])}
    assert set(np.asarray(out.selected)[:20].tolist()) == expected | set(range(64, 71))


# -- deviation and rotation --------------------------------------------------------------------------------------------


def check_layer_values(tokens):
    """Return the values [T, K * D] of layer 1 in float64, from a plain pass through layer 0."""
    w, heads, kv_heads, dim = weights(), MODEL.heads, MODEL.kv_heads, MODEL.head_dim
    layer = jax.tree.map(lambda x: np.asarray(x, np.float64), w.layers[0])

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + MODEL.norm_eps) * np.asarray(weight, np.float64)

    def turned(x):
        angle = np.arange(len(x))[:, None, None] * rope.inverse_frequencies(MODEL.rope, dim)
        z = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    x = np.asarray(w.embedding, np.float64)[tokens]
    y = norm(x, layer.attention_norm)
    q, k, v = ((y @ m.T).reshape(len(x), -1, dim) for m in (layer.q, layer.k, layer.v))
    k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (turned(k), v))
    scores = np.einsum("thd,shd->hts", turned(q), k) / np.sqrt(dim)
    scores = np.exp(np.where(np.tri(len(x), dtype=bool), scores, -np.inf))
    out = np.einsum("hts,shd->thd", scores / scores.sum(-1, keepdims=True), v).reshape(len(x), -1)
    x = x + out @ layer.o.T
    y = norm(x, layer.mlp_norm)
    gate = y @ layer.gate.T
    x = x + (gate / (1 + np.exp(-gate)) * (y @ layer.up.T)) @ layer.down.T
    return norm(x, w.layers[1].attention_norm) @ np.asarray(w.layers[1].v, np.float64).T


def test_deviation_is_the_squared_distance_of_fresh_and_cached_values():
    _, _, out = blended(layout_of(), [segment(tokens) for tokens in DOCUMENTS])
    fresh = check_layer_values(np.concatenate([*DOCUMENTS, SUFFIX]))[:64]
    cached = np.concatenate([check_layer_values(tokens) for tokens in DOCUMENTS])
    expected = np.square(fresh - cached).sum(-1)
    assert out.deviation.dtype == np.float32
    np.testing.assert_allclose(np.asarray(out.deviation)[:64], expected, rtol=1e-4, atol=1e-9)
    assert expected[24:].min() > 1e-4


@pytest.mark.parametrize("kind", ROPES)
def test_cached_keys_are_rotated_once_to_where_they_now_stand(kind):
    shape, positions = config(kind), np.arange(23, 63)
    documents = [DOCUMENTS[0], DOCUMENTS[2]]
    kvs = [segment(tokens, shape) for tokens in documents]
    pool, table, _ = blended(layout_of(documents), kvs, 0, shape)
    k, v = kvs[1]
    angle = positions[:, None, None] * rope.inverse_frequencies(shape.rope, MODEL.head_dim)
    z = (k[2:, ..., :4] + 1j * k[2:, ..., 4:].astype(np.float64)) * np.exp(1j * angle)
    z = z * rope.attention_scaling(shape.rope)
    got = rows_of(pool, table, 63)[:, 2:, 23:]
    np.testing.assert_allclose(got[0], np.concatenate([z.real, z.imag], -1), atol=2e-5)
    np.testing.assert_array_equal(got[1], v[2:])


def test_a_document_stands_in_one_key_whatever_it_was_computed_beside():
    """Clean KV has the same bits after other work in the same blocks, and in other blocks."""
    expected = segment(DOCUMENTS[2])
    pool, table, _ = prefill(ids(90, 11))
    pool, *found = blend.segment_kv(weights(), pool, table[:, ::-1], DOCUMENTS[2], config=MODEL, chunk=CHUNK)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


# -- loading -----------------------------------------------------------------------------------------------------------


def test_layers_are_asked_for_in_order_and_only_where_they_are_used():
    kvs = [segment(tokens) for tokens in DOCUMENTS]
    for exact, expected in ((False, [1, 2, 3]), (True, [0, 1, 2, 3])):
        asked = []
        layout = Layout.of([Piece(tokens, cached=True, exact=exact) for tokens in DOCUMENTS], SUFFIX)
        give = layers_of(kvs)
        seen = []
        blend.blend_prefill(
            weights(), *row(), layout, lambda layer: asked.append(layer) or give(layer), config=MODEL, chunk=CHUNK,  # noqa: B023
            watch=lambda layer, hidden: seen.append((layer, hidden.shape)),  # noqa: B023
        )  # fmt: skip
        assert asked == expected
        assert seen == [(layer, (128, 48)) for layer in (1, 2, 3)]


@pytest.mark.parametrize("broken", [1, 3])
@pytest.mark.parametrize("how", ["raises", "shape"])
def test_kv_that_cannot_be_had_leaves_a_pool_that_can_be_used(broken, how):
    kvs = [segment(tokens) for tokens in DOCUMENTS]

    def give(layer):
        if layer == broken and how == "raises":
            raise OSError("gone")
        return layers_of(kvs[: 2 if layer == broken else 3])(layer)

    pool, table = row()
    with pytest.raises(LoadError, match=f"layer {broken} ") as caught:
        blend.blend_prefill(weights(), pool, table, layout_of(), give, config=MODEL, chunk=CHUNK)
    assert isinstance(caught.value.__cause__, OSError if how == "raises" else ValueError)
    tokens = np.concatenate([*DOCUMENTS, SUFFIX])
    _, _, logits = prefill(tokens, pool=caught.value.pool, table=table)
    np.testing.assert_array_equal(logits, prefill(tokens)[2])


@pytest.mark.parametrize("step", ["restore", "check", "run_layer"])
def test_no_second_pool_in_memory(step):
    """Invariant 9, as for the steps of prefill."""
    shape = CacheConfig(blocks=20_000, context=256, block_size=16)
    pool = KVPool.shapes(MODEL, shape)
    pages = KVPool(k=pool.k[: 2 if step == "check" else 1], v=pool.v[: 2 if step == "check" else 1])
    static = {"config": MODEL, "chunk": CHUNK}
    rows, table, slots = np.zeros((64, 2, 8), np.float32), np.zeros((1, 16), np.int32), np.zeros(64, np.int32)
    hidden, count = np.zeros((64, 48), np.float32), np.int32(9)
    if step == "restore":
        lowered = blend_steps.restore.lower(pages, rows, rows, slots, table, **static)
    elif step == "check":
        some = weights().replace(layers=weights().layers[:2])
        args = (some, pages, slots, rows, np.zeros(3, np.int32), table)
        lowered = blend_steps.check.lower(*args, **static, implementation=None)
    else:
        args = (weights().layers[0], pages, hidden, slots, count, table)
        lowered = blend_steps.run_layer.lower(*args, **static, implementation=None)
    compiled = lowered.compile()
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(pages))
    assert compiled.memory_analysis().alias_size_in_bytes == size
    assert compiled.memory_analysis().temp_size_in_bytes < size / 20
    page = f"f32[{','.join(map(str, pages.k[0].shape))}]"
    assert not [x for x in compiled.as_text().splitlines() if page in x.split("(")[0] and " copy(" in x]


# -- the controller ----------------------------------------------------------------------------------------------------


def controlled(load, least=0.15, speeds=None, layout=None, layers=30):
    shape = dataclasses.replace(MODEL, layers=layers)
    documents = [Piece(np.zeros(256, np.int32), cached=True)] * 12
    layout = layout or Layout.of(documents, np.zeros(32, np.int32))
    return choose(layout, shape, speeds or Speeds(1e-3, 1e-8), load, least=least)


def test_what_is_in_memory_is_blended_at_the_least_ratio_and_near_the_bound():
    choice = controlled(0.0)
    assert (choice.full, choice.ratio) == (False, 0.15)
    assert 4.8 < choice.full_seconds / choice.blend_seconds < 5.6


def test_slow_loads_raise_the_ratio_until_a_full_prefill_is_faster():
    choices = [controlled(seconds) for seconds in np.linspace(0, 6, 61)]
    assert all(a.ratio <= b.ratio and a.blend_seconds <= b.blend_seconds for a, b in itertools.pairwise(choices))
    assert not choices[0].full and choices[-1].full and choices[-1].ratio == 1
    for choice, seconds in zip(choices, np.linspace(0, 6, 61), strict=True):
        assert choice.full == (choice.full_seconds <= choice.blend_seconds)
        if 0.15 < choice.ratio < 1:
            # Loading and computing take as long, but for the last layer's own work.
            assert seconds < choice.blend_seconds < seconds * (1 + 1 / 29)


def test_prompts_with_little_to_reuse_are_prefilled_in_full():
    none = Layout.of([Piece(np.zeros(500, np.int32))], [0])
    assert controlled(0.0, layout=none).full
    most = Layout.of([Piece(np.zeros(500, np.int32), cached=True)], [0])
    assert not controlled(0.0, layout=most).full
    assert controlled(0.0, layout=most, least=1.0).full
    assert controlled(0.0, layout=most, speeds=Speeds(1e-3, 0, restore_seconds=2e-3)).full


def test_speeds_are_fitted_to_prefills():
    made = [(n, n * 2e-3 + n * (n + 1) / 2 * 3e-7) for n in (100, 1000, 4000)]
    found = Speeds.fit(made)
    np.testing.assert_allclose([found.token_seconds, found.pair_seconds], [2e-3, 3e-7], rtol=1e-9)
    assert Speeds.fit([(100, 0.5)]) == Speeds(0.005)
    # Longer prompts that take less time a token: noise, so attention is left out.
    assert Speeds.fit([(100, 1.0), (1000, 5.0)]).pair_seconds == 0


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_models_that_cannot_be_blended_are_refused_by_name():
    dynamic = RopeConfig()
    object.__setattr__(dynamic, "kind", "dynamic")
    shape = dataclasses.replace(MODEL, rope=dynamic)
    with pytest.raises(NotImplementedError, match="rope kind='dynamic'"):
        blend.blend_prefill(weights(), *row(), layout_of(), layers_of([]), config=shape)
    with pytest.raises(NotImplementedError, match="rope kind='dynamic'"):
        blend.segment_kv(weights(), *row(), [1], config=shape)
    with pytest.raises(NotImplementedError, match="layers=1"):
        blend.segment_kv(weights(), *row(), [1], config=dataclasses.replace(MODEL, layers=1))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"kv_lora_rank": 16}, "multi-head latent attention"),
    ],
)
def test_sliding_windows_dynamic_rope_and_mla_are_refused_when_a_model_is_read(tmp_path, changes, reason):
    shape = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
    shape |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256}
    shape |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **changes}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises((ValueError, NotImplementedError), match=reason):
        weights_module.read_config(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.of([], []), "without a token"),
        (lambda: Layout.of([], [1], start=-1), "start=-1"),
        (
            lambda: Layout.of([Piece([1], cached=True), Piece([2], cached=True, exact=True)], [3]),
            "behind a blended one",
        ),
        (lambda: Piece([1], exact=True), "cannot be exact"),
        (lambda: layout_of().recomputed(1.5), "ratio=1.5"),
        (lambda: layout_of().recomputed(math.nan), "ratio=nan"),
        (lambda: blended(layout_of(suffix=ids(200)), []), "room for 160 slots"),
        (lambda: blended(layout_of(), [], width=64), "width=64"),
        (lambda: blended(layout_of(), [], width=120), "width=120"),
        (lambda: blended(layout_of(), [], priority=np.zeros(3)), "priority has shape"),
        (lambda: blend.segment_kv(weights(), *row(), ids(200), config=MODEL), "blocks for 160"),
        (lambda: choose(layout_of(), MODEL, Speeds(1.0), 0.0, least=2), "least=2"),
        (lambda: choose(layout_of(), MODEL, Speeds(1.0), -1.0), "load_seconds=-1"),
        (lambda: Speeds(0.0), "token_seconds=0"),
        (lambda: Speeds.fit([]), "at least one"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_done(make, message):
    with pytest.raises(ValueError, match=message):
        make()
