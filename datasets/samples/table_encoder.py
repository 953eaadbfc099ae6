"""From the cells of a row to features: numbers standardised, words one-hot, both as the training rows have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class NumberColumn:
    """``(value - mean) / deviation``, by the training rows; a deviation of 0, a constant column, counts as 1."""

    name: str
    mean: float
    deviation: float


@dataclass(frozen=True)
class WordColumn:
    """One feature for each word of the training rows; a word that none of them has gives zeros."""

    name: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class TableEncoder:
    """What each column becomes, in their order.

    Args:
        columns: At least one.
    """

    columns: tuple[NumberColumn | WordColumn, ...]

    @classmethod
    def learn(cls, cells: Mapping[str, np.ndarray], train: np.ndarray) -> TableEncoder:
        """Learn from the training rows.

        Args:
            cells: float64 or object (``str``) ``(n,)`` by column, all finite and none empty.
            train: Numbers of the training rows.
        """
        columns: list[NumberColumn | WordColumn] = []
        for name, values in cells.items():
            if values.dtype == np.float64:
                columns.append(_number_column(name, values[train]))
            else:
                columns.append(WordColumn(name, tuple(sorted(set(values[train])))))
        return cls(tuple(columns))

    @property
    def num_features(self) -> int:
        """Width of a sample."""
        return sum(len(column.words) if isinstance(column, WordColumn) else 1 for column in self.columns)

    def encode(self, cells: Mapping[str, np.ndarray]) -> Tensor:
        """``(n, num_features)`` float32.

        Args:
            cells: As for `learn`; columns that it did not have are left out.

        Raises:
            ValueError: a column is missing or of the other kind, or a value is beyond float32 when standardised.
        """
        for column in self.columns:
            if column.name not in cells:
                raise ValueError(f"the column {column.name!r} is missing; the data were trained on with it")
            if (cells[column.name].dtype == np.float64) != isinstance(column, NumberColumn):
                kind = "numbers" if isinstance(column, NumberColumn) else "words"
                raise ValueError(f"the column {column.name!r} held {kind} when it was trained on, and does not now")
        num_rows = len(cells[self.columns[0].name])
        x = np.zeros((num_rows, self.num_features), dtype=np.float32)
        at = 0
        for column in self.columns:
            values = cells[column.name]
            if isinstance(column, NumberColumn):
                with np.errstate(over="ignore", invalid="ignore"):  # refused below
                    x[:, at] = (values - column.mean) / (column.deviation or 1.0)
                if not np.isfinite(x[:, at]).all():
                    row = int(np.argmin(np.isfinite(x[:, at])))
                    raise ValueError(
                        f"the column {column.name!r} has the value {values[row]} and a mean of {column.mean:g}; "
                        "that is beyond float32. Scale the column, or begin its name with _ to leave it out"
                    )
                at += 1
            else:
                place = {word: at + number for number, word in enumerate(column.words)}
                found = np.fromiter((place.get(word, -1) for word in values), np.int64, num_rows)
                x[np.flatnonzero(found >= 0), found[found >= 0]] = 1
                at += len(column.words)
        return torch.from_numpy(x)

    def to_json(self) -> dict[str, Any]:
        """Everything that `from_json` needs, as plain values."""
        return {"columns": [asdict(column) for column in self.columns]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> TableEncoder:
        """The encoder that `to_json` described.

        Raises:
            ValueError: it describes none.
        """
        try:
            return cls(tuple(_column(**column) for column in content["columns"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this describes no columns of a table ({str(error)[:200]})") from error


def _number_column(name: str, values: np.ndarray) -> NumberColumn:
    """Mean and deviation, calculated on values scaled by a power of two, which is exact, so that no sum overflows."""
    exponent = int(np.frexp(np.abs(values).max())[1])
    scaled = np.ldexp(values, -exponent)
    return NumberColumn(name, float(np.ldexp(scaled.mean(), exponent)), float(np.ldexp(scaled.std(), exponent)))


def _column(
    *, name: str, mean: float | None = None, deviation: float | None = None, words: Sequence[str] | None = None
) -> NumberColumn | WordColumn:
    if words is not None:
        return WordColumn(str(name), tuple(str(word) for word in words))
    if mean is None or deviation is None:
        raise ValueError(f"column {name!r} has neither words nor mean and deviation")
    return NumberColumn(str(name), float(mean), float(deviation))
