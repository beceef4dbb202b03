"""The block manager against a model of it that is nothing but a counter."""

import collections

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jaxkv.blocks import BlockManager, OutOfBlocksError


class Holders(RuleBasedStateMachine):
    """Any order of allocate, share and release keeps free and held blocks apart and counts right."""

    def __init__(self):
        super().__init__()
        self.manager = BlockManager(12)
        self.held = collections.Counter()

    @rule(count=st.integers(0, 14))
    def allocate(self, count):
        free = 12 - len(self.held)
        if count > free:
            with pytest.raises(OutOfBlocksError, match=f"{count} blocks asked for and {free} of 12 free"):
                self.manager.allocate(count)
            return
        taken = self.manager.allocate(count)
        assert len(set(taken)) == count
        assert not set(taken) & set(self.held)
        assert all(0 < block <= 12 for block in taken)
        self.held.update(taken)

    @rule(data=st.data())
    def share(self, data):
        blocks = data.draw(st.lists(st.integers(1, 12), max_size=4))
        if any(block not in self.held for block in blocks):
            with pytest.raises(ValueError, match="is free and cannot be shared"):
                self.manager.share(blocks)
        else:
            self.manager.share(blocks)
            self.held.update(blocks)

    @rule(data=st.data())
    def release(self, data):
        blocks = data.draw(st.lists(st.integers(1, 12), max_size=6))
        wanted = collections.Counter(blocks)
        if any(self.held[block] < times for block, times in wanted.items()):
            with pytest.raises(ValueError, match="released more often"):
                self.manager.release(blocks)
        else:
            freed = self.manager.release(blocks)
            self.held -= wanted
            assert set(freed) == {block for block in wanted if not self.held[block]}
            assert len(freed) == len(set(freed))

    @invariant()
    def counts_agree(self):
        assert self.manager.in_use == len(self.held)
        assert self.manager.free_count == 12 - len(self.held)
        assert [self.manager.holders(block) for block in range(1, 13)] == [self.held[block] for block in range(1, 13)]


TestHolders = Holders.TestCase


def test_the_null_block_is_never_given_out_nor_taken_back():
    manager = BlockManager(4)
    assert sorted(manager.allocate(4)) == [1, 2, 3, 4]
    for call in (manager.share, manager.release):
        with pytest.raises(ValueError, match="block 0 is not one of 1 to 4"):
            call([0])


def test_a_manager_without_blocks_is_refused():
    with pytest.raises(ValueError, match="blocks=0 must be at least 1"):
        BlockManager(0)
