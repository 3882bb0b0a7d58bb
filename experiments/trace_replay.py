"""What would the cache reuse of a trace? Its prompts, replayed without a model.

In unlimited memory. The replay drives the LINEAR leaf itself (`LinearStateBlockManager`) with the
trace's prefix ids in place of hashes; the K/V leaf is a set of ids, because with unlimited memory
only that matters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from cache.cached_sequence import CachedSequence
from cache.hashing import HashDomain
from cache.linear_state_block_manager import LinearStateBlockManager
from cache.placement import combined
from experiments.console import tracked
from experiments.save_policies import GRID, PARTS, Policy, Row
from experiments.traces import Request

CHECKPOINT_BYTES_9B = 51_500_000  # of Qwen3.5-9B


class ChosenLeaf(LinearStateBlockManager):
    """The LINEAR leaf of the engine, with room for everything; can leave out the prompt's end."""

    def __init__(self, policy: Policy, num_blocks: int) -> None:
        super().__init__(
            num_blocks + 3,  # padding, a live slot and one to rotate to
            HashDomain("linear", GRID),
            max_num_seqs=1,
            placement=combined(
                policy.every, branch=policy.branch, ends=(0,) if policy.prompt_end else ()
            ),
        )


@dataclass(frozen=True)
class Prompt:
    """A request of a trace: ids of its whole blocks, and how far earlier K/V serves it."""

    num_tokens: int
    ids: list[int]
    reach: int


def prompts_of(requests: Iterable[Request]) -> tuple[list[Prompt], int]:
    """Prompts in order, and the number of different blocks. A prompt's K/V is there at once."""
    known: set[int] = set()
    prompts = []
    for request in requests:
        ids = request.block_ids(GRID)
        blocks = next((i for i, id_ in enumerate(ids) if id_ not in known), len(ids))
        last = max(0, request.input_tokens - 1) // GRID
        prompts.append(Prompt(request.input_tokens, ids, min(blocks, last) * GRID))
        known.update(ids)
    return prompts, len(known)


def replay(prompts: Iterable[Prompt], num_blocks: int, policy: Policy) -> tuple[int, int]:
    """(tokens reused, checkpoints saved): each prompt probes, resumes, saves and leaves."""
    leaf = ChosenLeaf(policy, num_blocks)
    reused = 0
    for each in prompts:
        seq = CachedSequence(())
        seq.num_prompt_tokens = each.num_tokens
        seq.linear_state_hashes = each.ids  # type: ignore[assignment]  # ids are prefix hashes too
        boundary = _deepest(leaf, each)
        if boundary:
            reused += boundary
            seq.num_computed_tokens = boundary
            leaf.set_source(seq, leaf.mount(seq, boundary))
        if policy.branch:
            seq.branch_boundary = each.reach
        assert leaf.allocate_for_sequence(seq), "memory is unlimited"
        leaf.plan_snapshots(seq, seq.num_computed_tokens, each.num_tokens)
        seq.num_computed_tokens = each.num_tokens
        leaf.commit(seq)
        leaf.release(seq)
    assert not leaf.saves_skipped["no_slot"], "memory is unlimited"
    return reused, leaf.num_saves


def _deepest(leaf: LinearStateBlockManager, prompt: Prompt) -> int:
    """The deepest boundary within reach that has a state, or 0: what the composite resumes from.

    Looked for from above: `match` lists them all, and long prompts find theirs near the end.
    """
    boundaries = range(prompt.reach, 0, -GRID)
    found = (b for b in boundaries if leaf.cache.contains(prompt.ids[b // GRID - 1]))
    return next(found, 0)


def trace_rows(part: str, requests: Sequence[Request], policies: Sequence[Policy]) -> list[Row]:
    """One row a policy. Sessions share no ids, so that each can be replayed by itself."""
    rows = [Row(part, p.every, p.prompt_end, p.branch) for p in policies]
    ordered = sorted(requests, key=lambda request: request.session)  # stable: still by time
    sessions = [list(group) for _, group in groupby(ordered, key=lambda request: request.session)]
    for session in tracked(sessions, f"{PARTS[part]} sessions"):
        prompts, num_blocks = prompts_of(session)
        for row, policy in zip(rows, policies, strict=True):
            reused, saved = replay(prompts, num_blocks, policy)
            row.requests += len(prompts)
            row.prompt_tokens += sum(p.num_tokens for p in prompts)
            row.reusable_tokens += sum(p.reach for p in prompts)
            row.reused_tokens += reused
            row.checkpoints += saved
            row.bytes += saved * CHECKPOINT_BYTES_9B
    return rows
