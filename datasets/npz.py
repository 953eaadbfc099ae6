"""One graph in one ``.npz`` file: plain arrays, no pickle, every array checked.

| key | dtype, shape | meaning |
|---|---|---|
| ``num_nodes`` | integer scalar | N |
| ``adj_indptr``, ``adj_indices`` | integers, N + 1 and E | CSR; row u holds the targets of u, an edge each |
| ``edge_weight`` | float, E | becomes ``edge_data["weight"]`` |
| ``feat`` | float, N x F | dense features |
| ``feat_indptr``, ``feat_indices``, ``feat_data``, ``feat_shape`` | CSR, [N, F] | sparse features instead |
| ``label`` | integers, N; or uint8, N x C | class ids, -1 = unlabelled; or 0/1, multi-label |
| ``train_idx``, ``val_idx``, ``test_idx`` | integers | node ids of the split |
| ``train_masks``, ``val_masks``, ``test_masks`` | bool, S x N | S published splits; the ids above equal row 0 |
| ``original_ids`` | integers or text, N; optional | the user's own id of each node |
| ``num_classes``, ``metric`` | integer, text; optional | where the labels alone do not tell |
| ``node_data.KEY``, ``edge_data.KEY`` | first dimension N, E; optional | further data |

Edge ids are positions in CSR order. ``class_years`` (what Facebook100 classes stand for) is allowed and not read.
"""

from __future__ import annotations

import ast
import difflib
import math
import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nugnn._regular_file import require_file
from nugnn.datasets._checks import check_csr
from nugnn.datasets.graph_data import GraphData, Metric, Split, graph_from
from nugnn.datasets.sparse import csr_matrix
from nugnn.datasets.unpacking import UnpacksTooFarError, check_fits_memory, check_unpacked
from nugnn.datasets.whole_file import write_whole

_GRAPH_KEYS = ("num_nodes", "adj_indptr", "adj_indices")
_SPARSE_KEYS = ("feat_indptr", "feat_indices", "feat_data", "feat_shape")
_SPLIT_KEYS = ("train_idx", "val_idx", "test_idx")
_MASK_KEYS = ("train_masks", "val_masks", "test_masks")
_NOT_READ = ("class_years",)
_SWAPPED = np.dtype(np.uint32).newbyteorder("S")
_KEYS = (
    *_GRAPH_KEYS,
    *("edge_weight", "feat", "label", "num_classes", "metric", "original_ids"),
    *_SPARSE_KEYS,
    *_SPLIT_KEYS,
    *_MASK_KEYS,
    *_NOT_READ,
)


def read_npz(path: str | os.PathLike[str], *, name: str | None = None, metric: Metric = "auto") -> GraphData:
    """Read a graph from an ``.npz`` file in the format at the top of this module.

    Args:
        path: The file.
        name: Name of the graph; default the file's name without suffix.
        metric: Used when the file does not name one.

    Returns:
        ``src``, ``dst`` int64 in CSR order; features float32 (float64 is kept), sparse where stored sparse; labels
        int64, or uint8 for multi-label.

    Raises:
        ValueError: the file is missing, not a complete ``.npz``, holds pickled objects or unknown keys, or describes
            a broken graph; always names the file.
    """
    path = Path(path)
    arrays = read_arrays(path)
    where = f"{path}"
    _check_keys(where, arrays)
    num_nodes = int(_integers(where, arrays, "num_nodes", 0))
    indptr = torch.from_numpy(_integers(where, arrays, "adj_indptr", 1))
    indices = torch.from_numpy(_integers(where, arrays, "adj_indices", 1))
    check_csr(where, "adjacency", indptr, indices, num_nodes, num_nodes)
    node_data, edge_data = _further_data(where, arrays)
    if "edge_weight" in arrays:
        edge_data["weight"] = _floats(where, arrays, "edge_weight", 1)
    splits = _read_splits(where, arrays)
    train, val, test = splits[0]
    return graph_from(
        path,
        name=name or path.stem,
        num_nodes=num_nodes,
        src=torch.repeat_interleave(indptr.diff()),
        dst=indices,
        features=_read_features(where, arrays),
        labels=_read_labels(where, arrays),
        num_classes=int(_integers(where, arrays, "num_classes", 0)) if "num_classes" in arrays else 0,
        train_nodes=train,
        val_nodes=val,
        test_nodes=test,
        splits=splits if len(splits) > 1 else (),
        node_data=node_data,
        edge_data=edge_data,
        original_ids=_read_original_ids(where, arrays),
        metric=str(arrays["metric"]) if "metric" in arrays else metric,  # type: ignore[arg-type]  # checked inside
    )


