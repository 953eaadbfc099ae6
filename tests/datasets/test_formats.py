"""From a path to its reader."""

import pytest
import torch

from nugnn.datasets import FORMATS, GraphData, read_path, write_npz
from nugnn.datasets.formats import format_of

EDGES = "src,dst\n0,1\n1,0\n"


def test_every_suffix_has_one_format_and_a_page():
    suffixes = [suffix for known in FORMATS for suffix in known.suffixes]
    assert len(suffixes) == len(set(suffixes))
    assert all(known.page.endswith(".md") for known in FORMATS)
    assert format_of("A.MTX.GZ").name == "Matrix Market"
    assert format_of("notes.pdf") is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("e.csv", EDGES),
        ("m.graph", "2 1\n2\n1\n"),
        ("m.mtx", "%%MatrixMarket matrix coordinate pattern symmetric\n2 2 1\n2 1\n"),
        ("s.txt", "0 1\n1 0\n"),
        ("s.tsv", "0\t1\n1\t0\n"),
        ("s.edges", "0 1\n1 0\n"),
    ],
)
def test_the_suffix_decides(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    data = read_path(tmp_path / name)
    assert sorted(zip(data.src.tolist(), data.dst.tolist(), strict=True)) == [(0, 1), (1, 0)]
    assert read_path(tmp_path / name, name="other").name == "other"


def test_folders(tmp_path):
    (tmp_path / "edges.csv").write_text(EDGES)
    assert read_path(tmp_path).num_nodes == 2
    (tmp_path / "nodes.csv").write_text("id\n0\n1\n2\n")
    assert read_path(tmp_path).num_nodes == 3
    assert read_path(tmp_path / "edges.csv").num_nodes == 3, "edges.csv with a nodes.csv beside it is the folder"
    folder = tmp_path / "g"
    folder.mkdir()
    write_npz(GraphData(name="g", num_nodes=4, src=torch.tensor([0]), dst=torch.tensor([1])), folder / "g.npz")
    assert read_path(folder).num_nodes == 4


def test_num_nodes_is_for_lists_of_edges(tmp_path):
    (tmp_path / "e.csv").write_text(EDGES)
    assert read_path(tmp_path / "e.csv", num_nodes=5).num_nodes == 5
    with pytest.raises(ValueError, match="num_nodes is 0"):
        read_path(tmp_path / "e.csv", num_nodes=0)
    (tmp_path / "m.graph").write_text("2 1\n2\n1\n")
    with pytest.raises(ValueError, match=r"m\.graph: the number of nodes is in the file; METIS takes no num_nodes"):
        read_path(tmp_path / "m.graph", num_nodes=5)


def test_what_no_reader_knows_is_refused_with_the_formats(tmp_path):
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(ValueError, match=r"a\.pdf: no format goes by the name .* reads npz .*METIS \(\.graph"):
        read_path(tmp_path / "a.pdf")
    with pytest.raises(ValueError, match=r"holds no edges\.csv"):
        read_path(tmp_path)
    with pytest.raises(ValueError, match=r"none\.csv: no such file or folder"):
        read_path(tmp_path / "none.csv")
