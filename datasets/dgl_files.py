"""DGL's own binary files (``dgl.save_graphs``, ``save_tensors``) read as arrays, with every length checked.

DGL's reader trusts the lengths in a file, so a damaged one can end the process. This one reads the same layout, version
2 of it, which holds no pickle: little-endian numbers; a list or text is its length as uint64, then its items. A graph
is a ``meta`` graph of types, then for each edge type its edges as COO, CSR or CSC, then the tensors.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from nugnn._regular_file import require_file
from nugnn.datasets.unpacking import check_fits_memory

_GRAPHS_MAGIC = 0xDD2E4FF046B4A13F
_TENSORS_MAGIC = 0xDD5A9FBE3FA2443F
_ARRAY_MAGIC = 0xDD5E40F096B4A13F
_HETEROGRAPH_MAGIC = 0xDD589FBE35224ABF
_META_MAGIC = 0xDD3C5FFE20046ABF
_EDGES_MAGIC = 0xDD2E60F0F6B4A127
_CSR_MAGIC = 0xDD6CD31205DFF127
_COO_MAGIC = 0xDD61FFD305DFF127

_HEADER_BYTES = 4096
_COO, _CSR, _CSC = 1, 2, 4
_MAX_DIMS = 16

_DTYPES = {  # (type code, bits); DGL writes bool as uint8
    (0, 8): torch.int8,
    (0, 16): torch.int16,
    (0, 32): torch.int32,
    (0, 64): torch.int64,
    (1, 8): torch.uint8,
    (2, 16): torch.float16,
    (2, 32): torch.float32,
    (2, 64): torch.float64,
    (4, 16): torch.bfloat16,
}

T = TypeVar("T")


@dataclass(frozen=True)
class DglGraphFile:
    """What one homogeneous graph of a DGL file holds; edge ``e`` is ``src[e] -> dst[e]``, ids in ``[0, num_nodes)``."""

    num_nodes: int
    src: Tensor
    dst: Tensor
    node_data: dict[str, Tensor] = field(default_factory=dict)
    edge_data: dict[str, Tensor] = field(default_factory=dict)


def read_dgl_graph_file(path: str | os.PathLike[str]) -> DglGraphFile:
    """The one homogeneous graph of a file that ``dgl.save_graphs`` wrote.

    Raises:
        ValueError: the file is missing, damaged, of another version, or holds several graphs or a heterograph; names
            the file.
    """
    path = Path(path)
    cursor = _open(path)
    try:
        return _read_graph_file(cursor)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_dgl_tensor_file(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a file that ``dgl.data.utils.save_tensors`` wrote, as in the features of a DGL partition.

    Raises:
        ValueError: the file is missing or damaged; names the file.
    """
    path = Path(path)
    cursor = _open(path)
    try:
        cursor.expect(_TENSORS_MAGIC, "it is not a file of tensors that DGL saved")
        cursor.uint64()  # the number of tensors, which their list repeats
        tensors = cursor.named_tensors()
        cursor.expect_end()
        return tensors
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def is_dgl_file(path: Path) -> bool:
    """Whether the file begins as one that ``dgl.save_graphs`` writes."""
    with path.open("rb") as file:
        return file.read(8) == struct.pack("<Q", _GRAPHS_MAGIC)


