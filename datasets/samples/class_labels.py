"""Labels as users write them, words or whole numbers, and the numbers of classes they stand for."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

import numpy as np

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_FEW_CLASSES = 20


def class_numbers(labels: Sequence[str], place: Callable[[int], str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Number the distinct labels: whole numbers by their value, words by code point.

    Args:
        labels: One for each sample.
        place: Where sample ``i`` stands, for errors: file and line.

    Returns:
        int64 ``(n,)``, and the labels in the order of their numbers.

    Raises:
        ValueError: a label is empty; two are the same number written differently; they are numbers with a fraction,
            or nearly all different: something to measure, no classes.

    >>> class_numbers(["10", "9", "10"], str)
    (array([1, 0, 1]), ('9', '10'))
    """
    first: dict[str, int] = {}
    for sample, label in enumerate(labels):
        first.setdefault(label, sample)
    if "" in first:
        raise ValueError(f"{place(first[''])}: the label is empty; every sample needs one")
    if all(_WHOLE.fullmatch(label) for label in first):
        names = sorted(first, key=int)
        for one, other in itertools.pairwise(names):
            if int(one) == int(other):
                raise ValueError(
                    f"{place(first[other])}: the label {other!r} is the same number as {one!r}; write both alike"
                )
    elif any(_is_fraction(label) for label in first) and all(is_number_text(label) for label in first):
        wrong = next(label for label in first if _is_fraction(label))
        raise ValueError(
            f"{place(first[wrong])}: the label {wrong!r:.40} is a number with a fraction; labels are classes, whole "
            "numbers or words, and numbers to estimate (regression) are not trained on"
        )
    else:
        names = sorted(first)
    if len(names) > max(_FEW_CLASSES, len(labels) // 2):
        raise ValueError(
            f"{place(0)}: {len(labels)} samples have {len(names)} different labels, such as {names[0]!r:.40}; "
            "that is no set of classes"
        )
    number = {name: place for place, name in enumerate(names)}
    return np.fromiter((number[label] for label in labels), np.int64, len(labels)), tuple(names)


def refuse_unseen(labels: np.ndarray, train: np.ndarray, names: Sequence[str], place: Callable[[int], str]) -> None:
    """Refuse a label that no training sample has: it could not be learned.

    Args:
        labels: ``(n,)`` numbers of classes of all samples.
        train: Numbers of the training samples.
        names: Of the classes.
        place: As in `class_numbers`.

    Raises:
        ValueError: with the first such sample.
    """
    seen = np.zeros(len(names), bool)
    seen[labels[train]] = True
    if not seen[labels].all():
        sample = int(np.argmin(seen[labels]))
        raise ValueError(
            f"{place(sample)}: no training sample has the label {names[labels[sample]]!r:.80}; add some, or correct it"
        )


def is_number_text(text: str) -> bool:
    """Whether people would read it as a number: ``-1``, ``.5``, ``1e3``, ``inf``; Python's ``1_000`` is none.

    >>> [is_number_text(text) for text in ("-1", "+.5", "1e3", "1_000", "one")]
    [True, True, True, False, False]
    """
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def _is_fraction(label: str) -> bool:
    return "." in label and is_number_text(label) and not float(label).is_integer()
