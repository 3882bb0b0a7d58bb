"""The adapter around a chunk rule without slots: what it gathers, in which pieces, and where to.

The rule itself needs a GPU; the specification stands in for it, behind the same signature.
"""

import sys
from itertools import pairwise

import pytest
import torch

from kernels import ops_for, reference
from kernels.fla_prefill import FlaPrefill, load_chunk_rule
from tests.kernels.packs import (
    PACKS,
    TOLERANCE,
    Pack,
    Pool,
    as_double,
    delta_inputs,
    error,
    real_tokens,
    same_bits,
)

H, HV, K, V = 1, 2, 16, 8


class Rule:
    """`chunk_gated_delta_rule` by the specification; remembers the segments of every call."""

    def __init__(self):
        self.calls = []

    def __call__(
        self,
        q,
        k,
        v,
        g,
        beta,
        *,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        state_v_first,
        cu_seqlens,
    ):
        assert output_final_state and use_qk_l2norm_in_kernel and state_v_first
        offsets = cu_seqlens.tolist()
        self.calls.append([hi - lo for lo, hi in pairwise(offsets)])
        inputs = [x[0] for x in (q, k, v, g, beta)]
        outs, states = [], []
        for (lo, hi), state in zip(pairwise(offsets), initial_state, strict=True):
            o, final = reference.gated_delta_rule(*(x[lo:hi] for x in inputs), state)
            outs.append(o)
            states.append(final)
        return torch.cat(outs)[None], torch.stack(states)


@pytest.mark.parametrize("pack", PACKS.values(), ids=list(PACKS))
def test_every_pack_matches_the_specification_and_touches_nothing_else(pack):
    inputs = delta_inputs(pack.num_tokens, H, HV, K, V, torch.float32)
    pool = Pool.poisoned(pack.num_slots, HV, V, K, dtype=torch.float32, filled=pack.sources)
    before, expected = pool.clone(), pool.double()
    o = FlaPrefill(Rule())(*inputs, pool.view, **pack.vectors())
    o64 = reference.gated_delta_prefill(*as_double(*inputs), expected.view, **pack.vectors())
    real = real_tokens(pack)
    assert error(o[real], o64[real]) < TOLERANCE[torch.float32]
    for slot in pack.written:
        assert error(pool.view[slot], expected.view[slot]) < TOLERANCE[torch.float32]
    assert pool.untouched_but(before, pack.written)


def test_rows_are_cut_at_their_snapshots_and_run_together_otherwise():
    pack = Pack([200, 65, 0, 3], [1, -1, 1, 1], [2, 3, 4, 0], {0: 5, 2: 6, 4: 7})
    rule = Rule()
    inputs = delta_inputs(pack.num_tokens, H, HV, K, V, torch.float32)
    pool = Pool.poisoned(pack.num_slots, HV, V, K, dtype=torch.float32, filled=pack.sources)
    FlaPrefill(rule)(*inputs, pool.view, **pack.vectors())
    assert rule.calls == [[64, 64], [128, 1], [8]]
    assert torch.equal(pool.view[4], pool.view[1])  # the empty row copies its source


def test_what_the_other_prefills_refuse_is_refused_before_the_rule_runs():
    inputs = delta_inputs(70, H, HV, K, V, torch.float32)
    pool = Pool.poisoned(4, HV, V, K, dtype=torch.float32, filled=(1,))
    before, rule = pool.clone(), Rule()
    with pytest.raises(ValueError, match="write slot"):
        FlaPrefill(rule)(*inputs, pool.view, **Pack([70], [1], [9]).vectors())
    assert rule.calls == [] and same_bits(pool.everything, before.everything)


def test_without_fla_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    with pytest.raises(ImportError, match="pip install flash-linear-attention"):
        load_chunk_rule()


def test_the_choice_of_fla_replaces_the_prefill_and_nothing_else(monkeypatch):
    rule = Rule()
    monkeypatch.setattr("kernels.fla_prefill.load_chunk_rule", lambda: rule)
    own, fla = ops_for("meta"), ops_for("meta", delta_rule="fla")
    changed = {name for name in vars(own) if getattr(own, name) is not getattr(fla, name)}
    assert changed == {"gated_delta_prefill"}
    assert isinstance(fla.gated_delta_prefill, FlaPrefill)
