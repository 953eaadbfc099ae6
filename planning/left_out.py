"""What is said of devices that hardly have a share of a graph, or that one device alone would be faster than."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from nugnn._counted import counted
from nugnn.planning.cluster import Cluster
from nugnn.planning.draft import HARDLY
from nugnn.planning.host_subsets import HostSubsets
from nugnn.planning.in_words import seconds_text

_CLEARLY = 0.95
"""Of the time; fewer devices that take less of it are worth a word."""
_KEPT = "This plan has all of them, as each device that was asked for gets a node at least"


def notes_of_left_out(
    shares: Sequence[float],
    step_seconds: float,
    cluster: Cluster,
    subsets: HostSubsets,
    seconds_among: Callable[[Sequence[int]], float],
) -> tuple[str, ...]:
    """Sentences on devices that an epoch would hardly be longer without.

    Args:
        shares: Of each device.
        step_seconds: Expected with them.
        cluster: The devices.
        subsets: Of them.
        seconds_among: Expected of some of the ranks alone, with shares in the same proportion; infinite where their
            memory does not hold the graph.
    """
    count, notes = len(shares), []
    used = [rank for rank, share in enumerate(shares) if share >= HARDLY / count]
    fewest = step_seconds
    if len(used) < count:
        idle = sorted(set(range(count)).difference(used))
        without = seconds_among(used)
        them = "it" if len(idle) == 1 else "them"
        text = f"of {counted(count, 'device')}, {cluster.described(idle)} would hardly be used: over these links "
        text += "a larger share costs more than it brings"
        if math.isfinite(without):
            text += f". Without {them} an epoch would take {seconds_text(without)} and with {them} "
            text += seconds_text(step_seconds)
            if without <= step_seconds:
                others = f"the other {len(used)}" if len(used) > 1 else "the other one"
                text += f". {_KEPT}; plan for {others} alone to have the shorter epoch"
            elif len({cluster.devices[rank].host for rank in used}) == 1:
                text += ", as sums overlap with more exchanges in runs over several hosts"
        fewest = min(fewest, without)
        notes.append(text)
    alone = [(seconds_among([rank]), rank) for rank in subsets.single_devices()]
    if alone and min(alone)[0] < _CLEARLY * fewest:
        seconds, rank = min(alone)
        notes.append(
            f"of {counted(count, 'device')}, {cluster.described([rank])} alone would take "
            f"{seconds_text(seconds)} an epoch "
            f"in place of {seconds_text(step_seconds)}: exchanges cost more than the others bring. {_KEPT}; plan for "
            "that one alone to have the shorter epoch"
        )
    return tuple(notes)
