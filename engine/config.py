"""Everything an engine is told at start, and the rules between the values."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal, get_args

from cache.placement import CHECKPOINT_EVERY, parse_placement
from cache.policy_names import parse_policy
from cache.shared_memory import SPARE_SLOTS, PageLayout
from kernels import DELTA_RULES, IMPLEMENTATIONS, KERNEL_CHUNK, MATMULS

Restore = Literal["copy", "redirect"]
Memory = Literal["split", "shared"]
_DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; ValueError names the field, the value and the rule.

    enable_prefix_caching: off: every prompt is prefilled in full, nothing is saved.
    chunk_stride: step of the linear hash domain in tokens: the grid of boundaries where a state may
        be saved or restored, and where a prefill may be cut.
    checkpoint_every: tokens between the states that are saved on the way through a prompt, and of
        K/V to each checkpoint where sizes follow from the budget.
    placement: which states are saved; None: "prompt_end(64)+prompt_end+branch+every(N)", N as
        `checkpoint_every`. "whole_prompt" keeps what identical prompts need to run no forward pass:
        a state, up to a stride of K/V, and a row of logits on the host.
    eviction: which checkpoint goes when slots run out: "value" (`cache.value_index`), "lru",
        "lru_cap_per_path(2)" or "flop_aware(0.5)".
    block_size: tokens of a K/V block.
    num_slots, num_blocks: pool sizes, padding id 0 included; None: from `memory_budget_bytes`.
    max_num_seqs: sequences that run at once.
    max_num_batched_tokens: token budget of one step; decoding sequences take one each, and the
        first prefill gets a whole stride even if they leave less.
    restore: "redirect": the first step after a hit reads the checkpoint and writes the live slot;
        "copy": one fused copy first. Equal bits.
    device, dtype: where ("cpu", "cuda") and in what the model runs; dtype None: as the weights are.
        States are always float32.
    kernels: "torch" (on the CPU) or "triton" (on CUDA and ROCm devices, or interpreted on the CPU,
        in float32); "auto": as the device needs.
    delta_rule, matmul: with Triton, "fla" prefills with flash-linear-attention's chunk kernel and
        "library" multiplies with the library's matmul, for comparison: a hit may then change bits.
    cuda_graphs: capture the decode steps of some batch sizes at start, in memory of their own, and
        replay them: same bits, fewer launches. Needs Triton's kernels, and no speculative tokens.
    hash_seed: seed of the prefix hashes.
    num_speculative_tokens: how many tokens the model's draft head (`mtp.*`) guesses for each step
        to verify; 0: it is not loaded. Output bits are the same with and without.
    overlap: prepare each step while the one before it runs; tokens come one call of `step` later.
        Output bits are the same. Without effect where drafts are verified: how many are right, and
        so what the next step begins with, is known only after the step.
    memory_budget_bytes: for states and K/V together.
    memory: "split": the budget is divided once, at start; "shared": pages of it become slots or K/V
        as needed, and num_slots and num_blocks are None. Equal bits. Without recurrent layers or
        prefix caching there is nothing to share: split.
    max_model_len: longest prompt + answer; None: the model's own limit.
    """

    enable_prefix_caching: bool = True
    chunk_stride: int = KERNEL_CHUNK
    checkpoint_every: int = CHECKPOINT_EVERY
    placement: str | None = None
    eviction: str = "value"
    block_size: int = 64
    num_slots: int | None = None
    num_blocks: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    restore: Restore = "redirect"
    device: str = "cpu"
    dtype: str | None = None
    kernels: str = "auto"
    delta_rule: str = "own"
    matmul: str = "invariant"
    cuda_graphs: bool = False
    hash_seed: int = 0
    num_speculative_tokens: int = 0
    overlap: bool = False
    memory_budget_bytes: int = 2 << 30
    memory: Memory = "split"
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_steps()
        self._check_sizes()
        self._check_choices()
        self._check_drafts()

    def _check_steps(self) -> None:
        """Steps in tokens: each is whole in the next larger one."""
        for name in ("chunk_stride", "checkpoint_every", "block_size", "max_num_seqs"):
            self._require(getattr(self, name) >= 1, name, "must be at least 1")
        self._require(
            self.chunk_stride % KERNEL_CHUNK == 0,
            "chunk_stride",
            f"must be a multiple of the kernel chunk, {KERNEL_CHUNK}",
        )
        self._require(
            self.chunk_stride % self.block_size == 0,
            "chunk_stride",
            f"must be a multiple of block_size={self.block_size}",
        )
        self._require(
            self.checkpoint_every % self.chunk_stride == 0,
            "checkpoint_every",
            f"must be a multiple of chunk_stride={self.chunk_stride}",
        )
        self._require(
            self.max_num_batched_tokens >= self.chunk_stride,
            "max_num_batched_tokens",
            f"must be at least chunk_stride={self.chunk_stride}, or no prefill could advance",
        )

    def _check_sizes(self) -> None:
        if self.num_slots is not None:
            self._require(
                self.num_slots >= self.fewest_slots,
                "num_slots",
                f"must be at least {self.fewest_slots}: for each of max_num_seqs="
                f"{self.max_num_seqs} a live slot and {self.num_scratch} for "
                f"num_speculative_tokens={self.num_speculative_tokens}, and the padding slot",
            )
        if self.num_blocks is not None:
            self._require(
                self.num_blocks >= 2, "num_blocks", "must be at least 2: one block and the padding"
            )
        if self.max_model_len is not None:
            self._require(self.max_model_len >= 2, "max_model_len", "must be at least 2")
        self._require(self.memory_budget_bytes > 0, "memory_budget_bytes", "must be positive")
        sized = self.num_slots is not None or self.num_blocks is not None
        self._require(
            not (sized and self.memory == "shared"),
            "memory",
            f"is sized by memory_budget_bytes alone, got num_slots={self.num_slots} and "
            f"num_blocks={self.num_blocks}; leave both None, or use memory='split'",
        )

    def _check_choices(self) -> None:
        """What is one of a few words, or made of them."""
        self._require(
            self.restore in get_args(Restore), "restore", f"must be one of {get_args(Restore)}"
        )
        self._require(
            self.memory in get_args(Memory), "memory", f"must be one of {get_args(Memory)}"
        )
        self._require(self.device in DEVICES, "device", f"must be in {DEVICES}")
        self._require(self.kernels in IMPLEMENTATIONS, "kernels", f"must be in {IMPLEMENTATIONS}")
        self._require(self.delta_rule in DELTA_RULES, "delta_rule", f"must be in {DELTA_RULES}")
        self._require(self.matmul in MATMULS, "matmul", f"must be in {MATMULS}")
        self._require(self.dtype in (None, *_DTYPES), "dtype", f"must be None or in {_DTYPES}")
        self._check_parsed("eviction", parse_policy)
        if self.placement is not None:
            self._check_parsed(
                "placement", partial(parse_placement, chunk_stride=self.chunk_stride)
            )
            whole = parse_placement(self.placement, self.chunk_stride).whole_prompt
            self._require(
                not (whole and self.memory == "shared"),
                "placement",
                'whole_prompt can\'t copy the K/V of memory="shared": use memory="split", or leave '
                "whole_prompt out",
            )
        self._require(0 <= self.hash_seed < 1 << 64, "hash_seed", "must be in [0, 2**64)")

    def _check_drafts(self) -> None:
        drafts = self.num_speculative_tokens
        self._require(0 <= drafts <= 16, "num_speculative_tokens", "must be in [0, 16]")
        self._require(
            not (self.cuda_graphs and drafts),
            "cuda_graphs",
            f"no graph holds the verify steps of num_speculative_tokens={drafts}: set that to 0, "
            "or cuda_graphs=False",
        )

    @property
    def overlaps(self) -> bool:
        """Whether steps are prepared ahead."""
        return self.overlap and self.num_speculative_tokens == 0

    @property
    def num_scratch(self) -> int:
        """Slots in which a verify step leaves one sequence's states: one for each of its tokens."""
        return self.num_speculative_tokens + 1 if self.num_speculative_tokens else 0

    @property
    def fewest_slots(self) -> int:
        """Live slots and scratch of all sequences, and the padding."""
        return self.max_num_seqs * (1 + self.num_scratch) + 1

    def _check_types(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind = type(field.default) if field.default is not None else int
            if field.name in ("dtype", "placement"):
                kind = str
            optional = field.default is None
            if not (type(value) is kind or (optional and value is None)):
                wanted = kind.__name__ + (" or None" if optional else "")
                raise ValueError(f"{field.name} must be {wanted}, got {value!r}")

    def _check_parsed(self, name: str, parse: Callable[[str], object]) -> None:
        try:
            parse(getattr(self, name))
        except ValueError as error:
            raise ValueError(f"{name}={getattr(self, name)!r}: {error}") from error

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)!r}: {rule}")


