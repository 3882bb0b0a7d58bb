"""A scheduler with an exact worker: the ledger checks every state and block that a step reads."""

from collections.abc import Iterable

from cache.composite_block_manager import CompositeBlockManager
from cache.hashing import Namespace
from cache.policy_names import parse_policy
from engine.batch import Batch, ScheduledRow
from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from tests.cache.builders import composite
from tests.cache.ledger import Ledger

Rows = list[tuple[str, int, int]]


def manager_for(
    config: EngineConfig, *, num_blocks: int, num_slots: int, recurrent: bool
) -> CompositeBlockManager:
    return composite(
        num_blocks=num_blocks,
        num_slots=num_slots,
        block_size=config.block_size,
        stride=config.chunk_stride,
        every=config.checkpoint_every,
        max_num_seqs=config.max_num_seqs,
        caching=config.enable_prefix_caching,
        recurrent=recurrent,
        policy=parse_policy(config.eviction),
    )


class Driver:
    """Steps a scheduler by hand. Requests are named; their prompts share nothing unless given."""

    def __init__(
        self, *, num_blocks: int = 200, num_slots: int = 40, recurrent: bool = True, **options
    ) -> None:
        defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "checkpoint_every": 64}
        defaults |= {"eviction": "lru"}
        self.config = EngineConfig(**(defaults | options))
        self.manager = manager_for(
            self.config, num_blocks=num_blocks, num_slots=num_slots, recurrent=recurrent
        )
        self.scheduler = Scheduler(self.config, self.manager)
        self.ledger = Ledger(self.manager)
        self.requests: dict[str, Sequence] = {}
        self.last_batch: Batch | None = None
        self.needed_logits: list[bool] = []

    def add(
        self,
        name: str,
        prompt: int | Iterable[int],
        max_tokens: int = 1,
        *,
        salt: str = "",
        exact: bool = True,
        save_points: Iterable[int] = (),
        background: bool = False,
    ) -> Sequence:
        if isinstance(prompt, int):
            first = 100_000 * (len(self.requests) + 1)
            prompt = range(first, first + prompt)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        seq = Sequence(
            name,
            prompt,
            sampling,
            namespace=Namespace(cache_salt=salt),
            exact=exact,
            save_points=save_points,
            background=background,
        )
        self.requests[name] = seq
        self.scheduler.add(seq)
        return seq

    def schedule(self) -> Rows:
        """The next step, not yet issued."""
        self.last_batch = self.scheduler.schedule()
        self.scheduler.check()
        rows = [] if self.last_batch is None else self.last_batch.rows
        self.needed_logits = [row.needs_logits for row in rows]
        return [(row.seq.request_id, row.start, row.end) for row in rows]

    def issue(self, *, cold: Iterable[str] = ()) -> None:
        """Run and commit the scheduled step; the restores of the `cold` requests fail."""
        batch = self.last_batch
        assert batch is not None
        failed = [row for row in batch.rows if row.seq.request_id in cold]
        ran = [row for row in batch.rows if row not in failed]
        self.ledger.forward(ran)
        self.scheduler.commit(batch, cold=failed)
        for row in ran:
            self._append(row)
        self.scheduler.check()
        self.ledger.check()

    def _append(self, row: ScheduledRow) -> None:
        seq = row.seq
        if not row.needs_logits or seq.abort_requested:
            return
        seq.append_token(1000 + seq.num_generated)
        if seq.num_generated >= seq.sampling.max_tokens:
            self.scheduler.finish(seq, "length")

    def step(self) -> Rows:
        rows = self.schedule()
        if rows:
            self.issue()
        return rows

    def steps(self, count: int) -> list[Rows]:
        return [self.step() for _ in range(count)]

    def finish_all(self, *, limit: int = 3000) -> int:
        """Step until nothing is left; returns the number of steps."""
        for number in range(limit):
            if not self.step():
                assert not self.scheduler.has_unfinished
                return number
        raise AssertionError(f"unfinished after {limit} steps")
