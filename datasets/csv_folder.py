"""A graph as a folder of CSV: ``edges.csv``, ``nodes.csv`` beside it, or one file of edges alone.

docs/formats/csv.md describes the columns. Rows in errors are counted as a spreadsheet does: the header is row 1; empty
lines do not count. Shape suffixes: N nodes, E edges, F features, C classes.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nugnn.datasets.csv_columns import EdgeColumns, NodeColumns
from nugnn.datasets.graph_data import GraphData, Metric, graph_from
from nugnn.datasets.labels import class_ids
from nugnn.datasets.node_ids import Ids, kept_ids, number_nodes, rows_of
from nugnn.datasets.text_table import CellTypeError, read_header, read_table, to_array

if TYPE_CHECKING:
    import pyarrow as pa

_SPLIT_NAMES = {"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2, "": -1, "none": -1}
_TRUTH = {"1": True, "true": True, "0": False, "false": False, "": False}

_log = logging.getLogger("nugnn.datasets")


def read_csv_folder(path: str | os.PathLike[str], *, name: str | None = None, metric: Metric = "auto") -> GraphData:
    """Read a folder with ``edges.csv`` and, where nodes have data or no edge, ``nodes.csv``; ``.csv.gz`` will do.

    Args:
        path: The folder.
        name: Name of the graph; default the folder's name.
        metric: As in ``GraphData``.

    Returns:
        Nodes in the order of the rows of ``nodes.csv``, edges in that of ``edges.csv``; features float32, labels int64
        or uint8 ``(N, C)``; ``original_ids`` unless the ids are the rows. Without ``nodes.csv``: as ``read_edges_csv``.

    Raises:
        ValueError: a file is missing or malformed, an edge names an id that ``nodes.csv`` has not, or anything that
            ``GraphData`` refuses; names the file, and where there is one the row and the value.
    """
    folder = Path(path)
    edges = _either(folder, "edges.csv")
    if edges is None:
        raise ValueError(f"{folder}: no edges.csv in this folder; docs/formats/csv.md says what belongs there")
    nodes = _either(folder, "nodes.csv")
    name = name or folder.resolve().name
    if nodes is None:
        return read_edges_csv(edges, name=name, metric=metric)
    return _read_both(nodes, edges, name, metric)


def read_edges_csv(
    path: str | os.PathLike[str], *, num_nodes: int | None = None, name: str | None = None, metric: Metric = "auto"
) -> GraphData:
    """Read one file of edges. The nodes are the ids that occur in it, ascending; no other node is made up.

    Args:
        path: The file; an ``edges.csv`` is read without the ``nodes.csv`` beside it.
        num_nodes: N, for ids that are the rows ``0 .. N - 1`` already, isolated nodes among them.
        name: Name of the graph; default the file's name without suffixes.
        metric: As in ``GraphData``.

    Returns:
        A graph without features and labels; ``original_ids`` unless the ids are the rows.

    Raises:
        ValueError: as ``read_csv_folder``; also an id outside ``[0, num_nodes)``, or a negative one.
    """
    path = Path(path)
    where = str(path)
    columns = EdgeColumns.of(where, read_header(path))
    try:
        table = _read(path, columns.names, columns.ids, "int64")
    except CellTypeError as error:
        table = _read(path, columns.names, columns.ids, "string")
        first = table[columns.src][0].as_py() if len(table) else ""
        if num_nodes is not None or re.fullmatch(r"\s*[-+]?\d+\s*", first):
            raise ValueError(
                f"{error}; ids are all whole numbers or all text: correct it, or list the ids in a nodes.csv"
            ) from None
    src, dst = (_id_column(where, table, name) for name in columns.ids)
    if isinstance(src, np.ndarray):
        for name_, ids in zip(columns.ids, (src, dst), strict=True):
            _check_range(where, name_, ids, num_nodes)
    original_ids = None
    if num_nodes is None:
        listed, src_rows, dst_rows = number_nodes(src, dst)
        if not len(listed):
            raise ValueError(f"{where}: there is no edge, so the nodes are unknown; list them in a nodes.csv beside it")
        original_ids, num_nodes = kept_ids(where, listed), len(listed)
        if original_ids is not None and isinstance(listed, np.ndarray):
            _log.info(
                "%s: ids run up to %d for %d nodes with an edge; kept as original ids", path, listed[-1], num_nodes
            )
    else:
        src_rows, dst_rows = np.asarray(src), np.asarray(dst)
    return graph_from(
        where,
        name=name or path.name.split(".")[0],
        num_nodes=num_nodes,
        src=torch.from_numpy(src_rows),
        dst=torch.from_numpy(dst_rows),
        edge_data=_edge_data(where, table, columns),
        original_ids=original_ids,
        metric=metric,
    )


def _read_both(nodes: Path, edges: Path, name: str, metric: Metric) -> GraphData:
    node_columns = NodeColumns.of(str(nodes), read_header(nodes))
    edge_columns = EdgeColumns.of(str(edges), read_header(edges))

    def read(kind: str) -> tuple[pa.Table, pa.Table]:
        further = dict.fromkeys(node_columns.texts, "string") | dict.fromkeys(node_columns.features, "float64")
        further |= {node_columns.label: "float64"} if node_columns.label else {}
        node_table = _read(nodes, node_columns.names, (node_columns.id,), kind, further)
        return node_table, _read(edges, edge_columns.names, edge_columns.ids, kind)

    try:
        node_table, edge_table = read("int64")
    except CellTypeError:
        node_table, edge_table = read("string")
    where = str(nodes)
    listed = _id_column(where, node_table, node_columns.id)
    _check_distinct(where, node_columns.id, listed)
    original_ids = kept_ids(where, listed)
    src, dst = _known_ends(edges, edge_table, edge_columns.ids, nodes, listed)
    train, val, test = _split(where, node_table, node_columns)
    return graph_from(
        str(nodes.parent),
        name=name,
        num_nodes=len(listed),
        src=src,
        dst=dst,
        features=_features(where, node_table, node_columns.features),
        labels=_labels(where, node_table, node_columns),
        train_nodes=train,
        val_nodes=val,
        test_nodes=test,
        node_data={column: _numbers(where, node_table, column) for column in node_columns.data},
        edge_data=_edge_data(str(edges), edge_table, edge_columns),
        original_ids=original_ids,
        metric=metric,
    )


def _known_ends(
    edges: Path, table: pa.Table, columns: tuple[str, str], nodes: Path, listed: Ids
) -> tuple[Tensor, Tensor]:
    """Rows of both ends of every edge; the first end that is not listed is refused."""
    ids = [_id_column(str(edges), table, column) for column in columns]
    rows = [rows_of(end, listed) for end in ids]
    unknown = (rows[0] < 0) | (rows[1] < 0)
    if unknown.any():
        row = int(unknown.argmax())
        end = 0 if rows[0][row] < 0 else 1
        known = f"{len(listed)} ids, the first {_show(listed, 0)}"
        if isinstance(listed, np.ndarray) and np.array_equal(listed, np.arange(len(listed))):
            known = f"0 to {len(listed) - 1}"
        raise ValueError(
            f"{edges}: row {row + 2}, column {columns[end]!r} is {_show(ids[end], row)}, an id that "
            f"{nodes.name} has not (it lists {known}); add the node there or drop the edge"
        )
    return torch.from_numpy(rows[0]), torch.from_numpy(rows[1])


def _read(
    path: Path, names: Sequence[str], ids: Iterable[str], kind: str, further: dict[str, str] | None = None
) -> pa.Table:
    """The table with its id columns as ``"int64"`` or ``"string"``; an empty cell among whole numbers is no int64."""
    types = dict.fromkeys(ids, kind) | (further or {})
    wanted = [name for name in names if not name.startswith("_") or name in types]
    while True:
        try:
            table = read_table(path, str(path), names, types=types, columns=wanted)
            break
        except CellTypeError as error:
            if error.column in ids:
                raise
            if error.column in types:
                raise ValueError(f"{error}; correct it, or begin the column's name with _ to leave it out") from None
            types[error.column] = "float64"  # whole numbers in its first rows, others further down
    if kind == "int64":
        for name in ids:
            if table[name].null_count:
                row = _first_null(table, name)
                found = _text_of_null(str(path), name, row)
                raise CellTypeError(f"{path}: row {row + 2}, column {name!r} is {found}", name)
    return table


def _id_column(where: str, table: pa.Table, name: str) -> Ids:
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table[name]
    if pa.types.is_int64(column.type):
        return to_array(column)
    empty = np.asarray(pc.equal(column, ""))
    if empty.any():
        raise ValueError(f"{where}: row {int(empty.argmax()) + 2}, column {name!r} is empty; every node needs an id")
    return column


def _check_range(where: str, name: str, ids: np.ndarray, num_nodes: int | None) -> None:
    bad = (ids < 0) if num_nodes is None else (ids < 0) | (ids >= num_nodes)
    if bad.any():
        row = int(bad.argmax())
        allowed = "ids start at 0" if num_nodes is None else f"allowed are 0 to {num_nodes - 1}, for {num_nodes} nodes"
        raise ValueError(f"{where}: row {row + 2}, column {name!r} is {ids[row]}; {allowed}")


def _check_distinct(where: str, name: str, listed: Ids) -> None:
    values = listed if isinstance(listed, np.ndarray) else np.array(listed.dictionary_encode().combine_chunks().indices)
    if not len(values):
        raise ValueError(f"{where}: there is no row below the header; list the nodes, one a row")
    order = np.argsort(values, kind="stable")
    repeated = np.flatnonzero(values[order][1:] == values[order][:-1])
    if len(repeated):
        place = repeated[np.argmin(order[repeated + 1])]
        first, second = int(order[place]), int(order[place + 1])
        raise ValueError(
            f"{where}: rows {first + 2} and {second + 2} have the same {name} {_show(listed, first)}; "
            "every node has one row"
        )


def _show(listed: Ids, row: int) -> str:
    return f"{int(listed[row]) if isinstance(listed, np.ndarray) else listed[row].as_py()!r:.80}"


def _features(where: str, table: pa.Table, names: Sequence[str]) -> Tensor | None:
    if not names:
        return None
    x_NF = np.empty((len(table), len(names)), dtype=np.float32)
    for number, name in enumerate(names):
        with np.errstate(over="ignore"):  # reported below
            x_NF[:, number] = _numbers(where, table, name, dtype=torch.float64).numpy()
    if not np.isfinite(x_NF.sum(dtype=np.float64)):
        row, number = (int(place) for place in np.argwhere(~np.isfinite(x_NF))[0])
        raise ValueError(
            f"{where}: row {row + 2}, column {names[number]!r} is {table[names[number]][row]}, beyond float32"
        )
    return torch.from_numpy(x_NF)


def _labels(where: str, table: pa.Table, columns: NodeColumns) -> Tensor | None:
    if columns.label is not None:
        values = to_array(table[columns.label]).astype(np.float64)  # empty: NaN
        bad = ~(np.isnan(values) | ((values == np.round(values)) & (np.abs(values) < 2**24)))
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(
                f"{where}: row {row + 2}, column {columns.label!r} is {values[row]}; number the classes from 0, "
                "and leave the cell empty where the class is unknown"
            )
        return class_ids(torch.from_numpy(np.maximum(values, -1)))
    if not columns.label_matrix:
        return None
    stacked = np.empty((len(table), len(columns.label_matrix)), dtype=np.uint8)
    for number, name in enumerate(columns.label_matrix):
        column = _numbers(where, table, name, dtype=torch.float64).numpy()
        bad = (column != 0) & (column != 1)
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(
                f"{where}: row {row + 2}, column {name!r} is {column[row]:g}; a label matrix holds 0 and 1"
            )
        stacked[:, number] = column
    return torch.from_numpy(stacked)


def _split(where: str, table: pa.Table, columns: NodeColumns) -> tuple[Tensor, Tensor, Tensor]:
    if columns.split is not None:
        which = _looked_up(where, table, columns.split, _SPLIT_NAMES)
        train, val, test = (torch.from_numpy(np.flatnonzero(which == number)) for number in range(3))
        return train, val, test
    ids = []
    for mask in columns.masks:
        member = np.zeros(0) if mask is None else _looked_up(where, table, mask, _TRUTH)
        ids.append(torch.from_numpy(np.flatnonzero(member)))
    return ids[0], ids[1], ids[2]


def _looked_up(where: str, table: pa.Table, name: str, meanings: dict[str, Any]) -> np.ndarray:
    import pyarrow as pa
    import pyarrow.compute as pc

    text = pc.utf8_lower(pc.utf8_trim_whitespace(table[name]))
    place = np.asarray(pc.index_in(text, value_set=pa.array(list(meanings))).fill_null(-1))
    if len(place) and place.min() < 0:
        row = int((place < 0).argmax())
        allowed = ", ".join(repr(word) for word in meanings if word)
        raise ValueError(
            f"{where}: row {row + 2}, column {name!r} is {table[name][row].as_py()!r:.80}; "
            f"allowed are {allowed}, or nothing"
        )
    return np.array(list(meanings.values()))[place]


def _edge_data(where: str, table: pa.Table, columns: EdgeColumns) -> dict[str, Tensor]:
    """``weight`` as float32; other columns as int64, bool or float32, as their cells are."""
    found = {}
    for name in columns.data:
        values = _numbers(where, table, name, dtype=torch.float32 if name == "weight" else None)
        if values.is_floating_point() and not torch.isfinite(values.sum(dtype=torch.float64)):
            bad = ~torch.isfinite(values)
            if bad.any():
                row = int(bad.to(torch.uint8).argmax())
                raise ValueError(f"{where}: row {row + 2}, column {name!r} is {table[name][row]}; give a finite number")
        found[name] = values
    return found


def _numbers(where: str, table: pa.Table, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """A column without empty cells as int64, bool or float32, or as ``dtype``."""
    import pyarrow as pa

    column = table[name]
    if column.null_count:
        row = _first_null(table, name)
        found = _text_of_null(where, name, row)
        raise ValueError(f"{where}: row {row + 2}, column {name!r} is {found}; fill it, or drop the column")
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)) and len(column):
        first = next((row for row, value in enumerate(column) if not _is_number(str(value))), 0)
        raise ValueError(
            f"{where}: row {first + 2}, column {name!r} is {column[first].as_py()!r:.80}, not a number; "
            "drop the column, or begin its name with _ to leave it out"
        )
    values = torch.from_numpy(to_array(column)) if len(column) else torch.zeros(0)
    if dtype is None:
        dtype = torch.float32 if values.is_floating_point() else values.dtype
    return values.to(dtype)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _first_null(table: pa.Table, name: str) -> int:
    return int(np.asarray(table[name].is_null()).argmax())


def _text_of_null(path: str, name: str, row: int) -> str:
    """What stands in a cell that Arrow took for a null: ``NA``, ``nan`` and others, or nothing."""
    names = read_header(Path(path))
    text = read_table(Path(path), path, names, types={name: "string"}, columns=[name])[name][row].as_py()
    return f"{text!r:.80}, which is no number" if text else "empty"


def _either(folder: Path, name: str) -> Path | None:
    """``name`` or ``name.gz`` in the folder."""
    paths = (folder / name, folder / f"{name}.gz")
    for path in paths:
        if (path.exists() or path.is_symlink()) and not path.is_file():
            what = "a folder" if path.is_dir() else "no file" if path.exists() else "a link to nothing"
            raise ValueError(f"{path} is {what}; put the table itself there")
    found = [path for path in paths if path.is_file()]
    if len(found) == 2:
        raise ValueError(f"{folder}: both {name} and {name}.gz; remove one")
    return found[0] if found else None
