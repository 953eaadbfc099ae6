"""Sizes of parts and batches at which a step is timed: as large as it will be, and smaller ones in proportion."""

from __future__ import annotations

import dataclasses

from nugnn.kernels.spmm.sums import FEWEST_BYTES
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.timed_operators import is_large_sum, row_bytes
from nugnn.planning.trace import StepTrace


def ladder(sizes: PartSizes, trace: StepTrace | None = None, *, steps: int = 4, factor: float = 2.0) -> list[PartSizes]:
    """Where to measure operators for parts up to ``sizes``: at these, and at smaller ones; the smallest first.

    The smallest is far below the others. One more has half as many edges for a node, so that what edges take and what
    nodes take can be told apart. On a CPU, which computes small sums over neighbours in another way than large ones,
    there is one right below each change.

    Args:
        sizes: The largest.
        trace: Of the step; None to leave such changes out.
        steps: How many; fewer where they would become smaller than a few hundred edges or a batch of one.
        factor: Between two.
    """
    found = [sizes]
    while len(found) < steps and (smaller := _of_use(sizes, factor ** -len(found))) is not None:
        found.append(smaller)
    if (tiny := _of_use(sizes, factor ** -(2 * steps))) is not None:
        found.append(tiny)  # which is all launches
    if sizes.inner and len(found) > 1:
        half = found[1]
        if (edges := half.edges // 2) >= max(half.inner, half.halo):
            found.append(dataclasses.replace(half, edges=edges))
    if trace is not None and sizes.edges:
        below = (_of_use(sizes, share) for share in changes_of_kernel(trace, sizes))
        found += [each for each in below if each is not None and each.edges > min(f.edges for f in found)]
    return sorted(found, key=lambda each: (each.inner, each.edges, each.batch))


def changes_of_kernel(trace: StepTrace, sizes: PartSizes) -> set[float]:
    """Shares of ``sizes`` right below which a CPU takes the kernel for small sums; none on a GPU."""
    if trace.device != "cpu":
        return set()
    large = [record for record in trace.at(sizes).operators if is_large_sum(record)]
    return {0.98 * FEWEST_BYTES / (row_bytes(record) * sizes.edges) for record in large if record.kind == "spmm"}


def scaled(sizes: PartSizes, share: float) -> PartSizes:
    """All counts in proportion, at least 1 where there are any: there is such a part if there is one of ``sizes``."""
    counts = {name: max(round(share * count), min(count, 1)) for name, count in dataclasses.asdict(sizes).items()}
    counts["edges"] = max(counts["edges"], counts["inner"], counts["halo"])
    counts["train"] = min(counts["train"], counts["inner"])
    return PartSizes(**counts)


def _of_use(sizes: PartSizes, share: float) -> PartSizes | None:
    """`scaled`; None where next to nothing is left."""
    found = scaled(sizes, share)
    if any(count and not round(share * count) for count in (sizes.batch, sizes.halo)):
        return None
    return None if not sizes.batch and (found.inner < 32 or found.edges < 256) else found
