"""Requests arrive, are cut, preempted, aborted; steps and restores fail: outputs stay right.

The ledger checks every state and block that a step reads; the counters are checked against what the
rows really computed.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.sequence import Sequence, Status
from tests.engine.scheduling import Driver
from tests.engine.test_config import EVICTION

LENGTHS = [1, 63, 64, 65, 128, 129, 200, 320]


class SchedulerBesideALedger(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(7, 16),
        spare_slots=st.integers(0, 5),
        budget=st.sampled_from([64, 100, 192, 512]),
        max_num_seqs=st.integers(1, 4),
        every=st.sampled_from([64, 128]),
        caching=st.sampled_from([True, True, True, False]),
        eviction=st.sampled_from(EVICTION),
    )
    def start(
        self, num_blocks, spare_slots, budget, max_num_seqs, every, caching, eviction
    ) -> None:
        self.driver = Driver(
            num_blocks=num_blocks,
            num_slots=max_num_seqs + 1 + spare_slots,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            checkpoint_every=every,
            enable_prefix_caching=caching,
            eviction=eviction,
        )
        self.in_flight = False

    @rule(
        shared=st.sampled_from(LENGTHS),
        unique=st.integers(0, 40),
        answer=st.integers(1, 5),
        salt=st.sampled_from(["", "", "other"]),
        exact=st.booleans(),
        background=st.sampled_from([False, False, True]),
    )
    def add(
        self, shared: int, unique: int, answer: int, salt: str, exact: bool, background: bool
    ) -> None:
        name = str(len(self.driver.requests))
        prompt = [*([1] * shared), *([2 + len(name)] * unique)]
        self.driver.add(name, prompt, answer, salt=salt, exact=exact, background=background)

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data(), more=st.integers(1, 5), exact=st.booleans(), background=st.booleans())
    def add_the_next_turn(
        self, data: st.DataObject, more: int, exact: bool, background: bool
    ) -> None:
        """A prompt that goes on from what another has said so far."""
        name = data.draw(st.sampled_from(sorted(self.driver.requests)))
        before = self.driver.requests[name].token_ids.tolist()[:360]
        self.driver.add(
            str(len(self.driver.requests)),
            [*before, *([3] * more)],
            2,
            exact=exact,
            background=background,
        )

    @precondition(lambda self: not self.in_flight)
    @rule()
    def schedule(self) -> None:
        running = [seq for seq in self.driver.scheduler.running if not seq.background]
        preemptions = {seq: seq.num_preemptions for seq in running}
        self.in_flight = bool(self.driver.schedule())
        gone = [seq for seq in running if seq.num_preemptions > preemptions[seq]]
        oldest_gone = min((seq.arrival_index for seq in gone), default=None)
        stayed = [seq.arrival_index for seq in running if seq not in gone]
        assert oldest_gone is None or oldest_gone > min(stayed), "the oldest was preempted"

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), fails=st.booleans())
    def issue(self, data: st.DataObject, fails: bool) -> None:
        self.in_flight = False
        rows = self.driver.last_batch.rows
        restores = [row.seq.request_id for row in rows if row.op.restore_requested]
        cold = []
        if fails and restores:
            cold = data.draw(st.lists(st.sampled_from(restores), unique=True))
        self.driver.issue(cold=cold)

    @precondition(lambda self: self.in_flight)
    @rule()
    def fail(self) -> None:
        self.in_flight = False
        self.driver.scheduler.rollback(self.driver.last_batch)
        self.driver.scheduler.check()

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.driver.requests)))
        self.driver.scheduler.abort(self.driver.requests[name])

    @invariant()
    def counters_are_possible(self) -> None:
        manager = self.driver.manager
        requests = [seq for seq in self.driver.requests.values() if not seq.background]
        counted = sum(seq.was_counted for seq in requests)
        assert 0 <= manager.num_hits <= manager.num_queries == counted
        assert manager.num_hits + manager.misses.total() == manager.num_queries
        for seq in self.driver.requests.values():
            assert 0 <= seq.num_cached_tokens < seq.num_prompt_tokens, seq.request_id
            assert seq.restored_boundary % 64 == 0
        self.driver.scheduler.check()
        self.driver.ledger.check()

    def teardown(self) -> None:
        """Whatever happened before, everything that is left finishes with its full answer."""
        if not hasattr(self, "driver"):
            return
        if self.in_flight:
            self.driver.issue()
        self.driver.finish_all()
        requests = self.driver.requests.values()
        assert all(seq.status is Status.FINISHED for seq in requests)
        assert all(_complete(seq) for seq in requests if seq.finish_reason != "abort")
        manager = self.driver.manager
        assert manager.kv.pool.num_in_use == manager.linear.pool.num_in_use == 0
        assert manager.linear.num_live == 0


def _complete(seq: Sequence) -> bool:
    return seq.generated_token_ids == [1000 + i for i in range(seq.sampling.max_tokens)]


TestSchedulerBesideALedger = SchedulerBesideALedger.TestCase
TestSchedulerBesideALedger.settings = settings(max_examples=80, stateful_step_count=30)
