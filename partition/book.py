"""The partition book: from a global node id to its part and local id, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nugnn._counted import counted


@dataclass(frozen=True, eq=False)
class PartitionBook:
    """Parts as ranges of an order in which each part's nodes stand together.

    Position ``offsets[p] + i`` of that order is local id i of part p. Unless another order is given, positions sort by
    (part, global id). Halo nodes stand by position too.

    Args:
        part: ``(N,)`` int32, part of each node.
        order: ``(N,)`` int64, global id at each position.
        position: ``(N,)`` int64, position of each global id: the inverse of ``order``.
        offsets: ``(P + 1,)`` int64, where each part's range begins.
    """

    part: Tensor
    order: Tensor
    position: Tensor
    offsets: Tensor

    @classmethod
    def from_parts(cls, part: Tensor, num_parts: int, order: Tensor | None = None) -> PartitionBook:
        """Make the book of ``(N,)`` integer parts.

        Args:
            part: Part of each node.
            num_parts: P.
            order: ``(N,)`` int64, the nodes by part, in any order within one; ascending by id when None.

        Raises:
            ValueError: a part is outside ``[0, num_parts)``, or ``order`` is no permutation of the nodes by part.
        """
        if part.numel() and not (0 <= int(part.min()) and int(part.max()) < num_parts):
            raise ValueError(
                f"parts reach from {int(part.min())} to {int(part.max())}; they must lie in 0 to {num_parts - 1}"
            )
        if order is None:
            order = torch.argsort(part, stable=True)
        elif len(order) != len(part) or (torch.bincount(order, minlength=len(part)) != 1).any():
            raise ValueError(
                f"the order of {counted(len(order), 'node')} is not a permutation of {counted(len(part), 'node')}"
            )
        elif (part[order].diff() < 0).any():
            raise ValueError("the order mixes parts; the nodes of a part must stand together, parts ascending")
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order))
        offsets = torch.zeros(num_parts + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(part, minlength=num_parts), 0, out=offsets[1:])
        return cls(part.to(torch.int32), order, position, offsets)

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_nodes(self) -> int:
        return len(self.part)

    @cached_property
    def node_counts(self) -> tuple[int, ...]:
        return tuple(self.offsets.diff().tolist())

    def part_of(self, global_ids: Tensor) -> Tensor:
        """int32, the part that owns each of these nodes."""
        return self.part[self._checked(global_ids)]

    def local_ids(self, global_ids: Tensor) -> Tensor:
        """int64, the inner row of each of these nodes on the rank that owns it."""
        ids = self._checked(global_ids)
        return self.position[ids] - self.offsets[self.part[ids].long()]

    def global_ids(self, part: int) -> Tensor:
        """``(N_part,)`` int64, global id of each inner row of a part."""
        if not 0 <= part < self.num_parts:
            raise ValueError(f"part {part} does not exist; parts are 0 to {self.num_parts - 1}")
        return self.order[self.offsets[part] : self.offsets[part + 1]]

    def positions(self, global_ids: Tensor) -> Tensor:
        """int64, the place of each of these nodes in ``order``."""
        return self.position[self._checked(global_ids)]

    def _checked(self, global_ids: Tensor) -> Tensor:
        ids = global_ids.long()
        if ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < self.num_nodes):
            bad = ids[(ids < 0) | (ids >= self.num_nodes)][0]
            raise ValueError(f"id {int(bad)} is out of range for {counted(self.num_nodes, 'node')}; ids start at 0")
        return ids
