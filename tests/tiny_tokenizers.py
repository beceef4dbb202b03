"""Tiny vocabularies as GGUF metadata, and the tokenizers made of them."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from jaxkv.tokenizer import Tokenizer

CORPUS = [
    "the cat's hat, the dog's log; they'll say it's 12, 123, 1234 or 2024 in 2024.",
    "def f(x):\n    return x[1:10] ** 2\n\n\n    y = 1234 + 123\n",
    "naïve café 日本語 日本 語 😀😀 👩‍👩‍👧 e\u0301 é x² ½ the    the",
] * 3
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROLS = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
TEXTS = (
    st.text(alphabet=st.sampled_from(sorted(set("".join(CORPUS)) | set("\t\r\u3000\u200dIÉ가ж🏽²Ⅷ'SLl")))) | st.text()
)


@cache
def byte_level_fields() -> dict[str, Any]:
    """A tiny GPT-2 vocabulary as GGUF metadata. Trained without a digit split, so that runs of digits are tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=CONTROLS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    model = json.loads(made.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), "zq", "<think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in CONTROLS else 4 if t == "<think>" else 1 for t in tokens],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<|bos|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|eos|>"),
        "tokenizer.chat_template": TEMPLATE,
    }


@cache
def sentencepiece_fields() -> dict[str, Any]:
    """A tiny SentencePiece vocabulary: every letter, then pairs of earlier pieces, the later the lower the score."""
    draw = random.Random(0)
    pieces = list("\u2581abcdeé日<s>")
    while len(pieces) < 120:
        new = draw.choice(pieces) + draw.choice(pieces)
        if new not in pieces and len(new) <= 8:
            pieces.append(new)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
    }


@cache
def byte_level(pre: str = "smollm", **changes: Any) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_fields() | {"tokenizer.ggml.pre": pre} | ggml(changes))


@cache
def sentencepiece(**changes: Any) -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_fields() | ggml(changes))


def ggml(changes: dict[str, Any]) -> dict[str, Any]:
    """Keys as a GGUF file spells the tokenizer's."""
    return {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
