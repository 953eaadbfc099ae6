"""Random calls on a shard graph, beside the same calls on plain DGL: equal, or an exception, never a crash or a hang.

`main` runs in a process of its own. ``notes`` is a file that always names the call in progress, for when the
interpreter dies; one JSON line at the end says what happened.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import pickle
import random
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch
from dgl import function as fn
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from nugnn import intercept, seam, shard_lists
from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.shard_graph import ShardGraph
from shard_calls import make_data, plain_of, shard_of

CALLS_PER_EXAMPLE = 12
TIMEOUT_SECONDS = 20.0

# -- calls as plain data -------------------------------------------------------------------------------------------
# An argument is (kind, number): it becomes a value on each graph, the same or the corresponding one.

_MESSAGES: list[Any] = [
    fn.copy_u("h", "m"),
    fn.copy_e("e", "m"),
    fn.u_mul_e("h", "w", "m"),
    fn.u_add_v("h", "k", "m"),
    fn.u_dot_v("h", "k", "m"),
    fn.e_sub_v("e", "k", "m"),
    fn.copy_u("missing", "m"),
    fn.u_mul_e("h", "eid", "m"),
    lambda edges: {"m": edges.src["h"] * edges.data["w"]},
    lambda edges: {"m": edges.dst["h"] + edges.data["e"]},
    lambda edges: {"m": edges.src["h"][:1]},
    lambda edges: {"x": edges.src["id"].double()[:, None]},
    lambda edges: edges.src["absent"],
    lambda edges: 5,
]
_REDUCERS: list[Any] = [
    fn.sum("m", "a"),
    fn.mean("m", "a"),
    fn.max("m", "h"),
    fn.min("m", "a"),
    fn.sum("other", "a"),
    lambda nodes: {"a": nodes.mailbox["m"].sum(1)},
    lambda nodes: {"a": nodes.mailbox["m"].max(1).values + nodes.data["h"].sum()},
    lambda nodes: {"h": nodes.mailbox["m"].mean(1)},  # DGL's push fills a mailbox in the order of its argument
    lambda nodes: {"a": nodes.mailbox["absent"]},
]
_REDUCERS.pop(6)  # a sum over all nodes of a batch depends on how a function's batches are cut, in DGL as well
_NODE_FUNCTIONS: list[Any] = [
    None,
    lambda nodes: {"h": nodes.data["h"] * 2},
    lambda nodes: {"b": nodes.data["k"].tanh(), "id": nodes.data["id"]},
    lambda nodes: {"h": nodes.data["h"][:1]},
    lambda nodes: nodes.data["absent"],
]
_EDGE_FUNCTIONS: list[Any] = [
    fn.u_sub_v("h", "k", "x"),
    fn.copy_e("e", "x"),
    fn.u_mul_e("h", "w", "x"),
    lambda edges: {"x": edges.src["h"] - edges.dst["k"]},
    lambda edges: {"e": edges.data["e"] + 1},
    lambda edges: {"x": edges.src["h"][:2]},
]
_PREDICATES: list[Any] = [
    lambda batch: batch.data["id"] > 3 if "id" in batch.data else batch.data["eid"] > 3,
    lambda batch: torch.zeros(batch.batch_size(), dtype=torch.bool),
    lambda batch: batch.data["absent"] > 0,
]
_STRINGS = [
    "h",
    "w",
    "e",
    "_N",
    "_E",
    "sum",
    "mean",
    "max",
    "all",
    "eid",
    "csc",
    "in",
    "both",
    "absent",
    "",
    "dst",
    "stack",
]
_TYPES = [None, None, None, None, "_E", "_N", ("_N", "_E", "_N"), "other", 0, ["_N"]]


def _ids(number: int, count: int, dtype: torch.dtype, graph: Any) -> Any:
    """Ids by local row: most in range on every rank, some wrong on every rank alike."""
    generator = random.Random(number)
    size = generator.choice([0, 1, 1, 2, 3, 5])
    ids = [generator.randrange(10**6) % max(count, 1) for _ in range(size)] if count else []
    flavour = number % 13
    if flavour == 0:
        ids = [*ids, 10**6]
    elif flavour == 1:
        ids = [-1, *ids]
    elif flavour == 2 and ids:
        ids = [*ids, ids[0]]
    else:
        ids = list(dict.fromkeys(ids))
    if flavour == 3:
        return torch.tensor(ids, dtype=torch.float32)
    if flavour == 4:
        return torch.tensor(ids, dtype=torch.int32)
    if flavour == 5:
        return torch.zeros(count, dtype=torch.bool)
    if flavour == 6:
        return ids
    if flavour == 7:
        return np.array(ids, dtype=np.int64)
    if flavour == 8:
        return ids[0] if ids else 0
    if flavour == 9:
        return torch.tensor(ids, dtype=torch.int64).view(1, -1)
    if flavour == 10:
        return "__ALL__"
    return torch.tensor(ids, dtype=dtype)


def _rows(number: int, rows: int, ids: Tensor) -> Any:
    """A tensor with a row for each node or edge, by global id; sometimes of a wrong length."""
    width = [1, 3, 2][number % 3]
    if number % 11 == 0:
        return torch.ones(rows + 1, 3, dtype=torch.float64)
    if number % 11 == 1:
        return torch.zeros(rows, 3, dtype=torch.int64)
    if number % 11 == 2:
        return torch.ones(())
    if number % 11 == 3:
        return torch.ones(rows, 3, dtype=torch.float16)
    return torch.sin(ids.double()[:, None] * (1 + number % 5) + torch.arange(width))


def _foreign() -> Any:
    return dgl.graph(([0, 1], [1, 2]))


def value_of(argument: tuple[str, int], graph: Any) -> Any:
    """The argument's value for one graph."""
    kind, number = argument
    shard = isinstance(graph, ShardGraph)
    if kind == "nodes":
        return _ids(number, graph.num_nodes(), torch.int64, graph)
    if kind == "edges":
        if number % 17 == 0:
            return (torch.tensor([0]), torch.tensor([0]))
        return _ids(number, graph.num_edges(), torch.int64, graph)
    if kind == "node_rows":
        ids = graph.global_node_ids if shard else torch.arange(graph.num_nodes())
        return _rows(number, graph.num_nodes(), ids)
    if kind == "edge_rows":
        ids = graph.global_edge_ids if shard and graph.is_split else torch.arange(graph.num_edges())
        return _rows(number, graph.num_edges(), ids)
    if kind == "graph":
        return graph
    if kind == "graphs":
        return [[graph], [graph, graph], [graph, _foreign()], (graph,), []][number % 5]
    tables: dict[str, list[Any]] = {
        "message": _MESSAGES,
        "reduce": _REDUCERS,
        "node_function": _NODE_FUNCTIONS,
        "edge_function": _EDGE_FUNCTIONS,
        "predicate": _PREDICATES,
        "string": _STRINGS,
        "column": ["h", "k", "h", "w", "e", "a", "absent"],
        "type": _TYPES,
        "number": [0, 1, 2, 5, 2.5, -1, True],
        "dtype": [torch.int32, torch.int64, torch.float32],
        "device": ["cpu", torch.device("cpu"), None, "meta", "nowhere"],
        "flag": [True, False],
        "junk": [None, object(), {"h": 1}, [], "junk", b"x", torch.tensor([]), _foreign(), float("nan"), 2**70, len],
        "per_type": [
            {"_E": (_MESSAGES[2], _REDUCERS[0])},
            {("_N", "_E", "_N"): (_MESSAGES[8], _REDUCERS[5])},
            {"other": (_MESSAGES[0], _REDUCERS[0])},
            {"_E": (_MESSAGES[0],)},
            {},
        ],
    }
    table = tables[kind]
    return table[number % len(table)]


