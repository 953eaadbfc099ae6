"""``nugnn train``, ``evaluate`` and ``predict`` on samples: settings, networks, refusals, what the run folder holds."""

from __future__ import annotations

import csv
import json
import re
import sys
import types
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from nugnn import cli, sample_sets
from nugnn.config import TrainConfig
from nugnn.datasets.samples import load_samples, registry
from nugnn.networks import CNN, MLP
from nugnn.options import ConfigError
from nugnn.sample_config import SampleConfig
from nugnn.sample_run import build_model, fit_arguments
from nugnn.settings_file import read_config


def _settings(*words: str) -> Any:
    """What ``nugnn train`` makes of ``name=value`` words."""
    return cli.gather_settings(dict(word.split("=", 1) for word in words), {})


def test_the_data_set_decides_which_settings_there_are() -> None:
    assert isinstance(_settings("dataset=digits"), TrainConfig)
    assert isinstance(_settings("dataset=Digits_Images"), SampleConfig)
    assert _settings("dataset=mnist").lr == 3e-3 and _settings("dataset=text:x").lr == 1e-3
    assert _settings("dataset=cora").lr == 0.01 and _settings("dataset=cora").schedule == "constant"
    assert [_settings("dataset=mnist", f"epochs={epochs}").warmup_epochs for epochs in (1, 30)] == [0.1, 1.0]
    assert _settings("dataset=mnist", "schedule=constant").warmup_epochs == 0
    graphs, samples = ({entry.name for entry in fields(kind)} for kind in (TrainConfig, SampleConfig))
    for name in graphs - samples:
        with pytest.raises(
            ConfigError, match=rf"--{name.replace('_', '-')} belongs to graphs, and --dataset mnist names"
        ):
            _settings("dataset=mnist", f"{name}=1")
    for name in samples - graphs:
        with pytest.raises(
            ConfigError, match=rf"--{name.replace('_', '-')} belongs to samples, and --dataset cora names"
        ):
            _settings("dataset=cora", f"{name}=1")


