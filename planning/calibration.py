"""Predicted epochs held against measured ones: the factor between them, the error bar that is left, and when it helps.

What is known of one kind of prediction is a list of measured runs. Runs of one model on one data set are alike, so a
model that was trained often counts as much as one that was trained once; where a model's own runs are enough, they
alone count for it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from nugnn._counted import counted

StandsOn = Literal["operators", "rates", "sheets"]
"""What seconds were predicted from: the model's operators, timed on these devices; rates measured of large operators;
rates of data sheets, if only of one device."""
SOURCES: dict[StandsOn, str] = {
    "operators": "operators timed here",
    "rates": "rates of a profile",
    "sheets": "data sheets",
}
FEW = 3
"""Runs of a model, or models, from which on a factor may be applied: of two, each follows from the other alone."""
_CLOSER = 0.75
"""Of the error without a factor, in logarithms, what may be left with it: a gain of less may be chance."""
_Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MeasuredRun(Protocol):
    """A run that was predicted and measured.

    Attributes:
        subject: Its model, data and settings, as a key.
        ratio: Measured seconds of an epoch, divided by predicted ones.
    """

    @property
    def subject(self) -> str: ...

    @property
    def ratio(self) -> float: ...


class Calibration(BaseModel):
    """How far predictions of one kind have been off on some devices.

    Args:
        stands_on: What such predictions stand on.
        runs: That were measured, of predictions of this kind on these devices.
        models: How many models they trained; one on two data sets, or with other settings, counts as two.
        used: Runs or models that factor and errors are made of.
        of_this: Whether these are the planned model's own runs on its data: where there are a few, or no others.
        factor: Median of measured over predicted seconds of an epoch; of the middle two, their geometric mean. None
            without a run.
        error_bar: By what share a prediction with the factor of the others is off, up or down, in the geometric mean:
            0.25 is a factor of 1.25. None where there are no two.
        error_without: The same of predictions as they are; None without a run.
        is_applied: Whether a plan's seconds are told with the factor.
        of_other_versions: Runs that would count, but for the version of nugnn, of torch or of the code that predicted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    stands_on: StandsOn
    runs: Annotated[int, Field(ge=0)]
    models: Annotated[int, Field(ge=0)]
    used: Annotated[int, Field(ge=0)]
    of_this: bool
    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    error_bar: _Share | None = None
    error_without: _Share | None = None
    is_applied: bool = False
    of_other_versions: Annotated[int, Field(ge=0)] = 0

    @property
    def applied_factor(self) -> float:
        """What told seconds are multiplied by."""
        return self.factor if self.is_applied and self.factor is not None else 1.0

    @property
    def told_error(self) -> float | None:
        """Mean error of seconds as they are told, as a share; None where it is not known."""
        return self.error_bar if self.is_applied else self.error_without if self.error_bar is not None else None


def calibrated(
    runs: Sequence[MeasuredRun], stands_on: StandsOn, subject: str | None = None, of_other_versions: int = 0
) -> Calibration:
    """What measured runs say of predictions of their kind.

    The factor is one for all devices, so it changes times and no shares. It is applied where a prediction stands on
    rates or sheets, a few runs are there, and these come out clearly closer by the factor of the others than as they
    are.

    Args:
        runs: Of one kind of prediction, on the same devices.
        stands_on: What such predictions stand on.
        subject: Of the planned run; None for predictions of any.
        of_other_versions: How many more there are that do not count, see `Calibration`.

    >>> from types import SimpleNamespace as Run
    >>> found = calibrated([Run(subject="gcn", ratio=2.0), Run(subject="sage", ratio=4.0)], "rates")
    >>> found.factor, found.error_bar, found.is_applied
    (2.8284271247461903, 1.0, False)
    """
    by_subject: dict[str, list[float]] = {}
    for run in runs:
        by_subject.setdefault(run.subject, []).append(run.ratio)
    own = by_subject.get(subject or "", [])
    of_this = bool(own) and (len(own) >= FEW or len(by_subject) == 1)
    ratios = own if of_this else [_middle(each) for each in by_subject.values()]
    found = Calibration(
        stands_on=stands_on,
        runs=len(runs),
        models=len(by_subject),
        used=len(ratios),
        of_this=of_this,
        of_other_versions=of_other_versions,
    )
    if not ratios:
        return found
    without, bar = _mean_error(ratios), None
    if len(ratios) > 1:
        others = [_middle([*ratios[:i], *ratios[i + 1 :]]) for i in range(len(ratios))]
        bar = _mean_error([ratio / factor for ratio, factor in zip(ratios, others, strict=True)])
    helps = bar is not None and bar < without and math.log1p(bar) <= _CLOSER * math.log1p(without)
    return found.model_copy(
        update={
            "factor": _middle(ratios),
            "error_bar": bar,
            "error_without": without,
            "is_applied": helps and len(ratios) >= FEW and stands_on != "operators",
        }
    )


