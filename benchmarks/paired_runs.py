"""Runs of a seed with and without compression: their difference in points, its interval, and time to an accuracy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compression_cases import BASELINE

GOAL = 0.5
"""Points that 4-bit gradients and int4 halo rows may differ from fp32."""
PART_OF_BASELINE = 0.99
"""Of the validation accuracy with which a seed's fp32 run ended: what is to be reached."""

Runs = dict[tuple[str, str, int], dict[str, Any]]
"""By row, column and seed."""
Pair = tuple[Mapping[str, Any], Mapping[str, Any]]
"""The fp32 run of a seed, and another one of it."""


@dataclass(frozen=True)
class Interval:
    """Mean of paired differences with its 95 % interval by Student's t, in points; NaN bounds for fewer than two."""

    mean: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        bounds = "" if math.isnan(self.low) else f" [{self.low:+.2f}, {self.high:+.2f}]"
        return f"{self.mean:+.2f}{bounds}"

    @property
    def verdict(self) -> str:
        """Whether the mean over all seeds there could be lies within `GOAL` of zero, as far as these tell."""
        if self.low >= -GOAL and self.high <= GOAL:
            return "within"
        return "beyond" if self.low > GOAL or self.high < -GOAL else "open"


def paired_interval(differences: Sequence[float]) -> Interval:
    """Of at least one difference."""
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return Interval(mean, math.nan, math.nan, count)
    from scipy import stats

    half = float(stats.t.ppf(0.975, count - 1)) * statistics.stdev(differences) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


def pairs_of(runs: Runs, row: str, column: str) -> list[Pair]:
    """``(fp32, column)`` of each seed that has both."""
    seeds = sorted(seed for name, has, seed in runs if name == row and has == column)
    return [(runs[row, BASELINE, seed], runs[row, column, seed]) for seed in seeds if (row, BASELINE, seed) in runs]


def check_pairs(runs: Runs) -> None:
    """Runs of a seed began with the same weights, on the same parts.

    Raises:
        ValueError: They did not, so that their difference means nothing.
    """
    for (row, column, seed), run in runs.items():
        plain = runs.get((row, BASELINE, seed), run)
        for what in ("initial", "part", "steps"):
            if plain[what] != run[what]:
                raise ValueError(f"{row}, {column}, seed {seed}: {what} differs from {BASELINE}'s; no pair")


def points_between(pairs: Sequence[Pair]) -> Interval:
    """By how much test accuracy differs from fp32's, of at least one pair."""
    return paired_interval([100 * (run["test"] - plain["test"]) for plain, run in pairs])


Reached = tuple[int, float] | None
"""Epoch and seconds of training, or never."""


def reached(run: Mapping[str, Any], level: float) -> Reached:
    """When validation accuracy first is ``level``."""
    place = next((place for place, val in enumerate(run["val"]) if val >= level), None)
    return None if place is None else (run["at"][place], run["train_seconds"][place])


def when_reached(plain: Mapping[str, Any], run: Mapping[str, Any]) -> Reached:
    """When ``run`` has 99 % of the validation accuracy that its fp32 run ended with; kept lines say it themselves."""
    if "reached" in run:
        kept: list[Any] | None = run["reached"]
        return None if kept is None else (kept[0], kept[1])
    return reached(run, PART_OF_BASELINE * plain["val"][-1])


def time_to_accuracy(pairs: Sequence[Pair]) -> tuple[float, float, int]:
    """Medians of epochs and seconds until a run has 99 % of the validation accuracy its fp32 run ended with.

    Runs that never have it count as later than all others, and are counted: the third value.
    """
    whens = [when_reached(plain, run) for plain, run in pairs]
    epochs, seconds = ([math.inf if when is None else when[place] for when in whens] for place in (0, 1))
    return statistics.median(epochs), statistics.median(seconds), whens.count(None)


def beside_baseline(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Medians over seeds of epochs and seconds until then, in those of the same seed's fp32 run; inf for never."""
    ratios: list[list[float]] = [[], []]
    for plain, run in pairs:
        goal, when = when_reached(plain, plain), when_reached(plain, run)
        assert goal is not None, "fp32 has what it ended with"
        for place in (0, 1):
            ratios[place].append(math.inf if when is None else when[place] / goal[place])
    return statistics.median(ratios[0]), statistics.median(ratios[1])


def timed_alike(pairs: Sequence[Pair]) -> list[Pair]:
    """Those that were run one at a time, or several, as the first seed was: others took other seconds."""
    is_alone = [plain.get("jobs") == 1 for plain, _ in pairs]
    return [pair for pair, alone in zip(pairs, is_alone, strict=True) if alone is is_alone[0]]