_KIND_OF_PARAMETER = {
    **dict.fromkeys(["u", "v", "vid", "nodes", "nids", "source", "seed_nodes", "root", "src", "dst"], "nodes"),
    **dict.fromkeys(["edges", "eid", "eids", "edge_ids"], "edges"),
    **dict.fromkeys(["x", "x_node", "y_node", "lhs_data"], "node_rows"),
    **dict.fromkeys(["y", "logits", "rhs_data"], "edge_rows"),
    **dict.fromkeys(["message_func", "mfunc"], "message"),
    **dict.fromkeys(["reduce_func", "rfunc"], "reduce"),
    **dict.fromkeys(["apply_node_func"], "node_function"),
    **dict.fromkeys(["predicate"], "predicate"),
    **dict.fromkeys(["feat", "weight", "key", "weight_name", "eweight_name"], "column"),
    **dict.fromkeys(["etype", "ntype"], "type"),
    **dict.fromkeys(["k", "num", "fanout", "n", "gid", "sortby", "fill_data"], "number"),
    **dict.fromkeys(["idtype"], "dtype"),
    **dict.fromkeys(["device", "ctx"], "device"),
    **dict.fromkeys(["g", "graph", "G", "A", "B", "block"], "graph"),
    **dict.fromkeys(["graphs", "g_list"], "graphs"),
    **dict.fromkeys(["etype_dict"], "per_type"),
    **dict.fromkeys(["op", "reduce_op", "form", "order", "formats", "norm_by", "cross_reducer", "edge_dir"], "string"),
}
_ALL_KINDS = sorted({*_KIND_OF_PARAMETER.values(), "junk", "flag", "edge_function"})