def write_npz(data: GraphData, path: str | os.PathLike[str]) -> None:
    """Write a graph as ``.npz``; reading it gives the same graph with edges in the order (source, target, edge id).

    So edge ids are kept when the edges are in that order already. float16 and bfloat16 features come back as float32,
    with the same values; of several splits the first is the one in use again. Written beside the target first and then
    moved, so an interrupted write leaves no half file under ``path``.

    Args:
        data: The graph.
        path: File to write; an existing one is replaced. Its folder has to exist.
    """
    path = Path(path)
    write_whole(path, lambda file: np.savez_compressed(file, **_to_arrays(data)))


def is_graph_npz(path: Path) -> bool:
    """Whether the file is a zip that holds this format's adjacency; False only for a readable zip that does not."""
    try:
        with zipfile.ZipFile(path) as archive:
            return "adj_indptr.npy" in archive.namelist()
    except Exception:  # broken, in any of many ways: read_npz says how
        return True


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The plain arrays of any ``.npz``.

    Raises:
        ValueError: It is missing, damaged or pickled, or unpacks further than `nugnn.datasets.unpacking` allows.
    """
    require_file(path)
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a complete .npz archive: {_guess_content(path)}. Get the file again")
    try:
        with np.load(path, allow_pickle=False) as archive:
            _check_member_count(path, archive.zip)
            num_bytes = sum(info.file_size for info in archive.zip.infolist())
            check_unpacked(path, num_bytes)
            check_fits_memory(path, num_bytes)
            _check_member_sizes(archive.zip)
            arrays = {key: archive[key] for key in archive.files}
    except UnpacksTooFarError:
        raise
    except Exception as error:  # one damaged byte can raise nearly anything in zipfile, zlib and numpy
        if "allow_pickle" in str(error):
            raise ValueError(
                f"{path} holds pickled objects, not plain arrays ({error}); reading would run code"
            ) from error
        raise ValueError(f"{path} is damaged ({error}). Get the file again") from error
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{path}: {key!r} is not an array; an .npz file holds only .npy members")
        if array.dtype.kind == "U" and array.size and not _is_unicode(array):
            raise ValueError(f"{path}: {key!r} holds text that is not Unicode. Get the file again")
    return {key: array.astype(array.dtype.newbyteorder("="), copy=False) for key, array in arrays.items()}


def _is_unicode(array: np.ndarray) -> bool:
    codes = np.ascontiguousarray(array).reshape(-1).view(np.uint32 if array.dtype.isnative else _SWAPPED)
    return int(codes.max(initial=0)) < 0x110000


def _check_member_sizes(archive: zipfile.ZipFile) -> None:
    """Refuse an array whose header announces more than its member holds, before memory is taken for it."""
    for info in archive.infolist():
        with archive.open(info) as member:
            if member.read(6) != b"\x93NUMPY":
                continue  # read_arrays refuses what is no array
            major, _ = member.read(2)
            width = 2 if major == 1 else 4
            text = member.read(int.from_bytes(member.read(width), "little")).decode("latin-1")
            header = ast.literal_eval(text)
            dtype = np.dtype(header["descr"])
            num_bytes = math.prod(header["shape"]) * dtype.itemsize
            if not dtype.hasobject and num_bytes != info.file_size - member.tell():
                raise ValueError(
                    f"{info.filename} announces {num_bytes} bytes and holds {info.file_size - member.tell()}"
                )


def _check_member_count(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse a zip whose directory lists fewer members than its end record counts: zipfile would not notice."""
    with path.open("rb") as file:
        file.seek(-22 - len(archive.comment), os.SEEK_END)  # the end record: 22 bytes, then the comment
        (count,) = struct.unpack("<H", file.read(22)[10:12])
    if count != len(archive.infolist()) % 2**16:
        raise zipfile.BadZipFile(f"it lists {len(archive.infolist())} of {count} members")


