"""Runs a scheduled batch: restore first, then one forward pass over what is left."""

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from cache.ops import RestoreOutcome
from cache.state_pool import StatePool, StateShape, restore_linear_state_slots
from engine.batch import Batch, ModelInputs, ScheduledRow, build_inputs
from engine.config import EngineConfig
from engine.model_config import ModelConfig

logger = logging.getLogger(__name__)


class Model(Protocol):
    """What the worker runs. It reads and writes states in the pool and K/V in the cache."""

    config: ModelConfig
    dtype: torch.dtype

    @property
    def can_draft(self) -> bool:
        """Whether it has a draft head."""

    @property
    def state_shape(self) -> StateShape | None:
        """What a slot holds; None without recurrent layers."""

    def make_pools(
        self, num_slots: int, num_blocks: int, block_size: int
    ) -> tuple[StatePool | None, torch.Tensor]:
        """The state pool (None without recurrent layers) and the K/V cache."""

    def forward(
        self, inputs: ModelInputs, pool: StatePool | None, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """Logits [num_logits, vocab] float32 of `inputs.logit_rows`."""

    def draft(
        self,
        rows: Seq[ScheduledRow],
        read_slots: Seq[int],
        pool: StatePool,
        kv_cache: torch.Tensor,
    ) -> list[list[int]]:
        """`num_drafts` guesses for each row; only asked for rows that have any."""


@dataclass(frozen=True)
class StepResult:
    """rows ran, with logits [num_logits, vocab] in the order of the rows that need them, one for
    each known or guessed token; drafts: the guesses, by row; cold rows did not run."""

    rows: list[ScheduledRow]
    logits: torch.Tensor
    cold: list[ScheduledRow]
    drafts: list[list[int]]


class Worker:
    """Owns the model, the state pool and the K/V cache.

    last_restore_seconds: how long the last step took to restore states (on a GPU: to launch it);
        None if it restored none.
    """

    def __init__(
        self, model: Model, config: EngineConfig, *, num_slots: int, num_blocks: int
    ) -> None:
        self.model = model
        self.config = config
        try:
            pools = model.make_pools(num_slots, num_blocks, config.block_size)
        except (RuntimeError, MemoryError) as error:  # what torch raises when an allocation fails
            raise ValueError(
                f"no memory for num_slots={num_slots} and num_blocks={num_blocks} of "
                f"{config.block_size} tokens: {error}"
            ) from error
        self.state_pool, self.kv_cache = pools
        self.last_restore_seconds: float | None = None

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Restore, then run every row whose state is there."""
        began = time.perf_counter()
        read_slots, cold = self._restore(batch.rows)
        restored = any(row.op is not None and row.op.restore_requested for row in batch.rows)
        self.last_restore_seconds = time.perf_counter() - began if restored else None
        ran = [i for i, row in enumerate(batch.rows) if row not in cold]
        rows = [batch.rows[i] for i in ran]
        if not rows:
            return StepResult([], torch.empty(0, 0), cold, [])
        reads = [read_slots[i] for i in ran]
        drafts = self._draft(rows, reads)
        inputs = build_inputs(
            rows,
            reads,
            block_size=self.config.block_size,
            device=self.config.device,
            drafts=drafts if self.config.num_speculative_tokens else None,
        )
        logits = self.model.forward(inputs, self.state_pool, self.kv_cache)
        return StepResult(rows, logits, cold, drafts)

    def _draft(self, rows: list[ScheduledRow], reads: list[int]) -> list[list[int]]:
        """Guesses for each row; none for those that verify nothing."""
        drafts: list[list[int]] = [[] for _ in rows]
        which = [i for i, row in enumerate(rows) if row.num_drafts]
        if which:
            assert self.state_pool is not None
            guessed = self.model.draft(
                [rows[i] for i in which], [reads[i] for i in which], self.state_pool, self.kv_cache
            )
            for i, tokens in zip(which, guessed, strict=True):
                drafts[i] = tokens
        return drafts

    def _restore(self, rows: list[ScheduledRow]) -> tuple[list[int], list[ScheduledRow]]:
        """Where each row reads its state, and the rows that have none to start from."""
        if self.state_pool is None:
            return [-1] * len(rows), []
        ops = []
        for row in rows:
            assert row.op is not None
            restores = row.op.restore_requested
            assert not restores or row.op.boundary == row.start, (
                f"{row.op} restored at token {row.start} of {row.seq.request_id}"
            )
            ops.append(row.op)
        copy = self.config.restore == "copy"
        has_initial_state = [int(row.start > 0) for row in rows]
        outcomes = restore_linear_state_slots(self.state_pool, ops, has_initial_state, copy=copy)
        read_slots = []
        for op, warm, outcome in zip(ops, has_initial_state, outcomes, strict=True):
            redirected = not copy and outcome is RestoreOutcome.RESTORED
            live = op.restore_src_slot_id if redirected else op.linear_state_id
            read_slots.append(live if warm else -1)
        cold = [
            row
            for row, outcome in zip(rows, outcomes, strict=True)
            if outcome is RestoreOutcome.COLD_START
        ]
        for row in cold:
            logger.warning("request %s is prefilled in full: restore failed", row.seq.request_id)
        return read_slots, cold
