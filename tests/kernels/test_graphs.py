"""A recorded graph does what a captured one does, and refuses what that would get wrong."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from kernels import graphs, launch
from kernels.graphs import CudaGraph, capture, shared_memory
from kernels.ids import Ids
from kernels.launch import Target, recording
from kernels.recorded_graph import RecordedGraph

CPU = torch.device("cpu")


def test_a_replay_reads_what_the_tensors_hold_now_and_writes_where_the_first_run_did():
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 10.0])
    graph = capture(lambda: x * 2 + y, CPU)
    output, address = graph.output, graph.output.data_ptr()
    assert output.tolist() == [12.0, 14.0]
    x.copy_(torch.tensor([3.0, 4.0]))
    assert output.tolist() == [12.0, 14.0]
    graph.replay()
    assert output.tolist() == [16.0, 18.0]
    assert graph.output is output and output.data_ptr() == address


def test_results_of_ops_inside_a_graph_stay_at_their_addresses():
    x, seen = torch.tensor([1.0]), []

    def run():
        seen.append(x + 1)
        return seen[0] * 3

    graph = RecordedGraph(run)
    x.fill_(5.0)
    graph.replay()
    assert len(seen) == 1 and seen[0].item() == 6.0 and graph.output.item() == 18.0


def test_host_values_are_those_of_the_recorded_run():
    x, factor, rows = torch.ones(4), 2.0, 3

    def run():
        return (x * factor)[:rows].clone()

    graph = RecordedGraph(run)
    factor, rows = 7.0, 1
    x.fill_(10.0)
    graph.replay()
    assert graph.output.tolist() == [20.0] * 3


def test_python_runs_once_and_never_in_a_replay():
    calls = []
    graph = RecordedGraph(lambda: calls.append(1) or torch.zeros(1))
    graph.replay()
    graph.replay()
    assert calls == [1]


def test_in_place_ops_run_again_on_the_same_tensor_each_time():
    x = torch.zeros(3)
    graph = RecordedGraph(lambda: x.add_(1).mul_(2))
    for expected in (2.0, 6.0, 14.0):
        assert x.tolist() == [expected] * 3
        graph.replay()
    assert graph.output.data_ptr() == x.data_ptr()


def test_views_are_of_the_recorded_memory_and_writes_through_them_arrive():
    x, pool = torch.arange(6.0), torch.zeros(4, 3)

    def run():
        a, b = x.split([2, 4])
        pool[1, :2] += a
        pool.t()[2].copy_(b)
        return pool.flatten(1)[1].unsqueeze(0)

    graph = RecordedGraph(run)
    pool.zero_()
    x.add_(10)
    graph.replay()
    assert pool[:, 2].tolist() == [12.0, 13.0, 14.0, 15.0]
    assert pool[1].tolist() == [10.0, 11.0, 13.0] == graph.output[0].tolist()


def test_a_reshape_that_copies_is_an_op_and_one_that_does_not_is_a_view():
    x = torch.arange(6.0).view(2, 3)
    graph = RecordedGraph(lambda: x.t().reshape(-1) + x.reshape(-1))
    assert graph.output.tolist() == [0.0, 4.0, 3.0, 7.0, 6.0, 10.0]
    x.mul_(2)
    graph.replay()
    assert graph.output.tolist() == [0.0, 8.0, 6.0, 14.0, 12.0, 20.0]


def test_an_op_of_several_results_writes_each_of_them_back():
    x = torch.tensor([3.0, 1.0, 2.0])
    seen = []

    def run():
        seen.extend(x.sort())
        return seen[0]

    graph = RecordedGraph(run)
    x.copy_(torch.tensor([5.0, 9.0, 7.0]))
    graph.replay()
    assert graph.output.tolist() == [5.0, 7.0, 9.0] and seen[1].tolist() == [0, 2, 1]


def test_composite_ops_and_gathers_by_index_are_held():
    table, weight = torch.arange(12.0).view(4, 3), torch.ones(2, 3)
    ids = torch.tensor([1, 1])
    graph = RecordedGraph(lambda: torch.nn.functional.linear(table[ids], weight))
    ids.copy_(torch.tensor([0, 3]))
    graph.replay()
    assert graph.output[:, 0].tolist() == [3.0, 30.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.empty(2, 3),
        lambda x: x.new_empty(3),
        lambda x: torch.empty_like(x),
        lambda x: torch.empty_strided((2,), (3,)),
        lambda x: x.new_empty_strided((2, 2), (2, 1)),
    ],
)
def test_memory_without_contents_holds_nan_at_each_replay(make):
    """A kernel that reads what it did not write finds what another graph left there."""
    graph = RecordedGraph(lambda: make(torch.zeros(2)))
    with torch.inference_mode():
        graph.output.fill_(1.0)
    graph.replay()
    assert graph.output.isnan().all()


def test_fresh_memory_is_poisoned_before_what_is_written_to_it_and_not_after():
    x = torch.tensor([4.0])
    graph = RecordedGraph(lambda: torch.empty(3, 1).copy_(x.expand(3, 1)))
    graph.replay()
    assert graph.output.tolist() == [[4.0]] * 3


def test_zeros_are_made_again_in_each_replay():
    graph = RecordedGraph(lambda: torch.zeros(2).add_(1))
    graph.replay()
    graph.replay()
    assert graph.output.tolist() == [1.0, 1.0]


READS, HOST, MOVES = "reads values back", "tensor of host values", "between devices"


@pytest.mark.parametrize(
    ("run", "op", "why"),
    [
        (lambda x, ids: x[0].item(), "aten.item", READS),
        (lambda x, ids: x if x[0] > 0 else -x, "aten.is_nonzero|aten.item", READS),
        (lambda x, ids: ids.tolist(), "aten.resolve_conj", READS),
        (lambda x, ids: x.numpy(), "aten.resolve_conj|aten.to", f"{READS}|{MOVES}"),
        (lambda x, ids: x.nonzero(), "aten.nonzero", READS),
        (lambda x, ids: x[x > 0], "aten.index", READS),
        (lambda x, ids: x.masked_select(x > 0), "aten.masked_select", READS),
        (lambda x, ids: torch.equal(x, x), "aten.equal", READS),
        (lambda x, ids: x.cpu(), "aten.to", MOVES),
        (lambda x, ids: x.to("meta"), "aten.to", MOVES),
        (lambda x, ids: x.copy_(torch.empty(3, device="meta")), "aten.copy_", MOVES),
        (lambda x, ids: torch.tensor([1, 2]), "aten.lift_fresh", HOST),
        (lambda x, ids: torch.as_tensor([1.0]), "aten.lift_fresh", HOST),
        (lambda x, ids: x.new_tensor([1.0]), "aten.lift_fresh", HOST),
        (lambda x, ids: x[[0, 1]], "aten.lift_fresh", HOST),
        (lambda x, ids: Ids([1, 2]).tensor, "aten.lift_fresh", HOST),
        (lambda x, ids: x.unsqueeze_(0), "aten.unsqueeze_", "changes where a tensor lies"),
    ],
)
def test_what_no_graph_can_hold_is_refused_with_the_name_of_the_op(run, op, why):
    x, ids = torch.ones(3), torch.tensor([0, 2])
    with pytest.raises(RuntimeError, match=rf"a graph can't hold (?:{op})\S*: .*(?:{why})"):
        RecordedGraph(lambda: run(x, ids))
    assert (torch.ones(1) + 1).item() == 2.0  # nothing is recorded, or refused, any longer


def test_conversions_of_the_dtype_alone_are_held():
    x = torch.tensor([1.5])
    graph = RecordedGraph(lambda: x.double().to(torch.float32).float())
    x.fill_(2.5)
    graph.replay()
    assert graph.output.item() == 2.5 and graph.output.dtype == torch.float32


# ---- launches


class Kernel:
    """Stands for a Triton kernel: adds `amount` to a tensor, as often as the grid says."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        def run(x, amount, **options):
            self.grids.append(grid)
            staging = torch.tensor([amount])  # what an interpreter does is no part of a graph
            x += grid[0] * float(staging.item())

        return run


