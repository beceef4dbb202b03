"""A piece of KV in host memory, whole or still coming in layer by layer, and what a lease gives of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from jaxkv.store.file_format import Layout
from jaxkv.store.key import Key

Tier = Literal["memory", "disk"]


class LostError(Exception):
    """A leased piece turned out damaged on disk while it was being read. Compute it afresh, as after a miss."""


class Entry:
    """One buffer in the order of the file's data, and how many of its layers are there.

    Attributes:
      leases: how many views are open; guarded by the store's lock.
      kept: whether the host tier counts it; guarded by the store's lock.
      waiting: how many of its leases began while it was being read; guarded by the store's lock.
    """

    def __init__(self, key: Key, layout: Layout, ready: int) -> None:
        self.key, self.layout = key, layout
        self.leases, self.kept, self.waiting = 0, False, 0
        self.buffer = np.empty(layout.nbytes, np.uint8)
        self.arrays = layout.views(self.buffer)
        for array in self.arrays.values():
            array.flags.writeable = False
        self.ready = ready
        self._lost = False
        self._changed = threading.Condition()
        self._awaited: list[int] = []

    @classmethod
    def copy(cls, key: Key, arrays: Mapping[str, Any]) -> Entry:
        """Return an entry with a copy of arrays ``[L, ...]``.

        Raises:
          ValueError: they cannot be stored.
        """
        given = {name: np.asarray(array) for name, array in arrays.items()}
        layout = Layout.of(given)
        entry = cls(key, layout, layout.layers)
        for name, array in layout.views(entry.buffer).items():
            np.copyto(array, given[name])
        return entry

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.layout.nbytes

    @property
    def complete(self) -> bool:
        """Whether all layers are there."""
        return self.ready == self.layout.layers

    def advance(self) -> None:
        """One more layer is there."""
        with self._changed:
            self.ready += 1
            # Waking threads that have to wait on costs the reader more than a layer of a cached file.
            if any(layers <= self.ready for layers in self._awaited):
                self._changed.notify_all()

    def lose(self) -> None:
        """No more layers will come."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def wait(self, layers: int) -> bool:
        """Wait until the first ``layers`` layers are there; return False if they never will be."""
        if self.ready < layers:
            with self._changed:
                self._awaited.append(layers)
                self._changed.wait_for(lambda: self.ready >= layers or self._lost)
                self._awaited.remove(layers)
        return self.ready >= layers


class View:
    """What a lease gives of one key: its arrays, read-only, a layer at a time and as soon as each is there.

    Attributes:
      key: what was asked for.
      tier: ``memory``, or ``disk`` if it had to be read, or was being read already.
    """

    def __init__(self, entry: Entry, tier: Tier, end: Callable[[], None]) -> None:
        self.key, self.tier = entry.key, tier
        self._entry: Entry | None = entry
        self._end = end

    @property
    def layers(self) -> int:
        """L."""
        return self._held().layout.layers

    @property
    def ready(self) -> int:
        """How many layers can be had without waiting."""
        return self._held().ready

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self._held().nbytes

    def layer(self, layer: int) -> tuple[np.ndarray, ...]:
        """Return one layer of each array, in the order of the put: k and v, each ``[T, K, D]`` if put so.

        Raises:
          LostError: the file is damaged from this layer on, or was found to be before.
          IndexError: there is no such layer.
        """
        entry = self._held()
        if not 0 <= layer < entry.layout.layers:
            raise IndexError(f"layer {layer} of {entry.layout.layers}")
        if not entry.wait(layer + 1):
            raise LostError(f"the file of {self.key.name} is damaged; compute the segment afresh")
        return tuple(array[layer] for array in entry.arrays.values())

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all layers of all arrays, by name, once they are there.

        Raises:
          LostError: the file is damaged.
        """
        self.layer(self.layers - 1)
        return dict(self._held().arrays)

    def close(self) -> None:
        """End this view; the lease does it."""
        if self._entry is not None:
            self._entry = None
            self._end()

    def _held(self) -> Entry:
        if self._entry is None:
            raise ValueError(f"the lease of {self.key.name} has ended; use its views inside the with block")
        return self._entry