class _Cursor:
    """A place in the bytes of a file; every read checks that the bytes are there."""

    def __init__(self, content: bytearray) -> None:
        self._content = content
        self.place = 0

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self._content) - self.place:
            raise ValueError(
                f"the file is damaged or cut off: at byte {self.place} it announces {num_bytes} bytes, "
                f"{len(self._content) - self.place} are left. Get or save it again"
            )
        taken = memoryview(self._content)[self.place : self.place + num_bytes]
        self.place += num_bytes
        return taken

    def uint8(self) -> int:
        return self.take(1)[0]

    def uint64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def expect(self, magic: int, problem: str) -> None:
        place = self.place
        if self.uint64() != magic:
            raise ValueError(f"{problem} (byte {place}); save it again with this or an older version of DGL")

    def expect_end(self) -> None:
        if self.place != len(self._content):
            raise ValueError(
                f"the file is damaged: {len(self._content) - self.place} bytes are left over. Get it again"
            )

    def text(self) -> str:
        try:
            return bytes(self.take(self.uint64())).decode()
        except UnicodeDecodeError:
            raise ValueError(f"the file is damaged: the name before byte {self.place} is not UTF-8") from None

    def items(self, read: Callable[[], T]) -> list[T]:
        count = self.uint64()
        if count > len(self._content) - self.place:  # every item has a byte at least
            raise ValueError(f"the file is damaged: a list of {count} items before byte {self.place}. Get it again")
        return [read() for _ in range(count)]

    def tensor(self) -> Tensor:
        self.expect(_ARRAY_MAGIC, "the file is damaged: no array where one has to be")
        self.uint64()  # reserved
        self.take(8)  # the device it lay on
        num_dims, code, bits, lanes = struct.unpack("<iBBH", self.take(8))
        dtype = _DTYPES.get((code, bits))
        if dtype is None or lanes != 1:
            raise ValueError(
                f"the array before byte {self.place} has the type {code}/{bits}/{lanes}, which DGL has not"
            )
        if not 0 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"the file is damaged: an array of {num_dims} dimensions before byte {self.place}")
        shape = struct.unpack(f"<{num_dims}q", self.take(8 * num_dims))
        num_bytes = self.uint64()
        if min(shape, default=0) < 0 or math.prod(shape) * (bits // 8) != num_bytes:
            raise ValueError(f"the file is damaged: shape {shape} before byte {self.place} is not {num_bytes} bytes")
        if max(shape, default=0) >= 2**62:
            raise ValueError(f"the file is damaged: shape {shape} before byte {self.place}")
        content = self.take(num_bytes)
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy()).view(dtype).reshape(shape)

    def named_tensors(self) -> dict[str, Tensor]:
        return dict(self.items(lambda: (self.text(), self.tensor())))


def _open(path: Path) -> _Cursor:
    require_file(path)
    check_fits_memory(path, path.stat().st_size)
    return _Cursor(bytearray(path.read_bytes()))


def _read_graph_file(cursor: _Cursor) -> DglGraphFile:
    cursor.expect(_GRAPHS_MAGIC, "it is not a file that dgl.save_graphs wrote")
    version, kind, num_graphs = cursor.uint64(), cursor.uint64(), cursor.uint64()
    if version != 2 or kind != 2:
        raise ValueError(f"it has version {version} of DGL's format, kind {kind}; load it with DGL and save it again")
    if num_graphs != 1:
        raise ValueError(f"it holds {num_graphs} graphs; save the one to train on alone: dgl.save_graphs(path, [g])")
    cursor.take(_HEADER_BYTES - cursor.place)
    graph_start = cursor.uint64()
    cursor.named_tensors()  # of all graphs together, "labels" to dgl.save_graphs; not per node
    if cursor.place != graph_start:
        raise ValueError(f"the file is damaged: the graph begins at byte {cursor.place}, not {graph_start}")
    cursor.expect(_HETEROGRAPH_MAGIC, "the file is damaged: no graph where one has to be")
    _skip_meta_graph(cursor)
    relations = cursor.items(lambda: _edges(cursor))
    num_nodes_per_type = cursor.items(cursor.uint64)
    node_data = cursor.items(cursor.named_tensors)
    edge_data = cursor.items(cursor.named_tensors)
    ntypes, etypes = cursor.items(cursor.text), cursor.items(cursor.text)
    if any(len(items) != 1 for items in (relations, num_nodes_per_type, node_data, edge_data)):
        raise ValueError(
            f"it holds a graph of several node or edge types ({ntypes} and {etypes}); nugnn takes homogeneous graphs. "
            "Convert it with dgl.to_homogeneous(g, ndata=[...]) and save that"
        )
    cursor.text()  # where each graph begins; there is one
    if cursor.uint64() != 16:
        raise ValueError("the file is damaged at its end. Get or save it again")
    cursor.expect_end()
    num_rows, num_columns, src, dst = relations[0]
    num_nodes = num_nodes_per_type[0]
    if not num_rows == num_columns == num_nodes:
        raise ValueError(f"the file is damaged: {num_nodes} nodes, edges among {num_rows} and {num_columns}")
    return DglGraphFile(num_nodes, src, dst, node_data[0], edge_data[0])


