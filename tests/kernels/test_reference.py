"""The specification against literals worked out by hand, closed forms, and fla's naive loops."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from kernels import reference
from tests.kernels.packs import PACKS, Pack, Pool, as_double, delta_inputs, error, normal, same_bits

LN2 = math.log(2.0)
SIGMOID_1 = 0.7310585786300049


def t64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def heads(values) -> torch.Tensor:
    """One head of width one a token: [T, 1, 1]."""
    return t64(values)[:, None, None]


def test_rms_norm_divides_by_the_root_mean_square_and_multiplies_by_one_plus_weight():
    # mean of squares 12.5, plus eps 12.5: x / 5
    y = reference.rms_norm(t64([[3.0, 4.0]]), t64([1.0, -0.5]), eps=12.5)
    assert_close(y, t64([[1.2, 0.4]]))


def test_gated_rms_norm_multiplies_by_the_weight_itself_and_by_silu_of_the_gate():
    gate = t64([[0.0, 1.0]])
    y = reference.gated_rms_norm(t64([[3.0, 4.0]]), gate, t64([2.0, 1.5]), eps=12.5)
    assert_close(y, t64([[0.0, 0.8 * 1.5 * SIGMOID_1]]))


def test_norms_compute_in_float32_and_return_the_dtype_of_their_input_or_gate():
    x, weight = normal(1, 4, 64, dtype=torch.bfloat16), normal(2, 64)
    exact = reference.rms_norm(x.double(), weight.double(), eps=1e-6)
    y = reference.rms_norm(x, weight, eps=1e-6)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact.bfloat16())
    gated = reference.gated_rms_norm(x.float(), x, weight, eps=1e-6)
    assert gated.dtype == torch.bfloat16


def test_rotary_turns_pairs_half_the_rotated_width_apart():
    x = t64([[[1.0, 2.0, 3.0, 4.0]]])
    # pair (0, 2) by a quarter turn, pair (1, 3) not at all
    y = reference.rotary(x, t64([[0.0, 1.0]]), t64([[1.0, 0.0]]))
    assert_close(y, t64([[[-3.0, 2.0, 1.0, 4.0]]]))


def test_rotary_leaves_the_dims_behind_the_rotated_ones_alone():
    x = t64([[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]])
    y = reference.rotary(x, t64([[0.0]]), t64([[1.0]]))
    assert_close(y, t64([[[-2.0, 1.0, 3.0, 4.0], [-6.0, 5.0, 7.0, 8.0]]]))


@pytest.mark.parametrize(
    ("a", "dt_bias", "A_log", "g"),
    [
        (0.0, 0.0, 0.0, -LN2),
        (2.0, -2.0, math.log(3.0), -3 * LN2),
        (30.0, 20.0, 0.0, -50.0),  # softplus(x) = x far up
        (-100.0, 0.0, 0.0, -math.exp(-100.0)),  # and exp(x) far down
    ],
)
def test_log_decay_is_minus_exp_of_a_log_times_softplus(a, dt_bias, A_log, g):
    actual, beta = reference.delta_gates(t64([[a]]), t64([[1.0]]), t64([A_log]), t64([dt_bias]))
    assert_close(actual, t64([[g]]), rtol=1e-12, atol=0.0)
    assert_close(beta, t64([[SIGMOID_1]]))


def test_convolution_sees_older_inputs_through_the_lower_taps():
    # silu(x) = x in float64 for x above 40
    weight = t64([[1.0, 10.0, 100.0, 1000.0]])
    x, zeros = t64([[1.0], [2.0], [3.0]]), torch.zeros(3, 1, dtype=torch.float64)
    y, window = reference.causal_conv(x, weight, zeros)
    assert y.tolist() == [[1000.0], [2100.0], [3210.0]]
    assert window.tolist() == [[1.0], [2.0], [3.0]]
    y, window = reference.causal_conv(x[:1], weight, t64([[7.0], [8.0], [9.0]]))
    assert y.tolist() == [[7.0 + 80.0 + 900.0 + 1000.0]]
    assert window.tolist() == [[8.0], [9.0], [1.0]]


def test_convolution_ends_in_silu_and_keeps_channels_apart():
    x, weight = t64([[1.0, 0.0]]), t64([[9.0, 1.0], [9.0, 9.0]])
    y, _ = reference.causal_conv(x, weight, torch.zeros(1, 2, dtype=torch.float64))
    assert_close(y, t64([[SIGMOID_1, 0.0]]))


def test_delta_rule_of_width_one_follows_the_hand_worked_steps():
    # a key of 1000 normalises to 1 (eps is 1e-12 of it)
    k, q = heads([1000.0, 1000.0]), heads([1000.0, -1000.0])
    g, beta = t64([[-LN2], [0.0]]), t64([[0.25], [1.0]])
    o, state = reference.gated_delta_rule(q, k, heads([6.0, 5.0]), g, beta, t64([[[4.0]]]))
    # 4 decays to 2, moves a quarter of the way to 6; then is overwritten by 5 and read backwards
    assert_close(o.flatten(), t64([3.0, -5.0]))
    assert_close(state.flatten(), t64([5.0]))


def test_l2_norm_adds_eps_to_the_sum_of_squares_and_q_is_scaled_by_root_k():
    k = t64([[[1e-3, 0.0, 0.0, 0.0]]])  # sum of squares equals eps: normalises to sqrt(1/2)
    zero = torch.zeros(1, 1, 4, dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    o, state = reference.gated_delta_rule(k, k, heads([8.0]), 0 * one, one, zero)
    assert_close(state[0, 0], t64([8.0 * math.sqrt(0.5), 0.0, 0.0, 0.0]))
    assert_close(o.flatten(), t64([8.0 * 0.5 * 0.5]))


def test_value_heads_use_key_head_j_over_ratio_and_state_rows_are_values():
    k = 1e4 * torch.eye(2, dtype=torch.float64)[None]  # key head h is the unit vector e_h
    v = t64([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0], [10.0, 11.0, 12.0]]])
    zero = torch.zeros(4, 3, 2, dtype=torch.float64)
    ones = torch.ones(1, 4, dtype=torch.float64)
    _, state = reference.gated_delta_rule(k, k, v, 0 * ones, ones, zero)
    expected = zero.clone()
    expected[0, :, 0], expected[1, :, 0] = v[0, 0], v[0, 1]
    expected[2, :, 1], expected[3, :, 1] = v[0, 2], v[0, 3]
    assert_close(state, expected)


def test_one_key_again_and_again_converges_geometrically_to_its_value():
    num_tokens, beta = 20, 0.3
    k = t64([3e4, 4e4])[None, None].expand(num_tokens, 1, 2)
    v = t64([2.0, -1.0, 0.5])[None, None].expand(num_tokens, 1, 3)
    rates = torch.full((num_tokens, 1), beta, dtype=torch.float64)
    zero = torch.zeros(1, 3, 2, dtype=torch.float64)
    _, state = reference.gated_delta_rule(k, k, v, 0 * rates, rates, zero)
    expected = (1 - (1 - beta) ** num_tokens) * torch.outer(v[0, 0], t64([0.6, 0.8]))
    assert_close(state[0], expected)


def test_beta_zero_only_decays_the_state_by_the_sum_of_g():
    q, k, v, g, beta = as_double(*delta_inputs(17, 1, 2, 4, 3, torch.float32))
    start = normal(9, 2, 3, 4).double()
    _, state = reference.gated_delta_rule(q, k, v, g, 0 * beta, start)
    assert_close(state, start * g.sum(0).exp()[:, None, None])


def test_delta_rule_leaves_its_initial_state_alone():
    q, k, v, g, beta = as_double(*delta_inputs(3, 1, 1, 4, 4, torch.float32))
    start = torch.ones(1, 4, 4, dtype=torch.float64)
    reference.gated_delta_rule(q, k, v, g, beta, start)
    assert torch.equal(start, torch.ones_like(start))


def fla_naive():
    """fla's naive module, loaded by path: importing fla itself warns and looks for a GPU."""
    package = importlib.util.find_spec("fla")
    assert package is not None, "requirements.txt installs flash-linear-attention"
    path = Path(package.submodule_search_locations[0]) / "ops/gated_delta_rule/naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", ["naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"]
)
@pytest.mark.parametrize("ratio", [1, 3])
def test_delta_rule_agrees_with_fla(name, ratio):
    HV = 2 * ratio
    q, k, v, g, beta = delta_inputs(70, 2, HV, 16, 8, torch.float32)
    start = normal(9, HV, 8, 16)
    o, state = reference.gated_delta_rule(*as_double(q, k, v, g, beta, start))
    qn, kn = (torch.nn.functional.normalize(x, dim=-1).repeat_interleave(ratio, 1) for x in (q, k))
    fla_o, fla_state = getattr(fla_naive(), name)(
        q=qn[None],
        k=kn[None],
        v=v[None],
        g=g[None],
        beta=beta[None],
        initial_state=start.transpose(1, 2)[None],
        output_final_state=True,
    )
    assert error(fla_o[0], o) < 2e-6
    assert error(fla_state[0].transpose(1, 2), state) < 2e-6


