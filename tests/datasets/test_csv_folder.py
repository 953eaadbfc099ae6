"""CSV: what the columns mean, ids of any kind, and errors that name the row and the value."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nugnn.datasets import make_undirected, read_npz, self_loops, write_npz
from nugnn.datasets.csv_folder import read_csv_folder, read_edges_csv

ISOLATED_TAIL_EDGES = "src,dst\n0,1\n1,2\n2,3\n3,4\n4,5\n5,0\n"
ISOLATED_TAIL_NODES = "node_id,f0,f1,label,split\n" + "".join(
    f"{i},{i}.0,{i * i}.0,{i % 2},{('train', 'valid', 'test')[i % 3]}\n" for i in range(10)
)


def write(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def folder(path, nodes, edges="src,dst\n"):
    write(path / "nodes.csv", nodes)
    write(path / "edges.csv", edges)
    return path


def edges_of(data):
    return list(zip(data.src.tolist(), data.dst.tolist(), strict=True))


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
ids = st.one_of(
    st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=8, unique=True),
    st.lists(texts.filter(lambda text: not re.fullmatch(r"\s*[-+]?(0[xX])?\w*\s*", text)), min_size=1, unique=True),
)


@given(ids=ids, draw=st.data())
def test_ids_of_any_kind_come_back_with_their_nodes(tmp_path_factory, ids, draw):
    ends = st.integers(0, len(ids) - 1)
    edges = draw.draw(st.lists(st.tuples(ends, ends), max_size=10))

    def cell(row):
        return f'"{str(ids[row]).replace(chr(34), chr(34) * 2)}"'

    path = tmp_path_factory.mktemp("any")
    folder(
        path,
        "id,x\n" + "".join(f"{cell(row)},{row}\n" for row in range(len(ids))),
        "src,dst\n" + "".join(f"{cell(u)},{cell(v)}\n" for u, v in edges),
    )
    data = read_csv_folder(path)
    assert edges_of(data) == edges, "edges stay in their order, and name rows of nodes.csv"
    assert data.features[:, 0].tolist() == list(range(len(ids)))
    assert (list(range(len(ids))) if data.original_ids is None else data.original_ids.tolist()) == ids


def test_every_column_arrives_where_it_belongs(tmp_path):
    nodes = "id,feat_1,feat_0,label,split,year,_note\na,1,2,0,train,1999,x\nb,3,4,,val,2000,\nc,5,6,2,,2001,y\n"
    folder(tmp_path, nodes.replace("b,3,4,,val", "b,3,4,1,val"), "src,dst,weight,kind,t\na,b,0.5,3,0.25\nc,c,1,4,2\n")
    data = read_csv_folder(tmp_path, name="g")
    assert (data.name, data.num_nodes, data.num_classes) == ("g", 3, 3)
    assert data.features.tolist() == [[2, 1], [4, 3], [6, 5]]
    assert data.features.dtype == torch.float32
    assert data.labels.tolist() == [0, 1, 2]
    assert [nodes.tolist() for nodes in data.split] == [[0], [1], []]
    assert data.node_data["year"].tolist() == [1999, 2000, 2001]
    assert data.edge_data["weight"].dtype == torch.float32
    assert data.edge_data["kind"].dtype == torch.int64
    assert data.edge_data["t"].tolist() == [0.25, 2]
    assert data.original_ids.tolist() == ["a", "b", "c"]


def test_label_matrix_and_masks(tmp_path):
    folder(tmp_path, "id,x,label_0,label_1,train,val,test\n0,1,1,0,1,0,0\n1,2,1,1,0,TRUE,\n2,3,0,0,,,1\n")
    data = read_csv_folder(tmp_path)
    assert data.labels.tolist() == [[1, 0], [1, 1], [0, 0]]
    assert (data.metric, [nodes.tolist() for nodes in data.split]) == ("micro_f1", [[0], [1], [2]])
    assert data.original_ids is None, "the ids are the rows"


def test_original_ids_survive_transforms_npz_and_hash(tmp_path):
    folder(tmp_path, "id\nb\na\n", "src,dst\nb,a\n")
    data = read_csv_folder(tmp_path)
    for changed in (make_undirected(data), self_loops(data, "add")):
        assert changed.original_ids.tolist() == ["b", "a"]
    write_npz(data, tmp_path / "g.npz")
    assert read_npz(tmp_path / "g.npz", name=data.name).content_hash() == data.content_hash()


def test_gzip_and_whole_numbers_that_later_have_fractions(tmp_path):
    rows = "".join(f"{i % 7},{(i + 1) % 7},{i}\n" for i in range(900_000)) + "0,1,0.5\n"
    write(tmp_path / "edges.csv.gz", gzip.compress(("src,dst,t\n" + rows).encode(), 1))
    data = read_csv_folder(tmp_path)
    assert data.num_edges == 900_001
    assert data.edge_data["t"][[5, -1]].tolist() == [5, 0.5]


def test_datasets_03_self_edge_is_there_once_when_made_undirected(tmp_path):
    data = make_undirected(read_edges_csv(write(tmp_path / "self_edge.csv", "src,dst\n0,1\n1,2\n2,2\n")))
    assert sorted(edges_of(data)) == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 2)]
    assert data.num_edges == 5
    assert torch.bincount(data.dst).tolist() == [1, 2, 2]


@pytest.mark.parametrize("missing", ["", "NaN", "nan", "NA", "-1"])
def test_datasets_04_missing_labels_are_minus_one(tmp_path, missing):
    nodes = f"node_id,label,split\n0,0,train\n1,{missing},\n2,2,train\n3,{missing},\n4,1,train\n"
    data = read_csv_folder(folder(tmp_path, nodes))
    assert data.labels.tolist() == [0, -1, 2, -1, 1]
    assert data.num_classes == 3


def test_datasets_04_train_node_without_a_label_is_refused_with_count_and_example(tmp_path):
    nodes = "node_id,label,split\n0,0,train\n1,,train\n2,2,\n3,,\n4,1,\n"
    with pytest.raises(ValueError, match=r"1 of 2 train nodes have no label, for example node 1"):
        read_csv_folder(folder(tmp_path, nodes))


def test_datasets_05_byte_order_mark_and_crlf(tmp_path):
    data = read_edges_csv(write(tmp_path / "bom.csv", b"\xef\xbb\xbfsrc,dst\r\n0,1\r\n1,2\r\n2,0\r\n"))
    assert edges_of(data) == [(0, 1), (1, 2), (2, 0)]


def test_datasets_05_missing_column_lists_those_found(tmp_path):
    path = write(tmp_path / "missing_column.csv", "src,weight\n0,0.5\n1,0.25\n")
    with pytest.raises(ValueError, match=r"missing_column\.csv: no column 'dst' or 'target'; .* found are src, weight"):
        read_edges_csv(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("src,dst\n0,1\n-5,2\n3,1\n", r"row 3, column 'src' is -5; allowed are 0 to 3, for 4 nodes"),
        ("src,dst\n0,1\n2,9\n", r"row 3, column 'dst' is 9; allowed are 0 to 3, for 4 nodes"),
    ],
)
def test_datasets_06_id_out_of_range_names_row_value_and_range(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"bad\.csv: {message}"):
        read_edges_csv(write(tmp_path / "bad.csv", text), num_nodes=4)


@pytest.mark.parametrize(("row", "column", "value"), [("-5,2", "src", -5), ("2,9", "dst", 9)])
def test_datasets_06_edge_to_a_node_that_is_not_listed(tmp_path, row, column, value):
    folder(tmp_path, "id\n0\n1\n2\n3\n", f"src,dst\n0,1\n{row}\n")
    with pytest.raises(ValueError, match=rf"edges\.csv: row 3, column '{column}' is {value}, .* lists 0 to 3"):
        read_csv_folder(tmp_path)


def test_datasets_06_negative_id_is_refused_without_a_node_count(tmp_path):
    with pytest.raises(ValueError, match=r"row 3, column 'src' is -5; ids start at 0"):
        read_edges_csv(write(tmp_path / "bad.csv", "src,dst\n0,1\n-5,2\n3,1\n"))


def test_datasets_07_isolated_nodes_at_the_end_count(tmp_path):
    data = read_csv_folder(folder(tmp_path, ISOLATED_TAIL_NODES, ISOLATED_TAIL_EDGES))
    assert (data.num_nodes, data.num_edges, data.features.shape) == (10, 6, (10, 2))
    assert data.features[9].tolist() == [9, 81]
    assert [nodes.tolist() for nodes in data.split] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


def test_datasets_07_table_with_fewer_rows_than_nodes_is_refused(tmp_path):
    short = "".join(ISOLATED_TAIL_NODES.splitlines(keepends=True)[:6])
    with pytest.raises(ValueError, match=r"edges\.csv: row 6, column 'dst' is 5, an id that nodes\.csv has not"):
        read_csv_folder(folder(tmp_path, short, ISOLATED_TAIL_EDGES))


def test_edges_alone_have_the_nodes_that_occur_and_keep_their_ids(tmp_path):
    data = read_edges_csv(write(tmp_path / "e.csv", "source,target\n30,10\n10,20\n"))
    assert (edges_of(data), data.original_ids.tolist()) == ([(2, 0), (0, 1)], [10, 20, 30])
    data = read_edges_csv(write(tmp_path / "e.csv", "source,target\nbob,ann\nNA,bob\n"))
    assert (edges_of(data), data.original_ids.tolist()) == ([(2, 1), (0, 2)], ["NA", "ann", "bob"])
    assert read_edges_csv(write(tmp_path / "e.csv", "src,dst\n1,0\n"), num_nodes=4).num_nodes == 4


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ("id\n0\n0\n", "src,dst\n", r"nodes\.csv: rows 2 and 3 have the same id 0"),
        ('id\n"a"\nb\na\n', "src,dst\n", r"nodes\.csv: rows 2 and 4 have the same id 'a'"),
        ("id\n", "src,dst\n", r"nodes\.csv: there is no row below the header"),
        ("id,id\n0,1\n", "src,dst\n", r"nodes\.csv: two columns are called 'id'"),
        ("id,\n0,1\n", "src,dst\n", r"nodes\.csv: column 2 has no name"),
        ("id,node_id\n0,1\n", "src,dst\n", r"columns 'id' and 'node_id' mean the same"),
        ("x\n0\n", "src,dst\n", r"nodes\.csv: no column 'id' or 'node_id'; the columns found are x"),
        ("", "src,dst\n", r"nodes\.csv: the first row is empty"),
        ("id,x\n0,1\n1,abc\n", "src,dst\n", r"nodes\.csv: row 3, column 'x' holds 'abc', not a number"),
        ("id,x\n0,1\n1,\n", "src,dst\n", r"nodes\.csv: row 3, column 'x' is empty"),
        ("id,x\n0,1\n1,inf\n", "src,dst\n", r"nodes\.csv: row 3, column 'x' is inf"),
        ("id,x\n0,1\n1,2,3\n", "src,dst\n", r"nodes\.csv: row 3 has 3 cells, the header has 2 \(id, x\)"),
        ("id,label\n0,1.5\n", "src,dst\n", r"row 2, column 'label' is 1\.5; number the classes from 0"),
        ("id,label\n0,-inf\n", "src,dst\n", r"row 2, column 'label' is -inf"),
        ("id,label\n0,cat\n", "src,dst\n", r"row 2, column 'label' holds 'cat', not a number"),
        ("id,label,label_0\n0,1,1\n", "src,dst\n", r"both label and label_0"),
        ("id,label_0,label_2\n0,1,1\n", "src,dst\n", r"label_1 is missing"),
        ("id,label_0\n0,2\n", "src,dst\n", r"row 2, column 'label_0' is 2; a label matrix holds 0 and 1"),
        ("id,split\n0,tarin\n", "src,dst\n", r"row 2, column 'split' is 'tarin'; allowed are 'train', 'val'"),
        ("id,split,train\n0,,\n", "src,dst\n", r"both split and train"),
        ("id,train\n0,2\n", "src,dst\n", r"row 2, column 'train' is '2'; allowed are '1', 'true'"),
        ("id,feat_0,what\n0,1,abc\n", "src,dst\n", r"row 2, column 'what' is 'abc', not a number; drop the column"),
        ("id\n0\n1\n", "src,dst\n0,\n", r"edges\.csv: row 2, column 'dst' is empty; every node needs an id"),
        ("id\n0\n1\n", "src,dst,w\n0,1,\n", r"edges\.csv: row 2, column 'w' is empty"),
        ("id\n0\n1\n", "src,dst,weight\n0,1,inf\n", r"edges\.csv: row 2, column 'weight' is inf; give a finite number"),
        ("id\n0\n1\n", "src,dst\n0,x\n", r"edges\.csv: row 2, column 'dst' is 'x', an id that nodes\.csv has not"),
        ("id,lable\n0,1\n", "src,dst\n", r"nodes\.csv: the column 'lable' .*did you mean 'label'\?"),
        ("id,Labels,x\n0,1,2\n", "src,dst\n", r"nodes\.csv: the column 'Labels' .*did you mean 'label'\?"),
        ("id,label,spilt\n0,1,train\n", "src,dst\n", r"nodes\.csv: the column 'spilt' .*did you mean 'split'\?"),
        ("id,train,tset\n0,1,0\n", "src,dst\n", r"nodes\.csv: the column 'tset' .*did you mean 'test'\?"),
        ("idd,x\n0,1\n", "src,dst\n", r"no column 'id' or 'node_id'; did you mean 'idd' to be it\? the columns found"),
        ("id\n0\n1\n", "scr,dst\n0,1\n", r"edges\.csv: no column 'src' or 'source'; did you mean 'scr' to be it\?"),
        ("id\n0\n1\n", "src,dst,weigth\n0,1,1\n", r"edges\.csv: the column 'weigth' .*did you mean 'weight'\?"),
        ("id;x\n0;1\n", "src,dst\n", r"nodes\.csv: the header is 'id;x': the separator looks like ';'; save"),
        ("id\n0\n1\n", "src\tdst\n0\t1\n", r"edges\.csv: the header is .*: the separator looks like '\\t'"),
        ("id,x\n0,1\n1,NA\n", "src,dst\n", r"nodes\.csv: row 3, column 'x' is 'NA', which is no number; fill it"),
        ("id,x\n0,1\n1,nan\n", "src,dst\n", r"nodes\.csv: row 3, column 'x' is 'nan', which is no number; fill it"),
        ("id\n0\n1\n", "src,dst,w\n0,1,N/A\n", r"edges\.csv: row 2, column 'w' is 'N/A', which is no number"),
        (f"id\n{'y' * 300}\n", "src,dst\n", r"has 300 characters, 256 are allowed"),
        ("id\n\xff\n".encode("latin-1"), "src,dst\n", r"nodes\.csv: .*UTF"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, nodes, edges, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_csv_folder(folder(tmp_path, nodes, edges))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("src,dst\n", "there is no edge, so the nodes are unknown"),
        (
            "src,dst\n1,2\n3,1O\n",
            "row 3, column 'dst' holds '1O', not a whole number; ids are all whole numbers or all",
        ),
        ("src,dst\na,\n", "row 2, column 'dst' is empty"),
        ("src,dst\n1,2\n2,\n", "row 3, column 'dst' is empty; ids are all whole numbers or all text"),
        ("src,dst\n1,2\n2,NA\n", "row 3, column 'dst' is 'NA', which is no number; ids are all whole numbers"),
        ("src;dst\n1;2\n", "the header is 'src;dst': the separator looks like ';'"),
    ],
)
def test_edges_alone_that_cannot_be_read(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"e\.csv: {message}"):
        read_edges_csv(write(tmp_path / "e.csv", text))


def test_names_that_are_no_slip_stay_what_they_are(tmp_path):
    nodes = "id,label,labels,rain,tester\n0,0,1.5,2,3\n1,1,2.5,3,4\n"
    data = read_csv_folder(folder(tmp_path, nodes, "src,dst,weigh_in\n0,1,7\n"))
    assert data.features.tolist() == [[1.5, 2, 3], [2.5, 3, 4]]
    assert data.edge_data["weigh_in"].tolist() == [7]


def test_damaged_gzip_and_missing_files_are_named(tmp_path):
    whole = gzip.compress(b"src,dst\n" + b"".join(b"%d,%d\n" % (i, i * 7 % 1000) for i in range(1000)))
    for length in (0, 5, 30, len(whole) // 2, len(whole) - 3):
        write(tmp_path / "edges.csv.gz", whole[:length])
        with pytest.raises(ValueError, match=r"edges\.csv\.gz"):
            read_csv_folder(tmp_path)
    with pytest.raises(ValueError, match=r"no such file"):
        read_edges_csv(tmp_path / "none.csv")
    (tmp_path / "edges.csv").write_text("src,dst\n")
    with pytest.raises(ValueError, match=r"both edges\.csv and edges\.csv\.gz"):
        read_csv_folder(tmp_path)
    with pytest.raises(ValueError, match=r"no edges\.csv in this folder"):
        read_csv_folder(tmp_path / "..")


def test_ids_are_kept_as_int64_or_text(tmp_path):
    data = read_edges_csv(write(tmp_path / "e.csv", "src,dst\n5,7\n"))
    assert data.original_ids.dtype == np.int64
    data = read_edges_csv(write(tmp_path / "e.csv", "src,dst\né,zz\n"))
    assert data.original_ids.dtype.kind == "U"


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_table_of_nodes_that_is_no_file_is_not_passed_over(kind: str, tmp_path: Path) -> None:
    (tmp_path / "edges.csv").write_text("src,dst\n0,1\n1,2\n")
    nodes = tmp_path / "nodes.csv"
    nodes.mkdir() if kind == "folder" else nodes.symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"nodes\.csv is (a folder|a link to nothing); put the table itself there"):
        read_csv_folder(tmp_path)
