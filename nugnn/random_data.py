"""Random data of given sizes, whose numbers mean nothing: a part of a graph, and samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from nugnn._counted import counted
from nugnn.datasets.sparse import csr_matrix
from nugnn.partition.shard import Shard
from nugnn.planning.part_sizes import PartSizes


def random_part(
    sizes: PartSizes,
    in_features: int | None,
    num_classes: int,
    *,
    multilabel: bool,
    num_parts: int,
    stored_features: int | None = None,
) -> Shard:
    """Part 0 of a graph: every node has an in-edge, every halo row an edge; rows come from part 1 alone, and
    go to it and, where it has read all, to the next ones.

    Args:
        sizes: What the part has.
        in_features: Width of the features; None for none.
        num_classes: Of the labels.
        multilabel: Whether a label is a row of zeros and ones.
        num_parts: Of the graph; the other parts are not there.
        stored_features: Values of a row that are stored, the same number in each, of features that are sparse; None
            for dense ones.

    Raises:
        ValueError: No part has these sizes.
    """
    draw = torch.Generator().manual_seed(0)
    inner, halo, edges = sizes.inner, sizes.halo, sizes.edges
    if edges < max(inner, halo) or sizes.train > inner or sizes.sent > inner * max(num_parts - 1, 1):
        raise ValueError(f"there is no such part: {sizes}")
    dst = torch.cat([torch.arange(inner), torch.randint(inner, (edges - inner,), generator=draw)])
    src = torch.randint(sizes.local, (edges,), generator=draw)
    src[torch.randperm(edges, generator=draw)[:halo]] = torch.arange(inner, inner + halo)
    order = torch.argsort(dst, stable=True)
    indptr = torch.zeros(inner + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(dst, minlength=inner), 0, out=indptr[1:])
    others = [0] * (num_parts - 1)
    if num_parts > 1:
        others[0] = 1
    splits = [min(inner, max(0, sizes.sent - inner * before)) for before in range(num_parts - 1)]
    sent = [torch.randperm(inner, generator=draw)[:count].sort().values for count in splits]
    shape = (inner, num_classes) if multilabel else (inner,)
    labels = torch.randint(2 if multilabel else num_classes, shape, generator=draw)
    node_data = {"label": labels}
    if in_features is not None:
        node_data["feat"] = (
            torch.randn(inner, in_features, generator=draw)
            if stored_features is None
            else _sparse_rows(inner, in_features, stored_features, draw)
        )
    train = torch.randperm(inner, generator=draw)[: sizes.train].sort().values
    none = torch.empty(0, dtype=torch.int64)
    return Shard(
        rank=0, num_parts=num_parts, num_nodes_global=inner + halo, num_edges_global=edges,
        global_node_ids=torch.arange(inner), global_edge_ids=torch.arange(edges), edge_starts=indptr[:-1].clone(),
        indptr=indptr, indices=src[order].to(torch.int32), halo_global_ids=torch.arange(inner, inner + halo),
        recv_splits=(0, *(halo * here for here in others)), send_rows=torch.cat([none, *sent]),
        send_splits=(0, *splits),
        out_degrees=torch.bincount(src, minlength=sizes.local)[:inner].clamp(min=1), node_data=node_data, edge_data={},
        train_rows=train, val_rows=none, test_rows=none, num_train_global=sizes.train, num_val_global=0,
        num_test_global=0, num_classes=num_classes, multilabel=multilabel, metric="accuracy", name="a random part",
    )  # fmt: skip


def _sparse_rows(rows: int, width: int, stored: int, draw: torch.Generator) -> Tensor:
    """``(rows, width)`` ``torch.sparse_csr``; the columns of a row are as far apart as they can be."""
    if stored > width:
        raise ValueError(f"rows of {counted(width, 'column')} do not store {counted(stored, 'value')}")
    first = torch.randint(max(width, 1), (rows, 1), generator=draw)
    columns = ((first + torch.arange(stored) * (width // max(stored, 1))) % max(width, 1)).sort(dim=1).values
    values = torch.randn(rows * stored, generator=draw)
    return csr_matrix(torch.arange(rows + 1) * stored, columns.flatten(), values, (rows, width))


def random_samples(sample: Sequence[Tensor], count: int, num_classes: int) -> Dataset[Any]:
    """A map-style data set of ``count`` samples and their labels.

    Args:
        sample: What a model is called with for one, without the axis of samples: shapes and types count. Whole numbers
            go up to the largest of them.
        count: How many.
        num_classes: Of the labels.
    """
    draw = torch.Generator().manual_seed(0)
    columns = [_like(x, count, draw) for x in sample]
    return _Samples(columns, torch.randint(num_classes, (count,), generator=draw))


@dataclass(frozen=True, eq=False)
class _Samples(Dataset[Any]):
    """Columns of ``x`` and the labels, as a map-style data set."""

    columns: Sequence[Tensor]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[Any, Tensor]:
        x = tuple(column[number] for column in self.columns)
        return (x[0] if len(x) == 1 else x), self.labels[number]


def _like(x: Tensor, count: int, draw: torch.Generator) -> Tensor:
    shape = (count, *x.shape)
    if x.is_floating_point():
        return torch.randn(shape, generator=draw).to(x.dtype)
    return torch.randint(0, int(x.max()) + 1 if x.numel() else 1, shape, generator=draw).to(x.dtype)