def _guess_content(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        return "it is empty"
    if head.lstrip()[:1] == b"<":
        return "it is a web page, as from a failed download"
    if head[:2] == b"PK":
        return f"it is cut off after {path.stat().st_size} bytes"
    return f"it begins with {head[:8]!r}, a zip archive with b'PK'"


def _check_keys(where: str, arrays: Mapping[str, np.ndarray]) -> None:
    found = ", ".join(sorted(arrays)) or "nothing"
    missing = [key for key in _GRAPH_KEYS if key not in arrays]
    if missing:
        raise ValueError(f"{where} is not a graph: it lacks {', '.join(missing)}; it holds {found}")
    for key in arrays:
        if key not in _KEYS and not key.startswith(("node_data.", "edge_data.")):
            close = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known keys are {', '.join(_KEYS)}"
            raise ValueError(f"{where}: unknown key {key!r}{hint} Further data goes under node_data.KEY, edge_data.KEY")
    for group in (_SPARSE_KEYS, _SPLIT_KEYS, _MASK_KEYS):
        missing = [key for key in group if key not in arrays]
        if missing and len(missing) < len(group):
            raise ValueError(f"{where}: {', '.join(missing)} missing; {', '.join(group)} belong together")
    if "feat" in arrays and "feat_data" in arrays:
        raise ValueError(f"{where}: both dense (feat) and sparse (feat_data) features; keep one")
    if "edge_weight" in arrays and "edge_data.weight" in arrays:
        raise ValueError(f"{where}: both edge_weight and edge_data.weight; keep one")


def _integers(where: str, arrays: Mapping[str, np.ndarray], key: str, dims: int) -> np.ndarray:
    array = arrays[key]
    if array.dtype.kind not in "iu" or array.ndim != dims:
        raise ValueError(f"{where}: {key} is {array.dtype} {array.shape}; expected integers in {dims} dimensions")
    return np.ascontiguousarray(array, dtype=np.int64) if dims else array


def _floats(where: str, arrays: Mapping[str, np.ndarray], key: str, dims: int) -> Tensor:
    array = arrays[key]
    if array.dtype.kind not in "fiu" or array.ndim != dims:
        raise ValueError(f"{where}: {key} is {array.dtype} {array.shape}; expected numbers in {dims} dimensions")
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64 if array.dtype == np.float64 else np.float32))


def _read_features(where: str, arrays: Mapping[str, np.ndarray]) -> Tensor | None:
    if "feat" in arrays:
        return _floats(where, arrays, "feat", 2)
    if "feat_data" not in arrays:
        return None
    shape = _integers(where, arrays, "feat_shape", 1)
    if len(shape) != 2 or shape.min() < 0:
        raise ValueError(f"{where}: feat_shape is {shape.tolist()}; expected [num_nodes, num_features]")
    indptr = torch.from_numpy(_integers(where, arrays, "feat_indptr", 1))
    indices = torch.from_numpy(_integers(where, arrays, "feat_indices", 1))
    values = _floats(where, arrays, "feat_data", 1)
    num_rows, num_features = (int(size) for size in shape)
    check_csr(where, "features", indptr, indices, num_rows, num_features)
    if len(values) != len(indices):
        raise ValueError(f"{where}: feat_data has {len(values)} entries and feat_indices {len(indices)}")
    return csr_matrix(indptr, indices, values, (num_rows, num_features))


def _read_labels(where: str, arrays: Mapping[str, np.ndarray]) -> Tensor | None:
    if "label" not in arrays:
        return None
    if arrays["label"].ndim == 2:
        if arrays["label"].dtype != np.uint8:
            raise ValueError(f"{where}: a label matrix has to be uint8 0/1; it is {arrays['label'].dtype}")
        return torch.from_numpy(arrays["label"])
    return torch.from_numpy(_integers(where, arrays, "label", 1))


