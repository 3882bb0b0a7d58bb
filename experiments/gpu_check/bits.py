"""Do bits depend on nothing but a row's own inputs: not on cuts, neighbours, or the run?"""

from typing import Any

import torch

from experiments.gpu_check.cases import delta_inputs, net_inputs
from experiments.gpu_check.setup import Bench
from kernels import KERNEL_CHUNK

WARM, LIVE, FIRST_SNAPSHOT = 1, 2, 3


class Prefill:
    """A GDN layer's two prefill ops on one sequence of the model's own ratio, from slot 1."""

    def __init__(self, bench: Bench, T: int) -> None:
        s = bench.sizes
        self.bench, self.T = bench, T
        H, HV = s.key_heads, s.key_heads * s.ratios[0]
        self.inputs = delta_inputs(bench, T, H, HV)
        self.x, self.weight = bench.normal(T, s.channels), bench.normal(s.channels, 4)
        num_slots = FIRST_SNAPSHOT + -(-T // KERNEL_CHUNK)
        self.states = bench.normal(num_slots, HV, s.width, s.width, dtype=torch.float32)
        self.windows = bench.normal(num_slots, 3, s.channels)

    def pools(self) -> list[torch.Tensor]:
        return [self.states.clone(), self.windows.clone()]

    def run(
        self, pools: list[torch.Tensor], lo: int, hi: int, read: int, write: int, *, snap: bool
    ) -> list[torch.Tensor]:
        """Outputs of tokens [lo, hi); with snap, a snapshot after every full chunk."""
        bench, C = self.bench, KERNEL_CHUNK
        chunks = range(lo // C, -(-hi // C))
        snaps = [FIRST_SNAPSHOT + c if snap and (c + 1) * C <= hi else -1 for c in chunks]
        ids: dict[str, Any] = dict(
            cu_seqlens=bench.ids([0, hi - lo]),
            read_slots=bench.ids([read]),
            write_slots=bench.ids([write]),
            snapshot_slots=bench.ids(snaps),
        )
        inputs = [x[lo:hi] for x in self.inputs]
        o = bench.ops.gated_delta_prefill(*inputs, pools[0], **ids)
        return [o, bench.ops.causal_conv_prefill(self.x[lo:hi], self.weight, pools[1], **ids)]


def prefill(bench: Bench) -> None:
    """Twice, with snapshots, cut at each multiple of 64 in turn, and as one of a pack."""
    T, C = bench.sizes.split_tokens, KERNEL_CHUNK
    case, names = Prefill(bench, T), ("delta prefill", "conv prefill")

    def equal(what: str, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
        for name, a, b in zip(names, ours, theirs, strict=True):
            bench.equal(f"{name}: {what}", a, b)

    def slots(pools: list[torch.Tensor], slot: int) -> list[torch.Tensor]:
        return [pool[slot] for pool in pools]

    whole, again, snapped = case.pools(), case.pools(), case.pools()
    y = case.run(whole, 0, T, WARM, LIVE, snap=False)
    equal("twice", case.run(again, 0, T, WARM, LIVE, snap=False), y)
    equal("twice, whole pool", again, whole)
    equal("snapshots change no output", case.run(snapped, 0, T, WARM, LIVE, snap=True), y)
    equal("snapshots change no state", slots(snapped, LIVE), slots(whole, LIVE))
    cuts = sorted({C, T // 2 // C * C, (T - 1) // C * C})
    for cut in cuts:
        pools = case.pools()
        left = case.run(pools, 0, cut, WARM, LIVE, snap=False)
        snapshot = FIRST_SNAPSHOT + cut // C - 1
        equal(f"snapshot at {cut} is a state", slots(snapped, snapshot), slots(pools, LIVE))
        right = case.run(pools, cut, T, LIVE, LIVE, snap=False)
        joined = [torch.cat(pair) for pair in zip(left, right, strict=True)]
        equal(f"cut at {cut}", joined, y)
        equal(f"cut at {cut}, state", slots(pools, LIVE), slots(whole, LIVE))
        # The same from the snapshot: restored by a copy, and by reading the snapshot itself.
        copied = case.run(copies(snapped, snapshot), cut, T, LIVE, LIVE, snap=False)
        redirected = case.run([p.clone() for p in snapped], cut, T, snapshot, LIVE, snap=False)
        equal(f"copy and redirect at {cut}", copied, redirected)
        equal(f"redirect at {cut} is the whole", redirected, right)


def copies(pools: list[torch.Tensor], slot: int) -> list[torch.Tensor]:
    pools = [pool.clone() for pool in pools]
    for pool in pools:
        pool[LIVE] = pool[slot]
    return pools


def pack_of_prefills(bench: Bench) -> None:
    """A sequence in a pack of three is the sequence alone."""
    s, C = bench.sizes, KERNEL_CHUNK
    lengths = [C + 1, s.split_tokens - C, 3]
    T, HV = sum(lengths), s.key_heads * s.ratios[0]
    inputs = delta_inputs(bench, T, s.key_heads, HV)
    pool = bench.normal(7, HV, s.width, s.width, dtype=torch.float32)

    def run(lo: int, hi: int, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        offsets = [0]
        for row in rows:
            offsets.append(offsets[-1] + lengths[row])
        states = pool.clone()
        o = bench.ops.gated_delta_prefill(
            *(x[lo:hi] for x in inputs),
            states,
            cu_seqlens=bench.ids(offsets),
            read_slots=bench.ids([1 + row for row in rows]),
            write_slots=bench.ids([4 + row for row in rows]),
            snapshot_slots=bench.ids([-1] * sum(-(-lengths[row] // C) for row in rows)),
        )
        return o, states

    together, states = run(0, T, [0, 1, 2])
    lo = 0
    for row, length in enumerate(lengths):
        alone, state = run(lo, lo + length, [row])
        bench.equal(f"delta prefill: row {row} of a pack", together[lo : lo + length], alone)
        bench.equal(f"delta prefill: state of row {row}", states[4 + row], state[4 + row])
        lo += length


def steps(bench: Bench) -> None:
    """Twice; each row alone; steps of several tokens are single steps; copy is redirect."""
    s, N = bench.sizes, bench.sizes.step_rows
    HV = s.key_heads * s.ratios[0]
    x = net_inputs(bench, 3 * N, s.ratios[0])
    states = bench.normal(1 + 4 * N, HV, s.width, s.width, dtype=torch.float32)
    windows = bench.normal(1 + 4 * N, 3, x.weight.shape[0])

    def run(
        pools: list[torch.Tensor], rows: slice, reads: Any, writes: Any, offsets: Any = None
    ) -> torch.Tensor:
        cu_seqlens = None if offsets is None else bench.ids(offsets)
        ids = dict(read_slots=bench.ids(reads), write_slots=bench.ids(writes))
        return bench.ops.gated_delta_net_step(
            *x[rows],
            pools[1],
            pools[0],
            num_key_heads=s.key_heads,
            cu_seqlens=cu_seqlens,
            **ids,
        )

    def fresh() -> list[torch.Tensor]:
        return [states.clone(), windows.clone()]

    def equal(name: str, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
        for what, a, b in zip(("states", "windows"), ours, theirs, strict=True):
            bench.equal(f"{name}, {what}", a, b)

    reads, targets = range(1, 1 + N), range(1 + N, 1 + 2 * N)
    whole, again = fresh(), fresh()
    y = run(whole, slice(0, N), reads, targets)
    bench.equal("step: twice", run(again, slice(0, N), reads, targets), y)
    equal("step: twice", again, whole)
    for row in sorted({0, 1, N // 2, N - 1}):
        pools = fresh()
        alone = run(pools, slice(row, row + 1), [reads[row]], [targets[row]])
        bench.equal(f"step: row {row} alone", alone, y[row : row + 1])
        equal(f"step: row {row} alone", *([p[targets[row]] for p in ps] for ps in (pools, whole)))
    in_place = fresh()
    for pool in in_place:
        pool[list(targets)] = pool[list(reads)]
    bench.equal("step: copy is redirect", run(in_place, slice(0, N), targets, targets), y)
    equal("step: copy is redirect", in_place, whole)

    verified, single = fresh(), fresh()
    offsets, write = range(0, 3 * N + 1, 3), range(1 + N, 1 + 4 * N)
    y = run(verified, slice(0, 3 * N), reads, write, offsets)
    for t in range(3):  # rows t, t + 3, ...: token t of each sequence
        before = reads if t == 0 else write[t - 1 :: 3]
        token = run(single, slice(t, None, 3), before, write[t::3])
        bench.equal(f"verify: token {t} is a single step", y[t::3], token)
    equal("verify is single steps", verified, single)


PARTS = {
    "bits of prefills": prefill,
    "bits of packs": pack_of_prefills,
    "bits of steps": steps,
}
