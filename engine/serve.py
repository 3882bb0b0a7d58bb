"""`python -m engine.serve`: one model behind OpenAI's interface."""

import argparse
import inspect
import logging
import re
import sys
import time
from dataclasses import fields
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
        """Ten times a second: end when everything is answered or the time is over."""
        if self._deadline is not None and not self.should_exit:
            if time.monotonic() >= self._deadline:
                self._engine.abort_all()
                self.should_exit = True
            self.should_exit |= self._engine.num_unfinished == 0
        return await super().on_tick(counter)


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal; the exit code."""
    options = _parser().parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        server = _server(options)
    except ValueError as error:
        print(f"warmstate: {error}", file=sys.stderr)
        return 2
    server.run()
    return 0


def _server(options: argparse.Namespace) -> DrainingServer:
    """Load the model and set everything up. ValueError for what is refused."""
    if options.drain_seconds < 0:
        raise ValueError(f"drain_seconds={options.drain_seconds}: must be at least 0")
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
        host=options.host,
        port=options.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    return DrainingServer(config, app.state.engine, name=name, drain_seconds=options.drain_seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.serve",
        description="Serve a model behind OpenAI's interface.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, default=BUILTIN_MODEL_DIR, help="a Hugging Face directory")
    add("--host", default="127.0.0.1", help="the address to listen at")
    add("--port", type=_number, default=8000, help="0: any free one")
    add("--served-model-name", help="what clients call it; None: the directory's name")
    add("--max-queued-requests", type=_number, default=256, help="unfinished answers before 429")
    add("--max-body-bytes", type=_number, default=8 << 20, help="of one request")
    add("--drain-seconds", type=float, default=30.0, help="for running answers after a SIGTERM")
    add("--recent-requests", type=_number, default=100, help="shown by the page and /requests")
    add("--threads", type=_positive, help="of torch; None: torch decides")
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


def _positive(text: str) -> int:
    value = _number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is below 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