_PUBLIC = [n for n in dir(dgl.DGLGraph) if not n.startswith("_")]
_PROPERTIES = {n for n in _PUBLIC if not callable(getattr(dgl.DGLGraph, n))}
METHODS = sorted(set(_PUBLIC) - _PROPERTIES)
FUNCTIONS = sorted(shard_lists.EXACT_FUNCTIONS | shard_lists.LOCAL_FUNCTIONS | set(shard_lists.REFUSED_FUNCTIONS))
TRANSFORMS = sorted(shard_lists.EXACT_TRANSFORMS | set(shard_lists.REFUSED_TRANSFORMS))


def _function(name: str) -> Callable[..., Any]:
    return getattr(dgl, name, None) or getattr(dgl.ops, name)  # type: ignore[no-any-return]


def _parameters(target: str, name: str) -> list[inspect.Parameter]:
    if target == "method":
        signature = inspect.signature(getattr(dgl.DGLGraph, name))
        return list(signature.parameters.values())[1:]
    return list(inspect.signature(_function(name)).parameters.values())


def _kind_for(target: str, name: str, parameter: inspect.Parameter) -> str:
    if (name, parameter.name) in {("apply_edges", "func")}:
        return "edge_function"
    if (name, parameter.name) in {("apply_nodes", "func")}:
        return "node_function"
    if parameter.name in ("x", "lhs_data") and name.startswith(("copy_e", "e_")):
        return "edge_rows"
    if parameter.name == "y" and name.endswith(("_u", "_v")):
        return "node_rows"
    if isinstance(parameter.default, bool):
        return "flag"
    return _KIND_OF_PARAMETER.get(parameter.name, "string" if isinstance(parameter.default, str) else "junk")


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, str, list[tuple[str, tuple[str, int]]]]:
    """``(target, name, [(parameter, argument)])``."""
    target = draw(
        st.sampled_from(["method"] * 5 + ["function"] * 4 + ["data"] * 2 + ["property", "transform", "python"])
    )
    number = st.integers(0, 10**4)
    if target == "property":
        return target, draw(st.sampled_from(sorted(_PROPERTIES))), []
    if target == "transform":
        return target, draw(st.sampled_from(TRANSFORMS)), []
    if target == "python":
        names = ["copy", "deepcopy", "pickle", "repr", "len", "eq", "hash", "getitem", "bool", "iter", "attribute"]
        return target, draw(st.sampled_from(names)), [("x", ("string", draw(number)))]
    if target == "data":
        view = draw(st.sampled_from(["ndata", "edata", "srcdata", "dstdata", "nodes", "edges"]))
        rows = "edge_rows" if view in ("edata", "edges") else "node_rows"
        ids = "edges" if view == "edges" else "nodes"
        return (
            target,
            view,
            [
                ("key", ("column", draw(number))),
                ("value", (draw(st.sampled_from([rows, rows, rows, "junk"])), draw(number))),
                ("ids", (ids, draw(number))),
                ("how", ("number", draw(number))),
            ],
        )
    name = draw(st.sampled_from(METHODS if target == "method" else FUNCTIONS))
    arguments = []
    for parameter in _parameters(target, name):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        optional = parameter.default is not parameter.empty
        if optional and draw(st.integers(0, 2)) > 0:
            continue
        if not optional and draw(st.integers(0, 40)) == 0:
            continue
        kind = _kind_for(target, name, parameter)
        first_graph = kind in ("graph", "graphs")
        if not first_graph and draw(st.integers(0, 9)) == 0:
            kind = draw(st.sampled_from(_ALL_KINDS))
        arguments.append((parameter.name, (kind, draw(number))))
    return target, name, arguments


