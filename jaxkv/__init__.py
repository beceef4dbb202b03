"""A KV cache for JAX that gives its memory back."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkv.completion import Completion as Completion
    from jaxkv.completion import Delta as Delta
    from jaxkv.config import CacheConfig as CacheConfig
    from jaxkv.config import ModelConfig as ModelConfig
    from jaxkv.config import RopeConfig as RopeConfig
    from jaxkv.engine import Engine as Engine
    from jaxkv.llm import LLM as LLM
    from jaxkv.pool import KVPool as KVPool
    from jaxkv.request import Request as Request
    from jaxkv.request import RequestError as RequestError
    from jaxkv.sampling import SamplingParams as SamplingParams
    from jaxkv.segments import Prompt as Prompt
    from jaxkv.segments import Segment as Segment
    from jaxkv.store import Store as Store

__version__ = "0.1.0"

_HOMES = {
    "CacheConfig": "config",
    "Completion": "completion",
    "Delta": "completion",
    "Engine": "engine",
    "KVPool": "pool",
    "LLM": "llm",
    "ModelConfig": "config",
    "Prompt": "segments",
    "Request": "request",
    "RequestError": "request",
    "RopeConfig": "config",
    "SamplingParams": "sampling",
    "Segment": "segments",
    "Store": "store",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    # Loaded at first use: `python -m jaxkv.generate --help` need not wait for JAX.
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxkv.{_HOMES[name]}"), name)
