"""What to keep. A policy is one module in here with a function ``make(config, model, stats) -> Policy``.

Nothing has to be registered: ``names`` lists the modules, and ``make`` imports the one that a configuration names.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxkv.compression import CompressionConfig
    from jaxkv.config import ModelConfig
    from jaxkv.policies.base import Policy
    from jaxkv.stats import QueryStats

__all__ = ["make", "names"]


def names() -> tuple[str, ...]:
    """Return the methods that there is a policy for, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base"))


def make(config: CompressionConfig, model: ModelConfig, stats: QueryStats | None = None) -> Policy:
    """Return the policy that a configuration asks for. It is a pytree, to be passed to jitted functions.

    Args:
      config: whose ``method`` names the policy.
      model: the model's shapes and frequencies.
      stats: its query statistics, for a policy that has use for them.

    Raises:
      ValueError: the method is ``none``, which keeps everything, or the statistics belong to another model.
    """
    if config.method == "none":
        raise ValueError("method='none' keeps every token and needs no policy")
    policy: Policy = importlib.import_module(f"{__name__}.{config.method}").make(config, model, stats)
    return policy
