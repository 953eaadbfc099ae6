"""The graph a model sees on one rank: a `dgl.DGLGraph` of the inner nodes and all their in-edges."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import dgl
import torch
from dgl import core
from dgl import function as fn
from dgl import ops as dgl_ops
from dgl.base import ALL, is_all
from dgl.frame import Frame
from dgl.utils.checks import prepare_tensor
from torch import Tensor

from nugnn._counted import counted
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_exchange import fetch_halo
from nugnn.comm.halo_transfer import HaloPlan
from nugnn.comm.halo_wire import RowIds
from nugnn.graph_index import ShardIndex
from nugnn.kernels.rows import IdRuns, Rows, tag
from nugnn.kernels.structure import Structure
from nugnn.partition.shard import OF_THE_WHOLE, Shard
from nugnn.shard_fallback import close_remaining_methods, on_device
from nugnn.shard_loops import with_self_loops, without_self_loops, zero_where_infinite
from nugnn.shard_views import EdgeData, EdgeView, NodeData, NodeView, subset
from nugnn.udf import run_edge_function, run_node_function, run_reduce_function, tie_exchanges


@close_remaining_methods
class ShardGraph(dgl.DGLGraph):  # type: ignore[misc]
    """Looks to a model like an ordinary homogeneous graph of this rank's inner nodes.

    ``num_nodes()``, ``ndata`` and so on have one row for each inner node; ``in_degrees()`` and ``out_degrees()`` are
    degrees in the whole graph; the edges are all in-edges of inner nodes, in CSC order. Message passing fetches source
    rows from other ranks and sends their gradients back. With one rank it is the whole graph.

    `nugnn.shard_lists` says which methods are exact, which are local by meaning and which are refused.
    """

    _node_frames: list[Frame]
    _edge_frames: list[Frame]

    def __init__(self, shard: Shard, ranks: Ranks | None = None, *, keep_edge_ids: bool = True) -> None:
        """Args:
        shard: What this rank owns.
        ranks: Process groups and this rank's device, where the graph and its data go; a single CPU rank when None.
        keep_edge_ids: Keep `global_edge_ids`, 8 bytes per edge; message passing and dropout do without.

        Raises:
            ValueError: The shard belongs to another rank or number of parts, or peers disagree about halo rows.
        """
        ranks = ranks or Ranks()
        if (shard.rank, shard.num_parts) != (ranks.rank, ranks.world_size):
            raise ValueError(
                f"rank {ranks.rank} of {ranks.world_size} was given the shard of part {shard.rank} of "
                f"{shard.num_parts}; partition for {counted(ranks.world_size, 'part')} and load the file of this rank."
            )
        num_inner = len(shard.global_node_ids)
        device = ranks.device
        node_ids, send_rows = shard.global_node_ids.to(device), shard.send_rows.to(device)
        indptr = shard.indptr.to(device)
        structure = Structure(num_inner + sum(shard.recv_splits), indptr, shard.indices.to(device))
        edge_places = IdRuns(shard.edge_starts.to(device), indptr)
        row_ids = RowIds(node_ids, send_rows, structure, edge_places)
        plan = HaloPlan(num_inner, send_rows, shard.send_splits, shard.recv_splits, ranks, row_ids=row_ids)
        plan.verify()
        index = ShardIndex(
            structure,
            plan,
            Rows("node", node_ids, split=ranks.is_split),
            Rows("edge", edge_places, split=ranks.is_split),
        )
        self._setup(index, shard.out_degrees.to(device), shard.num_nodes_global, shard.num_edges_global)
        self._edge_ids = shard.global_edge_ids.to(device) if keep_edge_ids else None
        self._edge_id_bound = shard.num_edges_global
        self.of_the_whole: dict[str, Any] = {name: getattr(shard, name) for name in OF_THE_WHOLE}
        """What all shards of the graph have in common, by field."""
        for key, value in shard.node_data.items():
            self._node_frames[0][key] = tag(value.to(device), index.node_rows)
        for key, value in shard.edge_data.items():
            self._edge_frames[0][key] = tag(value.to(device), index.edge_rows)

    def _setup(self, index: ShardIndex, out_degrees: Tensor, num_nodes: int, num_edges: int) -> None:
        self._init(
            index,
            ["_N"],
            ["_E"],
            [Frame(num_rows=index.num_nodes())],
            [Frame(num_rows=index.num_edges())],
        )
        self._out_degrees = out_degrees
        self._num_nodes_global, self._num_edges_global = num_nodes, num_edges
        self._exchanges: list[tuple[int, Tensor]] = []

    def __copy__(self) -> ShardGraph:
        other = ShardGraph.__new__(ShardGraph)
        other.__dict__.update(self.__dict__)
        return other

    def __reduce__(self) -> NoReturn:
        raise TypeError("a shard graph belongs to its process; pass GraphData or the shard folder instead")

    # -- beyond DGL ---------------------------------------------------------------------------------------------

    @property
    def index(self) -> ShardIndex:
        """Structure, halo plan and operators."""
        return self._graph  # type: ignore[no-any-return]

    @property
    def is_split(self) -> bool:
        """Whether other ranks hold further nodes."""
        return self.index.plan.ranks.is_split

    @property
    def ranks(self) -> Ranks:
        return self.index.plan.ranks

    def num_nodes_global(self) -> int:
        """Nodes of the whole graph."""
        return self._num_nodes_global  # type: ignore[no-any-return]

    def num_edges_global(self) -> int:
        """Edges of the whole graph."""
        return self._num_edges_global  # type: ignore[no-any-return]

    @property
    def global_node_ids(self) -> Tensor:
        """``(N,)`` int64 id in the whole graph of each row of ``ndata``."""
        assert self.index.node_rows.ids is not None
        return self.index.node_rows.ids

    @property
    def global_edge_ids(self) -> Tensor:
        """``(E,)`` int64 id in the whole graph of each row of ``edata``."""
        if self._edge_ids is None:
            raise ValueError(
                "this graph keeps no ids of edges, to save memory (nugnn.fit does not). Add them to the data before: "
                "edge_data={'id': torch.arange(num_edges)} reads as graph.edata['id']."
            )
        return self._edge_ids

    def own_tensors(self) -> Iterator[Tensor]:
        """Structure, ids, degrees and data: what lives as long as the graph."""
        index = self.index
        made = vars(index.structure).get("transposed")
        holders = [vars(index.structure), {} if made is None else vars(made), index.degree_factors]
        yield from (x for holder in holders for x in holder.values() if isinstance(x, Tensor))
        yield from (self.global_node_ids, index.plan.send_rows, self._out_degrees)
        yield from (frame[key] for frame in (*self._node_frames, *self._edge_frames) for key in frame)

    def refuse(self, what: str, instead: str) -> NoReturn:
        raise NotImplementedError(
            f"{what} has no exact meaning on one part of a split graph (part {self.ranks.rank} of "
            f"{self.ranks.world_size}). Use instead: {instead}."
        )

    def remember_exchange(self, x_L: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if x_L.requires_grad and not any(x_L is known and task == when for when, known in self._exchanges):
            self._exchanges.append((task, x_L))

    def take_exchanges(self) -> list[Tensor]:
        # a layer that runs again in backward may stop half-way: what it left is of that backward
        taken = [x_L for task, x_L in self._exchanges if task == torch._C._current_graph_task_id()]
        self._exchanges.clear()
        return taken

    # -- data and counts ----------------------------------------------------------------------------------------

    @property
    def ndata(self) -> NodeData:
        return NodeData(self, "_N", 0, ALL)

    srcdata = ndata
    dstdata = ndata

    @property
    def edata(self) -> EdgeData:
        return EdgeData(self, None, ALL)

    @property
    def nodes(self) -> NodeView:
        return NodeView(self, self.get_ntype_id)

    srcnodes = nodes
    dstnodes = nodes

    @property
    def edges(self) -> EdgeView:
        return EdgeView(self)

    def __getitem__(self, key: Any) -> ShardGraph:
        if key in ("_E", ("_N", "_E", "_N"), None):
            return self
        raise dgl.DGLError(f"invalid edge type {key!r}: a shard graph has one, '_E'")

    def num_nodes(self, ntype: str | None = None) -> int:
        return self.index.num_nodes(self.get_ntype_id(ntype))

    number_of_nodes = num_src_nodes = num_dst_nodes = number_of_src_nodes = number_of_dst_nodes = num_nodes

    def num_edges(self, etype: Any = None) -> int:
        return self.index.num_edges(self.get_etype_id(etype))

    number_of_edges = num_edges

    def metagraph(self) -> Any:
        """One node type with one edge type onto itself, as a networkx graph."""
        import networkx

        graph = networkx.MultiDiGraph()
        graph.add_edge("_N", "_N", "_E")
        return graph

    @property
    def batch_size(self) -> int:
        return 1

    @property
    def is_block(self) -> bool:
        return False

    @property
    def is_unibipartite(self) -> bool:
        return False

    @property
    def idtype(self) -> torch.dtype:
        return self.index.idtype

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def is_pinned(self) -> bool:
        return False

    def has_nodes(self, vid: Any, ntype: str | None = None) -> Any:
        """Whether there are local rows of these numbers."""
        self.get_ntype_id(ntype)
        ids = prepare_tensor(self, vid, "vid")
        if len(ids) and int(ids.min()) < 0:
            raise dgl.DGLError("All IDs must be non-negative integers.")
        found = ids < self.num_nodes()
        return bool(found) if isinstance(vid, numbers.Integral) else found

    def in_degrees(self, v: Any = ALL, etype: Any = None) -> Any:
        """Degrees in the whole graph; all in-edges of inner nodes are here."""
        self.get_etype_id(etype)
        index = self.index
        return self._degrees(self._out_degrees if index.is_reversed else index.structure.in_degrees, v)

    def out_degrees(self, u: Any = ALL, etype: Any = None) -> Any:
        """Degrees in the whole graph, kept with the shard."""
        self.get_etype_id(etype)
        index = self.index
        return self._degrees(index.structure.in_degrees if index.is_reversed else self._out_degrees, u)

    def degree_factors(self, end: str, power: float, dtype: torch.dtype) -> Tensor:
        """``max(degree, 1) ** power`` in the whole graph, made once: for ``in`` of each row of ``ndata``, ``(N,)``; for
        ``out`` of each local source, ``(L,)``, those of halo rows from their owners (a collective call the first time).
        """
        known = self.index.degree_factors
        key = (end, power, dtype)
        if key not in known:
            degrees = self.out_degrees() if end == "out" else self.in_degrees()
            factors = degrees.to(dtype).clamp(min=1).pow(power)
            known[key] = fetch_halo(factors, self.index.plan, "degree factors") if end == "out" else factors
        return known[key]

    def _degrees(self, degrees: Tensor, rows: Any) -> Any:
        degrees = degrees.to(self.idtype)
        if is_all(rows):
            return tag(degrees, self.index.node_rows)
        if isinstance(rows, numbers.Integral):
            return int(degrees[self._row_ids(rows)])
        picked = self._row_ids(rows)
        return tag(degrees[picked], subset(self.index.node_rows, picked))

    def _row_ids(self, rows: Any, num_rows: int | None = None) -> Tensor:
        """Ids as int64 rows; type and range are checked as DGL does, and more strictly where its answer is garbage."""
        num_rows = self.num_nodes() if num_rows is None else num_rows
        ids: Tensor = prepare_tensor(self, rows, "ids").long()
        wrong = ids[(ids < 0) | (ids >= num_rows)]
        if len(wrong):
            raise dgl.DGLError(f"id {int(wrong[0])} is out of range for {counted(num_rows, 'local row')}")
        return ids

    def _edge_row_ids(self, edges: Any) -> Tensor:
        """Rows of ``edata`` for edge ids; for (source, destination) pairs on one rank only."""
        if isinstance(edges, tuple):
            if self.is_split:
                self.refuse("naming edges by (source, destination) pairs", "edge rows of graph.edata")
            edges = self._whole().edge_ids(*on_device(edges, torch.device("cpu"))).to(self.device)
        return self._row_ids(edges, self.num_edges())

    def _distinct(self, ids: Tensor, what: str) -> Tensor:
        if len(torch.unique(ids)) != len(ids):
            raise dgl.DGLError(f"{what}: an id is given twice, so its messages would count twice; give each once")
        return ids

    # -- message passing ----------------------------------------------------------------------------------------

    def update_all(self, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None) -> None:
        self.get_etype_id(etype)
        columns = self._pass_messages(message_func, reduce_func, apply_node_func)
        if _is_extreme(reduce_func) and columns:
            key = next(
                iter(columns)
            )  # like DGL: nodes without in-edges show zero, after the apply function saw infinity
            columns[key] = zero_where_infinite(columns[key])
        self._set_n_repr(0, ALL, columns)

    def multi_update_all(self, etype_dict: Any, cross_reducer: Any, apply_node_func: Any = None) -> None:
        if len(etype_dict) != 1:
            raise dgl.DGLError("a shard graph has one edge type, so multi_update_all takes one entry")
        ((etype, functions),) = etype_dict.items()
        self.get_etype_id(etype)
        functions = functions if isinstance(functions, tuple) else (functions,)
        if not 2 <= len(functions) <= 3:
            raise dgl.DGLError(f"edge type {etype!r} needs (message, reduce[, apply]), got {len(functions)} functions")
        message_func, reduce_func, *applied = functions
        columns = self._pass_messages(message_func, reduce_func, applied[0] if applied else None)
        if cross_reducer == "stack":
            columns = {key: tag(value[:, None], self.index.node_rows) for key, value in columns.items()}
        if _is_extreme(reduce_func):
            columns = {key: zero_where_infinite(value) for key, value in columns.items()}
        self._set_n_repr(0, ALL, columns)
        if apply_node_func is not None:
            self.apply_nodes(apply_node_func)

    def _pass_messages(self, message_func: Any, reduce_func: Any, apply_func: Any) -> dict[str, Tensor]:
        columns: dict[str, Tensor]
        is_builtin = core.is_builtin
        fused = is_builtin(message_func) and is_builtin(reduce_func)
        if fused and hasattr(dgl_ops, f"{message_func.name}_{reduce_func.name}"):
            columns = dict(core.invoke_gspmm(self, message_func, reduce_func))
        else:
            if is_builtin(message_func):
                messages = core.invoke_gsddmm(self, message_func)
            else:
                messages = run_edge_function(self, None, message_func)
            if is_builtin(reduce_func):
                field = reduce_func.msg_field
                columns = dict(core.invoke_gspmm(self, fn.copy_e(field, field), reduce_func, edata=messages))
            else:
                columns = run_reduce_function(self, reduce_func, messages)
        columns = tie_exchanges(self, columns)
        if apply_func is not None:
            known = {key: self._node_frames[0][key] for key in self._node_frames[0]} | columns
            columns = run_node_function(self, apply_func, known)
        return {key: tag(value, self.index.node_rows) for key, value in columns.items()}

    def apply_edges(self, func: Any, edges: Any = ALL, etype: Any = None) -> None:
        self.get_etype_id(etype)
        picked = None if is_all(edges) else self._edge_row_ids(edges)
        if core.is_builtin(func):
            columns = dict(core.invoke_gsddmm(self, func))
            if picked is not None:
                columns = {key: value[picked] for key, value in columns.items()}
        else:
            ids = None if picked is None else picked.to(self.idtype)
            columns = run_edge_function(self, ids, func)
        self._set_e_repr(0, ALL if picked is None else picked.to(self.idtype), columns)

    def apply_nodes(self, func: Any, v: Any = ALL, ntype: str | None = None) -> None:
        self.get_ntype_id(ntype)
        nodes = None if is_all(v) else self._row_ids(v).to(self.idtype)
        frame = self._node_frames[0]
        columns = run_node_function(self, func, {key: frame[key] for key in frame}, nodes)
        self._set_n_repr(0, ALL if nodes is None else nodes, columns)

    def send_and_recv(
        self, edges: Any, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None
    ) -> None:
        """Messages along the given local edge rows; every rank has to call, with its own edges (or none).

        Whatever the order of ``edges``, a node's mailbox is in global edge-id order.
        """
        self.get_etype_id(etype)
        picked = self._distinct(self._edge_row_ids(edges), "send_and_recv")
        if not self.is_split and len(picked) == 0:
            return
        mask = torch.zeros(self.num_edges(), dtype=torch.bool, device=self.device)
        mask[picked] = True
        self._pass_along(mask, None, message_func, reduce_func, apply_node_func)

    def push(self, u: Any, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None) -> None:
        """Messages from the given inner nodes to their successors on any rank; every rank has to call.

        Whatever the order of ``u``, a node's mailbox is in global edge-id order.
        """
        self.get_etype_id(etype)
        chosen = torch.zeros(self.num_nodes(), dtype=torch.uint8, device=self.device)
        chosen[self._distinct(self._row_ids(u), "push")] = 1
        mask = self.index.sddmm("copy_lhs", chosen, None, "u", "v").bool()
        if not self.is_split and not mask.any():
            return
        self._pass_along(mask, None, message_func, reduce_func, apply_node_func)

    def pull(self, v: Any, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None) -> None:
        """Messages along all in-edges of the given inner nodes; every rank calls, with its own nodes (or none)."""
        self.get_etype_id(etype)
        nodes = self._distinct(self._row_ids(v), "pull")
        if not self.is_split and len(nodes) == 0:
            return
        chosen = torch.zeros(self.num_nodes(), dtype=torch.uint8, device=self.device)
        chosen[nodes] = 1
        mask = self.index.sddmm("copy_rhs", None, chosen, "u", "v").bool()
        self._pass_along(mask, nodes, message_func, reduce_func, apply_node_func)

    def _pass_along(self, mask_E: Tensor, nodes: Tensor | None, mfunc: Any, rfunc: Any, afunc: Any) -> None:
        """Message passing on the edges in ``mask_E``; writes ``nodes``, or the nodes that got a message."""
        part = self._with_edges(mask_E)
        columns = part._pass_messages(mfunc, rfunc, afunc)
        rows = (part.in_degrees() > 0).nonzero().view(-1) if nodes is None else nodes
        self._set_n_repr(0, rows.to(self.idtype), {key: value[rows] for key, value in columns.items()})

    def _with_edges(self, mask_E: Tensor) -> ShardGraph:
        """The same nodes and the edges in ``mask_E``; frames of nodes are shared, of edges subset."""
        old = self.index.structure
        rows = mask_E.nonzero().view(-1)
        kept = old.indptr.new_zeros(old.num_edges + 1)
        torch.cumsum(mask_E, 0, out=kept[1:])
        structure = Structure(old.num_src, kept[old.indptr], old.indices[rows])
        edge_rows = subset(self.index.edge_rows, rows)
        kept_ids = None if self._edge_ids is None else self._edge_ids[rows]
        part = copy.copy(self)
        part._graph = replace(self.index, structure=structure, edge_rows=edge_rows)
        part._edge_ids = kept_ids
        part._edge_frames = [self._edge_frames[0].subframe(rows)]
        part._out_degrees = self._out_degrees if not self.index.is_reversed else part.index._source_view.in_degrees
        part._exchanges = []
        return part

    def filter_nodes(self, predicate: Any, nodes: Any = ALL, ntype: str | None = None) -> Tensor:
        """Local ids of inner nodes for which ``predicate`` holds."""
        self.get_ntype_id(ntype)
        ids = torch.arange(self.num_nodes(), device=self.device) if is_all(nodes) else self._row_ids(nodes)
        frame = self._node_frames[0]
        held: list[Tensor] = []

        def keep(batch: Any) -> dict[str, Tensor]:
            held.append(predicate(batch))
            return {}

        run_node_function(self, keep, {k: frame[k] for k in frame}, ids)
        return ids[held[0].bool()].to(self.idtype)

    def filter_edges(self, predicate: Any, edges: Any = ALL, etype: Any = None) -> Tensor:
        """Local edge rows for which ``predicate`` holds."""
        self.get_etype_id(etype)
        if not isinstance(edges, Iterable):  # a node alone is an id to DGL, an edge alone is not
            raise ValueError(f"filter_edges: edges is of type {type(edges).__name__}; give a tensor or a list of ids")
        ids = torch.arange(self.num_edges(), device=self.device) if is_all(edges) else self._edge_row_ids(edges)
        held: list[Tensor] = []

        def keep(batch: Any) -> dict[str, Tensor]:
            held.append(predicate(batch))
            return {}

        run_edge_function(self, ids.to(self.idtype), keep)
        return ids[held[0].bool()].to(self.idtype)

    # -- other graphs on the same nodes -------------------------------------------------------------------------

    def reverse(
        self,
        copy_ndata: bool = True,
        copy_edata: bool = False,
        *,
        share_ndata: bool | None = None,
        share_edata: bool | None = None,
    ) -> ShardGraph:
        """Every edge points the other way; edge rows stay as they are.

        ``share_ndata`` and ``share_edata`` are older names of the other two.
        """
        copy_ndata = copy_ndata if share_ndata is None else share_ndata
        copy_edata = copy_edata if share_edata is None else share_edata
        other = copy.copy(self)
        other._graph = self.index.reversed()
        other._node_frames = [self._node_frames[0].clone() if copy_ndata else Frame(num_rows=self.num_nodes())]
        other._edge_frames = [self._edge_frames[0].clone() if copy_edata else Frame(num_rows=self.num_edges())]
        other._exchanges = []
        return other

    def remove_self_loop(self, etype: Any = None) -> ShardGraph:
        """Without edges from a node to itself; all of them are local."""
        self.get_etype_id(etype)
        return without_self_loops(self)

    def add_self_loop(self, edge_feat_names: Any = None, fill_data: Any = 1.0, etype: Any = None) -> ShardGraph:
        """One more edge from each node to itself, after its other in-edges.

        Args:
            edge_feat_names: Columns that get ``fill_data``, all when None; the others get zeros.
            fill_data: A number, or ``sum``, ``mean``, ``max`` or ``min`` over the node's in-edges.
            etype: The graph's one edge type.

        Raises:
            DGLError: ``fill_data`` is something else, or a mean of integers.
        """
        self.get_etype_id(etype)
        return with_self_loops(self, edge_feat_names, fill_data)

    def clone(self) -> ShardGraph:
        """A copy whose data can be changed without touching this graph; the structure is shared, it never changes."""
        other = self.local_var()
        for frame in (other._node_frames[0], other._edge_frames[0]):
            for key in list(frame.keys()):
                frame[key] = tag(frame[key].clone(), getattr(frame[key], "_nugnn_rows", None))
        return other

    def local_var(self) -> ShardGraph:
        other = copy.copy(self)
        other._node_frames = [frame.clone() for frame in self._node_frames]
        other._edge_frames = [frame.clone() for frame in self._edge_frames]
        other._exchanges = []
        return other

    @contextmanager
    def local_scope(self) -> Iterator[None]:
        frames = self._node_frames, self._edge_frames
        self._node_frames = [frame.clone() for frame in self._node_frames]
        self._edge_frames = [frame.clone() for frame in self._edge_frames]
        try:
            yield
        finally:
            self._node_frames, self._edge_frames = frames

    def _with_idtype(self, idtype: torch.dtype) -> ShardGraph:
        other = copy.copy(self)
        other._graph = replace(self.index, idtype=idtype)
        other._exchanges = []
        return other

    def int(self) -> ShardGraph:
        return self._with_idtype(torch.int32)

    def long(self) -> ShardGraph:
        return self._with_idtype(torch.int64)

    def cpu(self) -> ShardGraph:
        return self.to("cpu")

    def to(self, device: Any, **_: Any) -> ShardGraph:
        """The graph itself, which lies on its rank's device.

        Raises:
            NotImplementedError: ``device`` is another one.
        """
        wanted = torch.device(device)
        if wanted.type != self.device.type or wanted.index not in (None, self.device.index):
            raise NotImplementedError(
                f"a shard graph stays on the device of its rank, {self.device}, and cannot go to {wanted}. Choose the "
                "device with nugnn.shard(data, device=...), nugnn.init(device=...) or nugnn.fit(device=...)."
            )
        return self

    def formats(self, formats: Any = None) -> Any:
        """The structure is kept in one format, which serves every operator; asking for another changes nothing."""
        if formats is None:
            return {"created": ["csc"], "not created": []}
        if unknown := {formats} - _FORMATS if isinstance(formats, str) else set(formats) - _FORMATS:
            raise dgl.DGLError(f"formats: {sorted(unknown)[0]!r} is none of coo, csr, csc")
        return self

    def create_formats_(self) -> None:
        """Nothing to do: the structure is ready for every operator."""

    # -- one rank: DGL itself answers what has no meaning on a part -----------------------------------------------

    def _whole(self) -> dgl.DGLGraph:
        """A plain DGL graph of the same nodes, edges and data, on the CPU; one rank only."""
        structure = self.index.structure
        ends = (structure.indices.cpu().to(self.idtype), structure.dst.cpu().to(self.idtype))
        graph = dgl.graph(ends[::-1] if self.index.is_reversed else ends, num_nodes=self.num_nodes())
        if self.device.type == "cpu":
            graph._node_frames, graph._edge_frames = self._node_frames, self._edge_frames
        else:
            graph.ndata.update({key: value.cpu() for key, value in self._node_frames[0].items()})
            graph.edata.update({key: value.cpu() for key, value in self._edge_frames[0].items()})
        return graph


_FORMATS = {"coo", "csr", "csc"}


def _is_extreme(reduce_func: Any) -> bool:
    return core.is_builtin(reduce_func) and reduce_func.name in ("min", "max")
