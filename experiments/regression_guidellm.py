"""Does a public load generator see the same? GuideLLM on the questions about one document."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.builtin import BUILTIN_MODEL_DIR
from experiments.regression_clients import MAX_TOKENS
from experiments.regression_server import ServerProcess
from experiments.regression_workloads import Workload

PROGRAM = Path(sys.executable).with_name("guidellm")
LIMIT_SECONDS = 240.0
LAST_LINES = 15


class GuideFailed(RuntimeError):
    """GuideLLM did not end well; its last lines."""


@dataclass(frozen=True)
class Guided:
    """What its report says. cached_tokens: as the server told it, for each answer."""

    ttft_p50_ms: float
    ttft_p95_ms: float
    new_tokens_per_s: float
    cached_tokens: list[int]


def installed() -> bool:
    """Whether it can be run."""
    return PROGRAM.exists()


def run_guidellm(server: ServerProcess, workload: Workload, *, clients: int, salt: str) -> Guided:
    """All timed requests of a workload of chats without history, by so many clients."""
    prompts = [request.text for request in workload.timed]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data.jsonl"
        data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        config = folder / "config.json"
        spec = _spec(server, folder, clients=clients, salt=salt, num_requests=len(prompts))
        config.write_text(json.dumps({"spec": spec}))
        _run(config, folder)
        return read_report(json.loads((folder / "report.json").read_text()), len(prompts))


def _spec(
    server: ServerProcess, folder: Path, *, clients: int, salt: str, num_requests: int
) -> dict[str, Any]:
    body = {"temperature": 0, "warmstate": {"cache_salt": salt}}
    return {
        "backend": {
            "kind": "openai_http",
            "target": server.url,
            "model": server.model,
            "http2": False,
            "max_tokens": MAX_TOKENS,
            "extras": {"body": body},
        },
        "profile": {"kind": "concurrent", "streams": [clients]},
        "constraints": [{"kind": "max_requests", "count": num_requests}],
        "tokenizer": {"kind": "hf_auto", "model": str(BUILTIN_MODEL_DIR)},
        "data": [{"kind": "json_file", "path": str(folder / "data.jsonl")}],
        "outputs": [{"kind": "json", "path": str(folder / "report.json")}],
    }


def _run(config: Path, folder: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "NO_PROXY": "127.0.0.1"}
    command = [str(PROGRAM), "run", "--config", str(config), "--disable-console"]
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_SECONDS,
            cwd=folder,
            env=os.environ | offline,
        )
    except subprocess.TimeoutExpired as error:
        raise GuideFailed(f"GuideLLM took more than {LIMIT_SECONDS:.0f} s") from error
    if done.returncode:
        raise GuideFailed(f"GuideLLM: exit status {done.returncode}\n{_end(done.stdout)}")


def read_report(report: dict[str, Any], num_requests: int) -> Guided:
    """The numbers of its one benchmark; GuideFailed unless every request was answered."""
    [benchmark] = report["benchmarks"]
    metrics, requests = benchmark["metrics"], benchmark["requests"]
    if metrics["request_totals"]["successful"] != num_requests:
        errors = [each["info"].get("error") or "" for each in requests["errored"] or []]
        totals = metrics["request_totals"]
        raise GuideFailed("\n".join([f"GuideLLM: {totals} of {num_requests}", *errors[:1]]))
    percentiles = metrics["time_to_first_token_ms"]["successful"]["percentiles"]
    return Guided(
        ttft_p50_ms=percentiles["p50"],
        ttft_p95_ms=percentiles["p95"],
        new_tokens_per_s=metrics["output_tokens_per_second"]["successful"]["mean"],
        cached_tokens=[each["input_metrics"]["cached_tokens"] for each in requests["successful"]],
    )


def _end(text: str) -> str:
    return "\n".join(text.splitlines()[-LAST_LINES:])
