"""The integer oracle's states and K/V in one memory: whoever writes where another's content lies
changes the output."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from cache.shared_memory import SPARE_SLOTS, PageLayout
from engine import EngineConfig
from engine.config import num_shared_pages
from engine.stream import ThreadStream
from tests.engine.test_integer_oracle import EngineMachine
from tests.lazy_stream import LazyStream
from tests.oracle import OracleModel


class SharedMemoryMachine(EngineMachine):
    """The same requests, aborts, failures and preemptions; few pages."""

    @initialize(
        block_size=st.sampled_from([16, 64]),
        every=st.sampled_from([1, 2]),
        max_num_seqs=st.integers(1, 4),
        room=st.integers(27, 60),
        budget=st.sampled_from([128, 192, 256, 1024]),
        restore=st.sampled_from(["copy", "redirect"]),
        eviction=st.sampled_from(["lru", "lru_cap_per_path(2)", "value"]),
        drafts=st.sampled_from([0, 0, 2]),
        stream=st.sampled_from([None, LazyStream, ThreadStream]),
    )
    def start(
        self, block_size, every, max_num_seqs, room, budget, restore, eviction, drafts, stream
    ):
        self.model = OracleModel()
        self.model.guesses_right = lambda position: position % 3 != 0
        config = {
            "memory": "shared",
            "block_size": block_size,
            "checkpoint_every": every * 64,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": budget,
            "restore": restore,
            "eviction": eviction,
            "num_speculative_tokens": drafts,
            "overlap": stream is not None,
        }
        kv_bytes = self.model.config.kv_bytes_per_token(4, draft=True)
        slot_bytes = self.model.state_shape.slot_bytes
        layout = PageLayout.fitting(slot_bytes, block_size * kv_bytes)
        slots = EngineConfig(**config).fewest_slots + SPARE_SLOTS
        pages = slots + (room if block_size == 16 else room // 4)
        config = EngineConfig(**config, memory_budget_bytes=pages * layout.page_bytes)
        assert num_shared_pages(config, layout, max_model_len=4096) == pages
        self.begin(config, stream)
        self.memory = self.llm.manager.linear.memory

    @rule()
    def poison_whatever_is_free(self):
        memory, worker = self.memory, self.llm.worker
        pages, blocks, ids = [0, *memory.unused], memory.blocks, []
        for page, owner in enumerate(memory.owners):
            for block in range(page * memory.blocks_per_page, (page + 1) * memory.blocks_per_page):
                idle = not blocks.ref_count(block) and not blocks.is_published(block)
                if owner is None or (owner is blocks and idle):
                    ids.append(block)

        def poison():
            worker.state_pool.arena[pages] = 255
            worker.kv_cache[ids] = 255

        worker.stream.submit(poison)

    def no_id_is_lost(self) -> None:
        self.memory.check()


TestSharedMemoryMachine = SharedMemoryMachine.TestCase
TestSharedMemoryMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
