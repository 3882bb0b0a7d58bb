"""The ahead-of-time gate: it compiles what would be launched, and it fails on what it must."""

import json

import pytest
import torch
import triton
import triton.language as tl

from experiments import aot
from experiments.aot import REGISTER_BUDGETS, faults, launches, main
from experiments.aot_compile import UNKNOWN_BITS, access_bits, compile_launch, signature, wide_lines
from kernels import triton_ops
from kernels.launch import Target, launch, recording

SM_90 = Target("sm_90")
GOOD = {
    "kernel": "gated_delta_step.step",
    "target": "sm_90",
    "shape": "9b",
    "registers": 96,
    "spills": 0,
    "shared_bytes": 512,
    "access_bits": 128,
}


@triton.jit(do_not_specialize=["n"])
def _copy(p_x, p_y, n, width, NARROW: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if NARROW:
        o = o * width
    b = tl.load(p_x + o)  # wide
    tl.store(p_y + o, b + n)


def recorded(*, offset=0, n=1024, width=16, narrow=False):
    x = torch.empty(4096, device="meta")
    with recording(SM_90) as found:
        launch(
            _copy,
            (1,),
            x[offset:],
            x,
            n,
            width,
            NARROW=narrow,
            BLOCK=1024,
            num_warps=4,
            num_stages=1,
        )
    return found[0]


def test_arguments_are_specialised_as_at_run_time():
    types, constants, attributes = signature(recorded())
    assert types == {
        "p_x": "*fp32",
        "p_y": "*fp32",
        "n": "i32",
        "width": "i32",
        "NARROW": "constexpr",
        "BLOCK": "constexpr",
    }
    assert constants == {"NARROW": False, "BLOCK": 1024}
    divisible = [["tt.divisibility", 16]]
    assert attributes == {(0,): divisible, (1,): divisible, (3,): divisible}  # n is not looked at
    types, constants, attributes = signature(recorded(offset=1, width=1))
    assert types["width"] == "constexpr" and constants["width"] == 1
    assert set(attributes) == {(1,)}
    assert signature(recorded(n=1 << 31))[0]["n"] == "i64"


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_wide_accesses_are_told_from_narrow_ones(target):
    usage = compile_launch(recorded(width=1), Target(target))
    assert usage.access_bits == 128 and usage.spills == 0 and usage.registers > 0
    assert usage.kernel.endswith("copy") and usage.target == target
    assert compile_launch(recorded(width=3, narrow=True), Target(target)).access_bits == 32


def test_a_marked_line_without_an_access_is_not_called_wide():
    [line] = wide_lines(_copy)
    wide, other = f"\t.loc\t1 {line} 5\n", "\t.loc\t1 1 5\n"
    load = "\tld.global.v4.b32 {%r1, %r2, %r3, %r4}, [ %rd1 + 0 ];\n"
    assert access_bits(wide + load, {line}) == 128
    assert access_bits(other + load, {line}) == UNKNOWN_BITS
    assert access_bits(wide + other + load, {line}) == UNKNOWN_BITS
    assert access_bits(wide + load + wide + "\tst.global.b16 [ %rd1 ], %rs1;\n", {line}) == 16
    assert (
        access_bits(wide + "\tcp.async.cg.shared.global [ %r1 ], [ %rd1 ], 0x10;\n", {line}) == 128
    )
    assert access_bits(wide + "\tglobal_load_dwordx2 v[0:1], v[2:3], off\n", {line}) == 64
    assert access_bits(load, set()) == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"access_bits": 0}, None),
        ({"spills": 8}, "8 spilled"),
        ({"registers": 113}, "113 registers, budget 112"),
        ({"registers": 97, "target": "gfx942"}, "97 registers, budget 96"),
        ({"shared_bytes": (227 << 10) + 1}, "bytes shared, limit 232448"),
        ({"shared_bytes": (64 << 10) + 1, "target": "gfx942"}, "bytes shared, limit 65536"),
        ({"access_bits": 64}, "marked wide: 64 bits"),
        ({"access_bits": UNKNOWN_BITS}, "marked wide: none found"),
        ({"kernel": "new.kernel"}, "no register budget"),
    ],
)
def test_every_fault_of_a_row_is_named(changed, message):
    found = list(faults({**GOOD, **changed}))
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


def test_the_engine_and_every_op_are_compiled_and_nothing_leaves_the_device():
    """Tensors have no memory: one left on the CPU would fail in torch, or is seen here."""
    found = launches("9b", SM_90)
    for one in found:
        tensors = [x for x in one.args if isinstance(x, torch.Tensor)]
        assert tensors and all(x.device.type == "meta" for x in tensors), one.kernel.__name__
        assert one.options["enable_fp_fusion"] is False
    modules = {one.kernel.__module__ for one in found}
    ops = [getattr(triton_ops, name) for name in triton_ops.__all__ if name != "check_model"]
    assert {op.__module__ for op in ops} == modules
    assert {aot_name(one) for one in found} == set(REGISTER_BUDGETS)


def aot_name(one):
    from experiments.aot_compile import name_of

    return name_of(one.kernel)


def test_the_gate_writes_its_table_and_fails_with_the_fault_named(tmp_path, monkeypatch, capsys):
    out = tmp_path / "aot.json"
    rows = [GOOD | {"num_warps": 4}]
    monkeypatch.setattr(aot, "compile_all", None)
    monkeypatch.setattr(aot, "ProcessPoolExecutor", lambda n: Pool(rows))
    options = ["--shapes", "9b", "--targets", "sm_90", "--output", str(out)]
    assert main(options) == 0
    assert json.loads(out.read_text())["kernels"] == rows
    rows[0] |= {"spills": 8}
    assert main(options) == 1
    assert "gated_delta_step.step at 9b for sm_90: 8 spilled" in capsys.readouterr().err


class Pool:
    """Stands where the process pool stands: the rows are there already."""

    def __init__(self, rows):
        self.rows = rows

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def map(self, _, jobs):
        assert jobs == [("9b", "sm_90")]
        return [self.rows]


def test_the_committed_table_is_of_every_kernel_shape_and_target():
    rows = json.loads((aot.RESULTS / "aot.json").read_text())["kernels"]
    assert {row["kernel"] for row in rows} == set(REGISTER_BUDGETS)
    assert {row["target"] for row in rows} == set(aot.TARGETS)
    assert {row["shape"] for row in rows} == set(aot.SHAPES)
    assert not [fault for row in rows for fault in faults(row)]


@pytest.mark.parametrize("option", [["--output", "."], ["--output", "x.txt"], ["--shapes", "1b"]])
def test_bad_options_are_refused_before_anything_is_compiled(option, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(option)
    assert stopped.value.code == 2 and option[1] in capsys.readouterr().err


def test_a_table_that_did_not_change_is_not_written_again(tmp_path, monkeypatch):
    out = tmp_path / "aot.json"
    monkeypatch.setattr(aot, "compile_all", None)
    monkeypatch.setattr(aot, "ProcessPoolExecutor", lambda n: Pool([GOOD | {"num_warps": 4}]))
    options = ["--shapes", "9b", "--targets", "sm_90", "--output", str(out)]
    assert main(options) == 0
    out.write_text(out.read_text().replace('"date"', '"an older date"'))
    before = out.read_text()
    assert main(options) == 0 and out.read_text() == before