def test_prefill_continues_sources_writes_targets_and_takes_snapshots():
    pack = PACKS["mixed"]
    q, k, v, g, beta = inputs = as_double(*delta_inputs(pack.num_tokens, 1, 2, 4, 3, torch.float32))
    pool = Pool.poisoned(pack.num_slots, 2, 3, 4, dtype=torch.float64, filled=pack.sources)
    before = pool.clone()
    o = reference.gated_delta_prefill(*inputs, pool.view, **pack.vectors())

    def run(row, num_tokens=None):
        part = pack.segments()[row]
        part = slice(part.start, part.stop if num_tokens is None else part.start + num_tokens)
        start = before.view[pack.reads[row]].clone()
        start = start if pack.reads[row] >= 0 else torch.zeros_like(start)
        return reference.gated_delta_rule(*(x[part] for x in (q, k, v, g, beta)), start)

    for row, (part, slot) in enumerate(zip(pack.segments(), pack.writes, strict=True)):
        outputs, state = run(row)
        if slot:
            assert same_bits(o[part], outputs)
            assert same_bits(pool.view[slot], state)
    assert same_bits(pool.view[7], run(0, 64)[1])
    assert same_bits(pool.view[8], run(2, 128)[1])
    assert same_bits(pool.view[10], run(4, 64)[1])
    assert pool.untouched_but(before, pack.written)


