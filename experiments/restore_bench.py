"""How can a state be restored? Every way, on a pool of a model's slots, checked and timed."""

import math
from collections.abc import Callable

import torch

from cache.ops import LinearStateCacheOp, RestoreOutcome
from cache.state_pool import StatePool, StateShape, restore_linear_state_slots
from engine.builtin import BUILTIN_MODEL_DIR
from engine.model_config import ModelConfig
from experiments.model_shapes import SHAPES
from experiments.timing import alternate
from kernels import ops_for
from kernels.ids import Ids

COPIES = ("per_layer", "fused", "plain")


def state_shape(name: str) -> StateShape:
    """What a slot of a model holds: of the built-in one, or of a published shape in bfloat16."""
    if name == "built-in":
        c = ModelConfig.from_directory(BUILTIN_MODEL_DIR)
        heads = c.linear_num_key_heads, c.linear_num_value_heads
        dims = c.linear_key_head_dim, c.linear_value_head_dim
        layers, dtype = c.num_linear_layers, torch.float32
    else:
        d = SHAPES[name]
        heads = d["linear_num_key_heads"], d["linear_num_value_heads"]
        dims = d["linear_key_head_dim"], d["linear_value_head_dim"]
        layers, dtype = d["num_hidden_layers"] * 3 // 4, torch.bfloat16
    return StateShape(
        num_layers=layers,
        num_value_heads=heads[1],
        value_dim=dims[1],
        key_dim=dims[0],
        window_rows=3,
        conv_channels=2 * heads[0] * dims[0] + heads[1] * dims[1],
        window_dtype=dtype,
    )


class Bench:
    """A pool with `num` checkpoints in slots 1 to num, and their live slots behind them."""

    def __init__(self, shape: StateShape, num: int, device: str) -> None:
        self.shape, self.num, self.device = shape, num, device
        self.pool = StatePool(1 + 2 * num, shape, device)
        self.sources = list(range(1, num + 1))
        self.live = list(range(num + 1, 2 * num + 1))
        generator = torch.Generator().manual_seed(0)
        for slot in self.sources:  # one layer is drawn, the others are multiples of it
            for view in (self.pool.states, self.pool.windows):
                drawn = torch.randn(view.shape[2:], generator=generator)
                scale = torch.arange(1, shape.num_layers + 1).view(-1, *[1] * drawn.ndim)
                view[slot] = (drawn * scale).to(device, view.dtype)
        self.step_inputs = self._step_inputs(generator)
        self.ops = ops_for(device)
        self.requests = [
            LinearStateCacheOp(live, True, source, 64)
            for live, source in zip(self.live, self.sources, strict=True)
        ]

    # ---- the ways

    def per_layer(self) -> None:
        for source, live in zip(self.sources, self.live, strict=True):
            for view in (self.pool.states, self.pool.windows):
                for layer in range(self.shape.num_layers):
                    view[live, layer].copy_(view[source, layer])

    def fused(self) -> list[RestoreOutcome]:
        return restore_linear_state_slots(self.pool, self.requests, [1] * self.num)

    def plain(self) -> None:
        arena, num = self.pool.arena, self.num
        arena[num + 1 : 2 * num + 1].copy_(arena[1 : num + 1])

    def redirect(self) -> list[RestoreOutcome]:
        return restore_linear_state_slots(self.pool, self.requests, [1] * self.num, copy=False)

    # ---- the first step after it

    def _step_inputs(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """One token a sequence, as every layer's mixer sees it."""
        s = self.shape

        def drawn(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator)

        wide = {"qkv": drawn(self.num, s.conv_channels), "a": drawn(self.num, s.num_value_heads)}
        wide["b"] = drawn(self.num, s.num_value_heads)
        wide["conv_weight"] = drawn(s.conv_channels, s.window_rows + 1)
        wide = {name: x.to(self.device, s.window_dtype) for name, x in wide.items()}
        heads = {name: drawn(s.num_value_heads).to(self.device) for name in ("A_log", "dt_bias")}
        return wide | heads

    def step(self, read: list[int]) -> torch.Tensor:
        """One token through the mixers of all layers, written to the live slots: [L, N, HV, V]."""
        slots = {"read_slots": Ids(read, self.device), "write_slots": Ids(self.live, self.device)}
        key_heads = self._num_key_heads
        return torch.stack(
            [
                self.ops.gated_delta_net_step(
                    **self.step_inputs,
                    windows=self.pool.windows[:, layer],
                    states=self.pool.states[:, layer],
                    num_key_heads=key_heads,
                    **slots,
                )
                for layer in range(self.shape.num_layers)
            ]
        )

    @property
    def _num_key_heads(self) -> int:
        s = self.shape
        return (s.conv_channels - s.num_value_heads * s.value_dim) // (2 * s.key_dim)

    # ---- what must hold

    def live_bytes(self) -> torch.Tensor:
        """A copy of what the live slots hold."""
        return self.pool.arena[self.num + 1 :].clone()

    def differences(self) -> list[str]:
        """Each way whose bytes are not those of the checkpoints, or that changes a checkpoint."""
        arena, num = self.pool.arena, self.num
        checkpoints = arena[1 : num + 1].clone()
        found = []
        for way in COPIES:
            arena[num + 1 :].zero_()
            getattr(self, way)()
            if not torch.equal(self.live_bytes(), checkpoints):
                found.append(f"{way}: the live slots are not the checkpoints")
        self.fused()
        outputs, after = self.step(self.live), self.live_bytes()
        for view in (self.pool.states, self.pool.windows):
            view[num + 1 :] = math.nan  # redirect must not read what is there
        outcomes = self.redirect()
        redirected = self.step(self.sources)
        if outcomes != [RestoreOutcome.RESTORED] * num:
            found.append(f"redirect: {outcomes}")
        if not torch.equal(redirected, outputs):
            found.append("redirect: the first step gives other outputs than after a copy")
        if not torch.equal(self.live_bytes(), after):
            found.append("redirect: the first step leaves other states than after a copy")
        if not torch.equal(arena[1 : num + 1], checkpoints):
            found.append("a checkpoint was changed")
        return found

    # ---- times

    def measure(self, repeats: int) -> dict[str, float]:
        """Milliseconds (medians), and GB/s of bytes read and written."""
        runs: dict[str, Callable[[], object]] = {
            "per_layer": self.per_layer,
            "fused": self.fused,
            "plain": self.plain,
            "redirect": self.redirect,
            "step": lambda: self.step(self.live),
            "copy_and_step": lambda: (self.fused(), self.step(self.live)),
            "redirect_and_step": lambda: (self.redirect(), self.step(self.sources)),
        }
        times = alternate({name: self._waited(run) for name, run in runs.items()}, repeats)
        moved = 2e-9 * self.num * self.shape.slot_bytes
        return {f"{name}_ms": 1e3 * time for name, time in times.items()} | {
            f"{name}_gb_per_s": moved / times[name] for name in COPIES
        }

    def _waited(self, run: Callable[[], object]) -> Callable[[], object]:
        """The run, until the device has done it."""
        if self.device == "cpu":
            return run
        return lambda: (run(), torch.cuda.synchronize())
