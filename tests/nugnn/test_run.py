"""nugnn train for real: what the run folder holds, what is printed, and how a run is interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

import user_models
from exactness import make_graph
from nugnn import cli
from nugnn.config import TrainConfig
from nugnn.graph_run import build_model, prepare
from nugnn.models import WithNodeEmbedding
from nugnn.options import ConfigError
from nugnn.predictions import predicted_classes
from nugnn.run import run_from_config

USER_MODELS = Path(user_models.__file__)
NUGNN = Path(sys.executable).with_name("nugnn")
SPLITS = ("train", "val", "test")


def test_the_run_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = TrainConfig(dataset="digits", epochs=4, hidden=16, norm="batch", out=str(out), predictions=True)
    events: list[dict[str, Any]] = []
    result = run_from_config(config, events.append)
    assert TrainConfig.from_file(out / "config.yaml") == config
    assert json.loads((out / "result.json").read_text()) == result
    assert {"dataset": "digits", "model": "gcn", "workers": 1, "device": "cpu", "metric": "accuracy"}.items() <= (
        result.items()
    )
    assert result["versions"]["torch"] == torch.__version__ and result["shares"] == [1.0]
    epochs = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [epoch["number"] for epoch in epochs] == [1, 2, 3, 4]
    assert all({"loss", *SPLITS, "seconds"} <= epoch.keys() for epoch in epochs)
    best = epochs[result["best_epoch"] - 1]
    assert best["val"] == result["val"] == max(epoch["val"] for epoch in epochs)
    assert best["test"] == result["test"] and epochs[-1]["test"] == result["last_test"]
    assert [event["epoch"] for event in events if event["kind"] == "epoch"] == [1, 2, 3, 4]
    assert [event["text"] for event in events if event["kind"] == "stage"] == ["reading digits", "training"]

    # weights and predictions are those of the best epoch: they have its test accuracy
    data = prepare(config)
    assert data.labels is not None
    predictions = np.load(out / "predictions.npy")
    assert predictions.dtype == np.int64 and predictions.shape == (data.num_nodes,)
    hits = torch.from_numpy(predictions)[data.test_nodes] == data.labels[data.test_nodes]
    assert hits.double().mean().item() == pytest.approx(result["test"], abs=1e-12)
    build_model(config, data).load_state_dict(load_file(out / "model.safetensors"))

    run_from_config(config.replaced(epochs=1, predictions=False))
    assert not (out / "predictions.npy").exists(), "a file of an earlier run would pass for one of this"
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 1


def test_epochs_without_an_evaluation_have_nulls(tmp_path: Path) -> None:
    run_from_config(TrainConfig(dataset="digits", epochs=3, evaluate_every=2, out=str(tmp_path / "out")))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    epochs = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [epoch["val"] is None for epoch in epochs] == [True, False, False]


def test_predictions_of_several_labels_are_zeros_and_ones() -> None:
    data = make_graph(multilabel=True)
    logits = torch.tensor([[0.5, -0.5, 0.0, 2.0]])
    assert predicted_classes(logits, data).tolist() == [[1, 0, 0, 1]]
    assert predicted_classes(logits, make_graph()).tolist() == [3]


def test_learnable_rows_stand_in_for_missing_features() -> None:
    config = TrainConfig(dataset="d", hidden=12)
    model = build_model(config, make_graph(features=False))
    assert isinstance(model, WithNodeEmbedding) and model.embedding.weight.shape == (61, 12)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": f"{USER_MODELS}:TwoLayers", "hidden": 32}, "--hidden 32 would have no effect: TwoLayers"),
        ({"model": f"{USER_MODELS}:Wide", "layers": 3}, "has no parameter 'layers'"),
        ({"model": f"{USER_MODELS}:Wide", "aggregator": "sum"}, "has no parameter 'aggregator'"),
    ],
)
def test_options_that_a_users_class_does_not_take_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_model(TrainConfig(dataset="d", **values), make_graph())


def test_options_that_a_users_class_takes_reach_it() -> None:
    model = build_model(TrainConfig(dataset="d", model=f"{USER_MODELS}:Wide", hidden=32), make_graph())
    assert model.norm.num_features == 32


OWN_DEFAULTS = """
import pathlib, torch
from torch.nn import functional

with open(pathlib.Path(__file__).with_suffix(".imports"), "a") as file:
    file.write("imported, ")

