"""Decides what the next step computes. Policy only: ids come from the composite manager."""

import logging
from bisect import insort
from collections.abc import Collection, Mapping

from cache.composite_block_manager import CompositeBlockManager, Match, MissReason
from cache.hashing import Provenance
from cache.ops import LinearStateCacheOp
from engine.batch import Batch, ScheduledRow
from engine.config import EngineConfig
from engine.sequence import Sequence, Status

logger = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching with chunked prefill, first come first served.

    A step holds one token of every decoding sequence, then prefill up to the token budget. Prefill
    is cut only on the stride grid, counted from token 0, or at the end of the prompt; the first
    prefill of a step always gets a whole stride. When blocks run out, the youngest sequence is
    preempted: it gives everything back, is prefilled again later, and its generated tokens are
    replayed one by one, so that an exact one continues with the same bits.

    Background sequences stay in `idle` until nothing else is left, then run one at a time and a
    stride a step; as soon as somebody else comes they save where they are and go back.

    `waiting` and `running` are ordered by arrival, and a sequence may preempt only younger ones:
    the oldest always advances. The sequences of an issued batch keep what they hold until `commit`
    or `rollback`; an abort in between takes effect there.
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: CompositeBlockManager,
        *,
        max_model_len: int = 1 << 62,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.manager = manager
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.idle: list[Sequence] = []
        self.in_flight: Batch | None = None
        self._num_added = 0
        self.num_preemptions = 0
        self.num_cold_starts = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_tokens_prefilled = 0
        self.num_tokens_prefilled_idle = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self.idle)

    @property
    def num_background(self) -> int:
        return sum(seq.background for seq in (*self.waiting, *self.running, *self.idle))

    def add(self, seq: Sequence) -> None:
        """Queue a request; it must fit the pools alone (`LLM.add_request` checks that)."""
        seq.arrival_index = self._num_added
        self._num_added += 1
        (self.idle if seq.background else self.waiting).append(seq)

    # ---- one step

    def schedule(self) -> Batch | None:
        """The next step, or None when there is nothing to do, or nothing before the tokens of the
        last step are read. Its rows own all they need."""
        assert self.in_flight is None, "the last batch was neither committed nor rolled back"
        self._turn_to_background()
        batch = Batch()
        budget = self._schedule_running_ones(batch)
        self._admit(batch, budget)
        if not batch.rows:
            waits = any(seq.num_unread for seq in (*self.running, *self.waiting))
            assert waits or not self.has_unfinished, "requests are left, but none can advance"
            return None
        self.in_flight = batch
        return batch

    def _turn_to_background(self) -> None:
        """Send background work away when somebody else is there; else let one of it run."""
        if self.idle and not self.waiting and not self.running:
            self.waiting.append(self.idle.pop(0))
        elif self.waiting:
            for seq in [seq for seq in self.running if seq.background]:
                if self.manager.linear is not None:
                    self.manager.linear.save_here(seq)
                self.manager.release(seq)
                self._start_again(seq)

    def _schedule_running_ones(self, batch: Batch) -> int:
        """One token of each decoding sequence, and prefill within the budget, the oldest first.

        Returns the prefill budget that is left; 0 when a running prefill had to wait.
        """
        num_decodes = sum(not seq.in_prefill for seq in self.running)
        num_decoded = num_decodes * (1 + self.config.num_speculative_tokens)
        budget = max(self.config.max_num_batched_tokens - num_decoded, self.config.chunk_stride)
        for seq in list(self.running):
            if seq.status is not Status.RUNNING:  # an older one has preempted it
                continue
            if self._has_its_last_token(seq):
                continue
            if not seq.in_prefill:
                if not self._add_verify_row(batch, seq):
                    self._schedule_running(batch, seq, _stay(seq), seq.num_computed_tokens + 1)
                continue
            match = self._match(seq)
            end = self._prefill_end(seq, match.boundary, budget)
            stays = end == match.boundary and match.whole is None
            if stays or not self._schedule_running(batch, seq, match, end):
                budget = 0
            else:
                budget -= end - match.boundary
        return budget

    def _has_its_last_token(self, seq: Sequence) -> bool:
        """Whether the token that nobody has read yet ends it by its length."""
        most = min(seq.num_prompt_tokens + seq.sampling.max_tokens, self.max_model_len)
        return seq.num_unread > 0 and seq.num_chosen >= most

    def _admit(self, batch: Batch, budget: int) -> None:
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            seq = self.waiting[0]
            match = self._match(seq)
            end = self._prefill_end(seq, match.boundary, budget)
            stays = end == match.boundary and match.whole is None
            if stays or not self._has_room(seq, match):
                return
            if not self._add_row(batch, seq, match, end):
                return
            self.waiting.pop(0)
            insort(self.running, seq, key=_by_arrival)
            seq.status = Status.RUNNING
            budget -= end - match.boundary

    def _match(self, seq: Sequence) -> Match:
        if not seq.reuse_allowed:
            return Match(seq.num_computed_tokens, 0, MissReason.RESTORE_FAILED)
        return self.manager.match(seq)

    def _prefill_end(self, seq: Sequence, start: int, budget: int) -> int:
        if seq.background:
            budget = min(budget, self.config.chunk_stride)
        if seq.num_prompt_tokens - start <= budget:
            return seq.num_prompt_tokens
        return (start + budget) // self.config.chunk_stride * self.config.chunk_stride

    def _has_room(self, seq: Sequence, match: Match) -> bool:
        """Whether all of seq's tokens fit beside what the running ones still need for theirs."""
        if not self.running:
            return True
        kv = self.manager.kv
        needed = kv.num_blocks_for(seq.num_chosen) - kv.num_in_use(seq, match.shared)
        for other in self.running:
            blocks = kv.num_blocks_for(other.num_chosen + 1)
            needed += max(0, blocks - len(other.block_table))
        return needed <= kv.pool.num_available

    def _schedule_running(self, batch: Batch, seq: Sequence, match: Match, end: int) -> bool:
        """Add a running sequence's row, preempting younger ones as needed. False: it has to wait,
        with what it holds; older ones have the blocks."""
        while not self._add_row(batch, seq, match, end):
            if self.running[-1] is seq:
                return False
            self._preempt(self.running[-1])
        return True

    def _add_verify_row(self, batch: Batch, seq: Sequence) -> bool:
        """Add a row of the last known token and guesses; False, and nothing taken, if there is no
        point in guessing or no room for it. Nobody is preempted for guesses."""
        linear, start = self.manager.linear, seq.num_computed_tokens
        most = seq.sampling.max_tokens - seq.num_generated - 1
        count = min(
            self.config.num_speculative_tokens, most, self.max_model_len - seq.num_tokens - 1
        )
        if count < 1 or linear is None or start + 1 < seq.num_tokens:  # the last: it replays
            return False
        end = start + 1 + count
        held = len(seq.block_table)
        if not self.manager.allocate(seq, _stay(seq), end):
            return False
        if not linear.take_scratch(seq, 1 + count):
            self.manager.kv.truncate(seq, held)
            return False
        scratch = tuple(seq.scratch)
        batch.rows.append(ScheduledRow(seq, start, end, linear.cache_op(seq), (), scratch))
        return True

    def _add_row(self, batch: Batch, seq: Sequence, match: Match, end: int) -> bool:
        """Take everything the row needs and add it; False, and nothing taken, if it can't."""
        reused = match.boundary - seq.num_computed_tokens
        begins = seq.in_prefill and (reused > 0 or seq.num_computed_tokens == 0)
        limit = self.manager.limit_reason(seq, match) if begins and not seq.was_counted else None
        if not self.manager.allocate(seq, match, end):
            return False
        if seq.provenance is Provenance.DECODE:
            seq.reused_decoded = True
        if begins and not seq.was_counted:
            _record_reuse(seq, match, reused, limit)
        keeps = None
        if seq.in_prefill:
            self.manager.plan_saves(seq, match, end)
            if end == seq.num_chosen:
                keeps = self.manager.plan_whole(seq)
        linear = self.manager.linear
        op = None if linear is None else linear.cache_op(seq)
        if seq.whole_hit is not None:
            assert seq.live_slot is not None
            op = LinearStateCacheOp(seq.live_slot)  # the step after this one reads the source
        row = ScheduledRow(
            seq,
            seq.num_computed_tokens,
            end,
            op,
            tuple(seq.snapshots),
            whole=seq.whole_hit,
            keeps=keeps,
        )
        batch.rows.append(row)
        return True

    # ---- after the step

    def commit(
        self,
        batch: Batch,
        *,
        cold: Collection[ScheduledRow] = (),
        broken: Collection[ScheduledRow] = (),
        ends: Mapping[Sequence, int] | None = None,
        over: Collection[Sequence] = (),
        doubted: bool = False,
    ) -> list[ScheduledRow]:
        """The batch was issued, except for the `cold` rows, whose restore failed.

        Publishes what it wrote; returns the rows from which their sequences go on. Cold rows start
        again from token 0 and reuse nothing. The `broken` rows have no finite logits: they end with
        "error", and their prefix is taken out of the index.
        ends: where the true tokens of a verify row end; those it does not name keep one token.
        over: those that have ended since the batch was scheduled, by a token of the step before.
        doubted: something that was broken may have been reused by it: who reused starts again.
        """
        assert batch is self.in_flight
        self.in_flight = None
        gone_on = []
        for row in batch.rows:
            seq = row.seq
            if row in broken:
                self.distrust(seq)
            if row in broken or seq in over:
                assert seq.end_reason is not None
                self.finish(seq, seq.end_reason)
                continue
            if row in cold:
                self._restart_cold(row)
            elif doubted and row.start > 0 and (row.is_prefill or row.whole is not None):
                self.manager.discard(seq)
                self._start_again(seq)
            elif row.end - row.num_drafts <= seq.num_tokens:
                self._commit(row, ends or {})
                gone_on.append(row)
            else:
                assert seq.abort_requested, "a token that it computed with was never read"
            if seq.abort_requested:
                self.finish(seq, "abort")
        return [row for row in gone_on if row.seq.status is Status.RUNNING]

    def _commit(self, row: ScheduledRow, ends: Mapping[Sequence, int]) -> None:
        seq = row.seq
        self._count_prefilled(row)
        self.manager.commit(seq, self._true_end(row, ends))
        if not seq.in_prefill and not seq.was_counted:
            seq.was_counted = True
            self.manager.count_query(seq.num_cached_tokens, seq.miss_reason)

    def keep(self, logits: Mapping[ScheduledRow, object]) -> None:
        """What committed rows have left after the last tokens of their prompts, now that it is
        known: what they keep for identical prompts can be published."""
        for row, each in logits.items():
            assert row.keeps is not None
            self.manager.keep(row.seq, row.keeps, each)

    def distrust(self, seq: Sequence) -> None:
        """Its logits are not finite: it is to end, and its prefix is taken out of the index."""
        logger.error("request %s: its logits are not finite", seq.request_id)
        self.manager.forget(seq)
        seq.end_reason = "error"

    def _true_end(self, row: ScheduledRow, ends: Mapping[Sequence, int]) -> int:
        """Where the tokens that the row computed stop being true."""
        if not row.scratch:
            return row.end
        end = ends.get(row.seq, row.start + 1)
        self.num_drafted += row.num_drafts
        self.num_accepted += end - row.start - 1
        return end

    def _count_prefilled(self, row: ScheduledRow) -> None:
        if row.is_prefill and row.seq.background:
            self.num_tokens_prefilled_idle += row.end - row.start
        elif row.is_prefill:
            self.num_tokens_prefilled += row.end - row.start

    def rollback(self, batch: Batch) -> None:
        """The batch failed: its slots and blocks may be half-written. Publish nothing of it; its
        sequences start again."""
        assert batch is self.in_flight
        self.in_flight = None
        for row in batch.rows:
            self.manager.discard(row.seq)
            self._start_again(row.seq)
            if row.seq.abort_requested:
                self.finish(row.seq, "abort")

    def start_over(self, sequences: Collection[Sequence]) -> None:
        """Bookkeeping was interrupted: queue all unfinished sequences anew, with empty pools."""
        self.in_flight = None
        self.manager.reset(sequences)
        self.running, self.waiting, self.idle = [], [], []
        for seq in sequences:
            self.running.append(seq)
            self._start_again(seq)
            if not seq.was_counted:
                # No work of its own is left to meet.
                seq.reuse_limit = seq.miss_reason = seq.limit_reason = None
            if seq.abort_requested:
                self.finish(seq, "abort")
            elif seq.end_reason is not None:
                self.finish(seq, seq.end_reason)

    def finish(self, seq: Sequence, reason: str) -> None:
        """Take a request out and give back everything it holds."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        else:
            (self.waiting if seq in self.waiting else self.idle).remove(seq)
        if reason == "error":
            self.manager.discard(seq)
        else:
            self.manager.release(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason

    def abort(self, seq: Sequence) -> None:
        """End a request now, or when the batch it is part of has been issued."""
        if self.in_flight is not None and seq in self.in_flight.sequences:
            seq.abort_requested = True
        elif seq.status is not Status.FINISHED:
            self.finish(seq, "abort")

    def _preempt(self, seq: Sequence) -> None:
        self.manager.release(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._start_again(seq)

    def _restart_cold(self, row: ScheduledRow) -> None:
        assert row.op is not None and self.manager.linear is not None
        self.manager.linear.quarantine(row.op.restore_src_slot_id)
        self.manager.discard(row.seq)
        row.seq.reuse_allowed = False
        self.num_cold_starts += 1
        if not row.seq.was_counted:
            row.seq.miss_reason = row.seq.limit_reason = MissReason.RESTORE_FAILED
        self._start_again(row.seq)

    def _start_again(self, seq: Sequence) -> None:
        """Queue a sequence that was running and holds nothing any more."""
        if not seq.was_counted:
            seq.reuse_limit = seq.num_cached_tokens
            seq.num_cached_tokens = seq.restored_boundary = 0
            seq.reused_decoded = False
        self.running.remove(seq)
        seq.status = Status.WAITING
        insort(self.idle if seq.background else self.waiting, seq, key=_by_arrival)

    def check(self) -> None:
        """Invariants of queues, pools and holdings."""
        self.manager.check([*self.waiting, *self.running, *self.idle])
        assert all(seq.background for seq in self.idle)
        for seq in (*self.waiting, *self.idle):
            assert seq.status is Status.WAITING and seq.num_computed_tokens == 0
            assert not seq.block_table and seq.live_slot is None and seq.state_source is None
            assert seq.whole_hit is None and seq.whole_save is None
        assert all(seq.status is Status.RUNNING for seq in self.running)
        for queue in (self.waiting, self.running, self.idle):
            order = [seq.arrival_index for seq in queue]
            assert order == sorted(set(order)), f"out of order of arrival: {order}"
        assert len(self.running) <= self.config.max_num_seqs


def _record_reuse(
    seq: Sequence, match: Match, reused: int, limit_reason: MissReason | None
) -> None:
    """Credit tokens that others computed. When a request starts again it meets its own work in the
    cache: it is credited at most what it reused before."""
    if seq.reuse_limit is not None:
        reused = min(reused, seq.reuse_limit - seq.num_cached_tokens)
    if reused > 0:
        seq.num_cached_tokens += reused
        seq.restored_boundary = match.boundary
        seq.miss_reason = None
        seq.limit_reason = limit_reason
    elif seq.num_computed_tokens == 0 and seq.miss_reason is None:
        seq.miss_reason = match.miss_reason
        seq.limit_reason = limit_reason


def _by_arrival(seq: Sequence) -> int:
    return seq.arrival_index


def _stay(seq: Sequence) -> Match:
    """No reuse: go on from what the sequence has computed itself."""
    return Match(seq.num_computed_tokens, 0, None)
