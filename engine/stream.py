"""The compute stream: work on states and K/V, in the order it was given.

All that reads or writes a slot or a block goes through one stream. So a slot that the host has
given away can't be written before those who were to read it have; nothing waits for everything.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Stream(Protocol):
    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Have `work` done after all that was given before; the future has its result or error."""


class InlineStream:
    """Does it at once. On a GPU that means launching it: the device has an order of its own."""

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        done: Future[T] = Future()
        try:
            done.set_result(work())
        except Exception as error:  # an interrupt is told now: it is no result of this work
            done.set_exception(error)
        return done


class ThreadStream:
    """A thread that does it, as a GPU would, while the host goes on."""

    def __init__(self) -> None:
        num_threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(
            1,
            "compute",
            initializer=torch.set_num_threads,  # OpenMP keeps the number for each thread
            initargs=(num_threads,),
        )

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        return self._pool.submit(work)


class ReadBack:
    """A tensor on its way to the host, in stream order."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> torch.Tensor:
        """The tensor on the host. Waits for this copy alone."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values
