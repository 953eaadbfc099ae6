"""``nugnn profile``: this machine's devices and links measured, beside what their data sheets say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nugnn._counted import counted
from nugnn._regular_file import require_place, shown
from nugnn.cli_errors import errors_reported, refuse_torchrun
from nugnn.screen import say, screen, show_table

if TYPE_CHECKING:
    from nugnn.planning.profiles import DeviceProfile, LinkProfile, MachineProfile

_DEVICES = ("auto", "cpu", "cuda")
_LEAST_SECONDS, _MOST_SECONDS = 0.5, 600.0
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"))
_RATES = {
    "stream_bytes": "copy",
    "gather_bytes": "sum over neighbours",
    "cached_gather_bytes": "  from the cache",
    "pack_bytes": "picking rows",
}


def profile(
    out: Path | None = typer.Option(None, metavar="FILE", help="Write the profile here, as JSON."),
    device: str = typer.Option("auto", metavar="|".join(_DEVICES), help="What to measure; auto: all there is."),
    seconds: float = typer.Option(20.0, metavar="S", help="Of measurements, 0.5 to 600; starting comes on top."),
    limits: str | None = typer.Option(
        None,
        metavar="LIMITS",
        help="Measure a part of each device: sms=32 or memory_fraction=0.5 with --device cuda, threads=2 or "
        "memory_fraction=0.5 with --device cpu; one for each GPU with semicolons between.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the profile alone, as JSON."),
) -> None:
    """Measure this machine's devices and links, and show how far their data sheets are off."""
    with errors_reported():
        refuse_torchrun("profile", "Run it once on each host, without torchrun")
        _check(out, device, seconds, limits)
        console = screen(quiet=as_json)
        with _progress(console, seconds) as on_stage:
            from nugnn.profile_run import profile_machine

            measured = profile_machine(device, seconds=seconds, on_stage=on_stage, limits=limits)
        if as_json:
            print(measured.machine.to_json(), end="")
        else:
            for note in [*show(measured.machine, console), *measured.notes]:
                say(console, f"note: {note}")
        if out is not None:  # last, so that what was measured has been shown if the file cannot be written
            _write(out, measured.machine)
            say(console, f"written to {out}")


def _check(out: Path | None, device: str, seconds: float, limits: str | None) -> None:
    """Refuse what cannot go well before a second is spent on it."""
    if device not in _DEVICES:
        raise ValueError(f"--device {device} is not allowed; allowed: {', '.join(_DEVICES)}")
    if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:  # NaN as well
        raise ValueError(f"--seconds {seconds:g} is not allowed; allowed: {_LEAST_SECONDS:g} to {_MOST_SECONDS:g}")
    if limits is not None:
        _check_limits(limits, device)
    if out is not None:
        require_place(out, "--out")


def _check_limits(text: str, device: str) -> None:
    """What needs no torch, so that it is said at once."""
    from nugnn.planning.limits import parse_limits

    if device == "auto":
        raise ValueError(f"--limits {text}: limits are of one kind of device; add --device cpu or --device cuda")
    try:
        parse_limits(text)
    except ValueError as error:
        raise ValueError(f"--limits {text}: {error}") from None


@contextlib.contextmanager
def _progress(console: Console, seconds: float) -> Iterator[Callable[[str], None]]:
    """What is being measured, on a terminal; elsewhere one line."""
    if not console.is_terminal or console.quiet:
        say(console, f"measuring for about {seconds:.3g} s, after some seconds to start")
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield lambda text: status.update(Text(f"measuring {text}"))


def _write(out: Path, machine: MachineProfile) -> None:
    from nugnn.datasets.whole_file import write_whole

    try:
        write_whole(out, lambda file: file.write(machine.to_json().encode()))
    except OSError as error:
        raise ValueError(f"--out {shown(out)} cannot be written: {error.strerror or error}") from error


def show(machine: MachineProfile, console: Console) -> list[str]:
    """Print tables of the devices and of the links; returns notes: sheets that are not there, a machine in use."""
    notes = []
    for device in machine.devices:
        sheet = _sheet(device)
        if sheet is None:
            notes.append(f"no data sheet of {device.name} is known, so that nothing stands beside its measurements")
        show_table(console, device_table(device, sheet), least_first=("spread", "sheet"))
        if device.note is not None:
            notes.append(f"{device.name}: {device.note}")
    if machine.links:
        show_table(console, links_table(machine.links))
    return notes


def _sheet(device: DeviceProfile) -> DeviceProfile | None:
    from nugnn.planning import datasheet

    try:
        if device.kind == "cpu":
            return datasheet.cpu_sheet().as_profile(device.multiprocessors)
        return datasheet.sheet_of(device.name).as_profile()
    except datasheet.SheetError:
        return None


def device_table(device: DeviceProfile, sheet: DeviceProfile | None) -> Table:
    """What was measured, what the sheet says, and the first as a part of the second; at most 80 columns wide."""
    unit = "multiprocessor" if device.kind == "cuda" else "thread"
    cores = counted(device.multiprocessors, unit)
    title = f"{device.name}, {cores}" + (f"\n{device.uuid}" if device.uuid else "")
    table = Table(title=title, title_justify="left")
    for name in ("", "measured", "spread", "sheet", "measured/sheet"):
        table.add_column(name, justify="right" if name else "left")

    def add(label: str, measured: float, paper: float | None, unit: str, spread: float | None = None) -> None:
        table.add_row(
            label,
            quantity(measured, unit),
            "" if spread is None else f"{spread:.0%}",
            "" if paper is None else quantity(paper, unit),
            "" if not paper else f"{measured / paper:.2f}",
        )

    for name, rate in device.gemm_flops.items():
        paper = sheet.gemm_flops.get(name) if sheet else None
        add(f"products, {name}", rate, paper, "FLOP/s", device.spread.get(f"gemm_flops.{name}"))
    for field, label in _RATES.items():
        paper = getattr(sheet, field) if sheet else None
        add(label, getattr(device, field), paper, "B/s", device.spread.get(field))
    launch = sheet.launch_seconds if sheet else None
    add("one more operator", device.launch_seconds, launch, "s", device.spread.get("launch_seconds"))
    for field, label in (("memory_bytes", "memory"), ("cache_bytes", "last cache")):
        add(label, getattr(device, field), getattr(sheet, field) if sheet else None, "B")
    return table


def links_table(links: tuple[LinkProfile, ...]) -> Table:
    """Rates one way while the other is as busy."""
    table = Table("link", "between", "via", title="links", title_justify="left")
    table.add_column("one way", justify="right", no_wrap=True)
    table.add_column("latency", justify="right", no_wrap=True)
    for link in links:
        between = " - ".join(map(_short, link.ends)) or "every two"
        rate, latency = quantity(link.bytes_per_second, "B/s"), quantity(link.latency_seconds, "s")
        table.add_row(link.between, between, link.via, rate, latency)
    return table


def _short(end: str) -> str:
    """Enough of a uuid to tell the devices of a host apart."""
    return end[:12] if end.startswith(("GPU-", "MIG-")) else end[:20]


def quantity(value: float, unit: str) -> str:
    """With three digits and a prefix of thousands.

    >>> quantity(4.98e13, "FLOP/s"), quantity(4.2e-6, "s"), quantity(0.0, "s")
    ('49.8 TFLOP/s', '4.2 µs', '0 s')
    """
    factor, prefix = next(((f, p) for f, p in _PREFIXES if value >= 0.9995 * f), (1e-9, "n"))
    if value == 0:
        factor, prefix = 1.0, ""
    return f"{value / factor:.3g} {prefix}{unit}"
