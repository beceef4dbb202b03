"""Rows' blocks under everything that can happen to them, on a device that is a table of token names.

A slot of the pool holds the name of the token whose K and V would be there. So what a row finds, shares, copies, moves,
swaps and restores can be compared with what it must hold, slot by slot, and a write to a block that somebody else may
read is caught as it happens.
"""

import dataclasses
import time

import numpy as np
import tiny
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxkv.compression import RowBudget
from jaxkv.memory import Memory
from jaxkv.request import Request
from jaxkv.row import NOWHERE, Row

P, BLOCKS = 4, 24
BUDGET = RowBudget(b_row=12, interval=6, window=3, sinks=1, pinned=0)
CACHE = dataclasses.replace(tiny.CACHE, blocks=BLOCKS, kept_rows=2)


class Table:
    """A device whose pool is an array of names [N, P]."""

    observed = None

    def __init__(self):
        self.pool = np.full((BLOCKS + 1, P), "", object)
        self.manager = None

    def write(self, block):
        """Nobody but the writer may have this block, and nobody may find it."""
        assert self.manager.holders(block) <= 1
        assert self.manager.key(block) is None
        return self.pool[block]

    def save(self, blocks):
        return self.pool[list(blocks)].copy()

    def load(self, blocks, saved):
        for block, names in zip(blocks, saved, strict=True):
            self.write(block)[:] = names

    def copy(self, source, target):
        for was, now in zip(source, target, strict=True):
            self.write(now)[:] = self.pool[was]

    def save_observed(self, row):
        return None

    def load_observed(self, row, saved):
        pass


