"""The safetensors files of a model directory: which there are, and what their headers say.

A safetensors file is an 8-byte little-endian header length, a JSON header that gives each tensor's
dtype, shape and byte range, and then the bytes. Headers are read and checked here without touching
the data, so that a wrong file is refused before any tensor is loaded. `engine.weights` reads the
tensors.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

INDEX_NAME = "model.safetensors.index.json"
ITEMSIZES = {"F32": 4, "BF16": 2, "F16": 2}

_MAX_HEADER_BYTES = 100 << 20
_SAMPLES_PER_TENSOR = 8
_SAMPLE_BYTES = 64


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file: its name there, dtype code, shape, and byte range `[start, end)`."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files that hold the model, sorted by name; empty where there are none.

    The index decides where there is one (also about a single shard); else `model.safetensors`; else
    every `model*.safetensors`. Raises ValueError for a bad index or a shard that is not there.
    """
    index = read_index(directory)
    if index is None:
        single = directory / "model.safetensors"
        if single.is_file():
            return (single,)
        return tuple(sorted(directory.glob("model*.safetensors")))
    shards = sorted(set(index.values()))
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        raise ValueError(
            f"{directory / INDEX_NAME}: names {first_few(missing, 'shard files')} "
            f"missing in {directory}"
        )
    return tuple(directory / shard for shard in shards)


def read_index(directory: Path) -> dict[str, str] | None:
    """The index's map of tensor name to shard file name, or None where there is no index."""
    file = directory / INDEX_NAME
    if not file.is_file():
        return None
    try:
        raw = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from None
    index = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{file}: weight_map is {index!r}; expected tensor names and shard files")
    for name, shard in index.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(
                f"{file}: weight_map[{name!r}] is {shard!r}; expected a file of that directory"
            )
    return index


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, ordered as their bytes are.

    Raises ValueError where the file is truncated or corrupt: the byte ranges must fill the file
    without gap or overlap, and agree with dtype and shape.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        num_header_bytes = int.from_bytes(stream.read(8), "little")
        data_start = 8 + num_header_bytes
        if size < 8 or num_header_bytes > _MAX_HEADER_BYTES or data_start > size:
            raise ValueError(
                f"{file}: corrupt or truncated safetensors: {size} bytes can't hold "
                f"a header of {num_header_bytes} bytes"
            )
        header = stream.read(num_header_bytes)
    try:
        raw = json.loads(header, object_pairs_hook=_without_duplicates)
        entries = {name: entry for name, entry in raw.items() if name != "__metadata__"}
        tensors = [_stored(file, name, entry, data_start) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: corrupt safetensors header: {error}") from None
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    _check_ranges(file, tensors, data_start, size)
    return {tensor.name: tensor for tensor in tensors}


def weights_digest(directory: Path) -> str:
    """Hex digest of the weights: file names, sizes, headers, and samples of every tensor's bytes.

    Cheap (a few windows a tensor, whatever its size) and enough to tell apart models of one shape
    whose training differed; a change to single rows of a matrix may fall between the windows.
    """
    digest = xxhash.xxh3_128()
    for file in weight_files(directory):
        tensors = read_header(file)
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            for tensor in tensors.values():
                digest.update(
                    repr((tensor.name, tensor.dtype, tensor.shape, tensor.start)).encode()
                )
                span = max(tensor.end - tensor.start - _SAMPLE_BYTES, 0)
                for i in range(_SAMPLES_PER_TENSOR):
                    stream.seek(tensor.start + span * i // (_SAMPLES_PER_TENSOR - 1))
                    digest.update(stream.read(min(_SAMPLE_BYTES, tensor.end - tensor.start)))
    return digest.hexdigest()


def first_few(names: list[str], what: str, *, few: int = 5) -> str:
    """`3 tensors: a, b, c`, or `7 tensors: a, b, c, d, e, ...`."""
    rest = ", ..." if len(names) > few else ""
    return f"{len(names)} {what}: {', '.join(names[:few])}{rest}"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        names = [name for name, _ in pairs]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(first_few(duplicates, "names occur twice"))
    return seen


def _stored(file: Path, name: str, entry: dict[str, Any], data_start: int) -> StoredTensor:
    start, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, end)) or end < start:
        raise ValueError(f"{name} has shape {list(shape)} and bytes [{start}, {end})")
    itemsize = ITEMSIZES.get(dtype)
    if itemsize is not None and math.prod(shape) * itemsize != end - start:
        raise ValueError(
            f"{name} of dtype {dtype} and shape {list(shape)} needs {math.prod(shape) * itemsize} "
            f"bytes, not {end - start}"
        )
    return StoredTensor(file, name, dtype, shape, data_start + start, data_start + end)


def _check_ranges(file: Path, tensors: list[StoredTensor], data_start: int, size: int) -> None:
    expected = data_start
    for tensor in tensors:
        if tensor.start != expected:
            raise ValueError(
                f"{file}: corrupt safetensors: {tensor.name} starts at byte {tensor.start}, "
                f"expected {expected}"
            )
        expected = tensor.end
    if size != expected:
        raise ValueError(
            f"{file}: truncated or corrupt safetensors: {size} bytes, its header says {expected}"
        )
