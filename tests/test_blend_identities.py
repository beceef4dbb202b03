"""What blending must equal, on a tiny model in float32 whose pool is NaN wherever nothing was written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blend_cases import (
    CACHE,
    CHUNK,
    MODEL,
    ROPES,
    assert_same_answer,
    blended,
    config,
    ids,
    layers_of,
    prefill,
    row,
    rows_of,
    segment,
    substituted,
    weights,
)
from tiny import counted

import pallas_kernels
from jaxkv import blend, blend_steps, decode
from jaxkv.blend import Layout, Piece

DOCUMENTS = [ids(23, 1), ids(1, 2), ids(40, 3), ids(16, 4)]
SUFFIX = ids(7, 5)
RATIOS = (0, 0.05, 0.15, 0.5, 1)


def pieces(documents=DOCUMENTS, **options):
    return [Piece(tokens, cached=True, **options) for tokens in documents]


def segments(documents=DOCUMENTS, model=MODEL):
    return [segment(tokens, model) for tokens in documents]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("ratio", [0, 0.15, 0.5])
def test_a_blend_is_a_dense_pass_in_which_cached_kv_stands_in(rope, ratio):
    model = config(rope)
    made = [Piece(ids(3, 12)), *pieces()]
    layout, kvs = Layout.of(made, SUFFIX), segments(model=model)
    _, _, out = blended(layout, kvs, ratio, model)
    selected = np.asarray(out.selected)[: out.computed]
    dense = substituted(layout, kvs, selected, model)
    assert_same_answer(np.asarray(out.logits[0]), dense[-1])
    _, _, full = prefill(np.concatenate([ids(3, 12), *DOCUMENTS, SUFFIX]), model)
    assert np.abs(dense[-1] - full).max() > 0.01


@pytest.mark.parametrize("rope", ROPES)
def test_a_ratio_of_one_is_a_full_prefill(rope):
    model = config(rope)
    full_pool, full_table, full = prefill(np.concatenate([*DOCUMENTS, SUFFIX]), model)
    pool, table, out = blended(Layout.of(pieces(), SUFFIX), segments(model=model), 1, model)
    assert_same_answer(np.asarray(out.logits[0]), full)
    np.testing.assert_allclose(rows_of(pool, table, 87), rows_of(full_pool, full_table, 87), atol=1e-5)
    assert (out.computed, out.recomputed, out.reused) == (87, 80, 0)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_segment_that_is_the_prefix_is_a_full_prefill_at_every_ratio(rope, ratio):
    model, document = config(rope), ids(50, 6)
    _, _, full = prefill(np.concatenate([document, SUFFIX]), model)
    layout = Layout.of([Piece(document, cached=True, exact=True)], SUFFIX)
    _, _, out = blended(layout, [segment(document, model)], ratio, model)
    assert_same_answer(np.asarray(out.logits[0]), full)
    assert (out.computed, out.recomputed, out.reused) == (7, 0, 50)


@pytest.mark.parametrize("rope", ["default", "llama3", "yarn"])
def test_a_segment_behind_the_tokens_it_was_prefilled_behind_is_exact(rope):
    """Its keys stand five slots further on than a segment's do, so they have to be rotated to other positions."""
    model, before, document = config(rope), ids(5, 8), ids(30, 6)
    _, _, full = prefill(np.concatenate([before, document, SUFFIX]), model)
    layout = Layout.of([Piece(before), Piece(document, cached=True, exact=True)], SUFFIX)
    kv = segment(document, model, before)
    assert kv[0].shape == (4, 30, 2, 8)
    _, _, out = blended(layout, [kv], 0, model)
    assert_same_answer(np.asarray(out.logits[0]), full)
    assert out.computed == 12
    alone = segment(document, model)
    _, _, wrong = blended(layout, [alone], 0, model)
    assert np.abs(np.asarray(wrong.logits[0]) - full).max() > 0.01


def test_prompts_of_missing_segments_are_full_prefills():
    _, _, full = prefill(np.concatenate([*DOCUMENTS, SUFFIX]))
    _, _, out = blended(Layout.of([Piece(tokens) for tokens in DOCUMENTS], SUFFIX), [], 0)
    assert_same_answer(np.asarray(out.logits[0]), full)
    assert (out.computed, out.recomputed, out.reused) == (87, 0, 0)


