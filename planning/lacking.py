"""What is said where no division of a graph fits the memories: what is lacking where, and what would do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nugnn.planning.in_words import in_bytes
from nugnn.planning.levels import capacity, flooded, level
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.share_curves import Curve
from nugnn.planning.work_model import WorkModel

_MOST_LINES, _MOST_CHOICES = 16, 4
"""Of a message that says what is lacking: devices; kinds of devices of which there could be more."""
_LEAST_FACTOR = 1e-4
"""Of the bytes; numbers that much smaller are no advice."""
_NOTHING = PartSizes(0, 0, 0, 0, 0)


class DoesNotFitError(ValueError):
    """No division of the graph fits the memories; the message says what is lacking where, and what would do."""


def what_is_lacking(
    work: WorkModel, curves: Sequence[Curve], limits: Sequence[float], names: Sequence[str] | None = None
) -> str:
    """Why `level` found nothing, with what would do: more devices, or fewer bytes for each node, edge and row.

    Args:
        work: The model.
        curves: Of each device.
        limits: Bytes of each.
        names: Of each; devices of one name are spoken of together. Their numbers when None.
    """
    called = [f"device {device}" for device in range(len(curves))] if names is None else list(names)
    by_speed = flooded(curves, [math.inf] * len(curves))  # not what is fastest: that may be all on one of some alike
    assert by_speed is not None, "without limits every graph fits"
    caps = [capacity(curve, limit) for curve, limit in zip(curves, limits, strict=True)]
    held = math.fsum(caps)
    alike: dict[tuple[str, str], list[str]] = {}
    for device, (cap, limit, need) in enumerate(zip(caps, limits, by_speed.bytes, strict=True)):
        if math.isinf(limit):
            continue
        room = f"{in_bytes(limit)} hold {cap:.1%}" if cap else f"{in_bytes(limit)} do not hold a single node"
        wanted = f"its share by speed, {by_speed.shares[device]:.1%}, needs {in_bytes(need)}"
        said = f"{room}; {wanted}{f', {in_bytes(need - limit)} more' if need > limit else ''}"
        alike.setdefault((called[device], said), []).append(called[device])
    lines = [
        f"{name[0].upper()}{name[1:]}: {said}." if len(own) == 1 else f"{len(own)} x {name}: {said}, each."
        for (name, said), own in alike.items()
    ]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"And so on for {len(lines) - _MOST_LINES} more."]
    empty = list(dict.fromkeys(called[device] for device, cap in enumerate(caps) if cap <= 0))
    if held >= 1 and empty:  # every device has to hold something
        which = f"{', '.join(empty[:_MOST_LINES])} {'does' if len(empty) == 1 else 'do'}"
        lines.insert(0, f"the graph does not fit: {which} not hold a single node; the others would hold all of it.")
    else:
        lines.insert(0, f"the graph does not fit: the devices together hold {held:.1%} of it.")
    more: dict[tuple[str, str], str] = {}
    for device, cap in enumerate(caps):
        if cap > 0 and held < 1:
            count = math.ceil((1 - held) / cap - 1e-9)
            key = (in_bytes(limits[device]), f"{cap:.1%}")
            more.setdefault(key, f"{count} more like {called[device]}")
    if more:
        choices = list(more.values())[:_MOST_CHOICES]
        lines.append(f"It would fit with {' or '.join(choices)}, as far as the model tells.")
    factor = fitting_factor(work, curves, limits)
    if factor is None or factor < _LEAST_FACTOR:
        lines.append("Smaller numbers would not do: what a part takes whatever its size is too much already.")
    else:
        shown = f"{math.floor(100 * factor) / 100:.2f}" if factor >= 0.01 else f"{factor:.1g}"
        half = "numbers of 16 bits for 32 would do" if factor >= 0.5 else "numbers of 16 bits for 32 would not do"
        lines.append(
            f"It would fit if nodes, edges and rows took {shown} of their bytes: {half}, or features and layers "
            f"of about {shown} of their width, where indices are a small part."
        )
    return "\n".join(lines)


def fitting_factor(work: WorkModel, curves: Sequence[Curve], limits: Sequence[float]) -> float | None:
    """By what all bytes that grow with a part must be multiplied for the graph to fit; None where 0 is not enough."""
    fixed = [float(work.bytes(part, _NOTHING)) for part in range(len(curves))]

    def fits(factor: float) -> bool:
        smaller = [
            Curve(curve.fractions, curve.seconds, base + factor * np.maximum(curve.bytes - base, 0))
            for curve, base in zip(curves, fixed, strict=True)
        ]
        return level(smaller, limits) is not None

    if not fits(0.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
