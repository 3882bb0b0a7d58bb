"""Requests come, step, fail and leave in any order: every state that is read is the right one.

The machine plays the scheduler without its policy; the ledger plays the worker with exact values.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.cached_sequence import CachedSequence
from cache.eviction import Lru, LruCapPerPath
from cache.flop_aware import FlopAware
from cache.placement import combined
from cache.value_index import ValueIndex
from tests.cache.builders import BLOCK, STRIDE, Row, composite, schedule, sequence
from tests.cache.ledger import Ledger

POLICIES = {
    "lru": Lru,
    "lru_cap_per_path": lambda: LruCapPerPath(2),
    "flop_aware": lambda: FlopAware(0.5),
    "value": ValueIndex,
}
PROMPTS = [
    [*([1] * shared), *([2] * middle), *([3] * tail)]
    for shared in (0, 5, 8)
    for middle in (0, 4)
    for tail in (1, 3, 8)
]


class CompositeBesideALedger(RuleBasedStateMachine):
    """Few blocks, few slots, few prompts: sharing, eviction and refusal are the normal case."""

    @initialize(
        every=st.sampled_from([STRIDE, 2 * STRIDE]),
        spare_slots=st.integers(0, 4),
        num_blocks=st.integers(10, 24),
        policy=st.sampled_from(sorted(POLICIES)),
        ends=st.sampled_from([(0,), (0,), (1,), (STRIDE,), (0, STRIDE), (0, 1)]),
    )
    def start(
        self, every: int, spare_slots: int, num_blocks: int, policy: str, ends: tuple[int, ...]
    ) -> None:
        self.manager = composite(
            num_blocks=num_blocks,
            num_slots=4 + spare_slots,
            placement=combined(every, ends=ends),
            max_num_seqs=3,
            policy=POLICIES[policy](),
        )
        self.begin()

    def begin(self) -> None:
        self.ledger = Ledger(self.manager)
        self.sequences: list[CachedSequence] = []
        self.rows: list[Row] = []
        self.finished: list[list[int]] = []

    def idle(self) -> list[CachedSequence]:
        busy = [row.seq for row in self.rows]
        return [seq for seq in self.sequences if seq not in busy]

    @precondition(lambda self: len(self.sequences) < 3)
    @rule(
        prompt=st.sampled_from(PROMPTS),
        salt=st.sampled_from(["", "", "", "other"]),
        exact=st.booleans(),
        save_points=st.sets(st.sampled_from([STRIDE, 2 * STRIDE, 3 * STRIDE])),
    )
    def add(self, prompt: list[int], salt: str, exact: bool, save_points: set[int]) -> None:
        seq = sequence(prompt, salt=salt, exact=exact, save_points=save_points)
        self.sequences.append(seq)

    @precondition(lambda self: len(self.sequences) < 3 and not self.rows)
    @rule(prompt=st.sampled_from(PROMPTS), exact=st.booleans(), answer=st.integers(1, 9))
    def serve(self, prompt: list[int], exact: bool, answer: int) -> None:
        """A whole request with nothing between its steps."""
        seq = sequence(prompt, exact=exact)
        self.sequences.append(seq)
        while seq.num_computed_tokens < len(prompt) + answer:
            end = max(len(prompt), seq.num_computed_tokens + 1)
            if end > seq.num_tokens:
                seq.append_token(1 + seq.num_tokens % 2)
            row = schedule(self.manager, seq, end)
            if row is None:
                break
            self.ledger.forward([row])
            self.manager.commit(seq, end)
        self.manager.release(seq)
        self.sequences.remove(seq)
        self.finished.append(seq.token_ids.tolist())

    @precondition(lambda self: self.finished)
    @rule(data=st.data(), more=st.lists(st.integers(1, 3), min_size=1, max_size=9))
    def add_the_next_turn(self, data: st.DataObject, more: list[int]) -> None:
        """A prompt that goes on from another's answer."""
        if len(self.sequences) < 3:
            exact = data.draw(st.booleans())
            before = data.draw(st.sampled_from(self.finished))[:24]
            self.sequences.append(sequence([*before, *more], exact=exact))

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), strides=st.integers(1, 4))
    def schedule_row(self, data: st.DataObject, strides: int) -> None:
        """One more row of the step; nothing changes hands when it is refused."""
        seq = data.draw(st.sampled_from(self.idle()))
        match = self.manager.match(seq)
        if seq.in_prefill:
            end = min(seq.num_prompt_tokens, match.boundary // STRIDE * STRIDE + strides * STRIDE)
        else:
            end = seq.num_computed_tokens + 1
            if end > seq.num_tokens:
                seq.append_token(1 + seq.num_tokens % 2)
        before = self.holdings(seq)
        row = schedule(self.manager, seq, end)
        if row is None:
            assert self.holdings(seq) == before
        else:
            assert row.start == match.boundary
            self.rows.append(row)

    def holdings(self, seq: CachedSequence) -> tuple[object, ...]:
        pools = [self.manager.kv.pool, self.manager.linear.pool]
        counts = [[pool.ref_count(id_) for id_ in range(pool.num_ids)] for pool in pools]
        slots = (seq.live_slot, seq.state_source, seq.pending_save, list(seq.snapshots))
        return counts, list(seq.block_table), slots, seq.num_computed_tokens

    @precondition(lambda self: self.rows)
    @rule(failed=st.sets(st.integers(0, 2)))
    def run_step(self, failed: set[int]) -> None:
        """The step is issued; the rows in `failed` could not be restored and start again."""
        rows, self.rows = self.rows, []
        cold = [
            row
            for index, row in enumerate(rows)
            if index in failed and row.op is not None and row.op.restore_requested
        ]
        self.ledger.forward([row for row in rows if row not in cold])
        for row in rows:
            if row in cold:
                self.manager.linear.quarantine(row.op.restore_src_slot_id)
                self.manager.discard(row.seq)
            else:
                self.manager.commit(row.seq, row.end)

    @precondition(lambda self: self.rows)
    @rule()
    def fail_step(self) -> None:
        """The step wrote everything, or half of it, and is not to be trusted."""
        for row in self.rows:
            self.ledger.states[row.op.linear_state_id] = None
            self.ledger.states.update((slot, None) for _, slot in row.snapshots)
            self.manager.discard(row.seq)
        self.rows = []

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.idle()))
        if seq.namespace.cache_salt == "" and data.draw(st.booleans()):
            self.manager.linear.save_here(seq)
        self.manager.release(seq)
        self.sequences.remove(seq)
        if seq.namespace.cache_salt == "":
            self.finished.append(seq.token_ids.tolist())

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.idle()))
        self.manager.release(seq)
        assert seq.num_computed_tokens == 0 and not seq.block_table and seq.live_slot is None

    @rule(prompt=st.sampled_from(PROMPTS))
    def probe(self, prompt: list[int]) -> None:
        """A probe promises only what can be mounted, on the grid and below the final token."""
        seq = sequence(prompt)
        match = self.manager.match(seq)
        assert match.boundary % STRIDE == 0 and match.kv_reach % BLOCK == 0
        assert match.boundary <= min(match.kv_reach, max(0, len(prompt) - 1))
        assert (match.miss_reason is None) == (match.boundary > 0)
        if match.boundary:
            self.manager.linear.unmount(self.manager.linear.mount(seq, match.boundary))

    @invariant()
    def holds(self) -> None:
        self.manager.check(self.sequences)
        self.ledger.check()
        for pool in (self.manager.kv.pool, self.manager.linear.pool):
            assert pool.num_free + pool.num_evictable + pool.num_in_use == pool.num_ids - 1

    def teardown(self) -> None:
        for seq in self.sequences:
            self.manager.discard(seq)
        self.manager.check([])
        assert self.manager.linear.num_live == 0


TestCompositeBesideALedger = CompositeBesideALedger.TestCase
TestCompositeBesideALedger.settings = settings(max_examples=60, stateful_step_count=40)
