"""A cut of a graph on a cluster: its parts where traffic is cheapest, what they hold, and what a step of them takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nugnn.planning.cluster import Cluster
from nugnn.planning.draft import all_fit, usable_bytes
from nugnn.planning.forecast import Forecast, StepModel
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.placement import place
from nugnn.planning.work_model import sizes_and_traffic, sizes_of

Parts = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False, kw_only=True)
class CountedCut:
    """Parts of a graph on P devices.

    Args:
        part: ``(N,)`` of each node.
        sent_rows: ``(P, P)`` rows of the row's part that the column's part reads.
        sizes: Of each part.
        bytes: Expected at the peak of each device.
        fits: Whether every device's memory holds that.
        forecast: Of a step.
        notes: Of the partitioner.
    """

    part: Parts
    sent_rows: npt.NDArray[np.int64]
    sizes: tuple[PartSizes, ...]
    bytes: tuple[int, ...]
    fits: bool
    forecast: Forecast
    notes: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        return self.forecast.step_seconds

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the nodes."""
        return tuple(size.inner / len(self.part) for size in self.sizes)


@dataclass(frozen=True, eq=False, kw_only=True)
class GraphOnCluster:
    """A graph at hand whose cuts are counted.

    Args:
        model: What a step costs.
        src: ``(E,)`` source of each edge, checked as all arrays here.
        dst: ``(E,)`` destination.
        train_nodes: Distinct ids of the training nodes.
        cluster: P devices.
        row_bytes: Of a halo row in an exchange.
    """

    model: StepModel
    src: npt.NDArray
    dst: npt.NDArray
    train_nodes: npt.NDArray
    cluster: Cluster
    row_bytes: float

    def counted(self, part: Parts, notes: tuple[str, ...] = ()) -> CountedCut:
        """Parts, renumbered so that heavy traffic stays on fast links, and what they come to.

        Args:
            part: ``(N,)`` of each node; each device is like the one that its part was made for.
            notes: Of the partitioner.
        """
        cluster, count = self.cluster, len(self.cluster.devices)
        table, rows = sizes_and_traffic(self.src, self.dst, part, count, self.train_nodes)
        found = place(rows, self.row_bytes, cluster.links, [device.kind for device in cluster.devices])
        if not found.is_identity:
            rank_of = np.asarray(found.rank_of, np.int32)
            part_at = np.argsort(rank_of)
            part, table, rows = rank_of[part], table[part_at], rows[np.ix_(part_at, part_at)]
        sizes = sizes_of(table)
        held = tuple(int(self.model.work.bytes(rank, each)) for rank, each in enumerate(sizes))
        return CountedCut(
            part=part,
            sent_rows=rows,
            sizes=sizes,
            bytes=held,
            fits=all_fit(held, usable_bytes(cluster)),
            forecast=self.model.forecast(sizes, rows if self._is_placed(range(count)) else None),
            notes=notes,
        )

    def seconds_among(self, cut: CountedCut, ranks: Sequence[int]) -> float:
        """Of a step of some ranks alone; infinite where their memory does not hold the graph.

        Nodes of the other parts are taken to be with the part that each of these exchanges most with.
        """
        both = (cut.sent_rows + cut.sent_rows.T)[:, ranks]
        nearest = np.argmax(both, axis=1)
        nearest[list(ranks)] = np.arange(len(ranks))
        table, rows = sizes_and_traffic(
            self.src, self.dst, nearest.astype(np.int32)[cut.part], len(ranks), self.train_nodes
        )
        sizes, usable = sizes_of(table), usable_bytes(self.cluster)
        model = self.model.among(ranks)
        held = [model.work.bytes(rank, each) for rank, each in enumerate(sizes)]
        if not all_fit(held, [usable[rank] for rank in ranks]):
            return math.inf
        return model.forecast(sizes, rows if self._is_placed(ranks) else None).step_seconds

    def _is_placed(self, ranks: Sequence[int]) -> bool:
        """Whether it matters who exchanges with whom; otherwise all is compared as if nobody preferred any peer."""
        return len({self.cluster.links.hosts[rank] for rank in ranks}) > 1
