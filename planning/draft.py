"""Parts of a graph or batch that are not a plan yet, and what all that make some have in common.

Whatever is compared is compared by the same forecast of a whole step (`nugnn.planning.forecast`): parts that each end
as early as the others still wait for each other at exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from nugnn._counted import counted
from nugnn.planning.baselines import baseline_shares
from nugnn.planning.cluster import Cluster
from nugnn.planning.forecast import Forecast
from nugnn.planning.in_words import in_bytes
from nugnn.planning.lacking import DoesNotFitError
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import Baseline, SharesBy
from nugnn.planning.process_memory import least_fraction
from nugnn.planning.work_model import WorkModel

HARDLY = 0.05
"""Of an even share; a device with less is not worth its exchanges."""
USABLE = 0.95
"""Of a device's memory: fragments between tensors, and what a prediction of the peak is off by."""
_A_NODE = PartSizes(inner=1, edges=1, batch=1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Draft:
    """Parts of a graph or a batch, not yet a plan.

    Args:
        shares_by: What asked for them.
        sizes: Of each part.
        bytes: Expected at the peak of each device.
        forecast: Of a step.
        baselines: Shares by one number beside it, by the same forecast.
        halo: How halo rows are known.
        sent_rows: ``(P, P)`` rows of the row's part that the column's part reads; None where there is no cut.
        part: ``(N,)`` int32, where there is a cut.
        notes: What had to be said.
        left_out: Those of the notes on devices that an epoch would hardly be longer without.
    """

    shares_by: SharesBy
    sizes: tuple[PartSizes, ...]
    bytes: tuple[int, ...]
    forecast: Forecast
    baselines: tuple[Baseline, ...] = ()
    halo: Literal["counted", "expected", "none"] = "none"
    sent_rows: npt.NDArray[np.int64] | None = None
    part: npt.NDArray[np.int32] | None = None
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the nodes, or of a batch."""
        counts = [size.inner or size.batch for size in self.sizes]
        whole = sum(counts)
        return tuple(count / whole for count in counts)


def usable_bytes(cluster: Cluster) -> tuple[float, ...]:
    """Of each device's memory, for a step."""
    return tuple(USABLE * memory for memory in cluster.memory_bytes)


def all_fit(held: Sequence[float], limits: Sequence[float]) -> bool:
    """Whether every device's memory holds what is on it."""
    return all(need <= limit for need, limit in zip(held, limits, strict=True))


def are_alike(cluster: Cluster) -> bool:
    """Whether no device differs from the others, so that only the cut can make one wait."""
    return len(set(cluster.kinds)) == 1


def asked_shares(
    shares_by: SharesBy, shares: Sequence[float] | None, cluster: Cluster, precision: str
) -> tuple[float, ...]:
    """The shares that a word or a user's numbers mean, summing to 1.

    Raises:
        ValueError: There are not as many numbers as devices.
    """
    if shares_by != "given":
        return baseline_shares(shares_by, cluster.profiles, precision)
    if shares is None or len(shares) != len(cluster.devices):
        count = "no" if shares is None else len(shares)
        raise ValueError(f"{counted(count, 'share')} for {counted(len(cluster.devices), 'device')}; give one for each")
    return tuple(share / math.fsum(shares) for share in shares)


def by_kind(
    cost: Callable[[int, PartSizes], float], sizes: Sequence[PartSizes], kinds: Sequence[str]
) -> tuple[float, ...]:
    """The cost of each part, asked for once where device and sizes are the same."""
    known: dict[tuple[str, PartSizes], float] = {}
    found = []
    for rank, (kind, each) in enumerate(zip(kinds, sizes, strict=True)):
        if (kind, each) not in known:
            known[kind, each] = cost(rank, each)
        found.append(known[kind, each])
    return tuple(found)


def as_baseline(
    name: str, shares: Sequence[float], step_seconds: float, *, fits: bool, is_ideal: bool = False
) -> Baseline:
    """Checked, as a plan has it."""
    known = {"name": name, "shares": tuple(shares), "step_seconds": step_seconds, "fits": fits, "is_ideal": is_ideal}
    return Baseline.model_validate(known)


def check_each_holds_a_node(work: WorkModel, cluster: Cluster) -> None:
    """Refuse devices of which a limit leaves less memory than a worker needs before it has any data.

    Raises:
        DoesNotFitError: Says which, and the least limit that would do.
    """
    for rank, (device, usable) in enumerate(zip(cluster.devices, usable_bytes(cluster), strict=True)):
        fraction = device.limits.memory_fraction
        if fraction is not None and (need := work.bytes(rank, _A_NODE)) > usable:
            raise DoesNotFitError(
                f"worker {rank} may use {in_bytes(usable)} of the memory of {device.profile.name} on {device.host} "
                f"({USABLE:g} of memory_fraction={fraction:g}), and needs {in_bytes(need)} for its process and the "
                f"least part; {least_fraction(fraction, usable, need)}"
            )


def check_fits(
    held: Sequence[float], limits: Sequence[float], shares_by: SharesBy, cluster: Cluster, *, remedy: str = ""
) -> None:
    """Refuse parts that some device's memory does not hold.

    Args:
        held: Bytes of each part.
        limits: Of each device.
        shares_by: What asked for the parts.
        cluster: The devices.
        remedy: Said behind ``--shares auto``, which keeps to them: what else would do.

    Raises:
        DoesNotFitError: Says which, and by how much.
    """
    alike: dict[str, list[int]] = {}
    for rank, (need, limit) in enumerate(zip(held, limits, strict=True)):
        if need > limit:
            alike.setdefault(f"{in_bytes(need)} and has {in_bytes(limit)}", []).append(rank)
    lacking = [
        f"{cluster.described(ranks)} needs {what}{' each' if len(ranks) > 1 else ''}" for what, ranks in alike.items()
    ]
    if lacking:
        more = "" if len(lacking) <= 8 else f"; and {len(lacking) - 8} more"
        instead = "" if shares_by == "auto" else f"; --shares auto keeps to the memories{remedy}"
        raise DoesNotFitError(f"shares by {shares_by} do not fit: {'; '.join(lacking[:8])}{more}{instead}")
