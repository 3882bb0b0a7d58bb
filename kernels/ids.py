"""Id vectors that the host knows and a device holds.

Every op checks its ids on the host before anything is launched and reads them on the device. Making
both at once, when a step is laid out, costs one small upload and no synchronisation; and because
these objects never change and are compared by identity, what is derived from them (the checks, the
chunk tables) is made once a step and not once a layer.
"""

from collections.abc import Iterable, Sequence

import torch

from kernels.slot_rules import require


def _upload(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def _integers(what: str, values: Iterable[object], bits: int) -> None:
    for value in values:
        fits = type(value) is int and -(1 << bits) <= value < 1 << bits
        require(fits, what, f"integers of {bits + 1} bits", repr(value))


class Ids:
    """A vector of ids: `host`, a tuple, and `tensor` [N] int64 on the device. Neither is to change
    (but see `of_buffer`).

    ValueError unless all are integers of 64 bits.
    """

    __slots__ = ("host", "tensor")

    def __init__(self, values: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.host = tuple(values)
        _integers("ids", self.host, 63)
        self.tensor = _upload(torch.tensor(self.host, dtype=torch.int64), device)

    @classmethod
    def of_buffer(cls, tensor: torch.Tensor, host: Sequence[int]) -> "Ids":
        """Ids for the ops of a graph: `tensor` [N] int64 is filled before every replay, and `host`
        stands for all of that, as the ops are launched for it: slots and places of padding, and
        lengths as long as they can be. ValueError unless both have N.

        Who fills the tensor checks the real ids.
        """
        right = tensor.dtype == torch.int64 and tensor.shape == (len(host),)
        actual = f"{tensor.dtype} {list(tensor.shape)}"
        require(right, "buffer of ids", f"int64 [{len(host)}]", actual)
        self = cls.__new__(cls)
        self.host, self.tensor = tuple(host), tensor
        return self

    def __len__(self) -> int:
        return len(self.host)

    def tolist(self) -> list[int]:
        return list(self.host)

    def __repr__(self) -> str:
        return f"Ids({list(self.host)}, device='{self.tensor.device}')"


class BlockTables:
    """K/V blocks of N sequences: `host`, tuples, and `tensor` [N, longest] int32, padded with 0."""

    __slots__ = ("host", "tensor")

    def __init__(self, tables: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> None:
        self.host = tuple(tuple(table) for table in tables)
        for row, table in enumerate(self.host):
            _integers(f"blocks of row {row}", table, 31)
        longest = max((len(table) for table in self.host), default=0)
        padded = [[*table, *[0] * (longest - len(table))] for table in self.host]
        host = torch.tensor(padded, dtype=torch.int32).view(len(padded), longest)
        self.tensor = _upload(host, device)

    @classmethod
    def of_buffer(cls, tensor: torch.Tensor) -> "BlockTables":
        """As `Ids.of_buffer`, of tables [N, width] int32: rows of the padding block stand for all.
        ValueError for anything else."""
        right = tensor.dtype == torch.int32 and tensor.ndim == 2
        actual = f"{tensor.dtype} {list(tensor.shape)}"
        require(right, "buffer of block tables", "int32 [N, width]", actual)
        self = cls.__new__(cls)
        self.host, self.tensor = ((0,) * tensor.shape[1],) * tensor.shape[0], tensor
        return self

    def __len__(self) -> int:
        return len(self.host)

    def tolist(self) -> list[list[int]]:
        return [list(table) for table in self.host]

    def __repr__(self) -> str:
        return f"BlockTables({self.tolist()})"


# What ops accept as ids. A tensor is read back, which waits for a device: for tests and scripts.
IdVector = Ids | torch.Tensor | Sequence[int]


def as_ids(ids: IdVector, name: str, device: torch.device) -> Ids:
    """`ids` on this device; ValueError when they lie on another one."""
    if isinstance(ids, Ids):
        require(ids.tensor.device == device, f"device of {name}", device, ids.tensor.device)
        return ids
    return Ids(as_list(ids, name), device)


def as_list(ids: IdVector, name: str) -> Sequence[int]:
    """The values on the host; ValueError unless they are an int64 vector or integers."""
    if isinstance(ids, Ids):
        return ids.host
    if isinstance(ids, torch.Tensor):
        ok = ids.dtype == torch.int64 and ids.ndim == 1
        require(ok, name, "an int64 vector", f"{ids.dtype} {list(ids.shape)}")
        return ids.tolist()
    _integers(name, ids, 63)
    return ids


def as_tables(tables: BlockTables | Sequence[Sequence[int]], device: torch.device) -> BlockTables:
    """`tables` on this device; ValueError when they lie on another one."""
    if isinstance(tables, BlockTables):
        there = tables.tensor.device
        require(there == device, "device of block_tables", device, there)
        return tables
    return BlockTables(tables, device)
