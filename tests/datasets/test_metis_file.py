"""METIS graph files: every header code, and what breaks a law of the format."""

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.datasets.metis_file import read_metis

DATA = Path(os.environ.get("NUGNN_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


def write(path, text):
    path.write_text(text)
    return path


def edges_of(data):
    return list(zip(data.src.tolist(), data.dst.tolist(), strict=True))


@st.composite
def graphs(draw):
    """Distinct undirected edges without self-loops, isolated nodes among them."""
    num_nodes = draw(st.integers(1, 8))
    pairs = [(u, v) for u in range(num_nodes) for v in range(u)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    weights = draw(st.lists(st.integers(1, 9), min_size=len(edges), max_size=len(edges)))
    return num_nodes, {(u, v): w for (u, v), w in zip(edges, weights, strict=True)}


@given(
    graph=graphs(), sizes=st.booleans(), num_weights=st.integers(0, 3), weighted=st.booleans(), comment=st.booleans()
)
def test_what_is_written_is_read(tmp_path_factory, graph, sizes, num_weights, weighted, comment):
    num_nodes, edges = graph
    code = f"{sizes:d}{num_weights > 0:d}{weighted:d}"
    lines = [f"{num_nodes} {len(edges)} {code}" + (f" {num_weights}" if num_weights else "")]
    expected = []
    for u in range(num_nodes):
        words = [10 + u] * sizes + [100 * u + k for k in range(num_weights)]
        for (a, b), w in edges.items():
            if u in (a, b):
                v = a + b - u
                expected.append((u, v, w))
                words += [v + 1, w] if weighted else [v + 1]
        lines += ["% between"] * comment + [" ".join(map(str, words))]
    data = read_metis(write(tmp_path_factory.mktemp("metis") / "g.graph", "\n".join(lines) + "\n"))
    assert data.num_nodes == num_nodes
    assert edges_of(data) == [(u, v) for u, v, _ in expected]
    if weighted:
        assert data.edge_data["weight"].tolist() == [w for *_, w in expected]
    assert ("weight" in data.edge_data) == weighted
    assert ("vertex_size" in data.node_data) == sizes
    if num_weights:
        assert data.node_data["vertex_weight"].tolist() == [
            [100 * u + k for k in range(num_weights)] for u in range(num_nodes)
        ]


def test_sample_has_the_published_counts():
    path = DATA / "formats" / "4elt.graph"
    if not path.is_file():
        pytest.skip(f"{path} is not there; name the folder of public graphs with NUGNN_DATA")
    data = read_metis(path)
    assert (data.num_nodes, data.num_edges) == (15606, 2 * 45878)


def test_gzip_and_blank_lines_of_isolated_nodes(tmp_path):
    path = tmp_path / "g.graph.gz"
    path.write_bytes(gzip.compress(b"% c\n3 1\n\n3\n2\n\n\n"))
    data = read_metis(path)
    assert (data.name, data.num_nodes, edges_of(data)) == ("g", 3, [(1, 2), (2, 1)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no header"),
        ("% only a comment\n", "no header"),
        ("3\n", "line 1, the header '3', is not 'nodes edges"),
        ("a b\n", "line 1, the header 'a b'"),
        ("0 0\n", "an empty graph"),
        ("1 0 2\n\n", "format 002 is unknown"),
        ("1 0 0001\n\n", "format 0001 is unknown"),
        ("1 0 000 1\n\n", "1 weights per node do not go with format 000"),
        ("3 1\n2\n1\n", "announces 3 nodes, 2 lines follow"),
        ("2 1\n2\n1\n2\n", "announces 2 nodes, 3 lines follow"),
        ("2 1\n2\nx\n", "line 3 holds 'x'"),
        ("2 1\n-2\n1\n", "line 2 holds '-2'"),
        ("2 1\n2\n0\n", "line 3 lists neighbour 0; allowed are 1 to 2"),
        ("2 1\n3\n1\n", "line 2 lists neighbour 3; allowed are 1 to 2"),
        ("2 1\n1\n1\n", "line 2 lists neighbour 1; a node is not its own neighbour"),
        ("3 2\n2\n1 3\n\n", r"line 3 \(node 2\) lists neighbour 3, line 4 does not list 2 at all"),
        ("2 1 1\n2 5\n1 6\n", r"line 2 \(node 1\) lists neighbour 2 with weight 5, line 3 does not list 1 as often"),
        ("2 1 1\n2\n1 6\n", "line 2 has 1 numbers; expected 0 numbers about the node, .* in pairs"),
        ("2 1 10\n\n1 1\n", "line 2 has 0 numbers; expected 1 numbers about"),
        ("2 2\n2\n1\n", "announces 2 edges, the lines list 2 neighbours, that is 1 edges; the header counts every"),
        ("2 5\n2\n1\n", "announces 5 edges"),
        ("2 1\n9999999999999999999\n1\n", "line 2 holds '9999999999999999999'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"g\.graph: .*{message}|g\.graph: {message}"):
        read_metis(write(tmp_path / "g.graph", text))
