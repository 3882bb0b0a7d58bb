"""Decode steps as graphs: one for each of a few batch sizes, captured at start, replayed for good.

A graph follows the ids that lie in its buffers, whoever wrote them. So every step writes all of
them: its own rows first, and in the rows that are left padding, which reads and writes slot 0 (the
state ops then do nothing) and row 0 of K/V block 0. Nothing of an earlier step is left to follow.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from engine.batch import ModelInputs, StateSlots
from kernels import validate
from kernels.graphs import Graph, capture, shared_memory
from kernels.ids import BlockTables, Ids
from kernels.slot_rules import require

Forward = Callable[[ModelInputs], torch.Tensor]

# Of a padding row: token, position, flat K/V row, K/V length, slot to read, slot to write.
_PADDING = (0, 0, 0, 1, 0, 0)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending: steps of 8 waste few rows; below 8, powers of two."""
    sizes = {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


class DecodeGraphs:
    """Runs decode steps of one token a row: `run` instead of the model's forward pass.

    forward: the model's forward pass on its pools, which stay where they are. It is run with
        padding alone, so it changes nothing but row 0 of K/V block 0.
    max_model_len: no row has more K/V; it sizes the block tables and the grid of the attention.
    sizes: as `graph_sizes`.

    num_replays: steps that were replayed; num_captures: graphs that were captured, all at start.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        sizes: Iterable[int],
        vocab_size: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        num_slots: int,
        device: str = "cpu",
    ) -> None:
        self.max_model_len = max_model_len
        self._check_ids = partial(
            validate.decode_ids, num_blocks=num_blocks, block_size=block_size, num_slots=num_slots
        )
        self.sizes = sorted(set(sizes))
        self.num_replays = self.num_captures = 0
        most, self._device = self.sizes[-1], torch.empty(0, device=device).device
        width = -(-max_model_len // block_size)
        with torch.inference_mode():
            columns = torch.tensor(_PADDING, device=device)[:, None]
            self._padding = columns.repeat(1, most + most % 2)  # rows at multiples of 16 bytes
            self._ids = self._padding.clone()
            self._tables = torch.zeros(most, width, dtype=torch.int32, device=device)
            self._logits = torch.zeros(most, vocab_size, device=device)
        self._captured: dict[int, tuple[Graph, ModelInputs]] = {}
        memory = shared_memory(self._device)
        for size in reversed(self.sizes):
            self._capture(size, forward, memory)

    def takes(self, inputs: ModelInputs) -> bool:
        """Whether a graph holds these rows: all decode, one token each, and not too many."""
        plain = inputs.decode_cu_seqlens is None and inputs.hidden is None
        alone = len(inputs.start_positions) == 0
        return plain and alone and 1 <= inputs.num_decodes <= self.sizes[-1]

    @torch.inference_mode()
    def run(self, inputs: ModelInputs) -> torch.Tensor:
        """Logits [num_logits, vocab] float32 of `inputs.logit_rows`, in memory of their own.

        Everything is enqueued here, on the current stream. ValueError, and nothing enqueued, for
        ids that the ops of the step would refuse.
        """
        require(self.takes(inputs), "a step", "rows that a graph takes", inputs.num_decodes)
        self._check(inputs)
        size = next(size for size in self.sizes if size >= inputs.num_decodes)
        self._fill(inputs, size)
        graph, _ = self._captured[size]
        graph.replay()
        self.num_replays += 1
        return graph.output.index_select(0, inputs.logit_rows)

    def _check(self, inputs: ModelInputs) -> None:
        longest = max(inputs.kv_lens.host)
        limit = self.max_model_len
        require(longest <= limit, "longest K/V", f"at most max_model_len={limit}", longest)
        for name, ids in (("tokens", inputs.token_ids), ("positions", inputs.positions)):
            require(len(ids) == inputs.num_decodes, f"number of {name}", "one a row", len(ids))
        slots = inputs.decode_slots
        self._check_ids(
            inputs.kv_indices,
            inputs.kv_lens,
            inputs.decode_block_tables,
            slots.read,
            slots.write,
        )

    def _fill(self, inputs: ModelInputs, size: int) -> None:
        """All rows of the buffers of this size, and all of each row: a graph reads no others."""
        num_rows, slots = inputs.num_decodes, inputs.decode_slots
        self._ids[:, :size].copy_(self._padding[:, :size])
        torch._foreach_copy_(
            list(self._ids[:, :num_rows].unbind()),
            [
                inputs.token_ids,
                inputs.positions,
                inputs.kv_indices.tensor,
                inputs.kv_lens.tensor,
                slots.read.tensor,
                slots.write.tensor,
            ],
        )
        tables = inputs.decode_block_tables.tensor[:, : self._tables.shape[1]]
        self._tables[:size].zero_()
        self._tables[:num_rows, : tables.shape[1]].copy_(tables)

    def _capture(self, size: int, forward: Forward, memory: object) -> None:
        """Its inputs are kept: a graph needs the tensors that it reads, not only their contents."""
        inputs = self._inputs(size)
        logits = self._logits[:size]
        graph = capture(lambda: logits.copy_(forward(inputs)), self._device, memory)
        self._captured[size] = graph, inputs
        self.num_captures += 1

    @torch.inference_mode()
    def _inputs(self, size: int) -> ModelInputs:
        """The first `size` rows of the buffers, as the model is given a step."""
        token_ids, positions, kv_indices, kv_lens, reads, writes = self._ids[:, :size].unbind()
        device, padding = self._device, [0] * size
        none, no_tables = Ids([], device), BlockTables([], device)
        return ModelInputs(
            token_ids=token_ids,
            positions=positions,
            kv_indices=Ids.of_buffer(kv_indices, padding),
            logit_rows=Ids(range(size), device).tensor,
            cu_seqlens=Ids([0], device),
            start_positions=none,
            prefill_block_tables=no_tables,
            prefill_slots=StateSlots(none, none),
            snapshot_slots=none,
            kv_lens=Ids.of_buffer(kv_lens, [self.max_model_len] * size),
            decode_block_tables=BlockTables.of_buffer(self._tables[:size]),
            decode_slots=StateSlots(Ids.of_buffer(reads, padding), Ids.of_buffer(writes, padding)),
            decode_cu_seqlens=Ids(range(size + 1), device),  # or a cached one that may be freed
        )
