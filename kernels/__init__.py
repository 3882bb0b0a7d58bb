"""Ops on tensors. `ops_for` is the one place that picks an implementation by device."""

from types import ModuleType, SimpleNamespace

from kernels import torch_ops
from kernels.constants import KERNEL_CHUNK

__all__ = ["DELTA_RULES", "IMPLEMENTATIONS", "KERNEL_CHUNK", "MATMULS", "Ops", "ops_for"]

IMPLEMENTATIONS = ("auto", "torch", "triton")
DELTA_RULES = ("own", "fla")
MATMULS = ("invariant", "library")

# The functions of `torch_ops.__all__`, each with the same signature, and `can_capture`: whether
# they read ids on the device alone, so that a graph can hold them.
Ops = SimpleNamespace


def ops_for(
    device_type: str,
    *,
    implementation: str = "auto",
    delta_rule: str = "own",
    matmul: str = "invariant",
) -> Ops:
    """The ops that run on this device type; ValueError where there are none.

    implementation: "auto" takes torch on "cpu" and Triton on "cuda" (NVIDIA and AMD); "triton" on
        "cpu" is its interpreter and needs TRITON_INTERPRET=1 from the start.
    delta_rule: "fla" prefills with flash-linear-attention's chunk kernel, matmul: "library" with
        the library's matrix products; both only with Triton, and both give up exactness.
    """
    for name, value, known in (
        ("implementation", implementation, IMPLEMENTATIONS),
        ("delta_rule", delta_rule, DELTA_RULES),
        ("matmul", matmul, MATMULS),
    ):
        if value not in known:
            raise ValueError(f"{name}: expected one of {known}, got {value!r}")
    if device_type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"no kernels for device {device_type!r}; supported: 'cpu', 'cuda'")
    if implementation == "auto":
        implementation = "torch" if device_type == "cpu" else "triton"
    if implementation == "torch":
        if device_type != "cpu":
            raise ValueError(f"implementation='torch' runs on 'cpu', not on {device_type!r}")
        if (delta_rule, matmul) != ("own", "invariant"):
            raise ValueError(
                f"delta_rule={delta_rule!r}, matmul={matmul!r}: the torch implementation has only "
                "'own' and 'invariant'"
            )
        return _namespace(torch_ops)
    from kernels import triton_ops  # imports triton, which the torch path does without
    from kernels.launch import INTERPRETED

    if device_type == "cpu" and not INTERPRETED:
        raise ValueError(
            "implementation='triton' on 'cpu' is the interpreter: set TRITON_INTERPRET=1 before "
            "Python starts, or use device 'cuda'"
        )

    ops = _namespace(triton_ops)
    if delta_rule == "fla":
        from kernels.fla_prefill import FlaPrefill, load_chunk_rule

        ops.gated_delta_prefill = FlaPrefill(load_chunk_rule())
    if matmul == "library":
        from kernels.matmul import LibraryLinear

        ops.linear = LibraryLinear
    return ops


def _namespace(module: ModuleType) -> Ops:
    functions = {name: getattr(module, name) for name in module.__all__}
    return Ops(**functions, can_capture=module is not torch_ops)
