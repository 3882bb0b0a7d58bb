"""One step after the other: schedule, issue, read what was chosen, commit.

With overlap a step is scheduled and issued while the one before it runs, and only then are that
one's tokens read back. What a step wrote is published when it was issued and not before; later
steps are behind it on the stream. A request that turns out to have ended has one row too many in
the step that was issued meanwhile; nothing of it is published.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from engine.batch import Batch
from engine.issued import Issued
from engine.sampler import Choice
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.worker import Worker


class StepLoop:
    """Steps a scheduler and a worker; one thread.

    overlap: prepare each step while the one before runs.
    requests: gives all that have no end yet, wherever they are when something breaks.
    failed_request_ids: of the step for which the last call of `step` raised.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        *,
        overlap: bool,
        requests: Callable[[], list[Sequence]],
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
    ) -> None:
        self.scheduler, self.worker, self.overlap = scheduler, worker, overlap
        self.eos_token_ids, self.max_model_len = eos_token_ids, max_model_len
        self.failed_request_ids: tuple[str, ...] = ()
        self._requests = requests
        self._unread: Issued | None = None
        self._is_broken = False
        self._is_doubted = False

    def step(self) -> list[Sequence]:
        """Runs one step; returns those that got a token. `LLM.step` says what becomes of errors."""
        self.failed_request_ids = ()
        if self._is_broken or self.scheduler.in_flight is not None:  # interrupted twice
            self._start_over()
        try:
            return self._step()
        except BaseException:
            if self.scheduler.in_flight is not None:  # an interrupt, between two lines of this step
                self._start_over()
            raise

    def _step(self) -> list[Sequence]:
        with self._whole():
            batch = self.scheduler.schedule()
        if batch is None:
            self.worker.last_restore_seconds = None
            return self._read()
        return self._issue_ahead(batch) if self.overlap else self._issue_alone(batch)

    def _issue_alone(self, batch: Batch) -> list[Sequence]:
        """Its tokens are known before it is committed."""
        with self._undone(batch):
            step = self.worker.issue(batch)
            tokens = step.choose()
            kept = step.kept()
        with self._whole():
            broken = [row for row, chosen in tokens.items() if chosen is None]
            ends = {
                row.seq: row.start + self._take_in(row.seq, chosen)
                for row, chosen in tokens.items()
                if chosen is not None and not row.seq.abort_requested
            }
            self.scheduler.commit(batch, cold=step.cold, broken=broken, ends=ends)
            self.scheduler.keep(kept)
            self._finish(ends)
        return [row.seq for row in tokens]

    def _issue_ahead(self, batch: Batch) -> list[Sequence]:
        """The tokens of the step before are read when this one was issued; those that the host
        draws, just before."""
        advanced = []
        if self._unread is not None and any(r.seq.is_drawn for r in self._unread.awaited):
            advanced = self._read(batch)
        with self._undone(batch):
            # A token that was read just now may not be there: not finite, or not wanted any more.
            there = [
                row for row in batch.rows if row.whole is not None or row.start < row.seq.num_chosen
            ]
            step = self.worker.issue(Batch(there), self._unread)
        advanced += self._read(batch)
        with self._whole():
            over = [row.seq for row in batch.rows if row.seq.end_reason is not None]
            committed = self.scheduler.commit(
                batch, cold=step.cold, over=over, doubted=self._is_doubted
            )
            self._is_doubted = False
            self._unread = step
            step.awaited = [row for row in committed if row.needs_logits]
            for row in step.awaited:
                row.seq.num_unread = 1
        return advanced

    def _read(self, ahead: Batch | None = None) -> list[Sequence]:
        """Take in what the step before has chosen. Those of `ahead` that end are finished when it
        is committed."""
        if self._unread is None:
            return []
        with self._whole():
            step = self._unread
            self.failed_request_ids = tuple(row.seq.request_id for row in step.rows)
            tokens = step.choose()
            kept = step.kept()
            self.failed_request_ids = ()
            self._unread = None
            awaited = [row for row in step.awaited if row.seq.finish_reason is None]
            for row in awaited:
                row.seq.num_unread = 0
                chosen = tokens[row]
                if chosen is None:
                    self._is_doubted = ahead is not None
                    self.scheduler.distrust(row.seq)
                elif not row.seq.abort_requested:
                    self._take_in(row.seq, chosen)
            self.scheduler.keep({row: kept[row] for row in awaited if row in kept})
            running_on = set() if ahead is None else ahead.sequences
            self._finish(row.seq for row in awaited if row.seq not in running_on)
        return [row.seq for row in awaited]

    # ---- tokens

    def _take_in(self, seq: Sequence, chosen: list[Choice]) -> int:
        """Append tokens up to the one that ends the request; returns how many."""
        for count, choice in enumerate(chosen, start=1):
            self._append(seq, choice)
            if seq.end_reason is not None:
                return count
        return len(chosen)

    def _append(self, seq: Sequence, choice: Choice) -> None:
        """Add a new token, and note it if that ends the request."""
        if seq.first_token_time is None:
            seq.first_token_time = time.perf_counter()
        token_id = choice.token_id
        seq.append_token(token_id)
        if choice.logprobs is not None:
            seq.logprobs.append(choice.logprobs)
        if choice.logits is not None:
            seq.logits.append(choice.logits)
        stops = seq.sampling.stops_at(token_id, self.eos_token_ids)
        full = seq.num_generated >= seq.sampling.max_tokens or seq.num_tokens >= self.max_model_len
        stops |= seq.answer.append(token_id, last=stops or full)
        seq.end_reason = "stop" if stops else "length" if full else None
        seq.num_settled = seq.num_generated

    def _finish(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            if seq.end_reason is not None:
                self.scheduler.finish(seq, seq.end_reason)

    # ---- when something breaks

    @contextmanager
    def _undone(self, batch: Batch) -> Iterator[None]:
        """What fails here leaves nothing of the batch; its requests start again."""
        try:
            yield
        except BaseException:
            self.failed_request_ids = tuple(row.seq.request_id for row in batch.rows)
            with self._whole():
                self.scheduler.rollback(batch)
            raise

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Bookkeeping that must not be left half done."""
        try:
            yield
        except BaseException:
            self._start_over()
            raise

    def _start_over(self) -> None:
        """Back to the last whole state: each request's settled tokens, nothing held, no cache.

        What was issued may still write; whatever is issued from now on is behind it.
        """
        self._is_broken = True
        self._is_doubted = False
        self._unread = None
        unfinished = self._requests()
        for seq in unfinished:
            seq.forget_unsettled_tokens()
            ended = seq.end_reason is not None
            seq.answer.restart(seq.generated_token_ids, ended=ended)
        self.scheduler.start_over(unfinished)
        self._is_broken = False