@pytest.mark.parametrize("name", [*sample_sets.NAMES, *sample_sets.PATH_KINDS])
def test_each_name_of_samples_has_a_reader(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which refuses, if anything, what it reads: not the name."""
    monkeypatch.setattr(registry, "load_image_set", lambda known, *_, **__: known)
    is_kind = name in sample_sets.PATH_KINDS
    spec = f"{name}:{tmp_path}" if is_kind else name
    assert sample_sets.names_samples(spec)
    if is_kind:
        with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
            load_samples(spec)
    else:
        assert load_samples(spec).name == name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("digits-image", "did you mean digits-images, digits?"),
        ("mnsit", "did you mean mnist?"),
        ("fashion-minst", "did you mean fashion-mnist?"),
        ("imagefolders", "did you mean imagefolder:PATH?"),
        ("imagefolders:/nowhere", "no such file; did you mean imagefolder:/nowhere?"),
        ("digits-images:64", "digits-images names samples, which nugnn.datasets.samples.load_samples reads, and takes"),
    ],
)
def test_a_name_of_samples_with_a_slip_is_told_from_a_graph(
    name: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "--dataset", name])
    assert left.value.code == 2 and meant in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model=gcn",), "--model gcn is not allowed; allowed: auto, mlp, cnn, transformer"),
        (("heads=3",), "--heads 3 has no effect on --model cnn, only on transformer"),
        (("model=resnet18", "dropout=0.1"), "--dropout 0.1 has no effect on --model resnet18"),
        (("momentum=0.5",), "--momentum 0.5 has no effect on --optimizer adamw"),
        (("workers=2", "batch_split=3,4", "batch_size=9"), "--batch-split 3,4 adds up to 7, but --batch-size is 9"),
        (("workers=2", "batch_split=3"), "--batch-split: 1 number for 2 workers"),
        (("workers=2", "batch_split=even", "shares=0.5,0.5"), "--batch-split is even, but shares are given"),
        (("batch_split=-3",), "allowed: auto, even, or samples of each worker"),
        (("batch_size=0",), "--batch-size 0 is not allowed"),
        (("decay_epochs=3",), "--decay-epochs has an effect on --schedule step alone"),
        (("epochs=2", "warmup_epochs=2"), "--warmup-epochs is 2, must be from 0 to less than epochs, 2"),
        (("optimizer=lion",), "allowed: adamw, adam, sgd"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _settings("dataset=mnist", *words)
    assert message in str(caught.value)


def test_settings_come_back_from_their_file(tmp_path: Path) -> None:
    config = _settings("dataset=text:some/reviews.tsv", "workers=2", "batch_split=18,6", "model=transformer")
    assert (config.batch_size, config.batch_split, config.network) == (24, (18, 6), "transformer")
    assert config.out_dir == Path("runs/reviews-transformer")
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert read_config(path) == config
    again = cli.gather_settings({"config": str(path), "workers": "3", "batch_split": "auto"}, {})
    assert again.batch_size == 24 and again.fixed_settings() == config.fixed_settings()
    assert cli.gather_settings({"config": str(path), "lr": "0.5"}, {}).fixed_settings() != config.fixed_settings()
    assert "--batch-split 18,6" in cli.settings_text(config)


def _table(folder: Path) -> Path:
    rows = np.random.default_rng(0).normal(size=(80, 3))
    lines = [f"{a},{b},{c},{'up' if a + b > 0 else 'down'}" for a, b, c in rows]
    path = folder / "rows.csv"
    path.write_text("\n".join(["a,b,c,label", *lines]) + "\n")
    return path


def test_networks_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, table = load_samples("digits-images"), load_samples(f"csv:{_table(tmp_path)}")
    cnn = build_model(SampleConfig(dataset="digits-images", hidden=4, layers=3, dropout=0.5), images)
    assert isinstance(cnn, CNN) and cnn.classify.in_features == 64 and cnn.dropout.p == 0.5
    assert isinstance(build_model(SampleConfig(dataset="csv:x"), table), MLP)
    with pytest.raises(ConfigError, match="takes texts, and digits-images is images; use --model cnn"):
        build_model(SampleConfig(dataset="digits-images", model="transformer"), images)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ConfigError, match=r"needs the package torchvision .*nugnn\[vision\]"):
        build_model(SampleConfig(dataset="digits-images", model="resnet18"), images)
    stand_in = types.ModuleType("torchvision.models")
    stand_in.resnet18 = lambda num_classes: nn.Linear(1, num_classes)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", stand_in)
    with pytest.raises(ConfigError, match="takes images of 3 channels, and digits-images is images of 1"):
        build_model(SampleConfig(dataset="digits-images", model="resnet18"), images)
    object.__setattr__(images, "input_shape", (3, 8, 8))
    assert build_model(SampleConfig(dataset="digits-images", model="resnet18"), images).out_features == 10
    own = tmp_path / "own.py"
    own.write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self, width, num_classes, hidden=4):\n"
        "        super().__init__(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))\n"
    )
    net = build_model(SampleConfig(dataset="csv:x", model=f"{own}:Net", hidden=6), table)
    assert net[0].in_features == 3 and net[0].out_features == 6  # type: ignore[index,union-attr]
    with pytest.raises(ConfigError, match="would have no effect"):
        build_model(SampleConfig(dataset="csv:x", model=f"{own}:Net", dropout=0.5), table)


def test_every_setting_reaches_training() -> None:
    """Each option either goes into a call of `fit`, builds the model or the data, or says where results go."""
    elsewhere = {"dataset", "data_dir", "val_fraction", "test_fraction", "image_size", "tokens"}
    elsewhere |= {"vocabulary_size", "max_length"}
    elsewhere |= {"model", "layers", "hidden", "heads", "norm", "dropout", "out", "predictions", "tensorboard"}
    renamed = {"data_workers": "num_data_workers", "shift": "augment", "flip": "augment"}
    renamed |= {f"grad_sync_{name}": "grad_sync" for name in ("rank", "feedback", "exact")}
    arguments = fit_arguments(SampleConfig(dataset="mnist"))
    for entry in fields(SampleConfig):
        assert entry.name in elsewhere or renamed.get(entry.name, entry.name) in arguments, entry.name


def test_a_run_its_folder_and_what_is_asked_of_it_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = ["--dataset", f"csv:{_table(tmp_path)}", "--epochs", "3", "--batch-size", "10", "--out", str(out)]
    with pytest.raises(SystemExit) as done:
        cli.main(["train", *words, "--predictions", "--lr", "0.05", "--json"])
    assert not done.value.code
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((out / "result.json").read_text())
    assert result["batch_split"] == [10] and result["samples_per_second"] > 0 and result["model"] == "mlp"
    assert sum(result["num_samples"].values()) == 80
    names = {"config.yaml", "metrics.jsonl", "result.json", "model.safetensors", "predictions.npy", "preparation.json"}
    assert names | {"checkpoint"} == {path.name for path in out.iterdir()}
    with pytest.raises(SystemExit):
        cli.main(["evaluate", str(out), "--json"])
    measured = json.loads(capsys.readouterr().out)
    assert {split: measured[split] for split in ("train", "val", "test")} == {
        split: pytest.approx(result[split]) for split in ("train", "val", "test")
    }
    with pytest.raises(SystemExit):
        cli.main(["predict", str(out), "--out", str(tmp_path / "p.csv")])
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    kinds = ["down", "up"]
    assert [kinds.index(row["class"]) for row in rows] == np.load(out / "predictions.npy").tolist()
    for words, message in [
        (["predict", str(out), "--workers", "2"], "which one process evaluates"),
        (["evaluate", str(out), "--dataset", "cora"], "--dataset is for graphs"),
        (
            ["partition", "--dataset", "mnist", "--workers", "2", "--out", str(tmp_path / "parts")],
            "names samples, and this needs a graph",
        ),
    ]:
        with pytest.raises(SystemExit) as refused:
            cli.main(words)
        assert refused.value.code == 2 and message in capsys.readouterr().err
    (tmp_path / "rows.csv").write_text((tmp_path / "rows.csv").read_text().replace("up", "over"))
    with pytest.raises(SystemExit) as refused:
        cli.main(["evaluate", str(out)])
    assert refused.value.code == 2 and "no longer gives what" in capsys.readouterr().err
