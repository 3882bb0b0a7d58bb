"""Graphs of launches, by device: a CUDA graph, or on the CPU a recording that behaves like one.

A graph runs again exactly what one call ran, on the same addresses and with the same host values;
only what lies at the addresses can be new. Launching it costs the host one call.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from kernels.recorded_graph import RecordedGraph

Run = Callable[[], torch.Tensor]


class Graph(Protocol):
    """output: the tensor that the captured call returned. Every replay, and a replay of a graph
    that shares its memory, may overwrite it: read it before, on the same stream."""

    output: torch.Tensor

    def replay(self) -> None:
        """Enqueue everything again on the current stream."""


class CudaGraph:
    """What `run` launches on a CUDA or ROCm device, captured after a call that warms everything up
    (kernels are compiled and libraries loaded, neither of which can be captured).

    memory: `shared_memory`. Everything that `run` reads must outlive the graph.
    """

    def __init__(self, run: Run, device: torch.device, memory: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.device(device):
            current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                run()
            current.wait_stream(stream)
            # thread_local: what other threads do meanwhile is no part of the graph.
            how = dict(pool=memory, stream=stream, capture_error_mode="thread_local")
            with torch.cuda.graph(self._graph, **how):
                self.output = run()

    def replay(self) -> None:
        self._graph.replay()


def shared_memory(device: torch.device) -> Any:
    """Where graphs keep what they compute on the way, all in one: one replay at a time. Captured
    from the largest down, they need little more than the largest."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def capture(run: Run, device: torch.device, memory: Any = None) -> Graph:
    """A graph of what `run` does on `device`; it is run, once or twice, so it must do no harm.

    RuntimeError where `run` does what no graph can hold: it reads results back, or uploads.
    """
    if device.type == "cuda":
        return CudaGraph(run, device, memory)
    return RecordedGraph(run)
