"""Planetoid's pickles: the stored graphs come back exactly, and nothing a file names is run."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from nugnn.datasets import load
from nugnn.datasets.planetoid import PARTS, read_planetoid
from planetoid_files import python2_pickle, python3_pickle, small, write_raw

FOLDER = Path(os.environ.get("NUGNN_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data")


@pytest.mark.parametrize("dump", [python2_pickle, python3_pickle, pickle.dumps], ids=["python 2", "python 3", "newest"])
def test_graph_comes_back_exactly(tmp_path, dump):
    data = small()
    assert read_planetoid(write_raw(tmp_path, "tiny", data, dump), "tiny").content_hash() == data.content_hash()


@pytest.mark.parametrize("name", ["cora", "citeseer"])
def test_stored_public_graphs_come_back_exactly_from_raw_files(tmp_path, name):
    if not (FOLDER / name / f"{name}.npz").is_file():
        pytest.skip(f"{name}/{name}.npz is not under {FOLDER}; name a folder of public graphs with NUGNN_DATA")
    stored = load(name, FOLDER)
    assert read_planetoid(write_raw(tmp_path, name, stored), name).content_hash() == stored.content_hash()


class Payload:
    def __init__(self, call, *arguments):
        self.reduced = (call, arguments)

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Payload(os.system, "echo run > ran"), r"(posix|nt)\.system"),
        (Payload(eval, "open('ran', 'w')"), r"builtins\.eval"),
        (Payload(getattr, "x", "upper"), r"builtins\.getattr"),
        (np.zeros(2).view(np.recarray), r"numpy.*recarray|numpy.*record"),
        (sp.coo_matrix(np.eye(2)), r"scipy\.sparse\._coo\.coo_matrix"),
    ],
)
@pytest.mark.parametrize("part", ["x", "y", "graph"])
def test_other_names_are_refused_by_name_and_not_run(tmp_path, monkeypatch, value, named, part):
    monkeypatch.chdir(tmp_path)
    write_raw(tmp_path, "tiny", small())
    (tmp_path / f"ind.tiny.{part}").write_bytes(pickle.dumps(value))
    with pytest.raises(ValueError, match=rf"ind\.tiny\.{part} is not .* read safely: it names {named}, which"):
        read_planetoid(tmp_path, "tiny")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("part", PARTS)
def test_missing_or_cut_file_is_named(tmp_path, part):
    path = write_raw(tmp_path, "tiny", small()) / f"ind.tiny.{part}"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if part != "test.index" else b"")
    with pytest.raises(ValueError, match=rf"ind\.tiny\.{part}"):
        read_planetoid(tmp_path, "tiny")
    path.unlink()
    with pytest.raises(ValueError, match=rf"ind\.tiny\.{part} is missing"):
        read_planetoid(tmp_path, "tiny")


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("x", np.zeros((4, 9)), "holds ArrayState, not a sparse matrix"),
        ("y", sp.csr_matrix(np.eye(4, 3)), "where an array is expected"),
        ("y", np.array([["a"]]), "its type is 'U1'"),
        ("y", np.zeros(4), r"has shape \(4,\)"),
        ("y", np.zeros((5, 3)), "x is 4 x 9 and its labels 5 x 3"),
        ("tx", sp.csr_matrix(np.eye(2, 8)), "tx is 2 x 8"),
        ("graph", [1, 2], "holds list, not a dictionary"),
        ("graph", {0: 1}, "neighbours of 0 are no list"),
        ("graph", {0: [1], 3: [507]}, "edge 3 - 507 is out of range for 507 nodes"),
        ("graph", {0: [-1]}, "edge 0 - -1 is out of range"),
        ("graph", {"0": [1]}, "edge '0' - 1"),
    ],
)
def test_content_that_does_not_fit_is_refused(tmp_path, part, value, message):
    write_raw(tmp_path, "tiny", small())
    (tmp_path / f"ind.tiny.{part}").write_bytes(python2_pickle(value))
    with pytest.raises(ValueError, match=message):
        read_planetoid(tmp_path, "tiny")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("504\n504\n", "each row once"),
        ("503\n506\n", "from 504 on"),
        ("504\n", "lists 1 ids from 504 for 2 test rows"),
        ("504\n900000000\n", "goes up to 900000000"),
        ("504\nx\n", "one node id per line"),
    ],
)
def test_test_index_is_checked(tmp_path, ids, message):
    write_raw(tmp_path, "tiny", small())
    (tmp_path / "ind.tiny.test.index").write_text(ids)
    with pytest.raises(ValueError, match=message):
        read_planetoid(tmp_path, "tiny")


WHOLE = {}


@given(part=st.sampled_from(PARTS), place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_changed_byte_is_a_clean_error_or_another_valid_graph(tmp_path_factory, part, place, byte):
    if not WHOLE:
        folder = write_raw(tmp_path_factory.mktemp("whole"), "tiny", small())
        WHOLE.update({name: (folder / f"ind.tiny.{name}").read_bytes() for name in PARTS}, folder=folder)
    path = WHOLE["folder"] / f"ind.tiny.{part}"
    content = bytearray(WHOLE[part])
    content[int(place * len(content))] = byte
    path.write_bytes(content)
    try:
        read_planetoid(path.parent, "tiny")
    except ValueError as error:
        assert str(error)
    finally:
        path.write_bytes(WHOLE[part])
