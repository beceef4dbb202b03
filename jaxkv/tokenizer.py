"""Text to token ids and back: a transformers fast tokenizer, from a folder or from a GGUF file's own metadata.

A GGUF file carries vocabulary, merges and chat template, but names its normaliser and pre-tokenizer by a word
(``tokenizer.ggml.pre``). What a word stands for is taken from the ``tokenizer.json`` of the models that use it, and
agrees with llama.cpp's ``llama-vocab.cpp`` but for Unicode normalisation (NFC), which that leaves out.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxkv.weights.gguf_metadata import read_metadata

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

__all__ = ["Tokenizer"]

_WAY_OUT = "give a folder that holds the model's tokenizer.json instead"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
_SPACE = "\u2581"
# Control tokens that end a turn. A file whose eos_token_id is the base model's often names no eot_token_id.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
CUT = "\x02jaxkv:cut\x03"
"""Stands for text that is tokenised apart, in the messages of ``encode_around``."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Ids of a text or a chat, and text of ids.

    Make one with ``from_folder`` or ``from_gguf``.

    Attributes:
      fast: the transformers tokenizer underneath.
      adds_bos: whether a raw text starts with the BOS token.
      eos_token_ids: the tokens that end a text, as far as the tokenizer knows; see ``eos_union``.
      vocab_size: one more than the greatest id. A model's V can be larger, by padding.
      chat_adds_bos: whether a chat starts with BOS where its template writes none.
    """

    fast: PreTrainedTokenizerFast
    adds_bos: bool
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    chat_adds_bos: bool = False

    def __post_init__(self) -> None:
        if (self.adds_bos or self.chat_adds_bos) and self.fast.bos_token_id is None:
            raise ValueError("the tokenizer adds a BOS token but has none; set bos_token, or add_bos_token to false")
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"EOS token {token} is outside the vocabulary of {self.vocab_size} tokens; {_WAY_OUT}")
        # A tokenizer.json can carry its training run's limits, which would cut a long prompt in silence.
        self.backend.no_truncation()
        self.backend.no_padding()

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The Rust tokenizer that does the work."""
        return self.fast.backend_tokenizer

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read the tokenizer of a model: a folder, or a GGUF file; raises as ``from_folder`` and ``from_gguf``."""
        path = Path(path)
        return cls.from_gguf(read_metadata(path)) if path.suffix == ".gguf" else cls.from_folder(path)

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Load a folder with tokenizer.json, tokenizer_config.json and perhaps chat_template.jinja.

        A raw text gets the BOS token that the tokenizer itself adds, and no EOS even if it adds that.

        Raises:
          FileNotFoundError: there is no tokenizer.json in the folder.
        """
        path = Path(path)
        if not (path / "tokenizer.json").is_file():
            raise FileNotFoundError(
                f"{path} has no tokenizer.json; fetch it from the model's page, or use the model as a .gguf file"
            )
        # AutoTokenizer of transformers 5 rebuilds some classes from the vocabulary and loses tokenizer.json's own
        # pre-tokenizer: SmolLM2's, declared a GPT2Tokenizer, no longer sets digits apart.
        fast = _transformers().PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        bos = fast.bos_token_id
        adds_bos = bos is not None and fast("a")["input_ids"][:1] == [bos]
        eos = () if fast.eos_token_id is None else (fast.eos_token_id,)
        return cls(fast, adds_bos, eos, max(fast.get_vocab().values()) + 1)

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer that a GGUF file's metadata describes, as ``weights.gguf_metadata`` reads it.

        ``tokenizer.ggml.model`` may be gpt2 (byte-level BPE) or llama (SentencePiece BPE with byte fallback). Such
        files leave BOS out of some chat templates, since llama.cpp adds it: so ``chat_adds_bos`` equals ``adds_bos``.

        Raises:
          ValueError: the metadata lacks a key, contradicts itself, or names a tokenizer that is not supported.
        """
        model = _require(fields, "model", str)
        if model not in ("gpt2", "llama"):
            raise ValueError(f"tokenizer.ggml.model={model!r} is not supported; gpt2 and llama are: {_WAY_OUT}")
        tokens = _require(fields, "tokens", list)
        types = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
        if not tokens or len(types) != len(tokens):
            raise ValueError(f"GGUF metadata has {len(tokens)} tokens and {len(types)} token types; {_WAY_OUT}")
        special = _special_ids(fields, model, len(tokens))
        if model == "gpt2":
            backend, adds_bos = _byte_level(fields, tokens)
        else:
            backend, adds_bos = _sentencepiece(fields, tokens, types, special["unk"]), True
        adds_bos = bool(fields.get("tokenizer.ggml.add_bos_token", adds_bos))
        _add_tokens(backend, tokens, types)
        ends = [special[name] for name in ("eos", "eot", "eom") if name in special]
        ends += [i for i, text in enumerate(tokens) if types[i] == _CONTROL and text in _TURN_ENDS]
        fast = _transformers().PreTrainedTokenizerFast(
            tokenizer_object=backend,
            chat_template=fields.get("tokenizer.chat_template"),
            clean_up_tokenization_spaces=False,
            **{f"{name}_token": tokens[special[name]] for name in ("bos", "eos") if name in special},
        )
        return cls(fast, adds_bos, tuple(dict.fromkeys(ends)), len(tokens), chat_adds_bos=adds_bos)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a raw text, after BOS if the tokenizer adds one; never two, also if the text has it."""
        return self._ids(text, self.adds_bos)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a chat and of the opening of the model's turn, as the chat template writes them.

        Args:
          messages: dicts with ``role`` (system, user, assistant) and ``content``.

        Raises:
          ValueError: there is no chat template, or it refuses the messages.
          ImportError: jinja2, which renders the template, is not installed.
        """
        return self._ids(self._render(messages), self.chat_adds_bos)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text in which nothing is a special token, whatever it spells, and no BOS before it."""
        before = self.backend.encode_special_tokens
        self.backend.encode_special_tokens = True
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        finally:
            self.backend.encode_special_tokens = before

    def encode_around(self, messages: Sequence[Mapping[str, str]]) -> tuple[list[int], list[int]]:
        """Return the ids of a chat in two parts, cut where ``CUT`` stands in one of the messages.

        Raises:
          ValueError: as for ``encode_chat``, or the template does not show that place exactly once.
        """
        text = self._render(messages)
        if text.count(CUT) != 1:
            raise ValueError(
                f"the chat template shows a message {text.count(CUT)} times, so nothing can be put into it; give raw "
                "text: --raw"
            )
        head, tail = text.split(CUT)
        return self._ids(head, self.chat_adds_bos), self._ids(tail, with_bos=False)

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not self.fast.chat_template:
            raise ValueError("the tokenizer has no chat template; give raw text: --raw, or Tokenizer.encode")
        try:
            from jinja2 import TemplateError
        except ImportError:
            raise ImportError("a chat template needs jinja2: install jinja2, or give raw text: --raw") from None
        try:
            return self.fast.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(f"the chat template refuses the messages (roles: {roles}): {error}; try --raw") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids. Special tokens, and ids that the vocabulary lacks, give no text."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def eos_union(self, *others: Iterable[int]) -> tuple[int, ...]:
        """Return, sorted, every token that ends a text: the tokenizer's and those of config and generation config."""
        return tuple(sorted({*self.eos_token_ids, *(token for ids in others for token in ids)}))

    def _ids(self, text: str, with_bos: bool) -> list[int]:
        ids = self.backend.encode(text, add_special_tokens=False).ids
        bos = self.fast.bos_token_id
        return [bos, *ids] if with_bos and ids[:1] != [bos] else ids


