"""From a batch to the slots the model reads: copy and redirect, warm and cold rows."""

import pytest
import torch

from cache.ops import NO_SLOT, LinearStateCacheOp
from cache.state_pool import StatePool, StateShape
from engine.batch import Batch, ScheduledRow
from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.worker import Worker

SHAPE = StateShape(1, 1, 1, 16, 1, 32, torch.float32)


class Recorder:
    """A model that only notes what it is given."""

    def __init__(self, *, recurrent: bool = True) -> None:
        self.recurrent = recurrent
        self.inputs = None

    def make_pools(self, num_slots, num_blocks, block_size, layout=None):
        return StatePool(num_slots, SHAPE) if self.recurrent else None, torch.empty(0)

    def forward(self, inputs, pool, kv_cache):
        self.inputs = inputs
        return torch.arange(len(inputs.logit_rows)).float()[:, None]


def worker_with(restore: str, *, recurrent: bool = True) -> Worker:
    model = Recorder(recurrent=recurrent)
    worker = Worker(model, EngineConfig(restore=restore), num_slots=10, num_blocks=10)
    if recurrent:
        worker.state_pool.states[:] = torch.arange(10.0)[:, None, None, None, None]
    return worker


def row(start: int, op: LinearStateCacheOp | None) -> ScheduledRow:
    """A prefill of the last 8 tokens of a prompt, with a token per row to tell rows apart."""
    seq = Sequence("r", range(start + 8), SamplingParams())
    seq.block_table = [1, 2, 3]
    return ScheduledRow(seq, start, start + 8, op)


FRESH = row(0, LinearStateCacheOp(1))
HIT = row(64, LinearStateCacheOp(2, True, 7, 64))
GOES_ON = row(128, LinearStateCacheOp(3))
LOST = row(64, LinearStateCacheOp(4, True, NO_SLOT, 64))


@pytest.mark.parametrize(("restore", "reads"), [("redirect", [-1, 7, 3]), ("copy", [-1, 2, 3])])
def test_a_row_reads_nothing_its_source_or_its_own_slot(restore, reads):
    worker = worker_with(restore)
    result = worker.issue(Batch([FRESH, HIT, GOES_ON]))
    assert worker.model.inputs.prefill_slots.read.tolist() == reads
    assert worker.model.inputs.prefill_slots.write.tolist() == [1, 2, 3]
    assert result.rows == [FRESH, HIT, GOES_ON] and result.cold == []


@pytest.mark.parametrize(("restore", "held"), [("redirect", 2.0), ("copy", 7.0)])
def test_only_a_copy_moves_the_state_before_the_forward(restore, held):
    worker = worker_with(restore)
    worker.issue(Batch([FRESH, HIT, GOES_ON]))
    assert worker.state_pool.states[2].unique().tolist() == [held]
    assert worker.state_pool.states[[1, 3, 7], 0, 0, 0, 0].tolist() == [1.0, 3.0, 7.0]


@pytest.mark.parametrize("restore", ["redirect", "copy"])
def test_a_row_without_its_source_leaves_the_step_and_harms_no_other(restore):
    """trap 20: a failed restore leaves a row marked warm."""
    worker = worker_with(restore)
    result = worker.issue(Batch([LOST, HIT, FRESH]))
    assert result.cold == [LOST] and result.rows == [HIT, FRESH]
    assert worker.model.inputs.prefill_slots.write.tolist() == [2, 1]
    assert worker.model.inputs.prefill_slots.read.tolist() == [
        7 if restore == "redirect" else 2,
        -1,
    ]
    assert result.wait().likeliest.shape == (2, 2)


def test_a_step_in_which_every_restore_fails_runs_no_forward():
    worker = worker_with("copy")
    result = worker.issue(Batch([LOST]))
    assert (result.rows, result.cold, result.wait().likeliest.shape[1]) == ([], [LOST], 0)
    assert worker.model.inputs is None


@pytest.mark.parametrize("boundary", [0, 63, 128])
def test_a_source_of_another_boundary_is_never_restored(boundary):
    """trap 2: the checkpoint is restored at the K/V length."""
    worker = worker_with("copy")
    with pytest.raises(AssertionError, match="restored at token 64"):
        worker.issue(Batch([row(64, LinearStateCacheOp(2, True, 7, boundary))]))
    assert worker.state_pool.states[2].unique().tolist() == [2.0]


def test_a_model_without_recurrent_layers_reads_no_state():
    worker = worker_with("redirect", recurrent=False)
    result = worker.issue(Batch([row(0, None), row(64, None)]))
    assert worker.model.inputs.prefill_slots.read.tolist() == [-1, -1]
    assert result.cold == []
