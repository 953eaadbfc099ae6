"""The ``nugnn`` command: reads options, hands the settings on, and shows the result.

Nothing here imports torch or DGL before a run starts, so that ``--help`` and a wrong option answer at once.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from nugnn import cli_calibration, cli_datasets, cli_partition, cli_plan, cli_profile, cli_results, cli_simulate
from nugnn._counted import counted
from nugnn._regular_file import no_file, shown
from nugnn.cli_errors import errors_reported
from nugnn.cli_options import parameter, setting_parameters
from nugnn.config import BUILT_IN_MODELS, MODEL_OPTIONS, TrainConfig
from nugnn.member import member_from
from nugnn.options import ConfigError, flag_of, option_default, option_spec
from nugnn.progress import RunProgress
from nugnn.sample_config import RunConfig, SampleConfig, config_kind, refuse_others
from nugnn.screen import MOST_COLUMNS, complain, say, screen, show_table
from nugnn.settings import model_refusal
from nugnn.settings_file import read_recipe, read_settings
from nugnn.torchrun_cores import take_cores

_OPTIONS = {entry.name: entry for kind in (SampleConfig, TrainConfig) for entry in fields(kind)}
"""Of both families; where they share a name, as graphs have it."""
_BOOLEAN_FLAGS = {flag_of(name) for name, entry in _OPTIONS.items() if option_spec(entry).kind is bool}
_CHOICES = {flag_of(name): option_spec(entry).choices for name, entry in _OPTIONS.items() if option_spec(entry).choices}
_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; leaves through SystemExit with the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with errors_reported():
        if given[:1] in (["train"], ["partition"], ["plan"], ["simulate"]):
            given = spell_out_flags(given, _BOOLEAN_FLAGS)
            _refuse_left_out_values(given)
    app(args=given, prog_name="nugnn")


def spell_out_flags(arguments: Sequence[str], flags: set[str]) -> list[str]:
    """Turn ``--flag false``, ``--flag=0`` into ``--no-flag``; to a parser the first means True and a stray word.

    Raises:
        ConfigError: The value is not a truth value, or ``--no-flag`` has one.

    >>> spell_out_flags(["train", "--undirected", "False", "--lr", "1"], {"--undirected"})
    ['train', '--no-undirected', '--lr', '1']
    """
    spelled: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        flag, equals, value = argument.partition("=")
        plain = flag.replace("--no-", "--", 1)
        if plain not in flags:
            spelled.append(argument)
            continue
        has_value = bool(equals)
        if not has_value and remaining and not remaining[0].startswith("-"):
            value, has_value = remaining.pop(0), True
        if has_value and (flag != plain or value.lower() not in _TRUE | _FALSE):
            raise ConfigError(f"{flag} {value}: write {plain} or --no-{plain[2:]}, without a value")
        spelled.append(f"--no-{plain[2:]}" if has_value and value.lower() in _FALSE else flag)
    return spelled


def _refuse_left_out_values(arguments: Sequence[str]) -> None:
    """A parser would take the next option for the value, and fall over what follows."""
    for argument, after in zip(arguments, [*arguments[1:], "--"], strict=True):
        if argument in _CHOICES and after.startswith("--"):
            *first, last = map(str, _CHOICES[argument])
            raise ConfigError(f"{argument} takes {', '.join(first)}{' or ' if first else ''}{last}")


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    print("nugnn", importlib.metadata.version("nugnn"))
    for name in ("torch", "dgl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            print(name, importlib.metadata.version(name))
    raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", is_eager=True, callback=_show_version, help="Show versions."),
) -> None:
    """Full-graph GNN training over unequal devices, exactly: P unequal parts give the same model as one device."""


def _train(**given: Any) -> None:
    """Train a model.

    Settings come from the defaults, --recipe, --config and the options given, in this order: the last one wins.
    """
    with errors_reported():
        as_json = given.pop("as_json")
        member = member_from(os.environ)
        if member is not None:  # torchrun started several of this process
            take_cores()  # before torch is loaded, which asks how many threads it has
            from nugnn.torchrun import train_as_member

            train_as_member(
                member,
                lambda: gather_settings(given, os.environ),
                lambda config, train: _run(config, as_json, train=train),
            )
            return
        _run(gather_settings(given, os.environ), as_json)


def _run(config: RunConfig, as_json: bool, **options: Any) -> None:
    """Train, and show how it goes and what came out."""
    from nugnn.run import run_from_config

    console = screen(quiet=as_json)
    say(console, settings_text(config))
    told: set[str] = set()
    with RunProgress(console, config.epochs) as progress:

        def show(event: dict[str, Any]) -> None:
            if event["kind"] == "note":
                told.add(event["text"])
            progress.on_event(event)

        result = run_from_config(config, on_event=show, **options)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        show_table(console, result_table(result))
        if result.get("predicted_epoch_seconds") is not None:
            from nugnn.fit_plan import PLAN_FILE
            from nugnn.plan_tables import compared_table, held_lines
            from nugnn.planning.plan import read_plan

            show_table(console, compared_table(read_plan(config.out_dir / PLAN_FILE), result["ranks"]))
            for line in held_lines(result["prediction"]):
                say(console, line)
        say(console, f"written to {config.out_dir}")
        for note in result.get("notes", ()):
            if note not in told:
                complain(f"note: {note}")


def gather_settings(given: dict[str, Any], environment: Any) -> RunConfig:
    """The settings of ``nugnn train``: defaults < NUGNN_DATA < recipe < file < options on the command line.

    Args:
        given: Value of each option, None where it was not given; ``recipe`` and ``config`` name where more come from.
        environment: ``os.environ``.

    Raises:
        ConfigError: A value is wrong, or no data set is named.
    """
    settings: dict[str, Any] = {}
    if (member := member_from(environment)) is not None:
        settings["workers"] = member.world_size
    if environment.get("NUGNN_DATA"):
        settings["data_dir"] = environment["NUGNN_DATA"]
    if given.get("recipe") is not None:
        settings |= read_recipe(given["recipe"])
    if given.get("config") is not None:
        settings |= read_settings(given["config"], given.get("dataset"))
    settings |= {name: value for name, value in given.items() if name not in ("recipe", "config") and value is not None}
    if settings.get("cluster") is not None and "workers" not in settings:
        from nugnn.member import host_name
        from nugnn.planning.cluster_file import ClusterError, count_devices

        with contextlib.suppress(ClusterError):  # what is wrong with the file is said when it is used
            settings["workers"] = count_devices(Path(settings["cluster"]), host_name())
    kind = config_kind(settings.get("dataset"))
    refuse_others(kind, settings)
    config = kind(**settings)
    if config.dataset is None:
        raise ConfigError("--dataset is missing: name a data set (--dataset digits) or a recipe (--recipe cora-gcn)")
    _check_model_file(config.model_file)
    if config.model_file is not None and isinstance(config, TrainConfig):
        from nugnn.graph_run import with_own_defaults

        return with_own_defaults(config, settings)
    return config


def _check_model_file(model_file: tuple[Path, str] | None) -> None:
    if model_file is not None and (problem := no_file(model_file[0])) is not None:
        raise ConfigError(f"{shown(model_file[0])}: {problem}; a model of your own is named FILE.py:Class")


def settings_text(config: RunConfig) -> str:
    """Two lines: what differs from the defaults, spelled as options for a shell, and the defaults that matter most."""
    changed = []
    for entry in fields(config):  # type: ignore[arg-type]
        value = getattr(config, entry.name)
        if value == option_default(entry):
            continue
        if isinstance(value, bool):
            changed.append(flag_of(entry.name) if value else f"--no-{flag_of(entry.name)[2:]}")
        else:
            shown = ",".join(f"{part:g}" for part in value) if isinstance(value, tuple) else value
            changed.append(f"{flag_of(entry.name)} {shlex.quote(str(shown))}")
    main_ones = (
        "model",
        "layers",
        "hidden",
        "dropout",
        "lr",
        "weight_decay",
        "optimizer",
        "epochs",
        "self_loops",
        "seed",
        "workers",
    )
    by_default = [
        f"{entry.name.replace('_', '-')} {getattr(config, entry.name)}"
        for entry in fields(config)
        if entry.name in main_ones
        and getattr(config, entry.name) == option_default(entry) is not None
        and (config.model_file is None or entry.name not in MODEL_OPTIONS)  # as far as it takes them
    ]
    return f"settings: {' '.join(changed)}\ndefaults: {', '.join(by_default)}"


def result_table(result: dict[str, Any]) -> Table:
    """What a person wants to see of ``result.json``, at most 80 columns wide."""
    table = Table(show_header=False, title="result", title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold", max_width=MOST_COLUMNS - 30)
    metric = result.get("metric", "")
    rows = [
        ("dataset", result["dataset"]),
        ("model", result["model"]),
        ("workers", f"{result['workers']} ({result['device']})"),
        ("shares", ", ".join(f"{share:.3g}" for share in result.get("shares", []))),
        ("batch", _batch(result)),
        ("gradients", _gradients(result)),
        ("best epoch", result["best_epoch"]),
        (f"train {metric}", _percent(result["train"]) if "batch_size" in result else ""),
        (f"validation {metric}", _percent(result["val"])),
        (f"test {metric}", _percent(result["test"])),
        ("epoch, median", f"{result['epoch_seconds'] * 1000:.1f} ms"),
        ("epoch, predicted", _predicted(result)),
        ("throughput", f"{result['samples_per_second']:.0f} samples/s" if "samples_per_second" in result else ""),
        ("peak memory", ", ".join(f"{size / 2**20:.0f} MiB" for size in result["peak_memory_bytes"])),
    ]
    for label, value in rows:
        if value not in ("", None):
            table.add_row(label, str(value))
    return table


def _gradients(result: dict[str, Any]) -> str:
    """How they travelled, where that was asked for, and how much of them each worker sent."""
    found = result.get("ranks", [{}])[0].get("grad_sync")
    if found is None or (found["wire"] == "fp32" and "choice" not in found):
        return ""
    chosen = ", chosen by auto" if "choice" in found else ""
    sent = f", {found['sent_bytes'] / found['steps'] / 2**10:.4g} KiB a step" if found["steps"] else ""
    return f"{found['wire']}{chosen}{sent}"


def _predicted(result: dict[str, Any]) -> str:
    """Of an epoch, and what that stands on, where it is known."""
    if result.get("predicted_epoch_seconds") is None:
        return ""
    from nugnn.planning.calibration import SOURCES

    found = (result.get("prediction") or {}).get("calibration")
    source = "" if found is None else f", from {SOURCES[found['stands_on']]}"
    return f"{result['predicted_epoch_seconds'] * 1000:.1f} ms{source}"


def _batch(result: dict[str, Any]) -> str:
    if "batch_size" not in result:
        return ""
    split = result["batch_split"]
    return counted(result["batch_size"], "sample") + (f": {', '.join(map(str, split))}" if len(split) > 1 else "")


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.2%}"


@app.command(short_help="Name the first module whose result depends on the split.")
def check(
    model: str = typer.Argument(metavar="FILE.py:Class", help="Your model: file and name of the class."),
    dataset: str | None = typer.Option(
        None, help="Check on a piece of this graph, or a batch of these samples; a random graph otherwise."
    ),
    data_dir: str | None = typer.Option(None, help="Folder to look for data sets in."),
    num_nodes: int | None = typer.Option(None, help="Number of nodes, for --dataset as a path to a list of edges."),
    image_size: int | None = typer.Option(None, help="As for train, for --dataset imagefolder:PATH."),
) -> None:
    """Name the first module whose result depends on how the graph, or a batch of samples, is split.

    Compares the model on one part with the same model on three unequal parts, in float64, on a small graph or a batch
    of samples: outputs of each module, gradients and buffers, in training and in evaluation.
    """
    with errors_reported():
        data_dir = data_dir or os.environ.get("NUGNN_DATA") or None
        given: dict[str, Any] = {"model": model, "dataset": dataset, "data_dir": data_dir}
        if config_kind(dataset) is SampleConfig:
            if num_nodes is not None:
                raise ConfigError(f"--num-nodes belongs to graphs, and --dataset {dataset} names samples; leave it out")
            _check_on_samples(SampleConfig(**given, image_size=image_size))
        else:
            if image_size is not None:
                raise ConfigError("--image-size belongs to samples, as --dataset imagefolder:PATH names them")
            _check_on_graph(given, num_nodes)


def _check_on_samples(config: SampleConfig) -> None:
    _check_model_file(config.model_file)
    import torch

    from nugnn.check_samples import check_samples
    from nugnn.sample_run import build_model, prepare

    data = prepare(config)
    torch.manual_seed(0)
    with _calls_explained(
        "it was called as model(x) on samples; a model of graphs is checked without --dataset, or with one of a graph"
    ):
        report = check_samples(build_model(config, data), data)  # raises where they differ
    console = screen()
    say(
        console,
        f"{config.model}: {counted(report.num_parts, 'unequal part')} equal one part on a batch of "
        f"{counted(report.num_samples, 'sample')} "
        f"({counted(report.num_modules, 'module call')} compared, largest difference {report.largest_difference:.1e})",
    )
    for note in report.notes:
        say(console, f"note: {note}")


@contextlib.contextmanager
def _calls_explained(how: str) -> Iterator[None]:
    """Adds to the error of a model that takes other arguments how it was called, and what else can be checked."""
    from nugnn.module_traces import ModelFails

    try:
        yield
    except ModelFails as error:
        if "positional argument" not in str(error):
            raise
        raise ModelFails(f"{error}; {how}") from error


def _check_on_graph(given: dict[str, Any], num_nodes: int | None) -> None:
    model, dataset = given["model"], given["dataset"]
    if ":" not in model.removesuffix(":") and model not in BUILT_IN_MODELS:
        allowed = f"FILE.py:Class, or a built-in model ({', '.join(BUILT_IN_MODELS)})"
        raise ConfigError(model_refusal("", model, allowed))
    config = TrainConfig(**given, num_nodes=num_nodes)
    if num_nodes is not None and dataset is None:
        raise ConfigError(f"--num-nodes {num_nodes} has no effect without --dataset")
    _check_model_file(config.model_file)
    from nugnn.check import run_check

    data = None
    if dataset is not None:
        from nugnn.graph_run import prepare

        data = prepare(config)
    with _calls_explained(
        "it was called as model(graph, x); a model of samples is checked with --dataset, such as digits-images"
    ):
        report = run_check(model, data)  # raises where they differ
    say(
        screen(),
        f"{model}: {counted(report.num_parts, 'unequal part')} equal one part on a graph of "
        f"{counted(report.num_nodes, 'node')} "
        f"({counted(report.num_modules, 'module call')} compared, largest difference {report.largest_difference:.1e})",
    )


_as_json = parameter("as_json", bool, typer.Option(False, "--json", help="Print result.json alone."))
_train.__signature__ = inspect.Signature([*setting_parameters(), _as_json])  # type: ignore[attr-defined]
_train.__annotations__ = {name: p.annotation for name, p in inspect.signature(_train).parameters.items()}
app.command("train")(_train)
app.add_typer(cli_datasets.datasets, name="datasets", short_help="List data sets, describe one, get one ready.")
app.command(short_help="Split a graph once, for many runs of train.")(cli_partition.partition)
app.command(short_help="Measure this machine's devices and links.")(cli_profile.profile)
app.command("plan", short_help="Who gets how much, and what an epoch will take, before anything runs.")(cli_plan.plan)
app.command("simulate", short_help="How an epoch would grow with devices that nobody has.")(cli_simulate.simulate)
app.command("calibration", short_help="How far predictions have been off on this machine.")(cli_calibration.calibration)
app.command(short_help="Measure the best model of a finished run.")(cli_results.evaluate)
app.command(short_help="Write the class of every node of a graph.")(cli_results.predict)
