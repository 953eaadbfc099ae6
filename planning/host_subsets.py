"""Which devices of a cluster are worth sharing a graph: sets of whole hosts, or of one kind of their devices.

Devices that are alike on one host are never told apart; hosts with the same devices and links stand for each other.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from nugnn.planning.cluster import Cluster

Ranks = tuple[int, ...]
Units = frozenset[int]

_ALL_HOSTS = 4
"""Up to so many hosts, or sorts of hosts, every set of them is looked at."""
_EVERY_PREFIX = 16
"""Up to so many hosts, the fastest one, two, three, ...; of more, powers of two."""


class HostSubsets:
    """Sets of the devices of a cluster.

    Args:
        cluster: P devices.

    Attributes:
        group_of: ``(P,)`` a number that is the same for devices that stand for each other.
        all: All of them.
    """

    def __init__(self, cluster: Cluster) -> None:
        by_host: dict[str, list[int]] = {}
        for rank, device in enumerate(cluster.devices):
            by_host.setdefault(device.host, []).append(rank)
        sorts = {host: tuple(sorted(cluster.kinds[rank] for rank in ranks)) for host, ranks in by_host.items()}
        groups: dict[tuple[tuple[str, ...], str], int] = {}
        units: dict[tuple[str, str], list[int]] = {}
        for host, ranks in by_host.items():
            for rank in ranks:
                groups.setdefault((sorts[host], cluster.kinds[rank]), len(groups))
                units.setdefault((host, cluster.kinds[rank]), []).append(rank)
        self.group_of = tuple(
            groups[sorts[device.host], kind] for device, kind in zip(cluster.devices, cluster.kinds, strict=True)
        )
        self._units = tuple(tuple(ranks) for ranks in units.values())
        self._sort = [sorts[host] for host, _ in units]
        self._host_of = [host for host, _ in units]
        self._kind = [cluster.devices[ranks[0]].kind for ranks in self._units]
        self._hosts = {host: frozenset(u for u, own in enumerate(self._host_of) if own == host) for host in by_host}
        self.all: Units = frozenset(range(len(self._units)))

    def ranks(self, units: Units) -> Ranks:
        """The devices of a set, ascending."""
        return tuple(sorted(rank for unit in units for rank in self._units[unit]))

    def name(self, units: Units) -> frozenset[tuple[object, int]]:
        """Equal for sets that stand for each other."""
        of_host: dict[str, list[int]] = {}
        for unit in units:
            of_host.setdefault(self._host_of[unit], []).append(unit)
        return frozenset(Counter((self._sort[own[0]], self._groups(own)) for own in of_host.values()).items())

    def sensible(self, seconds: Callable[[Units], float]) -> Iterator[Units]:
        """Sets in the order in which they are worth a look; none is empty, and some stand for each other.

        Args:
            seconds: That a set takes by itself, infinite where it cannot.
        """
        yield self.all
        yield from self._hosts.values()
        order = sorted(self._hosts.values(), key=lambda units: (seconds(units), min(units)))
        counts = range(1, len(order) + 1)
        if len(order) > _EVERY_PREFIX:
            ends = {n for n in counts[:-1] if self._sort[min(order[n])] != self._sort[min(order[n - 1])]}
            short = sorted({2**n for n in range(int(math.log2(len(order))) + 1)} | ends)
        else:
            short = list(counts)
        prefixes = [frozenset[int]().union(*order[:count]) for count in short]
        sorts: dict[tuple[str, ...], Units] = {}
        for unit, sort in enumerate(self._sort):
            sorts[sort] = sorts.get(sort, frozenset()) | {unit}
        wide = [self.all, *prefixes, *_unions(list(sorts.values()))]
        if len(order) <= _ALL_HOSTS:
            wide += _unions(order)
        yield from self._of_each_kind(self.all)
        for units in wide[1:]:
            yield units
            yield from self._of_each_kind(units)

    def near(self, units: Units) -> Iterator[Units]:
        """Sets with one host, or one kind of a host's devices, more or less; one of those that stand for each other."""
        seen: set[tuple[object, ...]] = set()
        hosts = self._hosts.values()
        changes = [(host, host) for host in hosts] + [(host, frozenset({unit})) for host in hosts for unit in host]
        for host, changed in changes:
            key = self._sort[min(host)], self._groups(host & units), self._groups(changed)
            if key in seen:
                continue
            seen.add(key)
            for other in (units | changed, units - changed):
                if other and other != units:
                    yield other

    def _groups(self, units: Iterable[int]) -> tuple[int, ...]:
        """What stands for each other of some units of a host, ascending."""
        return tuple(sorted(self.group_of[self._units[unit][0]] for unit in units))

    def single_devices(self) -> Iterator[int]:
        """One of each kind that there are several of on a host: `sensible` does not tell them apart."""
        seen: set[int] = set()
        for ranks in self._units:
            if len(ranks) > 1 and self.group_of[ranks[0]] not in seen:
                seen.add(self.group_of[ranks[0]])
                yield ranks[0]

    def _of_each_kind(self, units: Units) -> Iterator[Units]:
        kinds = dict.fromkeys(self._kind[unit] for unit in sorted(units))
        if len(kinds) > 1:
            for kind in kinds:
                yield frozenset(unit for unit in units if self._kind[unit] == kind)


def _unions(sets: Sequence[Units]) -> Iterable[Units]:
    if len(sets) > _ALL_HOSTS:
        return list(sets)
    return [
        frozenset[int]().union(*chosen)
        for count in range(1, len(sets) + 1)
        for chosen in itertools.combinations(sets, count)
    ]