# -- running one ---------------------------------------------------------------------------------------------------


def invoke(call: tuple[str, str, list[tuple[str, tuple[str, int]]]], graph: Any) -> Any:
    """The call's answer on ``graph``; generators and views are read to their end."""
    target, name, arguments = call
    values = {parameter: value_of(argument, graph) for parameter, argument in arguments}
    if target == "method":
        if name == "local_scope":
            with graph.local_scope():
                graph.ndata["scoped"] = torch.zeros(graph.num_nodes())
            return set(graph.ndata)
        return _read(getattr(graph, name)(**values))
    if target == "function":
        return _read(_function(name)(**values))
    if target == "property":
        return _read(getattr(graph, name))
    if target == "transform":
        return _read(_transform(name)(graph))
    if target == "data":
        return _data_call(graph, name, values)
    return _python_call(graph, name, values["x"])


def _transform(name: str) -> Any:
    cls = getattr(dgl.transforms, name)
    arguments: dict[str, dict[str, Any]] = {
        "RandomWalkPE": {"k": 2},
        "LaplacianPE": {"k": 2},
        "LapPE": {"k": 2},
        "SVDPE": {"k": 2},
        "KHopGraph": {"k": 2},
        "AddMetaPaths": {"metapaths": {"a": [("_N", "_E", "_N")] * 2}},
        "Compose": {"transforms": [dgl.transforms.AddSelfLoop()]},
        "GDC": {"coef": [0.3, 0.2], "eps": 0.01},
        "PPR": {"eps": 0.01},
        "HeatKernel": {"eps": 0.01},
        "SIGNDiffusion": {"k": 2, "in_feat_name": "h"},
        "RowFeatNormalizer": {"node_feat_names": ["h"]},
        "FeatMask": {"node_feat_names": ["h"]},
        "GCNNorm": {},
    }
    return cls(**arguments.get(name, {}))


def _data_call(graph: Any, view: str, values: dict[str, Any]) -> Any:
    key, value, how = values["key"], values["value"], values["how"]
    columns = getattr(graph, view)
    if view in ("nodes", "edges"):
        columns = columns[values["ids"]].data
        if how == 1 and isinstance(value, Tensor):  # write some rows
            rows = columns[key]
            columns[key] = rows + 1
            return columns[key]
        return columns[key]
    if how in (0, 1):
        columns[key] = value
        return columns[key]
    if how == 2:
        return {name: columns[name] for name in columns}
    if how == 5:
        return columns.pop(key)
    return columns[key]


