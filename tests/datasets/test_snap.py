"""SNAP edge lists: blanks of any kind, ids with gaps, the comment of counts, and labels beside the file."""

import gzip
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.datasets.snap import read_snap

DATA = Path(os.environ.get("NUGNN_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


def write(path, text):
    path.write_text(text)
    return path


def edges_of(data):
    ids = range(data.num_nodes) if data.original_ids is None else data.original_ids.tolist()
    return [(ids[u], ids[v]) for u, v in zip(data.src.tolist(), data.dst.tolist(), strict=True)]


blanks = st.sampled_from([" ", "\t", "  ", " \t"])


@given(
    edges=st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)), min_size=1, max_size=12),
    blank=blanks,
    lead=st.sampled_from(["", " "]),
    end=st.sampled_from(["\n", "\r\n", " \n"]),
    between=st.sampled_from(["", "# comment\n", "\n", "% comment\n"]),
    weighted=st.booleans(),
)
def test_edges_and_ids_are_what_was_written(tmp_path_factory, edges, blank, lead, end, between, weighted):
    lines = [
        lead + blank.join([str(u), str(v), *([str(number / 4)] if weighted else [])]) + end
        for number, (u, v) in enumerate(edges)
    ]
    data = read_snap(write(tmp_path_factory.mktemp("snap") / "s.txt", "# head\n" + between.join(lines)))
    assert edges_of(data) == edges
    assert data.num_nodes == len({end for edge in edges for end in edge})
    if weighted:
        assert data.edge_data["weight"].tolist() == [number / 4 for number in range(len(edges))]


def test_sample_has_the_published_counts():
    path = DATA / "formats" / "email-Eu-core.txt"
    if not path.is_file():
        pytest.skip(f"{path} is not there; name the folder of public graphs with NUGNN_DATA")
    data = read_snap(path)
    assert (data.num_nodes, data.num_edges, data.num_classes) == (1005, 25571, 42)
    assert int((data.src == data.dst).sum()) == 642
    assert int((data.labels < 0).sum()) == 0


def test_comment_of_counts_adds_isolated_nodes(tmp_path, caplog):
    data = read_snap(write(tmp_path / "s.txt", "# Nodes: 5 Edges: 2\n0\t1\n1\t2\n"))
    assert (data.num_nodes, data.original_ids) == (5, None)
    with caplog.at_level(logging.WARNING, "nugnn.datasets"):
        data = read_snap(write(tmp_path / "s.txt", "# Nodes: 5 Edges: 3\n0\t1\n1\t9\n"))
    assert (data.num_nodes, data.original_ids.tolist()) == (3, [0, 1, 9])
    assert "announces 3 edges, it has 2 lines" in caplog.text
    assert "announces 5 nodes, 3 ids occur" in caplog.text


def test_num_nodes_makes_ids_rows(tmp_path):
    path = write(tmp_path / "s.edges", "0 3\n3 1\n")
    data = read_snap(path, num_nodes=6)
    assert (data.num_nodes, data.src.tolist(), data.dst.tolist(), data.original_ids) == (6, [0, 3], [3, 1], None)
    with pytest.raises(ValueError, match=r"s\.edges: line 1 is '0 3'; allowed ids are 0 to 2"):
        read_snap(path, num_nodes=3)


def test_labels_beside_the_file(tmp_path):
    write(tmp_path / "other-labels.txt", "nonsense")
    write(tmp_path / "s-labels.txt", "# id class\n20 1\n10 0\n40 2\n")
    data = read_snap(write(tmp_path / "s.txt", "10 20\n20 30\n"))
    assert data.original_ids.tolist() == [10, 20, 30, 40]
    assert data.labels.tolist() == [0, 1, -1, 2]
    write(tmp_path / "s-department-labels.txt", "10 0\n")
    with pytest.raises(ValueError, match=r"both s-department-labels\.txt and s-labels\.txt"):
        read_snap(tmp_path / "s.txt")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("10 0\n10 1\n", "node 10 has more than one line"),
        ("10 x\n", "line 1 is '10 x'; expected a node's id and its class"),
        ("10 0\n20\n", "line 2 is '20'"),
        ("10 -2\n", "the class of node 10 is -2"),
    ],
)
def test_labels_that_cannot_be_read(tmp_path, labels, message):
    write(tmp_path / "s-labels.txt", labels)
    with pytest.raises(ValueError, match=rf"s-labels\.txt: {message}"):
        read_snap(write(tmp_path / "s.txt", "10 20\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no edge in it"),
        ("# nothing\n", "there is no edge in it"),
        ("1\n", "line 1 is '1'; expected two ids and perhaps a weight"),
        ("1 2 3 4\n", "line 1 is '1 2 3 4'"),
        ("# c\n\nsrc,dst\n1,2\n", r"line 3 is 'src,dst'; .* read when its name ends in \.csv"),
        ("1 2\n2 3 0.5\n", "line 2 is '2 3 0.5'; expected two ids, the ids whole numbers from 0, as in every line"),
        ("1 2 1\n# c\n2 3\n", "line 3 is '2 3'; expected two ids and a weight"),
        ("1 2\n-5 3\n", "line 2 is '-5 3'"),
        ("1 2\n2 b\n", "line 2 is '2 b'"),
        ("1 2 0.5\n2 3 heavy\n", "line 2 is '2 3 heavy'"),
        ("1 2 0.5\n2 3 nan\n", "line 2 is '2 3 nan'; the weight has to be finite"),
        ("1 2 0.5\n2 3 1e39\n", "line 2 is '2 3 1e39'; the weight has to be finite"),
        ("# Nodes: 99999999999\n1 2\n", "announces 99999999999 nodes for 1 edges"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"s\.txt: .*{message}"):
        read_snap(write(tmp_path / "s.txt", text))


def test_damaged_gzip_is_named(tmp_path):
    whole = gzip.compress(b"".join(b"%d %d\n" % (i, i * 7 % 1000) for i in range(1000)))
    path = tmp_path / "s.txt.gz"
    path.write_bytes(whole)
    assert read_snap(path).num_edges == 1000
    for length in (0, 5, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"s\.txt\.gz"):
            read_snap(path)
