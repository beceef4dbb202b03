"""From prompts as people give them to token ids."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxkv.request import RequestError
from jaxkv.segments import Prompt, Segment, Span
from jaxkv.tokenizer import CUT, Tokenizer

PromptLike = str | Sequence[int] | Sequence[Mapping[str, str]] | Prompt
"""A text, token ids, the messages of a chat, or documents and a question."""
Plain = str | list[int] | list[dict[str, str]] | Prompt


def encode(
    tokenizer: Tokenizer, prompt: PromptLike, *, raw: bool = False, system_prompt: str | None = None
) -> tuple[list[int], tuple[Span, ...]]:
    """Return the token ids of a prompt, and which of them are its documents.

    A text is one user message of a chat, after ``system_prompt``, unless ``raw``; then it is tokenised as it is.
    Documents and their question are one such message, each part tokenised apart.

    Raises:
      RequestError: the prompt is none of these, or has no place for what it is to be combined with.
      ValueError: the tokenizer has no chat template, or its template refuses the messages.
    """
    prompt = plain(prompt)
    if isinstance(prompt, Prompt):
        return _with_documents(tokenizer, prompt, raw, system_prompt)
    if isinstance(prompt, str):
        _check_text(prompt)
        return _text(tokenizer, prompt, raw, system_prompt), ()
    if system_prompt is not None:
        raise RequestError("a system prompt goes before a text; write it into the token ids or the messages")
    if prompt and isinstance(prompt[0], dict):
        if raw:
            raise RequestError("messages need the chat template, which raw leaves out; give a text or token ids")
        return tokenizer.encode_chat(prompt), ()
    return prompt, ()  # type: ignore[return-value]


def encode_documents(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], segments: Sequence[Segment]
) -> tuple[list[int], tuple[Span, ...]]:
    """Return the token ids of a chat whose last message begins with documents, and which of them these are.

    Raises:
      RequestError: the last message is not the user's.
      ValueError: as for ``Tokenizer.encode_around``.
    """
    if not messages or messages[-1].get("role") != "user":
        raise RequestError("documents stand before the user's last message; end the chat with one")
    cut = [*messages[:-1], {**messages[-1], "content": CUT + messages[-1]["content"]}]
    return _around(tokenizer, *tokenizer.encode_around(cut), segments)


def plain(prompt: Any) -> Plain:
    """Return a prompt as lists and dicts.

    Raises:
      RequestError: it is no prompt.
    """
    if isinstance(prompt, str | Prompt):
        return prompt
    parts: list[Any] = list(prompt) if isinstance(prompt, Iterable) else [None]
    if all(isinstance(part, Mapping) for part in parts):
        return [dict(part) for part in parts]
    try:
        return [operator.index(part) for part in parts]
    except TypeError:
        raise RequestError(
            f"a prompt is a text, a list of token ids, a list of messages or a Prompt, and got {prompt!r:.80}; "
            "one that is not a text stands in a list of prompts"
        ) from None


def _text(tokenizer: Tokenizer, text: str, raw: bool, system_prompt: str | None) -> list[int]:
    if raw:
        _check_raw(system_prompt)
        return tokenizer.encode(text)
    return tokenizer.encode_chat(_messages(text, system_prompt))


def _with_documents(
    tokenizer: Tokenizer, prompt: Prompt, raw: bool, system_prompt: str | None
) -> tuple[list[int], tuple[Span, ...]]:
    _check_text(prompt.question)
    if raw:
        _check_raw(system_prompt)
        head, tail = tokenizer.encode(""), tokenizer.encode_plain(prompt.question)
    else:
        head, tail = tokenizer.encode_around(_messages(CUT + prompt.question, system_prompt))
    return _around(tokenizer, head, tail, prompt.segments)


def _around(
    tokenizer: Tokenizer, head: list[int], tail: list[int], segments: Sequence[Segment]
) -> tuple[list[int], tuple[Span, ...]]:
    ids, spans = list(head), []
    for segment in segments:
        if isinstance(segment.content, str):
            _check_text(segment.content)
            own = tokenizer.encode_plain(segment.content)
        else:
            own = [operator.index(token) for token in segment.content]
        spans.append(Span(len(ids), len(ids) + len(own), segment.reuse, segment.name))
        ids += own
    return ids + tail, tuple(spans)


def _messages(text: str, system_prompt: str | None) -> list[dict[str, str]]:
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": text}]


def _check_raw(system_prompt: str | None) -> None:
    if system_prompt is not None:
        raise RequestError("a raw prompt has no place for a system prompt; write it into the prompt")


def _check_text(text: str) -> None:
    if not text.isascii() and (half := re.search("[\ud800-\udfff]", text)):
        raise RequestError(f"the text has {half[0]!r}, which is no character; give text that was UTF-8")
