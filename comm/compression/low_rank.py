"""Gradients as products of two thin matrices: PowerSGD, with replicas that stay the same bits.

Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019.
Unlike there, a rank keeps what its own gradient lacks in its own product, so that sums and what is kept add up to the
gradients; and whatever is computed alike on all ranks is computed once, or in single operations in a fixed order, so
that unlike machines end with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nugnn.comm.compression.compressor import Compressor
from nugnn.comm.compression.layout import Layout
from nugnn.comm.compression.link import Link
from nugnn.comm.compression.reduction import Rounding, sum_encoded
from nugnn.comm.compression.settings import POWERSGD, Compression
from nugnn.kernels.philox import RandomKey, random_words

_STREAM = 0x68_00_00_00
_BLOCK_VALUES = 1 << 15
"""Of a product that are made at a time on a CPU: they stay in its cache."""


class LowRank(Compressor):
    """Sums of gradients that travel as products ``(n, r) (r, m)``; a `Compressor` otherwise.

    A tensor is a matrix of its first axis, as values are packed, by all others. It travels so where that takes fewer
    values. What rounding left out is what the product lacks.

    Args:
        named: See `Compressor`.
        settings: Of ``powersgd``, with r.
        world_size: P.
    """

    def __init__(self, named: Mapping[str, Tensor], settings: Compression, world_size: int) -> None:
        super().__init__(named, settings, world_size)
        self._rank = rank = settings.rank
        self._right: dict[str, Tensor] = {}
        self._next_right: dict[str, Tensor] = {}
        for name in list(self._compressed):
            rows, columns = self._shape(name)
            if (rows + columns) * rank >= rows * columns:
                self._compressed.remove(name)
                del self._wires[name]

    def open(self, scale: float | Tensor = 1.0) -> None:
        super().open(scale)
        self._next_right = {}

    def _commit_all(self, finite: Tensor) -> None:
        super()._commit_all(finite)
        for name, right in self._next_right.items():
            self._right[name] = torch.where(finite, right, self._right_of(name))

    def _reduce_(
        self,
        values: Tensor,
        names: Sequence[str],
        num_plain: int,
        link: Link,
        rest: Tensor | None,
        look: Callable[[Tensor], object],
    ) -> None:
        look(values)
        parts, start, plain = dict(self._parts(values, names)), 0, []
        for name in names:
            size = self._named[name].numel()
            if name not in parts:
                plain.append(values[start : start + size])
            start += size
        plain.append(values[start:])
        matrices = {name: part.view(self._shape(name)) for name, part in parts.items()}
        left = {name: m @ self._right_of(name) for name, m in matrices.items()}
        *left_sums, plain_sum = _sums([*left.values(), torch.cat(plain)], link)
        left = _orthogonal(dict(zip(left, left_sums, strict=True)), link)
        own = {name: m.t() @ left[name] for name, m in matrices.items()}
        right = dict(zip(own, _sums(list(own.values()), link), strict=True))
        for name, q in right.items():  # a direction without a gradient is kept for the time when there is one
            self._next_right[name] = torch.where((q != 0).any(0), q, self._right_of(name))
        start = at = 0
        for name in names:
            size = self._named[name].numel()
            own_rest = None if rest is None else rest[start : start + size]
            if name in matrices:
                if own_rest is not None:
                    left_out = own_rest.view_as(matrices[name])
                    _product(left[name], own[name], left_out)
                    torch.sub(matrices[name], left_out, out=left_out)
                _product(left[name], right[name], matrices[name])
            else:
                values[start : start + size] = plain_sum[at : at + size]
                at += size
                if own_rest is not None:
                    own_rest.zero_()
            start += size
        values[start:] = plain_sum[at:]
        if rest is not None:
            rest[start:].zero_()

    def _right_of(self, name: str) -> Tensor:
        """``(m, r)``: that of the step before; random at first, the same on every rank."""
        _, columns = self._shape(name)
        if name not in self._right or len(self._right[name]) != columns:
            device = self._named[name].device
            key = RandomKey(self.settings.seed, 0, _STREAM + self._numbers[name])
            words = random_words(key, torch.arange(columns, device=device), self._rank)
            self._right[name] = (words >> 8).float() * 2.0**-23 - 1
        return self._right[name]

    def shared_state(self) -> dict[str, Any]:
        return super().shared_state() | {"right": dict(self._right)}

    def load(self, shared: Mapping[str, Any], residuals: Mapping[str, Tensor]) -> None:
        super().load(shared, residuals)
        self._check_names(shared["right"])
        self._right = {name: q.clone().to(self._named[name].device) for name, q in shared["right"].items()}


def make_compressor(named: Mapping[str, Tensor], settings: Compression, world_size: int) -> Compressor:
    """The compressor for ``settings``."""
    return (LowRank if settings.wire == POWERSGD else Compressor)(named, settings, world_size)


def _sums(tensors: Sequence[Tensor], link: Link) -> list[Tensor]:
    """Of each over ranks, float32 on the way, in the order of ranks."""
    flat = torch.cat([x.flatten() for x in tensors]) if tensors else torch.empty(0)
    sum_encoded(flat, Layout.plain(len(flat), link.world_size), link, Rounding())
    parts = flat.split([x.numel() for x in tensors])
    return [part.view_as(x) for part, x in zip(parts, tensors, strict=True)]


def _orthogonal(left: dict[str, Tensor], link: Link) -> dict[str, Tensor]:
    """Columns of each orthogonal and of norm 1, or 0; each matrix by one rank, for all."""
    if not left:
        return {}
    sizes = [p.numel() for p in left.values()]
    owned = [i for i in range(len(sizes)) if i % link.world_size == link.rank]
    longest = max(sum(sizes[i] for i in range(r, len(sizes), link.world_size)) for r in range(link.world_size))
    first = next(iter(left.values()))
    row, at = first.new_zeros(longest), 0
    matrices = list(left.values())
    for i in owned:
        row[at : at + sizes[i]] = _gram_schmidt(matrices[i]).flatten()
        at += sizes[i]
    gathered = link.gather(row.view(torch.uint8)).view(torch.float32)
    place = [0] * link.world_size
    found = {}
    for i, (name, p) in enumerate(left.items()):
        owner = i % link.world_size
        found[name] = gathered[owner, place[owner] : place[owner] + sizes[i]].view_as(p)
        place[owner] += sizes[i]
    return found


def _gram_schmidt(matrix: Tensor) -> Tensor:
    columns: list[Tensor] = []
    for column in matrix.double().unbind(1):
        rest = column
        for _ in range(2):  # once more, for what rounding has left
            for other in columns:
                rest = rest - (other @ rest) * other
        norm = rest.norm()
        # what is left of a column that depends on the others is rounding alone
        is_new = norm > 1e-7 * column.norm()
        columns.append(torch.where(is_new, rest / norm, torch.where(torch.isfinite(norm), 0.0, torch.nan)))
    return torch.stack(columns, 1).float()


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """``left @ right.t()`` into ``out`` by single operations, so that all devices make the same bits."""
    num_rows, num_columns = out.shape
    step = max(1, _BLOCK_VALUES // max(num_columns, 1)) if out.device.type == "cpu" else max(num_rows, 1)
    room = out.new_empty(min(step, num_rows), num_columns)
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        block = out[rows]
        torch.mul(left[rows, :1], right[:, 0], out=block)
        for k in range(1, left.shape[1]):
            block.add_(torch.mul(left[rows, k : k + 1], right[:, k], out=room[: len(block)]))
