"""Graphs by their counts alone: for plans of graphs that one does not have at hand."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields, replace
from typing import Any

from nugnn._counted import counted
from nugnn.planning.expected_halo import USUAL_HALO, ExpectedHalo
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import DataFacts

_EXPONENT = re.compile(r"\d+(\.\d+)?[eE]\+?\d+")
_TOO_MANY = 2**45
"""No graph has so many of anything."""


class StatisticsError(ValueError):
    """A text names no graph: says what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class GraphStatistics:
    """Counts of a graph.

    Args:
        name: For people.
        nodes: N.
        edges: Directed ones, as they are in the file.
        features: Width of a row of features.
        classes: Of the labels.
        train: Training nodes.
        undirected: Whether the reverse of every edge is added: then twice as many, where none had one.
        halo: Halo rows for each node of two parts, see `nugnn.planning.expected_halo`.

    Raises:
        StatisticsError: A count is out of range.
    """

    name: str = "a graph by its counts"
    nodes: int
    edges: int
    features: int
    classes: int
    train: int
    undirected: bool = False
    halo: float = USUAL_HALO

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("edges", 0), ("features", 1), ("classes", 1), ("train", 1)):
            count = getattr(self, name)
            if count < least:
                raise StatisticsError(f"graph statistics: {name} is {count}, must be {least} or more")
            if count >= _TOO_MANY:
                raise StatisticsError(f"graph statistics: {name} is {count:.3g}, must be below {_TOO_MANY:.3g}")
        if self.train > self.nodes:
            raise StatisticsError(f"graph statistics: {counted(self.train, 'training node')} of {self.nodes}")
        try:
            ExpectedHalo(self.halo)
        except ValueError as error:
            raise StatisticsError(f"graph statistics: {error}") from None

    def sizes(self, self_loops: str) -> PartSizes:
        """Of the whole graph as it is trained on.

        Args:
            self_loops: ``add`` counts one more edge for each node; ``keep`` and ``remove`` none.
        """
        edges = self.edges * (2 if self.undirected else 1) + (self.nodes if self_loops == "add" else 0)
        return PartSizes(inner=self.nodes, edges=edges, train=self.train)

    @property
    def expected_halo(self) -> ExpectedHalo:
        """Of its parts, before there is a cut."""
        return ExpectedHalo(self.halo, degree=self.edges * (2 if self.undirected else 1) / self.nodes)

    def facts(self, self_loops: str) -> DataFacts:
        """The same for a plan."""
        return DataFacts(
            name=self.name,
            nodes=self.nodes,
            edges=self.sizes(self_loops).edges,
            train=self.train,
            features=self.features,
            classes=self.classes,
        )


PRESETS = {
    each.name: each
    for each in (
        GraphStatistics(name="ogbn-arxiv", nodes=169_343, edges=1_166_243, features=128, classes=40, train=90_941),
        GraphStatistics(
            name="ogbn-products",
            nodes=2_449_029,
            edges=123_718_280,
            features=100,
            classes=47,
            train=196_615,
            halo=0.6,
        ),
        GraphStatistics(
            name="ogbn-papers100M",
            nodes=111_059_956,
            edges=1_615_685_872,
            features=128,
            classes=172,
            train=1_207_179,
        ),
        GraphStatistics(name="reddit", nodes=232_965, edges=114_615_892, features=602, classes=41, train=153_431),
    )
}
"""By name; counts as their publishers print them. The halo of products is that of a synthetic graph of its shape."""


def parse_statistics(text: str) -> GraphStatistics:
    """The graph that ``text`` names: a preset, counts, or a preset with some counts changed.

    Raises:
        StatisticsError: There is no such preset or count, or one is missing or out of range.

    >>> parse_statistics("ogbn-products,halo=0.3").halo
    0.3
    >>> parse_statistics("nodes=1e6,edges=2e7,features=100,classes=47,train=1e5").edges
    20000000
    """
    first, *rest = (part.strip() for part in text.split(","))
    base = None if "=" in first else _preset(first)
    given: dict[str, Any] = {}
    kinds = {field.name: str(field.type) for field in fields(GraphStatistics) if field.name != "name"}
    for entry in ([] if base is not None else [first]) + rest:
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise StatisticsError(
                f"graph statistics: {entry!r} is not one of {', '.join(f'{k}=' for k in kinds)}{hint}"
            )
        if name in given:
            raise StatisticsError(f"graph statistics: {name} is given twice")
        given[name] = _value(name, value, kinds[name])
    if base is not None:
        return replace(base, **given, name=f"{base.name}, changed") if given else base
    missing = [name for name in ("nodes", "edges", "features", "classes", "train") if name not in given]
    if missing:
        raise StatisticsError(
            f"graph statistics: {', '.join(missing)} missing; give nodes, edges, features, classes, train"
        )
    return GraphStatistics(**given)


def _preset(name: str) -> GraphStatistics:
    by_name = {key.lower().replace("_", "-"): preset for key, preset in PRESETS.items()}
    found = by_name.get(name.lower().replace("_", "-"))
    if found is None:
        near = difflib.get_close_matches(name.lower(), by_name, n=1)
        hint = f"; did you mean {by_name[near[0]].name}?" if near else ""
        known = ", ".join(PRESETS)
        raise StatisticsError(
            f"graph statistics: {name!r} is not known{hint}; known are {known}, or give nodes=...,edges=..."
        )
    return found


def _value(name: str, text: str, kind: str) -> Any:
    try:
        if kind == "bool":
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if kind == "float":
            return float(text)
        number = float(text) if _EXPONENT.fullmatch(text) else int(text.replace("_", ""))
        if number != int(number):
            raise ValueError
        return int(number)
    except (ValueError, KeyError, OverflowError):
        what = {"bool": "true or false", "float": "a number"}.get(kind, "a whole number")
        raise StatisticsError(f"graph statistics: {name}={text} is not allowed; allowed: {what}") from None
