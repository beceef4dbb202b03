"""The block manager against a model of it that is nothing but a counter."""

import collections

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jaxkv.blocks import BlockManager, OutOfBlocksError


class Holders(RuleBasedStateMachine):
    """Any order of allocate, share, release and keys keeps free, cached and held blocks apart and counts right."""

    def __init__(self):
        super().__init__()
        self.manager = BlockManager(12)
        self.held = collections.Counter()
        self.keys = {}
        self.cached = []  # the least recently used first

    def available(self):
        return 12 - len(self.held)

    @rule(count=st.integers(0, 14))
    def allocate(self, count):
        free = self.available() - len(self.cached)
        if count > self.available():
            message = f"{count} blocks asked for, and of 12 are {free} free and {len(self.cached)} cached"
            with pytest.raises(OutOfBlocksError, match=message):
                self.manager.allocate(count)
            return
        before = self.manager.evicted
        taken = self.manager.allocate(count)
        # Free blocks go first, then the cached ones that were let go of longest ago.
        evicted, self.cached = self.cached[: max(0, count - free)], self.cached[max(0, count - free) :]
        assert self.manager.evicted - before == len(evicted)
        assert set(evicted) <= set(taken)
        for block in evicted:
            del self.keys[block]
        assert len(set(taken)) == count
        assert not set(taken) & (set(self.held) | set(self.cached))
        assert all(0 < block <= 12 for block in taken)
        self.held.update(taken)

    @rule(data=st.data())
    def share(self, data):
        blocks = data.draw(st.lists(st.integers(1, 12), max_size=4))
        if any(block not in self.held and block not in self.cached for block in blocks):
            with pytest.raises(ValueError, match="is free and cannot be shared"):
                self.manager.share(blocks)
        else:
            self.manager.share(blocks)
            self.held.update(blocks)
            self.cached = [block for block in self.cached if block not in blocks]

    @rule(data=st.data())
    def release(self, data):
        blocks = data.draw(st.lists(st.integers(1, 12), max_size=6))
        wanted = collections.Counter(blocks)
        if any(self.held[block] < times for block, times in wanted.items()):
            with pytest.raises(ValueError, match="released more often"):
                self.manager.release(blocks)
        else:
            let_go = self.manager.release(blocks)
            self.held -= wanted
            assert set(let_go) == {block for block in wanted if not self.held[block]}
            assert len(let_go) == len(set(let_go))
            self.cached += [block for block in reversed(let_go) if block in self.keys]

    @rule(block=st.integers(1, 12), name=st.integers(0, 20))
    def remember(self, block, name):
        key = bytes([name])
        if block not in self.held or self.keys.get(block, key) != key:
            with pytest.raises(ValueError, match="has no holder|has another key"):
                self.manager.remember(block, key)
        else:
            taken = any(other == key for at, other in self.keys.items() if at != block)
            assert self.manager.remember(block, key) != taken
            if not taken:
                self.keys[block] = key

    @rule(block=st.integers(1, 12))
    def forget(self, block):
        self.manager.forget(block)
        self.keys.pop(block, None)
        if block in self.cached:
            self.cached.remove(block)

    @invariant()
    def counts_agree(self):
        assert self.manager.in_use == len(self.held)
        assert self.manager.cached_count == len(self.cached)
        assert self.manager.free_count == self.available() - len(self.cached)
        assert [self.manager.holders(block) for block in range(1, 13)] == [self.held[block] for block in range(1, 13)]
        assert [self.manager.key(block) for block in range(1, 13)] == [self.keys.get(block) for block in range(1, 13)]
        found = {bytes([name]): self.manager.find([bytes([name])]) for name in range(21)}
        assert {key: blocks[0] for key, blocks in found.items() if blocks} == {k: b for b, k in self.keys.items()}
        names = [
            "cached" if b in self.cached else {0: "free", 1: "private"}.get(self.held[b], "shared")
            for b in range(1, 13)
        ]
        assert self.manager.states() == names


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


def test_of_a_cached_prefix_the_end_goes_first_and_the_longest_run_is_found():
    manager = BlockManager(4)
    blocks = manager.allocate(3)
    for at, block in enumerate(blocks):
        manager.remember(block, bytes([at]))
    manager.release(blocks)
    assert (manager.free_count, manager.cached_count, manager.in_use) == (1, 3, 0)
    manager.allocate(2)
    assert manager.find([b"\0", b"\1", b"\2"]) == blocks[:2]
    assert manager.find([b"\1"]) == blocks[1:2]
    assert manager.evicted == 1
