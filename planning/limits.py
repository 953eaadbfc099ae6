"""How much of a device a worker may use: unequal devices made from equal ones, to try a split before having them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from nugnn._counted import counted

NO_LIMITS = "none"
BETWEEN_WORKERS = ";"


@dataclass(frozen=True)
class DeviceLimits:
    """What of a device a worker may use; None means all of it.

    Args:
        sms: Multiprocessors of a GPU, from 1 up; the GPU rounds up to what it can set apart (8 on Hopper).
        memory_fraction: Part of the device's memory, above 0 and up to 1: of a GPU's, or of the host's for a worker on
            the CPU.
        threads: Of the CPU, from 1 up, for the worker's operators.

    Raises:
        ValueError: A value is out of range or no number.
    """

    sms: int | None = None
    memory_fraction: float | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("sms", "threads"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} is {value!r}; it must be a whole number from 1 up")
        share = self.memory_fraction
        if share is None:
            return
        is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
        if not is_number or not (math.isfinite(share) and 0 < share <= 1):
            raise ValueError(f"memory_fraction is {share!r}; it must be a number above 0 and up to 1")
        object.__setattr__(self, "memory_fraction", float(share))

    @property
    def is_none(self) -> bool:
        """Whether nothing is limited."""
        return self == DeviceLimits()

    @classmethod
    def parse(cls, text: str) -> DeviceLimits:
        """The limits that ``text`` names; ``str`` of them gives the text back, in one spelling.

        >>> DeviceLimits.parse("sms=32")
        DeviceLimits(sms=32, memory_fraction=None, threads=None)
        >>> str(DeviceLimits.parse(" threads=1, memory_fraction=0.50 "))
        'memory_fraction=0.5,threads=1'
        >>> str(DeviceLimits.parse("none"))
        'none'

        Raises:
            ValueError: There is no such limit, one is named twice, or a value is out of range.
        """
        if text.strip() == NO_LIMITS:
            return cls()
        known = [entry.name for entry in fields(cls)]
        given: dict[str, Any] = {}
        for entry in text.split(","):
            name, equals, value = (part.strip() for part in entry.partition("="))
            if not entry.strip():
                raise ValueError(f"no limit is given; write {NO_LIMITS}, or one such as threads=2")
            if name in known and not value:
                raise ValueError(f"limit {name!r} has no value; write {name}=VALUE")
            if not equals or name not in known:
                raise ValueError(
                    f"limit {entry.strip()!r} is not known; give {NO_LIMITS}, or some of "
                    f"{', '.join(f'{each}=VALUE' for each in known)}, with commas between them"
                )
            if name in given:
                raise ValueError(f"limit {name} is given twice in {text!r}")
            given[name] = _number(value, is_whole=name != "memory_fraction")
        return cls(**given)

    def __str__(self) -> str:
        values = ((entry.name, getattr(self, entry.name)) for entry in fields(self))
        return ",".join(f"{name}={value!r}" for name, value in values if value is not None) or NO_LIMITS


def _number(text: str, *, is_whole: bool) -> int | float | str:
    """As it is where it is no number: `DeviceLimits` says what is wrong with it."""
    if is_whole:
        return int(text) if re.fullmatch(r"[+-]?\d{1,9}", text) else text
    try:
        return float(text)
    except ValueError:
        return text


SHARED_CORES = "workers share cores: there are fewer than threads, so that their speeds depend on each other"
"""Said of a host, this one or one that is described, where its workers have more threads than it has cores."""


def check_threads(threads: int, num_cores: int, where: str) -> None:
    """Refuse more threads of one worker than its host has cores, this one or one that is described.

    Raises:
        ValueError: There are fewer.
    """
    if threads > num_cores:
        raise ValueError(
            f"threads={threads}: {where} has {counted(num_cores, 'core')} to use; give {num_cores} or fewer"
        )


def parse_limits(text: str) -> tuple[DeviceLimits, ...]:
    """Limits of several workers, with semicolons between them.

    >>> parse_limits("none;sms=32")[1].sms
    32

    Raises:
        ValueError: As `DeviceLimits.parse`; says which worker's.
    """
    found = []
    for worker, each in enumerate(text.split(BETWEEN_WORKERS)):
        try:
            found.append(DeviceLimits.parse(each))
        except ValueError as error:
            raise ValueError(f"worker {worker}: {error}") from None
    return tuple(found)


def format_limits(limits: Sequence[DeviceLimits]) -> str:
    """What `parse_limits` reads."""
    return BETWEEN_WORKERS.join(str(each) for each in limits)
