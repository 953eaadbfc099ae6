"""How many samples of a global batch each worker takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nugnn._counted import counted
from nugnn.planning.apportioned import apportioned

USUAL_BATCH_SIZE = 64
"""Of a global batch, where neither it nor a split in samples is given."""


def batch_sizes(
    split: str | Sequence[int], batch_size: int | None, workers: int, shares: Sequence[float] | None, usual: int
) -> tuple[tuple[int, ...], str]:
    """Samples of each worker in a full batch, and a sentence on what they follow; empty where that is plain.

    Args:
        split: ``auto``: by the shares where there are some, evenly otherwise; ``even``; or the numbers.
        batch_size: Their sum; ``usual`` when None.
        workers: How many.
        shares: A positive number for each worker.
        usual: Size of a batch where nothing says it.

    Raises:
        ValueError: The numbers do not fit each other.

    >>> batch_sizes("auto", 24, 2, (0.75, 0.25), 64)
    ((18, 6), 'batches of 24 samples are divided by the shares: 18, 6')
    """
    if shares is not None and (len(shares) != workers or not all(share > 0 for share in shares)):
        raise ValueError(
            f"shares: {', '.join(map(str, shares))} for {counted(workers, 'worker')}; give a positive one for each"
        )
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"batch_size is {batch_size!r}, must be a whole number of samples from 1 up")
    if split not in ("auto", "even"):
        numbers = _numbers(split)
        if shares is not None:
            raise ValueError("batch_split in samples and shares both say how batches are divided; give one of them")
        if len(numbers) != workers:
            raise ValueError(
                f"batch_split: {counted(len(numbers), 'number')} for {counted(workers, 'worker')}; give one for each"
            )
        if batch_size is not None and sum(numbers) != batch_size:
            raise ValueError(
                f"batch_split {','.join(map(str, numbers))} adds up to {sum(numbers)}, but batch_size is {batch_size}; "
                "leave batch_size out, or make them equal"
            )
        return numbers, ""
    total = usual if batch_size is None else batch_size
    if total < workers:
        raise ValueError(
            f"a batch of {counted(total, 'sample')} for {counted(workers, 'worker')}; each needs at least one"
        )
    if split == "even" and shares is not None:
        raise ValueError("batch_split is even, but shares are given; leave one of them out")
    sizes = apportioned(total, [1] * workers if shares is None else shares)
    if workers == 1:
        return sizes, ""
    how = "evenly" if split == "even" else "evenly, as no shares are given" if shares is None else "by the shares"
    return sizes, f"batches of {counted(total, 'sample')} are divided {how}: {', '.join(map(str, sizes))}"


def _numbers(split: str | Sequence[int]) -> tuple[int, ...]:
    parts: Sequence[Any] = split.split(",") if isinstance(split, str) else split
    try:
        numbers = tuple(int(part) for part in parts)
        if any(number < 0 or number != float(part) for number, part in zip(numbers, parts, strict=True)):
            raise ValueError
        if sum(numbers) < 1:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            f"batch_split {split!r} is not allowed; allowed: auto, even, or samples of each worker such as 18,6"
        ) from None
    return numbers