def _skip_meta_graph(cursor: _Cursor) -> None:
    """The graph whose nodes are node types; a homogeneous graph has one of each, which the lists say again."""
    cursor.expect(_META_MAGIC, "the file is damaged: no graph of types where one has to be")
    _csr(cursor)


def _csr(cursor: _Cursor) -> tuple[int, int, Tensor, Tensor, Tensor]:
    cursor.expect(_CSR_MAGIC, "the file is damaged: no CSR matrix where one has to be")
    num_rows, num_columns = cursor.uint64(), cursor.uint64()
    indptr, indices, edge_ids = _ids(cursor), _ids(cursor), _ids(cursor)
    cursor.uint8()  # whether columns ascend
    return num_rows, num_columns, indptr, indices, edge_ids


def _edges(cursor: _Cursor) -> tuple[int, int, Tensor, Tensor]:
    """Rows, columns, sources and destinations of one edge type, in the order of edge ids."""
    cursor.expect(_EDGES_MAGIC, "the file is damaged: no edges where they have to be")
    code, _ = cursor.uint64(), cursor.uint64()
    # old files number one format (0 COO, 1 CSR, 2 CSC); new ones set the upper half and have a bit per format
    formats = code & 0xFFFFFFFF if code >> 32 else {0: _COO, 1: _CSR, 2: _CSC}.get(code, 0)
    if formats not in range(1, 8):
        raise ValueError(f"the file is damaged: sparse format {code:#x} before byte {cursor.place}")
    found: list[tuple[int, int, Tensor, Tensor]] = []
    if formats & _COO:
        _skip_meta_graph(cursor)
        found.append(_coo_edges(cursor))
    if formats & _CSR:
        _skip_meta_graph(cursor)
        found.append(_csr_edges(cursor))
    if formats & _CSC:
        _skip_meta_graph(cursor)
        num_columns, num_rows, dst, src = _csr_edges(cursor)
        found.append((num_rows, num_columns, src, dst))
    return found[0]


def _coo_edges(cursor: _Cursor) -> tuple[int, int, Tensor, Tensor]:
    cursor.expect(_COO_MAGIC, "the file is damaged: no COO matrix where one has to be")
    num_rows, num_columns = cursor.uint64(), cursor.uint64()
    src, dst, edge_ids = _ids(cursor), _ids(cursor), _ids(cursor)
    cursor.take(2)  # whether rows, and columns, ascend
    return num_rows, num_columns, *_by_edge_id(src, dst, edge_ids)


def _csr_edges(cursor: _Cursor) -> tuple[int, int, Tensor, Tensor]:
    num_rows, num_columns, indptr, indices, edge_ids = _csr(cursor)
    damaged = len(indptr) != num_rows + 1 or int(indptr[0]) != 0 or int(indptr[-1]) != len(indices)
    if damaged or bool((indptr[1:] < indptr[:-1]).any()):
        raise ValueError(f"the file is damaged: row pointers before byte {cursor.place} do not fit {num_rows} rows")
    rows = torch.repeat_interleave(indptr.diff().to(torch.int64)).to(indices.dtype)
    return num_rows, num_columns, *_by_edge_id(rows, indices, edge_ids)


def _by_edge_id(src: Tensor, dst: Tensor, edge_ids: Tensor) -> tuple[Tensor, Tensor]:
    if len(src) != len(dst) or (len(edge_ids) and len(edge_ids) != len(src)):
        raise ValueError(f"the file is damaged: {len(src)} sources, {len(dst)} destinations, {len(edge_ids)} edge ids")
    if not len(edge_ids):  # DGL leaves the identity out
        return src, dst
    order = edge_ids.to(torch.int64).argsort(stable=True)
    if not torch.equal(edge_ids[order].to(torch.int64), torch.arange(len(edge_ids))):
        raise ValueError("the file is damaged: its edge ids are not a permutation")
    return src[order], dst[order]


def _ids(cursor: _Cursor) -> Tensor:
    tensor: Any = cursor.tensor()
    if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"the file is damaged: ids are {tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor  # type: ignore[no-any-return]
