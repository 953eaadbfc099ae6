"""How many halo rows a part will have, before there is a cut.

Measured cuts (``docs/partition-fit.md``) grow a little faster than the logarithm of the number of parts: of
``products-like`` 0.6, 1.3, 2.1 and 3.2 rows for each node of 2, 4, 8 and 16 parts. How large the first number is
depends on the graph: 0.03 of a mesh, 0.5 of a dense web of mails.

However far that goes, a partitioner's cut needs no more rows than parts drawn at random do in the mean. Where a part
has each node with the probability f, one with d edges to other nodes is outside of it and read by it with the
probability ``(1 - f) (1 - (1 - f)**d)`` at most; that is concave in d, so the mean over nodes is no larger than with
the mean degree (Jensen). Nor are there more than nodes outside, ``1 - f`` of all, or edges from there, ``f (1 - f)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

USUAL_HALO = 0.5
_GROWTH = 1.2
"""Of the rows with the number of times that a graph is halved: fitted to the four numbers above."""


@dataclass(frozen=True)
class ExpectedHalo:
    """Halo rows for each node of a part that is a fraction of the graph; never more than of a part at random.

    Args:
        of_two: For each node, of two equal parts.
        degree: Edges for each node of the graph, self-loops better not counted; where nobody knows them, infinite, so
            that the other nodes are the only bound.

    Raises:
        ValueError: It is negative or no number.

    >>> [round(ExpectedHalo(0.6)(1 / parts), 1) for parts in (1, 2, 4, 8, 16)]
    [0.0, 0.6, 1.4, 2.2, 3.2]
    >>> round(ExpectedHalo(0.6, degree=2.0)(1 / 16), 2)
    1.82
    """

    of_two: float = USUAL_HALO
    degree: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.of_two) and self.of_two >= 0):
            raise ValueError(
                f"halo is {self.of_two}; it must be a number of at least 0: rows for each node of two parts"
            )
        if not self.degree >= 0:
            raise ValueError(f"degree is {self.degree}; it must be 0 or more: edges for each node")

    def __call__(self, fraction: float) -> float:
        if fraction >= 1:
            return 0.0
        # of the other nodes, by a part at random; where most nodes have no edge, by no more than there are edges
        read = min(-math.expm1(self.degree * math.log1p(-fraction)), self.degree * fraction)
        at_random = (1 - fraction) / fraction * read
        halvings = max(-math.log2(fraction), 1.0)  # the larger one of two parts reads what the smaller one holds
        return min(self.of_two * halvings**_GROWTH, at_random)
