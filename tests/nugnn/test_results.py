"""A finished run opened again: evaluate, predict, and what is wrong with a folder that is none."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nugnn import cli
from nugnn.config import TrainConfig
from nugnn.finished_run import FinishedRun, scores
from nugnn.run import run_from_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    config = TrainConfig(
        dataset="digits", epochs=8, hidden=8, norm="batch", out=str(out), predictions=True, tensorboard=True,
        timeline=True,
    )  # fmt: skip
    run_from_config(config)
    return out


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    captured = capsys.readouterr()
    code = exit_.value.code
    return (0 if code is None else int(code)), captured.out, captured.err


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("workers", [(), ("--workers", "2", "--shares", "0.8,0.2")])
def test_evaluate_finds_the_figures_of_the_run(
    run: Path, workers: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, "evaluate", str(run), "--json", *workers)
    found, result = json.loads(out), json.loads((run / "result.json").read_text())
    assert code == 0 and found["metric"] == "accuracy"
    assert (found["val"], found["test"]) == (result["val"], result["test"])
    code, out, _ = call(capsys, "evaluate", str(run))
    assert code == 0 and f"{result['test']:.2%}" in out and max(map(len, out.splitlines())) <= 80


def test_predict_writes_what_the_run_wrote(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classes = np.load(run / "predictions.npy")
    code, out, _ = call(capsys, "predict", str(run), "--out", str(tmp_path / "again.npy"))
    assert code == 0 and "1797 nodes" in out
    assert (np.load(tmp_path / "again.npy") == classes).all()
    call(capsys, "predict", str(run), "--out", str(tmp_path / "logits.npy"), "--logits")
    logits = np.load(tmp_path / "logits.npy")
    assert logits.dtype == np.float32 and (logits.argmax(1) == classes).all()
    call(capsys, "predict", str(run), "--out", str(tmp_path / "table.csv"))
    rows = list(csv.reader((tmp_path / "table.csv").open()))
    assert rows[0] == ["node", "class"] and [int(row[1]) for row in rows[1:]] == classes.tolist()
    assert [int(row[0]) for row in rows[1:]] == list(range(len(classes)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.npy", "logits.npy", "table.csv"]


def test_a_timeline_shows_the_phases_of_a_step(run: Path) -> None:
    spans = [event for event in json.loads((run / "timeline.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert {"forward", "backward", "optimizer"} <= {span["name"] for span in spans}
    assert {span["pid"] for span in spans} == {0}
    assert "steps" not in json.loads((run / "result.json").read_text())["ranks"][0]


def test_tensorboard_holds_every_epoch(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    epochs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for tag, key in (("loss", "loss"), ("accuracy/val", "val")):
        scalars = events.Scalars(tag)
        assert [scalar.step for scalar in scalars] == [epoch["number"] for epoch in epochs]
        assert np.allclose([scalar.value for scalar in scalars], [epoch[key] for epoch in epochs])


@pytest.mark.parametrize("command", ["evaluate", "predict"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / "model.safetensors").unlink(), "model.safetensors missing"),
        (lambda run: (run / "model.safetensors").write_bytes(b"cut"), "incomplete or not a safetensors file"),
        (lambda run: (run / "config.yaml").write_text("hidden: 9\ndataset: digits\n"), "reshaped"),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_a_folder_that_is_no_finished_run(
    run: Path, tmp_path: Path, command: str, damage: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    damage(broken)  # type: ignore[operator]
    code, _, err = call(capsys, command, str(broken))
    assert code == 2 and words in err and "Traceback" not in err


def test_predict_on_another_graph_without_labels(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = FinishedRun.open(run).load_data()
    arrays = {"num_nodes": 3, "adj_indptr": [0, 1, 2, 3], "adj_indices": [1, 2, 0], "feat": data.features[:3].numpy()}
    np.savez(tmp_path / "new.npz", **{key: np.asarray(value) for key, value in arrays.items()})
    target = tmp_path / "new.csv"
    code, _, err = call(capsys, "predict", str(run), "--dataset", str(tmp_path / "new.npz"), "--out", str(target))
    assert code == 0, err
    assert len(target.read_text().splitlines()) == 4
    code, _, err = call(capsys, "evaluate", str(run), "--dataset", str(tmp_path / "new.npz"))
    assert code == 2 and "no labels" in err


def test_labels_without_a_split_are_nothing_to_evaluate_on(run: Path) -> None:
    data = FinishedRun.open(run).load_data()
    nobody = dict.fromkeys(("train_nodes", "val_nodes", "test_nodes"), data.train_nodes[:0])
    with pytest.raises(ValueError, match="has labels, and no node for training, validation or test to compare them"):
        scores(replace(data, splits=(), **nobody), torch.zeros(data.num_nodes, 10))


def test_a_graph_that_the_model_cannot_take_is_refused_with_what_it_takes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = {"num_nodes": 3, "adj_indptr": [0, 1, 2, 3], "adj_indices": [1, 2, 0], "feat": np.ones((3, 5), np.float32)}
    np.savez(tmp_path / "narrow.npz", **{key: np.asarray(value) for key, value in arrays.items()})
    code, _, err = call(capsys, "predict", str(run), "--dataset", str(tmp_path / "narrow.npz"))
    said = "was trained on 'digits' with 64 features and 10 classes, and 'narrow' has 5 features and 10 classes; give a"
    assert code == 2 and said in " ".join(err.split())


def test_another_graph_does_not_inherit_the_number_of_nodes(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    config = FinishedRun.open(copy).config.replaced(num_nodes=1797)
    (copy / "config.yaml").write_text(config.to_yaml())
    assert FinishedRun.open(copy).config.num_nodes == 1797
    assert FinishedRun.open(copy, dataset="other.txt").config.num_nodes is None
    assert FinishedRun.open(copy, dataset="other.txt", num_nodes=5).config.num_nodes == 5


def test_weights_of_another_model_are_listed(run: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    weights = load_file(broken / "model.safetensors")
    first = next(iter(weights))
    save_file(
        {f"renamed.{first}" if name == first else name: x for name, x in weights.items()}, broken / "model.safetensors"
    )
    finished = FinishedRun.open(broken)
    with pytest.raises(ValueError, match=f"missing: {first}.*unexpected: renamed.{first}"):
        finished.load_model(finished.load_data())


@pytest.mark.usefixtures("forked_workers")
def test_partition_and_train_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "parts"
    options = ("--dataset", "digits", "--workers", "2", "--shares", "0.7,0.3")
    code, out, _ = call(capsys, "partition", *options, "--out", str(cache))
    assert code == 0 and "halo rows" in out and max(map(len, out.splitlines()[:-1])) <= 80
    (made,) = [path for path in cache.iterdir() if path.is_dir()]
    before = {path.name: path.stat().st_mtime_ns for path in made.iterdir()}
    train = ("train", *options, "--epochs", "2", "--out", str(tmp_path / "run"), "--partition-cache", str(cache))
    code, _, err = call(capsys, *train)
    assert code == 0, err
    assert {path.name: path.stat().st_mtime_ns for path in made.iterdir()} == before
    assert [path for path in cache.iterdir() if path.is_dir()] == [made]
    code, out, _ = call(capsys, "partition", *options, "--out", str(cache), "--json")
    figures = json.loads(out)
    assert figures["folder"] == str(made) and sum(part["num_nodes"] for part in figures["parts"]) == 1797


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workers", "2", "--shares", "0.7"), "1 share for --workers 2"),
        (("--workers", "5000"), "5000 workers for 1797 nodes"),
        (("--workers", "2", "--partitioner", "scotch"), "--partitioner scotch"),
        (("--workers", "2", "--undirected", "maybe"), "--undirected maybe"),
    ],
)
def test_partition_refuses(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "partition", "--dataset", "digits", "--out", str(tmp_path / "p"), *arguments)
    assert code == 2 and words in err
    assert not (tmp_path / "p").exists()


def test_ids_of_the_graph_go_with_the_predictions(tmp_path: Path) -> None:
    import types

    from nugnn.predictions import write_predictions

    data = types.SimpleNamespace(original_ids=np.array(["b", "a"]))
    write_predictions(tmp_path / "x.csv", torch.tensor([[1, 0], [0, 1]]), data)  # type: ignore[arg-type]
    assert (tmp_path / "x.csv").read_text() == "node,class_0,class_1\nb,1,0\na,0,1\n"
    write_predictions(tmp_path / "x.npy", torch.tensor([1, 0]), data)  # type: ignore[arg-type]
    assert np.load(tmp_path / "x.ids.npy", allow_pickle=False).tolist() == ["b", "a"]
