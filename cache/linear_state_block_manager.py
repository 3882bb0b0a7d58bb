"""The LINEAR leaf: live slots, checkpoints, and the moves between them. Host bookkeeping only."""

from collections import Counter

from cache.admission import admitted
from cache.block_pool import BlockPool
from cache.cached_sequence import CachedSequence, PendingSave, StateSource
from cache.eviction import EvictionPolicy, Kind
from cache.hashing import HashDomain, PrefixHash, Provenance, filed_under
from cache.linear_state_prefix_cache import Checkpoint, LinearStatePrefixCache
from cache.ops import NO_SLOT, LinearStateCacheOp
from cache.placement import Placement, Prompt
from cache.shared_memory import SPARE_SLOTS, SharedMemory


class LinearStateBlockManager:
    """Owner of the slot ids [1, num_slots), live and checkpoint alike.

    A live slot is referenced by its sequence; a checkpoint is published in the index and
    referenced only while a step reads it. A checkpoint is never a reason to refuse a request:
    unreferenced ones are evicted for live slots (`participates_in_admission` is False).

    Saving never takes the slots that sequences not yet running will need: `max_num_seqs` live slots
    are always obtainable, except for the sources pinned by the present step.

    scratch: slots set aside for the states that verify steps leave; those that no step uses now,
    one reference each. No checkpoint is ever evicted for them.
    """

    participates_in_admission = False

    def __init__(
        self,
        num_slots: int,
        domain: HashDomain,
        *,
        placement: Placement,
        max_num_seqs: int,
        enable_prefix_caching: bool = True,
        policy: EvictionPolicy | None = None,
        num_scratch: int = 0,
        memory: SharedMemory | None = None,
    ) -> None:
        """policy: None: LRU.

        num_scratch: slots to set aside; what is left must hold the live slots. memory: what the
        slots lie in, if K/V lies there too; then it has `num_slots` pages.
        """
        self.chunk_stride = domain.step
        self.domain = domain
        self.placement = placement
        self.max_num_seqs = max_num_seqs
        self.enabled = enable_prefix_caching
        self.cache = LinearStatePrefixCache(domain.step)
        self.num_live = 0
        self.memory = memory
        self.pool: BlockPool
        if memory is None:
            self.pool = BlockPool(num_slots, on_evict=self.cache.forget, policy=policy)
        else:
            self.pool = memory.slots.serve(self.cache.forget, policy)
            memory.reserved = self._num_reserved
            memory.most_reserved = max_num_seqs + num_scratch + SPARE_SLOTS
        self.num_scratch = num_scratch
        self.scratch = self._set_aside()
        self.num_saves = 0
        self.saves_skipped: Counter[str] = Counter()

    def _num_reserved(self) -> int:
        """Slots that K/V must leave: the live ones to come, and a source that a step pins."""
        return max(0, self.max_num_seqs - self.num_live) + 1

    # ---- probing and mounting

    def allocate_shared(self, seq: CachedSequence) -> list[int]:
        """Probe: all boundaries that could be restored for this prompt, ascending. K/V-blind."""
        seq.update_linear_state_hashes(self.domain)
        return self.boundaries(seq, seq.accepts)

    def deepest(self, seq: CachedSequence, limit: int) -> int | None:
        """Probe: the deepest of them above what is computed, and not above `limit`."""
        seq.update_linear_state_hashes(self.domain)
        keys = seq.linear_state_hashes
        return self.cache.deepest(keys, seq.num_computed_tokens, limit, seq.accepts)

    def boundaries(self, seq: CachedSequence, least: Provenance) -> list[int]:
        """The same with states no worse than `least`. Its keys are there already."""
        return self.cache.match(seq.linear_state_hashes, seq.num_prompt_tokens, least)

    def can_mount(self, seq: CachedSequence, boundary: int) -> bool:
        """Whether, with that checkpoint pinned, a live slot is left for the sequence."""
        checkpoint = self._checkpoint(seq, boundary)
        pinning = int(self.pool.ref_count(checkpoint.slot_id) == 0)
        return seq.live_slot is not None or self.pool.num_available - pinning >= 1

    def mount(self, seq: CachedSequence, boundary: int) -> StateSource:
        """Pin the checkpoint of a probed boundary. It becomes the restore source, never a block."""
        checkpoint = self._checkpoint(seq, boundary)
        self.pool.acquire(checkpoint.slot_id)
        return StateSource(checkpoint.slot_id, checkpoint.boundary, checkpoint.provenance)

    def unmount(self, source: StateSource) -> None:
        self.pool.release(source.slot_id)

    def set_source(self, seq: CachedSequence, source: StateSource) -> None:
        """The next step of seq reads this pinned source; an earlier one is given back."""
        self._release_source(seq)
        seq.state_source = source

    def _checkpoint(self, seq: CachedSequence, boundary: int) -> Checkpoint:
        checkpoint = self.cache.find(self._key(seq, boundary), seq.accepts)
        assert checkpoint is not None, f"no checkpoint at {boundary}"
        assert checkpoint.boundary == boundary, f"{checkpoint} found under boundary {boundary}"
        return checkpoint

    def _key(self, seq: CachedSequence, boundary: int) -> PrefixHash:
        return seq.linear_state_hashes[boundary // self.chunk_stride - 1]

    # ---- one step

    def note_request(self, seq: CachedSequence, reach: int, *, whole: bool = False) -> None:
        """Tell the eviction policy, once for each request. reach: tokens whose K/V is cached.

        whole: the K/V of the whole prompt is.
        """
        seq.was_noted = True
        mounted = None if seq.state_source is None else seq.state_source.slot_id
        keys = seq.linear_state_hashes[: reach // self.chunk_stride]
        self.pool.policy.request(self._whole_path(seq) if whole else keys, mounted)

    def allocate_for_sequence(self, seq: CachedSequence) -> bool:
        """First the deferred save, then a live slot if the sequence has none. False: no slot."""
        self.flush_save(seq, rotate=True)
        if seq.live_slot is None:
            seq.live_slot = self.pool.allocate()
            if seq.live_slot is None:
                return False
            self.num_live += 1
        return True

    def plan_snapshots(self, seq: CachedSequence, start: int, end: int) -> None:
        """Take slots for the boundaries strictly inside the prefill step [start, end).

        The deepest ones if there are not enough, or as a selective policy chooses.
        """
        assert not seq.snapshots, "snapshots of an earlier step were not committed"
        source = seq.state_source
        if source is not None and source.boundary == start and self._is_save_point(seq, start):
            keys = seq.linear_state_hashes[: start // self.chunk_stride]
            self.pool.policy.again(source.slot_id, keys, self._kind(seq, start))
        points = self._save_points(seq, start, end - 1)
        new = {b: kind for b, kind in points.items() if self._is_new(self._save_at(seq, b))}
        seq.snapshots = sorted(self._admitted(seq, new, start).items())

    def commit(self, seq: CachedSequence) -> None:
        """The step was issued: unpin its source, publish its snapshots, record its end's save."""
        self._release_source(seq)  # first: what is deeper is evicted later
        for boundary, slot in seq.snapshots:
            self._publish(seq, slot, self._save_at(seq, boundary))
            self.pool.release(slot)
        seq.snapshots.clear()
        boundary = seq.num_computed_tokens
        if self._is_save_point(seq, boundary):
            seq.pending_save = self._save_at(seq, boundary)

    def save_here(self, seq: CachedSequence) -> None:
        """Its state is to be saved when it leaves, save point or not, if it is on the grid."""
        on_grid = seq.num_computed_tokens % self.chunk_stride == 0
        if self.enabled and on_grid and 0 < seq.num_computed_tokens <= seq.num_prompt_tokens:
            seq.pending_save = self._save_at(seq, seq.num_computed_tokens)

    def _save_at(self, seq: CachedSequence, boundary: int) -> PendingSave:
        """What the state of this boundary is filed as."""
        seq.update_linear_state_hashes(self.domain)
        decoded = boundary > seq.num_prompt_tokens
        provenance = Provenance.DECODE if decoded else seq.provenance
        return PendingSave(boundary, self._key(seq, boundary), provenance)

    def cache_op(self, seq: CachedSequence) -> LinearStateCacheOp:
        """What the worker is told about this row."""
        assert seq.live_slot is not None
        if seq.state_source is None:
            return LinearStateCacheOp(seq.live_slot)
        source = seq.state_source
        return LinearStateCacheOp(seq.live_slot, True, source.slot_id, source.boundary)

    # ---- drafts

    def take_scratch(self, seq: CachedSequence, count: int) -> bool:
        """A slot for the state after each of `count` tokens; False where too few are set aside."""
        assert not seq.scratch, "the drafts of an earlier step were not settled"
        if len(self.scratch) < count:
            return False
        seq.scratch = [self.scratch.pop() for _ in range(count)]
        return True

    def _set_aside(self) -> list[int]:
        slots = [self.pool.allocate() for _ in range(self.num_scratch)]
        assert None not in slots, f"no room to set {self.num_scratch} slots aside"
        return [slot for slot in slots if slot is not None]

    def settle(self, seq: CachedSequence, num_tokens: int) -> None:
        """The first `num_tokens` of the step's tokens are true: go on in the slot after the last of
        them, and the live slot becomes scratch. Nothing is copied; a save point among the others is
        published from its own slot, and another one takes that one's place."""
        assert seq.live_slot is not None and 1 <= num_tokens <= len(seq.scratch)
        for index, slot in enumerate(seq.scratch[: num_tokens - 1]):
            boundary = seq.num_computed_tokens + index + 1
            if self._is_save_point(seq, boundary):
                save = self._save_at(seq, boundary)
                other = self._slot_for_save(seq, save)
                if other is not None:
                    seq.scratch[index] = other
                    self._publish(seq, slot, save)
                    self.pool.release(slot)
                    seq.decode_checkpoint = (save.key, slot)
        before, seq.live_slot = seq.live_slot, seq.scratch[num_tokens - 1]
        seq.scratch[num_tokens - 1] = before
        self._give_back_scratch(seq)

    def _give_back_scratch(self, seq: CachedSequence) -> None:
        self.scratch += seq.scratch
        seq.scratch = []

    # ---- saving

    def flush_save(self, seq: CachedSequence, *, rotate: bool) -> None:
        """Publish the live slot under its recorded hash.

        rotate: the sequence goes on: it gets a new live slot and reads the published one once.
        Otherwise the sequence is leaving and keeps the slot until `release`.
        """
        save, seq.pending_save = seq.pending_save, None
        if save is None:
            return
        assert seq.live_slot is not None and save.boundary == seq.num_computed_tokens, save
        if not rotate:
            self._publish(seq, seq.live_slot, save)
            return
        new_slot = self._slot_for_save(seq, save)
        if new_slot is None:
            return
        self._publish(seq, seq.live_slot, save)
        self.set_source(seq, StateSource(seq.live_slot, save.boundary, save.provenance))
        decoded = save.boundary > seq.num_prompt_tokens
        seq.decode_checkpoint = (save.key, seq.live_slot) if decoded else None
        seq.live_slot = new_slot

    def _slot_for_save(self, seq: CachedSequence, save: PendingSave) -> int | None:
        """A slot in exchange for the one that holds this state; None if it is not to be saved."""
        if not self._is_new(save):
            return None
        if save.boundary > seq.num_prompt_tokens and self._room() > 0:
            self._withdraw_last_decode_state(seq)
        point = {save.boundary: self._kind(seq, save.boundary)}
        return self._admitted(seq, point, save.boundary - 1).get(save.boundary)

    def _withdraw_last_decode_state(self, seq: CachedSequence) -> None:
        """An answer keeps one state, its latest: the one before makes room for it.

        Only while it is decoded. One that ends on the grid, or was preempted, may leave two.
        """
        last, seq.decode_checkpoint = seq.decode_checkpoint, None
        if last is None:
            return
        key, slot = last
        if self.cache.holds(key, Provenance.DECODE, slot):
            self.quarantine(slot)

    def _is_save_point(self, seq: CachedSequence, boundary: int) -> bool:
        return boundary in self._save_points(seq, boundary - 1, boundary)

    def _save_points(self, seq: CachedSequence, start: int, end: int) -> dict[int, Kind]:
        """The boundaries in (start, end] whose states are to be saved, and why."""
        if not self.enabled:
            return {}
        if end > seq.num_prompt_tokens:  # a decode step
            on_grid = end % self.chunk_stride == 0
            return {end: Kind.TIP} if on_grid and not seq.exact else {}
        prompt = Prompt(
            seq.num_prompt_tokens, self.chunk_stride, seq.branch_boundary, seq.resumed_boundary
        )
        found = self.placement.boundaries(start, end, prompt)
        for point in seq.save_points:
            if start < point <= end and point % self.chunk_stride == 0:
                found[point] = Kind.TIP
        return found

    def _kind(self, seq: CachedSequence, boundary: int) -> Kind:
        return self._save_points(seq, boundary - 1, boundary).get(boundary, Kind.COMB)

    def _is_new(self, save: PendingSave) -> bool:
        """Whether no such checkpoint is there; if one is, that is counted."""
        if self.cache.contains(save.key, save.provenance):
            self.saves_skipped["duplicate"] += 1
            return False
        return True

    def _room(self) -> int:
        """Slots that saving may take."""
        return max(0, self.pool.num_available - max(0, self.max_num_seqs - self.num_live))

    def _admitted(self, seq: CachedSequence, points: dict[int, Kind], start: int) -> dict[int, int]:
        """Slots for those of these boundaries above `start` that are to be saved."""
        pool, keys = self.pool, seq.linear_state_hashes
        room, base = self._room(), 0
        if pool.policy.selective and len(points) > pool.num_free:
            base = self.cache.deepest(keys, 0, start, seq.accepts) or 0
            base = max([base, *(boundary for boundary, _ in seq.snapshots)])
        slots = admitted(
            points,
            base=base,
            policy=pool.policy,
            room=room,
            num_free=pool.num_free,
            allocate=pool.allocate,
        )
        passed_over = points.keys() - slots.keys()
        if passed_over:
            self.saves_skipped["no_slot"] += max(0, len(points) - room)
            self.saves_skipped["not_worth"] += min(len(points), room) - len(slots)
            self.saves_skipped = +self.saves_skipped  # without those that never happened
        for boundary in sorted(passed_over):
            kind = points[boundary]
            path = keys[: boundary // self.chunk_stride]
            pool.policy.passed_over(self._whole_path(seq) if kind is Kind.WHOLE else path, kind)
        return slots

    def _publish(self, seq: CachedSequence, slot: int, save: PendingSave) -> None:
        if self.cache.contains(save.key, save.provenance):  # another row of the step was first
            self.saves_skipped["duplicate"] += 1
            return
        if self.memory is not None and not self._keep_kv(self.memory, seq, slot, save):
            self.saves_skipped["no_kv"] += 1
            return
        self.pool.publish(slot)
        checkpoint = Checkpoint(slot, save.boundary, seq.namespace, save.provenance)
        self.cache.insert(save.key, checkpoint)
        self.num_saves += 1
        keys = seq.linear_state_hashes[: save.boundary // self.chunk_stride]
        self.pool.policy.saved(slot, save.boundary, keys, self._kind(seq, save.boundary))

    def _keep_kv(
        self, memory: SharedMemory, seq: CachedSequence, slot: int, save: PendingSave
    ) -> bool:
        """Keep the K/V that this state needs for as long as the state is kept. False: some of it is
        gone already."""
        keys, least = seq.linear_state_hashes, save.provenance
        start = self.cache.deepest(keys, 0, save.boundary - 1, least)
        above = None if start is None else self._key(seq, start)
        found = None if above is None else self.cache.find(above, least)
        blocks = memory.published(seq, start or 0, save.boundary, least)
        if blocks is None:
            return False
        memory.add_state(slot, None if found is None else found.slot_id, blocks)
        return True

    # ---- whole prompts

    def take_for_whole(self, seq: CachedSequence) -> int | None:
        """A slot for the state after the whole prompt; None: no room, or others are worth more."""
        end = seq.num_prompt_tokens
        return self._admitted(seq, {end: Kind.WHOLE}, end - 1).get(end)

    def publish_whole(
        self, seq: CachedSequence, slot: int, provenance: Provenance, logits: object
    ) -> None:
        """File the state after the whole prompt, unless one is there, and give the slot back."""
        key, end = seq.whole_key(self.domain), seq.num_prompt_tokens
        if self.cache.contains(filed_under(key, provenance)):
            self.saves_skipped["duplicate"] += 1
        else:
            self.pool.publish(slot)
            checkpoint = Checkpoint(slot, end, seq.namespace, provenance, logits)
            self.cache.insert(key, checkpoint)
            self.num_saves += 1
            self.pool.policy.saved(slot, end, self._whole_path(seq), Kind.WHOLE)
        self.pool.release(slot)

    def _whole_path(self, seq: CachedSequence) -> list[PrefixHash]:
        """The keys of a whole prompt's strides, the last of them (whole or not) as the prompt's."""
        num_before = (seq.num_prompt_tokens - 1) // self.chunk_stride
        return [*seq.linear_state_hashes[:num_before], seq.whole_key(self.domain)]

    # ---- leaving

    def release(self, seq: CachedSequence) -> None:
        """Give back everything. A pending save is published first: it costs nothing now."""
        self.flush_save(seq, rotate=False)
        self.discard(seq)

    def discard(self, seq: CachedSequence) -> None:
        """Give back everything and publish nothing: the slots' contents are not to be trusted."""
        seq.pending_save = seq.decode_checkpoint = None
        for _, slot in seq.snapshots:
            self.pool.release(slot)
        seq.snapshots.clear()
        self._give_back_scratch(seq)
        self._release_source(seq)
        if seq.live_slot is not None:
            self.pool.release(seq.live_slot)
            seq.live_slot = None
            self.num_live -= 1

    def forget(self, seq: CachedSequence) -> None:
        """Unpublish every checkpoint under a key of this prompt."""
        for key in seq.linear_state_hashes:
            while (checkpoint := self.cache.find(key, Provenance.DECODE)) is not None:
                self.quarantine(checkpoint.slot_id)

    def quarantine(self, slot: int) -> None:
        """Forget a checkpoint that could not be restored; later requests will not find it."""
        if slot != NO_SLOT and 0 < slot < self.pool.num_ids and self.pool.is_published(slot):
            self.cache.forget(slot)
            self.pool.unpublish(slot)

    def reset(self) -> None:
        """Forget every slot. Only when no sequence is to keep what it holds."""
        self.cache.clear()
        self.pool.reset()
        self.scratch = self._set_aside()
        self.num_live = 0

    def _release_source(self, seq: CachedSequence) -> None:
        if seq.state_source is not None:
            self.pool.release(seq.state_source.slot_id)
            seq.state_source = None

    def check(self) -> None:
        self.pool.check()
        self.cache.check()
        published = {i for i in range(1, self.pool.num_ids) if self.pool.is_published(i)}
        assert published == self.cache.slot_ids(), "published slots and the index disagree"
