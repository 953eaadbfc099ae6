"""Which halo rows a training step reads: all of its own, those of the step before, or a random share of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

HALO_MODES = "exact, stale, or sampled:P with 0 < P <= 1, such as sampled:0.1"
"""What may be asked for, in words."""


@dataclass(frozen=True, slots=True)
class HaloMode:
    """One way to read halo rows in training; evaluation always reads all rows of its own step.

    Args:
        kind: ``exact``; ``stale``, one step late (`nugnn.comm.halo_stale`); or ``sampled`` (`nugnn.comm.halo_sample`).
        share: Of the halo rows that travel in a step, in the mean; 1 unless ``sampled``.
    """

    kind: Literal["exact", "stale", "sampled"] = "exact"
    share: float = 1.0

    @classmethod
    def parse(cls, text: str) -> HaloMode:
        """What the option's ``text`` means.

        >>> HaloMode.parse("sampled:0.10")
        HaloMode(kind='sampled', share=0.1)

        Raises:
            ValueError: It is none of `HALO_MODES`.
        """
        kind, _, share = str(text).partition(":")
        try:
            if kind == "sampled" and 0 < (number := float(share)) <= 1 and math.isfinite(number):
                return cls("sampled", number)
        except ValueError:
            pass
        if text == "exact":
            return cls()
        if text == "stale":
            return cls("stale")
        raise ValueError(f"halo_mode {text!r} is not known; choose {HALO_MODES}")

    def __str__(self) -> str:
        """As `parse` takes it, the same for the same mode."""
        return self.kind if self.kind != "sampled" else f"sampled:{self.share!r}"

    @property
    def is_exact(self) -> bool:
        """Whether nothing is approximate."""
        return self.kind == "exact"


def why_not_with(mode: HaloMode, *, halo_feedback: bool, precision: str) -> str | None:
    """Why ``mode`` cannot go together with other options of a run; None where it can."""
    if mode.kind == "sampled" and halo_feedback:
        return (
            "halo_feedback adds what a row has left out when the row travels next, and under sampled boundaries most "
            "rows do not travel in most steps; leave halo_feedback out, or use halo_mode exact or stale"
        )
    if mode.kind == "stale" and precision == "fp16":
        return (
            "precision fp16 scales the loss by a factor that changes from step to step, and stale gradients would "
            "arrive with that of the step before; use precision bf16 or fp32, or halo_mode exact"
        )
    return None


def checked_halo_mode(text: str, *, halo_feedback: bool = False, precision: str = "fp32") -> HaloMode:
    """What ``text`` means, found to fit the other options.

    Raises:
        ValueError: There is no such mode, or it does not go together with them.
    """
    mode = HaloMode.parse(text)
    if (problem := why_not_with(mode, halo_feedback=halo_feedback, precision=precision)) is not None:
        raise ValueError(f"halo_mode {mode}: {problem}")
    return mode
