"""What the parts of an assignment hold, counted exactly, and what it costs each device: the seam to any predictor."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nugnn._counted import counted
from nugnn.partition.ids import ArrayLike, edge_arrays, ids_array
from nugnn.planning.part_sizes import PartSizes

_Packed = bytes  # by which name a work model has a method


class WorkModel(Protocol):
    """What a part costs on a device; devices are numbered as parts are.

    Both should grow with every size: shares are found under that assumption, and what they lead to is then measured
    with the model itself, whatever its shape. A model may have ``num_devices``, to be held against what it is used for.
    """

    def seconds(self, part: int, sizes: PartSizes) -> float:
        """Seconds of an epoch of the part on its device, exchanges included."""
        ...

    def bytes(self, part: int, sizes: PartSizes) -> int:
        """Most bytes of the device's memory that are in use at once."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearCost:
    """A cost that grows in proportion with each size: seconds, or bytes, for one of it.

    Args:
        fixed: Of a part without anything: launches; weights, optimizer state, workspace.
        inner: For each inner node.
        edges: For each in-edge.
        halo: For each halo row.
        sent: For each row sent.
        train: For each training node.

    Raises:
        ValueError: a number is negative or not finite.
    """

    fixed: float = 0.0
    inner: float = 0.0
    edges: float = 0.0
    halo: float = 0.0
    sent: float = 0.0
    train: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"the cost {field.name} is {value}; costs must be finite and not negative")

    def of(self, sizes: PartSizes) -> float:
        return (
            self.fixed
            + self.inner * sizes.inner
            + self.edges * sizes.edges
            + self.halo * sizes.halo
            + self.sent * sizes.sent
            + self.train * sizes.train
        )

    def times(self, factor: float) -> LinearCost:
        """The cost on a device on which everything takes ``factor`` times as much."""
        return LinearCost(**{field.name: factor * getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True)
class LinearWork:
    """The work model whose costs are all :class:`LinearCost`.

    Args:
        seconds_of: For each device, seconds of an epoch: seconds for a node, an edge, a row.
        bytes_of: For each device, bytes for a node, an edge, a row; none when left out.

    Raises:
        ValueError: there is no device, or the two are of different lengths.
    """

    seconds_of: tuple[LinearCost, ...]
    bytes_of: tuple[LinearCost, ...] = ()

    def __post_init__(self) -> None:
        if not self.seconds_of:
            raise ValueError("seconds_of is empty; give the costs of one device for each part")
        if not self.bytes_of:
            object.__setattr__(self, "bytes_of", (LinearCost(),) * len(self.seconds_of))
        if len(self.bytes_of) != len(self.seconds_of):
            raise ValueError(
                f"bytes_of has {counted(len(self.bytes_of), 'device')} and seconds_of {len(self.seconds_of)}"
            )

    @property
    def num_devices(self) -> int:
        return len(self.seconds_of)

    def seconds(self, part: int, sizes: PartSizes) -> float:
        return self.seconds_of[part].of(sizes)

    def bytes(self, part: int, sizes: PartSizes) -> int:
        return math.ceil(self.bytes_of[part].of(sizes))


@dataclass(frozen=True, eq=False)
class PackedWork:
    """A work model that unpacks when it is first asked, as modules behind it take a process a while to load.

    Args:
        content: From `of`.
    """

    content: _Packed

    @classmethod
    def of(cls, work: WorkModel) -> PackedWork:
        """``work``, which has to be picklable."""
        return cls(pickle.dumps(work))

    @cached_property
    def work(self) -> WorkModel:
        """As it was packed."""
        found: WorkModel = pickle.loads(self.content)
        return found

    def seconds(self, part: int, sizes: PartSizes) -> float:
        return self.work.seconds(part, sizes)

    def bytes(self, part: int, sizes: PartSizes) -> int:
        return self.work.bytes(part, sizes)


@dataclass(frozen=True, eq=False)
class PackedComputing:
    """The computing of a packed model, which is unpacked once for both.

    Args:
        whole: Of a model that has a method ``computing``, as `nugnn.planning.predicted_work.PredictedWork`.
    """

    whole: PackedWork

    @cached_property
    def work(self) -> WorkModel:
        """The model without exchanges."""
        found: WorkModel = self.whole.work.computing()  # type: ignore[attr-defined]
        return found

    def seconds(self, part: int, sizes: PartSizes) -> float:
        return self.work.seconds(part, sizes)

    def bytes(self, part: int, sizes: PartSizes) -> int:
        return self.work.bytes(part, sizes)


def count_sizes(
    src: ArrayLike, dst: ArrayLike, part: ArrayLike, num_parts: int, train_nodes: ArrayLike = ()
) -> tuple[PartSizes, ...]:
    """The sizes of every part, exactly those of its shard.

    Args:
        src: ``(E,)`` source of each edge.
        dst: ``(E,)`` destination of each edge.
        part: ``(N,)`` part of each node, in ``[0, num_parts)``.
        num_parts: P.
        train_nodes: Distinct ids of the training nodes.

    Raises:
        ValueError: an id or a part is out of range, or the edges are not as many sources as destinations.
    """
    part_N = ids_array(part, num_parts, "part")
    num_nodes = len(part_N)
    arrays = edge_arrays(src, dst, num_nodes)
    table = sizes_table(*arrays, part_N, num_parts, ids_array(train_nodes, num_nodes, "train_nodes"))
    return sizes_of(table)


def sizes_table(
    src: npt.NDArray, dst: npt.NDArray, part: npt.NDArray, num_parts: int, train_nodes: npt.NDArray
) -> npt.NDArray[np.int64]:
    """``(P, 5)``: :class:`PartSizes` as rows, of arrays that were checked before."""
    return sizes_and_traffic(src, dst, part, num_parts, train_nodes)[0]


def sizes_and_traffic(
    src: npt.NDArray, dst: npt.NDArray, part: npt.NDArray, num_parts: int, train_nodes: npt.NDArray
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """:func:`sizes_table`, and ``(P, P)`` nodes of the row's part that the column's part reads."""
    edges, rows = edges_and_traffic(src, dst, part, num_parts)
    inner, train = (np.bincount(each, minlength=num_parts) for each in (part, part[train_nodes]))
    return np.stack([inner, edges, rows.sum(axis=0), rows.sum(axis=1), train], axis=1), rows


def edges_and_traffic(
    src: npt.NDArray, dst: npt.NDArray, part: npt.NDArray, num_parts: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """``(P,)`` in-edges of each part, and ``(P, P)`` nodes of the row's part that the column's part reads; arrays are
    as :func:`sizes_table` takes them.
    """
    from nugnn.partition import move_kernels as kernels

    edges, rows = np.zeros(num_parts, np.int64), np.zeros((num_parts, num_parts), np.int64)
    masks = np.zeros((len(part), (num_parts + 63) // 64), np.uint64)
    kernels.count_parts(src, dst, part, masks, edges, rows)
    return edges, rows


def sizes_of(table: npt.NDArray[np.int64]) -> tuple[PartSizes, ...]:
    """Rows of a table as :class:`PartSizes`."""
    return tuple(PartSizes(*row) for row in table.tolist())


def table_of(sizes: Sequence[PartSizes]) -> npt.NDArray[np.int64]:
    """The other way."""
    return np.array([part.of_graph for part in sizes], np.int64)
