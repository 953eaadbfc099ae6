"""Wires of halo rows by what travels and between whom: the least error that a time allows. Pure functions of numbers.

What is minimised is the squared error that rounding adds to rows, in the mean, relative to the squares of all that
travels under the same name, added over names: without the ratio, gradients, which are small numbers, would count for
nothing. What is bounded is the predicted time of all exchanges of a step, with encoding and decoding.

Source: Wan et al., "Adaptive Message Quantization and Parallelization for Distributed Full-graph GNN Training", MLSys
2023, poses such a problem for each exchange, on groups of nodes, weighs time against variance and takes a solver of
integer programs. Here one problem covers a step, its unit is what one rank sends another, and time is a bound.

Shape suffixes: K names of what travels, P ranks (sender, then receiver), W candidates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nugnn.comm.halo_target import HaloTarget

CANDIDATES = ("fp32", "fp16", "int8", "int4", "int2")
"""From the most exact wire on. ``bf16`` takes the bytes of ``fp16``, but for two a row, and errs 8 times as much."""

LEAST_GAIN = 0.05
"""Time is not paid for in errors unless it is this part of a step."""
_EXACTLY = 6
"""So many journeys are solved exactly; the best error for each second otherwise."""
_SLACK = 1 + 1e-12

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Traffic:
    """What the exchanges of a step carry.

    Args:
        names: K, in the order in which they first travel.
        num_exchanges: Of the step.
        num_bytes: ``(K, P, P, W)``.
        errors: ``(K, P, P, W)`` sums of squares, in the mean over random words; 0 where a wire changes nothing.
        squares: ``(K, P, P)`` sums of squares of what travels.
        num_values: ``(K, P, P)``.
    """

    names: tuple[str, ...]
    num_exchanges: int
    num_bytes: Floats
    errors: Floats
    squares: Floats
    num_values: Floats

    @property
    def relative_errors(self) -> Floats:
        """``(K, P, P, W)``: by the squares of all that has the same name."""
        whole_K = self.squares.sum((1, 2))
        scale_K = np.divide(1.0, whole_K, out=np.zeros_like(whole_K), where=whole_K > 0)
        return self.errors * scale_K[:, None, None, None]


@dataclass(frozen=True)
class LinkSpeed:
    """How fast rows travel between these ranks.

    Args:
        latency_seconds: Of an exchange of next to nothing.
        seconds_per_byte: ``[sender][receiver]``, for each byte that an exchange takes from one to the other, so that
            they add up to its seconds: what runs at once is in them.
        codec_seconds_per_value: For each of `CANDIDATES`, to encode and to decode a value on the slowest rank.
    """

    latency_seconds: float
    seconds_per_byte: tuple[tuple[float, ...], ...]
    codec_seconds_per_value: tuple[float, ...]


@dataclass(frozen=True)
class HaloBits:
    """Wires of a step, and what they are expected to take and to cost; the same on every rank.

    Args:
        wires: For each name ``[sender][receiver]``; rows of other names travel as they are.
        seconds: Of the exchanges of a step, predicted.
        plain_seconds: The same if all rows travelled as they are.
        target_seconds: What was asked for.
        compute_seconds: Of a step on the slowest rank, without exchanges.
        error: Squared, relative, added over names.
        values: How many travel by each wire in a step, of all ranks.
    """

    wires: dict[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    seconds: float = 0.0
    plain_seconds: float = 0.0
    target_seconds: float = 0.0
    compute_seconds: float = 0.0
    error: float = 0.0
    values: dict[str, int] = field(default_factory=dict)

    def is_plain(self, name: str) -> bool:
        """Whether all rows of that name travel as they are, between all ranks."""
        return all(wire == "fp32" for row in self.wires.get(name, ()) for wire in row)

    def wire(self, name: str, sender: int, receiver: int) -> str:
        """Of rows of that name, from one to the other."""
        return self.wires[name][sender][receiver] if name in self.wires else "fp32"

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> HaloBits:
        """What `dataclasses.asdict` gave, lists in place of tuples or not."""
        wires = {name: tuple(map(tuple, rows)) for name, rows in plain["wires"].items()}
        return cls(**{**plain, "wires": wires})

    def as_text(self) -> str:
        """A sentence for the user."""
        reach = ", which is out of reach" if self.seconds > self.target_seconds * _SLACK else ""
        target = (
            f"target {_milliseconds(self.target_seconds)}{reach}; computing takes {_milliseconds(self.compute_seconds)}"
        )
        if all(map(self.is_plain, self.wires)):
            return (
                f"halo_wire auto: fp32; the halo rows of an epoch are expected to take "
                f"{_milliseconds(self.plain_seconds)} ({target}), and fewer bits would not be worth their error"
            )
        total = sum(self.values.values())
        parts = ", ".join(f"{wire} {count / total:.0%}" for wire, count in self.values.items() if count)
        return (
            f"halo_wire auto: {parts} of the values; the halo rows of an epoch are expected to take "
            f"{_milliseconds(self.seconds)} in place of {_milliseconds(self.plain_seconds)} ({target}), with an error "
            f"of {math.sqrt(self.error / len(self.wires)):.2g} relative to their size"
        )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def rounding_errors(squared_ranges: float, squares: float, num_columns: int) -> tuple[float, ...]:
    """Squared error for each of `CANDIDATES`, in the mean.

    Stochastic rounding to steps of ``range / (2**b - 1)`` adds ``f (1 - f)`` of a squared step, where ``f`` is how far
    a value is on its way to the next level: a sixth, in the mean. 16 bits are off by at most ``2**-11`` of a value: a
    third of its square, in the mean.

    Args:
        squared_ranges: Sum over rows of the square of largest less smallest value.
        squares: Sum of squares of all values.
        num_columns: Values of a row.

    >>> ["%.1e" % error for error in rounding_errors(16.0, 1.0, 6)]
    ['0.0e+00', '7.9e-08', '2.5e-04', '7.1e-02', '1.8e+00']
    """
    by_bits = (squared_ranges * num_columns / (6 * (2**bits - 1) ** 2) for bits in (8, 4, 2))
    return (0.0, squares * 2.0**-22 / 3, *by_bits)


def plan_bits(traffic: Traffic, speed: LinkSpeed, compute_seconds: float, target: HaloTarget) -> HaloBits:
    """The wires of least error that keep the exchanges of a step within ``target``.

    Where that is out of reach, or nearly so: within `LEAST_GAIN` of a step of the fastest.

    Args:
        traffic: Finite.
        speed: Of these ranks.
        compute_seconds: Of a step.
        target: How long its exchanges may take.
    """
    num_ranks = len(speed.seconds_per_byte)
    bytes_KPPW, errors_KPPW = traffic.num_bytes, traffic.relative_errors
    is_coded = bytes_KPPW < bytes_KPPW[..., :1]
    codec_KPPW = traffic.num_values[..., None] / num_ranks * np.array(speed.codec_seconds_per_value)
    seconds_KPPW = bytes_KPPW * np.array(speed.seconds_per_byte)[None, :, :, None] + codec_KPPW * is_coded
    fixed = traffic.num_exchanges * speed.latency_seconds
    plain, fastest = fixed + seconds_KPPW[..., 0].sum(), fixed + seconds_KPPW.min(-1).sum()
    wanted = target.seconds(compute_seconds)
    budget = max(wanted, fastest + LEAST_GAIN * (compute_seconds + fastest))
    chosen_KPP = np.zeros(bytes_KPPW.shape[:3], dtype=np.int64)
    if plain > budget:
        places = np.argwhere(bytes_KPPW[..., 0] > 0)
        rows = tuple(places.T)
        picks = least_error(seconds_KPPW[rows].tolist(), errors_KPPW[rows].tolist(), float(budget - fixed))
        chosen_KPP[rows] = picks

    def of_chosen(x_KPPW: Floats) -> float:
        return float(np.take_along_axis(x_KPPW, chosen_KPP[..., None], -1).sum())

    values = {wire: int(traffic.num_values[chosen_KPP == number].sum()) for number, wire in enumerate(CANDIDATES)}
    wires = {
        name: tuple(tuple(CANDIDATES[w] for w in row) for row in chosen_KPP[k].tolist())
        for k, name in enumerate(traffic.names)
    }
    return HaloBits(
        wires, fixed + of_chosen(seconds_KPPW), float(plain), wanted, compute_seconds, of_chosen(errors_KPPW), values
    )


def least_error(
    seconds: Sequence[Sequence[float]], errors: Sequence[Sequence[float]], budget_seconds: float
) -> list[int]:
    """A choice for each journey: the least error in all that takes at most ``budget_seconds``.

    Never over budget where any choice is within; the fastest choice otherwise. More time never gives more error.
    Exact for few journeys; off by less than what one step of one journey gains otherwise.

    Args:
        seconds: Of each journey, by choice.
        errors: Likewise, at least 0 and finite.
        budget_seconds: For all.

    >>> least_error([[8, 4, 1], [8, 4, 1]], [[0, 1, 9], [0, 3, 50]], 9)
    [1, 1]
    >>> least_error([[8, 4, 1], [8, 4, 1]], [[0, 1, 9], [0, 3, 50]], 0)
    [2, 2]
    """
    fronts = [_front(of_one, err) for of_one, err in zip(seconds, errors, strict=True)]
    if len(fronts) <= _EXACTLY and (exact := _exact(fronts, budget_seconds)) is not None:
        return exact
    return _greedy(fronts, budget_seconds)


_Front = list[tuple[float, float, int]]
"""``(seconds, error, choice)``, from the fastest on: each is slower than the one before, and errs less."""


def _front(seconds: Sequence[float], errors: Sequence[float]) -> _Front:
    front: _Front = []
    for s, e, choice in sorted(zip(seconds, errors, range(len(seconds)), strict=True)):
        if not front or e < front[-1][1]:
            front.append((s, e, choice))
    return front


def _exact(fronts: Sequence[_Front], budget: float) -> list[int] | None:
    """Over all states that no other one beats in seconds and error; None where nothing is within budget."""
    states: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for number, front in enumerate(fronts):
        to_come = math.fsum(rest[0][0] for rest in fronts[number + 1 :])
        grown = sorted(
            (s + more, e + extra, (*path, choice))
            for s, e, path in states
            for more, extra, choice in front
            if s + more + to_come <= budget * _SLACK
        )
        states, least = [], math.inf
        for state in grown:
            if state[1] < least:
                states.append(state)
                least = state[1]
    return list(states[-1][2]) if states else None


def _greedy(fronts: Sequence[_Front], budget: float) -> list[int]:
    """From the fastest choices on, each time to where a second takes away the most error.

    The order does not depend on the budget, and a journey whose next step does not fit stays where it is; so a larger
    budget takes the same steps up to one that gains more than all that a smaller one can put in its place.
    """
    hulls = [_hull(front) for front in fronts]
    steps = sorted(
        ((after[1] - before[1]) / (after[0] - before[0]), number, place)
        for number, hull in enumerate(hulls)
        for place, (before, after) in enumerate(itertools.pairwise(hull), start=1)
    )
    at = [0] * len(hulls)
    spent = math.fsum(hull[0][0] for hull in hulls)
    for _, number, place in steps:
        more = hulls[number][place][0] - hulls[number][place - 1][0]
        if place == at[number] + 1 and spent + more <= budget * _SLACK:
            at[number], spent = place, spent + more
    return [hull[place][2] for hull, place in zip(hulls, at, strict=True)]


def _hull(front: _Front) -> _Front:
    """Those choices after which a second takes away ever less error."""
    hull: _Front = []
    for point in front:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(before: tuple[float, float, int], after: tuple[float, float, int]) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])
