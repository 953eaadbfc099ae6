"""Settings from YAML: files and recipes, whose names are checked against the options of all families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml

from nugnn._regular_file import no_file, shown
from nugnn.config import TrainConfig
from nugnn.options import ConfigError, OptionSpec, check, closest, flag_of, option_spec
from nugnn.sample_config import RunConfig, SampleConfig, config_kind, refuse_others
from nugnn.settings import Settings

Kind = TypeVar("Kind", bound=Settings)


def read_config(path: str | Path) -> RunConfig:
    """The settings in a YAML file, of graphs or of samples.

    Raises:
        ConfigError: As `nugnn.settings.Settings.from_file` does.
    """
    return read_as(config_kind(read_settings(path).get("dataset")), path)


def read_as(kind: type[Kind], path: str | Path) -> Kind:
    """See `nugnn.settings.Settings.from_file`."""
    values = read_settings(path)
    dataset = values.get("dataset")
    try:  # values that do not fit each other
        if dataset is not None and config_kind(dataset) is not kind:
            kind(dataset=dataset)  # type: ignore[call-arg]  # says what it takes in place of that
        refuse_others(kind, values)
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_settings(path: str | Path, dataset: str | None = None) -> dict[str, Any]:
    """The options a YAML file sets, names checked, values as written.

    Args:
        path: The file.
        dataset: The data set that is trained on, when it is not the one in the file.

    Raises:
        ConfigError: The file cannot be read, is not a mapping, or names an unknown option.
    """
    if (problem := no_file(Path(path))) is not None:
        raise ConfigError(f"{shown(Path(path))}: {problem}; --config takes a YAML file of options")
    try:
        text = Path(path).read_text(encoding="utf-8")
        loaded = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return _settings_from(loaded, str(path), dataset)


def recipe_names() -> list[str]:
    """Names that ``--recipe`` accepts."""
    entries = (resources.files("nugnn") / "recipes").iterdir()
    return sorted(entry.name.removesuffix(".yaml") for entry in entries if entry.name.endswith(".yaml"))


def read_recipe(name: str) -> dict[str, Any]:
    """The options a recipe sets.

    Raises:
        ConfigError: There is no such recipe.
    """
    known = recipe_names()
    if name not in known:
        raise ConfigError(f"--recipe {name} is not known{closest(name, known)}; known: {', '.join(known)}")
    text = (resources.files("nugnn") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    return _settings_from(yaml.safe_load(text), f"recipe {name}")


def _settings_from(loaded: Any, source: str, dataset: str | None = None) -> dict[str, Any]:
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{source}: expected lines of 'option: value', found {type(loaded).__name__}")
    specs = _known_options(dataset or loaded.get("dataset"))
    known = list(specs)
    settings: dict[str, Any] = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{source}: unknown option {key!r}{closest(name, known)}")
        if name in settings:
            raise ConfigError(f"{source}: option {name!r} is set twice")
        try:
            settings[name] = check(flag_of(name), value, specs[name])
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
    return settings


def _known_options(dataset: object) -> dict[str, OptionSpec]:
    """The options of both families; where they share a name, as the family of ``dataset`` has it."""
    specs: dict[str, OptionSpec] = {}
    for kind in (TrainConfig, SampleConfig, config_kind(dataset)):
        specs |= {entry.name: option_spec(entry) for entry in fields(kind)}
    return specs
