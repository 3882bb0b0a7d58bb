"""Decode steps of a real tiny model on interpreted Triton kernels, recorded and replayed: the bits
of eager steps in logits, in every slot and in every block."""

from dataclasses import replace

import pytest
import torch

from engine import LLM, EngineConfig
from engine.batch import ModelInputs, StateSlots
from engine.decode_graphs import DecodeGraphs
from engine.model import Qwen35Model
from engine.model_config import ModelConfig
from engine.weights import read_weights
from experiments.make_model import make_model
from kernels import attention_decode, ops_for, torch_ops
from kernels.ids import BlockTables, Ids
from kernels.packs import one_token_each
from kernels.recorded_graph import RecordedGraph
from tests.interpreter.test_engine import GREEDY, SHAPE, SHARED, logits, prompt

NUM_SLOTS, BLOCK_SIZE, BLOCKS_EACH, LONGEST = 12, 16, 4, 64
NUM_BLOCKS = 1 + 5 * BLOCKS_EACH
VOCAB = SHAPE["vocab_size"]
NONE, NO_TABLES = Ids([]), BlockTables([])

pytestmark = pytest.mark.usefixtures("rows_of_a_tile_alike")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    out = tmp_path_factory.mktemp("model") / "tiny"
    return make_model(out, like="tiny", layers=3, seed=5, overrides=SHAPE)


@pytest.fixture(scope="module")
def models(directory):
    config = ModelConfig.from_directory(directory)
    return {
        matmul: Qwen35Model(
            config,
            read_weights(directory, config),
            dtype=torch.float32,
            ops=ops_for("cpu", implementation="triton", matmul=matmul),
        )
        for matmul in ("invariant", "library")
    }


def random_(x, seed):
    return x.normal_(generator=torch.Generator().manual_seed(seed))


