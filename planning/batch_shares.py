"""A batch divided so that the slowest device is as fast as the memories allow: whole samples, one at least for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence

from nugnn._counted import counted
from nugnn.planning.apportioned import apportioned, one_each
from nugnn.planning.in_words import in_bytes
from nugnn.planning.lacking import DoesNotFitError
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.work_model import WorkModel

_STEPS = 60
"""Halvings of the interval in which the level of seconds lies."""


def split_by_shares(batch: int, shares: Sequence[float]) -> tuple[int, ...]:
    """``batch`` in the proportions of ``shares`` by largest remainder, one at least for each.

    Raises:
        ValueError: There are fewer samples than devices.

    >>> split_by_shares(7, (0.7, 0.2, 0.1)), split_by_shares(4, (0.98, 0.01, 0.01))
    ((5, 1, 1), (2, 1, 1))
    """
    _check_count(batch, len(shares))
    return one_each(apportioned(batch, shares))


def fastest_split(
    work: WorkModel,
    batch: int,
    limits: Sequence[float],
    kinds: Sequence[Hashable] | None = None,
    others: Sequence[Sequence[int]] = (),
) -> tuple[int, ...]:
    """Samples of each device with the least slowest one.

    With costs that grow with the samples the result is optimal; in any case it is not slower, by the model, than any
    of ``others`` that fits.

    Args:
        work: Seconds and bytes of ``PartSizes(batch=...)`` on each device.
        batch: Samples of all together.
        limits: Bytes of memory of each device.
        kinds: A value that is the same for devices that are alike, so that the model is asked about one of them.
        others: Splits to be held against.

    Raises:
        DoesNotFitError: The memories do not hold the batch; says what would fit.
        ValueError: There are fewer samples than devices.
    """
    count = len(limits)
    _check_count(batch, count)
    search = _Costs(work, limits, list(range(count)) if kinds is None else list(kinds))
    most = [search.most_that_fit(rank, batch) for rank in range(count)]
    if min(most) < 1 or sum(most) < batch:
        raise DoesNotFitError(_lacking(search, batch, most))
    low, high = 0.0, max(search.seconds(rank, most[rank]) for rank in range(count))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if sum(search.most_within(rank, most[rank], middle) for rank in range(count)) >= batch:
            high = middle
        else:
            low = middle
    counts = [search.most_within(rank, most[rank], high) for rank in range(count)]
    while sum(counts) > batch:  # from those that take longest, whom that helps
        rank = max((r for r in range(count) if counts[r] > 1), key=lambda r: search.seconds(r, counts[r]))
        counts[rank] -= 1
    fitting = [split for split in others if all(n <= m for n, m in zip(split, most, strict=True))]
    found: list[Sequence[int]] = [counts, *fitting]
    return tuple(min(found, key=search.rank_of))


def _check_count(batch: int, devices: int) -> None:
    if batch < devices:
        raise ValueError(
            f"a batch of {counted(batch, 'sample')} for {counted(devices, 'device')}; each needs at least one"
        )


class _Costs:
    """Answers of the model, each asked for once."""

    def __init__(self, work: WorkModel, limits: Sequence[float], kinds: Sequence[Hashable]) -> None:
        self.work, self.limits, self._kinds = work, limits, kinds
        self._seconds: dict[tuple[Hashable, int], float] = {}
        self._bytes: dict[tuple[Hashable, int], float] = {}

    def seconds(self, rank: int, count: int) -> float:
        key = self._kinds[rank], count
        if key not in self._seconds:
            self._seconds[key] = self.work.seconds(rank, PartSizes(batch=count))
        return self._seconds[key]

    def bytes(self, rank: int, count: int) -> float:
        key = self._kinds[rank], count
        if key not in self._bytes:
            self._bytes[key] = self.work.bytes(rank, PartSizes(batch=count))
        return self._bytes[key]

    def rank_of(self, split: Iterable[int]) -> tuple[float, float]:
        """The slowest device, then all of them together."""
        each = [self.seconds(rank, count) for rank, count in enumerate(split)]
        return max(each), math.fsum(each)

    def most_that_fit(self, rank: int, batch: int) -> int:
        """Samples that the memory holds; 0 where it holds none."""
        if self.bytes(rank, 1) > self.limits[rank]:
            return 0
        return _last(1, batch, lambda count: self.bytes(rank, count) <= self.limits[rank])

    def most_within(self, rank: int, most: int, seconds: float) -> int:
        """Samples that take at most ``seconds``; 1 where each takes longer, since every device has one."""
        return _last(1, most, lambda count: self.seconds(rank, count) <= seconds)


def _last(first: int, last: int, holds: Callable[[int], bool]) -> int:
    """The largest number that holds, if those that do come first; ``first`` where none does."""
    while first < last:
        middle = (first + last + 1) // 2
        if holds(middle):
            first = middle
        else:
            last = middle - 1
    return first


def _lacking(costs: _Costs, batch: int, most: Sequence[int]) -> str:
    lines = [f"the batch of {counted(batch, 'sample')} does not fit: the devices together hold {sum(most)} of them."]
    for rank, count in enumerate(most[:16]):
        limit = in_bytes(costs.limits[rank])
        if count:
            lines.append(f"Device {rank}: {limit} hold {counted(count, 'sample')}.")
        else:
            need = in_bytes(costs.bytes(rank, 1))
            lines.append(f"Device {rank}: {limit} do not hold one sample, which needs {need}.")
    if len(most) > 16:
        lines.append(f"And so on for {len(most) - 16} more.")
    if min(most) < 1:
        lines.append("Leave out the devices that hold none, or take a smaller model or narrower numbers.")
    else:
        parts = math.ceil(batch / sum(most))
        lines.append(f"It would fit with --batch-size {sum(most)}, or with --micro-batches {parts} and up.")
    return "\n".join(lines)