def _python_call(graph: Any, name: str, text: str) -> Any:
    if name == "copy":
        return copy.copy(graph)
    if name == "deepcopy":
        return copy.deepcopy(graph).num_nodes()
    if name == "pickle":
        return pickle.loads(pickle.dumps(graph)).num_nodes()
    if name == "repr":
        return len(repr(graph)) > 0
    if name == "len":
        return len(graph)
    if name == "eq":
        return graph == graph  # noqa: PLR0124
    if name == "hash":
        return hash(graph) == hash(graph)
    if name == "getitem":
        return _read(graph[text])
    if name == "bool":
        return bool(graph)
    if name == "iter":
        return list(itertools.islice(graph, 3))
    return _read(getattr(graph._graph, text or "edges")())


def _read(x: Any) -> Any:
    if isinstance(x, types.GeneratorType):
        return list(itertools.islice(x, 1000))
    return x


# -- comparing -----------------------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Whether plain DGL's answer ``a`` and the shard's ``b`` say the same; floats up to rounding."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        a, b = (x.detach().to_dense() if x.layout is not torch.strided else x.detach() for x in (a, b))
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.equal(a, b) or (
            a.is_floating_point() and torch.allclose(a, b, 1e-3 if a.dtype is torch.float16 else 1e-6, 1e-6, True)
        )
    if isinstance(a, dgl.DGLGraph):
        return isinstance(b, dgl.DGLGraph) and _same_graph(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, set):
        return bool(a == b)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.shape == b.shape and bool(np.allclose(a, b, equal_nan=True))
    if hasattr(a, "toarray"):
        return hasattr(b, "toarray") and same(a.toarray(), b.toarray())
    if isinstance(a, (bool, int, str, bytes, type(None), torch.dtype, torch.device)):
        return bool(a == b)
    if isinstance(a, float):
        return isinstance(b, float) and bool(np.isclose(a, b, equal_nan=True))
    return type(a).__name__ == type(b).__name__ or type(a).__name__ in type(b).__mro__[1].__name__


def _table(graph: Any) -> list[Any]:
    """Edges with their data as sorted rows: a shard numbers them in another order."""
    plain = graph._whole() if isinstance(graph, ShardGraph) else graph
    if plain.num_edges() == 0:
        return []
    source, target = plain.edges()
    columns = [source.double()[:, None], target.double()[:, None]]
    for key in sorted(plain.edata, key=str):
        if key != "_ID" and isinstance(plain.edata[key], Tensor):
            columns.append(
                plain.edata[key].detach().double().reshape(plain.num_edges(), -1).nan_to_num(-7.0, -8.0, -9.0)
            )
    return sorted(torch.cat(columns, 1).round(decimals=5).tolist())


def _same_graph(a: Any, b: Any) -> bool:
    if a.is_homogeneous and _odd_columns(a):
        return a.num_edges() == b.num_edges()
    if not a.is_homogeneous or not b.is_homogeneous:
        return a.ntypes == b.ntypes and a.num_nodes() == b.num_nodes()
    if (a.num_nodes(), a.num_edges(), a.idtype) != (b.num_nodes(), b.num_edges(), b.idtype):
        return False
    nodes = set(a.ndata) == set(b.ndata) and all(same(a.ndata[key], b.ndata[key]) for key in a.ndata)
    return nodes and set(a.edata) == set(b.edata) and bool(np.allclose(_table(a), _table(b), atol=1e-4))


# Answers that are random or objects by nature: the call has to end, its value is not compared.
NOT_COMPARED = frozenset(
    [
        *(
            "lap_pe",
            "laplacian_pe",
            "svd_pe",
            "LapPE",
            "LaplacianPE",
            "SVDPE",
            "save_graphs",
            "formats",
            "hash",
            "metagraph",
        ),
        *("get_node_storage", "get_edge_storage"),
        *("topk_nodes", "topk_edges"),  # ids of the whole graph, zeros where there are fewer than k rows
    ]
)


