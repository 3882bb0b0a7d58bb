"""Scheduler, managers and worker driven at random beside the integer oracle. No tolerance."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cache.cached_sequence import CachedSequence
from cache.hashing import Namespace, Provenance, filed_under, tail_key
from cache.ops import NO_SLOT, LinearStateCacheOp
from engine import LLM, EngineConfig, SamplingParams
from engine.batch import Batch
from engine.stream import InlineStream, ThreadStream
from tests.lazy_stream import LazyStream
from tests.oracle import OracleModel, State, expected_output, load

BASES = [[(7 * i + 13 * base + i * i) % 251 for i in range(420)] for base in range(3)]
SALTS = ["", "tenant"]


class EngineMachine(RuleBasedStateMachine):
    """Any order of requests, steps, aborts, failures, evictions and preemptions.

    model_type, graphs: another model for the same oracle, and whether decode steps are replayed.
    """

    model_type = OracleModel
    graphs = False

    @initialize(
        stride=st.sampled_from([64, 128]),
        block_size=st.sampled_from([16, 64]),
        every=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 4),
        extra_slots=st.integers(0, 6),
        num_blocks=st.integers(32, 70),
        budget=st.sampled_from([128, 192, 256, 1024]),
        restore=st.sampled_from(["copy", "redirect"]),
        caching=st.sampled_from([True, True, True, False]),
        drafts=st.sampled_from([0, 0, 1, 2, 5]),
        period=st.integers(1, 5),
        stream=st.sampled_from([None, None, InlineStream, LazyStream, LazyStream, ThreadStream]),
        placement=st.sampled_from([None, "whole_prompt", "prompt_end+branch+whole_prompt"]),
        eviction=st.sampled_from(["lru", "lru", "value", "lru_cap_per_path(2)"]),
    )
    def start(
        self,
        stride,
        block_size,
        every,
        max_num_seqs,
        extra_slots,
        num_blocks,
        budget,
        restore,
        caching,
        drafts,
        period,
        stream,
        placement,
        eviction,
    ):
        """stream: of overlapping steps; None: they don't overlap."""
        drafts = 0 if self.graphs else drafts
        self.model = self.model_type()
        self.model.guesses_right = lambda position: position % period != 0 or period == 1
        config = EngineConfig(
            chunk_stride=stride,
            block_size=block_size,
            checkpoint_every=every * stride,
            max_num_seqs=max_num_seqs,
            num_slots=max_num_seqs * (drafts + 2 if drafts else 1) + 1 + extra_slots,
            num_speculative_tokens=drafts,
            num_blocks=num_blocks if block_size == 16 else num_blocks // 4,
            max_num_batched_tokens=budget,
            restore=restore,
            enable_prefix_caching=caching,
            overlap=stream is not None,
            cuda_graphs=self.graphs,
            max_model_len=600 if self.graphs else None,
            placement=placement,
            eviction=eviction,
        )
        self.begin(config, stream)

    def begin(self, config: EngineConfig, stream) -> None:
        self.llm = LLM.from_model(self.model, config)
        if config.overlaps and stream is not None:
            self.llm.worker.stream = stream()
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.stops: dict[str, tuple[int, ...]] = {}
        self.first_token_by_key: dict[bytes, int] = {}
        self.states_by_key: dict[bytes, list[int]] = {}
        self.rows_by_key: dict[bytes, list[int]] = {}
        self.before_issue: Callable[[Batch], None] | None = None
        self.may_fail = False
        schedule = self.llm.scheduler.schedule

        def schedule_with_hook() -> Batch | None:
            batch = schedule()
            if batch is not None and self.before_issue is not None:
                hook, self.before_issue = self.before_issue, None
                hook(batch)
            return batch

        self.llm.scheduler.schedule = schedule_with_hook  # type: ignore[method-assign]
        self.started()

    def started(self):
        """For machines that change more."""

    # ---- rules

    @rule(
        base=st.integers(0, 2),
        shared=st.integers(0, 330),
        suffix=st.lists(st.integers(0, 250), min_size=1, max_size=70),
        max_tokens=st.integers(1, 9),
        stop_at=st.sampled_from([None, None, 1, 2, 3, 5]),
        salt=st.sampled_from(SALTS),
        exact=st.booleans(),
        background=st.sampled_from([False, False, True]),
    )
    def add(self, base, shared, suffix, max_tokens, stop_at, salt, exact, background):
        """stop_at: the answer's token of this number ends it, wherever it comes."""
        prompt = BASES[base][:shared] + suffix
        with suppress(ValueError):  # longer than this pool can ever hold
            stop = () if stop_at is None else (expected_output(prompt, stop_at)[-1],)
            params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=stop)
            points = [shared, len(prompt)] if background else [shared]
            self._add(prompt, params, salt, exact=exact, background=background, save_points=points)

    @rule(suffix=st.lists(st.integers(0, 250), min_size=1, max_size=5))
    def add_the_longest_again(self, suffix):
        """Multi-turn: an earlier prompt continued."""
        if self.prompts:
            longest = max((p for p, _ in self.prompts.values()), key=len)
            with suppress(ValueError):
                params = SamplingParams(temperature=0, max_tokens=3)
                prompt = longest[:400] + suffix
                self._add(prompt, params, "")

    @rule(
        base=st.integers(0, 2),
        length=st.sampled_from([1, 40, 63, 64, 65, 128, 200, 256, 300]),
        salt=st.sampled_from(SALTS),
        exact=st.booleans(),
        more=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=3),
        steps=st.integers(0, 4),
    )
    def regenerate(self, base, length, salt, exact, more, steps):
        """A whole prompt comes back, once it was answered: (tokens, exact) for each time."""
        name = f"r{len(self.prompts)}"
        for tokens, is_exact in [(2, exact), *more]:
            while name in self.llm._requests:
                self._step()
            params = SamplingParams(temperature=0, max_tokens=tokens)
            with suppress(ValueError):
                self._add(BASES[base][:length], params, salt, exact=is_exact)
        for _ in range(steps):
            self._step()

    @rule(suffix=st.lists(st.integers(0, 250), min_size=1, max_size=70), tokens=st.integers(1, 90))
    def add_an_answer_continued(self, suffix, tokens):
        """The next turn: an earlier prompt, its answer and more."""
        if self.prompts:
            prompt, _ = max(self.prompts.values(), key=lambda item: item[1])
            with suppress(ValueError):
                params = SamplingParams(temperature=0, max_tokens=tokens)
                said = prompt[:300] + expected_output(prompt[:300], 70)
                self._add(said + suffix, params, "", exact=False)

    @rule(times=st.integers(1, 5))
    def step(self, times):
        for _ in range(times):
            self._step()

    @precondition(lambda self: self.llm.has_unfinished())
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.llm._requests)))
        output = self.llm.abort(request_id)
        assert output is not None and output.finish_reason == "abort"

    @precondition(lambda self: self.llm.has_unfinished())
    @rule(data=st.data())
    def abort_between_schedule_and_forward(self, data):
        def abort_some(batch: Batch) -> None:
            ids = sorted(row.seq.request_id for row in batch.rows)
            for request_id in data.draw(st.lists(st.sampled_from(ids), min_size=1, unique=True)):
                self.llm.abort(request_id)

        self.before_issue = abort_some
        self._step()

    @precondition(lambda self: self.llm.has_unfinished())
    @rule(finished_rows=st.integers(0, 3))
    def fail_a_forward(self, finished_rows):
        self.model.fail_after, self.may_fail = finished_rows, True
        self._step()
        self._drain()
        self.model.fail_after = None

    @precondition(lambda self: self.llm.has_unfinished())
    @rule(data=st.data(), source=st.sampled_from([NO_SLOT, 0, 10_000]))
    def lose_a_restore_source(self, data, source):
        def lose(batch: Batch) -> None:
            restored = [row for row in batch.rows if row.op.restore_requested]
            if restored:
                row = data.draw(st.sampled_from(restored))
                op = LinearStateCacheOp(row.op.linear_state_id, True, source, row.op.boundary)
                lost = replace(row, op=op)
                batch.rows[batch.rows.index(row)] = lost

        self.before_issue = lose
        self._step()

    @precondition(lambda self: self.llm.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data):
        self.llm.scheduler._preempt(data.draw(st.sampled_from(self.llm.scheduler.running)))

    @rule(of_blocks=st.booleans(), count=st.integers(1, 6))
    def evict(self, of_blocks, count):
        pool = self.llm.manager.kv.pool if of_blocks else self.llm.manager.linear.pool
        taken = [pool.allocate() for _ in range(min(pool.num_available, pool.num_free + count))]
        for id_ in taken:
            pool.release(id_)

    @rule()
    def poison_whatever_is_free(self):
        slots, blocks = self.llm.manager.linear.pool, self.llm.manager.kv.pool
        for pool, memory in (
            (slots, self.llm.worker.state_pool.arena),
            (blocks, self.llm.worker.kv_cache),
        ):
            free = [0] + [
                i
                for i in range(1, pool.num_ids)
                if pool.ref_count(i) == 0 and not pool.is_published(i)
            ]
            self.llm.worker.stream.submit(partial(memory.__setitem__, free, 255))

    def no_id_is_lost(self) -> None:
        for pool in (self.llm.manager.kv.pool, self.llm.manager.linear.pool):
            assert pool.num_free + pool.num_evictable + pool.num_in_use == pool.num_ids - 1

    # ---- what must always hold

    @invariant()
    def bookkeeping_is_whole(self):
        if not hasattr(self, "llm"):
            return
        self.llm.scheduler.check()
        self.no_id_is_lost()
        stats = self.llm.stats()
        assert 0 <= stats.hits <= stats.queries
        assert stats.hits + sum(stats.misses.values()) == stats.queries

    @invariant()
    def every_checkpoint_is_the_true_state_of_its_key(self):
        if not hasattr(self, "llm") or self._failure_is_to_come():
            return
        index = self.llm.manager.linear.cache._index
        for slot in index.ids():
            words = load(self.llm.worker.state_pool, slot).words()
            key = index.key_of(slot)
            assert words == self.states_by_key[key]
            kept = index.find(key)[1].logits
            assert (kept is None) == (key not in self.first_token_by_key)
            if kept is not None:
                first = self.first_token_by_key[key]
                assert kept.likeliest == int(kept.logits.argmax()) == first

    @invariant()
    def every_published_block_holds_the_rows_of_its_key(self):
        if not hasattr(self, "llm") or self._failure_is_to_come():
            return
        index = self.llm.manager.kv._index
        for block in index.ids():
            wanted = self.rows_by_key[index.key_of(block)]
            rows = self.llm.worker.kv_cache[block].tolist()
            assert rows[: len(wanted)] == wanted  # the last block of a whole prompt has fewer

    def teardown(self):
        if not hasattr(self, "llm"):
            return
        steps = 0
        while self.llm.has_unfinished():
            self._step()
            steps += 1
            assert steps < 5_000, "no progress"
        self.bookkeeping_is_whole()
        stats = self.llm.stats()
        assert 0 <= stats.tokens_accepted <= stats.tokens_drafted
        for what in (
            "tokens_drafted",
            "tokens_accepted",
            "hits",
            "cold_starts",
            "preemptions",
            "saves",
            "state_evictions",
        ):
            if getattr(stats, what):
                event(what)
        for reason in (*stats.misses, *(f"skip {r}" for r in stats.saves_skipped)):
            event(reason)
        assert stats.blocks_in_use == stats.slots_live == 0
        linear = self.llm.manager.linear
        assert linear.pool.num_in_use == len(linear.scratch) == linear.num_scratch
        assert not self.llm._requests

    def _add(self, prompt: list[int], params: SamplingParams, salt: str, **options) -> None:
        request_id = f"r{len(self.prompts)}"
        self.llm.add_request(prompt, params, request_id=request_id, cache_salt=salt, **options)
        self.prompts[request_id] = (prompt, params.max_tokens)
        self.stops[request_id] = params.stop_token_ids
        self._remember(prompt + expected_output(prompt, params.max_tokens), salt)
        self._remember_whole(prompt, salt)

    def _remember_whole(self, prompt: list[int], salt: str) -> None:
        """The true content of the keys of a whole prompt."""
        namespace = Namespace(self.model.config.fingerprint, "", salt)
        linear, kv = self.llm.manager.linear.domain, self.llm.manager.kv
        whole = CachedSequence(prompt, namespace=namespace).whole_key(linear)
        state, values = State(), []
        for token in prompt:
            state.advance(token)
            values.append(state.value)
        rest = values[len(prompt) // kv.chunk_stride * kv.chunk_stride :]
        for how in Provenance:
            key = filed_under(whole, how)
            self.states_by_key[key] = state.words()
            self.first_token_by_key[key] = expected_output(prompt, 1)[0]
            for i, first in enumerate(range(0, len(rest), kv.block_size)):
                rows = rest[first : first + kv.block_size]
                self.rows_by_key[tail_key(key, i)] = rows

    def _remember(self, prompt: list[int], salt: str) -> None:
        """The true content of every key that these tokens can publish."""
        namespace = Namespace(self.model.config.fingerprint, "", salt)
        twin = CachedSequence(prompt, namespace=namespace)
        kv, linear = self.llm.manager.kv.domain, self.llm.manager.linear.domain
        twin.update_block_hashes(kv)
        twin.update_linear_state_hashes(linear)
        state = State()
        values, words = [], []
        for token in prompt:
            state.advance(token)
            values.append(state.value)
            words.append(state.words())
        for how in Provenance:
            for i, key in enumerate(twin.linear_state_hashes):
                self.states_by_key[filed_under(key, how)] = words[(i + 1) * linear.step - 1]
            for i, key in enumerate(twin.block_hashes):
                rows = values[i * kv.step : (i + 1) * kv.step]
                self.rows_by_key[filed_under(key, how)] = rows

    def _step(self) -> None:
        """One step; a failure of the forward may come out of a later one."""
        try:
            outputs = self.llm.step()
        except RuntimeError as error:
            assert self.may_fail and str(error) == "the device is gone"
            assert self.llm.failed_request_ids
        else:
            self._take(outputs)

    def _drain(self) -> None:
        """What was issued is in the slots and blocks after this."""
        self.llm.worker.stream.submit(lambda: None).result()

    def _failure_is_to_come(self) -> bool:
        """Whether the last step failed and nobody was told: its keys are to be withdrawn."""
        self._drain()
        unread = self.llm._loop._unread
        return unread is not None and unread._result.exception() is not None

    def _take(self, outputs) -> None:
        for output in outputs:
            prompt, max_tokens = self.prompts[output.request_id]
            want = expected_output(prompt, max_tokens)
            stops = [i for i, token in enumerate(want) if token in self.stops[output.request_id]]
            want = want[: stops[0] + 1] if stops else want
            assert output.token_ids == want[: len(output.token_ids)]
            if output.finish_reason != "abort" and output.finished:
                assert output.token_ids == want
                assert output.finish_reason == ("stop" if stops else "length")
            if output.boundary == len(prompt):
                event("whole prompts")


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
