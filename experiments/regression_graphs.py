"""Are the answers of decode steps in graphs those of steps launched op by op? Also at the client.

On a GPU every workload is asked of servers with CUDA graphs. Without one the same code runs on
recorded graphs (`kernels.recorded_graph`) under Triton's interpreter, which takes a second for a
few tokens: one short document, a few questions, and no time that says anything.
"""

from dataclasses import replace

import torch

from experiments.regression_rows import OFF
from experiments.regression_workloads import SHARED, Sizes, Workload

GRAPHS = ("--cuda-graphs",)
GRAPH_SERVERS = {"graphs": GRAPHS, "graphs, overlap": (*GRAPHS, "--overlap")}
RECORDED_CLIENTS = 2
INTERPRETED = {"TRITON_INTERPRET": "1"}
_SMALL_ENGINE = (
    "--kernels", "triton", "--max-num-seqs", str(RECORDED_CLIENTS), "--max-model-len", "512",
    "--no-idle-prefill",
)  # fmt: skip
RECORDED_SERVERS = {
    OFF: (*_SMALL_ENGINE, "--no-enable-prefix-caching"),
    **{name: (*_SMALL_ENGINE, *how) for name, how in GRAPH_SERVERS.items()},
}
RECORDED_SIZES = Sizes(
    document_tokens=72, questions=2, talks=1, turns=1, heads=1, tails=1, tail_tokens=16,
    own_documents=1,
)  # fmt: skip


def on_gpu() -> bool:
    """Whether there is a device that can capture graphs."""
    return torch.cuda.is_available()


def recorded(workloads: list[Workload]) -> list[Workload]:
    """Those that are asked of recorded graphs, under a name of their own."""
    return [
        replace(workload, name=f"{workload.name}, interpreted")
        for workload in workloads
        if workload.name == SHARED
    ]


def replay_errors(stats: dict[str, int]) -> list[str]:
    """What the engine's statistics say against its graphs."""
    if stats["decodes_replayed"] > stats["decodes_eager"]:
        return []
    return [f"{stats['decodes_replayed']} replayed, {stats['decodes_eager']} eager decode steps"]
