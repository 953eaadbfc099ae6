"""``nugnn plan``: who gets how much, and what an epoch will take, before anything runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from nugnn._counted import counted
from nugnn._regular_file import require_place
from nugnn.cli_errors import errors_reported, refuse_torchrun
from nugnn.cli_options import parameter, setting_parameters
from nugnn.config import MODEL_OPTIONS
from nugnn.options import ConfigError
from nugnn.sample_config import BY_COUNTS
from nugnn.screen import say, screen

if TYPE_CHECKING:
    from nugnn.planned import Planned

OPTIONS = (
    *("dataset", "data_dir", "num_nodes", "undirected", "self_loops", "feature_norm", "split", "inductive"),
    *("val_fraction", "test_fraction", "image_size", "tokens", "vocabulary_size", "max_length"),
    *("model", *MODEL_OPTIONS),
    *("optimizer", "clip_norm", "batch_norm", "batch_size", "micro_batches", "drop_last"),
    *("workers", "shares", "partitioner", "device", "limits", "cluster"),
    *("precision", "recompute_inputs", "overlap", "cuda_graphs", "activations", "halo_wire", "halo_mode"),
    *("grad_sync", "grad_sync_rank", "grad_sync_feedback", "grad_sync_exact"),
)
"""Of ``nugnn train``, those that a plan depends on."""
_OF_GRAPHS_AT_HAND = ("data_dir", "num_nodes", "feature_norm", "split", "partitioner")
_HELP = {
    "workers": "Number of worker processes. Default: the devices of --cluster, else the GPUs of this machine, else 1.",
    "shares": "Part of the graph, or of a batch, that each worker gets: auto: the slowest as fast as memories allow; "
    "even, flops or bandwidth; or fractions such as 0.6,0.4. Default: auto.",
    "cluster": "Description of hardware, cluster.yaml. Default: this machine.",
}
_OWN: dict[str, tuple[Any, Any]] = {
    "graph_stats": (
        str | None,
        typer.Option(
            None,
            "--graph-stats",
            metavar="COUNTS",
            help="A graph by its counts, in place of --dataset: nodes=N,edges=N,features=N,classes=N,train=N, or a "
            "name such as ogbn-papers100M; halo=X, undirected=true besides.",
        ),
    ),
    "plan_out": (Path | None, typer.Option(None, metavar="FILE", help="Write the plan here, for nugnn train --plan.")),
    "chrome": (
        Path | None,
        typer.Option(None, metavar="FILE", help="Write the predicted timeline here, for ui.perfetto.dev."),
    ),
    "measure": (bool, typer.Option(False, "--measure", help="Measure this machine anew, although it was before.")),
    "as_json": (bool, typer.Option(False, "--json", help="Print the plan alone, as JSON.")),
}


def plan(**given: Any) -> None:
    """Plan a run: shares that fit the devices, the time of an epoch and the memory it takes, before anything runs.

    For a graph at hand (--dataset) or one of which only counts are known (--graph-stats); for this machine or for
    hardware that is described in a file (--cluster). Beside the plan stand shares by one number: even, by FLOP/s, by
    bandwidth.
    """
    with errors_reported():
        refuse_torchrun("plan", "Run it once, without torchrun, and give the plan to nugnn train with --plan")
        own = {name: given.pop(name) for name in _OWN}
        for name in ("plan_out", "chrome"):
            if own[name] is not None:
                require_place(own[name], f"--{name.replace('_', '-')}")
        config = _settings(given, own["graph_stats"], measures=own["measure"])
        console = screen(quiet=own["as_json"])
        notes: list[str] = []
        with progress_of(console) as on_stage:
            from nugnn.plan_run import plan_from_config

            planned = plan_from_config(
                config,
                own["graph_stats"],
                remeasures=own["measure"],
                on_stage=on_stage,
                on_note=notes.append,
                on_download=lambda done, _: on_stage(f"downloading, {done / 1e6:.0f} MB"),
            )
        if own["as_json"]:
            print(planned.plan.to_json(), end="")
        else:
            from nugnn.plan_tables import show_plan

            show_plan(planned, console)
            for note in [*notes, *planned.plan.notes]:
                say(console, f"note: {note}")
        _write(own["plan_out"], own["chrome"], planned, console)


plan.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*setting_parameters(OPTIONS, _HELP), *(parameter(name, *how) for name, how in _OWN.items())]
)
plan.__annotations__ = {name: p.annotation for name, p in inspect.signature(plan).parameters.items()}


def _settings(given: dict[str, Any], graph_stats: str | None, *, measures: bool) -> Any:
    """The settings of the run that is planned."""
    from nugnn.cli import gather_settings

    if graph_stats is not None:
        from nugnn.planning.graph_statistics import parse_statistics

        if given["dataset"] is not None:
            raise ConfigError("--dataset and --graph-stats both say which graph; give one of them")
        if given["inductive"]:
            raise ConfigError("--inductive needs the graph, and --graph-stats gives counts; give those of what is seen")
        for name in _OF_GRAPHS_AT_HAND:
            if given[name] is not None:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} needs the graph, and --graph-stats gives counts; leave {option} out")
        if given["undirected"]:
            raise ConfigError("--undirected needs the graph; write undirected=true into --graph-stats")
        parse_statistics(graph_stats)
        given["dataset"] = BY_COUNTS
    given["shares"] = given["shares"] or "auto"
    if given["cluster"] is not None:
        from nugnn.planning.cluster_file import count_devices, names_this_machine

        if measures and not names_this_machine(Path(given["cluster"])):
            raise ConfigError(f"--measure is about this machine, which {given['cluster']} does not name; leave it out")

        count = count_devices(Path(given["cluster"]))
        if given["workers"] not in (None, str(count)):
            raise ConfigError(
                f"--cluster {given['cluster']} has {counted(count, 'device')}, and --workers is "
                f"{given['workers']}; leave "
                "--workers out"
            )
        given["workers"] = count
    elif given["workers"] is None and given["config"] is None and given["device"] in (None, "auto", "cuda"):
        import torch

        given["workers"] = max(1, torch.cuda.device_count())
    return gather_settings(given, os.environ)


@contextlib.contextmanager
def progress_of(console: Console) -> Iterator[Callable[[str], None]]:
    """What is being done: on a terminal a line that goes, elsewhere lines that stay."""
    if console.is_terminal and not console.quiet:
        with console.status("planning") as status:
            yield lambda text: status.update(Text(text))
        return
    yield functools.partial(say, console)


def _write(plan_out: Path | None, chrome: Path | None, planned: Planned, console: Console) -> None:
    from nugnn.datasets.whole_file import write_whole
    from nugnn.planned import write_plan

    try:
        if plan_out is not None:
            write_plan(plan_out, planned)
            say(console, f"written to {plan_out}")
        if chrome is not None:
            timeline = planned.corrected().forecast.timeline
            assert timeline is not None
            content = timeline.to_chrome().encode()
            write_whole(chrome, lambda file: file.write(content))
            say(console, f"timeline in {chrome}")
    except OSError as error:
        raise ConfigError(f"{error.filename or plan_out} cannot be written: {error.strerror or error}") from error
