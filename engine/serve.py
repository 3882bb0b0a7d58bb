"""`python -m engine.serve`: one model behind OpenAI's interface."""

import argparse
import errno
import inspect
import logging
import math
import re
import socket
import sys
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import FrameType
from typing import get_args

import torch
import uvicorn

from engine.api import create_app
from engine.builtin import BUILTIN_MODEL_DIR
from engine.chat_template import ChatTemplate
from engine.config import EngineConfig
from engine.engine_thread import EngineThread
from engine.llm import LLM

_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # a name may have others
CLOSE_SECONDS = 5  # for responses that are written already to reach their clients


class DrainingServer(uvicorn.Server):
    """Ends in two steps at the first SIGTERM or SIGINT; a second one ends it at once.

    First new requests get 503 while those that run go on, for at most `drain_seconds`; then what is
    left is aborted and the sockets are closed.
    """

    def __init__(
        self, config: uvicorn.Config, engine: EngineThread, *, name: str, drain_seconds: float
    ) -> None:
        super().__init__(config)
        self._engine, self._name, self._drain_seconds = engine, name, drain_seconds
        self._deadline: float | None = None

    @property
    def exit_code(self) -> int:
        """1 if the engine has failed."""
        return int(self._engine.has_failed)

    async def startup(self, sockets: list | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"warmstate: serving {self._name} at http://{host}:{port}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, or end at once if that has begun. Not re-raised: the exit code is 0."""
        if self._deadline is None:
            self._engine.drain()
            self._deadline = time.monotonic() + self._drain_seconds
        else:
            self._engine.abort_all()
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: end when everything is answered, the time is over, or the engine is.

        A dead engine is not worth waiting for: whoever started the server is to start it again.
        """
        if self._engine.has_failed and self._deadline is None and not self.should_exit:
            print("warmstate: the engine has failed", file=sys.stderr, flush=True)
            self.should_exit = True
        if self._deadline is not None and not self.should_exit:
            if time.monotonic() >= self._deadline:
                self._engine.abort_all()
                self.should_exit = True
            self.should_exit |= self._engine.num_unfinished == 0
        return await super().on_tick(counter)


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal; the exit code: 2 for what is refused, 1 if the engine has failed."""
    options = _parser().parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        server = _server(options)
        sockets = _bound(options.host, options.port)
    except ValueError as error:
        print(f"warmstate: {error}", file=sys.stderr)
        return 2
    server.run(sockets)
    return server.exit_code


def _server(options: argparse.Namespace) -> DrainingServer:
    """Load the model and set everything up. ValueError for what is refused."""
    if not 0 <= options.drain_seconds < math.inf:
        raise ValueError(f"drain_seconds={options.drain_seconds}: must be at least 0 and finite")
    settings = {field.name: getattr(options, field.name) for field in fields(EngineConfig)}
    name = options.served_model_name or options.model.resolve().name
    app = create_app(
        LLM(options.model, **settings),
        model=name,
        chat_template=ChatTemplate.from_directory(options.model),
        max_queued_requests=options.max_queued_requests,
        max_body_bytes=options.max_body_bytes,
        recent_requests=options.recent_requests,
        idle_prefill=options.idle_prefill,
    )
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    return DrainingServer(config, app.state.engine, name=name, drain_seconds=options.drain_seconds)


def _bound(host: str, port: int) -> list[socket.socket]:
    """Sockets at the addresses of a host that this machine has. ValueError where that fails."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                sockets.append(_bound_at(family, address))
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS or (not sockets and address == found[-1][4]):
                    raise
    except (OSError, UnicodeError) as error:
        for each in sockets:
            each.close()
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"can't listen at {host} port {port}: {reason}") from None
    return sockets


def _bound_at(family: int, address: object) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)  # type: ignore[arg-type]
    except BaseException:
        bound.close()
        raise
    return bound


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.serve",
        description="Serve a model behind OpenAI's interface.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, default=BUILTIN_MODEL_DIR, help="a Hugging Face directory")
    add("--host", default="127.0.0.1", help="the address to listen at")
    add("--port", type=_port, default=8000, help="0: any free one")
    add("--served-model-name", help="what clients call it; None: the directory's name")
    add("--max-queued-requests", type=_number, default=256, help="unfinished answers before 429")
    add("--max-body-bytes", type=_number, default=8 << 20, help="of one request")
    add("--drain-seconds", type=float, default=30.0, help="for running answers after a SIGTERM")
    add("--recent-requests", type=_number, default=100, help="shown by the page and /requests")
    add("--threads", type=_threads, help="of torch; None: torch decides")
    add(
        "--idle-prefill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prefill chat answers for their next turn when nothing else runs",
    )
    _add_engine_options(parser.add_argument_group("engine"))
    return parser


def _add_engine_options(group: argparse._ArgumentGroup) -> None:
    """One option for each field of `EngineConfig`, explained by its docstring."""
    help_of = _field_help()
    for field in fields(EngineConfig):
        flag, text = "--" + field.name.replace("_", "-"), help_of.get(field.name, " ")
        kinds = get_args(field.type) or (field.type,)
        if field.type is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, default=field.default, help=text)
        elif int in kinds:
            group.add_argument(flag, type=_number, default=field.default, help=text)
        elif str in kinds:
            group.add_argument(flag, default=field.default, help=text)
        else:
            group.add_argument(flag, choices=kinds, default=field.default, help=text)


def _field_help() -> dict[str, str]:
    """{field: its text}, from the docstring's paragraphs `name, name: text`."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (inspect.getdoc(EngineConfig) or "").splitlines():
        begins = re.match(r"([a-z_]+(?:, [a-z_]+)*): (.*)", line)
        if begins:
            names = begins.group(1).split(", ")
            found |= dict.fromkeys(names, begins.group(2))
        elif line.startswith(" "):
            for name in names:
                found[name] += " " + line.strip()
        else:
            names = []
    return {name: text.replace("%", "%%") for name, text in found.items()}


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def _between(low: int, high: int, text: str) -> int:
    value = _number(text)
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not in [{low}, {high}]")
    return value


_port, _threads = partial(_between, 0, 65535), partial(_between, 1, 1024)


if __name__ == "__main__":
    sys.exit(main())
