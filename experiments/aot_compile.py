"""Compiles recorded kernel launches without a GPU and reads what the machine code uses."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.launch import Launch, Target

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Shared memory (LDS) that one program may use, in bytes.
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}

UNKNOWN_BITS = -1
WIDE = "# wide"  # ends a source line whose global accesses are to be 16 bytes a thread
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes. spills: bytes of local memory, or spilled registers on AMD.
    access_bits: the narrowest access on lines marked `# wide`, 0 if no line is marked."""

    kernel: str
    target: str
    registers: int
    spills: int
    shared_bytes: int
    access_bits: int
    num_warps: int


def signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """Types, constants and attributes as the run-time specialises them: None and the integer 1
    become constants, pointers and integers that 16 divides are known to be so."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constexprs)
    attributes: dict[tuple[int], Any] = {}
    arguments = iter(launch.args)
    for i, parameter in enumerate(launch.kernel.params):
        if parameter.is_constexpr:
            types[parameter.name] = "constexpr"
            continue
        value = next(arguments)
        if isinstance(value, torch.Tensor):
            types[parameter.name] = "*" + _TYPES[value.dtype]
            divisible = value.storage_offset() * value.element_size() % 16 == 0
        else:
            specialise = not parameter.do_not_specialize
            if value is None or (value == 1 and specialise):
                types[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            types[parameter.name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            divisible = specialise and value % 16 == 0
        if divisible:
            attributes[(i,)] = [["tt.divisibility", 16]]
    assert next(arguments, None) is None, launch.kernel.__name__
    return types, constants, attributes


def compile_launch(launch: Launch, target: Target) -> Usage:
    """Compile what this launch would run on `target` and read its usage."""
    types, constants, attributes = signature(launch)
    source = ASTSource(launch.kernel, types, constants, attributes)
    compiled = triton.compile(source, target=TARGETS[target.name], options=dict(launch.options))
    text = compiled.asm["amdgcn" if target.is_amd else "ptx"]
    if target.is_amd:
        registers = int(re.search(r"\.vgpr_count:\s*(\d+)", text)[1])
        spills = int(re.search(r"\.vgpr_spill_count:\s*(\d+)", text)[1])
        shared = int(re.search(r"\.group_segment_fixed_size:\s*(\d+)", text)[1])
    else:
        registers, spills = _cubin_usage(compiled.asm["cubin"])
        shared = 0
    return Usage(
        kernel=name_of(launch.kernel),
        target=target.name,
        registers=registers,
        spills=spills,
        shared_bytes=max(shared, compiled.metadata.shared),
        access_bits=access_bits(text, wide_lines(launch.kernel)),
        num_warps=launch.options["num_warps"],
    )


def name_of(kernel: Any) -> str:
    """module.function, without the underscores of private names: 'gated_delta_step.step'."""
    function = kernel.__name__.strip("_").removesuffix("_kernel")
    return f"{kernel.__module__.removeprefix('kernels.')}.{function}"


def _cubin_usage(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of local memory: stack and spills)"""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


def wide_lines(kernel: Any) -> set[int]:
    """Line numbers, in its file, of the kernel's lines marked `# wide`."""
    first = kernel.starting_line_number
    lines = kernel.raw_src if isinstance(kernel.raw_src, list) else kernel.raw_src.splitlines()
    return {first + i for i, line in enumerate(lines) if line.rstrip().endswith(WIDE)}


_ACCESS = {
    # PTX: ld.global.v4.b32, st.global.b32, cp.async...0x10
    re.compile(r"\b(?:ld|st)\.global\S*?\.(?:v(\d)\.)?[bfus](\d+)\b"): None,
    re.compile(r"\bcp\.async\.\S+\s.*,\s*0x([0-9a-f]+)"): "async",
    # GCN: global_load_dwordx4, buffer_store_short
    re.compile(r"\b(?:global|buffer|flat)_(?:load|store)_(\w+)"): "gcn",
}
_GCN_BITS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32}


def access_bits(text: str, lines: set[int]) -> int:
    """The narrowest global access on these source lines, in bits; 0 without lines.

    Source lines come from the .loc directives. A line in a branch that was not compiled is left
    out; if one that is there shows no access, or none is there, the answer is UNKNOWN_BITS.
    """
    if not lines:
        return 0
    narrowest: dict[int, int] = {}
    seen: set[int] = set()
    line = 0
    for row in text.splitlines():
        if location := re.match(r"\s*\.loc\s+\d+\s+(\d+)", row):
            line = int(location[1])
            seen.add(line)
        elif line in lines and (bits := _bits(row)):
            narrowest[line] = min(bits, narrowest.get(line, bits))
    missing = lines & seen - set(narrowest)
    return UNKNOWN_BITS if missing or not narrowest else min(narrowest.values())


def _bits(row: str) -> int:
    for pattern, kind in _ACCESS.items():
        if match := pattern.search(row):
            if kind == "async":
                return int(match[1], 16) * 8
            if kind == "gcn":
                return _GCN_BITS.get(match[1], 16)
            return int(match[1] or 1) * int(match[2])
    return 0
