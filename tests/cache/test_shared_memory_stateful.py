"""With one budget for both kinds, too, every state and every K/V row that is read is the right one.

Pages change their use all the time here; the ledger forgets what their bytes stood for before.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from cache.shared_memory import SharedMemory
from tests.cache.builders import BLOCK, STRIDE, composite, schedule, sequence
from tests.cache.test_composite_stateful import POLICIES, CompositeBesideALedger

MAX_NUM_SEQS = 3
RESERVED = MAX_NUM_SEQS + 2


class SharedBesideALedger(CompositeBesideALedger):
    """The same requests; few pages."""

    @initialize(
        every=st.sampled_from([STRIDE, 2 * STRIDE]),
        blocks_per_page=st.integers(1, 3),
        room=st.integers(12, 24),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def start(self, every: int, blocks_per_page: int, room: int, policy: str) -> None:
        pages = 1 + RESERVED + -(-room // blocks_per_page)
        self.memory = SharedMemory(pages, blocks_per_page)
        self.manager = composite(
            every=every, max_num_seqs=MAX_NUM_SEQS, policy=POLICIES[policy](), memory=self.memory
        )
        self.begin()

    @precondition(lambda self: not self.sequences)
    @rule(family=st.integers(1, 3), data=st.data())
    def run_alone(self, family: int, data: st.DataObject) -> None:
        """A request that fits is never refused when nobody else is there."""
        most = self.memory.blocks.capacity * BLOCK
        length = data.draw(st.integers(1, most))
        seq = sequence([family] * length)
        end = 0
        while end < length:
            most_strides = data.draw(st.integers(1, 6))
            start = self.manager.match(seq).boundary
            end = min(length, start // STRIDE * STRIDE + most_strides * STRIDE)
            row = schedule(self.manager, seq, end)
            assert row is not None, f"{length} of {most} tokens do not fit alone"
            self.manager.check([seq])
            self.ledger.forward([row])
            self.manager.commit(seq, end)
        self.manager.release(seq)

    @invariant()
    def holds(self) -> None:
        manager, memory = self.manager, self.memory
        manager.check(self.sequences)
        memory.check()
        self.ledger.check()
        if not self.rows:
            to_come = MAX_NUM_SEQS - manager.linear.num_live
            and_a_source = len(memory.unused) + memory.slots.num_evictable
            assert and_a_source >= to_come + 1
        slots, blocks = memory.slots, memory.blocks
        assert slots.num_in_use == sum(slots.ref_count(i) > 0 for i in range(slots.num_ids))
        assert blocks.num_in_use == sum(blocks.ref_count(i) > 0 for i in range(blocks.num_ids))


TestSharedBesideALedger = SharedBesideALedger.TestCase
TestSharedBesideALedger.settings = settings(max_examples=60, stateful_step_count=40)