def test_padding_rows_write_nothing():
    pack = Pack([3, 2, 1], [-1, 1, -1], [0, 2, 0])
    inputs = as_double(*delta_inputs(6, 1, 2, 4, 3, torch.float32))
    states = Pool.poisoned(5, 2, 3, 4, dtype=torch.float64, filled=(1,))
    windows = Pool.poisoned(5, 3, 2, dtype=torch.float64, filled=(1,))
    before = states.clone(), windows.clone()
    reference.gated_delta_prefill(*inputs, states.view, **pack.vectors())
    x, weight = as_double(normal(1, 6, 2), normal(2, 2, 4))
    reference.causal_conv_prefill(x, weight, windows.view, **pack.vectors())
    for pool, old in zip((states, windows), before, strict=True):
        assert pool.untouched_but(old, {2})
        assert not pool.view[2].isnan().any()


def test_step_is_a_prefill_of_one_token_a_row():
    inputs = as_double(*delta_inputs(3, 1, 2, 4, 3, torch.float32))
    pools = [Pool.poisoned(6, 2, 3, 4, dtype=torch.float64, filled=(2, 3)) for _ in range(2)]
    slots = {"read_slots": torch.tensor([2, -1, 3]), "write_slots": torch.tensor([2, 1, 4])}
    o = reference.gated_delta_step(*inputs, pools[0].view, **slots)
    pack = {"cu_seqlens": torch.arange(4), "snapshot_slots": torch.tensor([-1, -1, -1])}
    expected = reference.gated_delta_prefill(*inputs, pools[1].view, **slots, **pack)
    assert same_bits(o, expected)
    assert same_bits(pools[0].everything, pools[1].everything)


