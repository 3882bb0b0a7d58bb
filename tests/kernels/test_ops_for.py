"""Which implementation runs where, and what is refused with the way out."""

import inspect

import pytest

from kernels import ops_for, reference, torch_ops, triton_ops
from kernels.linear import PackedLinear
from kernels.matmul import BatchInvariantLinear, LibraryLinear


def test_the_cpu_takes_torch_and_a_gpu_takes_triton():
    cpu, gpu = ops_for("cpu"), ops_for("cuda")
    assert cpu.gated_delta_prefill is torch_ops.gated_delta_prefill
    assert gpu.gated_delta_prefill is triton_ops.gated_delta_prefill
    assert cpu.linear is PackedLinear and gpu.linear is BatchInvariantLinear
    assert ops_for("cuda", matmul="library").linear is LibraryLinear


def test_both_paths_have_the_same_ops_with_the_same_parameters():
    assert set(torch_ops.__all__) == set(triton_ops.__all__)
    for name in set(torch_ops.__all__) - {"linear"}:
        ours, theirs = getattr(torch_ops, name), getattr(triton_ops, name)
        parameters = [
            [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
            for f in (ours, theirs)
        ]
        assert parameters[0] == parameters[1], name
        if hasattr(reference, name):
            spec = inspect.signature(getattr(reference, name)).parameters
            assert list(spec) == [parameter[0] for parameter in parameters[0]], name


def test_the_choice_of_a_matmul_replaces_it_and_nothing_else():
    own, library = ops_for("cuda"), ops_for("cuda", matmul="library")
    changed = {name for name in vars(own) if getattr(own, name) is not getattr(library, name)}
    assert changed == {"linear"}


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("mps", {}, "'mps'; supported: 'cpu', 'cuda'"),
        ("cpu", {"implementation": "numpy"}, "implementation: expected one of .* got 'numpy'"),
        ("cpu", {"delta_rule": "naive"}, "delta_rule: expected one of .* got 'naive'"),
        ("cpu", {"matmul": "fast"}, "matmul: expected one of .* got 'fast'"),
        ("cuda", {"implementation": "torch"}, "'torch' runs on 'cpu', not on 'cuda'"),
        ("cpu", {"delta_rule": "fla"}, "torch implementation has only 'own' and 'invariant'"),
        ("cpu", {"matmul": "library"}, "torch implementation has only 'own' and 'invariant'"),
        ("cpu", {"implementation": "triton"}, "TRITON_INTERPRET=1"),
    ],
)
def test_what_can_not_be_is_refused_with_the_way_out(device, options, message):
    with pytest.raises(ValueError, match=message):
        ops_for(device, **options)
