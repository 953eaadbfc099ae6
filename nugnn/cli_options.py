"""Settings as options of a command: read from the dataclasses that hold them, so that each is written once."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import typer

from nugnn.config import TrainConfig
from nugnn.options import flag_of, option_default, option_spec
from nugnn.sample_config import SampleConfig
from nugnn.screen import MOST_COLUMNS
from nugnn.settings_file import recipe_names


def setting_parameters(
    names: Collection[str] | None = None, changed: Mapping[str, str] | None = None
) -> list[inspect.Parameter]:
    """One parameter for each option of `TrainConfig` and `SampleConfig`, and those that only the command line has.

    Every default is None, "not given": recipe and file would otherwise be overridden by defaults.

    Args:
        names: Of the options that a command has; all of them when None.
        changed: Other texts for some of them.
    """
    options: dict[str, tuple[type, Any]] = {
        "recipe": (str, typer.Option(None, help=f"Published settings: {', '.join(recipe_names())}.")),
        "config": (str, typer.Option(None, help="YAML file of options, such as the config.yaml of an earlier run.")),
    }
    for_graphs, for_samples = ({entry.name: entry for entry in fields(kind)} for kind in (TrainConfig, SampleConfig))
    for name, entry in {**for_graphs, **{n: e for n, e in for_samples.items() if n not in for_graphs}}.items():
        if names is not None and name not in names:
            continue
        spec, flag = option_spec(entry), flag_of(name)
        default = option_default(entry)
        common: dict[str, Any] = {"help": spec.help, "show_default": False}
        if name not in for_graphs:
            common["help"] = f"Samples: {spec.help}"
        if default is not None and spec.kind is not bool:
            common["help"] += f" Default: {default}."
        if name in for_graphs and name in for_samples:
            other, other_default = option_spec(for_samples[name]), option_default(for_samples[name])
            if other.help != spec.help:
                common["help"] += f" Samples: {other.help}"
            if other_default not in (default, None):
                common["help"] += f" Default for samples: {other_default}."
        common["help"] = (changed or {}).get(name, common["help"])
        if spec.kind is bool:
            common["hidden"] = bool(spec.later)
            options[entry.name] = (bool, typer.Option(None, f"{flag}/--no-{flag[2:]}", **common))
        else:
            common["hidden"] = not spec.landed
            metavar = "|".join(spec.choices) or {int: "N", float: "X", str: "TEXT"}[spec.kind]
            if len(f"  {flag} {metavar}") > MOST_COLUMNS:  # a parser breaks lines between words alone
                metavar, common["help"] = "NAME", f"{common['help']} One of {', '.join(spec.choices)}."
            options[entry.name] = (str, typer.Option(None, flag, metavar=metavar, **common))
    return [parameter(name, kind | None, default) for name, (kind, default) in options.items()]


def parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """Of a command, given by name."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
