"""Runs a scheduled batch: restore first, then one forward pass over what is left."""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from cache.ops import RestoreOutcome
from cache.shared_memory import PageLayout
from cache.state_pool import StatePool, StateShape, restore_linear_state_slots
from engine.batch import Batch, ModelInputs, ScheduledRow, build_inputs
from engine.config import EngineConfig
from engine.decode_graphs import DecodeGraphs, graph_sizes
from engine.issued import Issued, StepResult, nothing, wants_logits
from engine.model_config import ModelConfig
from engine.sampler import likeliest
from engine.stream import InlineStream, ReadBack, Stream, ThreadStream
from engine.whole_rows import WholeRows
from kernels.ids import Ids

logger = logging.getLogger(__name__)


class Model(Protocol):
    """What the worker runs. It reads and writes states in the pool and K/V in the cache."""

    config: ModelConfig
    dtype: torch.dtype

    @property
    def can_draft(self) -> bool:
        """Whether it has a draft head."""

    @property
    def can_capture(self) -> bool:
        """Whether a graph can hold a decode step: its ops read ids on the device alone."""

    @property
    def state_shape(self) -> StateShape | None:
        """What a slot holds; None without recurrent layers."""

    def make_pools(
        self, num_slots: int, num_blocks: int, block_size: int, layout: PageLayout | None = None
    ) -> tuple[StatePool | None, torch.Tensor]:
        """The state pool (None without recurrent layers) and the K/V cache; with a layout both in
        one memory."""

    def forward(
        self, inputs: ModelInputs, pool: StatePool | None, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """Logits [num_logits, vocab] float32 of `inputs.logit_rows`."""

    def copy_blocks(
        self, kv_cache: torch.Tensor, sources: list[int], destinations: list[int]
    ) -> None:
        """Copy whole blocks of the K/V cache, all layers. No block is both."""

    def draft(
        self,
        rows: Seq[ScheduledRow],
        read_slots: Seq[int],
        pool: StatePool,
        kv_cache: torch.Tensor,
    ) -> list[list[int]]:
        """`num_drafts` guesses for each row; only asked for rows that have any."""


class Worker:
    """Owns the model, the state pool and the K/V cache, and the stream that works on them.

    stream: None: a thread's on the CPU if steps overlap, else at once.
    last_restore_seconds: how long the last step took to restore states (on a GPU: to launch it);
        None if it restored none.
    graphs: of decode steps, None if the config has none.
    num_eager_decodes: steps with decoding rows whose ops were launched one by one.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        num_slots: int,
        num_blocks: int,
        layout: PageLayout | None = None,
        stream: Stream | None = None,
    ) -> None:
        self.model = model
        self.config = config
        try:
            pools = model.make_pools(num_slots, num_blocks, config.block_size, layout)
        except (RuntimeError, MemoryError) as error:  # what torch raises when an allocation fails
            raise ValueError(
                f"no memory for num_slots={num_slots} and num_blocks={num_blocks} of "
                f"{config.block_size} tokens: {error}"
            ) from error
        self.state_pool, self.kv_cache = pools
        threaded = config.overlaps and config.device == "cpu"
        self.stream = stream or (ThreadStream() if threaded else InlineStream())
        self.last_restore_seconds: float | None = None
        self.num_eager_decodes = 0
        self.graphs: DecodeGraphs | None = None
        if config.cuda_graphs:
            limit = model.config.max_position_embeddings
            self.graphs = DecodeGraphs(
                self._eager,
                sizes=graph_sizes(config.max_num_seqs),
                vocab_size=model.config.vocab_size,
                max_model_len=limit if config.max_model_len is None else config.max_model_len,
                block_size=config.block_size,
                num_blocks=num_blocks,
                num_slots=num_slots,
                device=config.device,
            )

    def issue(self, batch: Batch, before: Issued | None = None) -> Issued:
        """Restore, then give the stream one forward pass over every row whose state is there, and
        the copies that whole prompts need. Rows that found theirs are in no forward pass.

        before: the step before, if its tokens were not read back. Waits only for a copy of states,
        which may fail, and for drafts.
        """
        began = time.perf_counter()
        found = [row for row in batch.rows if row.whole is not None]
        computed = [row for row in batch.rows if row.whole is None]
        restored = any(row.op is not None and row.op.restore_requested for row in computed)
        if restored and self.config.restore == "copy":
            read_slots, cold = self.stream.submit(partial(self._restore, computed)).result()
        else:
            read_slots, cold = self._restore(computed)
        self.last_restore_seconds = time.perf_counter() - began if restored else None
        ran = [i for i, row in enumerate(computed) if row not in cold]
        rows, reads = [computed[i] for i in ran], [read_slots[i] for i in ran]
        drafts = self._drafts(rows, reads)
        work: Callable[[], StepResult] = nothing
        if rows:
            inputs = build_inputs(
                rows,
                reads,
                block_size=self.config.block_size,
                device=self.config.device,
                drafts=drafts if self.config.num_speculative_tokens else None,
                chosen_before={} if before is None else before.places,
            )
            wanted = [place for place, wants in enumerate(wants_logits(rows)) if wants]
            work = partial(self._run, inputs, before, Ids(wanted, self.config.device))
        whole = WholeRows.of([*rows, *found], block_size=self.config.block_size)
        if whole:
            work = partial(self._run_and_copy, work, whole)
        drafts = [*drafts, *([] for _ in found)]
        return Issued([*rows, *found], cold, drafts, self.stream.submit(work))

    @torch.inference_mode()
    def _run_and_copy(self, run: Callable[[], StepResult], whole: WholeRows) -> StepResult:
        """The forward pass, and then what is done beside it."""
        result = run()
        if whole.found:
            self.model.copy_blocks(self.kv_cache, *_columns(whole.found))
        try:
            self._copy_what_is_kept(whole)
        except RuntimeError as error:  # what a device raises; nobody waits for these copies
            logger.warning("nothing is kept of whole prompts: %s", error)
            result = replace(result, is_kept=False)
        if not whole.tokens:
            return result
        finite = [1] * len(whole.tokens)
        known = Ids([*finite, *whole.tokens], self.config.device).tensor.view(2, -1)
        best = torch.cat([result.likeliest.to(known.device), known], 1)
        return replace(result, likeliest=best, best=ReadBack(best))

    def _copy_what_is_kept(self, whole: WholeRows) -> None:
        if whole.slots:
            assert self.state_pool is not None
            self.state_pool.copy(*_columns(whole.slots))
        if whole.blocks:
            self.model.copy_blocks(self.kv_cache, *_columns(whole.blocks))

    @torch.inference_mode()
    def _run(self, inputs: ModelInputs, before: Issued | None, wanted: Ids) -> StepResult:
        if inputs.late is not None:
            assert before is not None, "a token is missing, and no step is to bring it"
            chosen = before.wait().likeliest[1]
            inputs.token_ids[inputs.late.rows.tensor] = chosen[inputs.late.sources.tensor]
        logits = self._forward(inputs)
        best = likeliest(logits)
        return StepResult(best, ReadBack(best), ReadBack(logits[wanted.tensor]))

    def _forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Logits of `inputs.logit_rows`, from a graph if one holds these rows."""
        if self.graphs is not None and self.graphs.takes(inputs):
            return self.graphs.run(inputs)
        self.num_eager_decodes += inputs.num_decodes > 0
        return self._eager(inputs)

    def _eager(self, inputs: ModelInputs) -> torch.Tensor:
        return self.model.forward(inputs, self.state_pool, self.kv_cache)

    def _drafts(self, rows: list[ScheduledRow], reads: list[int]) -> list[list[int]]:
        """Guesses for each row; none for those that verify nothing."""
        if any(row.num_drafts for row in rows):
            return self.stream.submit(partial(self._draft, rows, reads)).result()
        return [[] for _ in rows]

    @torch.inference_mode()
    def _draft(self, rows: list[ScheduledRow], reads: list[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in rows]
        which = [i for i, row in enumerate(rows) if row.num_drafts]
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


def _columns(pairs: Seq[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The first and the second of each pair."""
    return [first for first, _ in pairs], [second for _, second in pairs]
