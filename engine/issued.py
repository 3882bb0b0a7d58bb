"""A step that was given to the stream, and what it will have chosen."""

from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from engine.batch import ScheduledRow
from engine.sampler import Choice, sample
from engine.sequence import Sequence
from engine.stream import ReadBack
from engine.whole_rows import LastLogits, last_logits


@dataclass(frozen=True)
class StepResult:
    """What a step leaves of the rows that need logits, in their order, one for each known or
    guessed token: what is likeliest, here and on the host, and on the host some rows of logits.

    Rows that found their whole prompts come last, and are not among the logits. is_kept: whether
    all was copied that whole prompts keep."""

    likeliest: torch.Tensor  # [2, rows]
    best: ReadBack  # the same
    logits: ReadBack  # [rows that want them, vocab]
    is_kept: bool = True


class Issued:
    """A step given to the stream.

    rows: those that run, last of all those that found their whole prompts; cold: those that do
    not, their restore failed. drafts: guesses, by row.
    awaited: the rows whose next token is to be read back; whoever issued it says so.
    """

    def __init__(
        self,
        rows: list[ScheduledRow],
        cold: list[ScheduledRow],
        drafts: list[list[int]],
        result: "Future[StepResult]",
    ) -> None:
        self.rows, self.cold, self.drafts = rows, cold, drafts
        self.awaited: list[ScheduledRow] = []
        self._result = result

    @property
    def places(self) -> dict[Sequence, int]:
        """Of each sequence's next token, among all that the step chooses. No drafts."""
        chosen = [row.seq for row in self.rows if row.needs_logits]
        return {seq: place for place, seq in enumerate(chosen)}

    def wait(self) -> StepResult:
        """Its result, or what it raised, when it is there."""
        return self._result.result()

    def choose(self) -> dict[ScheduledRow, list[Choice] | None]:
        """Waits, and chooses the next tokens of the rows that need them (see `sample`)."""
        result = self.wait()
        which = [i for i, row in enumerate(self.rows) if row.needs_logits]
        seqs = [self.rows[i].seq for i in which]
        drafts = [self.drafts[i] for i in which]
        brought = iter(result.logits.wait())
        wanted = wants_logits(self.rows)
        logits = [next(brought) if wants else None for wants in wanted]
        logits += [last_logits(self.rows[i]).logits for i in which if self.rows[i].whole]
        choices = sample(seqs, drafts, logits, result.best.wait().tolist())
        return dict(zip((self.rows[i] for i in which), choices, strict=True))

    def kept(self) -> dict[ScheduledRow, LastLogits]:
        """Waits; of the rows that keep their whole prompts and whose logits are finite."""
        if all(row.keeps is None for row in self.rows):
            return {}
        result = self.wait()
        if not result.is_kept:
            return {}
        brought = iter(result.logits.wait())
        best = zip(*result.best.wait().tolist(), strict=True)
        kept = {}
        rows = [row for row in self.rows if row.needs_logits for _ in range(1 + row.num_drafts)]
        wanted = wants_logits(self.rows)  # without those that found their prompts, the last ones
        for row, wants, (is_finite, token_id) in zip(rows, wanted, best, strict=False):
            logits = next(brought) if wants else None
            if row.keeps is not None and is_finite and logits is not None:
                kept[row] = LastLogits(logits.clone(), token_id)
        return kept


def wants_logits(rows: Seq[ScheduledRow]) -> list[bool]:
    """Of each row of logits, whether it is to come to the host."""
    return [
        row.seq.wants_logits or row.keeps is not None
        for row in rows
        if row.needs_logits and row.whole is None
        for _ in range(1 + row.num_drafts)
    ]


def nothing() -> StepResult:
    """Of a step in which no row runs."""
    none = torch.empty(2, 0, dtype=torch.int64)
    return StepResult(none, ReadBack(none), ReadBack(torch.empty(0, 0)))
