"""What all Triton launches have in common: options, targets, strides and refusals."""

from types import SimpleNamespace

import pytest
import torch

from kernels import launch, rows
from kernels.launch import Target, recording
from kernels.norms import rms_norm

CPU, META = torch.device("cpu"), torch.device("meta")


def test_the_compiler_never_fuses_a_multiplication_with_an_addition():
    with recording(Target("sm_90")) as launches:
        rms_norm(torch.zeros(2, 64), torch.zeros(64), eps=1e-6)
    assert [one.options["enable_fp_fusion"] for one in launches] == [False]


def test_an_empty_grid_is_no_launch():
    with recording(Target("sm_90")) as launches:
        for grid in ((0,), (3, 0), (0, 3, 2)):
            launch.launch(None, grid, num_warps=1, num_stages=1)
    launch.launch(None, (0, 3), num_warps=1, num_stages=1)
    assert launches == []


def test_a_tensor_without_memory_is_refused_except_while_recording():
    launch.require_runnable(CPU)
    with recording(Target("sm_90")):
        launch.require_runnable(META)
    with pytest.raises(ValueError, match=r"device: expected 'cuda'.*got meta"):
        launch.require_runnable(META)


def test_the_target_is_the_recorded_one_as_long_as_it_is_recorded():
    with recording(Target("gfx942", 7)):
        with recording(Target("sm_100")):
            assert launch.target_of(CPU) == Target("sm_100")
        assert launch.target_of(CPU) == Target("gfx942", 7)
    assert launch.target_of(CPU) == Target("sm_90", 4)


def test_a_wavefront_is_twice_a_warp():
    warps = {}
    for name in ("sm_80", "sm_90", "sm_100", "gfx942"):
        with recording(Target(name)):
            warps[name] = [rows.num_warps(n, CPU) for n in (1, 256, 512, 1024, 3072, 8192)]
    assert warps["sm_80"] == warps["sm_90"] == warps["sm_100"] == [1, 1, 2, 4, 8, 8]
    assert warps["gfx942"] == [1, 1, 1, 2, 8, 8]


def test_the_stride_of_a_lone_row_says_nothing():
    assert rows.row_stride(torch.zeros(8).as_strided((1, 8), (7, 1))) == 0
    assert rows.row_stride(torch.zeros(15).as_strided((2, 8), (7, 1))) == 7


def test_wide_loads_follow_from_the_width_alone():
    widths = (1, 2, 4, 8, 12, 33, 64)
    half, single = torch.zeros(1, 64, dtype=torch.float16), torch.zeros(1, 64)
    assert [rows.vector_width(half[:, :n]) for n in widths] == [1, 1, 1, 8, 1, 1, 8]
    assert [rows.vector_width(single[:, :n]) for n in widths] == [1, 1, 4, 4, 4, 1, 4]


def test_rows_of_another_device_dtype_or_with_columns_apart_are_refused():
    x = torch.zeros(2, 8)
    rows.check(x, y=x.half(), z=torch.zeros(2, 1).expand(2, 1))
    bad = {
        "device of y: expected cpu, got meta": x.to("meta"),
        "dtype of y: .*torch.float64": x.double(),
        "last stride of y: expected 1, got 2": torch.zeros(2, 16)[:, ::2],
    }
    for message, y in bad.items():
        with pytest.raises(ValueError, match=message):
            rows.check(x, y=y)


def test_rows_that_wide_loads_do_not_fit_are_refused():
    rows.check_aligned(x=torch.zeros(3, 12)[:, 4:12], lone=torch.zeros(1, 9)[:, :8])
    with pytest.raises(ValueError, match=r"address of x: .* got 8 more"):
        rows.check_aligned(x=torch.zeros(3, 12)[:, 2:10])
    with pytest.raises(ValueError, match="strides of x: expected multiples of 4"):
        rows.check_aligned(x=torch.zeros(3, 9)[:, :8])
    with pytest.raises(ValueError, match="strides of x: expected multiples of 8"):
        rows.check_aligned(x=torch.zeros(1, 2, 12, dtype=torch.float16)[..., :8])


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"device: expected 'cuda'.*got cpu"):
        launch.require_runnable(CPU)


@pytest.mark.parametrize(
    ("major", "minor", "name"),
    [(8, 0, "sm_80"), (9, 0, "sm_90"), (10, 0, "sm_100"), (10, 3, "sm_100")],
)
def test_a_gpu_gets_the_tiles_of_its_target(monkeypatch, major, minor, name):
    gpu = SimpleNamespace(name="G", major=major, minor=minor, multi_processor_count=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    launch._device_target.cache_clear()
    assert launch.target_of(torch.device("cuda")) == Target(name, 7)


@pytest.mark.parametrize(("major", "minor"), [(7, 5), (8, 6), (8, 9), (12, 0)])
def test_a_gpu_that_no_tiles_were_made_for_is_refused_by_name(monkeypatch, major, minor):
    gpu = SimpleNamespace(name="Small", major=major, minor=minor, multi_processor_count=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    launch._device_target.cache_clear()
    with pytest.raises(ValueError, match=rf"GPU 'Small'.*sm_80.*got sm_{major}{minor}"):
        launch.target_of(torch.device("cuda"))
