"""Matrix Market coordinate files: entry ``(i, j)`` of a square matrix is the edge ``i -> j``.

docs/formats/matrix-market.md describes the format.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nugnn.datasets.graph_data import GraphData, Metric
from nugnn.datasets.node_ids import check_claimed_nodes
from nugnn.datasets.text_table import read_bytes

_FIELDS = ("real", "double", "integer", "unsigned-integer", "pattern")
_SYMMETRIES = ("general", "symmetric")
_SHORTEST_ENTRY = 4  # bytes: "1 1" with its line end


def read_matrix_market(path: str | os.PathLike[str], *, name: str | None = None, metric: Metric = "auto") -> GraphData:
    """Read a Matrix Market file (``.mtx``, ``.mtx.gz``).

    Args:
        path: The file.
        name: Name of the graph; default the file's name without suffixes.
        metric: As in ``GraphData``.

    Returns:
        An edge per stored entry in the order of the file; of a symmetric matrix also the reverse of each entry off the
        diagonal, after all of the stored ones. Values as ``edge_data["weight"]``, float32; whole numbers that float32
        cannot hold as float64. A pattern has no weights.

    Raises:
        ValueError: not such a file, damaged, not square, dense, complex, Hermitian or skew-symmetric, or an entry is
            out of range or not finite; names the file.
    """
    path = Path(path)
    content = read_bytes(path)
    where = str(path)
    num_nodes, num_entries, is_pattern = _checked_header(where, content)
    matrix = _parse(where, content)
    if not matrix.nnz >= num_entries:
        raise ValueError(f"{where}: the header announces {num_entries} entries, {matrix.nnz} follow. Get the file again")
    edge_data = {} if is_pattern else {"weight": _weights(where, matrix.row, matrix.col, matrix.data)}
    try:
        return GraphData(
            name=name or path.name.split(".")[0],
            num_nodes=num_nodes,
            src=torch.from_numpy(matrix.row.astype(np.int64)),
            dst=torch.from_numpy(matrix.col.astype(np.int64)),
            edge_data=edge_data,
            metric=metric,
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _checked_header(where: str, content: bytes) -> tuple[int, int, bool]:
    """Nodes, stored entries, and whether they have no values; only what becomes a graph passes."""
    from scipy.io import mminfo

    if not content.startswith(b"%%MatrixMarket"):
        raise ValueError(f"{where}: it begins with {content[:16]!r}; a Matrix Market file begins with %%MatrixMarket")
    try:
        num_rows, num_columns, num_entries, layout, field, symmetry = mminfo(io.BytesIO(content))
    except Exception as error:  # the parser raises whatever its C++ does
        raise ValueError(f"{where}: the header cannot be read ({error})") from error
    if layout != "coordinate":
        raise ValueError(f"{where}: the matrix is a dense {layout}; a graph is a coordinate matrix")
    if field not in _FIELDS:
        raise ValueError(f"{where}: the entries are {field}; a graph takes {', '.join(_FIELDS)}")
    if symmetry not in _SYMMETRIES:
        raise ValueError(
            f"{where}: the matrix is {symmetry}; the two directions of an edge would differ in sign. Write it as general"
        )
    if num_rows != num_columns:
        raise ValueError(f"{where}: the matrix is {num_rows} x {num_columns}; a graph has as many rows as columns")
    if num_rows < 1:
        raise ValueError(f"{where}: the matrix is empty; an empty graph cannot be trained or partitioned")
    if num_entries * _SHORTEST_ENTRY > len(content):
        raise ValueError(
            f"{where}: the header announces {num_entries} entries, the file has {len(content)} bytes; it is cut off"
        )
    check_claimed_nodes(where, num_rows, num_entries)
    return num_rows, num_entries, field == "pattern"


def _parse(where: str, content: bytes):  # type: ignore[no-untyped-def]  # a scipy coo_array
    from scipy.io import mmread

    try:
        matrix = mmread(io.BytesIO(content), spmatrix=False)
    except Exception as error:  # as above; the text names the line
        raise ValueError(f"{where}: {error}") from error
    return matrix


def _weights(where: str, row: np.ndarray, column: np.ndarray, values: np.ndarray) -> Tensor:
    exact = values.dtype.kind == "f" or not len(values) or bool((np.abs(values.astype(np.float64)) <= 2**24).all())
    with np.errstate(over="ignore"):  # reported below
        weight = values.astype(np.float32 if exact else np.float64)
    bad = ~np.isfinite(weight)
    if bad.any():
        entry = int(bad.argmax())
        raise ValueError(
            f"{where}: entry ({row[entry] + 1}, {column[entry] + 1}) is {values[entry]}; "
            "every value has to be finite and fit float32"
        )
    return torch.from_numpy(weight)
