"""Prompts made of parts that are reused one by one: documents, each tokenised apart, and what is asked of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

Reuse = Literal["blend", "exact", "never"]
Ratio = float | Literal["auto"]
"""Share of documents' tokens that is recomputed where their KV is reused, or what is predicted to be best."""
REUSES: tuple[Reuse, ...] = get_args(Reuse)


def check_ratio(ratio: object) -> None:
    """Raise a ``ValueError`` for what is neither ``auto`` nor a share."""
    known = ratio == "auto" or (isinstance(ratio, int | float) and not isinstance(ratio, bool) and 0 <= ratio <= 1)
    if not known:
        raise ValueError(f"recompute ratio={ratio!r} must be from 0 to 1, or auto")


@dataclasses.dataclass(frozen=True)
class Segment:
    """A document.

    Attributes:
      content: its text, or token ids. In a text nothing is a special token, whatever it spells.
      reuse: ``blend``: its KV is used wherever it stands, and a part of it recomputed. ``exact``: only as part of a
        prefix that is the same from the first token on. ``never``: neither looked for nor stored as a segment.
      name: for reports.
    """

    content: str | Sequence[int]
    reuse: Reuse = "blend"
    name: str = ""

    def __post_init__(self) -> None:
        if self.reuse not in REUSES:
            raise ValueError(f"reuse={self.reuse!r} is unknown; one of {', '.join(REUSES)} is")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Documents and what is asked of them. With a chat template all of it is one user message.

    Attributes:
      segments: the documents, in the order in which the model reads them.
      question: the text after them. Raw prompts may leave it out.
    """

    segments: Sequence[Segment]
    question: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(self.segments))
        wrong = next((one for one in self.segments if not isinstance(one, Segment)), None)
        if wrong is not None:
            raise ValueError(f"segments has {wrong!r:.80}, which is no Segment; give Segment(text)")


@dataclasses.dataclass(frozen=True)
class Span:
    """A segment as a part of a request's prompt: tokens ``start`` to ``end``, this one not among them."""

    start: int
    end: int
    reuse: Reuse = "blend"
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"a segment from token {self.start} to {self.end} is none")
        if self.reuse not in REUSES:
            raise ValueError(f"reuse={self.reuse!r} is unknown; one of {', '.join(REUSES)} is")


@dataclasses.dataclass(frozen=True)
class Document:
    """What became of a segment.

    Attributes:
      source: ``pool``: it was part of a prefix there. ``host`` or ``disk``: where the store had it. ``computed``: its
        KV was computed for this request.
      tokens_reused, tokens_recomputed: the first came out of that source for every layer; the others went through the
        layers after the check layer again, or all of them.
    """

    name: str
    tokens: int
    source: Literal["pool", "host", "disk", "computed"]
    tokens_reused: int
    tokens_recomputed: int
