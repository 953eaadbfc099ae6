"""What is said of a data folder that is none, by graphs and samples alike."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nugnn.datasets import info, list_datasets, load
from nugnn.datasets.data_folder import data_folder
from nugnn.datasets.samples import load_samples


def test_a_folder_is_taken_and_none_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to(tmp_path)
    assert data_folder(None) is None and data_folder("~") == tmp_path
    assert data_folder(tmp_path / "link") == tmp_path / "link"


def test_the_environment_names_the_folder_where_nobody_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one/mine", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "one" / "mine" / "edges.csv").write_text("src,dst\n0,1\n1,2\n")
    monkeypatch.setenv("NUGNN_DATA", str(tmp_path / "one"))
    assert load("mine").num_nodes == 3 and info("mine").path == tmp_path / "one" / "mine"
    assert "mine" in {entry.name for entry in list_datasets()}
    with pytest.raises(ValueError, match="unknown dataset 'mine'"):
        load("mine", tmp_path / "other")
    monkeypatch.setenv("NUGNN_DATA", str(tmp_path / "none"))
    for reads, built_in in ((load, "digits"), (load_samples, "digits-images")):
        with pytest.raises(ValueError, match="none does not exist; correct --data-dir or NUGNN_DATA"):
            reads(built_in)  # type: ignore[operator]
    monkeypatch.setenv("NUGNN_DATA", "")
    assert load("digits").num_nodes > 0


@pytest.mark.parametrize("reads", [load, load_samples], ids=["graph", "samples"])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing", r"missing does not exist; correct --data-dir or NUGNN_DATA"),
        ("file", "file is a file"),
        ("pipe", "pipe is a pipe;"),
        ("gone", "gone is a link to nothing;"),
        ("x" * 5000, r"^the data folder \.\.\.x{200} does not exist"),
        ("~nobody-of-that-name/data", "is in the home of a user who is not known here"),
    ],
)
def test_what_is_no_folder_is_named_where_it_is_not_needed(
    name: str, problem: str, reads: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone").symlink_to("nowhere")
    with pytest.raises(ValueError, match=problem):
        reads("digits" if reads is load else "digits-images", name)  # type: ignore[operator]
