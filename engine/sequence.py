"""One request inside the engine: what the cache knows of it, how it samples, how it ended."""

import secrets
import time
from collections.abc import Iterable
from enum import Enum

import torch

from cache.cached_sequence import CachedSequence
from cache.composite_block_manager import MissReason
from cache.hashing import MultimodalItem, Namespace
from engine.answer_text import AnswerText
from engine.sampling_params import SamplingParams


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence(CachedSequence):
    """A request. Its tokens are prompt + generated; only the engine appends.

    num_cached_tokens: prompt tokens served from the cache instead of computed.
    restored_boundary: the last boundary it resumed from; 0: never.
    limit_reason: why it did not resume later than that.
    reused_decoded: whether anything it reused was computed by decode steps.
    background: runs only in steps that nobody else needs, and counts in no statistics of hits.
    num_unread: 1 while a step has chosen its next token and nobody has read it back, else 0.
    num_settled: generated tokens that are wholly taken in: text, stop rules and reports done.
    end_reason: what the last settled token means, if it ends the request; kept until `finish`.
    reuse_allowed: False after a failed restore: it is then prefilled in full on private blocks.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int],
        sampling: SamplingParams,
        *,
        namespace: Namespace = Namespace(),  # noqa: B008 (frozen)
        multimodal_items: tuple[MultimodalItem, ...] = (),
        exact: bool = True,
        save_points: Iterable[int] = (),
        background: bool = False,
    ) -> None:
        super().__init__(
            prompt_token_ids,
            namespace=namespace,
            multimodal_items=multimodal_items,
            exact=exact,
            save_points=save_points,
        )
        self.request_id = request_id
        self.prompt_token_ids = self.token_ids.tolist()
        self.sampling = sampling
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.abort_requested = False
        self.reuse_allowed = True
        self.arrival_index = -1
        self.reuse_limit: int | None = None
        self.background = background
        self.keeps_whole = not background  # those are to leave states on the grid
        self.was_counted = background
        self.num_cached_tokens = 0
        self.restored_boundary = 0
        self.miss_reason: MissReason | None = None
        self.limit_reason: MissReason | None = None
        self.reused_decoded = False
        self.num_preemptions = 0
        self.seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        self.logprobs: list[dict[int, float]] = []
        self.logits: list[torch.Tensor] = []
        self.answer = AnswerText()
        self.num_unread = 0
        self.num_settled = 0
        self.end_reason: str | None = None
        self.arrival_time = time.perf_counter()
        self.first_token_time: float | None = None

    @property
    def generated_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def num_chosen(self) -> int:
        """Tokens, with one that is not read back yet."""
        return self.num_tokens + self.num_unread

    @property
    def is_drawn(self) -> bool:
        """Whether its tokens are drawn, which the host does."""
        return self.sampling.temperature > 0.0

    @property
    def wants_logits(self) -> bool:
        """Whether its rows of logits are to come to the host."""
        params = self.sampling
        return self.is_drawn or params.return_logits or params.logprobs is not None

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def forget_unsettled_tokens(self) -> None:
        """Drop tokens that are not read back, or whose taking in was interrupted; they will be
        chosen again, alike."""
        self.num_unread = 0
        if self.num_settled < self.num_generated:
            self.end_reason = None
        self.token_ids = self.token_ids[: self.num_prompt_tokens + self.num_settled]
        del self.logprobs[self.num_settled :]
        del self.logits[self.num_settled :]
