"""What stands in for DGL's native graph index inside a shard graph: operators, counts, and nothing else.

DGL's message passing hands the graph index to three functions (g-SpMM, g-SDDMM, edge softmax). Given this object they
call its methods; any other native entry point finds an attribute that does not exist and fails in Python, so no path
reaches native code with a local structure it would misread.

Shape suffixes: N inner, L local rows, E edges.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nugnn.comm.halo_exchange import max_home
from nugnn.comm.halo_handler import HaloHandler
from nugnn.comm.halo_transfer import HaloPlan
from nugnn.comm.overlap import Fetch
from nugnn.kernels.edge_softmax import edge_softmax
from nugnn.kernels.interceptor import Interceptor, current_interceptor
from nugnn.kernels.rows import Rows, tag
from nugnn.kernels.sddmm import sddmm
from nugnn.kernels.sparse_rows import densify
from nugnn.kernels.spmm import spmm, spmm_sum
from nugnn.kernels.structure import Structure


class _MetaGraph:
    """One node type, one edge type."""

    def find_edge(self, etid: int) -> tuple[int, int]:
        return 0, 0

    def number_of_edges(self) -> int:
        return 1

    num_edges = number_of_edges

    def number_of_nodes(self) -> int:
        return 1

    num_nodes = number_of_nodes


def _dense(x: Tensor | None) -> Tensor | None:
    if x is None or x.layout is torch.strided:
        return x
    dense = densify(x)
    return tag(dense, getattr(x, "_nugnn_rows", None))


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Operators on one rank's in-edges.

    Args:
        structure: CSC of the local edges, sources in ``[0, L)``.
        plan: Where halo rows come from.
        node_rows: Identity of the N inner rows.
        edge_rows: Identity of the E edges.
        idtype: torch.int32 or torch.int64, the type of ids handed out.
        is_reversed: Every edge points the other way: the destination may be another rank's node.
    """

    structure: Structure
    plan: HaloPlan
    node_rows: Rows
    edge_rows: Rows
    idtype: torch.dtype = torch.int64
    is_reversed: bool = False

    # -- what DGL asks an index for -----------------------------------------------------------------------------

    @cached_property
    def metagraph(self) -> _MetaGraph:
        return _MetaGraph()

    @property
    def dtype(self) -> str:
        return "int32" if self.idtype is torch.int32 else "int64"

    def number_of_ntypes(self) -> int:
        return 1

    def number_of_etypes(self) -> int:
        return 1

    def num_nodes(self, ntid: int = 0) -> int:
        return self.structure.num_dst

    def num_edges(self, etid: int = 0) -> int:
        return self.structure.num_edges

    number_of_nodes = num_nodes
    number_of_edges = num_edges

    def is_pinned(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"this needs {name}() of DGL's graph index, which one part of a split graph cannot answer. Use message "
            "passing (update_all, apply_edges), or do it on the whole graph before nugnn.fit or nugnn.shard."
        )

    # -- operators ----------------------------------------------------------------------------------------------

    def _interceptor(self) -> Interceptor:
        interceptor = current_interceptor()
        if interceptor is not None:
            return interceptor
        if self.plan.ranks.is_split:
            raise RuntimeError(
                "a split graph was used outside a step, so dropout and batch norm could not be kept exact. Run the "
                "model inside `with nugnn.intercept(model, graph).step(number):` (nugnn.fit and nugnn.Trainer do)."
            )
        return Interceptor(())

    @cached_property
    def _source_view(self) -> Structure:
        """Out-edges as CSC with L destinations and N sources, for reductions over a source's edges."""
        t = self.structure.transposed
        return Structure(self.structure.num_dst, t.indptr, t.dst)

    def spmm(self, op: str, reduce: str, u: Tensor | None, e: Tensor | None) -> Tensor:
        """Reduce ``op(u[source], e)`` over each node's in-edges (out-edges when reversed): ``(N, ...)``."""
        u, e = _dense(u), _dense(e)
        if self.is_reversed:
            return self._spmm_to_sources(op, reduce, u, e)
        attrs = {"op": op, "reduce": reduce, "plan": self.plan}
        return tag(self._interceptor().call("spmm", self.structure, (u, e), attrs, _run_spmm), self.node_rows)

    @cached_property
    def degree_factors(self) -> dict[tuple[str, float, torch.dtype], Tensor]:
        """What `nugnn.shard_graph.ShardGraph.degree_factors` made for these edges."""
        return {}

    def scaled_sum(
        self,
        u: Tensor,
        e: Tensor | None = None,
        *,
        src_scale: Tensor | None = None,
        dst_scale: Tensor | None = None,
        add_to: Tensor | None = None,
        fetch: Fetch | None = None,
    ) -> Tensor:
        """``dst_scale[v] * sum of e * src_scale[source] * u[source] + add_to[v]`` over v's in-edges: ``(N, ...)``.

        ``src_scale`` has a factor for each of the L local rows: rows travel without it. ``add_to`` may be added to in
        place, so it has to be the caller's own. ``fetch`` is what `begin_fetch` gave for ``u``.
        """
        op = "copy_lhs" if e is None else "mul"
        attrs = {"op": op, "reduce": "sum", "plan": self.plan, "src_scale": src_scale, "dst_scale": dst_scale}
        attrs |= {"add_to": add_to, "fetch": fetch}
        inputs = (_dense(u), _dense(e))
        return tag(self._interceptor().call("spmm", self.structure, inputs, attrs, _run_scaled), self.node_rows)

    def begin_fetch(self, u: Tensor) -> Fetch | None:
        """Send dense rows ``u (N, ...)`` on their way before `scaled_sum` asks for them; None where that does not pay.

        Who gets something has to give it to the `scaled_sum` of ``u``, which comes next on this graph.
        """
        if not self.plan.ranks.is_split:
            return None
        interceptor = self._interceptor()
        return interceptor.find(HaloHandler).begin_fetch(u, self.plan, interceptor)

    def _spmm_to_sources(self, op: str, reduce: str, x_N: Tensor | None, e: Tensor | None) -> Tensor:
        """The same over out-edges: partial results for halo sources go home to their owners."""
        e = None if e is None else e.index_select(0, self.structure.transposed.edges)
        attrs = {"op": op, "reduce": reduce, "plan": None}
        out_L = self._interceptor().call("spmm", self._source_view, (x_N, e), attrs, _run_spmm)
        if not self.plan.ranks.is_split:
            return tag(out_L, self.node_rows)
        if reduce == "sum":
            interceptor = self._interceptor()
            home = interceptor.find(HaloHandler).home(out_L, self.plan, interceptor)
            return tag(home, self.node_rows)
        if out_L.requires_grad:
            raise NotImplementedError(
                f"reduce '{reduce}' with gradient over out-edges of a split graph is not supported. Reverse the edges "
                "before nugnn.fit or nugnn.shard and aggregate over in-edges."
            )
        home = max_home(out_L, self.plan) if reduce == "max" else -max_home(-out_L, self.plan)
        return tag(home, self.node_rows)

    def sddmm(self, op: str, lhs: Tensor | None, rhs: Tensor | None, lhs_target: str, rhs_target: str) -> Tensor:
        """One value for each edge from its end nodes or itself: ``(E, ...)``."""
        if self.is_reversed:
            swap = {"u": "v", "v": "u", "e": "e"}
            lhs_target, rhs_target = swap[lhs_target], swap[rhs_target]
        attrs = {"op": op, "lhs_target": lhs_target, "rhs_target": rhs_target, "plan": self.plan}
        inputs = (_dense(lhs), _dense(rhs))
        return tag(self._interceptor().call("sddmm", self.structure, inputs, attrs, _run_sddmm), self.edge_rows)

    def edge_softmax(self, scores: Tensor, norm_by: str) -> Tensor:
        """Softmax of ``scores (E, ...)`` over each destination's in-edges, or each source's out-edges."""
        over_out_edges = (norm_by == "src") != self.is_reversed
        if not over_out_edges:
            out = self._interceptor().call("edge_softmax", self.structure, (scores,), {}, _run_edge_softmax)
            return tag(out, self.edge_rows)
        forward = self if not self.is_reversed else self.reversed()
        outgoing = forward.reversed()
        interceptor = self._interceptor()
        # the edges of a source are spread over ranks, which need the same largest score and the same total
        with interceptor.find(HaloHandler).exact() if self.plan.ranks.is_split else nullcontext():
            with torch.no_grad():
                largest_N = outgoing.spmm("copy_rhs", "max", None, scores.detach())
                largest_E = forward.sddmm("copy_lhs", largest_N.nan_to_num(neginf=0.0, posinf=0.0), None, "u", "v")
            exp_E = torch.exp(scores - largest_E)
            total_N = outgoing.spmm("copy_rhs", "sum", None, exp_E)
            total_E = forward.sddmm("copy_lhs", total_N, None, "u", "v")
        return tag(exp_E / total_E.masked_fill(total_E == 0, 1), self.edge_rows)

    def reversed(self) -> ShardIndex:
        return self._flipped

    @cached_property
    def _flipped(self) -> ShardIndex:
        other = ShardIndex(self.structure, self.plan, self.node_rows, self.edge_rows, self.idtype, not self.is_reversed)
        other.__dict__["_flipped"] = self
        return other


def _run_spmm(structure: Structure, u: Tensor | None, e: Tensor | None, *, op: str, reduce: str, **_: Any) -> Tensor:
    return spmm(structure, op, reduce, u, e)


def _run_scaled(
    structure: Structure,
    u: Tensor,
    e: Tensor | None,
    *,
    src_scale: Tensor | None,
    dst_scale: Tensor | None,
    add_to: Tensor | None,
    **_: Any,
) -> Tensor:
    return spmm_sum(structure, u, e, src_scale=src_scale, dst_scale=dst_scale, add_to=add_to)


def _run_sddmm(
    structure: Structure, lhs: Tensor | None, rhs: Tensor | None, *, op: str, lhs_target: str, rhs_target: str, **_: Any
) -> Tensor:
    return sddmm(structure, op, lhs, rhs, lhs_target, rhs_target)


def _run_edge_softmax(structure: Structure, scores: Tensor) -> Tensor:
    return edge_softmax(structure, scores)
