"""Texts that quality is measured on, as passages of token ids, and the model that reads them."""

from __future__ import annotations

import dataclasses
import gzip
import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import corpus, weights
from jaxkv.config import ModelConfig
from jaxkv.model import Weights
from jaxkv.tokenizer import Tokenizer

PYTHON = "pydoc_data.topics"
"""The name of the text that comes with Python."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """A model and its tokenizer."""

    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer

    @classmethod
    def load(cls, name: str | None, dtype: str) -> Reader:
        """Load a model (see ``weights.locate``); None is the demo model."""
        path = weights.locate(name)
        config, loaded = weights.load(path, jnp.dtype(dtype))
        return cls(config, jax.device_put(loaded), Tokenizer.load(path))

    def passage(self, text: str, index: int, count: int, tokens: int) -> np.ndarray:
        """Return the ids of passage ``index`` of ``count`` evenly spaced ones, BOS in front, ``tokens`` in all.

        Raises:
          ValueError: the text is too short.
        """
        start = len(text) * (2 * index + 1) // (2 * count)
        start = text.find("\n\n", start) + 2
        ids = self.tokenizer.backend.encode(text[start : start + 12 * tokens], add_special_tokens=False).ids
        bos = corpus.first_token(self.tokenizer, self.config)
        ids = ([] if bos is None else [bos]) + ids
        if len(ids) < tokens:
            raise ValueError(f"passage {index + 1} of {count} has {len(ids)} tokens and {tokens} are needed")
        return np.asarray(ids[:tokens], np.int32)


def read_text(name: str) -> str:
    """Return a text: a file, ``.gz`` or not, a folder whose ``.md`` and ``.txt`` files are joined in order of their
    names, or ``pydoc_data.topics``.
    """
    if name == PYTHON:
        topics: dict[str, Any] = importlib.import_module(PYTHON).topics
        return "\n\n".join(topics[key] for key in sorted(topics))
    path = Path(name)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if {".md", ".txt"} & set(file.suffixes))
        return "\n\n".join(read_text(str(file)) for file in files)
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return data.decode("utf-8", errors="replace")


def named(texts: list[str]) -> dict[str, str]:
    """Return the texts of ``name=path`` and ``pydoc_data.topics`` arguments by their names."""
    pairs = [text.split("=", 1) if "=" in text else (text.rsplit("/", 1)[-1], text) for text in texts]
    return {name: read_text(path) for name, path in pairs}
