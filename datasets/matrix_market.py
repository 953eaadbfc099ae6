"""Matrix Market coordinate files: entry ``(i, j)`` of a square matrix is the edge ``i -> j``.

docs/formats/matrix-market.md describes the format. SciPy's ``mmread`` is not used: it reads past the end of a number
in a damaged file, which ends the process (SciPy 1.17).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nugnn.datasets.graph_data import GraphData, Metric, graph_from
from nugnn.datasets.node_ids import check_claimed_nodes
from nugnn.datasets.number_lines import NumberLines, first_data_line
from nugnn.datasets.text_table import read_bytes

_FIELDS = ("real", "double", "integer", "unsigned-integer", "pattern")
_SYMMETRIES = ("general", "symmetric")
_COMMENTS = (b"%",)
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
            out of range or not finite; names the file and, for an entry, its line.
    """
    path = Path(path)
    where = str(path)
    content = read_bytes(path)
    header = _Header.parse(where, content)
    columns = {"row": "id", "column": "id"} | ({} if header.kind == "pattern" else {"value": header.kind})
    lines = NumberLines(
        where,
        content,
        header.end,
        comments=_COMMENTS,
        columns=columns,
        expected=f"a row and a column, counted from 1{'' if header.kind == 'pattern' else ', and a value'}",
    )
    found = lines.read()
    row, column = found["row"] - 1, found["column"] - 1
    if len(row) != header.num_entries:
        raise ValueError(f"{where}: the header announces {header.num_entries} entries, {len(row)} follow")
    outside = (row < 0) | (row >= header.num_nodes) | (column < 0) | (column >= header.num_nodes)
    if outside.any():
        number, text = lines.line_of(int(outside.argmax()))
        raise ValueError(f"{where}: line {number} is {text!r:.80}; rows and columns are 1 to {header.num_nodes}")
    weight = None if header.kind == "pattern" else _weights(where, lines, found["value"])
    if header.is_symmetric:
        off_diagonal = row != column
        row, column = np.concatenate([row, column[off_diagonal]]), np.concatenate([column, row[off_diagonal]])
        weight = None if weight is None else torch.cat([weight, weight[torch.from_numpy(off_diagonal)]])
    return graph_from(
        path,
        name=name or path.name.split(".")[0],
        num_nodes=header.num_nodes,
        src=torch.from_numpy(row),
        dst=torch.from_numpy(column),
        edge_data={} if weight is None else {"weight": weight},
        metric=metric,
    )


@dataclass(frozen=True)
class _Header:
    num_nodes: int
    num_entries: int
    kind: str
    """Of the values: ``"float64"``, ``"int64"`` or ``"pattern"``."""
    is_symmetric: bool
    end: int
    """Where the entries begin."""

    @classmethod
    def parse(cls, where: str, content: bytes) -> _Header:
        banner = content[: content.find(b"\n") if b"\n" in content else None]
        words = banner.decode("ascii", errors="replace").lower().split()
        if len(words) != 5 or words[0] != "%%matrixmarket" or words[1] != "matrix":
            raise ValueError(
                f"{where}: the first line is {banner.decode(errors='replace').strip()!r:.80}; a Matrix Market file "
                "begins with '%%MatrixMarket matrix coordinate' and the kind and symmetry of the entries"
            )
        layout, field, symmetry = words[2:]
        if layout != "coordinate":
            raise ValueError(f"{where}: the matrix is stored as {layout!r:.80}; a graph is a 'coordinate' matrix")
        if field not in _FIELDS:
            raise ValueError(f"{where}: the entries are {field!r:.80}; a graph takes {', '.join(_FIELDS)}")
        if symmetry not in _SYMMETRIES:
            raise ValueError(f"{where}: the matrix is {symmetry!r:.80}; write it as general, with every entry")
        place, line = first_data_line(content, len(banner) + 1, _COMMENTS)
        sizes = line.split()
        if len(sizes) != 3 or any(not size.isdigit() or len(size) > 18 for size in sizes):
            raise ValueError(
                f"{where}: the line of sizes is {line.decode(errors='replace')!r:.80}; expected 'rows columns entries'"
            )
        num_rows, num_columns, num_entries = map(int, sizes)
        if num_rows != num_columns:
            raise ValueError(f"{where}: the matrix is {num_rows} x {num_columns}; a graph has as many rows as columns")
        if num_rows < 1:
            raise ValueError(f"{where}: the matrix is empty; an empty graph cannot be trained or partitioned")
        check_claimed_nodes(where, num_rows, len(content) // _SHORTEST_ENTRY)
        kind = "pattern" if field == "pattern" else "int64" if "integer" in field else "float64"
        end = content.find(b"\n", place)
        return cls(num_rows, num_entries, kind, symmetry == "symmetric", len(content) if end < 0 else end + 1)


def _weights(where: str, lines: NumberLines, values: np.ndarray) -> Tensor:
    exact = values.dtype.kind == "f" or not len(values) or bool((np.abs(values.astype(np.float64)) <= 2**24).all())
    with np.errstate(over="ignore"):  # reported below
        weight = values.astype(np.float32 if exact else np.float64)
    bad = ~np.isfinite(weight)
    if bad.any():
        number, text = lines.line_of(int(bad.argmax()))
        raise ValueError(f"{where}: line {number} is {text!r:.80}; the value has to be finite and fit float32")
    return torch.from_numpy(weight)
