"""The store against a dictionary, through puts, gets, leases, evictions, reopenings and damage in any order."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

import store_cases as cases
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from jaxkv.store import LostError, Store
from jaxkv.store.admin import Admin

SIZE = cases.FILE_BYTES
DISK = 4 * SIZE + 100
numbers = st.integers(0, 7)


class StoreMachine(RuleBasedStateMachine):
    """``damaged`` are the pieces whose file was changed since it was written."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.memory = 0
        self.damaged = set()
        self.held = []
        self.asked = 0
        self.store = Store(self.folder, disk=DISK)

    def teardown(self):
        for stack, _ in self.held:
            stack.close()
        self.store.close()
        shutil.rmtree(self.folder)

    def on_disk(self, number):
        return cases.path(self.folder, number).is_file()

    def leased(self):
        return {number for _, views in self.held for number in views}

    @rule(number=numbers, wait=st.booleans())
    def put(self, number, wait):
        was_there = self.on_disk(number)
        stored = self.store.put(*cases.piece(number), wait=wait)
        self.store.flush()
        self.damaged &= {n for n in self.damaged if self.on_disk(n)}
        if not was_there:
            # At most three are leased, and four fit: there is always room.
            assert stored and self.on_disk(number)
            self.asked += 1
            assert cases.same(self.store.get(cases.key(number)), number)

    @rule(number=numbers)
    def get(self, number):
        should = self.on_disk(number) and number not in self.damaged
        found = self.store.get(cases.key(number))
        self.asked += 1
        assert found is None or cases.same(found, number)
        assert found is not None or not should
        if not self.memory and number not in self.leased():
            assert (found is not None) == should

    @rule(wanted=st.lists(numbers, max_size=5))
    def lookup(self, wanted):
        before = {n: self.on_disk(n) for n in wanted}
        for number, tier in zip(wanted, self.store.lookup([cases.key(n) for n in wanted]), strict=True):
            assert tier is not None or not before[number] or number in self.damaged
            assert tier != "memory" or self.memory
        self.damaged &= {n for n in self.damaged if self.on_disk(n)}

    @precondition(lambda self: len(self.held) < 3)
    @rule(target=leases, number=numbers)
    def lease(self, number):
        stack, views = contextlib.ExitStack(), {}
        (view,) = stack.enter_context(self.store.lease([cases.key(number)]))
        self.asked += 1
        if view is not None:
            try:
                assert cases.same(view.arrays(), number)
                views[number] = view
            except LostError:
                assert number in self.damaged
        else:
            assert not self.on_disk(number) or number in self.damaged
        self.held.append((stack, views))
        return self.held[-1]

    @rule(lease=consumes(leases), fails=st.booleans())
    def end(self, lease, fails):
        # Reopening has ended those of the store before.
        if lease in self.held:
            self.held.remove(lease)
            lease[0].__exit__(*((ValueError, ValueError("a fault"), None) if fails else (None, None, None)))

    @rule(number=numbers, at=st.integers(0, SIZE - 1), bit=st.integers(0, 7), cut=st.booleans())
    def corrupt(self, number, at, bit, cut):
        if self.on_disk(number) and number not in self.damaged:
            data = bytearray(cases.path(self.folder, number).read_bytes())
            data[at] ^= 1 << bit
            cases.path(self.folder, number).write_bytes(data[:at] if cut else data)
            self.damaged.add(number)

    @rule(cap=st.integers(0, 5))
    def evict_from_outside(self, cap):
        with Admin(self.folder) as admin:
            before = {n for n in range(8) if self.on_disk(n)}
            admin.gc(cap * SIZE)
            for number in before - {n for n in range(8) if self.on_disk(n)}:
                views = [views[number] for _, views in self.held if number in views]
                assert not any(view.tier == "disk" for view in views) or number in self.damaged or self.memory

    @rule(memory=st.sampled_from([0, 2 * cases.NBYTES, 100 * cases.NBYTES]))
    def reopen(self, memory):
        for stack, _ in self.held:
            stack.close()
        self.held.clear()
        self.check_counters()
        self.store.close()
        self.store, self.memory, self.asked = Store(self.folder, memory=memory, disk=DISK), memory, 0

    @rule()
    def verify(self):
        with Admin(self.folder) as admin:
            damaged = {item.name for item in admin.verify() if item.damage is not None}
        assert damaged == {cases.key(n).name for n in self.damaged if self.on_disk(n)}

    @invariant()
    def caps_hold(self):
        assert cases.bytes_now(self.folder) <= DISK
        assert self.store.memory_bytes <= self.memory

    @invariant()
    def leased_views_are_right(self):
        for _, views in self.held:
            for number, view in views.items():
                assert cases.same(view.arrays(), number)

    @invariant()
    def forget_what_is_gone(self):
        self.damaged = {number for number in self.damaged if self.on_disk(number)}

    def check_counters(self):
        self.store.close()
        counters = self.store.counters
        answered = counters.memory_hit_tokens + counters.disk_hit_tokens + counters.miss_tokens
        assert answered == self.asked * cases.TOKENS


TestStore = StoreMachine.TestCase
TestStore.settings = settings(stateful_step_count=60)
