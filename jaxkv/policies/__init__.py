"""What to keep. A policy is one module in here with a function ``make(config) -> Policy``; its name is the method's.

Nothing has to be registered: ``names`` lists the modules, and ``make`` imports the one that a configuration names.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxkv.compression import CompressionConfig
    from jaxkv.policies.base import Policy

__all__ = ["make", "names"]


def names() -> tuple[str, ...]:
    """Return the methods that there is a policy for, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base"))


def make(config: CompressionConfig) -> Policy:
    """Return the policy that a configuration asks for.

    Raises:
      ValueError: the method is ``none``, which keeps everything and needs no policy.
    """
    if config.method == "none":
        raise ValueError("method='none' keeps every token and needs no policy")
    policy: Policy = importlib.import_module(f"{__name__}.{config.method}").make(config)
    return policy