class Rows(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.device = Table()
        self.memory = Memory(tiny.MODEL, CACHE, self.device)
        self.device.manager = self.memory.blocks
        self.rows, self.out, self.texts, self.expected, self.count = [], [], [], {}, 0

    # A row is checked against the names that it must hold, in order.

    def names(self, row):
        return [self.device.pool[row.blocks[s // P], s % P] for s in range(row.length)]

    def new_row(self, tokens, continue_from=None):
        request = Request(tokens, continue_from=continue_from, keep=True)
        row = Row(
            self.count,
            0,
            request,
            100,
            self.memory.root(""),
            list(tokens),
            time.perf_counter(),
            time.perf_counter(),
            budget=BUDGET,
        )
        self.count += 1
        return row

    def room(self, blocks, row):
        """As the scheduler does it, but whoever is not ``row`` may have to go."""
        while self.memory.blocks.available < blocks:
            if self.memory.make_room():
                continue
            others = [other for other in self.rows if other is not row]
            if not others:
                return False
            self.swap_out(others[-1])
        return True

    def swap_out(self, row):
        self.memory.swap_out(row)
        row.index = NOWHERE
        self.rows.remove(row)
        self.out.append(row)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30), data=st.data())
    def begin(self, tokens, data):
        if self.texts and data.draw(st.booleans()):
            tokens = [*data.draw(st.sampled_from(self.texts)), 0]
        row = self.new_row(tokens)
        row.prompt_keys = self.memory.prompt_keys(tokens, row.root)
        row.index = 0
        self.rows.append(row)
        held = self.memory.held_by_others(row)
        before = self.memory.blocks.available
        self.memory.find(row)
        assert before - self.memory.blocks.available == len(row.blocks) - held
        assert row.cached_tokens == row.length <= len(tokens) - 1
        # What was found is what it would have computed: a name is the whole text up to it.
        self.expected[row.request_id] = [str(tokens[: at + 1]) for at in range(row.length)]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), drawn=st.lists(st.integers(0, 1), min_size=1, max_size=9), ahead=st.integers(0, 6))
    def write(self, data, drawn, ahead):
        row = data.draw(st.sampled_from(self.rows))
        missing = row.tokens[row.position :]
        new = missing[:9] or drawn
        # A round takes its blocks ahead, and a stop string may end it early.
        if not self.room(self.memory.missing(row, row.length + len(new) + ahead), row):
            return
        self.memory.grow(row, row.length + len(new) + ahead)
        if not missing:
            row.tokens += new
        for _ in new:
            # A dirty row's keys depend on what was evicted, so their names are its own.
            name = str(row.tokens[: row.position + 1]) if not row.dirty else f"{row.request_id}:{row.position}"
            self.device.write(row.blocks[row.length // P])[row.length % P] = name
            self.expected[row.request_id].append(name)
            row.length += 1
            row.position += 1
        self.memory.note(row)
        self.texts.append(row.tokens[: row.position])

    @precondition(lambda self: self.rows and len(self.rows) < 5)
    @rule(data=st.data())
    def fork(self, data):
        row = data.draw(st.sampled_from(self.rows))
        fork = self.new_row(row.tokens[: row.position])
        fork.index = 0
        self.memory.share(row, fork)
        self.rows.append(fork)
        self.expected[fork.request_id] = list(self.expected[row.request_id])

    @precondition(lambda self: any(row.length > BUDGET.b_row for row in self.rows))
    @rule(data=st.data())
    def compact(self, data):
        long = [row for row in self.rows if row.length > BUDGET.b_row]
        chosen = data.draw(st.lists(st.sampled_from(long), min_size=1, max_size=3, unique_by=id))
        due, moves = [], []
        for row in chosen:
            if row in self.rows and self.room_for_move(row, due):
                due.append(row)
                moves.append(self.memory.move(row))
        held = {row.request_id: len(row.blocks) for row in due}
        before = self.memory.blocks.in_use
        self.memory.settle(due, moves)
        for row, move in zip(due, moves, strict=True):
            self.move(row, move, data)
            assert row.length == BUDGET.b_row
            assert len(row.blocks) == BUDGET.b_row // P
            gone = held[row.request_id] - len(row.blocks)
            assert row.blocks_returned <= gone + row.blocks_dropped + row.blocks_returned
        if len(due) == 1 and not any(self.memory.blocks.holders(b) for b in moves[0].source if b not in due[0].blocks):
            assert before - self.memory.blocks.in_use >= held[due[0].request_id] - len(due[0].blocks)

    def room_for_move(self, row, due):
        needed = self.memory.copies(row)
        while self.memory.blocks.available < needed:
            others = [other for other in self.rows if other is not row and other not in due]
            if not self.memory.make_room():
                if not others:
                    return False
                self.swap_out(others[-1])
        return True

    def move(self, row, move, data):
        """Keep the pinned slots and any others, as a policy would, and write only where something changes."""
        names = [self.device.pool[move.source[s // P], s % P] for s in range(move.length)]
        pinned = [s for s in range(move.length) if s < BUDGET.oldest or s >= move.length - BUDGET.window]
        rest = [s for s in range(move.length) if s not in pinned]
        chosen = data.draw(st.permutations(rest))[: BUDGET.b_row - len(pinned)]
        keep = sorted([*pinned, *chosen])
        wanted = [names[s] for s in keep]
        assert wanted[: len(wanted)] == [self.expected[row.request_id][s] for s in keep]
        for at in range(BUDGET.b_row // P):
            slots = keep[at * P : (at + 1) * P]
            if slots != list(range(at * P, (at + 1) * P)) or move.target[at] != move.source[at]:
                self.device.write(move.target[at])[:] = wanted[at * P : (at + 1) * P]
        self.expected[row.request_id] = wanted

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def preempt(self, data):
        self.swap_out(data.draw(st.sampled_from(self.rows)))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def restore(self, data):
        row = data.draw(st.sampled_from(self.out))
        if self.memory.blocks.available >= -(-row.length // P):
            self.out.remove(row)
            row.index = 0
            self.memory.swap_in(row)
            self.rows.append(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data, keep):
        row = data.draw(st.sampled_from(self.rows))
        self.rows.remove(row)
        if keep:
            self.memory.keep(row)
        self.memory.release(row)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def cancel(self, data):
        self.out.remove(data.draw(st.sampled_from(self.out)))

    @precondition(lambda self: self.memory.kept)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def go_on(self, data, tokens):
        name = data.draw(st.sampled_from(sorted(self.memory.kept)))
        kept = self.memory.kept_row(name)
        row = self.new_row(tokens, continue_from=name)
        row.tokens, row.continued, row.index = [*kept.tokens, *tokens], len(kept.tokens), 0
        kept.waiting += 1
        if not self.room(-(-kept.length // P) - len(kept.blocks), row):
            kept.waiting -= 1
            return
        self.memory.resume(row)
        self.rows.append(row)
        self.expected[row.request_id] = list(self.expected[name])

    @precondition(lambda self: self.memory.kept)
    @rule()
    def evict_kept(self):
        before = len(self.memory.kept)
        if self.memory.make_room():
            assert len(self.memory.kept) == before - 1

    @invariant()
    def every_block_is_counted_and_every_slot_is_right(self):
        holders = [0] * (BLOCKS + 1)
        kept = list(self.memory.kept.values())
        for one in (*self.rows, *kept):
            for block in one.blocks:
                holders[block] += 1
        assert [self.memory.blocks.holders(block) for block in range(1, BLOCKS + 1)] == holders[1:]
        assert len(kept) <= CACHE.kept_rows
        for row in self.rows:
            assert self.names(row) == self.expected[row.request_id]
            assert len(row.blocks) >= -(-row.length // P)
        for name, one in self.memory.kept.items():
            if one.blocks:
                assert self.names(one) == self.expected[name]

    def teardown(self):
        for row in self.rows:
            self.memory.release(row)
        for name in list(self.memory.kept):
            self.memory.forget(name)
        assert self.memory.blocks.in_use == 0
        # Whatever can still be found is what its key says: the text up to there.
        for block in range(1, BLOCKS + 1):
            if self.memory.blocks.key(block) is not None:
                assert all(name.startswith("[") for name in self.device.pool[block])


Rows.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestRows = Rows.TestCase
