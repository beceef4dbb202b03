"""KV outside the engine: a host tier and a disk tier that survives crashes and is shared by processes.

It needs NumPy alone, and works without JAX being imported.
"""

from jaxkv.store.counters import Counters
from jaxkv.store.entry import LostError, Tier, View
from jaxkv.store.key import Key, Space
from jaxkv.store.store import Store

__all__ = ["Counters", "Key", "LostError", "Space", "Store", "Tier", "View"]
