"""Where are states saved, and what does that give? Policies, and a row for each on a workload."""

from dataclasses import asdict, dataclass
from typing import Any

GRID = 64  # chunk_stride and block_size
INTERVALS = tuple(GRID << i for i in range(8))  # 64 to 8192
NEVER = 1 << 40  # an interval that no prompt reaches
PARTS = {"engine": "document questions", "claude": "coding agent", "mooncake": "chat"}


@dataclass(frozen=True)
class Policy:
    """Where states are saved: every `every` tokens (None: never), at prompt ends, at branches."""

    every: int | None
    prompt_end: bool
    branch: bool = True


POLICIES = (
    *(Policy(every, end) for end in (True, False) for every in INTERVALS),
    Policy(None, True),
    Policy(512, False, branch=False),
)


@dataclass
class Row:
    """One policy on one workload. reusable_tokens: what an infinite cache of blocks would reuse."""

    part: str
    every: int | None
    prompt_end: bool
    branch: bool
    requests: int = 0
    prompt_tokens: int = 0
    reusable_tokens: int = 0
    reused_tokens: int = 0
    checkpoints: int = 0
    bytes: int = 0
    ttft_new_ms: float | None = None
    ttft_repeat_ms: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "hit_rate": self.reused_tokens / self.prompt_tokens,
            "share_of_reusable": self.reused_tokens / max(1, self.reusable_tokens),
            "checkpoints_per_request": self.checkpoints / self.requests,
        }