def _read_splits(where: str, arrays: Mapping[str, np.ndarray]) -> tuple[Split, ...]:
    splits: list[Split] = []
    if "train_masks" in arrays:
        masks = [arrays[key] for key in _MASK_KEYS]
        if any(mask.dtype != np.bool_ or mask.ndim != 2 or mask.shape != masks[0].shape for mask in masks):
            given = ", ".join(f"{mask.dtype} {mask.shape}" for mask in masks)
            raise ValueError(f"{where}: the split masks are {given}; expected three bool arrays of one shape (S, N)")
        if masks[0].shape[1] != int(arrays["num_nodes"]) or len(masks[0]) == 0:
            raise ValueError(f"{where}: the split masks have shape {masks[0].shape}; expected (splits, num_nodes)")
        for rows in zip(*masks, strict=True):
            train, val, test = (torch.from_numpy(np.flatnonzero(row)) for row in rows)
            splits.append((train, val, test))
    if "train_idx" in arrays:
        train, val, test = (torch.from_numpy(_integers(where, arrays, key, 1)) for key in _SPLIT_KEYS)
        listed = (train, val, test)
        if splits and not all(torch.equal(a.sort().values, b) for a, b in zip(listed, splits[0], strict=True)):
            raise ValueError(f"{where}: train_idx, val_idx and test_idx differ from row 0 of the split masks")
        splits = splits or [listed]
    empty = torch.empty(0, dtype=torch.int64)
    return tuple(splits) or ((empty, empty, empty),)


def _read_original_ids(where: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray | None:
    if "original_ids" not in arrays:
        return None
    ids = arrays["original_ids"]
    if ids.dtype.kind != "U":
        ids = _integers(where, arrays, "original_ids", 1)
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        raise ValueError(f"{where}: original_ids holds {values[counts.argmax()]!s:.80} more than once")
    return ids


def _further_data(where: str, arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {"node_data": {}, "edge_data": {}}
    for key, array in arrays.items():
        kind, dot, name = key.partition(".")
        if dot and array.dtype.kind not in "biufc":
            raise ValueError(f"{where}: {key} is {array.dtype}; further data are numbers or bool")
        if dot:
            found[kind][name] = torch.from_numpy(array)
    return found["node_data"], found["edge_data"]


def _to_arrays(data: GraphData) -> dict[str, Any]:
    src, dst = data.src.numpy(), data.dst.numpy()
    order = np.lexsort((dst, src))  # stable, so parallel edges stay in edge-id order
    counts = np.bincount(src, minlength=data.num_nodes)
    arrays: dict[str, Any] = {
        "num_nodes": np.int64(data.num_nodes),
        "adj_indptr": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        "adj_indices": dst[order].astype(np.int32 if data.num_nodes < 2**31 else np.int64),
        "metric": np.array(data.metric),
    }
    x_NF = data.features
    if x_NF is not None and x_NF.layout == torch.sparse_csr:
        arrays["feat_indptr"] = x_NF.crow_indices().numpy()
        arrays["feat_indices"] = x_NF.col_indices().numpy()
        arrays["feat_data"] = _array(x_NF.values())
        arrays["feat_shape"] = np.array(x_NF.shape, dtype=np.int64)
    elif x_NF is not None:
        arrays["feat"] = _array(x_NF)
    if data.labels is not None:
        arrays["label"] = data.labels.numpy()
        arrays["num_classes"] = np.int64(data.num_classes)
    if data.splits:
        for column, key in enumerate(_MASK_KEYS):
            masks = np.zeros((len(data.splits), data.num_nodes), dtype=np.bool_)
            for row, triple in enumerate(data.splits):
                masks[row, triple[column].numpy()] = True
            arrays[key] = masks
    first_split = data.splits[0] if data.splits else data.split
    arrays.update({key: ids.numpy() for key, ids in zip(_SPLIT_KEYS, first_split, strict=True)})
    arrays.update({f"node_data.{name}": _array(x) for name, x in data.node_data.items()})
    arrays.update({f"edge_data.{name}": _array(x)[order] for name, x in data.edge_data.items()})
    if data.original_ids is not None:
        arrays["original_ids"] = data.original_ids
    weight = data.edge_data.get("weight")
    if weight is not None and weight.dim() == 1 and weight.dtype in (torch.float32, torch.float64):
        arrays["edge_weight"] = arrays.pop("edge_data.weight")
    return arrays


def _array(tensor: Tensor) -> np.ndarray:
    """As numpy; bfloat16, which numpy lacks, as float32 with the same values."""
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
