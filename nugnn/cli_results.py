"""``nugnn predict`` and ``nugnn evaluate``: what a finished run says about a graph."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from nugnn._counted import counted
from nugnn._regular_file import require_place
from nugnn.cli_errors import errors_reported, refuse_torchrun
from nugnn.options import ConfigError
from nugnn.screen import say, screen, show_table

if TYPE_CHECKING:
    from torch import Tensor

    from nugnn.datasets.graph_data import GraphData
    from nugnn.datasets.samples.sample_data import SampleData
    from nugnn.sample_family import SampleFamily

_RUN = typer.Argument(metavar="RUN", help="Folder of a finished run, as --out of nugnn train named it.")
_DATASET = typer.Option(None, help="Another graph with the same features; the run's own otherwise.")
_DATA_DIR = typer.Option(None, help="Folder to look for data sets in.")
_NUM_NODES = typer.Option(None, help="Number of nodes, for --dataset as a path to a list of edges.")
_ALONE = "Run it without torchrun: --workers N starts N processes on this host"
_WORKERS = typer.Option(1, min=1, help="Number of worker processes.")
_DEVICE = typer.Option("auto", help="Where to compute: auto, cpu, cuda, or one for each worker.")
_SHARES = typer.Option("even", help="Part of the graph each worker gets: even, or fractions such as 0.6,0.4.")


def evaluate(
    run: str = _RUN,
    dataset: str | None = _DATASET,
    data_dir: str | None = _DATA_DIR,
    num_nodes: int | None = _NUM_NODES,
    split: int | None = typer.Option(None, min=0, help="Another of the data set's splits."),
    workers: int = _WORKERS,
    shares: str = _SHARES,
    device: str = _DEVICE,
    as_json: bool = typer.Option(False, "--json", help="Print the numbers as JSON."),
) -> None:
    """Measure a finished run's best model on the train, validation and test nodes, or samples."""
    with errors_reported():
        refuse_torchrun("evaluate", _ALONE)
        graph_only = {"dataset": dataset, "num_nodes": num_nodes, "split": split}
        samples = _on_samples(run, data_dir, graph_only, workers, shares, device)
        if samples is not None:
            _show_samples(run, *samples, as_json)
            return
        data, logits = _logits(run, dataset, data_dir, num_nodes, split, workers, shares, device)
        from nugnn.finished_run import scores

        found = scores(data, logits)
        if as_json:
            plain = {name: None if math.isnan(value) else value for name, value in found.items()}
            print(json.dumps({"run": run, "dataset": data.name, "metric": data.metric, **plain}, indent=2))
            return
        table = _scores_table(f"{run} on {data.name}", "nodes", data.metric)
        for (name, value), nodes in zip(found.items(), data.split, strict=True):
            table.add_row(name, str(len(nodes)), "none" if math.isnan(value) else f"{value:.2%}")
        show_table(screen(), table)


def predict(
    run: str = _RUN,
    dataset: str | None = _DATASET,
    data_dir: str | None = _DATA_DIR,
    num_nodes: int | None = _NUM_NODES,
    out: Path | None = typer.Option(
        None, help="File to write, .npy or .csv (node, class); default: predictions.npy in the run's folder."
    ),
    logits: bool = typer.Option(False, "--logits", help="Write the model's outputs, float32, instead of classes."),
    workers: int = _WORKERS,
    shares: str = _SHARES,
    device: str = _DEVICE,
) -> None:
    """Write the class of every node of a graph, or of every test sample, in order, by a finished run's best model."""
    with errors_reported():
        refuse_torchrun("predict", _ALONE)
        target = Path(run) / "predictions.npy" if out is None else out
        if target.suffix not in (".npy", ".csv"):
            raise ConfigError(f"--out {target} is not allowed; allowed: a file that ends in .npy or .csv")
        if out is not None:
            require_place(out, "--out")
        what = "outputs" if logits else "classes"
        graph_only = {"dataset": dataset, "num_nodes": num_nodes}
        samples = _on_samples(run, data_dir, graph_only, workers, shares, device)
        if samples is not None:
            from nugnn.sample_results import write_classes

            outputs = samples[1].predict_all(0).cpu()
            write_classes(target, outputs.float() if logits else outputs.argmax(1), samples[0])
            say(screen(), f"{target}: {what} of {counted(len(outputs), 'test sample')} of {samples[0].name}")
            return
        data, rows = _logits(run, dataset, data_dir, num_nodes, None, workers, shares, device)
        from nugnn.predictions import predicted_classes, write_predictions

        values = rows.float() if logits else predicted_classes(rows, data)
        write_predictions(target, values, data)
        say(screen(), f"{target}: {what} of {counted(data.num_nodes, 'node')} of {data.name}")


def _on_samples(
    run: str, data_dir: str | None, graph_only: dict[str, Any], workers: int, shares: str, device: str
) -> tuple[SampleData, SampleFamily] | None:
    """The samples of a run and its best model on them; None for a run on a graph."""
    from nugnn.sample_config import SampleConfig
    from nugnn.settings_file import read_config

    path = Path(run) / "config.yaml"
    config = read_config(path) if path.is_file() else None
    if not isinstance(config, SampleConfig):
        return None
    for name, value in graph_only.items():
        if value is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is for graphs, and {run} is a run on samples; it is measured on its own")
    if workers != 1 or shares != "even":
        raise ConfigError(f"{run} is a run on samples, which one process evaluates; leave --workers and --shares out")
    from nugnn.finished_run import finished_folder
    from nugnn.sample_results import opened

    folder = data_dir or os.environ.get("NUGNN_DATA") or config.data_dir
    here = config.replaced(data_dir=folder, workers=1, shares="even", batch_split="auto", device="cpu")
    return opened(finished_folder(run), here, device)


def _show_samples(run: str, data: SampleData, family: SampleFamily, as_json: bool) -> None:
    from nugnn.datasets.samples.sample_data import num_samples

    found = family.evaluate(0, with_train=True)
    if as_json:
        plain = {name: None if math.isnan(value) else value for name, value in found.items()}
        print(json.dumps({"run": run, "dataset": data.name, "metric": data.metric, **plain}, indent=2))
        return
    table = _scores_table(f"{run} on {data.name}", "samples", data.metric)
    for name, part in data.parts:
        table.add_row(name, str(num_samples(part)), "none" if math.isnan(found[name]) else f"{found[name]:.2%}")
    show_table(screen(), table)


def _scores_table(title: str, counted: str, metric: str) -> Table:
    table = Table("split", title=title, title_justify="left")
    for name in (counted, metric):
        table.add_column(name, justify="right")
    return table


def _logits(
    run: str,
    dataset: str | None,
    data_dir: str | None,
    num_nodes: int | None,
    split: int | None,
    workers: int,
    shares: str,
    device: str,
) -> tuple[GraphData, Tensor]:
    from nugnn.config import TrainConfig

    # checked before torch loads
    fractions = TrainConfig(dataset="any", workers=workers, shares=shares, device=device).fractions
    from nugnn.finished_run import FinishedRun
    from nugnn.inference import infer

    folder: dict[str, Any] = {"data_dir": data_dir or os.environ.get("NUGNN_DATA") or None}
    finished = FinishedRun.open(run, dataset=dataset, num_nodes=num_nodes, split=split, **folder)
    data = finished.load_data()
    model = finished.load_model(data)
    return data, infer(
        model,
        data,
        workers=workers,
        shares=fractions,
        partitioner=finished.config.partitioner,
        device=device,
        precision=finished.config.precision,
        timeout=finished.config.timeout,
    )
