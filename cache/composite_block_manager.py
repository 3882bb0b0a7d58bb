"""Joins the K/V leaf and the LINEAR leaf: one boundary for both, all or nothing."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from cache.cached_sequence import CachedSequence, StateSource, WholeHit, WholeSave
from cache.hashing import Provenance
from cache.kv_block_manager import KVBlockManager
from cache.linear_state_block_manager import LinearStateBlockManager
from cache.whole_prompt import WholePrompts, held_blocks, held_slots


class MissReason(StrEnum):
    """Why nothing was reused."""

    DISABLED = "disabled"  # prefix caching is off
    BELOW_STRIDE = "below_stride"  # no whole stride lies below the final token
    NAMESPACE = "namespace"  # only other namespaces hold states
    KV_SHORTER = "kv_shorter"  # states exist, but only deeper than the K/V that is left
    EVICTED = "evicted"  # a state of this prefix was saved and is gone
    DECODE_ONLY = "decode_only"  # states exist, but only of decode steps, and the request is exact
    NO_SLOT = "no_slot"  # a state exists, but no slot (or block) was left to run on beside it
    RESTORE_FAILED = "restore_failed"  # it was computed in full after a failed restore
    UNSEEN = "unseen"  # (why a hit is not later) no prompt that is still cached went on like this
    NO_CHECKPOINT = "no_checkpoint"  # no state of this prefix was ever saved


@dataclass(frozen=True)
class Match:
    """What can be reused now: `boundary` tokens, K/V and state alike. 0 comes with a reason.

    whole: the boundary is the end of the prompt, and its logits are there too.
    """

    boundary: int
    kv_reach: int
    miss_reason: MissReason | None
    whole: WholeHit | None = None

    @property
    def shared(self) -> int:
        """Tokens whose K/V is shared by reference."""
        return self.boundary if self.whole is None else self.whole.shared


class CompositeBlockManager:
    """The scheduler's one door to both leaves.

    `linear` is None for a model without recurrent layers: then K/V alone decides, in whole strides.
    `whole` is None where nothing is kept of whole prompts.
    """

    def __init__(
        self,
        kv: KVBlockManager,
        linear: LinearStateBlockManager | None,
        *,
        enable_prefix_caching: bool,
        whole_prompts: bool = False,
    ) -> None:
        """whole_prompts: keep what identical prompts need; without recurrent layers no effect."""
        self.kv = kv
        self.linear = linear
        self.chunk_stride = kv.chunk_stride
        assert linear is None or linear.chunk_stride == kv.chunk_stride
        self.enabled = enable_prefix_caching
        keeps_whole = linear is not None and enable_prefix_caching and whole_prompts
        self.whole = WholePrompts(kv, linear) if keeps_whole and linear is not None else None
        self.num_queries = 0
        self.num_hits = 0
        self.num_tokens_reused = 0
        self.misses: Counter[MissReason] = Counter()

    @property
    def smallest_prompt_that_can_hit(self) -> int:
        """Tokens: one whole stride below the final one, or any prompt as a whole."""
        return self.chunk_stride + 1 if self.whole is None else 1

    # ---- probing

    def match(self, seq: CachedSequence) -> Match:
        """Probe: the deepest boundary L <= min(K/V reach, final token - 1) that has a state, or the
        whole prompt.

        Never below what the sequence has computed already. Changes nothing but its hashes.
        """
        if not self.enabled:
            return Match(seq.num_computed_tokens, 0, MissReason.DISABLED)
        reach = self.kv.reach(seq)
        hit = None if self.whole is None else self.whole.match(seq, reach)
        if hit is not None:
            return Match(seq.num_prompt_tokens, seq.num_prompt_tokens, None, hit)
        limit = min(reach, seq.num_prompt_tokens - 1)
        boundary: int | None = limit // self.chunk_stride * self.chunk_stride
        if self.linear is not None:
            boundary = self.linear.deepest(seq, limit)
        if boundary is None or boundary <= seq.num_computed_tokens:
            begins = seq.num_computed_tokens == 0  # later nobody asks why, and looking takes long
            reason = self._reason(seq, reach) if begins else None
            return Match(seq.num_computed_tokens, reach, reason)
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
        whole = self._whole_reason(seq, reach)
        if whole is not None or seq.num_prompt_tokens <= self.chunk_stride:
            return MissReason.BELOW_STRIDE if whole is None else whole
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

    def _whole_reason(self, seq: CachedSequence, reach: int) -> MissReason | None:
        """Why the whole prompt can't be reused; None where nothing was kept of it."""
        if self.whole is None or not seq.keeps_whole:
            return None
        if self.whole.has_state(seq):
            return MissReason.NO_SLOT if self.whole.has_kv(seq, reach) else MissReason.KV_SHORTER
        return MissReason.EVICTED if self.whole.was_evicted(seq) else None

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
            source = self._mount(seq, match)
            assert source.boundary == match.boundary
        reused = {source.provenance} if source is not None else set()
        if jump:
            reused.add(self.kv.acquire_shared(seq, match.shared))
        enough = self.kv.allocate(seq, end)
        if enough and self.linear is not None:
            enough = self.linear.allocate_for_sequence(seq)
        if not enough:
            self.kv.truncate(seq, held)
            if source is not None and self.linear is not None:
                self.linear.unmount(source)
            if self.whole is not None:
                self.whole.unpin(seq)
            return False
        if source is not None and self.linear is not None:
            self.linear.set_source(seq, source)
        if self.linear is not None and self.enabled and not seq.was_noted:
            whole = self.whole is not None and self.whole.has_kv(seq, match.kv_reach)
            reach = min(match.kv_reach, seq.num_prompt_tokens - 1)
            self.linear.note_request(seq, reach, whole=whole)
        if Provenance.DECODE in reused:
            seq.provenance = Provenance.DECODE
        if jump:
            seq.num_computed_tokens = match.boundary
            seq.resumed_boundary = match.boundary
            seq.num_published_blocks = match.shared // self.kv.block_size
        return True

    def _mount(self, seq: CachedSequence, match: Match) -> StateSource:
        assert self.linear is not None
        if match.whole is None:
            return self.linear.mount(seq, match.boundary)
        assert self.whole is not None
        return self.whole.mount(seq, match.whole)

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

    def plan_whole(self, seq: CachedSequence) -> WholeSave | None:
        """After `plan_saves`, of a step that ends with the prompt and chooses the first token: what
        the step copies for identical prompts."""
        return None if self.whole is None else self.whole.plan(seq)

    def keep(self, seq: CachedSequence, save: WholeSave, logits: object) -> None:
        """A committed step had this save, and `logits` after the last token: publish it."""
        assert self.whole is not None
        self.whole.keep(seq, save, logits)

    def commit(self, seq: CachedSequence, end: int) -> None:
        """The step that computed [num_computed_tokens, end) was issued: publish what it wrote.

        Of a step that verified drafts, `end` is where its true tokens end; the sequence has them.
        One that found its whole prompt wrote nothing but copies of blocks; its state is still where
        it was found, for the next step to read.
        """
        if seq.whole_hit is not None:
            assert self.whole is not None and end == seq.num_computed_tokens
            self.whole.unpin(seq)
            return
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
        if self.whole is not None:
            self.whole.forget(seq)
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
        if self.whole is not None:
            self.whole.release(seq)
        self.kv.release(seq)
        seq.num_computed_tokens = 0
        seq.provenance = Provenance.PREFILL
        seq.branch_boundary = seq.resumed_boundary = 0

    def check(self, sequences: Iterable[CachedSequence]) -> None:
        """Invariants of both leaves, and that every reference is held by one of these sequences."""
        sequences = list(sequences)
        self.kv.check()
        blocks = Counter(id_ for seq in sequences for id_ in seq.block_table)
        blocks.update(held_blocks(sequences))
        for id_ in range(1, self.kv.pool.num_ids):
            assert self.kv.pool.ref_count(id_) == blocks[id_], f"block {id_} leaks"
        if self.linear is None:
            return
        self.linear.check()
        slots: Counter[int] = Counter([*self.linear.scratch, *held_slots(sequences)])
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
