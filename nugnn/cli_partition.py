"""``nugnn partition``: a graph split for a number of workers, on disk and in figures."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from nugnn._counted import counted
from nugnn.cli_errors import errors_reported, refuse_torchrun
from nugnn.screen import say, screen, show_table

if TYPE_CHECKING:
    from nugnn.datasets.graph_data import GraphData
    from nugnn.partition.store import StoreMeta


def partition(
    dataset: str = typer.Option(help="Name of a data set, or a path to one."),
    workers: int = typer.Option(help="Number of parts."),
    out: Path = typer.Option(help="Folder of partitions; give it to nugnn train as --partition-cache."),
    shares: str = typer.Option("even", help="Part of the nodes of each: even, or fractions such as 0.6,0.3,0.1."),
    partitioner: str = typer.Option("auto", help="auto (metis), metis, clusters, kaminpar or random."),
    order: str = typer.Option("auto", help="As for nugnn train: auto or none."),
    data_dir: str | None = typer.Option(None, help="Folder to look for data sets in."),
    num_nodes: int | None = typer.Option(None, help="Number of nodes, for a path to a list of edges."),
    undirected: bool = typer.Option(False, "--undirected/--no-undirected", help="As for nugnn train."),
    self_loops: str = typer.Option("add", help="As for nugnn train: keep, add or remove."),
    feature_norm: str = typer.Option("none", help="As for nugnn train: none, row or standard."),
    split: int = typer.Option(0, help="As for nugnn train."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Split a graph into unequal parts once, for many runs of nugnn train."""
    with errors_reported():
        refuse_torchrun("partition", "Run it once, without torchrun")
        from nugnn.config import TrainConfig

        config = TrainConfig(
            dataset=dataset,
            data_dir=data_dir or os.environ.get("NUGNN_DATA") or None,
            num_nodes=num_nodes,
            workers=workers,
            shares=shares,
            partitioner=partitioner,
            order=order,
            undirected=undirected,
            self_loops=self_loops,
            feature_norm=feature_norm,
            split=split,
        )
        from nugnn.graph_run import prepare
        from nugnn.partition.cache import cached_shards
        from nugnn.partition.store import load_meta
        from nugnn.shares import method_for_shares

        data = prepare(config)
        if workers > data.num_nodes:
            raise ValueError(
                f"{counted(workers, 'worker')} for {counted(data.num_nodes, 'node')}; each worker needs at least one"
            )
        try:
            how = {"method": method_for_shares(config.partitioner), "order": config.order}
            folder = cached_shards(out, data, config.fractions, **how)  # type: ignore[arg-type]
        except OSError as error:
            raise ValueError(f"--out {out} cannot be written: {error.strerror or error}") from error
        meta = load_meta(folder)
        if as_json:
            print(json.dumps({"folder": str(folder), **_figures(meta)}, indent=2))
            return
        console = screen()
        show_table(console, _table(data, config.fractions, meta), least_first=("MiB", "train", "share", "asked"))
        for note in meta.notes:
            say(console, f"note: {note}")
        say(console, f"written to {folder}")


def _table(data: GraphData, asked: tuple[float, ...], meta: StoreMeta) -> Table:
    halo = sum(part.num_halo for part in meta.parts)
    title = (
        f"{data.name}: {counted(meta.num_nodes, 'node')}, {counted(meta.num_edges, 'edge')}; "
        f"{counted(halo, 'halo row')}"
    )
    table = Table(title=title, title_justify="left")
    for name in ("part", "asked", "nodes", "share", "edges", "halo rows", "train", "MiB"):
        table.add_column(name, justify="right")
    for rank, (share, part) in enumerate(zip(asked, meta.parts, strict=True)):
        table.add_row(
            str(rank),
            f"{share:.3f}",
            str(part.num_nodes),
            f"{part.num_nodes / meta.num_nodes:.3f}",
            str(part.num_edges),
            str(part.num_halo),
            str(part.num_train),
            f"{part.file_bytes / 2**20:.1f}",
        )
    return table


def _figures(meta: StoreMeta) -> dict[str, Any]:
    return {
        "num_nodes": meta.num_nodes,
        "num_edges": meta.num_edges,
        "notes": list(meta.notes),
        "parts": [asdict(part) for part in meta.parts],
    }
