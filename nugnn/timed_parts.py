"""Where a model's operators are timed on a worker: pieces of its part of the graph at hand, or sizes of random parts.

Sums over neighbours take less time where neighbours lie near each other, as in parts that were cut and ordered, and the
difference is larger on a whole device than on a limited one: shares planned from random parts were wrong (see
``docs/unequal-devices.md``). Counts alone, as of a graph that is not at hand, leave nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nugnn.datasets.graph_data import GraphData
from nugnn.partition.assign import partition_nodes
from nugnn.partition.metis import SymmetricGraph
from nugnn.partition.pieces import piece_of
from nugnn.partition.shard import Shard, iter_shards
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.trace import StepTrace
from nugnn.size_ladder import changes_of_kernel, ladder, scaled
from nugnn.traced_step import sizes_of

_STEP_SECONDS = {"cpu": 0.25, "cuda": 0.05}
"""Predicted, of the largest step that is timed: larger parts follow from smaller ones."""
_PIECES = (1.0, 0.5, 0.25, 0.125, 1 / 64)
"""Of the largest piece, by share of its rows; the smallest is all launches."""
_LEAST_ROWS, _LEAST_EDGES = 32, 256
_LEAST_SHARE = 0.25
"""Of an average part: a device that rates alone would leave out is timed all the same."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RealPart:
    """A worker's part of a graph, for timing.

    Args:
        shard: The largest piece.
        shares: Of its rows, from the largest to the smallest.
    """

    shard: Shard
    shares: tuple[float, ...]

    def pieces(self) -> list[Shard]:
        """Smallest first, as all ladders are; those too small to be of use are left out, but for the largest.

        Each is numbered as a graph of its own, so that models with a row for each node need no more than its rows. Each
        has a training node at least: its peers have none, and a loss needs one.
        """
        found = [_as_own_graph(piece_of(self.shard, share)) for share in self.shares]
        large = [each for each in found[1:] if _is_of_use(each)]
        return [found[0], *large][::-1]


Timed = RealPart | Sequence[PartSizes]
"""Of a worker."""


def places_of(part: Timed) -> Sequence[Shard | PartSizes]:
    """What `nugnn.measured_step` measures at."""
    return part.pieces() if isinstance(part, RealPart) else part


def random_parts(trace: StepTrace, seconds: Callable[[PartSizes], float], sizes: PartSizes) -> list[PartSizes]:
    """Sizes up to those of a worker, or to a step of a fraction of a second.

    Args:
        trace: Of the step, on the worker's kind of device.
        seconds: Predicted, of a step of a part on the worker; infinite of one that is too large to be timed there.
        sizes: Of the worker.
    """
    possible = _of_two(sizes)
    return ladder(scaled(possible, _largest_share(trace, seconds, possible)), trace)


def real_parts(
    graph: GraphData,
    traces: Sequence[StepTrace],
    seconds: Sequence[Callable[[PartSizes], float]],
    sizes: Sequence[PartSizes],
    *,
    symmetric: SymmetricGraph | None = None,
) -> Iterator[RealPart]:
    """Parts of a graph cut into clusters of about these sizes, with rows in the order that training gives them.

    Each is made when it is asked for. A plan that follows has clusters of its own, and rows of trained parts an order
    of their own: were they to start from these clusters, they would depend on whether times had been kept, and a
    resumed run would not go on in the same bits.

    Args:
        graph: At hand.
        traces: Of each worker, as for `random_parts`.
        seconds: Likewise.
        sizes: Likewise.
        symmetric: The graph as partitioners see it, for callers that have it.
    """
    least = _LEAST_SHARE * graph.num_nodes / len(sizes)
    shares = [max(size.inner, least) for size in sizes]
    how: dict[str, Any] = {"method": "clusters", "tolerance": 0.1, "symmetric": symmetric}
    cut = partition_nodes(graph.num_nodes, graph.src, graph.dst, shares, **how)
    yield from map(real_part, iter_shards(graph, cut, order="auto"), traces, seconds)  # which holds one at a time


def real_part(shard: Shard, trace: StepTrace, seconds: Callable[[PartSizes], float]) -> RealPart:
    """What is timed of a part that is there; ``trace`` and ``seconds`` as for `random_parts`."""
    share = _largest_share(trace, seconds, _of_two(sizes_of(shard)))
    largest = _as_traced(piece_of(dataclasses.replace(shard, edge_data={}), share))
    shares = {*_PIECES, *changes_of_kernel(trace, sizes_of(largest))}
    return RealPart(shard=largest, shares=tuple(sorted((share for share in shares if share <= 1), reverse=True)))


def _as_traced(shard: Shard) -> Shard:
    """With the columns that a traced step has: a label of each node, and features as they are, sparse ones too."""
    columns = {name: column for name, column in shard.node_data.items() if name in ("feat", "label")}
    columns["label"] = columns["label"].clamp(min=0)  # -1 where there is none
    return dataclasses.replace(shard, node_data=columns)


def _is_of_use(shard: Shard) -> bool:
    """Whether a piece is large enough; one whose sparse features store nothing makes other operators."""
    features = shard.node_data.get("feat")
    is_empty = features is not None and features.layout is torch.sparse_csr and not len(features.values())
    return shard.num_inner >= _LEAST_ROWS and shard.num_edges >= _LEAST_EDGES and not is_empty


def _as_own_graph(shard: Shard) -> Shard:
    numbers = torch.arange(shard.num_local, device=shard.indptr.device)
    inner, halo = numbers.split([shard.num_inner, shard.num_halo])
    train = shard.train_rows if len(shard.train_rows) else inner[:1]
    return dataclasses.replace(
        shard, num_nodes_global=len(numbers), global_node_ids=inner, halo_global_ids=halo, train_rows=train
    )


def _largest_share(trace: StepTrace, seconds: Callable[[PartSizes], float], sizes: PartSizes) -> float:
    share = 1.0
    while seconds(scaled(sizes, share)) > _STEP_SECONDS[trace.device] and share > 1e-3:
        share /= 2
    return share


def _of_two(sizes: PartSizes) -> PartSizes:
    """The counts as far as a part of two can have them: there no row is sent twice, and expected ones may be more."""
    edges = max(sizes.edges, sizes.inner, sizes.halo)
    return dataclasses.replace(sizes, edges=edges, sent=min(sizes.sent, sizes.inner))
