"""A data set of samples: three map-style parts, and what a model has to know of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch.utils.data import Dataset

from nugnn.datasets.whole_file import write_whole

Kind = Literal["image", "text", "table"]


class Preparation(Protocol):
    """What was done to the raw samples, learned from the training part alone, so that it can be done to others."""

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values for a JSON file."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleData:
    """Images, text or rows of a table, each with one of ``num_classes`` labels.

    Args:
        name: For reports.
        kind: What a sample is.
        train: Samples to learn from; at least one.
        val: Samples to choose by; a data set without any, never None, where there are none.
        test: Samples to judge by; likewise.
        num_classes: Labels are ``0 .. num_classes - 1``.
        class_names: One for each label.
        input_shape: Of an ``x``: ``(channels, height, width)`` for images, ``(num_features,)`` for tables,
            ``(max_length,)`` for text.
        vocabulary_size: Token numbers are below it, for text; 0 otherwise.
        metric: How predictions are judged.
        preparation: How raw text or rows become an ``x``; None for images.

    Raises:
        ValueError: no training samples, another number of names than of classes, or a vocabulary beside other samples
            than text.
    """

    name: str
    kind: Kind
    train: Dataset[Any]
    val: Dataset[Any]
    test: Dataset[Any]
    num_classes: int
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    vocabulary_size: int = 0
    metric: Literal["accuracy"] = "accuracy"
    preparation: Preparation | None = None

    def __post_init__(self) -> None:
        if num_samples(self.train) == 0:
            raise ValueError(f"{self.name}: there are no training samples")
        if self.num_classes < 2:
            raise ValueError(f"{self.name}: all samples have the label {self.class_names[0]!r}; nothing can be learned")
        if len(self.class_names) != self.num_classes:
            raise ValueError(f"{self.name}: {self.num_classes} classes and {len(self.class_names)} names of classes")
        if (self.vocabulary_size > 0) != (self.kind == "text"):
            raise ValueError(f"{self.name}: {self.kind} samples and a vocabulary of {self.vocabulary_size}")

    @property
    def parts(self) -> Iterator[tuple[str, Dataset[Any]]]:
        """Name and samples of each part."""
        yield from (("train", self.train), ("val", self.val), ("test", self.test))

    def save_preparation(self, path: Path) -> None:
        """Write what predictions on further samples need as JSON: kind, classes, shape and preparation.

        `load_preparation` reads it. The file appears whole or not at all.
        """
        content = {
            "kind": self.kind,
            "class_names": list(self.class_names),
            "input_shape": list(self.input_shape),
            "preparation": None if self.preparation is None else self.preparation.to_json(),
        }
        write_whole(path, lambda file: file.write(json.dumps(content, ensure_ascii=False, indent=1).encode()))


def num_samples(part: Dataset[Any]) -> int:
    """``len(part)``, which torch leaves out of the type of a map-style data set."""
    return len(part)  # type: ignore[arg-type]