def test_attention_weighs_values_by_softmax_of_scaled_scores_then_gates():
    # scale is 1/2: scores ln 3 and 0, weights 3/4 and 1/4, gate sigmoid(0) = 1/2
    q, gate = torch.zeros(1, 4, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64)
    q[0, 0] = 2 * math.log(3.0)
    keys = t64([[[1.0, 0.0, 0.0, 0.0]], [[0.0] * 4]])
    values = t64([[[4.0, 0.0, 8.0, 1.0]], [[8.0, 4.0, 8.0, 1.0]]])
    assert_close(reference.attend(q, gate, keys, values), t64([[2.5, 0.5, 4.0, 0.5]]))


def test_query_heads_share_the_kv_head_h_over_ratio():
    q = torch.zeros(4, 2, dtype=torch.float64)
    values = t64([[[1.0, 1.0], [2.0, 2.0]]])
    out = reference.attend(q, q, torch.zeros_like(values), values)
    assert_close(out[:, 0], t64([0.5, 0.5, 1.0, 1.0]))


def test_query_heads_score_against_the_kv_head_h_over_ratio():
    # K/V head 1 prefers its second row strongly, K/V head 0 has no preference
    keys = t64([[[0.0], [0.0]], [[0.0], [99.0]]])
    values = t64([[[2.0], [2.0]], [[4.0], [4.0]]])
    q = torch.ones(4, 1, dtype=torch.float64)
    out = reference.attend(q, 0 * q, keys, values)
    assert_close(out[:, 0], t64([1.5, 1.5, 2.0, 2.0]))


def position_caches(num_rows, block_size, table, num_blocks):
    """Keys of zero and values that hold their own position; rows of nobody are NaN."""
    k_cache = torch.full((num_blocks, block_size, 1, 2), float("nan"), dtype=torch.float64)
    v_cache = k_cache.clone()
    for t in range(num_rows):
        block, offset = table[t // block_size], t % block_size
        k_cache[block, offset], v_cache[block, offset] = 0.0, float(t)
    return k_cache, v_cache


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_token_t_attends_to_itself_and_all_before_it_through_the_block_table(block_size):
    num_rows, start = 69, 64
    num_blocks = -(-num_rows // block_size)
    table = [num_blocks - block for block in range(num_blocks)]  # backwards, block 0 unused
    caches = position_caches(num_rows, block_size, table, num_blocks + 1)
    q = torch.zeros(5, 1, 2, dtype=torch.float64)
    out = reference.attention_prefill(
        q,
        q,
        *caches,
        cu_seqlens=torch.tensor([0, 5]),
        start_positions=[start],
        block_tables=[table],
    )
    assert_close(out[:, 0, 0], t64([t / 2 / 2 for t in range(64, 69)]))  # mean of 0..t, halved
    decode = reference.attention_decode(
        q[:2], q[:2], *caches, kv_lens=[69, 1], block_tables=[table, table]
    )
    assert_close(decode[:, 0, 0], t64([17.0, 0.0]))


def test_kv_rows_go_to_their_flat_index():
    k, v = normal(1, 2, 1, 4), normal(2, 2, 1, 4)
    caches = torch.zeros(2, 3, 4, 1, 4)
    reference.write_kv(k, v, caches[0], caches[1], torch.tensor([11, 4]))
    expected = torch.zeros(2, 12, 1, 4)
    expected[0, 11], expected[0, 4], expected[1, 11], expected[1, 4] = k[0], k[1], v[0], v[1]
    assert torch.equal(caches.view(2, 12, 1, 4), expected)


def test_slots_are_copied_and_zeroed_whole():
    arena = torch.arange(5, dtype=torch.uint8)[:, None].expand(5, 3).clone()
    reference.copy_slots(arena, [4, 4], [1, 2])
    reference.zero_slots(arena, [3])
    assert arena[:, 0].tolist() == [0, 4, 4, 0, 4]
    assert torch.equal(arena, arena[:, :1].expand(5, 3))
