"""Prompts of a command line: texts, stdin, and files with a prompt a line, as text or as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxkv.segments import Prompt, Reuse, Segment

if TYPE_CHECKING:
    from jaxkv.encoding import PromptLike

_NUMBER = (int, float)
PER_REQUEST: dict[str, type | tuple[type, ...]] = {
    "max_tokens": int,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": int,
    "min_p": _NUMBER,
    "seed": int,
    "stop": (str, list),
    "ignore_eos": bool,
    "n": int,
    "min_tokens": int,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
}
"""What a line of a JSONL file may set for its own request, and as what."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A prompt, what it sets for itself, and where it was read, which is empty for an option."""

    prompt: PromptLike
    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    where: str = ""


def read(texts: Sequence[str], file: str | None) -> list[Line]:
    """Return the prompts of ``--prompt`` and ``--prompts-file``, in this order.

    Raises:
      ValueError: there is none, or one is not what it should be; the message says where.
    """
    texts = list(texts)
    if texts.count("-") > 1:
        raise ValueError("--prompt - is given twice, and stdin can be read once; give it once")
    lines = [Line(_read("stdin") if text == "-" else text) for text in texts]
    if file is not None:
        # Not splitlines, which also cuts at U+2028 and others that JSON strings may hold.
        found = [(at, text) for at, text in enumerate(_read(file).split("\n"), 1) if text.strip()]
        is_json = Path(file).suffix in (".jsonl", ".ndjson") or (found and found[0][1].lstrip().startswith("{"))
        for at, text in found:
            where = f"{file}:{at}"
            lines.append(_json_line(text, where) if is_json else Line(text, where=where))
    if not lines:
        raise ValueError("there is no prompt; give --prompt TEXT (- reads stdin) or --prompts-file FILE")
    return lines


def documents(lines: Sequence[Line], files: Sequence[str], reuse: Reuse) -> list[PromptLike]:
    """Return the prompts of lines, each with the same documents before it.

    Raises:
      ValueError: there are documents, and a prompt is no text that they could stand before.
    """
    if not files:
        return [line.prompt for line in lines]
    # A document ends with its own line, so that what follows it is tokenised alike behind any other.
    segments = [Segment(_read(file).rstrip("\n") + "\n\n", reuse, Path(file).name) for file in files]
    wrong = next((line for line in lines if not isinstance(line.prompt, str)), None)
    if wrong is not None:
        raise ValueError(f"{wrong.where}: documents stand before a text; give the prompt as one")
    return [Prompt(segments, str(line.prompt)) for line in lines]


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "stdin" else Path(name).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text in {error.encoding}: {error.reason} at byte {error.start}") from None


def _json_line(line: str, where: str) -> Line:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if isinstance(value, str):
        return Line(value, where=where)
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise ValueError(f"{where} must be a string, or an object with either prompt or messages")
    key = "prompt" if "prompt" in value else "messages"
    prompt = value.pop(key)
    if not (_are_messages(prompt) or (key == "prompt" and (isinstance(prompt, str) or _are_tokens(prompt)))):
        raise ValueError(
            f"{where}: prompt must be a text or a list of token ids, and messages a list of objects with role and "
            "content, both texts"
        )
    unknown = sorted(set(value) - set(PER_REQUEST))
    if unknown:
        raise ValueError(
            f"{where} has {', '.join(unknown)}; besides the prompt a line may set {', '.join(PER_REQUEST)}"
        )
    for name, own in value.items():
        # A bool is an int to Python, and is not to JSON.
        if not isinstance(own, PER_REQUEST[name]) or (isinstance(own, bool) and PER_REQUEST[name] is not bool):
            raise ValueError(f"{where}: {name}={json.dumps(own)} has the wrong type")
    if not all(isinstance(text, str) for text in value.get("stop", [])):
        raise ValueError(f"{where}: stop={json.dumps(value['stop'])} must be a text or a list of texts")
    return Line(prompt, value, where)


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in value)
    )


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