def pool_sizes(
    config: EngineConfig, *, slot_bytes: int, kv_bytes_per_token: int, max_model_len: int
) -> tuple[int, int]:
    """(num_slots, num_blocks) for a model, padding ids included.

    What is given is taken. The rest comes out of the memory budget: first `max_num_seqs` live slots
    and the padding, then K/V and checkpoints together, one checkpoint to each `checkpoint_every`
    tokens of K/V, but no more K/V than all sequences at full length could use. ValueError when the
    budget does not hold the live slots and one stride of K/V.
    """
    block_bytes = config.block_size * kv_bytes_per_token
    live_slots = config.fewest_slots
    left = config.memory_budget_bytes
    fixed_slots = config.num_slots if config.num_slots is not None else live_slots
    left -= slot_bytes * fixed_slots
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
        left -= num_blocks * block_bytes
    else:
        per_slot = config.checkpoint_every // config.block_size  # blocks that go with a checkpoint
        saves = config.enable_prefix_caching and config.num_slots is None
        share = block_bytes + (slot_bytes / per_slot if saves else 0.0)
        num_blocks = int((left - block_bytes) // share) + 1 if share else 1 << 20
        longest = -(-max_model_len // config.block_size)
        num_blocks = min(num_blocks, config.max_num_seqs * longest + 1)
        if num_blocks < min(config.chunk_stride // config.block_size, longest) + 1:
            raise ValueError(
                f"memory_budget_bytes={config.memory_budget_bytes} holds no stride of K/V beside "
                f"{fixed_slots} slots of {slot_bytes} bytes: raise it, lower max_num_seqs="
                f"{config.max_num_seqs}, or give num_slots and num_blocks"
            )
        left -= num_blocks * block_bytes
    if config.num_slots is not None:
        return config.num_slots, num_blocks
    extra = max(0, left) // slot_bytes if config.enable_prefix_caching and slot_bytes else 0
    most = -(-num_blocks * config.block_size // config.chunk_stride)  # a state at every boundary
    return live_slots + min(extra, most), num_blocks


def num_shared_pages(config: EngineConfig, layout: PageLayout, *, max_model_len: int) -> int:
    """Pages of a shared memory, the padding page included.

    What the budget holds, but no more than all sequences at full length could use with a state at
    every boundary. ValueError when one stride of K/V does not fit beside the slots.
    """
    longest = -(-max_model_len // config.block_size)
    num_blocks = config.max_num_seqs * longest
    strides = -(-num_blocks * config.block_size // config.chunk_stride)
    most = -(-num_blocks // layout.blocks_per_page) + strides
    slots = config.fewest_slots + SPARE_SLOTS  # the padding among them
    num_pages = min(config.memory_budget_bytes // layout.page_bytes, slots + most)
    fewest = min(config.chunk_stride // config.block_size, longest)
    if (num_pages - slots) * layout.blocks_per_page < fewest:
        raise ValueError(
            f"memory_budget_bytes={config.memory_budget_bytes} holds no stride of K/V beside "
            f"{slots} pages of {layout.page_bytes} bytes for slots: raise it, or lower "
            f"max_num_seqs={config.max_num_seqs}"
        )
    return num_pages
