"""A fake model that can't hide a wrong state: every value is an exact integer of the whole prefix.

The 'recurrent state' after n tokens is (S(n), n), the 'conv window' the last three tokens, and the
K/V row of token p is S(p + 1). They live in the real slots and blocks. The next token depends on
the state, the window and every K/V row of the prefix, so a state that is stale, misaligned, foreign
or half-written changes the output.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import torch

from cache.shared_memory import PageLayout
from cache.state_pool import StatePool, StateShape
from engine.batch import ModelInputs, ScheduledRow
from engine.model_config import ModelConfig
from kernels import KERNEL_CHUNK

VOCAB = 251
_PRIME = (1 << 61) - 1
_STATE_WORDS = 4  # hash and count, in either of two 'layers'
_WINDOW_WORDS = 3


@dataclass
class State:
    """What a slot holds after `count` tokens."""

    value: int = 0
    count: int = 0
    window: tuple[int, ...] = (0, 0, 0)

    def advance(self, token: int) -> None:
        self.value = (self.value * 1_000_003 + token + 1) % _PRIME
        self.count += 1
        self.window = (*self.window[1:], token + 1)

    def words(self) -> list[int]:
        return [self.value, self.count, self.value, self.count, *self.window]


def state_after(token_ids: list[int]) -> State:
    state = State()
    for token in token_ids:
        state.advance(token)
    return state


def next_token(states: list[int], kv_rows: list[int]) -> int:
    """Of the words of a slot and the K/V rows below it."""
    mixed = 0
    for weight, word in enumerate(states, start=1):
        mixed += weight * word
    for position, row in enumerate(kv_rows, start=1):
        mixed += position * row
    return mixed % _PRIME % VOCAB


def expected_output(prompt: list[int], num_tokens: int) -> list[int]:
    """The pure function of the prompt that a finished request must equal."""
    tokens, state, rows = list(prompt), State(), []
    for token in prompt:
        state.advance(token)
        rows.append(state.value)
    while True:
        tokens.append(next_token(state.words(), rows))
        if len(tokens) == len(prompt) + num_tokens:
            return tokens[len(prompt) :]
        state.advance(tokens[-1])
        rows.append(state.value)


class OracleModel:
    """Stands where `Qwen35Model` stands (protocol `engine.worker.Model`)."""

    dtype = torch.float32
    can_draft = True
    can_capture = False
    state_shape = StateShape(
        num_layers=2,
        num_value_heads=1,
        value_dim=2,
        key_dim=2,
        window_rows=3,
        conv_channels=1,
        window_dtype=torch.float32,
    )

    def __init__(self) -> None:
        self.fail_after: int | None = None  # rows to finish before the forward breaks
        self.guesses_right: Callable[[int], bool] = lambda position: True
        self.config = ModelConfig(
            vocab_size=VOCAB,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=3,
            layer_types=("linear_attention", "linear_attention", "full_attention"),
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=4,
            linear_num_key_heads=1,
            linear_num_value_heads=1,
            linear_key_head_dim=2,
            linear_value_head_dim=2,
            linear_conv_kernel_dim=4,
            rms_norm_eps=1e-6,
            rope_theta=1e4,
            rotary_dim=2,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
            fingerprint="oracle",
        )

    def draft(
        self,
        rows: Seq[ScheduledRow],
        read_slots: Seq[int],
        pool: StatePool,
        kv_cache: torch.Tensor,
    ) -> list[list[int]]:
        """The true next tokens, but where `guesses_right(position)` says no."""
        drafts = []
        for row, slot in zip(rows, read_slots, strict=True):
            state = load(pool, slot)
            kv_rows = kv_cache[row.seq.block_table].view(-1)[: row.start].tolist()
            token, guesses = row.seq.token_ids[row.start], []
            for position in range(row.start + 1, row.end):
                state.advance(token)
                kv_rows.append(state.value)
                token = next_token(state.words(), kv_rows)
                token = token if self.guesses_right(position) else (token + 1) % VOCAB
                guesses.append(token)
            drafts.append(guesses)
        return drafts

    def make_pools(
        self, num_slots: int, num_blocks: int, block_size: int, layout: PageLayout | None = None
    ) -> tuple[StatePool, torch.Tensor]:
        if layout is None:
            pool = StatePool(num_slots, self.state_shape)
            return pool, torch.full((num_blocks, block_size), -7, dtype=torch.int64)
        memory = torch.full((num_slots, layout.page_bytes // 8), -7, dtype=torch.int64)
        pool = StatePool(num_slots, self.state_shape, memory=memory.view(torch.uint8))
        return pool, memory.as_strided((num_blocks, block_size), (layout.block_bytes // 8, 1))

    def copy_blocks(
        self, kv_cache: torch.Tensor, sources: list[int], destinations: list[int]
    ) -> None:
        assert not {*sources} & {*destinations} and 0 not in destinations
        assert len({*destinations}) == len(destinations)
        kv_cache[destinations] = kv_cache[sources]

    def forward(self, inputs: ModelInputs, pool: StatePool, kv_cache: torch.Tensor) -> torch.Tensor:
        prefill, decode = inputs.prefill_slots, inputs.decode_slots
        offsets = inputs.cu_seqlens.tolist()
        lengths = [hi - lo for lo, hi in pairwise(offsets)]
        reads = [*prefill.read.tolist(), *decode.read.tolist()]
        writes = [*prefill.write.tolist(), *decode.write.tolist()]
        several = inputs.decode_cu_seqlens
        ends = list(range(inputs.num_decodes + 1)) if several is None else several.tolist()
        verified = [hi - lo for lo, hi in pairwise(ends)]
        rows = [*lengths, *verified]
        snapshots = inputs.snapshot_slots.tolist()
        writers = [
            *range(len(lengths)),
            *(len(lengths) + i for i, n in enumerate(verified) for _ in range(n)),
        ]
        _no_hazard(reads, writes, writers, [slot for slot in snapshots if slot >= 0])
        decode_tables, kv_lens = inputs.decode_block_tables.tolist(), inputs.kv_lens.tolist()
        tables = [*inputs.prefill_block_tables.tolist(), *(decode_tables[i] for i in ends[:-1])]
        starts = [*inputs.start_positions.tolist(), *(kv_lens[i] - 1 for i in ends[:-1])]
        each_write = iter(decode.write.tolist())
        block_size = kv_cache.shape[1]
        next_tokens: dict[int, int] = {}
        at, chunk = 0, 0
        for index, (length, start, table) in enumerate(zip(rows, starts, tables, strict=True)):
            if self.fail_after is not None and index >= self.fail_after:
                raise RuntimeError("the device is gone")
            state = State() if reads[index] < 0 else load(pool, reads[index])
            decodes = index >= len(lengths)
            for position in range(start, start + length):
                state.advance(int(inputs.token_ids[at]))
                kv_index = inputs.kv_indices.host[at]
                kv_cache[kv_index // block_size, kv_index % block_size] = state.value
                at += 1
                if decodes:
                    slot = next(each_write)
                    store(pool, slot, state)
                    kv_rows = kv_cache[table].view(-1)[: position + 1].tolist()
                    next_tokens[at - 1] = next_token(load(pool, slot).words(), kv_rows)
                    continue
                done = position + 1 - start
                if done % KERNEL_CHUNK == 0 or done == length:
                    if index < len(lengths) and snapshots[chunk] >= 0:
                        store(pool, snapshots[chunk], state)
                    chunk += 1
            if decodes:
                continue
            store(pool, prefill.write.tolist()[index], state)
            words = load(pool, prefill.write.tolist()[index]).words()
            kv_rows = kv_cache[table].view(-1)[: start + length].tolist()
            next_tokens[at - 1] = next_token(words, kv_rows)
        logits = torch.zeros(len(inputs.logit_rows), VOCAB)
        for i, row in enumerate(inputs.logit_rows.tolist()):
            logits[i, next_tokens[row]] = 1.0
        return logits


def _no_hazard(
    reads: list[int], writes: list[int], writers: list[int], snapshots: list[int]
) -> None:
    """Within a step no slot has two writers, and none that is read has a writer but its reader."""
    written = [*writes, *snapshots]
    assert all(slot > 0 for slot in written), f"slot 0 or -1 is written: {written}"
    assert len(set(written)) == len(written), f"slots written twice: {written}"
    for row, slot in enumerate(reads):
        assert slot != 0, "slot 0 is read"
        assert slot not in snapshots, f"slot {slot} is read and snapshot into"
        by_itself = slot not in writes or writers[writes.index(slot)] == row
        assert by_itself, f"slot {slot} is read and written"
        alone = writers.count(row) == 1 or slot not in writes
        assert alone, f"slot {slot} is overwritten before its drafts are settled"


def _words(pool: StatePool, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    states = pool.states[slot].view(torch.int64).view(-1)  # 4 words
    return states, pool.windows[slot].view(-1)


def store(pool: StatePool, slot: int, state: State) -> None:
    states, window = _words(pool, slot)
    states[:] = torch.tensor(state.words()[:_STATE_WORDS])
    window[:] = torch.tensor([*state.window, *state.window], dtype=torch.float32)


def load(pool: StatePool, slot: int) -> State:
    """The state of a slot; if the two layers disagree, a value that no prefix has."""
    states, window = _words(pool, slot)
    value, count, value2, count2 = states.tolist()
    first, second = window[:_WINDOW_WORDS].tolist(), window[_WINDOW_WORDS:].tolist()
    if (value, count, first) != (value2, count2, second) or not all(w == w for w in first):
        value, count, first = value ^ value2 ^ 1, -1, [1.0, 2.0, 3.0]
    return State(value, count, tuple(int(w) for w in first))