def test_a_segment_missing_in_the_middle_is_computed_and_loses_nothing_behind_it():
    made = [Piece(DOCUMENTS[0], cached=True), Piece(DOCUMENTS[2]), Piece(DOCUMENTS[3], cached=True)]
    layout = Layout.of(made, SUFFIX)
    _, _, out = blended(layout, segments([DOCUMENTS[0], DOCUMENTS[3]]), 0)
    assert (out.computed, out.reused) == (47, 39)
    assert np.asarray(out.selected)[:47].tolist() == [*range(23, 63), *range(79, 86)]
    _, _, full = prefill(np.concatenate([DOCUMENTS[0], DOCUMENTS[2], DOCUMENTS[3], SUFFIX]))
    _, _, out = blended(layout, segments([DOCUMENTS[0], DOCUMENTS[3]]), 1)
    assert_same_answer(np.asarray(out.logits[0]), full)


def test_a_prompt_that_is_cached_throughout_has_logits():
    for exact, ratio in ((True, 0), (False, 1)):
        document = ids(33, 6)
        _, _, full = prefill(document)
        layout = Layout.of([Piece(document, cached=True, exact=exact)])
        _, _, out = blended(layout, [segment(document)], ratio)
        assert_same_answer(np.asarray(out.logits[0]), full)
        assert out.computed == (1 if exact else 33)


@pytest.mark.parametrize("held", [5, 16])
def test_a_prefix_that_the_pool_has_is_not_computed_again(held):
    head = ids(held, 9)
    tokens = np.concatenate([head, *DOCUMENTS, SUFFIX])
    _, _, full = prefill(tokens)
    pool, table, _ = prefill(head)
    before = rows_of(pool, table, held)
    pool, table, out = blended(Layout.of(pieces(), SUFFIX, start=held), segments(), 1, pool=pool, table=table)
    assert_same_answer(np.asarray(out.logits[0]), full)
    assert np.array_equal(rows_of(pool, table, held), before)


def test_empty_segments_and_one_document_twice():
    twice = [DOCUMENTS[2], np.zeros(0, np.int32), DOCUMENTS[2], DOCUMENTS[1]]
    layout = Layout.of(pieces(twice), SUFFIX)
    assert layout.spans == ((0, 40), (40, 80), (80, 81))
    _, _, full = prefill(np.concatenate([*twice, SUFFIX]))
    _, _, out = blended(layout, segments([twice[0], twice[2], twice[3]]), 1)
    assert_same_answer(np.asarray(out.logits[0]), full)


def test_more_recomputing_brings_the_answer_closer_and_plain_reuse_is_not_it():
    _, _, full = prefill(np.concatenate([*DOCUMENTS, SUFFIX]))
    far = [
        np.abs(np.asarray(blended(Layout.of(pieces(), SUFFIX), segments(), r)[2].logits[0]) - full).max()
        for r in RATIOS
    ]
    assert far[0] > 0.5 and far[3] < far[0] and far[4] < 1e-4


def test_layer_0_and_the_check_layer_are_exact_at_every_ratio_and_layer_0_is_what_was_stored():
    """Keys and values of layer 0 depend on the token alone: stored, loaded and rotated, they have prefill's bits."""
    full_pool, full_table, _ = prefill(np.concatenate([*DOCUMENTS, SUFFIX]))
    pool, table, _ = blended(Layout.of(pieces(), SUFFIX), segments(), 0)
    got, want = rows_of(pool, table, 87), rows_of(full_pool, full_table, 87)
    np.testing.assert_array_equal(got[:, :2], want[:, :2])
    assert np.abs(got[:, 2:] - want[:, 2:]).max() > 0.01
    layout = Layout.of(pieces(), SUFFIX)
    k, v = (np.concatenate([kv[i][0] for kv in segments()] + [np.zeros((9, 2, 8), np.float32)]) for i in range(2))
    k, v = (np.pad(x, ((0, 96 - len(x)), (0, 0), (0, 0))) for x in (k, v))
    pool, table = row()
    one = decode.KVPool(k=pool.k[:1], v=pool.v[:1])
    stored = blend_steps.restore(one, k, v, layout.slots(96, 1, 2), table, config=MODEL, chunk=CHUNK)
    stored = decode.KVPool(k=stored.k * 4, v=stored.v * 4)
    np.testing.assert_array_equal(rows_of(stored, table, 80)[:, 0], want[:, 0, :80])


