"""What a step does for whole prompts, beside its forward pass: copies, and tokens known already."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from engine.batch import ScheduledRow


@dataclass(frozen=True)
class LastLogits:
    """Of the last token of a prompt: its logits [vocab] float32, and the likeliest next token as
    the device saw it. On the host; nobody writes into them."""

    logits: torch.Tensor
    likeliest: int


def last_logits(row: ScheduledRow) -> LastLogits:
    """Of a row that found its whole prompt."""
    assert row.whole is not None and isinstance(row.whole.logits, LastLogits), row.whole
    return row.whole.logits


@dataclass(frozen=True)
class WholeRows:
    """What is copied when the forward is done, as pairs (source, copy), and the tokens of the rows
    that found their whole prompts and need one.

    slots, blocks: to be kept. found: blocks of the prompts that were found.
    """

    slots: tuple[tuple[int, int], ...]
    blocks: tuple[tuple[int, int], ...]
    found: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, rows: Iterable[ScheduledRow], *, block_size: int) -> "WholeRows":
        """Of the rows that run, before anything that they hold is given back."""
        slots: list[tuple[int, int]] = []
        blocks: list[tuple[int, int]] = []
        found: list[tuple[int, int]] = []
        tokens: list[int] = []
        for row in rows:
            if row.keeps is not None:
                blocks += [(block, copy) for _, block, copy in row.keeps.blocks]
                if row.keeps.slot is not None:
                    assert row.op is not None
                    slots.append((row.op.linear_state_id, row.keeps.slot))
            if row.whole is not None:
                own = row.seq.block_table[row.whole.shared // block_size :]
                found += zip(row.whole.tail, own, strict=True)
                if row.needs_logits:
                    tokens.append(last_logits(row).likeliest)
        return cls(tuple(slots), tuple(blocks), tuple(found), tuple(tokens))

    def __bool__(self) -> bool:
        return bool(self.slots or self.blocks or self.found or self.tokens)
