"""What a caller gets back."""

from dataclasses import dataclass, field

import torch

from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.worker import Worker


@dataclass(frozen=True)
class RequestOutput:
    """A request so far. `finish_reason` is None until it ends: "stop", "length", "abort", or
    "error" when its logits were not finite.

    num_cached_tokens: prompt tokens whose K/V and state came from the cache.
    boundary: the token count of the last checkpoint it resumed from, 0 if none; that of the prompt
        if nothing was left to compute.
    miss_reason: why nothing was reused, None on a hit.
    limit_reason: why it did not resume later than `boundary`; None if no later one is possible.
    exact: nothing it reused came from decode steps: its bits are those of a cold run.
    ttft_ms: from `add_request` to the first token; None before it.
    logprobs: per new token {token: log-probability}, the chosen one first; None if not asked for.
    logits: per new token [vocab] float32; None if not asked for.

    All outputs of a request share one prompt_token_ids list.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None
    num_cached_tokens: int
    boundary: int
    miss_reason: str | None
    limit_reason: str | None
    exact: bool
    ttft_ms: float | None
    logprobs: list[dict[int, float]] | None
    logits: list[torch.Tensor] | None = field(repr=False, compare=False)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @classmethod
    def of(cls, seq: Sequence) -> "RequestOutput":
        ttft_ms = None
        if seq.first_token_time is not None:
            ttft_ms = 1e3 * (seq.first_token_time - seq.arrival_time)
        return cls(
            request_id=seq.request_id,
            prompt_token_ids=seq.prompt_token_ids,
            token_ids=seq.generated_token_ids,
            text=seq.answer.settled() if seq.finish_reason is None else seq.answer.text,
            finish_reason=seq.finish_reason,
            num_cached_tokens=seq.num_cached_tokens,
            boundary=seq.restored_boundary,
            miss_reason=None if seq.miss_reason is None else str(seq.miss_reason),
            limit_reason=None if seq.limit_reason is None else str(seq.limit_reason),
            exact=not seq.reused_decoded,
            ttft_ms=ttft_ms,
            logprobs=list(seq.logprobs) if seq.sampling.logprobs is not None else None,
            logits=list(seq.logits) if seq.sampling.return_logits else None,
        )


@dataclass(frozen=True)
class EngineStats:
    """Counters since start, and what the pools hold now.

    queries: requests whose prompt has been computed; hits: those that reused something.
    tokens_prefilled: prompt tokens that steps computed, again after a preemption too;
    tokens_drafted, tokens_accepted: guesses of the draft head, and those that were right.
    tokens_prefilled_idle: those of background requests, not among the others.
    decodes_replayed, decodes_eager: steps with decoding rows, from a graph or launched op by op.
    slots_free, blocks_cached: of shared memory both count pages of K/V that no state needs.
    slots_scratch: set aside for verify steps, in use or not.
    smallest_prompt_that_can_hit: tokens; shorter prompts miss with `below_stride`.
    """

    queries: int
    hits: int
    tokens_reused: int
    tokens_prefilled: int
    tokens_prefilled_idle: int
    misses: dict[str, int]
    tokens_drafted: int
    tokens_accepted: int
    decodes_replayed: int
    decodes_eager: int
    saves: int
    saves_skipped: dict[str, int]
    cold_starts: int
    preemptions: int
    slots_live: int
    slots_checkpoint: int
    slots_scratch: int
    slots_free: int
    slots_total: int
    state_evictions: int
    blocks_in_use: int
    blocks_cached: int
    blocks_free: int
    blocks_total: int
    requests_waiting: int
    requests_running: int
    requests_background: int
    smallest_prompt_that_can_hit: int

    @classmethod
    def of(cls, scheduler: Scheduler, worker: Worker) -> "EngineStats":
        manager = scheduler.manager
        kv, linear = manager.kv.pool, manager.linear
        live = 0 if linear is None else linear.num_live
        saved = 0 if linear is None else len(linear.cache)
        total = 0 if linear is None else linear.pool.num_total
        return cls(
            queries=manager.num_queries,
            hits=manager.num_hits,
            tokens_reused=manager.num_tokens_reused,
            tokens_prefilled=scheduler.num_tokens_prefilled,
            tokens_prefilled_idle=scheduler.num_tokens_prefilled_idle,
            misses={str(reason): count for reason, count in manager.misses.items()},
            tokens_drafted=scheduler.num_drafted,
            tokens_accepted=scheduler.num_accepted,
            decodes_replayed=0 if worker.graphs is None else worker.graphs.num_replays,
            decodes_eager=worker.num_eager_decodes,
            saves=0 if linear is None else linear.num_saves,
            saves_skipped={} if linear is None else dict(linear.saves_skipped),
            cold_starts=scheduler.num_cold_starts,
            preemptions=scheduler.num_preemptions,
            slots_live=live,
            slots_checkpoint=saved,
            slots_scratch=0 if linear is None else linear.num_scratch,
            slots_free=0 if linear is None else linear.pool.num_free,
            slots_total=total,
            state_evictions=0 if linear is None else linear.pool.num_evictions,
            blocks_in_use=kv.num_in_use,
            blocks_cached=kv.num_evictable,
            blocks_free=kv.num_free,
            blocks_total=kv.num_total,
            requests_waiting=sum(not seq.background for seq in scheduler.waiting),
            requests_running=sum(not seq.background for seq in scheduler.running),
            requests_background=scheduler.num_background,
            smallest_prompt_that_can_hit=manager.smallest_prompt_that_can_hit,
        )
