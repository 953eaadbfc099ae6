"""What rows that travel take the ranks of a run, measured within their limits with all of them there, as checked JSON.

Of each two ranks both ends are kept: a rank that is limited takes longer until it has what the other one sent.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from nugnn._counted import counted
from nugnn.planning.links import Links
from nugnn.planning.timed_operators import Quantity
from nugnn.planning.trace_records import Strict
from nugnn.planning.validation import read_json

SCHEMA: Literal["nugnn.ways/1"] = "nugnn.ways/1"
_Rank = Annotated[int, Field(ge=0)]


class WaysError(ValueError):
    """A file of measured ways cannot be read, or is not of this run."""


class Way(Strict):
    """From a rank to one of its peers, as that rank sees it.

    Args:
        rank: Who sees it.
        peer: With whom it exchanges.
        bytes_per_second: One way, while the other way is as busy.
        latency_seconds: Of an exchange of a single row.
    """

    rank: _Rank
    peer: _Rank
    bytes_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    latency_seconds: Quantity


class MeasuredWays(Strict):
    """Of every rank to every other one.

    Args:
        schema_name: What kind of file this is; ``schema`` in JSON.
        via: What carried the rows.
        num_ranks: P.
        ways: One for each rank and peer, in any order.
        versions: Of what they were measured with.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_name: Literal["nugnn.ways/1"] = Field(SCHEMA, alias="schema")
    via: Literal["nccl", "gloo"]
    num_ranks: int = Field(ge=2)
    ways: tuple[Way, ...]
    versions: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_all(self) -> MeasuredWays:
        found = {(way.rank, way.peer) for way in self.ways if way.rank != way.peer}
        is_inside = all(max(ends) < self.num_ranks for ends in found)
        if not is_inside or not len(self.ways) == len(found) == self.num_ranks * (self.num_ranks - 1):
            raise ValueError(f"{counted(self.num_ranks, 'rank')} need a way from each of them to each other one, once")
        return self

    def over(self, links: Links) -> Links:
        """``links``, with what was measured in place of their exchanges; sums, and network cards between hosts, stay.

        What passes the host's memory on its way was copied there and back while it was measured; sums of such a run
        then go without these copies.

        Raises:
            WaysError: They are between another number of ranks.
        """
        if links.num_ranks != self.num_ranks:
            raise WaysError(
                f"ways between {counted(self.num_ranks, 'rank')} were measured, and there are {links.num_ranks}"
            )
        rates, latencies = np.full((self.num_ranks, self.num_ranks), np.inf), np.zeros((self.num_ranks, self.num_ranks))
        for way in self.ways:
            rates[way.rank, way.peer], latencies[way.rank, way.peer] = way.bytes_per_second, way.latency_seconds
        measured: dict[str, Any] = {
            "bytes_per_second": rates,
            "latency_seconds": latencies,
            "staging_seconds_per_byte": None,
            "burst_seconds": 0.0,
        }
        return replace(links, **measured, is_nccl=self.via == "nccl")

    def to_json(self) -> str:
        """Indented, with a newline at its end."""
        return self.model_dump_json(indent=1, by_alias=True) + "\n"


def levelled_ways(ways: Sequence[Way], kinds: Sequence[Hashable]) -> tuple[Way, ...]:
    """With the median in place of each measurement between devices of the same two kinds: they are to get equal shares.

    Args:
        ways: Of a run.
        kinds: Of the device of each rank.

    >>> ways = [Way(rank=a, peer=b, bytes_per_second=10.0 + a, latency_seconds=1e-5) for a in (0, 1) for b in (0, 1)
    ...         if a != b]
    >>> [way.bytes_per_second for way in levelled_ways(ways, ["one", "other"])]
    [10.0, 11.0]
    >>> [way.bytes_per_second for way in levelled_ways(ways, ["one", "one"])]
    [10.5, 10.5]
    """
    alike: dict[tuple[Hashable, Hashable], list[Way]] = {}
    for way in ways:
        alike.setdefault((kinds[way.rank], kinds[way.peer]), []).append(way)
    medians = {
        key: (
            statistics.median(way.bytes_per_second for way in found),
            statistics.median(way.latency_seconds for way in found),
        )
        for key, found in alike.items()
    }
    levelled = []
    for way in ways:
        rate, latency = medians[kinds[way.rank], kinds[way.peer]]
        levelled.append(way.model_copy(update={"bytes_per_second": rate, "latency_seconds": latency}))
    return tuple(levelled)


def read_ways(path: Path | str) -> MeasuredWays:
    """The ways in a file.

    Raises:
        WaysError: It cannot be read, is no JSON, is of another version, or has a field that is missing, unknown or out
            of range; or a way is missing.
    """
    return read_json(path, MeasuredWays, WaysError)
