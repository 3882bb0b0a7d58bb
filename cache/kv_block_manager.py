"""The K/V leaf: paged blocks, shared by reference along a chained hash."""

from cache.block_pool import BlockPool
from cache.cached_sequence import CachedSequence
from cache.hashing import HashDomain, PrefixHash, Provenance, filed_under
from cache.prefix_index import PrefixIndex
from cache.shared_memory import SharedMemory


class KVBlockManager:
    """Gives sequences blocks of `block_size` tokens and shares the published ones.

    A sequence owns one reference to each id of its block table and gives it back in `release`.
    Blocks are published under the sequence's own recorded hash: those that prefill wrote, and for
    those who ask for it (`CachedSequence.exact` is False) the decoded ones, filed apart.
    """

    def __init__(
        self,
        num_blocks: int,
        domain: HashDomain,
        *,
        chunk_stride: int,
        memory: SharedMemory | None = None,
    ) -> None:
        """memory: what the blocks lie in, if states lie there too; then it has `num_blocks`."""
        assert chunk_stride % domain.step == 0, f"{chunk_stride} is no multiple of {domain.step}"
        self.block_size = domain.step
        self.chunk_stride = chunk_stride
        self.domain = domain
        self._index: PrefixIndex[None] = PrefixIndex()
        self.pool = (
            BlockPool(num_blocks, on_evict=self._index.forget)
            if memory is None
            else memory.blocks.serve(self._index.forget)
        )
        if memory is not None:
            memory.published = self.published

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def reach(self, seq: CachedSequence, least: Provenance | None = None) -> int:
        """Probe: tokens served by the sequence's own blocks and the published ones that follow.

        least: the least that counts; None: what the sequence accepts.
        """
        least = seq.accepts if least is None else least
        seq.update_block_hashes(self.domain)
        index = seq.num_computed_tokens // self.block_size
        while index < len(seq.block_hashes) and self._find(seq.block_hashes[index], least):
            index += 1
        return max(seq.num_computed_tokens, index * self.block_size)

    def _find(self, key: PrefixHash, least: Provenance) -> tuple[int, Provenance] | None:
        """The best block of a prefix that is no worse than `least`, and how it came to be."""
        for provenance in least.accepted:
            found = self._index.find(filed_under(key, provenance))
            if found is not None:
                return found[0], provenance
        return None

    def find(self, key: PrefixHash) -> int | None:
        """The block that is filed under this very key."""
        found = self._index.find(key)
        return None if found is None else found[0]

    def file(self, key: PrefixHash, id_: int) -> None:
        """Publish a private block under a key of no chain, unless that is taken."""
        if not self._index.contains(key):
            self.pool.publish(id_)
            self._index.insert(key, id_, None)

    def unfile(self, key: PrefixHash) -> None:
        """Unpublish the block under this very key, if there is one."""
        id_ = self.find(key)
        if id_ is not None:
            self._index.forget(id_)
            self.pool.unpublish(id_)

    def num_in_use(self, seq: CachedSequence, boundary: int, *, above: int = 0) -> int:
        """How many shared blocks of [above, boundary) are held by others: they cost no room."""
        keys = seq.block_hashes[above // self.block_size : boundary // self.block_size]
        found = (self._find(key, seq.accepts) for key in keys)
        return sum(f is not None and self.pool.ref_count(f[0]) > 0 for f in found)

    def acquire_shared(self, seq: CachedSequence, boundary: int) -> Provenance:
        """Append the published blocks up to `boundary`, a multiple of the block within reach.

        Returns DECODE if any of them is of that kind.
        """
        worst = Provenance.PREFILL
        for key in seq.block_hashes[len(seq.block_table) : boundary // self.block_size]:
            found = self._find(key, seq.accepts)
            assert found is not None, "K/V block within reach is not published"
            id_, provenance = found
            self.pool.acquire(id_)
            seq.block_table.append(id_)
            if provenance is Provenance.DECODE:
                worst = provenance
        return worst

    def allocate(self, seq: CachedSequence, num_tokens: int) -> bool:
        """Grow the block table to num_tokens tokens; False, and nothing changed, without room."""
        missing = self.num_blocks_for(num_tokens) - len(seq.block_table)
        if missing > self.pool.num_available:
            return False
        for _ in range(missing):
            id_ = self.pool.allocate()
            assert id_ is not None
            seq.block_table.append(id_)
        return True

    def truncate(self, seq: CachedSequence, num_blocks: int) -> None:
        """Give back the blocks after the first num_blocks, the last one first."""
        while len(seq.block_table) > num_blocks:
            self.pool.release(seq.block_table.pop())
        seq.num_published_blocks = min(seq.num_published_blocks, num_blocks)

    def publish(self, seq: CachedSequence) -> None:
        """Publish the blocks of the whole strides computed, once their step was issued.

        The rows of the stride a prompt ends in come from a tile that ended with it: in bits they
        are not the rows of a prompt that goes on. From there on a block is DECODE, and published
        only if the sequence is not exact. A block whose key is taken stays private, but that a dead
        one makes way: it would be the next to go.
        """
        prefilled = self._whole_strides(min(seq.num_computed_tokens, seq.num_prompt_tokens))
        computed = prefilled if seq.exact else self._whole_strides(seq.num_computed_tokens)
        for index in range(seq.num_published_blocks, computed):
            key, id_ = seq.block_hashes[index], seq.block_table[index]
            provenance = seq.provenance if index < prefilled else Provenance.DECODE
            found = self._find(key, provenance)
            if found is not None and found[1] is provenance and self.pool.is_dead(found[0]):
                self._index.forget(found[0])
                self.pool.unpublish(found[0])
                found = None
            if found is None:
                self.pool.publish(id_)
                self._index.insert(filed_under(key, provenance), id_, None)
        seq.num_published_blocks = max(seq.num_published_blocks, computed)

    def published(
        self, seq: CachedSequence, start: int, end: int, least: Provenance
    ) -> list[int] | None:
        """Probe: the blocks of the tokens [start, end), both multiples of the block; None if one of
        them is not published, or worse than `least`."""
        keys = seq.block_hashes[start // self.block_size : end // self.block_size]
        found = [each[0] for key in keys if (each := self._find(key, least)) is not None]
        return found if len(found) == (end - start) // self.block_size else None

    def _whole_strides(self, num_tokens: int) -> int:
        """Blocks of the whole strides of so many tokens."""
        return num_tokens // self.chunk_stride * self.chunk_stride // self.block_size

    def forget(self, seq: CachedSequence) -> None:
        """Unpublish every block under a key of this prompt."""
        for key in seq.block_hashes:
            for provenance in Provenance:
                self.unfile(filed_under(key, provenance))

    def reset(self) -> None:
        """Forget every block. Only when no sequence is to keep what it holds."""
        self._index.clear()
        self.pool.reset()

    def release(self, seq: CachedSequence) -> None:
        """Give back everything: later blocks become least recently used before earlier ones."""
        self.truncate(seq, 0)

    def check(self) -> None:
        self.pool.check()
        self._index.check()
        published = {i for i in range(1, self.pool.num_ids) if self.pool.is_published(i)}
        assert published == self._index.ids(), "published blocks and the index disagree"
