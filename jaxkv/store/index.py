"""What files a folder has, kept in memory and brought up to date by the lock's counters; eviction."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
from collections.abc import Iterator

from jaxkv.store.folder import Folder, ForeignError, Seen
from jaxkv.store.lock import FolderLock


class Index:
    """Size and time of last use of every file. Use it inside ``locked``.

    The times may be old, since a use by another process is written to the file alone. Eviction looks again.
    """

    def __init__(self, folder: Folder, lock: FolderLock) -> None:
        self._folder = folder
        self._lock = lock
        self._counters: list[int | None] = [None] * len(folder.shards())
        self._shards: list[dict[bytes, Seen]] = [{} for _ in folder.shards()]
        self._total = 0
        self._oldest: list[tuple[int, bytes]] = []

    @contextlib.contextmanager
    def locked(self) -> Iterator[Index]:
        """Hold the folder's lock with the index up to date.

        Raises:
          OSError: the lock cannot be had, or the folder not be read.
        """
        with self._lock.hold():
            self._refresh()
            yield self

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return self._total

    def files(self) -> dict[bytes, Seen]:
        """Return all files, by digest."""
        return {digest: seen for shard in self._shards for digest, seen in shard.items()}

    def announce(self, shard: int) -> None:
        """Tell other processes that a shard is about to change."""
        self._counters[shard] = self._lock.announce(shard)

    def add(self, digest: bytes, found: os.stat_result) -> None:
        """Note a new file."""
        self._note(digest, Seen(found.st_size, found.st_mtime_ns))

    def remove(self, digest: bytes) -> int:
        """Remove a file, and return its bytes."""
        # Where the counter cannot be raised (a full disk), others count too much until they look for themselves.
        with contextlib.suppress(OSError):
            self.announce(digest[0])
        self._folder.remove(digest)
        seen = self._shards[digest[0]].pop(digest, None)
        self._total -= seen.size if seen else 0
        return seen.size if seen else 0

    def discard(self, digest: bytes, inode: tuple[int, int]) -> int:
        """Remove a file unless another one has its name by now, and return its bytes. It takes the lock itself."""
        with self.locked():
            return self.remove(digest) if self._folder.inode(digest) == inode else 0

    def evict(self, allowed: int) -> int:
        """Remove the least recently used files that nobody leases until ``allowed`` bytes are left, or none can go.

        Returns:
          bytes removed.
        """
        removed, leased = 0, []
        while self._total > allowed and self._oldest:
            used, digest = heapq.heappop(self._oldest)
            seen = self._shards[digest[0]].get(digest)
            if seen is None or seen.used != used:
                continue
            now, free = self._look(digest)
            if now is None:
                self._total -= self._shards[digest[0]].pop(digest).size
            elif now.used > used:
                self._note(digest, now)
            elif free:
                removed += self.remove(digest)
            else:
                leased.append((used, digest))
        for item in leased:
            heapq.heappush(self._oldest, item)
        return removed

    def _refresh(self) -> None:
        changed = [
            (shard, counter)
            for shard, (counter, known) in enumerate(zip(self._lock.counters(), self._counters, strict=True))
            if counter != known
        ]
        for shard, counter in changed:
            files, _ = self._folder.scan(shard)
            self._total -= sum(seen.size for seen in self._shards[shard].values())
            self._shards[shard] = {}
            for digest, seen in files.items():
                self._note(digest, seen)
            self._counters[shard] = counter
        if len(self._oldest) > 64 + 4 * sum(map(len, self._shards)):
            self._oldest = [(seen.used, digest) for digest, seen in self.files().items()]
            heapq.heapify(self._oldest)

    def _note(self, digest: bytes, seen: Seen) -> None:
        known = self._shards[digest[0]].get(digest)
        self._total += seen.size - (known.size if known else 0)
        self._shards[digest[0]][digest] = seen
        if known is None or known.used != seen.used:
            heapq.heappush(self._oldest, (seen.used, digest))

    def _look(self, digest: bytes) -> tuple[Seen | None, bool]:
        """Return a file as it is now, and whether nobody leases it."""
        try:
            file = self._folder.open(digest)
        except (FileNotFoundError, ForeignError):
            return None, False
        except OSError:
            return self._shards[digest[0]][digest], False
        try:
            found = os.fstat(file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Seen(found.st_size, found.st_mtime_ns), False
        finally:
            os.close(file)
        return Seen(found.st_size, found.st_mtime_ns), True
