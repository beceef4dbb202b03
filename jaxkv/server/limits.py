"""What a client may ask of the server."""

from __future__ import annotations

import dataclasses

from jaxkv.sampling import MOST_CHOICES


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds that hold for every client. ``None`` is the context of the model.

    Attributes:
      body_bytes: of one request's body.
      prompt_tokens: of one prompt.
      max_tokens: that one request may ask for.
      n: continuations of one prompt.
      queue: continuations that wait for a place in the engine, over all clients; one more is refused with 429.
      connections: open at once; one more is closed unread.
      request_seconds: in which a request has to have come in whole, and for which a connection may idle.
      write_seconds: for which a client may take nothing of what is written to it.
    """

    body_bytes: int = 2 * 2**20
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    n: int = 16
    queue: int = 256
    connections: int = 4096
    request_seconds: float = 30.0
    write_seconds: float = 60.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "queue" else 1
            if value is not None and not (least <= value or (field.type == "float" and value > 0)):
                raise ValueError(f"{field.name}={value} must be at least {least}")
        if self.n > MOST_CHOICES:
            raise ValueError(f"n={self.n} must be at most {MOST_CHOICES}, the most continuations of a request")
