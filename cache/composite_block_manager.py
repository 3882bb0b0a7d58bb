"""Joins the K/V leaf and the LINEAR leaf: one boundary for both, all or nothing."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from cache.cached_sequence import CachedSequence
from cache.hashing import Provenance
from cache.kv_block_manager import KVBlockManager
from cache.linear_state_block_manager import LinearStateBlockManager


class MissReason(StrEnum):
    """Why nothing was reused."""

    DISABLED = "disabled"  # prefix caching is off
    BELOW_STRIDE = "below_stride"  # no whole stride lies below the final token
    NAMESPACE = "namespace"  # only other namespaces hold states
    KV_SHORTER = "kv_shorter"  # states exist, but only deeper than the K/V that is left
    EVICTED = "evicted"  # a state of this prefix was saved and is gone
    DECODE_ONLY = "decode_only"  # states exist, but only of decode steps, and the request is exact
    NO_SLOT = "no_slot"  # a state exists, but no slot was left to run on beside it
    RESTORE_FAILED = "restore_failed"  # it was computed in full after a failed restore
    UNSEEN = "unseen"  # (why a hit is not later) no prompt that is still cached went on like this
    NO_CHECKPOINT = "no_checkpoint"  # no state of this prefix was ever saved


@dataclass(frozen=True)
class Match:
    """What can be reused now: `boundary` tokens, K/V and state alike. 0 comes with a reason."""

    boundary: int
    kv_reach: int
    miss_reason: MissReason | None


class CompositeBlockManager:
    """The scheduler's one door to both leaves.

    `linear` is None for a model without recurrent layers: then K/V alone decides, in whole strides.
    """

    def __init__(
        self,
        kv: KVBlockManager,
        linear: LinearStateBlockManager | None,
        *,
        enable_prefix_caching: bool,
    ) -> None:
        self.kv = kv
        self.linear = linear
        self.chunk_stride = kv.chunk_stride
        assert linear is None or linear.chunk_stride == kv.chunk_stride
        self.enabled = enable_prefix_caching
        self.num_queries = 0
        self.num_hits = 0
        self.num_tokens_reused = 0
        self.misses: Counter[MissReason] = Counter()

    # ---- probing

    def match(self, seq: CachedSequence) -> Match:
        """Probe: the deepest boundary L <= min(K/V reach, final token - 1) that has a state.

        Never below what the sequence has computed already. Changes nothing but its hashes.
        """
        if not self.enabled:
            return Match(seq.num_computed_tokens, 0, MissReason.DISABLED)
        reach = self.kv.reach(seq)
        limit = min(reach, seq.num_prompt_tokens - 1)
        boundary: int | None = limit // self.chunk_stride * self.chunk_stride
        if self.linear is not None:
            boundary = self.linear.deepest(seq, limit)
        if boundary is None or boundary <= seq.num_computed_tokens:
            return Match(seq.num_computed_tokens, reach, self._reason(seq, reach))
        if self.linear is not None and not self.linear.can_mount(seq, boundary):
            return Match(seq.num_computed_tokens, reach, MissReason.NO_SLOT)
        return Match(boundary, reach, None)

    def limit_reason(self, seq: CachedSequence, match: Match) -> MissReason | None:
        """Why a match is no deeper; None where no grid boundary below the final token is."""
        if match.miss_reason is not None:
            return match.miss_reason
        last = (seq.num_prompt_tokens - 1) // self.chunk_stride * self.chunk_stride
        return None if match.boundary >= last else self._reason(seq, match.kv_reach, match.boundary)

    def _reason(self, seq: CachedSequence, reach: int, above: int = 0) -> MissReason:
        """Why nothing can be reused above a boundary of this prompt."""
        if seq.num_prompt_tokens <= self.chunk_stride:
            return MissReason.BELOW_STRIDE
        linear = self.linear
        if linear is not None and any(b > above for b in linear.allocate_shared(seq)):
            return MissReason.KV_SHORTER
        if seq.exact and self._deepest(seq, Provenance.DECODE) > above:
            return MissReason.DECODE_ONLY
        if linear is not None:
            keys = seq.linear_state_hashes[above // self.chunk_stride :]
            if any(linear.cache.was_evicted(key, seq.accepts) for key in keys):
                return MissReason.EVICTED
            if above == 0 and linear.cache.holds_only_other_namespaces(seq.namespace):
                return MissReason.NAMESPACE
        unseen = above > 0 and reach < above + self.chunk_stride
        return MissReason.UNSEEN if unseen else MissReason.NO_CHECKPOINT

    def _deepest(self, seq: CachedSequence, least: Provenance) -> int:
        """The deepest boundary with a state and K/V no worse than `least`; 0: none."""
        limit = min(self.kv.reach(seq, least), seq.num_prompt_tokens - 1)
        if self.linear is None:
            return limit // self.chunk_stride * self.chunk_stride
        return max((b for b in self.linear.boundaries(seq, least) if b <= limit), default=0)

    def count_query(self, num_cached_tokens: int, miss_reason: MissReason | None) -> None:
        """Statistics of one request whose prompt is computed: a hit or a miss with its reason."""
        self.num_queries += 1
        if num_cached_tokens > 0:
            self.num_hits += 1
            self.num_tokens_reused += num_cached_tokens
        else:
            assert miss_reason is not None, "a miss without a reason"
            self.misses[miss_reason] += 1

    # ---- one step

    def allocate(self, seq: CachedSequence, match: Match, end: int) -> bool:
        """Everything seq needs to run [match.boundary, end); False, and nothing taken, if it can't.

        Shares K/V up to exactly the boundary, pins its state as the source, and moves
        num_computed_tokens there.
        """
        held = len(seq.block_table)
        jump = match.boundary > seq.num_computed_tokens
        source = None
        if jump and self.linear is not None:
            source = self.linear.mount(seq, match.boundary)
            assert source.boundary == match.boundary
        reused = {source.provenance} if source is not None else set()
        if jump:
            reused.add(self.kv.acquire_shared(seq, match.boundary))
        enough = self.kv.allocate(seq, end)
        if enough and self.linear is not None:
            enough = self.linear.allocate_for_sequence(seq)
        if not enough:
            self.kv.truncate(seq, held)
            if source is not None and self.linear is not None:
                self.linear.unmount(source)
            return False
        if source is not None and self.linear is not None:
            self.linear.set_source(seq, source)
        if self.linear is not None and self.enabled and not seq.was_noted:
            self.linear.note_request(seq, min(match.kv_reach, seq.num_prompt_tokens - 1))
        if Provenance.DECODE in reused:
            seq.provenance = Provenance.DECODE
        if jump:
            seq.num_computed_tokens = match.boundary
            seq.resumed_boundary = match.boundary
            seq.num_published_blocks = match.boundary // self.kv.block_size
        return True

    def plan_saves(self, seq: CachedSequence, match: Match, end: int) -> None:
        """Take the slots that the prefill step [num_computed_tokens, end) snapshots into.

        Where the K/V of another prompt goes further than any state, the prompts part: one state is
        saved at that point, so that the next prompt with this prefix finds it.
        """
        if self.linear is None or not self.enabled:
            return
        fork = min(match.kv_reach, seq.num_prompt_tokens - 1)
        seq.branch_boundary = max(
            seq.branch_boundary, fork // self.chunk_stride * self.chunk_stride
        )
        self.linear.plan_snapshots(seq, seq.num_computed_tokens, end)

    def commit(self, seq: CachedSequence, end: int) -> None:
        """The step that computed [num_computed_tokens, end) was issued: publish what it wrote.

        Of a step that verified drafts, `end` is where its true tokens end; the sequence has them.
        """
        if seq.scratch and self.linear is not None:
            self.linear.settle(seq, end - seq.num_computed_tokens)
        seq.num_computed_tokens = end
        if self.enabled:
            seq.update_block_hashes(self.kv.domain)
            self.kv.publish(seq)
        if self.linear is not None:
            self.linear.commit(seq)

    # ---- leaving

    def release(self, seq: CachedSequence) -> None:
        """Finish, abort or preemption: flush a pending save and give everything back."""
        if self.linear is not None:
            self.linear.release(seq)
        self._rewind(seq)

    def discard(self, seq: CachedSequence) -> None:
        """The step failed or its restore did: give everything back, publish nothing more."""
        if self.linear is not None:
            self.linear.discard(seq)
        self._rewind(seq)

    def forget(self, seq: CachedSequence) -> None:
        """Take what is published of this prompt out of both indexes: it is not to be trusted."""
        self.kv.forget(seq)
        if self.linear is not None:
            self.linear.forget(seq)

    def reset(self, sequences: Iterable[CachedSequence]) -> None:
        """Forget everything cached and everything these sequences, all there are, hold.

        For when bookkeeping was interrupted: no reference count can be trusted any more.
        """
        for seq in sequences:
            seq.forget_holdings()
        self.kv.reset()
        if self.linear is not None:
            self.linear.reset()

    def _rewind(self, seq: CachedSequence) -> None:
        self.kv.release(seq)
        seq.num_computed_tokens = 0
        seq.provenance = Provenance.PREFILL
        seq.branch_boundary = seq.resumed_boundary = 0

    def check(self, sequences: Iterable[CachedSequence]) -> None:
        """Invariants of both leaves, and that every reference is held by one of these sequences."""
        sequences = list(sequences)
        self.kv.check()
        blocks = Counter(id_ for seq in sequences for id_ in seq.block_table)
        for id_ in range(1, self.kv.pool.num_ids):
            assert self.kv.pool.ref_count(id_) == blocks[id_], f"block {id_} leaks"
        if self.linear is None:
            return
        self.linear.check()
        slots: Counter[int] = Counter(self.linear.scratch)
        for seq in sequences:
            slots.update(slot for _, slot in seq.snapshots)
            slots.update(seq.scratch)
            slots.update([] if seq.live_slot is None else [seq.live_slot])
            slots.update([] if seq.state_source is None else [seq.state_source.slot_id])
        for id_ in range(1, self.linear.pool.num_ids):
            assert self.linear.pool.ref_count(id_) == slots[id_], f"slot {id_} leaks"
        live = [seq.live_slot for seq in sequences if seq.live_slot is not None]
        assert len(set(live)) == len(live) == self.linear.num_live, "live slots are not exclusive"
        pending = [seq.live_slot for seq in sequences if seq.pending_save is not None]
        published = self.linear.cache.slot_ids()
        assert not published & set(live), "a published slot is being written"
        assert None not in pending, "a pending save without a live slot"