class Twins:
    """Equal pools: one is run eagerly, the other from graphs. Row i has blocks of its own, reads
    slot 2 i + 1 or 2 i + 2 and has K/V of `lengths[i]`, this step's row included; all else is NaN.
    """

    def __init__(self, model, lengths, sizes=(1, 2, 4)):
        self.model, self.lengths = model, list(lengths)
        self.eager, self.graphed = (
            model.make_pools(NUM_SLOTS, NUM_BLOCKS, BLOCK_SIZE) for _ in range(2)
        )
        self.graphs = DecodeGraphs(
            lambda inputs: model.forward(inputs, *self.graphed),
            sizes=sizes,
            vocab_size=VOCAB,
            max_model_len=LONGEST,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            num_slots=NUM_SLOTS,
        )
        self.slots = [2 * i + 1 for i in range(len(lengths))]
        for pool, kv_cache in (self.eager, self.graphed):
            pool.arena.fill_(255)
            kv_cache.fill_(torch.nan)
            for i, n in enumerate(lengths):
                random_(pool.states[self.slots[i]], i)
                random_(pool.windows[self.slots[i]], i)
                rows = kv_cache[:, :, self._blocks(i)].flatten(2, 3)
                random_(rows[:, :, : n - 1], i)
                kv_cache[:, :, self._blocks(i)] = rows.unflatten(2, (BLOCKS_EACH, BLOCK_SIZE))

    def _blocks(self, i):
        return slice(1 + i * BLOCKS_EACH, 1 + (i + 1) * BLOCKS_EACH)

    def inputs(self, which, moving):
        """The next token of these rows; those of `moving` write their other slot."""
        reads = [self.slots[i] for i in which]
        for i in moving:
            self.slots[i] += 1 if self.slots[i] % 2 else -1
        lengths = [self.lengths[i] for i in which]
        tables = [
            range(self._blocks(i).start, self._blocks(i).start + -(-self.lengths[i] // BLOCK_SIZE))
            for i in which
        ]
        for i in which:
            self.lengths[i] += 1
        return ModelInputs(
            token_ids=Ids([(3 * n + i) % 256 for i, n in zip(which, lengths, strict=True)]).tensor,
            positions=Ids([n - 1 for n in lengths]).tensor,
            kv_indices=Ids(
                [t[0] * BLOCK_SIZE + n - 1 for t, n in zip(tables, lengths, strict=True)]
            ),
            logit_rows=Ids(range(len(which))).tensor,
            cu_seqlens=Ids([0]),
            start_positions=NONE,
            prefill_block_tables=NO_TABLES,
            prefill_slots=StateSlots(NONE, NONE),
            snapshot_slots=NONE,
            kv_lens=Ids(lengths),
            decode_block_tables=BlockTables(tables),
            decode_slots=StateSlots(Ids(reads), Ids([self.slots[i] for i in which])),
        )

    def step(self, which, moving=()):
        inputs = self.inputs(which, moving)
        before = self.graphed[0].arena.clone()
        with torch.inference_mode():
            expected = self.model.forward(inputs, *self.eager)
            found = self.graphs.run(inputs)
        assert expected.isfinite().all() and torch.equal(found, expected)
        assert torch.equal(self.graphed[0].arena, self.eager[0].arena)
        assert torch.equal(before[0], self.graphed[0].arena[0])
        ours, theirs = (kv.view(torch.int32) for _, kv in (self.graphed, self.eager))
        assert torch.equal(ours[:, :, 1:], theirs[:, :, 1:])
        padding = self.graphed[1][:, :, 0]
        assert padding[:, :, 1:].isnan().all()


def test_every_number_of_rows_falling_and_rising_has_the_bits_of_eager_steps(models):
    """traps 17 and 18: all slots and blocks, NaN wherever nobody owns them, after each replay."""
    twins = Twins(models["invariant"], [9, 40, 17, 33, 16])
    twins.step([0, 1, 2, 3])
    twins.step([4], moving=[4])  # rotated after a save, or redirected: read here, written there
    twins.step([3, 0, 2], moving=[0, 2])
    twins.step([1, 4])
    twins.step([4, 2, 1, 0], moving=[1])
    assert twins.graphs.num_captures == 3 and twins.graphs.num_replays == 5
    assert not twins.graphs.takes(twins.inputs([0, 1, 2, 3, 4], []))


def test_lengths_on_both_sides_of_a_longer_part_fit_the_grid_of_the_longest(models, monkeypatch):
    """Just above MOST_PARTS * SPLIT rows a sequence has fewer parts than below it."""
    monkeypatch.setattr(attention_decode, "SPLIT", 16)
    monkeypatch.setattr(attention_decode, "MOST_PARTS", 3)
    twins = Twins(models["invariant"], [1, 48, 47, 33, 63], sizes=(3,))
    twins.step([0, 1, 2])
    twins.step([1, 4])  # 49 and 63 rows: two parts of 32
    twins.step([2])  # 48 rows: three parts of 16
    assert twins.graphs.num_replays == 3, "each was compared with an eager step"


def test_nothing_that_a_graph_reads_is_kept_in_a_cache_alone(models):
    """Offsets of single rows are cached; a graph must not follow one that was dropped."""
    misses = one_token_each.cache_info().misses
    twins = Twins(models["invariant"], [9, 10, 11, 12, 13], sizes=(3,))
    assert one_token_each.cache_info().misses == misses
    twins.graphs.run(twins.inputs([0], []))
    assert one_token_each.cache_info().misses == misses


def test_the_ops_of_the_cpu_path_are_refused_by_the_recorder():
    """They read ids on the host, where a replay would find those of the recorded run."""
    q, cache = torch.zeros(1, 2, 16), torch.zeros(2, 3, 16, 1, 16)
    lens, tables = Ids.of_buffer(torch.ones(1, dtype=torch.int64), [9]), BlockTables([[1]])
    for ops, refused in ((ops_for("cpu", implementation="triton"), False), (torch_ops, True)):

        def run(ops=ops):
            return ops.attention_decode(q, q, *cache, kv_lens=lens, block_tables=tables)

        if refused:
            with pytest.raises(RuntimeError, match="a graph can't hold"):
                RecordedGraph(run)
        else:
            RecordedGraph(run).replay()


# ---- the whole engine


def engine(model, **config):
    config = {"memory_budget_bytes": 4 << 20, "max_num_seqs": 3, "checkpoint_every": 64} | config
    llm = LLM.from_model(model, EngineConfig(kernels="triton", max_model_len=192, **config))
    llm.worker.state_pool.arena.fill_(255)  # NaN wherever nothing was written
    llm.worker.kv_cache.fill_(torch.nan)
    return llm


TEXT = SHARED[:66]
PROMPTS = [TEXT + prompt(5, 2), TEXT, TEXT + prompt(2, 3)]
PARAMS = [replace(GREEDY, max_tokens=n) for n in (2, 4, 3)]


@pytest.fixture(scope="module")
def cold_runs():
    return []


@pytest.fixture
def cold(models, cold_runs):
    """Outputs of the prompts without caching and graphs, each alone."""
    if not cold_runs:
        llm = engine(models["invariant"], enable_prefix_caching=False)
        for tokens, params in zip(PROMPTS, PARAMS, strict=True):
            cold_runs += llm.generate([tokens], params)
    return cold_runs


@pytest.mark.parametrize("restore", ["redirect", "copy"])
def test_hits_decoded_from_graphs_change_no_bit_of_any_logit(models, cold, restore):
    llm = engine(models["invariant"], restore=restore, cuda_graphs=True)
    llm.generate([TEXT], replace(GREEDY, max_tokens=1))
    outputs = llm.generate(PROMPTS, PARAMS)
    for output, expected in zip(outputs, cold, strict=True):
        assert output.num_cached_tokens == 64
        assert output.token_ids == expected.token_ids
        assert torch.equal(logits(output), logits(expected))
    assert llm.stats().decodes_replayed == 3 and llm.stats().decodes_eager == 0
    assert llm.worker.graphs.num_captures == 3
    assert llm.worker.state_pool.arena[0].eq(255).all()


def test_the_library_matmul_is_captured_too(models):
    """Its bits may be others, so only tokens are compared."""
    llm = engine(models["library"], cuda_graphs=True)
    [output] = llm.generate([SHARED[:70]], GREEDY)
    [expected] = engine(models["invariant"]).generate([SHARED[:70]], GREEDY)
    assert output.token_ids == expected.token_ids and llm.stats().decodes_replayed == 1


def test_settings_ask_for_graphs_and_kernels_that_have_none_are_refused(directory):
    settings = dict(memory_budget_bytes=4 << 20, max_num_seqs=1, max_model_len=128)
    llm = LLM(directory, kernels="triton", cuda_graphs=True, **settings)
    assert llm.worker.graphs.sizes == [1]
    with pytest.raises(ValueError, match=r"cuda_graphs=True: .*kernels='torch'.*kernels='triton'"):
        LLM(directory, kernels="torch", cuda_graphs=True, **settings)
