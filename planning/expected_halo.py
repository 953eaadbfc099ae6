"""How many halo rows a part will have, before there is a cut.

Measured cuts (``docs/partition-fit.md``) grow a little faster than the logarithm of the number of parts: of
``products-like`` 0.6, 1.3, 2.1 and 3.2 rows for each node of 2, 4, 8 and 16 parts. How large the first number is
depends on the graph: 0.03 of a mesh, 0.5 of a dense web of mails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

USUAL_HALO = 0.5
_GROWTH = 1.2
"""Of the rows with the number of times that a graph is halved: fitted to the four numbers above."""


@dataclass(frozen=True)
class ExpectedHalo:
    """Halo rows for each node of a part that is a fraction of the graph; never more than there are other nodes.

    Args:
        of_two: For each node, of two equal parts.

    Raises:
        ValueError: It is negative or no number.

    >>> [round(ExpectedHalo(0.6)(1 / parts), 1) for parts in (1, 2, 4, 8, 16)]
    [0.0, 0.6, 1.4, 2.2, 3.2]
    """

    of_two: float = USUAL_HALO

    def __post_init__(self) -> None:
        if not (math.isfinite(self.of_two) and self.of_two >= 0):
            raise ValueError(
                f"halo is {self.of_two}; it must be a number of at least 0: rows for each node of two parts"
            )

    def __call__(self, fraction: float) -> float:
        if fraction >= 1:
            return 0.0
        halvings = -math.log2(fraction)
        if halvings < 1:  # the larger one of two parts reads what the smaller one holds
            return min(self.of_two, (1 - fraction) / fraction)
        return min(self.of_two * halvings**_GROWTH, (1 - fraction) / fraction)
