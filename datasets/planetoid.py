"""Cora, CiteSeer and PubMed as the Planetoid project publishes them: pickles, read without running what they name."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nugnn._regular_file import no_file
from nugnn.datasets._checks import check_csr
from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.simple_graph import simple_undirected
from nugnn.datasets.sparse import csr_matrix

PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")

_NUM_VAL = 500


def read_planetoid(folder: Path, name: str) -> GraphData:
    """Read ``ind.NAME.x``, ``.tx``, ``.allx``, ``.y``, ``.ty``, ``.ally``, ``.graph`` and ``.test.index``.

    Nodes keep the usual order: those of ``allx``, then each test row at its id. Ids between the test ids that no row
    belongs to (CiteSeer has 15) become nodes without features and label. Train: the rows of ``y``; val: the next 500;
    test: the listed ids. Edges are made symmetric and simple, in CSR order.

    Args:
        folder: Holds the eight files.
        name: As in the file names, e.g. ``cora``.

    Returns:
        float32 sparse features as stored; int64 labels, -1 where the one-hot row is all zero.

    Raises:
        ValueError: a file is missing, names a class or function other than those such files need, or does not fit the
            others; always with the file's name.
    """
    missing = [f"ind.{name}.{part}" for part in PARTS if no_file(folder / f"ind.{name}.{part}") == "no such file"]
    if missing:
        raise ValueError(
            f"{folder}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; the {len(PARTS)} files of "
            "one graph belong together in a folder"
        )
    x, tx, allx = (_matrix(folder / f"ind.{name}.{part}") for part in ("x", "tx", "allx"))
    y, ty, ally = (_one_hot(folder / f"ind.{name}.{part}") for part in ("y", "ty", "ally"))
    test_ids = _test_ids(folder / f"ind.{name}.test.index")
    where = f"{folder / f'ind.{name}.*'}"
    counts = {"x": (x, y), "tx": (tx, ty), "allx": (allx, ally)}
    for part, (rows, labels) in counts.items():
        if rows.num_rows != len(labels) or rows.num_columns != x.num_columns or labels.shape[1] != y.shape[1]:
            raise ValueError(
                f"{where}: {part} is {rows.num_rows} x {rows.num_columns} and its labels {len(labels)} x "
                f"{labels.shape[1]}; x is {x.num_rows} x {x.num_columns} with {y.shape[1]} classes; get the files again"
            )
    first = allx.num_rows
    num_nodes = max(first, int(test_ids.max()) + 1)
    if len(test_ids) != tx.num_rows or len(np.unique(test_ids)) != len(test_ids) or test_ids.min() < first:
        raise ValueError(
            f"{where}: test.index lists {len(test_ids)} ids from {test_ids.min()} for {tx.num_rows} test rows; it has "
            f"to list each row once, from {first} on, after the {first} rows of allx"
        )
    if num_nodes > first + 2 * len(test_ids) + 1000:
        raise ValueError(f"{where}: test.index goes up to {num_nodes - 1} for {first + len(test_ids)} rows in all")
    if x.num_rows + _NUM_VAL > first:
        raise ValueError(
            f"{where}: allx has {first} rows; {x.num_rows} to train on and {_NUM_VAL} to validate need more"
        )
    labels = np.full(num_nodes, -1, dtype=np.int64)
    labels[:first] = _class_ids(ally)
    labels[test_ids] = _class_ids(ty)
    src, dst = simple_undirected(*_edges(folder / f"ind.{name}.graph", num_nodes), num_nodes)
    return GraphData(
        name=name,
        num_nodes=num_nodes,
        src=torch.from_numpy(src),
        dst=torch.from_numpy(dst),
        features=_features(allx, tx, test_ids, num_nodes),
        labels=torch.from_numpy(labels),
        num_classes=y.shape[1],
        train_nodes=torch.arange(x.num_rows),
        val_nodes=torch.arange(x.num_rows, x.num_rows + _NUM_VAL),
        test_nodes=torch.from_numpy(test_ids),
    )


class _Rows:
    """A CSR matrix, checked."""

    def __init__(self, where: Path, state: object) -> None:
        if not isinstance(state, _MatrixState):
            raise ValueError(
                f"{where} holds {type(state).__name__.strip('_')}, not a sparse matrix; get the file again"
            )
        shape = state.fields.get("_shape", state.fields.get("shape"))
        arrays = [state.fields.get(key) for key in ("indptr", "indices", "data")]
        if not isinstance(shape, tuple) or len(shape) != 2 or not all(isinstance(size, int) for size in shape):
            raise ValueError(f"{where}: the matrix has shape {shape!r}; get the file again")
        indptr, indices, values = (_array(where, array) for array in arrays)
        if indptr.dtype.kind not in "iu" or indices.dtype.kind not in "iu" or values.shape != indices.shape:
            raise ValueError(f"{where}: the matrix's arrays do not fit each other; get the file again")
        self.num_rows, self.num_columns = shape
        self.indptr, self.indices = indptr.astype(np.int64), indices.astype(np.int64)
        self.values = values.astype(np.float32)
        check_csr(f"{where}", "matrix", torch.from_numpy(self.indptr), torch.from_numpy(self.indices), *shape)


def _features(allx: _Rows, tx: _Rows, test_ids: np.ndarray, num_nodes: int) -> torch.Tensor:
    """``allx``, then the rows of ``tx`` at their ids, columns ascending in each row."""
    first = allx.num_rows
    counts = np.zeros(num_nodes, dtype=np.int64)
    counts[:first] = np.diff(allx.indptr)
    counts[test_ids] = np.diff(tx.indptr)
    rows = np.concatenate([np.repeat(np.arange(first), np.diff(allx.indptr)), np.repeat(test_ids, np.diff(tx.indptr))])
    columns = np.concatenate([allx.indices, tx.indices])
    values = np.concatenate([allx.values, tx.values])
    order = np.lexsort((columns, rows))
    indptr = np.concatenate([[0], np.cumsum(counts)])
    shape = (num_nodes, allx.num_columns)
    return csr_matrix(
        torch.from_numpy(indptr), torch.from_numpy(columns[order]), torch.from_numpy(values[order]), shape
    )


def _class_ids(one_hot: np.ndarray) -> np.ndarray:
    return np.where(one_hot.any(axis=1), one_hot.argmax(axis=1), -1)


def _matrix(path: Path) -> _Rows:
    return _Rows(path, _load(path))


def _one_hot(path: Path) -> np.ndarray:
    array = _array(path, _load(path))
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"{path} has shape {array.shape}; expected one row per node and one column per class")
    return array


def _test_ids(path: Path) -> np.ndarray:
    text = _read(path)
    try:
        ids = np.array([int(line) for line in text.split()], dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path} holds something other than one node id per line ({error})") from None
    if len(ids) == 0:
        raise ValueError(f"{path} lists no node ids; get the file again")
    return ids


def _edges(path: Path, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    lists = _load(path)
    if not isinstance(lists, dict):
        raise ValueError(f"{path} holds {type(lists).__name__}, not a dictionary of neighbours; get the file again")
    src, dst = [], []
    for node, neighbours in lists.items():
        if not isinstance(neighbours, list):
            raise ValueError(f"{path}: the neighbours of {node!r} are no list; get the file again")
        for neighbour in neighbours:
            if not (_is_id(node, num_nodes) and _is_id(neighbour, num_nodes)):
                raise ValueError(f"{path}: edge {node!r} - {neighbour!r} is out of range for {num_nodes} nodes")
            src.append(node)
            dst.append(neighbour)
    return np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64)


def _is_id(node: object, num_nodes: int) -> bool:
    return isinstance(node, int) and 0 <= node < num_nodes


# What the files may name. Each name gets a stand-in that only keeps what it is given: numpy's and scipy's own
# constructors would trust sizes and types that the file states.


class _TypeState:
    def __init__(self, code: str = "", *_: object) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]


class _ArrayState:
    state: Any = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _MatrixState:
    fields: dict[str, Any]

    def __init__(self, *_: object) -> None:
        self.fields = {}

    def __setstate__(self, state: Any) -> None:
        self.fields = dict(state)


class _Object:
    """``object``, as the base that old pickles name for a class."""


def _reconstruct(*_: object) -> _ArrayState:
    return _ArrayState()


def _new_matrix(kind: object = None, *_: object) -> _MatrixState:
    if kind is not _MatrixState:
        raise pickle.UnpicklingError("an object other than a sparse matrix is made")
    return _MatrixState()


def _encode(text: Any = "", *_: object) -> bytes:
    return text.encode("latin1")


def _empty_dict(*_: object) -> dict[Any, Any]:
    return {}


def _empty_list(*_: object) -> list[Any]:
    return []


_ALLOWED: dict[tuple[str, str], Callable[..., object]] = {
    **{(module, "csr_matrix"): _MatrixState for module in ("scipy.sparse.csr", "scipy.sparse._csr", "scipy.sparse")},
    **{(module, "_reconstruct"): _reconstruct for module in ("numpy.core.multiarray", "numpy._core.multiarray")},
    ("numpy", "ndarray"): _ArrayState,
    ("numpy", "dtype"): _TypeState,
    ("collections", "defaultdict"): _empty_dict,
    ("_codecs", "encode"): _encode,
    **{(module, "list"): _empty_list for module in ("builtins", "__builtin__")},
    **{(module, "object"): _Object for module in ("builtins", "__builtin__")},
    **{(module, "_reconstructor"): _new_matrix for module in ("copyreg", "copy_reg")},
}


# pickle's unpickler in Python: the one in C grows its memo to whatever index a file names, up to all of memory
class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined,misc]  # not in the stubs
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which such a file has no use for")
        return _ALLOWED[module, name]

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError(f"it names an object outside the file ({pid!r})")


def _load(path: Path) -> Any:
    """What the file holds: numbers, lists, dictionaries and the stand-ins above."""
    content = _read(path)
    try:
        return _Unpickler(io.BytesIO(content), fix_imports=False, encoding="latin1").load()
    except Exception as error:  # a damaged byte can raise nearly anything
        hint = str(error) or type(error).__name__
        raise ValueError(
            f"{path} is not a Planetoid file that can be read safely: {hint}; get the file again"
        ) from error


def _read(path: Path) -> bytes:
    if (problem := no_file(path)) is not None:
        raise ValueError(f"{path}: {problem}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def _array(where: Path, value: object) -> np.ndarray:
    """The numbers of a pickled array, once its type, shape and length agree."""
    if not isinstance(value, _ArrayState):
        raise ValueError(
            f"{where} holds {type(value).__name__.strip('_')} where an array is expected; get the file again"
        )
    try:
        shape, kind, fortran, content = value.state[-4:]
        order = {"=": "<", "|": "|", "<": "<", ">": ">"}[kind.order]
        if not re.fullmatch("b1|[iuf][1248]", kind.code):
            raise ValueError(f"its type is {kind.code!r}")
        content = content.encode("latin1") if isinstance(content, str) else content
        return np.frombuffer(content, dtype=order + kind.code).reshape(shape, order="F" if fortran else "C")
    except Exception as error:
        raise ValueError(f"{where}: an array in it is broken ({error}); get the file again") from error
