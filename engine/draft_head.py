"""The multi-token-prediction head: guesses the tokens after the next one.

One attention layer over its own K/V, which lie behind those of the model in the same blocks. Row p
is made of the embedding of token p and the model's hidden row of token p - 1 (after the final
norm); both lie below every boundary above p, so that blocks and slots can be shared as they are.
Wiring: `fc(cat(norm(embedding), norm(hidden)))`, the layer, a norm, the model's own embedding and
head (Qwen3.5's `mtp.*` tensors; the order of the two halves is that of vLLM).
"""

from collections.abc import Callable
from typing import Protocol

import torch

from engine.batch import HiddenRows, ModelInputs
from engine.model_config import ModelConfig
from kernels import Ops

Rotations = tuple[torch.Tensor, torch.Tensor]


class Layer(Protocol):
    """A decoder layer with attention (`engine.model.DecoderLayer`)."""

    def __call__(
        self,
        x: torch.Tensor,
        inputs: ModelInputs,
        pool: None,
        kv_cache: torch.Tensor,
        rotations: Rotations,
    ) -> torch.Tensor: ...

    def write_kv(
        self,
        x: torch.Tensor,
        inputs: ModelInputs,
        kv_cache: torch.Tensor,
        rotations: Rotations,
    ) -> None: ...


class DraftHead:
    """Built from the `mtp.*` tensors; `layer` is the decoder layer among them.

    embedding [vocab, hidden] and head are the model's.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        layer: Layer,
        config: ModelConfig,
        ops: Ops,
        *,
        embedding: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.ops, self.eps = ops, config.rms_norm_eps
        self.fc = ops.linear(tensors.pop("fc.weight"))
        self.embedding_norm = tensors.pop("pre_fc_norm_embedding.weight").float()
        self.hidden_norm = tensors.pop("pre_fc_norm_hidden.weight").float()
        self.norm = tensors.pop("norm.weight").float()
        assert not tensors, f"tensors that the draft head does not use: {sorted(tensors)}"
        self.layer, self.embedding, self.head = layer, embedding, head

    def remember(
        self,
        hidden: torch.Tensor,
        inputs: ModelInputs,
        memory: torch.Tensor,
        kv_cache: torch.Tensor,
        rotations: Rotations,
    ) -> None:
        """Write the head's K/V of all rows of a step, and keep the hidden rows it will start from.

        hidden [R, hidden_size] of the step's tokens; memory [num_slots, hidden_size].
        """
        rows = inputs.hidden
        assert rows is not None
        x = self._fused(inputs.token_ids, _rows_before(hidden, memory, rows), inputs)
        self.layer.write_kv(x, inputs, kv_cache, rotations)
        memory[rows.slots.tensor] = hidden[rows.kept.tensor]

    def guess(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        inputs: ModelInputs,
        kv_cache: torch.Tensor,
        rotations: Rotations,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(likeliest next tokens [N], hidden rows [N, hidden_size]) after one token a sequence.

        hidden: of the tokens before; the model's, or those of the guess before.
        """
        x = self._fused(token_ids, hidden, inputs)
        x = self.layer(x, inputs, None, kv_cache, rotations)
        hidden = self.ops.rms_norm(x, self.norm, eps=self.eps)
        return self.head(hidden).argmax(-1), hidden

    def _fused(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, inputs: ModelInputs
    ) -> torch.Tensor:
        embedded = self.ops.rms_norm(self.embedding[token_ids], self.embedding_norm, eps=self.eps)
        hidden = self.ops.rms_norm(hidden, self.hidden_norm, eps=self.eps)
        return self.fc(torch.cat([embedded, hidden], dim=-1), inputs.num_prefill_tokens)


def _rows_before(hidden: torch.Tensor, memory: torch.Tensor, rows: HiddenRows) -> torch.Tensor:
    """Each row's predecessor; a sequence's first row starts from its slot, or from zero."""
    before = hidden.roll(1, 0)
    reads = rows.reads.tensor
    kept = torch.where((reads >= 0)[:, None], memory[reads.clamp(min=0)], 0)
    before[rows.firsts.tensor] = kept
    return before