def _middle(ratios: Sequence[float]) -> float:
    """The median; of the middle two the geometric mean, so that twice and half are as far apart."""
    low, high = statistics.median_low(ratios), statistics.median_high(ratios)
    return low if low == high else math.sqrt(low * high)


def _mean_error(ratios: Sequence[float]) -> float:
    """By what share measured and told seconds differ in the geometric mean, whichever is longer."""
    return math.expm1(math.fsum(abs(math.log(ratio)) for ratio in ratios) / len(ratios))


def in_words(found: Calibration, applied: str = "times here have the factor") -> str:
    """One or two sentences: how many runs say what, or that nothing is known, and that others do not count.

    Args:
        found: What they say.
        applied: Said where the factor is applied: to what.

    >>> print(in_words(calibrated([], "operators")))
    how far predictions from operators timed here are off on these devices is not known: no earlier run to compare with
    """
    source = SOURCES[found.stands_on]
    if found.factor is None or found.error_without is None:
        usual = "" if found.stands_on == "operators" else "; of small graphs and batches they are off by factors"
        return (
            f"how far predictions from {source} are off on these devices is not known: no earlier run to compare with"
            f"{usual}{_not_counted(found)}"
        )
    took = f"took {found.factor:.3g} x as long as predicted from {source}"
    whose = "this model on this data" if found.of_this else "one other model"
    if found.runs == 1:
        return f"one measured run, of {whose}, {took}; how far others are off is not known{_not_counted(found)}"
    if found.error_bar is None:
        return (
            f"{counted(found.runs, 'measured run')}, all of {whose}, {took}; how far other models are off is not known"
            f"{_not_counted(found)}"
        )
    who = f"{counted(found.used, 'measured run')} of {whose}"
    if not found.of_this:
        who = f"{counted(found.runs, 'measured run')} of {found.models} models or data sets"
    text = f"{who} {took}, in the median; off by {error_text(found.error_without)} in the mean as predicted, by "
    text += f"{error_text(found.error_bar)} with the factor of the others"
    return f"{text}; {applied if found.is_applied else 'the factor is not applied'}"


def _not_counted(found: Calibration) -> str:
    """That kept runs say nothing here, for those who see them in ``nugnn calibration``; empty without any."""
    if not found.of_other_versions:
        return ""
    were, do = ("was", "does") if found.of_other_versions == 1 else ("were", "do")
    return (
        f"; {counted(found.of_other_versions, 'earlier run')} {were} of another version of nugnn, of torch or of the "
        f"predictions, and {do} not count"
    )


def error_text(share: float) -> str:
    """An error as people read it: a share in per cent, with a digit behind the point where it is small; or a factor.

    >>> error_text(0.031), error_text(0.86), error_text(1.4)
    ('3.1 %', '86 %', 'a factor of 2.4')
    """
    if share >= 1:
        return f"a factor of {1 + share:.2g}"
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"
