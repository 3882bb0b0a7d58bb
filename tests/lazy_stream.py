"""A compute stream that does nothing before somebody waits for it: as late as a GPU could."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class LazyStream:
    """Everything is done in order, and only when a result is asked for, or in `drain`.

    is_running: work is being done; whatever touches slots or blocks must see it.
    """

    def __init__(self) -> None:
        self.queue: deque[_Task] = deque()
        self.is_running = False

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        task = _Task(self, work)
        self.queue.append(task)
        return task

    def drain(self) -> None:
        while self.queue:
            self.queue.popleft().run()


class _Task(Future):
    def __init__(self, stream: LazyStream, work: Callable[[], Any]) -> None:
        super().__init__()
        self.stream, self.work = stream, work

    def run(self) -> None:
        nested, self.stream.is_running = self.stream.is_running, True
        try:
            self.set_result(self.work())
        except Exception as error:
            self.set_exception(error)
        finally:
            self.stream.is_running = nested

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            self.stream.queue.popleft().run()
        return super().result(timeout)
