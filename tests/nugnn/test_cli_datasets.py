"""nugnn datasets: names, what is known of them, and a graph got ready."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nugnn import cli


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
    code, out, _ = call(capsys, "list", "--json")
    by_name = {entry["name"]: entry for entry in json.loads(out)}
    assert by_name["digits"]["from"] == "built-in" and "triangle" not in by_name
    assert not (folder.parent / "cache").exists()


def test_info_reads_and_downloads_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "info", "OGBN_Products", "--json")
    entry = json.loads(out)
    assert code == 0 and (entry["nodes"], entry["classes"], entry["split"]) == (2449029, 47, "196615/39323/2213091")
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
