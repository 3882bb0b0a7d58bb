"""Where did a number come from? Writes results together with the machine that measured them."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"


def machine_facts() -> dict[str, Any]:
    """Processor, threads, load, versions, commit and date. `commit` is None outside git."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "memory_bytes": memory_bytes(),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def commit() -> str | None:
    """The checked-out commit, "+changes" after it if a tracked file outside results/ differs."""
    revision = git("rev-parse", "HEAD")
    if revision is None:
        return None
    changed = git("status", "--porcelain", "-uno", "--", ".", ":!experiments/results")
    return revision + ("+changes" if changed else "")


def git(*arguments: str) -> str | None:
    """Output of a git command on this repository; None without git or outside a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` and the machine's facts, whole or not at all. NaN is refused (ValueError)."""
    text = json.dumps({**content, "machine": machine_facts()}, indent=2, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