class Net(torch.nn.Linear):
    def __init__(self, in_features, num_classes, layers, hidden=32, activation=functional.elu, dropout=0.1, norm=None):
        super().__init__(in_features, num_classes)
        self.made_of = layers, hidden, activation.__name__, dropout, norm

class AnyOption(Net):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
"""


def test_what_is_not_given_has_the_default_of_a_users_class(tmp_path: Path) -> None:
    """Also in a later look at the run, whose settings are all given; the file runs once."""
    file = tmp_path / "net.py"
    file.write_text(OWN_DEFAULTS)

    def made_of(**given: Any) -> tuple[Any, ...]:
        config = cli.gather_settings({"dataset": "digits", "model": f"{file}:Net", **given}, {})
        assert isinstance(config, TrainConfig)
        made = build_model(config, make_graph())
        again = cli.gather_settings(asdict(config), {})
        assert again == config and build_model(config, make_graph()).made_of == made.made_of
        return made.made_of  # type: ignore[return-value]

    assert made_of() == (2, 32, "elu", 0.1, None)
    assert made_of(hidden="64", dropout="0.5", layers="3") == (3, 64, "elu", 0.5, None)
    assert (tmp_path / "net.imports").read_text() == "imported, "
    shown = cli.settings_text(cli.gather_settings({"dataset": "digits", "model": f"{file}:Net"}, {}))
    assert "--hidden 32 --dropout 0.1" in shown and "layers" not in shown
    file.write_text(OWN_DEFAULTS.replace("hidden=32", "hidden=128"))
    assert made_of()[1] == 128


def test_a_class_that_takes_any_option_is_told_which_it_got(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(OWN_DEFAULTS)
    words = r"keyword argument 'heads' \(.*net.py, line \d+\); AnyOption takes any keyword, so that it got all"
    with pytest.raises(ValueError, match=words):
        build_model(TrainConfig(dataset="d", model=f"{tmp_path / 'net.py'}:AnyOption"), make_graph())


def nugnn(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(NUGNN), *arguments], capture_output=True, text=True, timeout=200, check=False, **options)


def test_json_alone_on_standard_output_with_a_users_model_on_two_workers(tmp_path: Path) -> None:
    """The model's file imports its neighbour, and neither is on the workers' path."""
    (tmp_path / "my_layers.py").write_text(USER_MODELS.read_text())
    (tmp_path / "net.py").write_text("import my_layers\n\nclass Net(my_layers.Wide):\n    pass\n")
    out = tmp_path / "run"
    done = nugnn(
        *("train", "--dataset", "digits", "--model", f"{tmp_path / 'net.py'}:Net", "--hidden", "4"),
        *("--workers", "2", "--shares", "0.7,0.3", "--epochs", "2", "--out", str(out), "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert result == json.loads((out / "result.json").read_text())
    assert result["workers"] == 2 and len(result["peak_memory_bytes"]) == 2
    # METIS is asked for 0.7; each part may be off by the partitioner's tolerance of 5 %
    assert result["shares"][0] == pytest.approx(0.7, abs=0.05) and sum(result["shares"]) == pytest.approx(1.0)
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    assert (out / "logs" / "worker-1.log").exists()


@pytest.mark.usefixtures("forked_workers")
def test_a_model_that_depends_on_the_split_is_refused_with_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"{USER_MODELS}:WithPairNorm"
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--dataset", "digits", "--model", model, "--workers", "2", "--out", str(tmp_path / "run")])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "nugnn: error: norm (PairNorm) gives another result on 3 parts than on one" in error
    assert "Traceback" not in error


def test_ctrl_c_ends_all_and_leaves_nothing_behind(tmp_path: Path) -> None:
    out, scratch = tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    run = subprocess.Popen(
        [str(NUGNN), "train", "--dataset", "digits", "--workers", "2", "--epochs", "1000000", "--out", str(out)],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size):
        assert run.poll() is None and time.monotonic() < deadline, "no epoch came"
        time.sleep(0.05)
    workers = psutil.Process(run.pid).children(recursive=True)
    assert len(workers) == 2 and len(list(scratch.glob("nugnn-job-*"))) == 1
    run.send_signal(signal.SIGINT)
    _, error = run.communicate(timeout=120)
    assert run.returncode == 130
    assert re.fullmatch(r"nugnn: interrupted after epoch \d+ of 1000000, checkpoint written; .* --resume\n", error)
    assert len(list((out / "checkpoint").iterdir())) == 1
    assert psutil.wait_procs(workers, timeout=120)[1] == []
    assert list(scratch.glob("nugnn-job-*")) == []
    assert not (out / "result.json").exists()