def test_decoding_goes_on_as_after_a_prefill():
    def answer(pool, table, logits):
        rows = decode.Rows.idle(CACHE)
        rows.token[0], rows.active[0], rows.table[0] = int(logits.argmax()), True, table[0]
        rows.length[0] = rows.position[0] = 87
        out = decode.decode_round(weights(), pool, rows, np.int32(16), config=MODEL, max_steps=16)[2]
        return out.tokens[0].tolist()

    pool, table, logits = prefill(np.concatenate([*DOCUMENTS, SUFFIX]))
    expected = answer(pool, table, logits)
    pool, table, out = blended(Layout.of(pieces(), SUFFIX), segments(), 1)
    assert answer(pool, table, np.asarray(out.logits[0])) == expected


# -- the mask ----------------------------------------------------------------------------------------------------------


def earlier_rows_when_a_later_token_changes():
    """Return what stands in the slots of selected tokens, before and after the cached KV of a later one changed."""
    layout = Layout.of(pieces(), SUFFIX)
    # Every fourth token is selected, and 50 is not.
    priority = np.where(np.arange(layout.size) % 4 == 0, 1, 0).astype(np.float32)
    kvs = segments()
    found = []
    for change in (0, 3):
        k, v = (x.copy() for x in kvs[2])
        k[:, 50 - 24] += change
        v[:, 50 - 24] -= change
        pool, table, out = blended(layout, [*kvs[:2], (k, v), kvs[3]], 0.25, priority=priority)
        selected = np.asarray(out.selected)[: out.computed]
        assert 50 not in selected and (selected < 50).sum() > 10
        found.append(rows_of(pool, table, 87)[:, :, selected[selected < 50]])
        later = rows_of(pool, table, 87)[:, 3, selected[selected > 50]]
    assert np.isfinite(later).all()
    return found


def test_a_later_token_changes_no_bit_of_an_earlier_selected_one():
    before, after = earlier_rows_when_a_later_token_changes()
    np.testing.assert_array_equal(before, after)


def test_the_mask_test_fails_where_the_mask_is_aligned_to_the_bottom_right(monkeypatch):
    """The i-th of m selected tokens then sees keys up to T - m + i, its future included."""
    exact = decode.paged_attend

    def bottom_right(table, slots, implementation=None):
        within = exact(table, slots, implementation)

        def attend(pool, layer, heads):
            pool, _ = within(pool, layer, heads)
            count = jnp.sum(slots >= 0)
            wrong = jnp.where(slots >= 0, jnp.max(slots) + 1 - count + jnp.arange(slots.shape[1]), -1)
            return pool, pallas_kernels.attend(heads.rotated()[0], pool.k[layer], pool.v[layer], table, wrong)

        return attend

    with monkeypatch.context() as patch:
        patch.setattr(decode, "paged_attend", bottom_right)
        # One chunk holds all selected tokens, so they are aligned to the prompt's end together.
        patch.setattr("blend_cases.CHUNK", 48)
        jax.clear_caches()
        before, after = earlier_rows_when_a_later_token_changes()
    jax.clear_caches()
    assert np.abs(before - after).max() > 0.01


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_warmup_compiles_everything_and_touches_only_the_null_block(dtype):
    made = jax.tree.map(lambda x: x.astype(dtype), weights())
    pool, table = row()
    pool = blend.warmup(made, pool, table.shape[1], config=MODEL, chunk=CHUNK)
    assert all(np.isnan(np.asarray(page)[1:]).all() for page in (*pool.k, *pool.v))
    document = Piece(ids(37), cached=True)
    layouts = [Layout.of([Piece(ids(count, 1)), document], ids(3, 2)) for count in (1, 37)]
    layouts.append(Layout.of([Piece(ids(37), cached=True, exact=True)], ids(80, 2)))
    layouts.append(Layout.of([], ids(50, 3)))

    def work(pool):
        pool, k, v = blend.segment_kv(made, pool, table, ids(37), config=MODEL, chunk=CHUNK)
        assert k.dtype == dtype
        found = []
        for layout in layouts:
            for ratio in (0, 0.3):
                kvs = [(k, v)] if layout.spans else []
                call = {"config": MODEL, "ratio": ratio, "chunk": CHUNK}
                pool, out = blend.blend_prefill(made, pool, table, layout, layers_of(kvs), **call)
                found.append(out.logits)
        return found

    found, programs = counted(lambda: work(pool))
    assert programs == 0
    assert np.isfinite(np.asarray(found)).all()
