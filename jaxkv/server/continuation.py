"""The next turn of a chat behind a kept row: the tokens that the chat template puts after the model's answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxkv.tokenizer import Tokenizer

_PASTS = (
    [("user", "A question."), ("assistant", "\x02jaxkv:answer\x03")],
    [("user", "One."), ("assistant", "Two."), ("user", "Three?"), ("assistant", "Four: \x02jaxkv:answer\x03")],
)
_MARK = "\x02jaxkv:answer\x03"


def new_turn(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], *, last_token: int) -> list[int]:
    """Return the tokens that follow a kept answer when these messages do.

    The template is rendered behind two made-up pasts. What it writes after their last answer must be the same, or it
    depends on more than the new messages and nothing can be said of a past that is not at hand.

    Args:
      tokenizer: with a chat template.
      messages: the new ones alone.
      last_token: of the kept row. Where it ends the turn already, that end is not repeated.

    Raises:
      ValueError: there is no template, it refuses the messages or depends on the past, or it does not end a turn with a
        token of its own, so that the new text could merge with the answer.
    """
    if messages[0]["role"] == "assistant":
        raise ValueError("continue_from: the new messages begin with the assistant's, whose turn is over; leave it out")
    tails = {_tail(tokenizer, past, messages) for past in _PASTS}
    if len(tails) > 1:
        raise ValueError(
            "continue_from: the chat template writes the new messages differently behind another past; send the whole "
            "chat"
        )
    ids = tokenizer.backend.encode(tails.pop(), add_special_tokens=False).ids
    added = tokenizer.backend.get_added_tokens_decoder()
    end = next((at for at, token in enumerate(ids) if token in added and added[token].special), None)
    if end is None or tokenizer.decode(ids[:end]).strip():
        raise ValueError(
            "continue_from: the chat template does not end the assistant's turn with a special token; send the whole "
            "chat"
        )
    return ids[end + (ids[end] == last_token) :]


def _tail(tokenizer: Tokenizer, past: Sequence[tuple[str, str]], messages: Sequence[Mapping[str, str]]) -> str:
    from jinja2 import TemplateError

    if not tokenizer.fast.chat_template:
        raise ValueError("the model has no chat template; use /v1/completions")
    before = [{"role": role, "content": content} for role, content in past]
    try:
        text = tokenizer.fast.apply_chat_template(
            [*before, *map(dict, messages)], tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise ValueError(f"continue_from: the chat template refuses the messages behind an answer: {error}") from error
    _, mark, tail = text.partition(_MARK)
    if not mark or _MARK in tail:
        raise ValueError("continue_from: the chat template does not write answers as they are; send the whole chat")
    return tail
