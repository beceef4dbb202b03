"""What LLM refuses: at once, in one message that names the value and the way out, and before anything is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_folder

from jaxkv import LLM, RequestError, SamplingParams, monitor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.make(tmp_path_factory.mktemp("tiny"))


FITS = [1, 2, 3]


@pytest.mark.parametrize(
    ("prompts", "params", "options", "message"),
    [
        (
            [FITS, [4] * 100],
            {"max_tokens": 60},
            {},
            r"prompt 2 of 2: the request needs 10 blocks of 16 for 100 prompt tokens .*=60, and the pool has 8",
        ),
        ([FITS, [4] * 256, FITS], {}, {}, "prompt 2 of 3: the prompt has 256 tokens and the context is 256"),
        ([FITS, [99999]], {}, {}, "prompt 2 of 2: token 99999 of the prompt"),
        ([FITS, []], {}, {}, "prompt 2 of 2: the prompt has no tokens"),
        (["a", "b"], {}, {"raw": True, "system_prompt": "c"}, "prompt 1 of 2: a raw prompt has no place for a system"),
        (["a", FITS], {}, {"system_prompt": "c"}, "prompt 2 of 2: a system prompt goes before a text"),
        ([[{"role": "user", "content": "a"}]], {}, {"raw": True}, "prompt 1 of 1: messages need the chat template"),
        (["a", [{"role": "tool", "content": "a"}]], {}, {}, r"prompt 2 of 2: the chat template refuses .*no tools"),
        (["a", "b\udcff"], {}, {}, r"prompt 2 of 2: the text has '\\udcff', which is no character"),
        (
            FITS,
            {},
            {},
            "a prompt is a text, a list of token ids, a list of messages or a Prompt, and got 1; one",
        ),
        ([{"role": "user", "content": "a"}], {}, {}, "and got {'role': 'user', 'content': 'a'}; one that is not a"),
        ([[1.5]], {}, {}, r"and got \[1.5\]"),
        ([FITS], {"stop_token_ids": range(10, 18)}, {}, "prompt 1 of 1: 11 stop tokens are more than the 8"),
    ],
)
def test_what_can_never_be_served_is_refused_before_anything_is_compiled(
    folder: Path, prompts: Any, params: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    llm = LLM(str(folder), pool_blocks=8)

    def refuse() -> None:
        for call in (llm.generate, llm.stream):
            with pytest.raises(RequestError, match=message):
                call(prompts, SamplingParams(**{"max_tokens": 40, **params}), **options)

    with monitor.compiles() as compiled:
        refuse()
    assert compiled.programs == 0
    assert llm._engine is None


def test_params_are_one_for_all_or_one_each(folder: Path) -> None:
    llm = LLM(str(folder))
    with pytest.raises(ValueError, match="3 sampling params were given for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()] * 3)
    with pytest.raises(ValueError, match="there is no prompt"):
        llm.generate([], SamplingParams())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_blocks": 8, "pool_memory": 1 << 20}, "pool_blocks=8 and pool_memory=1048576 both size the pool"),
        ({"pool_blocks": 0}, "blocks=0 must be at least 1"),
        ({"rows": 0}, "rows=0 must be at least 1"),
        ({"context": 0}, "context=0 must be at least 1"),
        ({"prefill_chunk": 0}, "prefill_chunk=0 must be at least 1"),
        ({"block_size": 24}, "block_size=24 must be a power of two"),
        ({"kv_dtype": "int8"}, "pool dtype='int8' is not supported"),
        ({"implementation": "cuda"}, "implementation='cuda' is unknown; one of xla, triton"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused_before_the_model_is_looked_for(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("./absent", **options)


def test_pool_memory_that_holds_no_block_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="pool_memory=8191 bytes hold no block beside the null block"):
        LLM(str(folder), pool_memory=8191).generate("a")
