"""What a synthetic benchmark graph is made of before any bit is drawn: counts, communities, weights, refusals.

The numpy generator (:mod:`nugnn.datasets.synthetic`) and its twin on torch tensors
(:mod:`nugnn.datasets.synthetic_device`) both start here, so the two cannot disagree about a number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

FULL_NODES = 2_449_029
FULL_ARCS = 123_718_280
_FULL_COMMUNITIES = 1_880
_FEWEST_COMMUNITIES = 16
_FEWEST_NODES = 4 * _FEWEST_COMMUNITIES
_MOST_NODES = 2**28
"""The stubs, about 13 for each node, are picked with 32 bits."""
_LARGEST_WEIGHT = 3_000
MAIN_CLASS_SHARE = 0.7
SIDE_CLASSES = 3
_MOST_DRAWS_PER_EDGE = 16
"""More than a graph that its communities can well hold needs, about 1.5."""


@dataclass(frozen=True)
class Family:
    """One kind of graph: how many of the edges join nodes of one community, and how much features tell."""

    name: str
    inside_share: float
    signal: int
    """Spread of the class means in 256ths of the noise's."""


PRODUCTS = Family("products-like", inside_share=0.8, signal=56)
MIXED = Family("mixed-like", inside_share=0.3, signal=80)


@dataclass(frozen=True)
class Layout:
    """Positions in communities, a pure function of the number of nodes."""

    num_nodes: int

    @property
    def num_communities(self) -> int:
        return max(_FEWEST_COMMUNITIES, round(_FULL_COMMUNITIES * self.num_nodes / FULL_NODES))

    @property
    def largest_weight(self) -> int:
        """3,000 at full size; for smaller communities the same multiple of their size."""
        scaled = _LARGEST_WEIGHT * self.num_nodes * _FULL_COMMUNITIES // (FULL_NODES * self.num_communities)
        return min(_LARGEST_WEIGHT, max(2, scaled))

    @cached_property
    def starts(self) -> np.ndarray:
        """First position of each community, and N at the end."""
        communities = np.arange(self.num_communities + 1)
        return -(-communities * self.num_nodes // self.num_communities)

    @cached_property
    def weight_thresholds(self) -> np.ndarray:
        """``T[2..largest]``, descending: a position's weight is 1 and one more for each that its 32 bits are below."""
        return np.array([weight_threshold(k) for k in range(2, self.largest_weight + 1)], dtype=np.int64)


@dataclass(frozen=True)
class Recipe:
    """A graph that was asked for, its counts settled and in range.

    Raises:
        ValueError: Counts out of range.
    """

    family: Family
    num_nodes: int
    num_arcs: int | None
    seed: int
    num_features: int
    num_classes: int

    def __post_init__(self) -> None:
        name = self.family.name
        if not _FEWEST_NODES <= self.num_nodes <= _MOST_NODES:
            raise ValueError(f"{name}: {self.num_nodes} nodes; it takes {_FEWEST_NODES} to {_MOST_NODES}")
        if self.num_features < 1 or self.num_classes < 1:
            raise ValueError(
                f"{name}: {self.num_features} features and {self.num_classes} classes; both have to be at least 1"
            )
        if self.num_arcs is not None and (self.num_arcs < 2 or self.num_arcs % 2):
            raise ValueError(
                f"{name}: {self.num_arcs} arcs; each edge is two arcs, so the number has to be even and positive"
            )

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.num_nodes)

    @property
    def num_pairs(self) -> int:
        """Undirected edges; by default in the proportion of ogbn-products, at most a 16th of the pairs inside."""
        if self.num_arcs is not None:
            return self.num_arcs // 2
        size = self.num_nodes // self.layout.num_communities
        most = self.layout.num_communities * size * (size - 1) // 2 // 16
        return int(min(FULL_ARCS / 2 / FULL_NODES * self.num_nodes, most))

    @property
    def wanted(self) -> dict[str, int]:
        """Distinct pairs to find in each stream of draws."""
        num_inside = round(self.family.inside_share * self.num_pairs)
        return {"inside": num_inside, "across": self.num_pairs - num_inside}

    @property
    def split_sizes(self) -> tuple[int, int]:
        """Train and validation nodes."""
        return self.num_nodes * 8 // 100, self.num_nodes * 2 // 100

    def may_draw(self, stream: str, drawn: int) -> bool:
        """Whether a stream of which ``drawn`` are done may go on."""
        wanted = self.wanted[stream]
        return drawn < _MOST_DRAWS_PER_EDGE * wanted + 64 and wanted <= self._num_possible(stream)

    def next_draws(self, stream: str, found: int, drawn: int) -> int:
        """As many as are missing and some to spare, more where many repeat: the result does not depend on it."""
        wanted = self.wanted[stream]
        return max(wanted - found + wanted // 8 + 64, drawn // 2)

    def cannot_hold(self, stream: str, found: int, drawn: int) -> ValueError:
        """The error when a stream has ended too early."""
        return ValueError(
            f"{self.family.name}: {self.num_nodes} nodes in {self.layout.num_communities} communities cannot hold "
            f"{self.wanted[stream]} edges {stream} communities: {drawn} draws gave {found} different ones; "
            "ask for fewer arcs or more nodes"
        )

    def _num_possible(self, stream: str) -> int:
        inside = int(sum(size * (size - 1) // 2 for size in np.diff(self.layout.starts).tolist()))
        return inside if stream == "inside" else self.num_nodes * (self.num_nodes - 1) // 2 - inside


def weight_threshold(k: int) -> int:
    """``floor(2^32 * k^-0.9)`` exactly, whatever the machine's ``pow``: the largest t with ``t^10 * k^9 <= 2^320``."""
    t = math.floor(2**32 * k**-0.9)
    while (t + 1) ** 10 * k**9 <= 2**320:
        t += 1
    while t**10 * k**9 > 2**320:
        t -= 1
    return t
