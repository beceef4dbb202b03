"""Blocks of the pool, kept on the host: who holds which, what is in them, and which can be had.

The manager deals in integers and keys alone and never looks at an array. A block has a count of holders, and may have a
key that says what is in it. A block with more than one holder is immutable, and so is one with a key. When the last
holder lets go, a block without a key is free; one with a key stays findable until its room is needed.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than can be had."""


class BlockManager:
    """Blocks 1 to ``blocks``. Block 0 is the null block and is never given out.

    Every block is free, cached (it has a key and no holder) or in use (it has holders, and perhaps a key).

    Attributes:
      evicted: cached blocks that were given up for their room.
    """

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise ValueError(f"blocks={blocks} must be at least 1")
        self.blocks = blocks
        self.evicted = 0
        # Last in, first out: a block just freed is the likeliest to be in a cache. The lowest ids come first.
        self._free = list(range(blocks, 0, -1))
        self._holders = [0] * (blocks + 1)
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        # Cached blocks, the least recently used first.
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def free_count(self) -> int:
        """Blocks that nobody holds and that have no key."""
        return len(self._free)

    @property
    def cached_count(self) -> int:
        """Blocks that nobody holds and that can be found by their keys."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def in_use(self) -> int:
        """Blocks that somebody holds."""
        return self.blocks - self.available

    def holders(self, block: int) -> int:
        """How many hold a block."""
        self._check(block)
        return self._holders[block]

    def key(self, block: int) -> bytes | None:
        """The key of what is in a block, or None."""
        self._check(block)
        return self._key_of.get(block)

    def states(self) -> list[str]:
        """Return ``free``, ``cached``, ``private`` or ``shared`` for each of blocks 1 to ``blocks``."""
        names = ["shared" if held > 1 else "private" if held else "free" for held in self._holders[1:]]
        for block in self._cached:
            names[block - 1] = "cached"
        return names

    # -- holders -------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with one holder each: free ones, then cached ones, the least recently used first.

        Raises:
          OutOfBlocksError: fewer can be had; nothing was handed out.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > self.available:
            raise OutOfBlocksError(
                f"{count} blocks asked for, and of {self.blocks} are {self.free_count} free and {self.cached_count} "
                "cached"
            )
        while len(self._free) < count:
            self.forget(next(iter(self._cached)))
            self.evicted += 1
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block. A free block cannot be shared, a cached one can."""
        blocks = list(blocks)
        for block in blocks:
            self._check(block)
            if not self._holders[block] and block not in self._cached:
                raise ValueError(f"block {block} is free and cannot be shared")
        for block in blocks:
            self._holders[block] += 1
            self._cached.pop(block, None)

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Take a holder from each block; return those that nobody holds any more.

        Raises:
          ValueError: a block is not held as often as it is released; nothing was released.
        """
        wanted: dict[int, int] = {}
        for block in blocks:
            self._check(block)
            wanted[block] = wanted.get(block, 0) + 1
            if wanted[block] > self._holders[block]:
                raise ValueError(f"block {block} has {self._holders[block]} holders and was released more often")
        let_go = []
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                let_go.append(block)
        # Reversed, so that a row's first blocks are handed out first again, and so that of a cached prefix the end goes
        # before the beginning, without which the end cannot be found.
        for block in reversed(let_go):
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)
        return let_go

    # -- keys ----------------------------------------------------------------------------------------------------

    def remember(self, block: int, key: bytes) -> bool:
        """Make a held block findable; return whether it is. Where another block has the key, that one stays.

        Raises:
          ValueError: nobody holds the block, or it has another key.
        """
        self._check(block)
        if not self._holders[block]:
            raise ValueError(f"block {block} has no holder and cannot be given a key")
        if self._key_of.get(block, key) != key:
            raise ValueError(f"block {block} has another key; what is in it must not have changed")
        if self._block_of.setdefault(key, block) != block:
            return False
        self._key_of[block] = key
        return True

    def forget(self, block: int) -> None:
        """Take a block's key away, so that it can be written. A cached one becomes free."""
        self._check(block)
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest run of keys, from the first on, that can be found."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def _check(self, block: int) -> None:
        if not 0 < block <= self.blocks:
            raise ValueError(f"block {block} is not one of 1 to {self.blocks}")
