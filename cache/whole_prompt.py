"""Whole prompts: an identical one needs no forward pass, not even for its last stride.

What is kept of a prompt of n tokens, besides the K/V of its whole strides, which is shared anyway:
the state after token n, copies of the K/V blocks after the last whole stride, and the logits of the
last token. All three come from a prefill that ended with the prompt, so they have the bits of any
cold run of it. They are filed under a key of the whole prompt, which is never that of a prefix.
"""

from collections.abc import Iterable

from cache.cached_sequence import CachedSequence, StateSource, WholeHit, WholeSave
from cache.hashing import PrefixHash, Provenance, filed_under, tail_key
from cache.kv_block_manager import KVBlockManager
from cache.linear_state_block_manager import LinearStateBlockManager


class WholePrompts:
    """Files whole prompts in both leaves, and finds them.

    A save takes a slot and blocks of its own, held by the sequence (`whole_save`) until the step
    that copies to them was issued and its logits are known; then they are published, and evicted
    like any other: the state with its logits as a checkpoint, a block as a block. Without one of
    them the prompt is no longer found. A hit pins what it reads (`whole_hit`, and the state as its
    source).
    """

    def __init__(self, kv: KVBlockManager, linear: LinearStateBlockManager) -> None:
        self.kv, self.linear = kv, linear

    # ---- reusing

    def match(self, seq: CachedSequence, reach: int) -> WholeHit | None:
        """Probe: what a sequence needs to have its whole prompt, if all is there and fits.

        reach: tokens served by its own and the shared K/V.
        """
        if not seq.keeps_whole or reach < self._shared(seq):
            return None
        for provenance in seq.accepts.accepted:
            key = filed_under(seq.whole_key(self.linear.domain), provenance)
            found, tail = self.linear.cache.find(key), self._tail(seq, key)
            if found is None or tail is None:
                continue
            assert found.boundary == seq.num_prompt_tokens and found.provenance is provenance, found
            hit = WholeHit(found.slot_id, self._shared(seq), tail, found.logits, provenance)
            if self._fits(seq, hit):
                return hit
        return None

    def has_kv(self, seq: CachedSequence, reach: int) -> bool:
        """Whether the K/V of the whole prompt is there, be its state there or not."""
        if not seq.keeps_whole or reach < self._shared(seq):
            return False
        key, accepted = seq.whole_key(self.linear.domain), seq.accepts.accepted
        return any(self._tail(seq, filed_under(key, how)) is not None for how in accepted)

    def has_state(self, seq: CachedSequence) -> bool:
        """Whether the state after the whole prompt is there, be its K/V there or not."""
        return self.linear.cache.contains(seq.whole_key(self.linear.domain), seq.accepts)

    def was_evicted(self, seq: CachedSequence) -> bool:
        """Whether that state was there and is gone."""
        return self.linear.cache.was_evicted(seq.whole_key(self.linear.domain), seq.accepts)

    def mount(self, seq: CachedSequence, hit: WholeHit) -> StateSource:
        """Pin the state and the blocks of a probed hit."""
        assert seq.whole_hit is None, "the whole prompt is mounted already"
        for id_ in hit.tail:
            self.kv.pool.acquire(id_)
        seq.whole_hit = hit
        self.linear.pool.acquire(hit.slot_id)
        return StateSource(hit.slot_id, seq.num_prompt_tokens, hit.provenance)

    def unpin(self, seq: CachedSequence) -> None:
        """The blocks were copied, or are not to be. The source stays: the next step reads it."""
        hit, seq.whole_hit = seq.whole_hit, None
        if hit is not None:
            for id_ in hit.tail:
                self.kv.pool.release(id_)

    def _shared(self, seq: CachedSequence) -> int:
        """Tokens of its whole strides."""
        return seq.num_prompt_tokens // self.kv.chunk_stride * self.kv.chunk_stride

    def _num_tail_blocks(self, seq: CachedSequence) -> int:
        return self.kv.num_blocks_for(seq.num_prompt_tokens - self._shared(seq))

    def _tail(self, seq: CachedSequence, key: PrefixHash) -> tuple[int, ...] | None:
        """The blocks after the whole strides; None if one of them is not there."""
        found = [self.kv.find(tail_key(key, i)) for i in range(self._num_tail_blocks(seq))]
        tail = tuple(id_ for id_ in found if id_ is not None)
        return tail if len(tail) == len(found) else None

    def _fits(self, seq: CachedSequence, hit: WholeHit) -> bool:
        """Whether, with all of it pinned, slots and blocks are left for the sequence's own."""
        slots, blocks = self.linear.pool, self.kv.pool
        num_slots = int(slots.ref_count(hit.slot_id) == 0) + int(seq.live_slot is None)
        own = len(seq.block_table) * self.kv.block_size
        num_blocks = self.kv.num_blocks_for(seq.num_prompt_tokens - own)
        num_blocks -= self.kv.num_in_use(seq, hit.shared, above=own)
        num_blocks += sum(blocks.ref_count(id_) == 0 for id_ in hit.tail)
        return num_slots <= slots.num_available and num_blocks <= blocks.num_available

    # ---- saving

    def plan(self, seq: CachedSequence) -> WholeSave | None:
        """Take what the step that ends with the prompt is to copy to, so far as it is missing.

        Each sequence that may run keeps a block to go on with. Without room nothing is taken.
        """
        assert seq.whole_save is None, "the save of an earlier step is still held"
        if not seq.keeps_whole:
            return None
        key = filed_under(seq.whole_key(self.linear.domain), seq.provenance)
        sources = seq.block_table[self._shared(seq) // self.kv.block_size :]
        keys = [tail_key(key, i) for i in range(self._num_tail_blocks(seq))]
        missing = [
            (k, block) for k, block in zip(keys, sources, strict=True) if self.kv.find(k) is None
        ]
        has_state = self.linear.cache.contains(key)
        if has_state and not missing:
            self.linear.saves_skipped["duplicate"] += 1
            return None
        if len(missing) + self.linear.max_num_seqs > self.kv.pool.num_available:
            self.linear.saves_skipped["no_block"] += 1
            return None
        slot = None if has_state else self.linear.take_for_whole(seq)
        if slot is not None or has_state:
            blocks = tuple((k, block, self._block()) for k, block in missing)
            seq.whole_save = WholeSave(slot, blocks, seq.provenance)
        return seq.whole_save

    def _block(self) -> int:
        id_ = self.kv.pool.allocate()
        assert id_ is not None, "room was found, but no block"
        return id_

    def keep(self, seq: CachedSequence, save: WholeSave, logits: object) -> None:
        """The step of this save was issued, and these are its logits: publish it.

        Nothing happens if the sequence gave the save back meanwhile.
        """
        if seq.whole_save is not save:
            return
        seq.whole_save = None
        for key, _, id_ in save.blocks:
            self.kv.file(key, id_)
            self.kv.pool.release(id_)
        if save.slot is not None:
            self.linear.publish_whole(seq, save.slot, save.provenance, logits)

    # ---- leaving

    def release(self, seq: CachedSequence) -> None:
        """Give back what a save or a hit holds, and publish nothing."""
        self.unpin(seq)
        save, seq.whole_save = seq.whole_save, None
        if save is not None:
            for _, _, id_ in save.blocks:
                self.kv.pool.release(id_)
            if save.slot is not None:
                self.linear.pool.release(save.slot)

    def forget(self, seq: CachedSequence) -> None:
        """Unpublish what is kept of this prompt."""
        for provenance in Provenance:
            key = filed_under(seq.whole_key(self.linear.domain), provenance)
            found = self.linear.cache.find(key)
            if found is not None:
                self.linear.quarantine(found.slot_id)
            for index in range(self._num_tail_blocks(seq)):
                self.kv.unfile(tail_key(key, index))


def held_slots(seqs: Iterable[CachedSequence]) -> list[int]:
    """The slots that saves hold."""
    saves = [seq.whole_save for seq in seqs if seq.whole_save is not None]
    return [save.slot for save in saves if save.slot is not None]


def held_blocks(seqs: Iterable[CachedSequence]) -> list[int]:
    """The blocks that saves and hits hold."""
    blocks: list[int] = []
    for seq in seqs:
        blocks += [] if seq.whole_hit is None else seq.whole_hit.tail
        blocks += [] if seq.whole_save is None else [id_ for _, _, id_ in seq.whole_save.blocks]
    return blocks
