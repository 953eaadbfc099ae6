"""nugnn datasets: names, what is known of them, and a graph got ready."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nugnn import cli
from nugnn.datasets.sources import PUBLISHED


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["datasets", *arguments])
    captured = capsys.readouterr()
    code = exit_.value.code
    return (0 if code is None else int(code)), captured.out, captured.err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUGNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NUGNN_DATA", raising=False)
    data = tmp_path / "data"
    data.mkdir()
    arrays = {"num_nodes": 3, "adj_indptr": [0, 1, 2, 3], "adj_indices": [1, 2, 0], "label": [0, 1, 0]}
    np.savez(data / "triangle.npz", **{key: np.asarray(value) for key, value in arrays.items()})
    return data


def test_list_fits_the_screen_and_shows_the_users_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "list", "--data-dir", str(folder))
    assert code == 0 and max(map(len, out.splitlines())) <= 80 and "…" not in out
    assert {"triangle", "digits", "ogbn-products", "cora"} <= {
        line.split()[0] for line in out.splitlines() if line.strip()
    }
    assert out.endswith("cifar10\nsamples of yours: imagefolder:PATH, text:PATH, csv:PATH\n")
    code, out, _ = call(capsys, "list", "--json")
    by_name = {entry["name"]: entry for entry in json.loads(out)}
    assert by_name["digits"]["from"] == "built-in" and "triangle" not in by_name
    assert not (folder.parent / "cache").exists()


def test_info_reads_and_downloads_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "info", "OGBN_Products", "--json")
    entry = json.loads(out)
    assert code == 0 and (entry["nodes"], entry["classes"], entry["split"]) == (2449029, 47, "196615/39323/2213091")
    addresses = [file.url for file in PUBLISHED["cora"].source.files]
    code, out, _ = call(capsys, "info", "cora")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert out.splitlines()[-9:] == ["8 files, from", *(f"  {address}" for address in addresses)]
    assert "url " in call(capsys, "info", "dblp")[1] and "url " not in out
    entry = json.loads(call(capsys, "info", "cora", "--json")[1])
    assert (entry["url"], entry["urls"]) == (addresses[0], addresses)
    code, _, err = call(capsys, "info", "ogbn-product")
    assert code == 2 and "did you mean ogbn-products" in err
    assert not (folder.parent / "cache").exists()


def test_prepare_says_what_is_in_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "prepare", "triangle", "--data-dir", str(folder), "--json")
    figures = json.loads(out)
    assert code == 0 and (figures["nodes"], figures["edges"], figures["classes"]) == (3, 3, 2)
    code, out, _ = call(capsys, "prepare", str(folder / "triangle.npz"))
    assert code == 0 and "one each" in out
    code, _, err = call(capsys, "prepare", "triangel", "--data-dir", str(folder))
    assert code == 2 and "did you mean triangle" in err


@pytest.mark.parametrize("command", [["list"], ["info", "digits"], ["prepare", "digits"]], ids=" ".join)
def test_a_data_folder_that_is_not_there_is_refused_even_where_it_is_not_needed(
    command: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, *command, "--data-dir", str(folder / "nodir"))
    assert (code, out) == (2, "")
    assert err.startswith(f"nugnn: error: the data folder {folder / 'nodir'} does not exist; correct --data-dir")


def test_the_number_of_nodes_of_a_list_of_edges(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edges = folder / "edges.txt"
    edges.write_text("0 1\n1 3\n")
    code, out, _ = call(capsys, "prepare", str(edges), "--json")
    assert code == 0 and json.loads(out)["nodes"] == 3, "the ids that occur"
    code, out, _ = call(capsys, "prepare", str(edges), "--num-nodes", "6", "--json")
    assert code == 0 and json.loads(out)["nodes"] == 6
    code, _, err = call(capsys, "prepare", str(edges), "--num-nodes", "3")
    assert code == 2 and "line 2 is '1 3'; allowed ids are 0 to 2" in err
    with pytest.raises(SystemExit) as exit_:
        out_folder = str(folder / "parts")
        cli.main(["partition", "--dataset", str(edges), "--num-nodes", "6", "--workers", "2", "--out", out_folder])
    assert exit_.value.code in (0, None)
    assert "edges: 6 nodes" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["datasets", "prepare"], ["train", "--dataset"], ["check", "gcn", "--dataset"]])
@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("digits", "'digits' is a name, and what is named knows how many nodes it has"),
        ("triangle", "'triangle' is a name"),
        ("{folder}/triangle.npz", "triangle.npz says itself how many nodes it has"),
        ("{folder}/csv", "csv says itself"),
        ("{folder}/csv/edges.csv", "edges.csv says itself"),
        ("{folder}/m.graph", "m.graph says itself"),
    ],
)
def test_the_number_of_nodes_is_refused_for_data_that_know_it(
    command: list[str], data: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "csv").mkdir()
    (folder / "csv" / "edges.csv").write_text("src,dst\n0,1\n")
    (folder / "csv" / "nodes.csv").write_text("id,label\n0,1\n1,0\n")
    (folder / "m.graph").write_text("2 1\n2\n1\n")
    with pytest.raises(SystemExit) as exit_:
        cli.main([*command, data.format(folder=folder), "--data-dir", str(folder), "--num-nodes", "4"])
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and words in err and err.startswith("nugnn: error: ")


@pytest.mark.parametrize("value", ["0", "-1", "9999999999"])
def test_a_wrong_number_of_nodes_is_refused(value: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "prepare", "edges.txt", "--num-nodes", value)
    assert code == 2 and f"--num-nodes {value} is not allowed; allowed: a whole number from 1" in err
