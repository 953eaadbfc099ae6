"""Ranks by the hosts they run on: a grid of hosts by places, and process groups along both."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

HOSTS = ("auto", "flat")
"""Values of the option ``grad_sync_hosts``: sums are made inside hosts first where these have as many ranks each; or
not."""


def checked_hosts(name: str) -> str:
    """``name``.

    Raises:
        ValueError: There is no such choice.
    """
    if name not in HOSTS:
        raise ValueError(f"hosts {name!r} is not known; choose one of {', '.join(HOSTS)}")
    return name


def host_name() -> str:
    """Of the host this process runs on: what ``NUGNN_HOST`` says, or the system's name.

    Containers of one host may have names of their own, and those of several hosts the same one.
    """
    return os.environ.get("NUGNN_HOST") or platform.node()


def numbered(hosts: Sequence[Hashable]) -> tuple[int, ...]:
    """A number for each host, by first appearance.

    >>> numbered(["b", "b", "a", "b"])
    (0, 0, 1, 0)
    """
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)


@dataclass(frozen=True)
class HostGrid:
    """Ranks of H hosts with L ranks each, H and L at least 2.

    Args:
        rows: ``H`` times ``L`` ranks: those of each host, in order.
    """

    rows: tuple[tuple[int, ...], ...]

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """``L`` times ``H`` ranks: those of the same place in each host, in order."""
        return tuple(tuple(sorted(column)) for column in zip(*self.rows, strict=True))

    def hosts(self) -> tuple[int, ...]:
        """Number of each rank's host."""
        of_rank = {rank: host for host, row in enumerate(self.rows) for rank in row}
        return tuple(of_rank[rank] for rank in range(len(of_rank)))


def host_grid(hosts: Sequence[int]) -> HostGrid | None:
    """The grid, where there is one; None for one host, for one rank on each, and for unequal numbers of ranks.

    Args:
        hosts: Of each rank, as `numbered`.

    >>> host_grid([0, 0, 1, 1]).columns
    ((0, 2), (1, 3))
    >>> host_grid([0, 0, 1]) is host_grid([0, 1]) is host_grid([0, 0]) is None
    True
    """
    rows = _rows(hosts)
    if len(rows) < 2 or len({len(row) for row in rows}) > 1 or len(rows[0]) < 2:
        return None
    return HostGrid(tuple(map(tuple, rows)))


def why_no_grid(hosts: Sequence[int]) -> str | None:
    """A sentence for the user where hosts have unequal numbers of ranks; None where there is nothing to say."""
    sizes = [len(row) for row in _rows(hosts)]
    if len(set(sizes)) < 2:
        return None
    return (
        f"hosts have {', '.join(map(str, sizes))} workers: gradients are not summed inside each host first, which "
        "takes as many on each"
    )


def _rows(hosts: Sequence[int]) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in set(hosts)]
    for rank, host in enumerate(hosts):
        rows[host].append(rank)
    return rows


@dataclass(frozen=True, eq=False)
class HostGroups:
    """Process groups of one rank in a grid of hosts.

    Args:
        grid: Of ranks.
        inside: Group of the ranks of this host.
        across: Group of the ranks of the same place in each host.
    """

    grid: HostGrid
    inside: Any
    across: Any


def make_host_groups(grid: HostGrid, rank: int, new_group: Callable[[Sequence[int]], Any]) -> HostGroups:
    """Make the groups, in the same order on every rank; a collective call.

    Args:
        grid: Of ranks.
        rank: This one.
        new_group: Gets ranks in order and makes their group; called for all groups, also those without this rank.
    """
    made = [[(members, new_group(members)) for members in way] for way in (grid.rows, grid.columns)]
    inside, across = (next(group for members, group in way if rank in members) for way in made)
    return HostGroups(grid, inside, across)
