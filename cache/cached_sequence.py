"""What the cache knows of one request: tokens, two hash chains, and everything it holds."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cache.hashing import (
    TOKEN_TYPECODE,
    HashDomain,
    MultimodalItem,
    Namespace,
    PrefixHash,
    Provenance,
)


@dataclass(frozen=True)
class StateSource:
    """A pinned slot that the next step reads: it holds the state after `boundary` tokens."""

    slot_id: int
    boundary: int
    provenance: Provenance = Provenance.PREFILL


@dataclass(frozen=True)
class PendingSave:
    """The live slot holds the state of `boundary` now; it is to be filed under `key`."""

    boundary: int
    key: PrefixHash
    provenance: Provenance


@dataclass(frozen=True, eq=False)
class WholeSave:
    """Slot and blocks that the running step copies to, for the next identical prompt.

    slot: gets the state after its last token; None:
    that is there already. blocks: (key, block, its copy) of the K/V blocks after the last whole
    stride, so far as they are not there. One reference to the slot and to each copy.
    """

    slot: int | None
    blocks: tuple[tuple[PrefixHash, int, int], ...]
    provenance: Provenance


@dataclass(frozen=True, eq=False)
class WholeHit:
    """All that a whole prompt needs is there: its state, its K/V, and the logits after it.

    shared: tokens whose K/V is shared by reference, whole strides. tail: the blocks after them,
    one reference each until the step that copies them was issued. logits: what the engine kept.
    """

    slot_id: int
    shared: int
    tail: tuple[int, ...]
    logits: object
    provenance: Provenance


class CachedSequence:
    """Tokens and holdings of a request. Only the block managers change the holdings.

    num_computed_tokens: tokens whose K/V *and* state exist for this sequence.
    exact: it reuses only what prefill wrote, so that its bits are those of a cold run, and leaves
        nothing else. Otherwise it also takes, and leaves, what decode steps wrote.
    provenance: of what it computes; DECODE from the moment it reuses anything of that kind.
    save_points: boundaries where its prefill saves a state besides the usual ones.
    block_hashes, linear_state_hashes: chained keys of the whole steps of the *prompt*, and of the
        generated tokens too if it is not exact, each in its own domain; extended by `update_*`, cut
        back by `rewrite_tail`.
    block_table: K/V blocks, one reference each.
    live_slot: the slot it writes, one reference.
    state_source: read by the next step instead of the live slot, one reference.
    snapshots: (boundary, slot) the running step writes, one reference each.
    scratch: slots that the running step leaves the state after each of its tokens in, where it
        verifies drafts; one reference each.
    decode_checkpoint: (key, slot) of the decode state it published last; no reference.
    branch_boundary: where it leaves what others computed; 0: nowhere.
    resumed_boundary: of the checkpoint that it went on from; 0: none.
    was_noted: the eviction policy was told of this request.
    keeps_whole: it may reuse and leave its prompt as a whole.
    whole_save, whole_hit: of the running step; they hold references.
    """

    def __init__(
        self,
        token_ids: Iterable[int],
        *,
        namespace: Namespace = Namespace(),  # noqa: B008 (frozen)
        multimodal_items: Sequence[MultimodalItem] = (),
        exact: bool = True,
        save_points: Iterable[int] = (),
    ) -> None:
        self.token_ids = array(TOKEN_TYPECODE, token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.namespace = namespace
        self.multimodal_items = tuple(multimodal_items)
        self.exact = exact
        self.provenance = Provenance.PREFILL
        self.save_points = frozenset(save_points)
        self.block_hashes: list[PrefixHash] = []
        self.linear_state_hashes: list[PrefixHash] = []
        self.block_table: list[int] = []
        self.num_published_blocks = 0
        self.live_slot: int | None = None
        self.state_source: StateSource | None = None
        self.pending_save: PendingSave | None = None
        self.snapshots: list[tuple[int, int]] = []
        self.scratch: list[int] = []
        self.decode_checkpoint: tuple[PrefixHash, int] | None = None
        self.branch_boundary = 0
        self.resumed_boundary = 0
        self.was_noted = False
        self.keeps_whole = True
        self.whole_save: WholeSave | None = None
        self.whole_hit: WholeHit | None = None
        self._whole_key: PrefixHash | None = None

    @property
    def accepts(self) -> Provenance:
        """The least that it reuses."""
        return Provenance.PREFILL if self.exact else Provenance.DECODE

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def in_prefill(self) -> bool:
        return self.num_computed_tokens < self.num_prompt_tokens

    def forget_holdings(self) -> None:
        """As before anything was computed; the ids were given back, or the pools were reset."""
        self.num_computed_tokens = 0
        self.provenance = Provenance.PREFILL
        self.block_table = []
        self.num_published_blocks = 0
        self.live_slot = None
        self.state_source = None
        self.pending_save = None
        self.snapshots = []
        self.scratch = []
        self.decode_checkpoint = None
        self.branch_boundary = 0
        self.resumed_boundary = 0
        self.whole_save = self.whole_hit = None

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def update_block_hashes(self, domain: HashDomain) -> None:
        """Add the K/V keys of all whole blocks that are to have one and have none yet."""
        self._extend(self.block_hashes, domain)

    def update_linear_state_hashes(self, domain: HashDomain) -> None:
        """Add the state keys of all whole strides that are to have one and have none yet."""
        self._extend(self.linear_state_hashes, domain)

    def whole_key(self, domain: HashDomain) -> PrefixHash:
        """The key of the prompt as a whole. domain: that of its states."""
        if self._whole_key is None:
            self.update_linear_state_hashes(domain)
            self._whole_key = domain.whole(
                self.linear_state_hashes,
                domain.root(self.namespace),
                self.token_ids,
                self.num_prompt_tokens,
                self.multimodal_items,
            )
        return self._whole_key

    def _extend(self, chain: list[PrefixHash], domain: HashDomain) -> None:
        num_tokens = self.num_prompt_tokens if self.exact else self.num_tokens
        if (len(chain) + 1) * domain.step <= num_tokens:
            domain.extend(
                chain,
                domain.root(self.namespace),
                self.token_ids,
                num_tokens,
                self.multimodal_items,
            )

    def rewrite_tail(
        self, position: int, token_ids: Iterable[int], *, block_size: int, chunk_stride: int
    ) -> None:
        """Replace the prompt from `position` on; keys of changed chunks are dropped.

        Only for a sequence that holds nothing from `position` on (assert).
        """
        assert self.num_computed_tokens <= position <= self.num_prompt_tokens == self.num_tokens
        self.token_ids = self.token_ids[:position] + array(TOKEN_TYPECODE, token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self._whole_key = None
        del self.block_hashes[position // block_size :]
        del self.linear_state_hashes[position // chunk_stride :]
