"""How long the exchanges of halo rows may take, for ``halo_wire auto``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nugnn.comm.halo_mode import HaloMode

HALO_TARGETS = "a share of the computation such as 10%, or seconds such as 0.05s"
"""What may be asked for, in words."""
USUAL_TARGET = "10%"


@dataclass(frozen=True, slots=True)
class HaloTarget:
    """How long the exchanges of a step may take.

    Args:
        amount: At least 0: of the seconds that the step computes, or seconds.
        is_share: Which of both.
    """

    amount: float
    is_share: bool

    @classmethod
    def parse(cls, text: str) -> HaloTarget:
        """What the option's ``text`` means.

        >>> HaloTarget.parse("25%"), str(HaloTarget.parse("0.050s"))
        (HaloTarget(amount=0.25, is_share=True), '0.05s')

        Raises:
            ValueError: It is none of `HALO_TARGETS`.
        """
        number, unit = str(text)[:-1], str(text)[-1:]
        try:
            if unit in ("%", "s") and 0 <= (amount := float(number)) and math.isfinite(amount):
                return cls(amount / 100 if unit == "%" else amount, unit == "%")
        except ValueError:
            pass
        raise ValueError(f"halo_target {text!r} is not known; choose {HALO_TARGETS}")

    def __str__(self) -> str:
        """As `parse` takes it, the same for the same target."""
        return f"{self.amount * 100:g}%" if self.is_share else f"{self.amount:g}s"

    def seconds(self, compute_seconds: float) -> float:
        """Of a step that computes so long."""
        return self.amount * compute_seconds if self.is_share else self.amount


def why_not_target(target: str | None, *, halo_wire: str, mode: HaloMode) -> str | None:
    """Why ``target``, or ``halo_wire auto``, cannot go together with other options of a run; None where it can."""
    if halo_wire != "auto":
        return None if target is None else f"halo_target has no effect on halo_wire {halo_wire}, only on auto"
    if mode.kind == "sampled":
        return (
            "halo_wire auto plans by the bytes of each pair of workers, and under sampled boundaries these change from "
            "step to step; choose one wire for all, or halo_mode exact or stale"
        )
    return None


def checked_target(target: str | None, *, halo_wire: str, mode: HaloMode) -> HaloTarget | None:
    """What ``target`` means for ``halo_wire auto``, found to fit the other options; None for another wire.

    Raises:
        ValueError: There is no such target, or it does not go together with them.
    """
    if (problem := why_not_target(target, halo_wire=halo_wire, mode=mode)) is not None:
        raise ValueError(problem)
    return HaloTarget.parse(USUAL_TARGET if target is None else target) if halo_wire == "auto" else None
