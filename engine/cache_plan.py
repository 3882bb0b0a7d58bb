"""How many slots and blocks an engine has, what they lie in, and who keeps their books."""

from dataclasses import dataclass

from cache.composite_block_manager import CompositeBlockManager
from cache.eviction import Flops
from cache.hashing import HashDomain
from cache.kv_block_manager import KVBlockManager
from cache.linear_state_block_manager import LinearStateBlockManager
from cache.placement import parse_placement, usual
from cache.policy_names import parse_policy
from cache.shared_memory import PageLayout, SharedMemory
from cache.state_pool import StateShape
from engine.config import EngineConfig, num_shared_pages, pool_sizes


@dataclass(frozen=True)
class CachePlan:
    """Pool sizes, padding ids included. layout and memory: of K/V and states that share theirs;
    None: each has its own."""

    config: EngineConfig
    num_slots: int
    num_blocks: int
    layout: PageLayout | None = None
    memory: SharedMemory | None = None

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        shape: StateShape | None,
        *,
        kv_bytes_per_token: int,
        max_model_len: int,
    ) -> "CachePlan":
        """shape: of a state; None: the model has none. ValueError for a budget that is too small.

        Without states, without K/V or without caching there is nothing to share.
        """
        shares = config.memory == "shared" and config.enable_prefix_caching
        if shares and shape is not None and kv_bytes_per_token:
            block_bytes = config.block_size * kv_bytes_per_token
            layout = PageLayout.fitting(shape.slot_bytes, block_bytes)
            num_pages = num_shared_pages(config, layout, max_model_len=max_model_len)
            memory = SharedMemory(num_pages, layout.blocks_per_page)
            return cls(config, num_pages, memory.blocks.num_ids, layout, memory)
        slot_bytes = 0 if shape is None else shape.slot_bytes
        sizes = pool_sizes(
            config,
            slot_bytes=slot_bytes,
            kv_bytes_per_token=kv_bytes_per_token,
            max_model_len=max_model_len,
        )
        return cls(config, *sizes)

    def manager(self, *, has_states: bool, flops: Flops) -> CompositeBlockManager:
        """Of both leaves, with nothing in use. flops: what a prefill of the model costs."""
        config = self.config
        placement = usual(config.checkpoint_every)
        if config.placement is not None:
            placement = parse_placement(config.placement, config.chunk_stride)
        linear = None
        if has_states:
            per_page = self.layout.blocks_per_page if self.layout is not None else 0
            linear = LinearStateBlockManager(
                self.num_slots,
                HashDomain("linear", config.chunk_stride, config.hash_seed),
                placement=placement,
                max_num_seqs=config.max_num_seqs,
                enable_prefix_caching=config.enable_prefix_caching,
                policy=parse_policy(
                    config.eviction,
                    flops,
                    self.memory,
                    tokens_per_page=per_page * config.block_size,
                ),
                num_scratch=config.max_num_seqs * config.num_scratch,
                memory=self.memory,
            )
        kv = KVBlockManager(
            self.num_blocks,
            HashDomain("kv", config.block_size, config.hash_seed),
            chunk_stride=config.chunk_stride,
            memory=self.memory,
        )
        return CompositeBlockManager(
            kv,
            linear,
            enable_prefix_caching=config.enable_prefix_caching,
            whole_prompts=placement.whole_prompt,
        )
