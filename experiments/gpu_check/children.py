"""Other processes of a GPU check: they compile beforehand, and go on when a device has died."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from experiments.results_io import ROOT, commit

LANES = 8  # processes that compile at once

_QUERY = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
_MODULE = "experiments.gpu_check"


def machine(on_gpu: bool) -> dict[str, Any]:
    """What the check runs on."""
    facts = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "commit": commit(),
    }
    if not on_gpu:
        return {"device": "Triton's interpreter", **facts}
    properties = torch.cuda.get_device_properties(0)
    facts |= {"cuda": torch.version.cuda, "processors": properties.multi_processor_count}
    facts["memory_gib"] = round(properties.total_memory / 2**30, 1)
    smi = _nvidia_smi()
    facts |= dict(zip(_QUERY.split(","), smi, strict=False)) if smi else {"driver_version": None}
    return {"device": properties.name, **facts}


def _nvidia_smi() -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [x.strip() for x in done.stdout.strip().split(",")] if done.returncode == 0 else []


def _command(names: list[str], seed: int, *options: str) -> list[str]:
    return [sys.executable, "-m", _MODULE, "--seed", str(seed), *options, "--parts", *names]


def warm_up(
    names: list[str], seed: int, seconds: float, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Run every part once, some processes at a time, so that its kernels lie compiled on disk.

    What goes wrong there is only told: the parts themselves run again afterwards.
    """
    lanes = min(LANES, len(names), os.cpu_count() or 1)
    began, report = time.monotonic(), []
    say(f"compiling: {len(names)} parts in {lanes} processes, at most {seconds:.0f} s")
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for lane in range(lanes):
            log = (Path(directory) / f"{lane}.log").open("w+")
            budget = ("--budget", str(seconds), "--compile-only")
            command = _command(names[lane::lanes], seed, *budget)
            children.append((names[lane::lanes], log, _start(command, log)))
        for mine, log, child in children:
            try:
                status = child.wait(max(0.1, seconds - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                child.kill()
                status = child.wait()
            taken = round(time.monotonic() - began, 1)
            report.append({"parts": mine, "status": status, "seconds": taken})
            say(f"  {', '.join(mine)}: {'done' if status == 0 else f'status {status}'}, {taken} s")
            if status != 0:
                log.seek(0)
                failures = [x for x in log.read().splitlines() if "FAIL" in x or "Error" in x]
                for line in failures[-6:]:
                    say(f"    {line.strip()[:200]}")
            log.close()
    return report


def _start(command: list[str], log: Any) -> subprocess.Popen:
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def continue_elsewhere(groups: dict[str, str], seed: int, seconds: float) -> list[dict[str, Any]]:
    """Results of these parts (name: group) from a process of their own, which prints here too."""
    if not groups:
        return []
    names = list(groups)
    timed = any(name.startswith("time of") for name in names)
    wanted = names if "ceilings" in names or not timed else ["ceilings", *names]
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "rest.json"
        options = ("--budget", str(max(1.0, seconds)), "--no-warm-up", "--output", str(output))
        subprocess.run(_command(wanted, seed, *options), cwd=ROOT)
        try:
            found = json.loads(output.read_text())["parts"]
        except (OSError, ValueError, KeyError):
            found = []
    known = {result["name"] for result in found}
    lost = [
        {"group": group, "name": name, "status": "not run"}
        for name, group in groups.items()
        if name not in known
    ]
    return [result for result in found if result["name"] in names] + lost