def test_launches_are_replayed_in_their_place_among_the_ops_with_frozen_arguments():
    x, kernel, amount, grid = torch.zeros(2), Kernel(), 1.0, (2,)

    def run():
        y = x * 10
        launch.launch(kernel, grid, y, amount, num_warps=1, num_stages=1)
        return y * 2

    graph = RecordedGraph(run)
    assert graph.output.tolist() == [4.0, 4.0] and len(kernel.grids) == 1
    amount, grid = 100.0, (50,)
    x.fill_(1.0)
    graph.replay()
    assert graph.output.tolist() == [24.0, 24.0] and kernel.grids == [(2,), (2,)]


def test_launches_outside_are_not_recorded_also_after_a_run_that_failed():
    x, kernel = torch.zeros(1), Kernel()

    def run():
        launch.launch(kernel, (1,), x, 1.0, num_warps=1, num_stages=1)
        return x.clone()

    def fails():
        run()
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        RecordedGraph(fails)
    graph = RecordedGraph(run)
    launch.launch(kernel, (1,), x, 1.0, num_warps=1, num_stages=1)
    assert x.item() == 3.0
    graph.replay()
    assert x.item() == graph.output.item() == 4.0


def test_an_empty_grid_is_no_launch_of_a_graph():
    graph = RecordedGraph(lambda: launch.launch(None, (0,), num_warps=1, num_stages=1))
    graph.replay()
    assert graph.output is None


def test_launches_that_are_only_written_down_are_no_part_of_a_graph():
    kernel, x = Kernel(), torch.zeros(1)

    def run():
        with recording(Target("sm_90")) as launches:
            launch.launch(kernel, (1,), x, 1.0, num_warps=1, num_stages=1)
        assert len(launches) == 1
        return x + 0

    RecordedGraph(run).replay()
    assert kernel.grids == [] and x.item() == 0.0


# ---- devices


class Cuda:
    """Notes what would be asked of CUDA, in order."""

    def __init__(self):
        self.events = []

    def Stream(self):
        return SimpleNamespace(
            name="side", wait_stream=lambda s: self.events.append(f"side waits for {s.name}")
        )

    def current_stream(self):
        return SimpleNamespace(
            name="current", wait_stream=lambda s: self.events.append(f"current waits for {s.name}")
        )

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: self.events.append("replay"))

    @contextmanager
    def device(self, device):
        yield

    @contextmanager
    def stream(self, stream):
        self.events.append(f"on {stream.name}")
        yield

    @contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        self.events.append(f"capture on {stream.name} into {pool}, {capture_error_mode}")
        yield
        self.events.append("captured")

    def graph_pool_handle(self):
        return "pool"


def test_a_cuda_graph_is_captured_after_a_warm_up_on_another_stream(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(graphs.torch, "cuda", cuda)
    device = torch.device("cuda")
    graph = capture(lambda: cuda.events.append("run") or 7, device, shared_memory(device))
    assert isinstance(graph, CudaGraph) and graph.output == 7
    graph.replay()
    assert cuda.events == [
        "side waits for current",
        "on side",
        "run",
        "current waits for side",
        "capture on side into pool, thread_local",
        "run",
        "captured",
        "replay",
    ]


def test_the_cpu_records_and_shares_nothing():
    assert shared_memory(CPU) is None
    assert isinstance(capture(lambda: torch.zeros(1), CPU), RecordedGraph)
