"""``nugnn simulate``: how an epoch would grow with devices that nobody has, from data sheets and counts alone."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

import typer
from rich.table import Table

from nugnn.cli_errors import errors_reported, refuse_torchrun
from nugnn.cli_options import parameter, setting_parameters
from nugnn.cli_plan import progress_of
from nugnn.config import MODEL_OPTIONS
from nugnn.options import ConfigError
from nugnn.sample_config import BY_COUNTS
from nugnn.screen import say, screen, show_table

_MOST = 4096
_LONGER = "*"
"""Beside epochs that are longer than with fewer devices."""
OPTIONS = (
    *("self_loops", "model", *MODEL_OPTIONS),
    *("precision", "recompute_inputs", "overlap", "activations", "halo_wire"),
)
"""Of ``nugnn train``, those that a simulation depends on."""
_OWN: dict[str, tuple[Any, Any]] = {
    "graph_stats": (str, typer.Option(..., "--graph-stats", metavar="COUNTS", help="As for nugnn plan.")),
    "devices": (
        str,
        typer.Option(
            ..., metavar="NAME[,NAME...]", help="Cards or CPUs of docs/hardware.md; of several, equal numbers."
        ),
    ),
    "per_host": (int, typer.Option(8, metavar="N", min=1, help="Devices of a host; workers on its CPU share it.")),
    "gbit_per_second": (float, typer.Option(100.0, metavar="X", help="Of a host's way to the others.")),
    "latency_us": (float, typer.Option(30.0, metavar="X", help="Of it, microseconds.")),
    "most": (int, typer.Option(64, metavar="N", min=1, max=_MOST, help="Devices, up to 4096: 1, 2, 4 and so on.")),
    "as_json": (bool, typer.Option(False, "--json", help="Print the rows alone, as JSON.")),
}


def simulate(**given: Any) -> None:
    """How an epoch would grow with devices that nobody has: from data sheets and counts alone.

    Every figure is simulated and was never held against a run; it shows where exchanges begin to cost more than devices
    bring, and no more.
    """
    with errors_reported():
        refuse_torchrun("simulate", "Run it once, without torchrun")
        own = {name: given.pop(name) for name in _OWN}
        for name in ("gbit_per_second", "latency_us"):
            if not 0 < own[name] < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} {own[name]} is not allowed; allowed: a number above 0")
        from nugnn.cli import gather_settings
        from nugnn.config import TrainConfig

        config = gather_settings(given | {"dataset": BY_COUNTS}, {})
        assert isinstance(config, TrainConfig)
        counts = [2**power for power in range(own["most"].bit_length()) if 2**power <= own["most"]]
        counts += [own["most"]] * (counts[-1] != own["most"])
        console = screen(quiet=own["as_json"])
        with progress_of(console) as on_stage:
            from nugnn.planning.cluster_file import LinkFields
            from nugnn.planning.growth import are_longer, where_it_stops
            from nugnn.simulate_run import simulate as simulated

            rows, notes = simulated(
                config,
                own["graph_stats"],
                [name.strip() for name in own["devices"].split(",")],
                counts,
                per_host=own["per_host"],
                between=LinkFields(gbit_per_second=own["gbit_per_second"], latency_us=own["latency_us"]),
                on_stage=on_stage,
            )
        stops = where_it_stops(rows)
        if own["as_json"]:
            shown = [dataclasses.asdict(row) for row in rows]
            print(json.dumps({"simulated": True, "rows": shown, "stops": stops, "notes": notes}, indent=2))
            return
        show_table(
            console,
            growth_table(rows, f"{own['graph_stats']} on {own['devices']}"),
            least_first=("hosts", "halo/node", "memory", "wait", "sync", "halo", "work"),
        )
        if any(are_longer(rows)):
            say(console, f"{_LONGER} a longer epoch than with fewer devices")
        for note in (f"simulated: {stops}", *(f"note: {note}" for note in notes)):
            say(console, note)


def growth_table(rows: Any, title: str) -> Table:
    """At most 80 columns wide."""
    from nugnn.planning.growth import are_longer, speed_ups
    from nugnn.planning.in_words import seconds_text

    table = Table(title=f"simulated: {title}", title_justify="left", box=None, padding=(0, 1, 0, 0))
    names = ("devices", "hosts", "epoch", "", "speed-up", "work", "halo", "sync", "wait", "halo/node", "memory")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row, gain, is_longer in zip(rows, speed_ups(rows), are_longer(rows), strict=True):
        if row.epoch_seconds is None:
            table.add_row(str(row.devices), str(row.hosts), "no room")
            continue
        parts = [f"{row.parts[kind]:.0%}" for kind in ("compute", "halo", "sync", "wait")]
        figures = (f"{row.halo_rows:.2f}", f"{row.fullest:.0%}")
        epoch = (seconds_text(row.epoch_seconds), _LONGER if is_longer else "", f"{gain:.2f}")
        table.add_row(str(row.devices), str(row.hosts), *epoch, *parts, *figures)
    return table


simulate.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*setting_parameters(OPTIONS), *(parameter(name, *how) for name, how in _OWN.items())]
)
simulate.__annotations__ = {name: p.annotation for name, p in inspect.signature(simulate).parameters.items()}
