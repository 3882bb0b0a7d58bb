"""How do others compute the same ops? fla's naive rule and transformers' torch path, in our layout.

Rows are packed: q, k [T, H, K], v [T, HV, V], g and beta [T, HV]; only the state is theirs,
[HV, K, V], so that nothing is converted while the clock runs.

transformers takes fla's GPU kernels whenever it can import fla, even for CPU tensors: fla is hidden
from it, and fla's naive rule is loaded by its path.
"""

import functools
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

Tensors = tuple[torch.Tensor, ...]

_GPU_PACKAGES = ("fla", "causal_conv1d")
_MODELING = "transformers.models.qwen3_5.modeling_qwen3_5"


@functools.cache
def fla_naive_module() -> ModuleType:
    """fla's plain torch rules."""
    package = importlib.util.find_spec("fla")
    assert package is not None, "requirements.txt installs flash-linear-attention"
    path = Path(package.submodule_search_locations[0]) / "ops/gated_delta_rule/naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def transformers_module() -> ModuleType:
    """transformers' Qwen3.5 with its torch path. RuntimeError if it was imported before."""
    if _MODELING in sys.modules:
        raise RuntimeError(f"{_MODELING} is imported already: run this in a fresh process")
    before = {name: sys.modules.get(name) for name in _GPU_PACKAGES}
    sys.modules.update(dict.fromkeys(_GPU_PACKAGES))  # None: importing it fails
    try:
        return importlib.import_module(_MODELING)
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def versions() -> dict[str, str]:
    """What is compared with, for the results file."""
    packages = ("flash-linear-attention", "transformers")
    return {package: importlib.metadata.version(package) for package in packages}


def fla_naive_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> Tensors:
    """`naive_chunk_gated_delta_rule`; it wants q and k normalised and repeated for value heads."""
    q, k = (
        functional.normalize(x.float(), dim=-1).repeat_interleave(v.shape[1] // q.shape[1], 1)
        for x in (q, k)
    )
    rule = fla_naive_module().naive_chunk_gated_delta_rule
    return _delta(rule, q, k, v, g, beta, state)


def transformers_prefill(*inputs: torch.Tensor) -> Tensors:
    """`torch_chunk_gated_delta_rule`."""
    rule = transformers_module().torch_chunk_gated_delta_rule
    return _delta(rule, *inputs, use_qk_l2norm_in_kernel=True)


def fla_chunk_prefill(kernel: Any, *inputs: torch.Tensor) -> Tensors:
    """fla's GPU kernel, from `Device.fla_chunk_kernel`."""
    return _delta(kernel, *inputs, use_qk_l2norm_in_kernel=True)


def _delta(rule: Any, *inputs: torch.Tensor, **options: bool) -> Tensors:
    """One sequence: (o [T, HV, V], state [HV, V, K])."""
    q, k, v, g, beta, state = (x[None] for x in inputs)
    o, state = rule(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, **options
    )
    return o[0], state[0].transpose(1, 2)


def transformers_step(*inputs: torch.Tensor) -> Tensors:
    """`torch_recurrent_gated_delta_rule`, one token of N rows: (o [N, HV, V], [N, HV, V, K])."""
    *rows, states = inputs
    q, k, v, g, beta = (x[:, None] for x in rows)
    o, states = transformers_module().torch_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return o[:, 0], states.transpose(2, 3)


def transformers_conv(x: torch.Tensor, weight: torch.Tensor) -> Tensors:
    """`causal_conv1d_fn` of one sequence from its start: (y [T, C],)."""
    y = transformers_module().causal_conv1d_fn(x.t()[None], weight, activation="silu")
    return (y[0].t(),)


def transformers_conv_step(x: torch.Tensor, weight: torch.Tensor, windows: torch.Tensor) -> Tensors:
    """`causal_conv1d_update`, windows [N, C, W-1] in place: (y [N, C], windows [N, W-1, C])."""
    update = transformers_module().causal_conv1d_update
    y = update(x[..., None], windows, weight, activation="silu")
    return y[..., 0], windows.transpose(1, 2)


def sdpa(
    q: torch.Tensor,
    gate: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
) -> Tensors:
    """torch's attention and the gate: q [R, heads, D], keys and values [rows, kv, D], not paged."""
    rows = (x.transpose(0, 1)[None] for x in (q, keys, values))
    out = functional.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True)
    return (out[0].transpose(0, 1) * gate.sigmoid(),)