class Report:
    """What happened, by kind; differences in words."""

    def __init__(self, notes: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.differences: list[str] = []
        self._notes = notes

    def note(self, side: str, call: Any) -> None:
        self._notes.write_text(f"{side}: {call}\n")

    def differ(self, call: Any, what: str) -> None:
        self.counts["different"] += 1
        self.differences.append(f"{call}: {what}")


def outcome(call: Any, graph: Any) -> tuple[str, Any]:
    for generator in (dgl.seed, np.random.seed, torch.manual_seed, random.seed):
        generator(5)
    try:
        return "answer", invoke(call, graph)
    except Exception as error:
        return "error", error


def _is_never_answered(call: Any) -> bool:
    """Calls that end the interpreter, or change the graph in place: made on the shard only."""
    target, name, _ = call
    return (target == "method" and name in shard_lists.NEVER_ANSWERED) or (
        target == "function" and name in shard_lists.NEVER_ANSWERED_FUNCTIONS
    )


def _fresh(data: GraphData) -> tuple[ShardGraph, dgl.DGLGraph]:
    shard = shard_of(Ranks(), data)
    return shard, plain_of(data, shard.global_edge_ids)


_LIMITS_OF_DGL = (
    "must be float type",  # integers and bool pass through copies, maxima and sums on a shard graph
    "can only be bfloat16/float32/float64",  # so does float16
    "min(): Expected reduction dim 0",  # filter_edges of no edges is no edges
    "'NoneType' object is not subscriptable",  # a transform after which the graph's batch information is gone
)


def _is_limit_of_dgl(error: Any) -> bool:
    return any(text in str(error) for text in _LIMITS_OF_DGL)


def _odd_columns(graph: Any) -> bool:
    """Names of columns that are no text, tensors for example: two of them are never equal."""
    return any(not isinstance(key, str) for key in (*graph.ndata, *graph.edata))


def _is_never_answered(call: Any) -> bool:
    """Calls that end the interpreter, or change the graph in place: made on the shard only."""
    target, name, _ = call
    return (target == "method" and name in shard_lists.NEVER_ANSWERED) or (
        target == "function" and name in shard_lists.NEVER_ANSWERED_FUNCTIONS
    )


def _fresh(data: GraphData) -> tuple[ShardGraph, dgl.DGLGraph]:
    shard = shard_of(Ranks(), data)
    return shard, plain_of(data, shard.global_edge_ids)


def _more_types_than_dgl(error: Any) -> bool:
    """Integers and bool pass through copies, maxima and sums on a shard graph; DGL's kernels take floats only."""
    return "must be float type" in str(error) or "can only be bfloat16/float32/float64" in str(error)


def run_beside_dgl(sequence: list[Any], report: Report) -> None:
    """One rank: each call on the shard and on a plain graph of the same edge order."""
    data = make_data()
    shard, plain = _fresh(data)
    for call in sequence:
        name = call[1]
        report.note("shard", call)
        kind, answer = outcome(call, shard)
        report.counts[kind] += 1
        if _is_never_answered(call):
            if kind != "error":
                report.differ(call, f"was answered with {answer!r:.200}")
            continue
        if kind == "error":
            # nothing to compare; plain DGL reads past its arrays for some arguments that a shard graph refuses
            if isinstance(answer, (SystemError, MemoryError)):
                report.differ(call, f"{answer!r:.300}")
            shard, plain = _fresh(data)
            continue
        report.note("plain DGL", call)
        plain_kind, expected = outcome(call, plain)
        if name in NOT_COMPARED or _odd_columns(plain) or _odd_columns(shard):
            shard, plain = _fresh(data)
            continue
        if plain_kind == "error" and _is_limit_of_dgl(expected):
            shard, plain = _fresh(data)
        elif plain_kind == "error":
            report.differ(call, f"plain DGL raised {expected!r:.300}, the shard answered {answer!r:.200}")
        elif not same(expected, answer):
            report.differ(call, f"plain DGL answered {expected!r:.300}, the shard {answer!r:.300}")
        elif not all(same(plain.ndata[k], shard.ndata[k]) for k in plain.ndata if k in shard.ndata):
            report.differ(call, "node data differ afterwards")
        elif set(plain.ndata) != set(shard.ndata) or set(plain.edata) != set(shard.edata):
            report.differ(call, f"columns afterwards: {sorted(plain.ndata)}, {sorted(shard.ndata)}")
        elif not all(same(plain.edata[k], shard.edata[k]) for k in plain.edata):
            report.differ(call, "edge data differ afterwards")


def run_on_parts(num_parts: int, sequence: list[Any], report: Report) -> None:
    """Several ranks: all answer or all raise, refused names always raise, and nobody waits for ever."""
    data = make_data()
    # every rank has nodes and edges, more edges than nodes: an argument fits on all ranks or on none
    parts = torch.arange(data.num_nodes) % num_parts
    barrier = threading.Barrier(num_parts)
    kinds: list[dict[int, str]] = [{} for _ in sequence]

    def rank(ranks: Ranks) -> list[tuple[str, str]]:
        graph = shard_of(ranks, data, parts)
        outcomes = []
        with intercept(torch.nn.Identity(), graph).step(0):
            for position, call in enumerate(sequence):
                if ranks.rank == 0:
                    report.note(f"{num_parts} parts", call)
                kind, answer = outcome(call, graph)
                outcomes.append((kind, f"{type(answer).__name__}: {answer!s:.300}" if kind == "error" else ""))
                kinds[position][ranks.rank] = kind
                barrier.wait(3 * TIMEOUT_SECONDS)  # no collective: it must not pair with one that a call left open
                if len(set(kinds[position].values())) > 1:
                    break  # what follows would be a mistake of this loop: a program ends at its first error
        return outcomes

    try:
        outcomes = run_local_ranks(num_parts, rank, timeout_seconds=TIMEOUT_SECONDS)
    except BaseException as error:
        report.differ(sequence, f"a rank ended with {type(error).__name__}: {error!s:.300}")
        return
    for position, call in enumerate(sequence[: len(outcomes[0])]):
        results = [outcomes[rank][position] for rank in range(num_parts)]
        report.counts[results[0][0]] += 1
        if any("RanksDisagree" in text or "HaloExchangeError" in text or "and waited" in text for _, text in results):
            report.differ(call, f"waited for a peer: {results}")
        elif len({kind for kind, _ in results}) > 1:
            report.differ(call, f"some ranks raised, some answered: {results}")
        elif results[0][0] == "answer" and _is_refused(call):
            report.differ(call, "is on the refused list but was answered")


def _is_refused(call: Any) -> bool:
    target, name, arguments = call
    graphs = [value_of(argument, True) for _, argument in arguments if argument[0] in ("graph", "graphs")]
    if target == "function" and not any(graphs):
        return False  # called without a graph, or with an empty list of them
    return (target in ("method", "property") and name in shard_lists.REFUSED_METHODS) or (
        (target == "function" and name in shard_lists.REFUSED_FUNCTIONS)
        or (target == "transform" and name in shard_lists.REFUSED_TRANSFORMS)
    )


def main(num_parts: int, start: int, num_examples: int, notes: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seam.install()
    report = Report(notes)

    @seed(start)
    @settings(
        max_examples=num_examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(calls(), min_size=CALLS_PER_EXAMPLE, max_size=CALLS_PER_EXAMPLE))
    def run(sequence: list[Any]) -> None:
        if num_parts == 1:
            run_beside_dgl(sequence, report)
        else:
            run_on_parts(num_parts, sequence, report)

    run()
    print(json.dumps({"counts": report.counts, "differences": report.differences}))
