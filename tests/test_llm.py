"""LLM on a tiny model in a folder: what comes out, what is refused, and that nothing of a stream is left behind."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_folder
from expected import dense
from hypothesis import given
from hypothesis import strategies as st

from jaxkv import LLM, Completion, RequestError, SamplingParams, decode, model, monitor, sizing, weights

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
WARM = dataclasses.replace(GREEDY, temperature=1.0)
TEXTS = ["the cat", "naïve café 日本語", "12 + 34 = ", "def f(x):"]
BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    """One engine of three rows for most tests: a new shape would compile anew."""
    return LLM(str(folder), rows=3, pool_blocks=48, prefill_chunk=16)


def in_use(llm: LLM) -> int:
    assert llm._engine is not None
    return llm._engine.blocks.in_use


def programs(function: Callable[[], Any]) -> int:
    with monitor.compiles() as compiled:
        function()
    return compiled.programs


def same(left: Completion, right: Completion) -> bool:
    fields = ("text", "token_ids", "finish_reason", "position", "blocks_now")
    return all(getattr(left, name) == getattr(right, name) for name in fields)


@functools.cache
def dense_forward(folder: Path) -> Callable[[Any], jax.Array]:
    """The model with no cache at all: tokens [1, T] to the log probabilities of what follows each, [T, V]."""
    config, loaded = weights.load(folder, jnp.float32)

    @jax.jit
    def run(tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[1])[None]
        _, hidden = model.forward(loaded, config, tokens, positions, dense, None)
        return jax.nn.log_softmax(model.logits(loaded, hidden[0]))

    return run


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_prompts_are_texts_token_ids_or_messages(llm: LLM) -> None:
    text = TEXTS[0]
    chat = f"<|bos|><|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    ids = llm.encode(text)
    messages = [{"role": "user", "content": text}]
    assert llm.tokenizer.fast.decode(ids) == chat
    assert llm.tokenizer.fast.decode(llm.encode(text, raw=True)) == text
    system = llm.tokenizer.fast.decode(llm.encode(text, system_prompt="be brief"))
    assert system == chat.replace("<|bos|>", "<|bos|><|im_start|>system\nbe brief<|im_end|>\n")

    (single,) = llm.generate(text, GREEDY)
    several = llm.generate([text, ids, messages, np.array(ids), tuple(messages)], GREEDY)
    assert all(same(single, other) for other in several)
    assert [one.prompt for one in several] == [text, ids, messages, ids, messages]
    (raw,) = llm.generate(text, GREEDY, raw=True)
    assert raw.prompt_tokens == len(llm.encode(text, raw=True))
    (briefly,) = llm.generate(text, GREEDY, system_prompt="be brief")
    assert briefly.prompt_tokens == len(llm.encode(text, system_prompt="be brief"))


@pytest.mark.parametrize("text", TEXTS)
def test_greedy_tokens_and_logprobs_are_those_of_a_dense_forward(llm: LLM, folder: Path, text: str) -> None:
    (plain,) = llm.generate(text, GREEDY)
    (done,) = llm.generate(text, dataclasses.replace(GREEDY, logprobs=True))
    assert plain.logprobs is None
    assert "logprobs" not in plain.to_json()
    assert same(plain, done)
    ids = llm.encode(text)
    # Padded to one length, so that one program does: nothing sees what comes after it.
    tokens = np.pad([*ids, *done.token_ids], (0, 100))[None, :100]
    expected = np.asarray(dense_forward(folder)(tokens))[len(ids) - 1 :][:40]
    assert done.token_ids == expected.argmax(axis=-1).tolist()
    np.testing.assert_allclose(done.logprobs, expected.max(axis=-1), atol=1e-4)
    assert done.to_json()["logprobs"] == done.logprobs


def test_results_come_in_order_each_by_its_own_params(llm: LLM) -> None:
    counts = [30, 1, 9, 4, 17]
    params = [dataclasses.replace(WARM, max_tokens=count, seed=count) for count in counts]
    done = llm.generate([TEXTS[0]] * 5, params)
    assert [one.generated_tokens for one in done] == counts
    assert [one.seed for one in done] == counts
    assert [same(one, llm.generate(TEXTS[0], own)[0]) for one, own in zip(done, params, strict=True)] == [True] * 5


def test_a_completion_counts_tokens_blocks_bytes_and_seconds(llm: LLM) -> None:
    for done in llm.generate(TEXTS, GREEDY):
        assert (done.generated_tokens, done.finish_reason) == (40, "length")
        assert done.prompt_tokens == len(llm.encode(done.prompt))
        assert done.position == done.length == done.prompt_tokens + 40 - 1
        assert done.blocks_now == done.blocks_peak == -(-done.position // BLOCK)
        assert min(done.queued_seconds, done.prefill_seconds, done.decode_seconds) > 0
        assert done.compile_seconds > 0
        assert (done.block_size, done.pool_blocks, done.implementation) == (BLOCK, 48, "xla")
        # Block 0 is extra. Two layers of k and v, two KV heads of 16 float32 numbers a slot.
        assert done.pool_bytes == 49 * 2 * 2 * 2 * 16 * 4 * BLOCK
        assert not done.reached_context


def test_a_text_ends_before_a_stop_string_wherever_tokens_divide_it(llm: LLM) -> None:
    (whole,) = llm.generate(TEXTS[1], dataclasses.replace(WARM, max_tokens=60, seed=2))
    pieces = [llm.tokenizer.decode([token]) for token in whole.token_ids]
    stops = [left[-1] + right[:1] for left, right in itertools.pairwise(pieces) if left and right]
    stops = [stop for stop in stops if "\ufffd" not in stop]
    assert len(stops) > 20
    for stop in [
        *stops,
        *("".join(pieces[at : at + 3]) for at in (5, 12) if "\ufffd" not in "".join(pieces[at : at + 3])),
    ]:
        count = next(n for n in range(61) if stop in llm.tokenizer.decode(whole.token_ids[:n]))
        params = dataclasses.replace(WARM, max_tokens=60, seed=2, stop=("not in there", stop), logprobs=True)
        *deltas, last = llm.stream(TEXTS[1], params)
        (done,) = llm.generate(TEXTS[1], params)
        assert last.completion is not None and same(done, last.completion)
        assert done.token_ids == whole.token_ids[:count]
        assert done.text == llm.tokenizer.decode(whole.token_ids[:count]).partition(stop)[0]
        assert "".join(delta.text for delta in [*deltas, last]) == done.text
        assert (done.finish_reason, done.generated_tokens) == ("stop", count)
        assert done.logprobs is not None and len(done.logprobs) == count
        assert done.position == done.prompt_tokens + count - 1
        assert done.blocks_now == -(-done.position // BLOCK)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_what_is_streamed_joins_to_the_completion(llm: LLM, temperature: float) -> None:
    params = [
        dataclasses.replace(GREEDY, temperature=temperature, seed=seed, max_tokens=20 * seed + 1, logprobs=True)
        for seed in range(4)
    ]
    text, ids, logprobs, done = [""] * 4, [[] for _ in TEXTS], [[] for _ in TEXTS], {}
    for delta in llm.stream(TEXTS, params):
        assert delta.index not in done
        text[delta.index] += delta.text
        ids[delta.index] += delta.token_ids
        logprobs[delta.index] += delta.logprobs
        if delta.completion is not None:
            done[delta.index] = delta.completion
    whole = llm.generate(TEXTS, params)
    assert [same(done[at], whole[at]) for at in range(4)] == [True] * 4
    assert [done[at].text for at in range(4)] == text == [llm.tokenizer.decode(tokens) for tokens in ids]
    assert [done[at].token_ids for at in range(4)] == ids
    assert [done[at].logprobs for at in range(4)] == logprobs
    assert [len(tokens) for tokens in logprobs] == [1, 21, 41, 61]


def test_text_is_streamed_while_it_is_made(llm: LLM) -> None:
    deltas = list(llm.stream(TEXTS[0], GREEDY))
    assert len([delta for delta in deltas if delta.text]) > 3
    assert max(len(delta.token_ids) for delta in deltas) <= 8


def test_every_token_that_tokenizer_or_configurations_name_ends_a_text(llm: LLM) -> None:
    ends = {tiny_folder.TOKENIZER_EOS, tiny_folder.CONFIG_EOS, tiny_folder.GENERATION_EOS}
    params = [SamplingParams(max_tokens=200, temperature=1.5, seed=seed) for seed in range(30)]
    found = set()
    for one in llm.generate([[7]] * 30, params):
        assert ends.isdisjoint(one.token_ids[:-1])
        assert (one.finish_reason == "stop") == (one.token_ids[-1] in ends)
        assert one.text == llm.tokenizer.decode(one.token_ids)
        found |= ends & {one.token_ids[-1]}
    assert found == ends
    ignoring = [dataclasses.replace(own, ignore_eos=True) for own in params]
    over = llm.generate([[7]] * 30, ignoring)
    assert {one.generated_tokens for one in over} == {200}
    assert all(ends & set(one.token_ids[:-1]) for one in over[:3])
    token = over[0].token_ids[10]
    (own,) = llm.generate([[7]], dataclasses.replace(ignoring[0], stop_token_ids=(token,)))
    assert own.token_ids == over[0].token_ids[: over[0].token_ids.index(token) + 1]
    assert own.finish_reason == "stop"


def test_the_context_ends_a_text_and_the_completion_says_so(llm: LLM) -> None:
    prompt = [9] * 250
    assert llm.context == tiny_folder.CONTEXT == 256
    (done,) = llm.generate([prompt], GREEDY)
    assert (done.generated_tokens, done.finish_reason, done.reached_context) == (6, "length", True)
    (done,) = llm.generate([prompt], dataclasses.replace(GREEDY, max_tokens=6))
    assert (done.generated_tokens, done.reached_context) == (6, False)


# -- company -----------------------------------------------------------------------------------------------------------


@functools.cache
def requests() -> list[tuple[Any, SamplingParams]]:
    kinds = [{}, {"temperature": 0.8}, {"temperature": 1.2, "top_p": 0.9}, {"temperature": 1.0, "top_k": 7}]
    return [
        (TEXTS[at % 4] * (1 + at), SamplingParams(max_tokens=5 + 7 * at, seed=at, **kinds[at % 4])) for at in range(6)
    ]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=7), st.booleans())
def test_a_request_gives_in_any_company_what_it_gives_alone(llm: LLM, chosen: list[int], streamed: bool) -> None:
    alone = _alone(llm)
    prompts, params = zip(*(requests()[at] for at in chosen), strict=True)
    if streamed:
        found = {d.index: d.completion for d in llm.stream(prompts, params) if d.completion is not None}
        done = [found[at] for at in range(len(chosen))]
    else:
        done = llm.generate(prompts, params)
    assert [same(one, alone[at]) for one, at in zip(done, chosen, strict=True)] == [True] * len(chosen)
    assert in_use(llm) == 0


@functools.cache
def _alone(llm: LLM) -> list[Completion]:
    return [llm.generate([prompt], params)[0] for prompt, params in requests()]


# -- streams that end badly --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [1, 3, 6])
def test_a_stream_closed_early_frees_its_blocks_and_the_next_is_as_ever(llm: LLM, pieces: int) -> None:
    expected = llm.generate(TEXTS, WARM)
    stream = llm.stream(TEXTS * 2, WARM)
    for _ in range(pieces):
        next(stream)
    assert in_use(llm) > 0
    stream.close()
    assert in_use(llm) == 0
    assert not llm._engine.has_work
    assert programs(lambda: [same(*pair) for pair in zip(llm.generate(TEXTS, WARM), expected, strict=True)]) == 0
    assert [same(*pair) for pair in zip(llm.generate(TEXTS, WARM), expected, strict=True)] == [True] * 4


def test_a_stream_that_nobody_reads_holds_nothing(llm: LLM) -> None:
    llm.stream(TEXTS, GREEDY).close()
    llm.stream(TEXTS, GREEDY)
    assert llm.generate(TEXTS[0], GREEDY)[0].generated_tokens == 40
    assert in_use(llm) == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_a_step_torn_in_the_middle_drops_the_engine_and_the_next_request_is_as_ever(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    expected = llm.generate(TEXTS, WARM)
    torn = llm._engine
    whole, rounds = decode.decode_round, 0

    def tear(*args: Any, **options: Any) -> Any:
        nonlocal rounds
        rounds += 1
        out = whole(*args, **options)
        if rounds == 2:
            # By now the pool was given away, and nobody has the new one.
            raise KeyboardInterrupt
        return out

    with monkeypatch.context() as patch:
        patch.setattr(decode, "decode_round", tear)
        with pytest.raises(KeyboardInterrupt):
            list(llm.stream(TEXTS, WARM)) if streamed else llm.generate(TEXTS, WARM)
    assert llm._engine is None
    again = llm.generate(TEXTS, WARM)
    assert [same(*pair) for pair in zip(again, expected, strict=True)] == [True] * 4
    assert llm._engine is not torn
    assert in_use(llm) == 0


def test_one_stream_at_a_time(llm: LLM) -> None:
    first = llm.stream(TEXTS, GREEDY)
    waiting = llm.stream(TEXTS[0], GREEDY)
    next(first)
    for other in (lambda: llm.stream(TEXTS, GREEDY), lambda: llm.generate(TEXTS, GREEDY), lambda: next(waiting)):
        with pytest.raises(RuntimeError, match="another stream of this LLM"):
            other()
    assert sum(delta.completion is not None for delta in first) == 4
    assert llm.generate(TEXTS[0], GREEDY)[0].generated_tokens == 40


def test_a_refusal_stops_nothing_that_runs(llm: LLM) -> None:
    stream = llm.stream(TEXTS, GREEDY)
    llm_engine = llm._engine
    with pytest.raises(RequestError, match="prompt 2 of 2"):
        llm.generate(["a", [99999]], GREEDY)
    assert llm._engine is llm_engine
    assert sum(delta.completion is not None for delta in stream) == 4


# -- the pool's size ---------------------------------------------------------------------------------------------------


def test_a_pool_grows_for_larger_requests_and_stays_for_smaller_ones(folder: Path) -> None:
    llm = LLM(str(folder), prefill_chunk=16)

    def blocks(prompts: list[list[int]], max_tokens: int) -> int:
        return llm.generate(prompts, dataclasses.replace(GREEDY, max_tokens=max_tokens))[0].pool_blocks

    assert programs(lambda: blocks([[5] * 20], 13)) > 0
    small = blocks([[5] * 20], 13)
    # 20 prompt and 12 of 13 tokens: the last one's K and V are never needed.
    assert small == 2
    assert programs(lambda: blocks([[5] * 3], 2)) == 0
    assert blocks([[5] * 3], 2) == small
    grown = blocks([[5] * 90, [5] * 3, [5] * 100], 40)
    assert grown == 9 + 3 + 9 + 3  # 21, rounded up
    larger_than_this = [[[5] * 3], [[5] * 100] * 3, [[5] * 50] * 3]
    assert programs(lambda: [blocks(prompts, 12) for prompts in larger_than_this]) == 0
    assert [blocks(prompts, 12) for prompts in larger_than_this] == [grown] * 3


def test_a_pool_has_the_size_that_is_given(folder: Path, llm: LLM) -> None:
    assert llm.generate(TEXTS[0], GREEDY)[0].pool_blocks == 48
    # 49 blocks are 48 and the null block: the shape that is compiled already.
    block_bytes = 2 * 2 * 2 * 16 * 4 * BLOCK
    for memory in (49 * block_bytes, 50 * block_bytes - 1):
        sized = LLM(str(folder), rows=3, pool_memory=memory, prefill_chunk=16)
        (done,) = sized.generate(TEXTS[0], GREEDY)
        assert (done.pool_blocks, done.pool_bytes) == (48, 49 * block_bytes)
        assert same(done, llm.generate(TEXTS[0], GREEDY)[0])


def test_a_pool_that_takes_all_free_memory_still_serves_what_it_can(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(folder), rows=3, prefill_chunk=16)
    asked = []

    def most_blocks(*_: Any, replaced: int, **__: Any) -> int:
        asked.append(replaced)
        return 60

    monkeypatch.setattr(sizing, "most_blocks", most_blocks)
    (done,) = llm.generate([[5] * 200] * 3, GREEDY)[:1]
    # 15 blocks each, together 45, rounded up.
    assert done.pool_blocks == 48
    monkeypatch.setattr(sizing, "most_blocks", lambda *_, **__: pytest.fail("the present pool will do"))
    llm.generate([[5] * 200] * 2, GREEDY)
    assert asked == [0]
