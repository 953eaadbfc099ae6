"""What one setting may be, and the sentences that refuse anything else."""

from __future__ import annotations

import difflib
import math
from dataclasses import MISSING, Field, dataclass, field
from typing import Any


class ConfigError(ValueError):
    """A setting is wrong; the text names the option, the value and what is allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionSpec:
    """What `TrainConfig` and the command line know about one option; kept in its field's metadata.

    Args:
        kind: ``int``, ``float``, ``bool`` or ``str``.
        help: What the option does.
        choices: Values allowed for a ``str``; empty allows any.
        later: Values whose feature has not landed: refused, with ``later_what`` in the message. ``FILE`` stands for
            any ``.json`` file.
        landed: False refuses every value but None, in the same way.
        least: Smallest value allowed.
        above: Value that has to be exceeded.
        below: Value that must not be reached.
        optional: None is allowed and means "not set".
    """

    kind: type[Any]
    help: str
    choices: tuple[str, ...] = ()
    later: tuple[Any, ...] = ()
    later_what: str = ""
    landed: bool = True
    least: float | None = None
    above: float | None = None
    below: float | None = None
    optional: bool = False


def option(default: Any, kind: type, help: str, **spec: Any) -> Any:
    """A dataclass field with its `OptionSpec`."""
    return field(default=default, metadata={"option": OptionSpec(kind=kind, help=help, **spec)})


def option_spec(entry: Field[Any]) -> OptionSpec:
    """The `OptionSpec` of a field that `option` made."""
    spec: OptionSpec = entry.metadata["option"]
    return spec


def option_default(entry: Field[Any]) -> Any:
    """The default of such a field."""
    assert entry.default is not MISSING, entry.name
    return entry.default


def flag_of(name: str) -> str:
    """Command-line spelling of an option: ``weight_decay`` -> ``--weight-decay``."""
    return "--" + name.replace("_", "-")


def closest(name: str, known: list[str]) -> str:
    """`` (did you mean 'x'?)`` with the known names nearest to ``name``, or nothing."""
    matches = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(repr(match) for match in matches)}?)" if matches else ""


def refusal(flag: str, value: Any, allowed: str) -> str:
    """The sentence for a wrong value."""
    return f"{flag} {value} is not allowed; allowed: {allowed}"


def check(flag: str, value: Any, spec: OptionSpec) -> Any:
    """``value`` in the type of the option, or a ConfigError."""
    if value is None and spec.optional:
        return None
    if flag in ("--shares", "--batch-split") and not isinstance(value, str):
        return value
    if spec.kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(refusal(flag, value, "true or false"))
    elif spec.kind is str:
        value = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        if not isinstance(value, str) or not value:
            raise ConfigError(refusal(flag, repr(value), ", ".join(spec.choices) or "a text"))
    else:
        value = _number(flag, value, spec)
    is_later_file = "FILE" in spec.later and str(value).endswith(".json")
    if value in spec.later or is_later_file or not spec.landed:
        instead = f"; use {flag} {' or '.join(spec.choices)}" if spec.choices else ""
        shown = f"{flag} {value}" if spec.kind is not bool else flag
        raise ConfigError(f"{shown}: {spec.later_what} has not landed yet{instead}")
    if spec.choices and value not in spec.choices:
        raise ConfigError(refusal(flag, value, ", ".join(spec.choices)))
    return value


def checked_workers(workers: Any) -> int:
    """``workers``, if it is a number of processes.

    Raises:
        ValueError: It is not.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers is {workers!r}, must be a whole number from 1 up")
    return workers


def _number(flag: str, value: Any, spec: OptionSpec) -> int | float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = spec.kind(value) if isinstance(value, str) else value
        if isinstance(number, int) and spec.kind is float:
            number = float(number)
        if type(number) is not spec.kind or not math.isfinite(number):
            raise ValueError
        too_small = (spec.least is not None and number < spec.least) or (
            spec.above is not None and number <= spec.above
        )
        if too_small or (spec.below is not None and number >= spec.below):
            raise ValueError
    except (ValueError, OverflowError):
        raise ConfigError(refusal(flag, value, _range_text(spec))) from None
    return number  # type: ignore[no-any-return]


def _range_text(spec: OptionSpec) -> str:
    text = "a whole number" if spec.kind is int else "a number"
    if spec.least is not None:
        text += f" from {spec.least:g}" + ("" if spec.below is None else f" up to, but not including, {spec.below:g}")
        return text if spec.below is not None else text + " up"
    return text if spec.above is None else text + f" above {spec.above:g}"