def _transformers() -> Any:
    """Import transformers late, for it takes half a second, and without its advice to install torch."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        import transformers
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return transformers


def _require(fields: Mapping[str, Any], key: str, kind: type) -> Any:
    value = fields.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, kind):
        found = "missing" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"GGUF metadata: tokenizer.ggml.{key} is {found}; {_WAY_OUT}")
    return value


def _special_ids(fields: Mapping[str, Any], model: str, size: int) -> dict[str, int]:
    """The ids of the special tokens that the file names; llama files may leave out SentencePiece's own three."""
    ids = {"unk": 0, "bos": 1, "eos": 2} if model == "llama" else {}
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "eot": "eot", "eom": "eom"}
    for name, key in keys.items():
        ids[name] = fields.get(f"tokenizer.ggml.{key}_token_id", ids.get(name))
        if ids[name] is not None and not 0 <= ids[name] < size:
            raise ValueError(f"tokenizer.ggml.{key}_token_id={ids[name]} is outside {size} tokens; {_WAY_OUT}")
    return {name: token for name, token in ids.items() if token is not None}


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: Sequence[int]) -> None:
    """Have control and user-defined tokens matched whole in a text, before any splitting."""
    from tokenizers import AddedToken

    def of(*kinds: int) -> list[AddedToken]:
        special = kinds != (_USER_DEFINED,)
        return [
            AddedToken(text, normalized=False, special=special)
            for text, kind in zip(tokens, types, strict=True)
            if kind in kinds and text
        ]

    backend.add_special_tokens(of(_UNKNOWN, _CONTROL))
    backend.add_tokens(of(_USER_DEFINED))


