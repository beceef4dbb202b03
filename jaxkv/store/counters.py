"""What a store has done since it was opened."""

from __future__ import annotations

import dataclasses
import threading


@dataclasses.dataclass(frozen=True)
class Counters:
    """Sums since the store was opened, of this process alone.

    Attributes:
      lookups: keys that were asked about, by ``lookup``, ``get`` or ``lease``.
      memory_hit_tokens, disk_hit_tokens, miss_tokens: tokens whose KV ``get`` or ``lease`` found in a tier, or nowhere.
        A hit on disk counts once all of it has been read and checked, so a damaged file is a miss.
      puts: calls of ``put``; refused_puts: those that the store's last tier had no room for, or could not write.
      read_bytes, written_bytes: of files, headers included where written.
      memory_evicted_bytes, disk_evicted_bytes: what made room for something newer.
      corrupt_files: files found torn, flipped or not what their name says, each time that one is met.
      foreign_files: links, folders and the like met in the place of a file, and files that cannot be opened; they are
        neither followed nor removed.
      load_seconds: time of reading and checking files.
    """

    lookups: int = 0
    memory_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    miss_tokens: int = 0
    puts: int = 0
    refused_puts: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    memory_evicted_bytes: int = 0
    disk_evicted_bytes: int = 0
    corrupt_files: int = 0
    foreign_files: int = 0
    load_seconds: float = 0.0


class Tally:
    """Counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = Counters()

    def add(self, **amounts: float) -> None:
        """Add to some of the counters."""
        with self._lock:
            changed = {name: getattr(self._sums, name) + amount for name, amount in amounts.items()}
            self._sums = dataclasses.replace(self._sums, **changed)

    def read(self) -> Counters:
        """Return the sums so far."""
        return self._sums
