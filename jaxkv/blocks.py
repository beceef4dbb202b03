"""Blocks of the pool, kept on the host: who holds which, and how many are free.

The manager deals in integers alone and never looks at an array. A block has a count of holders; a block with more
than one is immutable, and goes back to the free list when the last holder lets go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free."""


class BlockManager:
    """Free list and reference counts of blocks 1 to ``blocks``. Block 0 is the null block and is never given out."""

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise ValueError(f"blocks={blocks} must be at least 1")
        self.blocks = blocks
        # Last in, first out: a block just freed is the likeliest to be in a cache. The lowest ids come first.
        self._free = list(range(blocks, 0, -1))
        self._holders = [0] * (blocks + 1)

    @property
    def free_count(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Blocks that somebody holds."""
        return self.blocks - len(self._free)

    def holders(self, block: int) -> int:
        """How many hold a block."""
        self._check(block)
        return self._holders[block]

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with one holder each.

        Raises:
          OutOfBlocksError: fewer are free; nothing was handed out.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks asked for and {len(self._free)} of {self.blocks} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block. A free block cannot be shared."""
        blocks = list(blocks)
        for block in blocks:
            self._check(block)
            if not self._holders[block]:
                raise ValueError(f"block {block} is free and cannot be shared")
        for block in blocks:
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Take a holder from each block; return those that became free.

        Raises:
          ValueError: a block is not held as often as it is released; nothing was released.
        """
        wanted: dict[int, int] = {}
        for block in blocks:
            self._check(block)
            wanted[block] = wanted.get(block, 0) + 1
            if wanted[block] > self._holders[block]:
                raise ValueError(f"block {block} has {self._holders[block]} holders and was released more often")
        freed = []
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                freed.append(block)
        # Reversed, so that a row's first blocks are handed out first again.
        self._free.extend(reversed(freed))
        return freed

    def _check(self, block: int) -> None:
        if not 0 < block <= self.blocks:
            raise ValueError(f"block {block} is not one of 1 to {self.blocks}")
