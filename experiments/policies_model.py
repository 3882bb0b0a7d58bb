"""What does a cache do with a trace? One prompt after the other through the real managers.

Costs of Qwen3.5-9B: a checkpoint has 51.5 MB, a token 32 KiB of K/V, and a prefill of the tokens
[p, p + n) takes 13.98e9 n + 65,536 ((p + n)^2 - p^2) FLOP. A prompt is one step, alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cache.cached_sequence import CachedSequence
from cache.composite_block_manager import CompositeBlockManager, MissReason
from cache.eviction import EvictionPolicy, prefill_flops
from cache.hashing import HashDomain, Provenance
from cache.kv_block_manager import KVBlockManager
from cache.linear_state_block_manager import LinearStateBlockManager
from cache.placement import Placement
from experiments.belady import Belady
from experiments.traces import Request

CHECKPOINT_BYTES = 51_500_000
KV_BYTES_PER_TOKEN = 32 * 1024
PADDING_AND_LIVE = 2  # slots that hold no checkpoint while one prompt runs
ROOMY = 1 << 20


@dataclass(frozen=True)
class Prompt:
    """keys: its whole blocks' ids. reach: tokens that a cache of unlimited size has K/V of."""

    num_tokens: int
    keys: list[int]
    reach: int


def prompts_of(requests: Iterable[Request], grid: int) -> list[Prompt]:
    """Prompts in order; a prompt's K/V is there for the next one. grid: tokens a key."""
    known: set[int] = set()
    prompts = []
    for request in requests:
        keys = request.block_ids(grid)
        last = max(0, request.input_tokens - 1) // grid
        shared = next((i for i, key in enumerate(keys) if key not in known), len(keys))
        prompts.append(Prompt(request.input_tokens, keys, min(shared, last) * grid))
        known.update(keys)
    return prompts


class UnlimitedKV(KVBlockManager):
    """A K/V leaf that keeps everything: how far it reaches is known from the trace."""

    def __init__(self, grid: int) -> None:
        super().__init__(2, HashDomain("kv", grid), chunk_stride=grid)
        self.known_reach = 0

    def reach(self, seq: CachedSequence, least: Provenance | None = None) -> int:
        return self.known_reach

    def acquire_shared(self, seq: CachedSequence, boundary: int) -> Provenance:
        return Provenance.PREFILL

    def allocate(self, seq: CachedSequence, num_tokens: int) -> bool:
        return True

    def publish(self, seq: CachedSequence) -> None:
        """Everything is there already."""


class TracedManager(CompositeBlockManager):
    """The engine's own, but it looks for no reason of a miss: that takes long and decides nothing,
    and the keys of a trace are numbers, which no decoded content can be filed under."""

    def _reason(self, seq: CachedSequence, reach: int, above: int = 0) -> MissReason:
        return MissReason.NO_CHECKPOINT


class TracedSequence(CachedSequence):
    """A prompt known by its keys; they serve both leaves."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(())
        self.num_prompt_tokens = prompt.num_tokens
        self.block_hashes = self.linear_state_hashes = prompt.keys  # type: ignore[assignment]


@dataclass
class Outcome:
    """Of a replay. work, least_work: FLOP, here and with a cache that keeps every grid boundary."""

    work: float = 0.0
    least_work: float = 0.0
    tokens: int = 0
    reused_tokens: int = 0
    checkpoints: int = 0
    state_evictions: int = 0
    block_evictions: int = 0


def managers(
    *,
    grid: int,
    slots: int | None,
    placement: Placement,
    policy: EvictionPolicy | None,
    num_blocks: int | None = None,
) -> CompositeBlockManager:
    """slots: of checkpoints; None: enough. num_blocks: of `grid` tokens of K/V; None: enough."""
    linear = LinearStateBlockManager(
        (ROOMY if slots is None else slots) + PADDING_AND_LIVE,
        HashDomain("linear", grid),
        placement=placement,
        max_num_seqs=1,
        policy=policy,
    )
    if num_blocks is None:
        kv: KVBlockManager = UnlimitedKV(grid)
    else:
        kv = KVBlockManager(num_blocks, HashDomain("kv", grid), chunk_stride=grid)
    return TracedManager(kv, linear, enable_prefix_caching=True)


def replay(
    prompts: Sequence[Prompt],
    manager: CompositeBlockManager,
    resumed: Callable[[int], object] | None = None,
) -> Outcome:
    """Every prompt: probe, resume, save, publish, leave. resumed: told where each one did."""
    found = Outcome()
    linear = manager.linear
    assert linear is not None
    policy = linear.pool.policy
    for prompt in prompts:
        seq = TracedSequence(prompt)
        if isinstance(manager.kv, UnlimitedKV):
            manager.kv.known_reach = prompt.reach
        if isinstance(policy, Belady):
            policy.plan(seq.linear_state_hashes, linear.chunk_stride)
        match = manager.match(seq)
        assert manager.allocate(seq, match, prompt.num_tokens), "the pools are too small"
        manager.plan_saves(seq, match, prompt.num_tokens)
        manager.commit(seq, prompt.num_tokens)
        manager.release(seq)
        if resumed is not None:
            resumed(match.boundary)
        found.work += prefill_flops(match.boundary, prompt.num_tokens)
        found.least_work += prefill_flops(prompt.reach, prompt.num_tokens)
        found.tokens += prompt.num_tokens
        found.reused_tokens += match.boundary
    found.checkpoints = linear.num_saves
    found.state_evictions = linear.pool.num_evictions
    found.block_evictions = manager.kv.pool.num_evictions
    return found