def _byte_level(fields: Mapping[str, Any], tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE (GPT-2), and whether files with this pre-tokenizer add BOS if they do not say."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre = fields.get("tokenizer.ggml.pre") or "default"
    if pre not in _PRE_TOKENIZERS:
        names = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ValueError(f"tokenizer.ggml.pre={pre!r} is not supported; one of {names} is: {_WAY_OUT}")
    if pre == "default":
        warnings.warn(
            f"the GGUF file does not name its pre-tokenizer; it is taken to be GPT-2's, which may be wrong: {_WAY_OUT}",
            stacklevel=4,
        )
    # No piece is empty, but one may be a space: an older converter's vocabulary has such merges.
    cuts = ((merge, merge.find(" ", 1)) for merge in _require(fields, "merges", list))
    merges = [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]
    vocabulary = {text: index for index, text in enumerate(tokens)}
    splitter = _PRE_TOKENIZERS[pre]
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitter is _llama3)
    except Exception as error:  # tokenizers raises a bare Exception for a merge whose parts are not tokens
        raise ValueError(f"GGUF metadata: tokenizer.ggml.merges do not fit the tokens ({error}); {_WAY_OUT}") from None
    backend = Tokenizer(model)
    backend.pre_tokenizer = splitter()
    backend.decoder = decoders.ByteLevel()
    if splitter is _qwen2:
        backend.normalizer = normalizers.NFC()
    return backend, splitter is _llama3


def _smollm() -> Any:
    """Every digit apart, then GPT-2's split; as SmolLM's and StarCoder's tokenizer.json."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _gpt2() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _by_pattern(digits: str) -> Any:
    """The split that Llama 3 and Qwen 2 share but for how many digits stay together."""
    from tokenizers import Regex, pre_tokenizers

    alternatives = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        digits,
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
    split = pre_tokenizers.Split(Regex("|".join(alternatives)), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _llama3() -> Any:
    return _by_pattern(r"\p{N}{1,3}")


def _qwen2() -> Any:
    return _by_pattern(r"\p{N}")


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
}


def _sentencepiece(
    fields: Mapping[str, Any], tokens: list[str], types: Sequence[int], unknown: int
) -> tokenizers.Tokenizer:
    """SentencePiece BPE with byte fallback: a space is U+2581, and one stands before a text and after a special token.

    The file gives no merges but scores: of all adjacent pairs that make a token, the one of the greatest score is
    merged first. As ranked merges that is every way to cut a token in two, by falling score. Only normal tokens
    take part: a control token never comes of text.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _require(fields, "scores", list)
    if len(scores) != len(tokens):
        raise ValueError(f"GGUF metadata has {len(tokens)} tokens and {len(scores)} scores; {_WAY_OUT}")
    normal = {text: index for index, text in enumerate(tokens) if types[index] == _NORMAL}
    ranked = [
        (-scores[index], -cut, text[:cut], text[cut:])
        for text, index in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    ranked.sort(key=lambda merge: merge[:2])
    model = models.BPE(
        vocab={text: index for index, text in enumerate(tokens)},
        merges=[(left, right) for _, _, left, right in ranked],
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    backend = Tokenizer(model)
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend
