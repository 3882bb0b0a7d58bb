"""What could a cache restore wrongly? Faults, put into one engine for one request, and taken out.

For experiments and tests only: methods of one LLM instance are wrapped, nothing in the engine knows
of it. A fault acts after the checkpoint was copied to the live slot (`restore="copy"`) and before
the first forward pass reads it. Checkpoints stay as they are; altered K/V rows are put back.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from cache.hashing import Namespace
from engine import LLM, SamplingParams
from engine.batch import ScheduledRow
from engine.sequence import Sequence

INT8_LARGEST = 127


@dataclass
class Restored:
    """A row whose state lies in its live slot now, and what the fault needs beside it.

    slots: boundary -> checkpoint slot of the same document; other_slots: of another document.
    undo: what puts back all that was altered outside the live slot, once the request has ended.
    """

    llm: LLM
    row: ScheduledRow
    slots: dict[int, int]
    other_slots: dict[int, int]
    undo: list[Callable[[], object]] = field(default_factory=list)

    @property
    def live_slot(self) -> int:
        assert self.row.op is not None
        return self.row.op.linear_state_id

    @property
    def state(self) -> torch.Tensor:
        """[L, HV, V, K] of the live slot."""
        return self.llm.worker.state_pool.states[self.live_slot]

    @property
    def window(self) -> torch.Tensor:
        """[L, W-1, C] of the live slot."""
        return self.llm.worker.state_pool.windows[self.live_slot]

    def take(self, slot: int) -> None:
        """Overwrite the live slot with another slot, state and window."""
        self.llm.worker.state_pool.copy([slot], [self.live_slot])


def _right(restored: Restored) -> None:
    """The control."""


def _earlier(restored: Restored) -> None:
    restored.take(restored.slots[restored.row.start - restored.llm.config.chunk_stride])


def _later(restored: Restored) -> None:
    restored.take(restored.slots[restored.row.start + restored.llm.config.chunk_stride])


def _zero_slot(restored: Restored) -> None:
    restored.state.zero_()
    restored.window.zero_()


def _zero_window(restored: Restored) -> None:
    restored.window.zero_()


def _other_document(restored: Restored) -> None:
    """Of the same boundary, or of its last one if that document ends before."""
    restored.take(restored.other_slots[min(restored.row.start, max(restored.other_slots))])


def _zero_kv(restored: Restored) -> None:
    """Zero the K/V of all tokens below the boundary, for this request only."""
    row, cache = restored.row, restored.llm.worker.kv_cache
    blocks = torch.tensor(row.seq.block_table[: row.start // restored.llm.config.block_size])
    blocks = blocks.to(cache.device)
    kept = cache[:, :, blocks]
    cache.index_fill_(2, blocks, 0)
    restored.undo.append(lambda: cache.index_copy_(2, blocks, kept))


def _bfloat16(restored: Restored) -> None:
    restored.state.copy_(restored.state.bfloat16().float())


def _int8(restored: Restored) -> None:
    """The nearest of 255 levels; the scale is that of the head's largest magnitude."""
    state = restored.state
    scale = state.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(1e-30) / INT8_LARGEST
    state.copy_((state / scale).round() * scale)


@dataclass(frozen=True)
class Fault:
    """name: in files. title: what the model starts from, in words."""

    name: str
    title: str
    inject: Callable[[Restored], None]


FAULTS = (
    Fault("none", "right state (control)", _right),
    Fault("stride_earlier", "state of a stride earlier", _earlier),
    Fault("stride_later", "state of a stride later", _later),
    Fault("state_zero", "zero state (no checkpoint)", _zero_slot),
    Fault("window_zero", "right state, zero conv window", _zero_window),
    Fault("other_document", "another document's state", _other_document),
    Fault("kv_zero", "right state, zero K/V", _zero_kv),
    Fault("bfloat16", "right state as bfloat16", _bfloat16),
    Fault("int8", "right state as int8", _int8),
)


def checkpoint_slots(llm: LLM, token_ids: list[int]) -> dict[int, int]:
    """Boundary -> slot of every checkpoint that this prompt could restore."""
    linear = llm.manager.linear
    assert linear is not None
    namespace = Namespace(llm.model_config.fingerprint, "", "")
    seq = Sequence("probe", token_ids, SamplingParams(), namespace=namespace)
    slots = {}
    for boundary in linear.allocate_shared(seq):
        found = linear.cache.find(seq.linear_state_hashes[boundary // linear.chunk_stride - 1])
        assert found is not None and found.boundary == boundary
        slots[boundary] = found.slot_id
    return slots


@contextmanager
def injected(
    llm: LLM, fault: Fault, *, boundary: int, slots: dict[int, int], other_slots: dict[int, int]
) -> Iterator[list[Restored]]:
    """Requests served inside resume at `boundary`, from a state with the fault, and save nothing.

    Yields the list that the rows that were altered are added to. Afterwards every method, K/V row
    and checkpoint is what it was: a wrong state is never published.
    """
    if llm.config.restore != "copy":
        raise ValueError(
            f"restore={llm.config.restore!r}; expected 'copy': a fault alters the copy"
        )
    linear, altered = llm.manager.linear, []
    assert linear is not None
    restore, deepest = llm.worker._restore, linear.deepest

    def wrong_restore(rows: list[ScheduledRow]) -> Any:
        outcome = restore(rows)
        for row in rows:
            if row.op is not None and row.op.restore_requested and row.is_prefill:
                assert row.start == boundary, f"resumed at {row.start}, expected {boundary}"
                altered.append(Restored(llm, row, slots, other_slots))
                fault.inject(altered[-1])
        return outcome

    with ExitStack() as stack:
        _replace(stack, llm.worker, "_restore", wrong_restore)
        _replace(stack, linear, "deepest", lambda seq, limit: deepest(seq, min(limit, boundary)))
        _replace(stack, linear, "_save_points", lambda seq, start, end: {})
        _replace(stack, llm.manager.kv, "publish", lambda seq: None)
        try:
            yield altered
        finally:
            for restored in altered:
                for undo in restored.undo:
                    undo()


def _replace(stack: ExitStack, owner: object, name: str, method: Callable[..., Any]) -> None:
    """Put a method on one instance, until the stack unwinds."""
    assert name not in vars(owner), f"{name} is replaced already"
    setattr(owner, name, method)
    stack.callback(delattr, owner, name)
