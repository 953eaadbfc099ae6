"""What this rank has exchanged for halo rows and their gradients: bytes, seconds and rounding errors, by name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nugnn.comm.compression.compressor import STEPS_BETWEEN_LOOKS

Direction = Literal["forward", "gradient", "evaluation"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
_NOT_YET = object()


class ExchangeTraffic:
    """Of the exchanges of one name and direction, summed over steps.

    Attributes:
        count: Exchanges begun; the same on every rank.
        num_bytes: Of the buffers that this rank handed over, its own padding and all.
        seconds: In which it handed them over, and waited for what it was sent: what of the exchange is not hidden
            behind computation. On a GPU between events of its stream, known when the clock of the ranks is read.
    """

    def __init__(self) -> None:
        self.count, self.num_bytes, self.seconds = 0, 0, 0.0
        self._error: float | Tensor | None = None
        self._measured_under: Any = _NOT_YET

    def begun(self, num_bytes: int) -> None:
        """An exchange was begun with so many bytes of this rank."""
        self.count += 1
        self.num_bytes += num_bytes

    def took(self, seconds: float) -> None:
        """Count seconds in an exchange."""
        self.seconds += seconds

    def left_nothing_out(self) -> None:
        """Rows travel as they are."""
        self._error, self._measured_under = 0.0, _NOT_YET

    def is_due(self, step: int, plan: object) -> bool:
        """Whether the rounding of this step is to be measured: of one in `STEPS_BETWEEN_LOOKS`, and of the first one.

        Args:
            step: Its number.
            plan: What decides about wires; the first step under another one counts as the first.
        """
        return step % STEPS_BETWEEN_LOOKS == 0 or self._measured_under is not plan

    def measured(self, pairs: Iterable[tuple[Tensor, Tensor]], plan: object) -> None:
        """Note the error of a rounding; a GPU is not waited for.

        Args:
            pairs: What was to be sent and what arrives, in blocks ``(n, D)``.
            plan: As for `is_due`.
        """
        squares: float | Tensor = 0.0
        for wanted, arrived in pairs:
            norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in (wanted - arrived, wanted)]
            squares = squares + torch.stack(norms).square()
        if isinstance(squares, Tensor):
            rest, whole = squares
            self._error = (rest / whole.clamp(min=torch.finfo(torch.float64).tiny)).sqrt()
        else:  # no row goes anywhere
            self._error = 0.0
        self._measured_under = plan

    @property
    def error(self) -> float | None:
        """Norm of what this rank's roundings left out, relative to that of what it had to send; as measured last.

        None where it was not measured, or something was not finite.
        """
        error = None if self._error is None else float(self._error)
        return error if error is not None and math.isfinite(error) else None

    def report(self) -> dict[str, Any]:
        """As plain values."""
        return {"count": self.count, "bytes": self.num_bytes, "seconds": self.seconds, "error": self.error}


class HaloTraffic:
    """All exchanges of this rank by direction and name."""

    def __init__(self) -> None:
        self._of: dict[Direction, dict[str, ExchangeTraffic]] = {direction: {} for direction in DIRECTIONS}

    def of(self, direction: Direction, name: str) -> ExchangeTraffic:
        """What is counted of ``name``."""
        named = self._of[direction]
        if name not in named:
            named[name] = ExchangeTraffic()
        return named[name]

    @property
    def forward(self) -> int:
        """Bytes of rows in training."""
        return self._bytes_of("forward")

    @property
    def gradient(self) -> int:
        """Bytes of gradients of rows."""
        return self._bytes_of("gradient")

    @property
    def evaluation(self) -> int:
        """Bytes of rows in evaluation."""
        return self._bytes_of("evaluation")

    def _bytes_of(self, direction: Direction) -> int:
        return sum(each.num_bytes for each in self._of[direction].values())

    def report(self) -> dict[str, Any]:
        """Bytes by direction, and each exchange by direction and name, as plain values."""
        return {
            **{f"{direction}_bytes": self._bytes_of(direction) for direction in DIRECTIONS},
            "exchanges": {
                direction: {name: each.report() for name, each in named.items()}
                for direction, named in self._of.items()
            },
        }
