"""``nugnn calibration``: measured runs that later plans are held against, shown or forgotten."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from nugnn._counted import counted
from nugnn.cli_errors import errors_reported, refuse_torchrun
from nugnn.options import ConfigError
from nugnn.screen import say, screen

if TYPE_CHECKING:
    from nugnn.planning.run_pairs import RunPair


def calibration(
    forget: bool = typer.Option(False, "--forget", help="Remove all measured runs that are kept."),
    as_json: bool = typer.Option(False, "--json", help="Print all that is kept, as JSON."),
) -> None:
    """How far predicted epochs have been off on this machine: measured runs with a plan, by kind of prediction.

    Runs are kept in the cache folder, one small file each; plans on the same devices say what came of them.
    """
    with errors_reported():
        refuse_torchrun("calibration", "Run it once, without torchrun")
        from nugnn.kept_pairs import forget_pairs, kept_pairs, pairs_folder

        console = screen(quiet=as_json)
        if forget:
            if as_json:
                raise ConfigError("--forget and --json: give one of them")
            try:
                count = forget_pairs()
            except OSError as error:
                raise ConfigError(f"{pairs_folder()} cannot be written: {error.strerror or error}") from error
            say(console, f"{counted(count, 'file')} removed from {pairs_folder()}")
            return
        kept = kept_pairs()
        if as_json:
            print(json.dumps([pair.model_dump(mode="json", by_alias=True) for pair in kept.pairs], indent=1))
            return
        for line in _lines(kept.pairs) or ["no run with a plan was measured here yet"]:
            say(console, line)
        for note in filter(None, [kept.note]):
            say(console, f"note: {note}")


def _lines(pairs: Sequence[RunPair]) -> list[str]:
    """Of each kind of prediction: on what, how far off, and its runs; first those that plans made here count."""
    from nugnn.prediction_versions import prediction_versions

    here = prediction_versions() if pairs else {}
    kinds: dict[str, list[RunPair]] = {}
    for pair in sorted(pairs, key=lambda pair: pair.kind.versions != here):
        kinds.setdefault(pair.kind.key, []).append(pair)
    return [line for found in kinds.values() for line in _lines_of_kind(found, here)]


def _lines_of_kind(found: Sequence[RunPair], here: Mapping[str, str]) -> list[str]:
    """Of runs of one kind, where ``here`` are the versions of plans that are made now."""
    from nugnn.planning.calibration import SOURCES, calibrated, in_words
    from nugnn.planning.in_words import seconds_text
    from nugnn.planning.run_pairs import devices_in_words

    kind = found[0].kind
    of = "graphs" if kind.family == "graph" else "samples"
    heading = f"{of} in {kind.precision} on {devices_in_words(kind.devices)}, from {SOURCES[kind.stands_on]}"
    lines = [heading if kind.rates is None else f"{heading} ({kind.rates[:8]})"]
    counts = kind.versions == here
    if not counts:
        other = [f"{name} {version}" for name, version in kind.versions.items() if here.get(name) != version]
        now = [f"{name} {version}" for name, version in here.items() if kind.versions.get(name) != version]
        lines.append(
            f"  not counted: of {', '.join(other) or 'unknown versions'}; plans made here are of {', '.join(now)}"
        )
    subjects = {pair.subject for pair in found}
    so_far = calibrated(found, kind.stands_on, subjects.pop() if len(subjects) == 1 else None)
    lines.append(f"  {in_words(so_far, 'times of plans have the factor' if counts else 'no plan made here has it')}")
    for pair in found:
        times = f"{seconds_text(pair.predicted_seconds)} predicted, {seconds_text(pair.measured_seconds)} measured"
        lines.append(f"  {pair.made}  {pair.name}: an epoch {times}, {pair.ratio:.3g} x")
    return lines
