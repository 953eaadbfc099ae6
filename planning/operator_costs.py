"""What an operator of a trace computes and moves, from its record alone; dimensions are numbers by then."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nugnn.planning.trace_records import Dim, OperatorRecord, Storage, TensorRecord

_ITEM_BYTES = {"bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1}


def item_bytes(dtype: str) -> int:
    """Of one value; ``dtype`` as torch names it."""
    return _ITEM_BYTES.get(dtype) or int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8


def storage_bytes(storage: Storage) -> int:
    return number(storage.values) * item_bytes(storage.dtype)


def tensor_bytes(x: TensorRecord) -> int:
    return math.prod(number(dim) for dim in x.shape) * item_bytes(x.dtype)


def workspace_bytes(record: OperatorRecord) -> int:
    """The most that is alive of what the operator takes while it runs."""
    most = 0
    for taken in range(1, len(record.workspace) + 1):
        alive = (x for x in record.workspace[:taken] if x.freed is None or x.freed >= taken)
        most = max(most, sum(tensor_bytes(x) for x in alive))
    return most


def number(dim: Dim) -> int:
    """``dim``, which has to be a number: see `nugnn.planning.trace.StepTrace.at`."""
    assert isinstance(dim, int), f"{dim} is a formula: put sizes in first"
    return dim


def flops_of(record: OperatorRecord, storages: Sequence[Storage] = ()) -> int:
    """Multiplications and additions where they are what takes the time, else 0.

    A product has two for each of its terms, a sparse one for each stored value and column. A sum over edges has one for
    each edge and column, two where messages are multiplied; so has a value for each edge.
    """
    sizes = {key: number(dim) for key, dim in record.sizes.items()}
    match record.kind:
        case "product":
            return 2 * sizes["m"] * sizes["k"] * sizes["n"] * sizes["batch"]
        case "sparse_product":
            return 2 * sizes["stored"] * sizes["width"]
        case "attention" if "edges" in sizes:  # on a graph: the weighted sum, of which both factors have a gradient
            return 2 * sizes["edges"] * sizes["width"] * (2 if record.attrs.get("direction") == "backward" else 1)
        case "attention":
            products = 2 if record.attrs.get("direction") != "backward" else 5  # scores again, and four gradients
            return products * 2 * sizes["batch"] * sizes["queries"] * sizes["keys"] * sizes["width"]
        case "spmm" | "sddmm":
            is_copy = record.attrs.get("op", "").startswith("copy")
            return sizes["edges"] * sizes["width"] * (1 if is_copy or record.attrs.get("reduce") != "sum" else 2)
        case _:
            return 0


def bytes_of(record: OperatorRecord, storages: Sequence[Storage]) -> int:
    """Bytes read and written: each operand once, in no more bytes than its memory has.

    A sparse product reads a row of its dense factor for each stored value, with no cache. Operators on edges read a
    source row for each edge, likewise, and the structure as 32-bit numbers. Rows that are picked count as read and
    written, not the whole they are picked from. An exchange counts what arrives and leaves.
    """

    def whole(x: TensorRecord) -> int:
        return tensor_bytes(x) if x.storage < 0 else min(tensor_bytes(x), storage_bytes(storages[x.storage]))

    outputs = sum(whole(x) for x in record.outputs)
    sizes = {key: number(dim) for key, dim in record.sizes.items()}
    match record.kind:
        case "metadata":
            return 0
        case "exchange":
            return (sizes["received"] + sizes["sent"]) * sizes["row_bytes"]
        case "sparse_product":
            item = item_bytes(record.outputs[0].dtype)
            return sizes["stored"] * (sizes["width"] * item + item + 8) + 8 * (sizes["rows"] + 1) + outputs
        case "spmm":
            item = item_bytes(record.outputs[0].dtype)
            of_edges = [whole(x) for x in record.inputs if x.shape and x.shape[0] == sizes["edges"]]
            gathered = sizes["edges"] * sizes["width"] * item if len(record.inputs) > len(of_edges) else 0
            return gathered + sum(of_edges) + outputs + 4 * (sizes["edges"] + sizes["rows"])
        case "attention" if "edges" in sizes:
            item = item_bytes(record.outputs[0].dtype)
            return sizes["edges"] * (sizes["width"] * item + 4) + outputs + sum(whole(x) for x in record.inputs[1:])
        case "sddmm":
            per_edge = [tensor_bytes(x) // max(number(x.shape[0]), 1) for x in record.inputs if x.shape]
            return sizes["edges"] * sum(per_edge) + outputs + 8 * sizes["edges"]
        case "rows":
            index = [x for x in record.inputs if x.dtype in ("int64", "int32", "bool")]
            picked = sizes.get("picked_bytes", outputs)
            return 2 * picked + sum(whole(x) for x in index) + (outputs if record.attrs.get("op") == "add" else 0)
        case _:
            seen: set[TensorRecord] = set()
            inputs = 0
            for x in record.inputs:  # x * x reads x once
                inputs += 0 if x in seen else whole(x)
                seen.add(x)
            return inputs + outputs
