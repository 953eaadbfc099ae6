"""METIS graph files: a header, then one line of neighbours, counted from 1, per node.

docs/formats/metis.md describes the format. Shape suffixes: N nodes, E edges.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nugnn.datasets.graph_data import GraphData, Metric, graph_from
from nugnn.datasets.text_table import read_bytes

_NOT_A_NUMBER = re.compile(rb"[^0-9\s]")
_DIGITS = 18  # so that every number fits int64


def read_metis(path: str | os.PathLike[str], *, name: str | None = None, metric: Metric = "auto") -> GraphData:
    """Read a METIS graph file (``.graph``, or ``.graph.gz``).

    Args:
        path: The file.
        name: Name of the graph; default the file's name without suffixes.
        metric: As in ``GraphData``.

    Returns:
        Both directions of every edge, in the order of the file: the neighbours of node 0, then those of node 1. Edge
        weights as ``edge_data["weight"]``, float32 where that is exact, float64 otherwise; the weights of nodes as
        ``node_data["vertex_weight"]`` int64 ``(N, ncon)``, their sizes as ``node_data["vertex_size"]`` int64 ``(N,)``.

    Raises:
        ValueError: the header or a line is malformed, a neighbour is out of range, an edge is listed by one of its ends
            only, or the counts in the header are not met; names the file, line and value.
    """
    path = Path(path)
    lines = _lines(path)
    header = _Header.parse(path, *lines[0]) if lines else None
    if header is None:
        raise ValueError(f"{path}: no header; the first line has to give the number of nodes and of edges")
    body = lines[1:]
    while len(body) > header.num_nodes and not body[-1][1].strip():
        body.pop()
    if len(body) != header.num_nodes:
        raise ValueError(
            f"{path}: the header announces {header.num_nodes} nodes, {len(body)} lines follow; every node has a line, "
            "an empty one when it has no neighbour"
        )
    numbers, line_starts = _numbers(path, body)
    return _graph(path, header, numbers, line_starts, [number for number, _ in body], name, metric)


@dataclass(frozen=True)
class _Header:
    num_nodes: int
    num_edges: int
    has_sizes: bool
    num_weights: int
    has_edge_weights: bool

    @classmethod
    def parse(cls, path: Path, line_number: int, line: bytes) -> _Header:
        where = f"{path}: line {line_number}, the header {line.decode(errors='replace').strip()!r:.80}"
        words = line.split()
        if not 2 <= len(words) <= 4 or any(not word.isdigit() or len(word) > _DIGITS for word in words):
            raise ValueError(f"{where}, is not 'nodes edges [format [weights]]' in whole numbers")
        code = words[2].decode().rjust(3, "0") if len(words) > 2 else "000"
        if len(code) != 3 or set(code) - {"0", "1"}:
            raise ValueError(f"{where}: format {code} is unknown; it is up to three digits 0 or 1")
        num_weights = int(words[3]) if len(words) > 3 else int(code[1])
        if len(words) > 3 and (code[1] == "0") != (num_weights == 0):
            raise ValueError(f"{where}: {num_weights} weights per node do not go with format {code}")
        num_nodes, num_edges = int(words[0]), int(words[1])
        if num_nodes < 1:
            raise ValueError(f"{where}: an empty graph cannot be trained or partitioned")
        return cls(num_nodes, num_edges, code[0] == "1", num_weights, code[2] == "1")


def _lines(path: Path) -> list[tuple[int, bytes]]:
    """Lines with their numbers, without comments, from the header on."""
    texts = read_bytes(path).split(b"\n")
    if not texts[-1]:
        texts.pop()  # what follows the last line end is no line
    lines = [line for line in enumerate(texts, 1) if not line[1].lstrip().startswith(b"%")]
    while lines and not lines[0][1].strip():
        lines.pop(0)
    return lines


def _numbers(path: Path, body: Sequence[tuple[int, bytes]]) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of all lines, int64, and where each line's numbers begin, ``(N + 1,)``."""
    words: list[bytes] = []
    starts = [0]
    for _, line in body:
        words.extend(line.split())
        starts.append(len(words))
    joined = b" ".join(words)
    if _NOT_A_NUMBER.search(joined) or (words and max(map(len, words)) > _DIGITS):
        place = next(i for i, word in enumerate(words) if not word.isdigit() or len(word) > _DIGITS)
        row = int(np.searchsorted(starts, place, side="right")) - 1
        raise ValueError(
            f"{path}: line {body[row][0]} holds {words[place].decode(errors='replace')!r:.80}; "
            "a METIS graph holds only whole numbers from 0"
        )
    return np.array(words, dtype=f"S{_DIGITS}").astype(np.int64), np.array(starts, dtype=np.int64)


