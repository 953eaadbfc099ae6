"""What each column of a graph's CSV files is for, told by its name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

_SRC = ("src", "source")
_DST = ("dst", "target")
_ID = ("id", "node_id")
_MASKS = (("train", "train_mask"), ("val", "val_mask"), ("test", "test_mask"))


@dataclass(frozen=True)
class EdgeColumns:
    """Of the file of edges: all ``names``, both ends, and what is kept as data of edges."""

    names: list[str]
    src: str
    dst: str
    data: list[str]

    @property
    def ids(self) -> tuple[str, str]:
        return self.src, self.dst

    @classmethod
    def of(cls, where: str, names: list[str]) -> EdgeColumns:
        src, dst = _needed(where, names, _SRC), _needed(where, names, _DST)
        data = [name for name in _data_names(names) if name not in (src, dst)]
        if "weight" not in data:
            _refuse_misspelt(where, data, ("weight",))
        return cls(names, src, dst, data)


@dataclass(frozen=True)
class NodeColumns:
    """Of the file of nodes: all ``names``, and what they are for.

    Names that say nothing are features; where ``feat_0 ..`` are there, they are data of nodes.
    """

    names: list[str]
    id: str
    label: str | None
    label_matrix: list[str]
    split: str | None
    masks: list[str | None]
    features: list[str]
    data: list[str]

    @property
    def texts(self) -> list[str]:
        return [name for name in (self.split, *self.masks) if name is not None]

    @classmethod
    def of(cls, where: str, names: list[str]) -> NodeColumns:
        label = _optional(where, names, ("label",))
        matrix = _numbered(where, names, "label")
        if label and matrix:
            raise ValueError(f"{where}: both label and {matrix[0]}; give class numbers or a label matrix")
        split = _optional(where, names, ("split",))
        masks = [_optional(where, names, spellings) for spellings in _MASKS]
        if split and any(masks):
            raise ValueError(f"{where}: both split and {next(filter(None, masks))}; give one column or three masks")
        node_id = _needed(where, names, _ID)
        taken = {node_id, label, split, *matrix, *masks}
        features = _numbered(where, names, "feat")
        others = [name for name in _data_names(names) if name not in taken and name not in features]
        if not (label or matrix):
            _refuse_misspelt(where, others, ("label",))
        if not (split or any(masks)):
            _refuse_misspelt(where, others, ("split",))
        elif any(masks):
            lacking = (spellings for spellings, mask in zip(_MASKS, masks, strict=True) if mask is None)
            _refuse_misspelt(where, others, tuple(spelling for spellings in lacking for spelling in spellings))
        data = others if features else []
        return cls(names, node_id, label, matrix, split, masks, features or others, data)


def _refuse_misspelt(where: str, others: Sequence[str], wanted: Sequence[str]) -> None:
    """Refuse a column that has all but the name of one that is not there; it would become a feature or be data."""
    for word in wanted:
        for name in others:
            if _is_misspelt(name.lower(), word):
                raise ValueError(
                    f"{where}: the column {name!r} has no meaning of its own; did you mean {word!r}? Rename it, also "
                    "where it is meant to be numbers of another kind, or begin its name with _ to leave it out"
                )


def _is_misspelt(found: str, word: str) -> bool:
    """Whether one slip of the keyboard after the first letter parts ``found`` from a word of four letters or more.

    The first letter has to be right: ``rain`` is a likely feature, and no slip for ``train``.

    >>> [_is_misspelt(found, "label") for found in ("lable", "labels", "labl", "lavel", "label", "table", "level")]
    [True, True, True, True, False, False, False]
    """
    if found == word or len(word) < 4 or found[:1] != word[0]:
        return False
    swapped = {word[:at] + word[at + 1] + word[at] + word[at + 2 :] for at in range(1, len(word) - 1)}
    if len(found) == len(word):
        return found in swapped or sum(a != b for a, b in zip(found, word, strict=True)) == 1
    shorter, longer = sorted((found, word), key=len)
    return any(longer[:at] + longer[at + 1 :] == shorter for at in range(len(longer)))


def _needed(where: str, names: Sequence[str], spellings: tuple[str, ...]) -> str:
    found = _optional(where, names, spellings)
    if found is None:
        close = [match for name in spellings for match in difflib.get_close_matches(name, names, n=1, cutoff=0.65)]
        hint = f"did you mean {close[0]!r} to be it? " if close else ""
        raise ValueError(
            f"{where}: no column {' or '.join(map(repr, spellings))}; {hint}the columns found are "
            f"{', '.join(names)!s:.300}"
        )
    return found


def _optional(where: str, names: Sequence[str], spellings: tuple[str, ...]) -> str | None:
    found = [name for name in names if name.lower() in spellings]
    if len(found) > 1:
        raise ValueError(f"{where}: the columns {' and '.join(map(repr, found))} mean the same; keep one")
    return found[0] if found else None


def _numbered(where: str, names: Sequence[str], prefix: str) -> list[str]:
    """The columns ``prefix_0 ..``, by number; they have to be complete."""
    by_number = {int(name[len(prefix) + 1 :]): name for name in names if re.fullmatch(rf"{prefix}_[0-9]{{1,9}}", name)}
    for number in range(len(by_number)):
        if number not in by_number:
            raise ValueError(f"{where}: {prefix}_{number} is missing among {len(by_number)} columns {prefix}_...")
    return [by_number[number] for number in range(len(by_number))]


def _data_names(names: Sequence[str]) -> list[str]:
    return [name for name in names if not name.startswith("_")]
