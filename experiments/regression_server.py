"""Does a server start, answer for its books and end? One in a process of its own."""

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any

COMMAND = (sys.executable, "-m", "engine.serve")
START_SECONDS = 120.0
STOP_SECONDS = 60.0
SETTLE_SECONDS = 30.0
HELD = (
    "slots_live",
    "blocks_in_use",
    "requests_waiting",
    "requests_running",
    "requests_background",
)
_READY = re.compile(r"warmstate: serving (\S+) at (http://\S+)\n")
_COMPLAINT = re.compile(r"\b(ERROR|CRITICAL)\b|^Traceback", re.MULTILINE)


# glibc gives each of the server's threads an arena that keeps its peak: two are enough.
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}


class ServerProcess:
    """`python -m engine.serve` on a free port of this machine; `with` starts it, and ends it.

    model, url: what its ready line says. Raises RuntimeError when it does not start.
    """

    def __init__(
        self, *options: str, threads: int = 1, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """environment: variables of the process besides those of this one."""
        self._environment = _ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)} | dict(environment)
        self.options = ("--port", "0", "--host", "127.0.0.1", "--threads", str(threads), *options)

    def __enter__(self) -> "ServerProcess":
        self._log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [*COMMAND, *self.options],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | self._environment,
        )
        try:
            self.model, self.url = self._ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()

    def _ready(self) -> tuple[str, str]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if selector.select(START_SECONDS) else ""
        found = _READY.fullmatch(line)
        if found is None:
            raise RuntimeError(f"the server did not start: {line!r}\n{self.last_words()}")
        return found.group(1), found.group(2)

    def last_words(self, lines: int = 20) -> str:
        """The end of what it wrote to stderr."""
        return "\n".join(self._stderr().splitlines()[-lines:])

    def _stderr(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def get(self, path: str) -> str:
        """The body at a path."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + path, timeout=30) as response:
            return response.read().decode()

    def stats(self) -> dict[str, Any]:
        """What /stats says of the engine."""
        return json.loads(self.get("/stats"))["engine"]

    def metrics(self) -> dict[str, float]:
        """{name with labels: value} of /metrics."""
        lines = [line for line in self.get("/metrics").splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def rss_mib(self) -> float:
        """Resident memory of the process."""
        with open(f"/proc/{self.process.pid}/status") as file:
            [line] = [line for line in file if line.startswith("VmRSS:")]
        return int(line.split()[1]) / 1024

    def stop(self) -> list[str]:
        """SIGTERM; what is wrong about how it ended, or about what it wrote to stderr."""
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return [f"it has not ended {STOP_SECONDS:.0f} s after a SIGTERM\n{self.last_words()}"]
        found = [f"exit status {status} after a SIGTERM\n{self.last_words()}"] if status else []
        if _COMPLAINT.search(self._stderr()):
            found.append(f"it complained:\n{self.last_words()}")
        return found


def held(stats: dict[str, Any]) -> dict[str, int]:
    """What is not zero although it must be when nobody asks for anything."""
    return {name: stats[name] for name in HELD if stats[name]}


def eventually(holds: Callable[[], bool], seconds: float = SETTLE_SECONDS) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