def _graph(
    path: Path,
    header: _Header,
    numbers: np.ndarray,
    starts: np.ndarray,
    line_numbers: Sequence[int],
    name: str | None,
    metric: Metric,
) -> GraphData:
    before = int(header.has_sizes) + header.num_weights
    step = 1 + int(header.has_edge_weights)
    counts = np.diff(starts) - before
    bad = (counts < 0) | (counts % step != 0)
    if bad.any():
        row = int(bad.argmax())
        expected = f"{before} numbers about the node, then its neighbours" + (
            " and weights in pairs" if step == 2 else ""
        )
        raise ValueError(f"{path}: line {line_numbers[row]} has {counts[row] + before} numbers; expected {expected}")
    own = numbers[starts[:-1, None] + np.arange(before)] if before else np.empty((header.num_nodes, 0), dtype=np.int64)
    is_edge = np.ones(len(numbers), dtype=np.bool_)
    if before:
        is_edge[(starts[:-1, None] + np.arange(before)).ravel()] = False
    pairs = numbers[is_edge].reshape(-1, step)
    src = np.repeat(np.arange(header.num_nodes), counts // step)
    dst = pairs[:, 0] - 1
    outside = (dst < 0) | (dst >= header.num_nodes) | (dst == src)
    if outside.any():
        place = int(outside.argmax())
        reason = (
            f"allowed are 1 to {header.num_nodes}" if dst[place] != src[place] else "a node is not its own neighbour"
        )
        raise ValueError(f"{path}: line {line_numbers[src[place]]} lists neighbour {dst[place] + 1}; {reason}")
    _check_symmetric(path, line_numbers, src, dst, pairs[:, 1] if step == 2 else None)
    if len(src) != 2 * header.num_edges:
        hint = "; the header counts every edge once, the lines list it twice" if len(src) == header.num_edges else ""
        raise ValueError(
            f"{path}: the header announces {header.num_edges} edges, the lines list {len(src)} neighbours, that is "
            f"{len(src) // 2} edges{hint}"
        )
    node_data: dict[str, Tensor] = {}
    if header.has_sizes:
        node_data["vertex_size"] = torch.from_numpy(own[:, 0].copy())
    if header.num_weights:
        node_data["vertex_weight"] = torch.from_numpy(own[:, int(header.has_sizes) :].copy())
    edge_data = {"weight": _weights(pairs[:, 1])} if step == 2 else {}
    return graph_from(
        path,
        name=name or path.name.split(".")[0],
        num_nodes=header.num_nodes,
        src=torch.from_numpy(src),
        dst=torch.from_numpy(dst),
        node_data=node_data,
        edge_data=edge_data,
        metric=metric,
    )


def _check_symmetric(
    path: Path, line_numbers: Sequence[int], src: np.ndarray, dst: np.ndarray, weight: np.ndarray | None
) -> None:
    """Every neighbour lists the node in turn, as often and with the same weight."""
    weight = np.zeros_like(src) if weight is None else weight
    there = np.lexsort((weight, dst, src))
    back = np.lexsort((weight, src, dst))
    differs = (src[there] != dst[back]) | (dst[there] != src[back]) | (weight[there] != weight[back])
    if not differs.any():
        return
    place = int(differs.argmax())
    # the smaller of the two keys is the one without a counterpart
    one = (int(src[there[place]]), int(dst[there[place]]), int(weight[there[place]]))
    other = (int(dst[back[place]]), int(src[back[place]]), int(weight[back[place]]))
    u, v, w = one if one < other else (other[1], other[0], other[2])
    listed = "as often and with the same weight" if ((src == v) & (dst == u)).any() else "at all"
    raise ValueError(
        f"{path}: line {line_numbers[u]} (node {u + 1}) lists neighbour {v + 1}"
        + (f" with weight {w}" if weight.any() else "")
        + f", line {line_numbers[v]} does not list {u + 1} {listed}; both ends of an edge list it"
    )


def _weights(values: np.ndarray) -> Tensor:
    exact = not len(values) or int(values.max()) <= 2**24
    return torch.from_numpy(values.astype(np.float32 if exact else np.float64))
