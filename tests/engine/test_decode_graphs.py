"""Decode steps from graphs: what eager steps give, whatever was in the buffers before."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from engine import LLM, EngineConfig, SamplingParams
from engine.batch import ModelInputs, StateSlots
from engine.decode_graphs import DecodeGraphs, graph_sizes
from kernels.ids import BlockTables, Ids
from tests.engine.test_integer_oracle import EngineMachine
from tests.oracle import VOCAB, OracleModel, State, expected_output, store
from tests.tensor_oracle import TensorOracleModel

NUM_SLOTS, NUM_BLOCKS, BLOCK_SIZE, LONGEST = 14, 20, 4, 16
NONE, NO_TABLES = Ids([]), BlockTables([])


def test_sizes_are_few_and_end_with_the_most():
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(8) == [1, 2, 4, 8]
    assert graph_sizes(9) == [1, 2, 4, 8, 9]
    assert graph_sizes(26) == [1, 2, 4, 8, 16, 24, 26]
    assert graph_sizes(64)[-3:] == [48, 56, 64]


# ---- one pool run eagerly, its twin from graphs


def step(rows, *, logit_rows=None, **changed):
    """Inputs of a decode step. A row is (slot to read, slot to write, first block, K/V length)."""
    reads, writes, lengths = ([row[i] for row in rows] for i in (0, 1, 3))
    tables = [range(first, first + -(-n // BLOCK_SIZE)) for _, _, first, n in rows]
    places = [first * BLOCK_SIZE + n - 1 for _, _, first, n in rows]
    wanted = range(len(rows)) if logit_rows is None else logit_rows
    fields = dict(
        token_ids=Ids([(7 * n + slot) % VOCAB for slot, _, _, n in rows]).tensor,
        positions=Ids([n - 1 for n in lengths]).tensor,
        kv_indices=Ids(places),
        logit_rows=Ids(wanted).tensor,
        cu_seqlens=Ids([0]),
        start_positions=NONE,
        prefill_block_tables=NO_TABLES,
        prefill_slots=StateSlots(NONE, NONE),
        snapshot_slots=NONE,
        kv_lens=Ids(lengths),
        decode_block_tables=BlockTables(tables),
        decode_slots=StateSlots(Ids(reads), Ids(writes)),
    )
    return ModelInputs(**(fields | changed))


# Row i has slots 2 i + 1 (read at first) and 2 i + 2 (written), and blocks of its own.
FIRST_BLOCKS = [1, 5, 9, 13, 17]
LENGTHS = [9, 16, 5, 13, 7]
ROWS = st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True)


def rows_of(which, *, moved=True):
    return [
        (2 * i + 1, 2 * i + 2 if moved else 2 * i + 1, FIRST_BLOCKS[i], LENGTHS[i]) for i in which
    ]


class Twins:
    """The same pools twice; what no row of `rows_of` owns is bytes of 255 (NaN, -1)."""

    def __init__(self, sizes=(1, 2, 4), model=TensorOracleModel):
        self.model = model()
        self.eager, self.graphed = (
            self.model.make_pools(NUM_SLOTS, NUM_BLOCKS, BLOCK_SIZE) for _ in range(2)
        )
        self.graphs = DecodeGraphs(
            lambda inputs: self.model.forward(inputs, *self.graphed),
            sizes=sizes,
            vocab_size=VOCAB,
            max_model_len=LONGEST,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            num_slots=NUM_SLOTS,
        )
        self.at_start = self.model.num_forwards
        for pool, kv_cache in (self.eager, self.graphed):
            pool.arena.fill_(255)
            kv_cache.fill_(-1)
            for i, (first, length) in enumerate(zip(FIRST_BLOCKS, LENGTHS, strict=True)):
                store(pool, 2 * i + 1, State(1000 + i, length - 1, (i, i + 1, i + 2)))
                flat = kv_cache.view(-1)
                rows = range(first * BLOCK_SIZE, first * BLOCK_SIZE + length - 1)
                flat[list(rows)] = torch.tensor([100 * i + r for r in rows])

    def check(self, inputs):
        """Logits, all slots and all blocks but the padding block are those of an eager step."""
        expected = self.model.forward(inputs, *self.eager)
        logits = self.graphs.run(inputs)
        assert torch.equal(logits, expected)
        assert torch.equal(self.graphed[0].arena, self.eager[0].arena)
        assert torch.equal(self.graphed[1][1:], self.eager[1][1:])
        return logits


@pytest.mark.parametrize("moved", [False, True])
def test_fewer_rows_than_before_leave_all_else_as_it_is(moved):
    """trap 17: the whole pool after each replay, batch sizes falling and rising."""
    twins = Twins()
    for which in ([0, 1, 2, 3], [2], [3, 0, 1], [1, 4], [4, 3, 2, 1], [0, 1, 2], [4]):
        twins.check(step(rows_of(which, moved=moved)))
    assert twins.graphs.num_replays == 7


@settings(max_examples=25, deadline=None)
@given(st.lists(ROWS, min_size=2, max_size=8), st.booleans())
def test_no_step_follows_the_ids_of_an_earlier_one(steps, moved):
    """trap 17, at random."""
    twins = Twins(sizes=(2, 4))
    for which in steps:
        twins.check(step(rows_of(which, moved=moved)))


def test_shorter_tables_leave_no_block_of_a_longer_one():
    """trap 17, in the columns: every buffer is written in full."""
    twins = Twins(sizes=(2,))
    twins.check(step(rows_of([1, 3])))
    assert twins.graphs._tables.tolist() == [[5, 6, 7, 8], [13, 14, 15, 16]]
    twins.check(step(rows_of([2])))
    assert twins.graphs._tables.tolist() == [[9, 10, 0, 0], [0, 0, 0, 0]]
    assert twins.graphs._ids[:, 1].tolist() == [0, 0, 0, 1, 0, 0]


def test_padding_rows_touch_nothing_but_the_first_row_of_the_padding_block():
    """trap 18: everything unowned is NaN, slot 0 too, and stays so to the byte."""
    twins = Twins(sizes=(4,))
    before = twins.graphed[0].arena.clone(), twins.graphed[1].clone()
    twins.check(step(rows_of([2])))
    pool, kv_cache = twins.graphed
    changed = (pool.arena != before[0]).any(1).nonzero().flatten().tolist()
    assert changed == [6]  # the slot that row 2 writes
    places = (kv_cache != before[1]).nonzero().tolist()
    last = (LENGTHS[2] - 1) // BLOCK_SIZE + FIRST_BLOCKS[2], (LENGTHS[2] - 1) % BLOCK_SIZE
    assert places == [[0, 0], list(last)]


def test_capturing_runs_padding_alone():
    """trap 18: pools in use are not harmed."""
    model = TensorOracleModel()
    pool, kv_cache = model.make_pools(NUM_SLOTS, NUM_BLOCKS, BLOCK_SIZE)
    pool.arena.fill_(255)
    before = kv_cache.clone()
    DecodeGraphs(
        lambda inputs: model.forward(inputs, pool, kv_cache),
        sizes=[3],
        vocab_size=VOCAB,
        max_model_len=LONGEST,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        num_slots=NUM_SLOTS,
    )
    assert (pool.arena == 255).all()
    assert (kv_cache != before).nonzero().tolist() == [[0, 0]]


def test_each_size_is_captured_once_and_python_runs_no_more():
    twins = Twins(sizes=(4, 1, 2, 2))
    assert twins.graphs.num_captures == 3 == twins.at_start and twins.graphs.sizes == [1, 2, 4]
    for which in ([0, 1, 2], [0], [1, 2], [0, 1, 2, 3]):
        twins.graphs.run(step(rows_of(which)))
    assert twins.graphs.num_captures == 3 == twins.model.num_forwards
    assert twins.graphs.num_replays == 4


def test_ops_are_launched_for_the_longest_rows_and_read_nothing_but_what_is_kept():
    """Grids and tables of max_model_len; offsets of the graph's own, which no cache can drop."""
    graphs = Twins().graphs
    for size, (_, inputs) in graphs._captured.items():
        assert inputs.kv_lens.host == (LONGEST,) * size
        assert inputs.decode_block_tables.tensor.shape == (size, LONGEST // BLOCK_SIZE)
        assert inputs.decode_cu_seqlens.tolist() == list(range(size + 1))
        assert inputs.decode_slots.read.tensor.data_ptr() != (
            inputs.decode_slots.write.tensor.data_ptr()
        )


def test_graphs_are_captured_from_the_largest_down():
    sizes = []

    class Noting(TensorOracleModel):
        def forward(self, inputs, pool, kv_cache):
            sizes.append(inputs.num_decodes)
            return super().forward(inputs, pool, kv_cache)

    Twins(sizes=(1, 4, 2), model=Noting)
    assert sizes == [4, 2, 1]


def test_the_smallest_graph_that_holds_the_rows_is_replayed():
    twins = Twins()
    replayed = []
    for size, (graph, _) in twins.graphs._captured.items():

        def replay(size=size, replay=graph.replay):
            replayed.append(size)
            replay()

        graph.replay = replay
    for n in (1, 2, 3, 4):
        twins.check(step(rows_of(range(n))))
    assert replayed == [1, 2, 4, 4]


def test_logits_are_of_the_rows_that_were_asked_for_and_stay_as_they_are():
    twins = Twins()
    logits = twins.check(step(rows_of([0, 1, 2]), logit_rows=[0, 2]))
    kept = logits.clone()
    assert twins.check(step(rows_of([3, 4, 1, 0], moved=False), logit_rows=[])).shape == (0, VOCAB)
    assert len(twins.check(step(rows_of([4, 2])))) == 2
    assert torch.equal(logits, kept)


# ---- what no graph takes


def test_other_steps_are_left_to_the_eager_path():
    twins = Twins()
    takes = twins.graphs.takes
    assert all(takes(step(rows_of(range(n)))) for n in (1, 4))
    others = {
        "too many": step(rows_of(range(5))),
        "none": step([]),
        "a prefill": step(rows_of([0]), cu_seqlens=Ids([0, 1]), start_positions=Ids([0])),
        "drafts": step(rows_of([0]), decode_cu_seqlens=Ids([0, 1])),
        "hidden rows": step(rows_of([0]), hidden=object()),
    }
    for name, inputs in others.items():
        assert not takes(inputs), name
        with pytest.raises(ValueError, match="a step: expected rows that a graph takes"):
            twins.graphs.run(inputs)
    assert twins.graphs.num_replays == 0


WRONG = {
    "two writers": (step([(1, 2, 1, 5), (3, 2, 5, 5)]), "writers of slot 2"),
    "a slot that another row reads": (step([(1, 2, 1, 5), (2, 3, 5, 5)]), "writer of slot 2"),
    "the padding slot is read": (step([(0, 2, 1, 5)]), "read slot of row 0"),
    "a slot beyond the pool": (step([(1, NUM_SLOTS, 1, 5)]), "write slot of row 0"),
    "one K/V row for two": (step([(1, 2, 1, 5), (3, 4, 1, 5)]), "K/V index: expected used once"),
    "a block beyond the cache": (step([(1, 2, 19, 5)]), "K/V index|block of row 0"),
    "a table that is too short": (
        step(rows_of([0]), decode_block_tables=BlockTables([[1, 2]])),
        "blocks of row 0: expected at least 3, got 2",
    ),
    "a block of the table beyond the cache": (
        step(rows_of([0]), decode_block_tables=BlockTables([[1, 2, NUM_BLOCKS]])),
        "block of row 0",
    ),
    "no K/V": (step(rows_of([0]), kv_lens=Ids([0])), "K/V length of row 0"),
    "longer than captured": (
        step([(1, 2, 1, LONGEST + 1)]),
        "longest K/V: expected at most max_model_len=16, got 17",
    ),
    "a token too few": (
        step(rows_of([0, 1]), token_ids=Ids([1]).tensor),
        "number of tokens: expected one a row, got 1",
    ),
    "a position too many": (
        step(rows_of([0]), positions=Ids([1, 2]).tensor),
        "number of positions: expected one a row, got 2",
    ),
    "a K/V index too many": (
        step(rows_of([0]), kv_indices=Ids([5, 6])),
        "number of K/V indices: expected 1, got 2",
    ),
    "a slot too few": (
        step(rows_of([0, 1]), decode_slots=StateSlots(Ids([1, 3]), Ids([2]))),
        "number of write slots",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_ids_that_an_eager_step_refuses_never_reach_a_buffer(name):
    inputs, message = WRONG[name]
    twins = Twins()
    twins.check(step(rows_of([3, 2])))
    buffers = twins.graphs._ids.clone(), twins.graphs._tables.clone()
    arena = twins.graphed[0].arena.clone()
    with pytest.raises(ValueError, match=message):
        twins.graphs.run(inputs)
    assert torch.equal(twins.graphs._ids, buffers[0])
    assert torch.equal(twins.graphs._tables, buffers[1])
    assert torch.equal(twins.graphed[0].arena, arena) and twins.graphs.num_replays == 1


def test_tables_may_have_blocks_beyond_the_longest_answer():
    """Blocks that a row does not need yet are not looked at, eagerly or replayed."""
    twins = Twins()
    twins.check(step(rows_of([0]), decode_block_tables=BlockTables([[1, 2, 3, 4, 5, 6]])))
    assert twins.graphs._tables[0].tolist() == [1, 2, 3, 4]


def test_rows_of_a_model_without_recurrent_layers_read_and_write_no_slot():
    def forward(inputs):
        return inputs.kv_lens.tensor[:, None].float() + inputs.positions[:, None]

    graphs = DecodeGraphs(
        forward,
        sizes=[3],
        vocab_size=1,
        max_model_len=LONGEST,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        num_slots=2,
    )
    inputs = step([(-1, 0, 1, 5), (-1, 0, 5, 9)])
    assert graphs.run(inputs).tolist() == [[9.0], [17.0]]


# ---- the whole engine

PROMPTS = [[3, 4, 5] * 30, [7] * 10, [9, 8], [1] * 100, [2, 6] * 40]


def engine(**config):
    config = {"max_num_seqs": 3, "num_slots": 20, "num_blocks": 60, "block_size": 16} | config
    model = TensorOracleModel()
    return LLM.from_model(model, EngineConfig(**({"max_model_len": 160} | config)))


def test_an_engine_with_graphs_gives_the_tokens_of_one_without():
    eager, graphed = engine(), engine(cuda_graphs=True)
    lengths = [20, 9, 15, 4, 12]
    greedy = [SamplingParams(temperature=0, max_tokens=n) for n in lengths]
    outputs = [llm.generate(PROMPTS, greedy) for llm in (eager, graphed)]
    for prompt, n, one, other in zip(PROMPTS, lengths, *outputs, strict=True):
        assert one.token_ids == other.token_ids == expected_output(prompt, n)
    assert eager.stats().decodes_replayed == 0 < eager.stats().decodes_eager
    stats = graphed.stats()
    assert stats.decodes_replayed > 20 and stats.decodes_eager > 0  # those beside a prefill
    assert stats.decodes_replayed + stats.decodes_eager == eager.stats().decodes_eager
    assert graphed.worker.graphs.sizes == [1, 2, 3] and graphed.worker.graphs.num_captures == 3


def test_drawn_tokens_and_returned_logits_are_those_of_eager_steps():
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=9, return_logits=True, logprobs=2)
    outputs = [llm.generate(PROMPTS, drawn) for llm in (engine(), engine(cuda_graphs=True))]
    for one, other in zip(*outputs, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))


def test_a_model_whose_ops_read_ids_on_the_host_is_refused_at_start():
    with pytest.raises(
        ValueError, match=r"cuda_graphs=True: .*kernels='auto' on device='cpu'.*use"
    ):
        LLM.from_model(OracleModel(), EngineConfig(cuda_graphs=True))


class GraphMachine(EngineMachine):
    """All that can happen to an engine, its decode steps replayed. A replay that fails has written
    its rows before."""

    model_type = TensorOracleModel
    graphs = True

    def started(self):
        graphs = self.llm.worker.graphs
        run = graphs.run

        def run_or_fail(inputs):
            logits = run(inputs)
            if self.model.fail_after is not None:
                raise RuntimeError("the device is gone")
            return logits

        graphs.run = run_or_fail

    @invariant()
    def nothing_is_captured_again(self):
        if hasattr(self, "llm"):
            graphs = self.llm.worker.graphs
            assert graphs.num_captures == len(graphs.sizes)


TestGraphMachine = GraphMachine.TestCase
TestGraphMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
