"""The host tier: entries in memory, the least recently used going first."""

from __future__ import annotations

from collections import OrderedDict

from jaxkv.store.entry import Entry
from jaxkv.store.key import Key


class MemoryTier:
    """Entries under a cap of bytes. Not safe for threads: the store's lock guards it."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.bytes = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Entry | None:
        """Return the entry of a key, without marking it as used."""
        entry = self._entries.get(key.digest)
        return entry if entry is not None and entry.key == key else None

    def touch(self, key: Key) -> None:
        """Mark a key as used now, if it is there."""
        if key.digest in self._entries:
            self._entries.move_to_end(key.digest)

    def add(self, entry: Entry) -> tuple[bool, int]:
        """Keep an entry if unleased ones can make room; return whether its key is kept, and the bytes evicted."""
        if entry.key.digest in self._entries:
            return True, 0
        # What is leased or fits in no case is found out first: nothing is evicted in vain.
        fixed = sum(other.nbytes for other in self._entries.values() if other.leases)
        if fixed + entry.nbytes > self.cap:
            return False, 0
        evicted = 0
        for digest in list(self._entries):
            if self.bytes + entry.nbytes <= self.cap:
                break
            if not self._entries[digest].leases:
                evicted += self.remove(self._entries[digest])
        self._entries[entry.key.digest] = entry
        self.bytes += entry.nbytes
        entry.kept = True
        return True, evicted

    def remove(self, entry: Entry) -> int:
        """Forget an entry, and return its bytes if it was kept."""
        if not entry.kept:
            return 0
        del self._entries[entry.key.digest]
        entry.kept = False
        self.bytes -= entry.nbytes
        return entry.nbytes
