"""What one device has to do in a step, as the few counts that its work depends on."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

GRAPH_COUNTS = ("inner", "edges", "halo", "sent", "train")
_SYMBOLS = {"N": "inner", "H": "halo", "L": "local", "E": "edges", "T": "train", "S": "sent", "B": "batch"}


@dataclass(frozen=True, slots=True)
class PartSizes:
    """Counts of a part of a graph, or of a local batch; 0 for what its family of data does not know.

    Args:
        inner: N, nodes of the part.
        edges: E, in-edges of its nodes, parallel ones and self-loops included.
        halo: H, distinct nodes of other parts that are the source of an edge into this one: rows received in a layer.
        sent: S, distinct pairs of a node of this part and another part that reads it: rows sent in a layer.
        train: T, its nodes that count in the loss.
        batch: B, samples.

    Raises:
        ValueError: One is negative.
    """

    inner: int = 0
    edges: int = 0
    halo: int = 0
    sent: int = 0
    train: int = 0
    batch: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) < 0:
                raise ValueError(f"{each.name} is {getattr(self, each.name)}, must be 0 or more")

    @property
    def local(self) -> int:
        """L = N + H."""
        return self.inner + self.halo

    @property
    def of_graph(self) -> tuple[int, int, int, int, int]:
        """In the order of `GRAPH_COUNTS`."""
        return self.inner, self.edges, self.halo, self.sent, self.train

    def symbols(self) -> dict[str, int]:
        """``N``, ``H``, ``L``, ... and what they are here."""
        return {symbol: getattr(self, name) for symbol, name in _SYMBOLS.items()}


def bounded(sizes: PartSizes, num_nodes: int, num_edges: int, num_parts: int) -> PartSizes:
    """Estimated counts, cut down to what a part of any cut can have; those that were counted stay as they are.

    A halo row is another part's node, and the source of an edge of this one; a row sent is a node that another part
    reads, and the source of an edge of that one.

    Args:
        sizes: Of a part of a graph.
        num_nodes: N, of the graph.
        num_edges: E, likewise.
        num_parts: P.

    >>> bounded(PartSizes(inner=6, edges=3, halo=9, sent=9), num_nodes=10, num_edges=7, num_parts=2)
    PartSizes(inner=6, edges=3, halo=3, sent=4, train=0, batch=0)
    """
    inner = min(sizes.inner, num_nodes)
    edges, rest = min(sizes.edges, num_edges), num_nodes - inner
    halo = min(sizes.halo, rest if num_parts > 1 else 0, edges)
    sent = min(sizes.sent, inner * min(num_parts - 1, rest), num_edges - edges)
    if (inner, edges, halo, sent) == (sizes.inner, sizes.edges, sizes.halo, sizes.sent):
        return sizes
    return replace(sizes, inner=inner, edges=edges, halo=halo, sent=sent)
