"""What clients send, as OpenAI's API names it. Fields that cannot be honoured are not here, and so are refused.

Types are strict: a number in quotes is refused. Bounds that depend on the server are checked in ``read``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag


def _whole(value: Any) -> Any:
    """To JSON Schema 5.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole)]
Text = Annotated[str, Field(max_length=2**21)]
_Seed = Annotated[Integer, Field(ge=0, lt=2**32)]
_Token = Annotated[Integer, Field(ge=0, lt=2**31)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    """How a stream is written."""

    include_usage: bool = False


class Document(_Strict):
    """A text whose KV is to be reused."""

    name: str
    text: Text


class Extra(_Strict):
    """What is jaxkv's own: the client library sends it as ``extra_body={"jaxkv": {...}}``."""

    method: str | None = Field(default=None, description="none, or the server's own method")
    budget: int | float | None = Field(default=None, description="slots to keep, or a ratio of prompt and max_tokens")
    keep: bool = Field(
        default=False, description="hold on to the blocks, so that a later request can continue from here"
    )
    continue_from: str | None = Field(
        default=None, description="id of a response to go on from; the prompt is what comes new"
    )
    documents: Annotated[list[Document], Field(max_length=256)] | None = Field(
        default=None, description="texts before the prompt or the last message, whose KV is kept and reused"
    )
    recompute_ratio: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="share of the documents' tokens that is computed again"
    )


class _Sampled(_Strict):
    """What both endpoints have."""

    model: str
    n: Integer = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: _Seed | None = Field(default=None, description="choice i draws as one alone would with seed + i")
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    max_tokens: Integer | None = Field(default=None, ge=1, description="else 16 of a completion, what fits of a chat")
    user: str | None = Field(
        default=None, max_length=256, description="with cache_salt, whose blocks the prompt may find"
    )
    # What vLLM has beyond OpenAI, under its names.
    top_k: Integer = Field(default=0, ge=0, lt=2**31, description="0 keeps every token")
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    min_tokens: Integer = Field(default=0, ge=0)
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[_Token], Field(max_length=8)] = []
    cache_salt: str | None = Field(default=None, max_length=256)
    jaxkv: Extra | None = None

    @property
    def extra(self) -> Extra:
        """What is jaxkv's own, all of it unset where nothing was sent."""
        return self.jaxkv or Extra()


def _form(value: Any) -> str:
    if isinstance(value, list):
        first = value[0] if value else ""
        return {int: "some tokens", float: "some tokens", list: "token lists"}.get(type(first), "some texts")
    return "one text"


_Tokens = Annotated[list[_Token], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[
    Annotated[Text, Tag("one text")]
    | Annotated[list[Text], Field(min_length=1, fail_fast=True), Tag("some texts")]
    | Annotated[_Tokens, Tag("some tokens")]
    | Annotated[list[_Tokens], Field(min_length=1, fail_fast=True), Tag("token lists")],
    # By the first item, so that a list of a million tokens is not tried as a million texts.
    Discriminator(_form),
]


class CompletionRequest(_Sampled):
    """The body of ``/v1/completions``."""

    prompt: Prompts
    logprobs: Integer | None = Field(
        default=None, ge=0, le=5, description="0 is the chosen token's; more are not supported"
    )
    echo: Literal[False] = False
    best_of: Literal[1] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, as a list also where there is one."""
        given: Any = self.prompt
        several = isinstance(given, list) and given and not isinstance(given[0], int)
        return given if several else [given]


class TextPart(_Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text


class Message(_Strict):
    """A turn of a chat. A developer's message is a system message by its newer name."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)]

    def plain(self) -> dict[str, str]:
        """Return it as a chat template takes it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(_Sampled):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Integer | None = Field(default=None, ge=1, description="the newer name of max_tokens")
    logprobs: bool = False
    top_logprobs: Integer | None = Field(default=None, ge=0, le=20, description="more than 0 are not supported")


# -- answers, for the OpenAPI document ---------------------------------------------------------------------------------


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a call. The prompt's count once, however many choices there are."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Choice(BaseModel):
    """A continuation; it has ``text`` or ``message``."""

    index: int
    finish_reason: Literal["stop", "length"]
    text: str | None = None
    message: dict[str, Any] | None = None
    logprobs: dict[str, Any] | None = None
    jaxkv: dict[str, Any] | None = None


class Answer(BaseModel):
    """A completion or a chat completion."""

    id: str
    object: Literal["text_completion", "chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
