"""flash-linear-attention agrees: its naive loop and its recurrent kernel, on the same inputs."""

import functools
import warnings

import pytest
import torch

from kernels.gated_delta_chunk import gated_delta_prefill
from kernels.gated_delta_step import gated_delta_step
from tests.kernels.packs import Pack, Pool, Steps, delta_inputs, error

H, HV, K, V = 1, 2, 16, 32


@functools.cache
def rules():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla says that it found no GPU
        from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule
        from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    return {"naive": naive_recurrent_gated_delta_rule, "kernel": fused_recurrent_gated_delta_rule}


def by_fla(name, inputs, state):
    """(o [T, HV, V], final state [HV, V, K]) of one row; fla's states are [K, V]."""
    q, k, v, g, beta = inputs
    unit = [x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k)]
    q, k = (x.repeat_interleave(HV // H, 1) for x in unit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        o, final = rules()[name](
            q=q[None],
            k=k[None],
            v=v[None],
            g=g[None],
            beta=beta[None],
            initial_state=state.transpose(1, 2)[None].contiguous(),
            output_final_state=True,
        )
    return o[0], final[0].transpose(1, 2)


@pytest.mark.parametrize("name", ["naive", "kernel"])
@pytest.mark.parametrize("length", [1, 3, 64, 65, 130])
def test_the_chunked_prefill_agrees(name, length):
    inputs = delta_inputs(length, H, HV, K, V, torch.float32)
    pool = Pool.poisoned(4, HV, V, K, dtype=torch.float32, filled=(1,))
    fla_o, fla_state = by_fla(name, inputs, pool.view[1])
    o = gated_delta_prefill(*inputs, pool.view, **Pack([length], [1], [2]).vectors())
    assert error(o, fla_o) < 1e-6
    assert error(pool.view[2], fla_state) < 1e-6


@pytest.mark.parametrize("name", ["naive", "kernel"])
def test_steps_agree(name):
    inputs = delta_inputs(4, H, HV, K, V, torch.float32)
    pool = Pool.poisoned(8, HV, V, K, dtype=torch.float32, filled=(1,))
    fla_o, fla_state = by_fla(name, inputs, pool.view[1])
    steps = Steps([1], [2, 3, 4, 5], [4])
    o = gated_delta_step(*inputs, pool.view, **steps.vectors())
    assert error(o, fla_o) < 1e-6
    assert error(pool.view[5], fla_state) < 1e-6
