"""One graph cut again and again, for one set of targets after another: what does not depend on them is made once."""

from __future__ import annotations

from nugnn.partition.assign import Method, split_graph
from nugnn.partition.balance import Balance, Ints
from nugnn.partition.coarse import Hierarchy, find_clusters
from nugnn.partition.metis import SymmetricGraph


class RepeatedCuts:
    """Cuts of a graph.

    Args:
        graph: As partitioners see it.
        seed: By which clusters are found.
    """

    def __init__(self, graph: SymmetricGraph, seed: int) -> None:
        self.graph = graph
        self._seed = seed
        self._clusters: Hierarchy | None = None

    def parts(self, method: Method, balance: Balance, seed: int, notes: list[str]) -> Ints:
        """Parts as `nugnn.partition.assign.split_graph` makes them.

        With "clusters" these are found for the first ``balance``, and anew only for a target that they are too large
        for; METIS on their graph and the refinement follow each ``balance``. So parts depend on the calls before.
        """
        if method != "clusters" or balance.num_parts == 1 or self.graph.adjacency.nnz == 0:
            return split_graph(method, self.graph, balance, seed, notes)[0]
        if self._clusters is None or not self._clusters.serves(balance):
            self._clusters = find_clusters(self.graph, balance, self._seed)
        return self._clusters.parts(balance, seed, notes)
