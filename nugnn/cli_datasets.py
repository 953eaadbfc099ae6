"""``nugnn datasets``: what can be trained on, what is known of it, and getting it ready."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from nugnn._counted import counted
from nugnn.cli_errors import errors_reported
from nugnn.planning.in_words import download_bytes
from nugnn.sample_sets import NAMES, PATH_KINDS
from nugnn.screen import say, screen, show_table

if TYPE_CHECKING:
    from nugnn.datasets.graph_data import GraphData
    from nugnn.datasets.registry import DatasetEntry

datasets = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
_DATA_DIR = typer.Option(None, help="Folder to look for data sets in.")
_JSON = typer.Option(False, "--json", help="Print as JSON.")


@datasets.callback()
def _group() -> None:
    """List data sets, describe one, or get one ready."""


@datasets.command("list", short_help="Every data set that can be named.")
def list_all(data_dir: str | None = _DATA_DIR, as_json: bool = _JSON) -> None:
    """Every data set that can be named, and where it would come from."""
    with errors_reported():
        from nugnn.datasets.registry import list_datasets

        entries = list_datasets(_folder(data_dir))
        if as_json:
            print(json.dumps([_plain(entry) for entry in entries], indent=2))
            return
        table = Table(box=None, padding=(0, 1, 0, 0))
        table.add_column("name", no_wrap=True)
        table.add_column("from")
        for name in ("nodes", "edges", "features", "size"):
            table.add_column(name, justify="right")
        for entry in entries:
            counts = entry.published
            cells = ("num_nodes", "num_edges", "num_features")
            numbers = [_number(getattr(counts, cell)) if counts else "" for cell in cells]
            size = entry.download_bytes if entry.where == "download" else None
            table.add_row(entry.name, entry.where, *numbers, download_bytes(size))
        console = screen()
        show_table(console, table, least_first=("from", "size", "features", "edges"))
        say(console, "by hand: put the graph into the folder that --data-dir names")
        say(console, f"samples: {', '.join(NAMES)}")
        say(console, f"samples of yours: {', '.join(f'{kind}:PATH' for kind in PATH_KINDS)}")


@datasets.command(short_help="What is known of a data set, without loading it.")
def info(
    name: str = typer.Argument(help="Name, in any spelling."), data_dir: str | None = _DATA_DIR, as_json: bool = _JSON
) -> None:
    """What is known of a data set, without loading or downloading it."""
    with errors_reported():
        from nugnn.datasets.registry import info as describe

        entry = describe(name, _folder(data_dir))
        if as_json:
            print(json.dumps(_plain(entry), indent=2))
            return
        table = Table(show_header=False, title=entry.name, title_justify="left")
        facts, console = _plain(entry), screen()
        urls = facts.pop("urls") or []
        if len(urls) > 1:
            del facts["url"]
        for label, value in facts.items():
            if label != "name" and value is not None:
                table.add_row(label.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
        show_table(console, table)
        if len(urls) > 1:  # below the table, where none is folded
            say(console, "\n".join([f"{counted(len(urls), 'file')}, from", *(f"  {url}" for url in urls)]))


@datasets.command(short_help="Download a data set if need be, read it, describe it.")
def prepare(
    name: str = typer.Argument(help="Name, in any spelling, or a path."),
    data_dir: str | None = _DATA_DIR,
    num_nodes: int | None = typer.Option(None, help="Number of nodes, for a path to a list of edges."),
    as_json: bool = _JSON,
) -> None:
    """Download a data set if need be and read it whole, so that training finds it ready; prints what is in it."""
    with errors_reported():
        from nugnn.config import TrainConfig

        TrainConfig(num_nodes=num_nodes)  # refuses what is no number of nodes
        from nugnn.datasets import load

        console = screen(stderr=as_json)
        with DownloadBar(console) as bar:
            data = load(name, _folder(data_dir), progress=bar.show, num_nodes=num_nodes)
        figures = _figures(data)
        if as_json:
            print(json.dumps(figures, indent=2))
            return
        table = Table(show_header=False, title=data.name, title_justify="left")
        for label, value in figures.items():
            if label != "name" and value is not None:
                table.add_row(label.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
        show_table(console, table)


class DownloadBar:
    """Shows a download: a bar in a terminal, a line at its start elsewhere; a context manager."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("downloading"), BarColumn(bar_width=None), DownloadColumn(), TimeRemainingColumn())
        self._console = console
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task: TaskID | None = None

    def __enter__(self) -> DownloadBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, num_bytes: int, total: int | None) -> None:
        """``num_bytes`` of a file's ``total`` (None when the server does not say) have arrived."""
        if self._bar is None:
            if self._task is None:
                self._task = TaskID(0)
                say(self._console, f"downloading {download_bytes(total) or 'a file of unknown size'}")
            return
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=num_bytes, total=total)


def _folder(data_dir: str | None) -> Path | None:
    given = data_dir or os.environ.get("NUGNN_DATA")
    return Path(given) if given else None


def _plain(entry: DatasetEntry) -> dict[str, Any]:
    known = entry.published
    source = None if known is None or known.source is None else known.source
    return {
        "name": entry.name,
        "from": entry.where,
        "path": None if entry.path is None else str(entry.path),
        "nodes": known and known.num_nodes,
        "edges": known and known.num_edges,
        "features": known and known.num_features,
        "classes": known and known.num_classes,
        "split": None if known is None or known.split is None else "/".join(map(str, known.split)),
        "metric": None if known is None or known.metric == "auto" else known.metric,
        "download_bytes": entry.download_bytes,
        "url": None if source is None else source.files[0].url,
        "urls": None if source is None else [file.url for file in source.files],
        "note": (known and known.note) or None,
    }


def _figures(data: GraphData) -> dict[str, Any]:
    return {
        "name": data.name,
        "nodes": data.num_nodes,
        "edges": data.num_edges,
        "features": data.num_features,
        "classes": data.num_classes,
        "labels": "none" if data.labels is None else "several for each node" if data.is_multilabel else "one each",
        "split": "/".join(str(len(ids)) for ids in data.split),
        "splits": data.num_splits,
        "metric": data.metric,
        "node_data": ", ".join(data.node_data) or None,
        "edge_data": ", ".join(data.edge_data) or None,
    }


def _number(value: int | None) -> str:
    return "" if not value else f"{value:,}"
