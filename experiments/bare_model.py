"""What does the forward pass alone cost? The least that a request can take."""

import torch

from cache.ops import LinearStateCacheOp
from engine import SamplingParams
from engine.batch import ScheduledRow, build_inputs
from engine.model import Qwen35Model
from engine.sequence import Sequence


class BareModel:
    """The model alone: no scheduler, no cache, one sequence in slot 1 up to each wanted depth."""

    def __init__(self, model: Qwen35Model, prompt: list[int], depth: int) -> None:
        self.model, self.block_size = model, 64
        num_blocks = len(prompt) // 64 + 2
        self.pools = model.make_pools(4, num_blocks, self.block_size)
        self.seq = Sequence("bare", prompt, SamplingParams())
        self.seq.block_table = list(range(1, num_blocks))
        self.slots = {depth: 1, depth + 64: 2}
        for reached, slot in self.slots.items():
            for start in range(0, reached, 512):
                end = min(reached, start + 512)
                self._run(start, end, -1 if start == 0 else slot, slot)

    def prefill(self, start: int, end: int) -> torch.Tensor:
        return self._run(start, end, self.slots[start], 3)

    @torch.inference_mode()
    def _run(self, start: int, end: int, read: int, write: int) -> torch.Tensor:
        row = ScheduledRow(self.seq, start, end, LinearStateCacheOp(write))
        inputs = build_inputs([row], [read], block_size=self.block_size)
        return self.model.forward(inputs, *self.pools)
