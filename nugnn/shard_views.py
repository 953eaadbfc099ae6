"""What ``ndata``, ``edata``, ``nodes`` and ``edges`` of a shard graph give: columns that know whose rows they are."""

from __future__ import annotations

from typing import Any

from dgl.base import is_all
from dgl.view import EdgeSpace, HeteroEdgeDataView, HeteroEdgeView, HeteroNodeDataView, HeteroNodeView, NodeSpace
from torch import Tensor

from nugnn.kernels.rows import Rows, tag


class NodeData(HeteroNodeDataView):  # type: ignore[misc]
    def __getitem__(self, key: str) -> Any:
        rows = self._graph.index.node_rows
        value: Any = super().__getitem__(key)
        if not isinstance(value, Tensor):
            return value  # a column of DGL's that is not loaded
        return tag(value, rows if is_all(self._nodes) else subset(rows, self._graph._row_ids(self._nodes)))


class EdgeData(HeteroEdgeDataView):  # type: ignore[misc]
    def __getitem__(self, key: str) -> Any:
        rows = self._graph.index.edge_rows
        value: Any = super().__getitem__(key)
        if not isinstance(value, Tensor):
            return value
        return tag(value, rows if is_all(self._edges) else subset(rows, self._graph._edge_row_ids(self._edges)))


class NodeView(HeteroNodeView):  # type: ignore[misc]
    def __getitem__(self, key: Any) -> NodeSpace:
        data = super().__getitem__(key).data
        return NodeSpace(data=NodeData(self._graph, data._ntype, data._ntid, data._nodes))


class EdgeView(HeteroEdgeView):  # type: ignore[misc]
    def __getitem__(self, key: Any) -> EdgeSpace:
        data = super().__getitem__(key).data
        return EdgeSpace(data=EdgeData(self._graph, None, data._edges))


def subset(rows: Rows, picked: Tensor) -> Rows:
    """The identity of the rows ``picked``."""
    assert rows.ids is not None
    return Rows(rows.kind, rows.ids[picked], 1, rows.split)
