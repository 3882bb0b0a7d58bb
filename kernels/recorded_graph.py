"""What a captured graph does, on a machine that can't capture one: note a run, then repeat it.

A graph holds addresses and numbers, not Python: each replay runs the same launches on the same
memory, whatever the host thinks by then. So does `RecordedGraph`, op by op, and while it records it
refuses what a capture refuses or gets wrong in silence.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Call = Callable[[], object]

# Told of every Triton launch instead of running it; set while a run is recorded.
launch_observer: ContextVar[Callable[[Call], None] | None] = ContextVar(
    "launch_observer", default=None
)

_aten = torch.ops.aten
_READS = {_aten.resolve_conj, _aten.resolve_neg}  # what `tolist` and `numpy` ask for first
_MOVES = {_aten.to, _aten._to_copy}
_UNWRITTEN = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}


class RecordedGraph:
    """The ops and Triton launches of one call of `run`, with the tensors and host values it had.

    output: what `run` returned, in the memory where each replay leaves it again. A tensor that an
    op made without contents holds NaN (bytes of 255) at the start of its replay: a device's graph
    finds there whatever other graphs of its pool have left.

    RuntimeError, naming the op, when the run reads values back to the host, makes a tensor of host
    values (a replay would not see others), or changes device.
    """

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._calls: list[Call] = []
        recorder = _Recorder(self._calls)
        with torch.inference_mode(), _observing(recorder.launch), recorder:
            self.output = run()

    @torch.inference_mode()
    def replay(self) -> None:
        """The same again: what was written to the tensors that the run reads is read now."""
        for call in self._calls:
            call()


@contextmanager
def _observing(observer: Callable[[Call], None]) -> Iterator[None]:
    token = launch_observer.set(observer)
    try:
        yield
    finally:
        launch_observer.reset(token)


class _Recorder(TorchDispatchMode):
    """Appends a call to `calls` for everything that a replay must do again."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self._calls = calls
        self._launching = False

    def launch(self, call: Call) -> None:
        """Run and note a launch; the ops with which it is interpreted are its own business."""
        self._launching = True
        try:
            call()
        finally:
            self._launching = False
        self._calls.append(call)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._launching:
            return func(*args, **kwargs)
        why = _refusal(func, args, kwargs)
        if why is not None:
            raise RuntimeError(f"a graph can't hold {func}: {why}")
        with self:  # inference mode leaves composite ops whole
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: object) -> None:
        """Views need no replay: they look at memory that is written by others."""
        given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        results = tree_leaves(result)
        fresh = {i: x for i, x in enumerate(results) if _memory(x) not in given}
        if func.overloadpacket in _UNWRITTEN:
            self._calls.append(partial(_bytes(results[0]).fill_, 255))
        elif fresh or func._schema.is_mutable:
            self._calls.append(partial(_repeat, func, args, kwargs, fresh))


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _repeat(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], recorded: dict[int, torch.Tensor]
) -> None:
    """Run the op; results with memory of their own go where they were when it was recorded."""
    results = tree_leaves(func(*args, **kwargs))
    for i, tensor in recorded.items():
        tensor.copy_(results[i])


def _refusal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Why a graph can't hold this op; None if it can."""
    packet, tags = func.overloadpacket, func.tags
    sizes_follow_values = torch.Tag.dynamic_output_shape in tags
    if packet is _aten.index:
        sizes_follow_values = any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
    if torch.Tag.data_dependent_output in tags or sizes_follow_values or packet in _READS:
        return "it reads values back to the host"
    if packet is _aten.lift_fresh:
        return "it makes a tensor of host values, and a replay would not see others"
    if torch.Tag.inplace_view in tags:
        return "it changes where a tensor lies"
    moved = packet in _MOVES and (kwargs.get("device") is not None or func is _aten.to.device)
    devices = {x.device for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
    if moved or len(devices) > 1:
        return "it moves values between devices"
    return None
