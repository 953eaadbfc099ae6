"""Rows of a CSV file with labels: one file, or a folder with ``train.csv`` and the other parts beside it."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from nugnn.datasets.archive import looks_like_html
from nugnn.datasets.samples.class_labels import class_numbers, is_number_text, refuse_unseen
from nugnn.datasets.samples.division import Division
from nugnn.datasets.samples.parts import PART_NAMES, joined, part_files
from nugnn.datasets.samples.sample_data import SampleData
from nugnn.datasets.samples.table_encoder import TableEncoder
from nugnn.datasets.samples.tensor_samples import TensorSamples
from nugnn.datasets.text_table import open_binary, read_bytes, read_header, read_table, to_array

if TYPE_CHECKING:
    import pyarrow as pa

_SUFFIXES = (".csv", ".csv.gz")
_MOST_WORDS = 100
_MISSING = ("", "na", "n/a", "#n/a", "nan", "null", "?")
_OTHER_SEPARATORS = {"\t": "tabs", ";": "semicolons", "|": "bars"}


@dataclass(frozen=True, eq=False)
class _Rows:
    """The cells of a file as text, but for columns whose names begin with ``_``."""

    path: Path
    table: pa.Table

    @classmethod
    def read(cls, path: Path) -> _Rows:
        with open_binary(path) as file:
            head = file.read(512) if path.suffix != ".gz" else b""
        if looks_like_html(head):
            raise ValueError(f"{path} is a web page, as from a failed download; get the file again")
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise ValueError(f"{path} is UTF-16; save it as UTF-8")
        names = read_header(path)
        if len(names) == 1:
            used = next((word for mark, word in _OTHER_SEPARATORS.items() if mark in names[0]), None)
            hint = f"; it seems to be separated by {used}" if used else ""
            raise ValueError(f"{path}: line 1 has one cell, {names[0]!r:.80}{hint}; separate cells with commas")
        kept = [name for name in names if not name.startswith("_")]
        if not kept:
            raise ValueError(f"{path}: the names of all columns begin with _, which leaves them out")
        table = read_table(path, str(path), names, types=dict.fromkeys(names, "string"), columns=kept)
        if not len(table):
            raise ValueError(f"{path} has a header and no rows below it")
        return cls(path, table)

    def place(self, row: int) -> str:
        """File and line of a row: blank lines count among the lines and make no rows."""
        lines = io.StringIO(read_bytes(self.path).decode("utf-8-sig", errors="replace"), newline="")
        reader = csv.reader(lines)
        line, seen = row + 2, -1  # the header is the row before the first
        with contextlib.suppress(csv.Error):  # where Arrow read what this reader does not
            for cells in reader:
                seen += bool(cells)
                if seen == row + 1:
                    line = reader.line_num
                    break
        return f"{self.path}: line {line}"


def load_table(path: Path, *, seed: int, val_fraction: float | None, test_fraction: float | None) -> SampleData:
    """``PATH.csv`` with a header, or a folder with ``train.csv`` and perhaps ``val.csv`` and ``test.csv``.

    The column ``label`` holds the labels, or the last one where none is called so. A column ``split`` (train, val,
    test) divides the rows of a single file; otherwise it is drawn. Columns whose names begin with ``_`` are left out.
    A column of numbers becomes one feature, less the mean and divided by the standard deviation of the training rows;
    a column of words becomes a feature for each of the words that training rows have, at most 100.

    Args:
        path: The file or folder.
        seed: Of the division, where one is drawn.
        val_fraction: See `parts.joined`.
        test_fraction: See `parts.joined`.

    Raises:
        ValueError: no such file, an empty one, another separator, a row with too few or many cells, an empty cell or
            one that stands for a missing value, a column of numbers with a word in it, one with more than 100 words,
            parts with other columns; see also `class_numbers`. Names file and line.
    """
    read = {part: _Rows.read(file) for part, file in part_files(path, _SUFFIXES).items()}
    names = _same_names(list(read.values()))
    label, split = _label_and_split(next(iter(read.values())).path, names, is_divided="all" not in read)
    columns = {name: _joined(name, list(read.values())) for name in names}
    counts = {part: len(rows.table) for part, rows in read.items()}
    ends = np.cumsum(list(counts.values()))

    def place(sample: int) -> str:
        part = int(np.searchsorted(ends, sample, side="right"))
        rows = list(read.values())[part]
        return rows.place(sample - int(ends[part]) + len(rows.table))

    labels, class_names = class_numbers(columns[label].to_pylist(), place)
    if split is None:
        division = joined(counts, labels, seed=seed, val_fraction=val_fraction, test_fraction=test_fraction)
    else:
        division = _listed_division(columns[split], split, place, (val_fraction, test_fraction))
    refuse_unseen(labels, division.train, class_names, place)
    values = {name: _values(name, columns[name], place) for name in names if name not in (label, split)}
    if not values:
        raise ValueError(f"{path}: beside {label!r} there is no column to learn from")
    encoder = TableEncoder.learn(values, division.train)
    try:
        x = encoder.encode(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    train, val, test = (TensorSamples(x[ids], torch.from_numpy(labels[ids])) for ids in division)
    return SampleData(
        name=path.name.removesuffix(".gz").removesuffix(".csv"),
        kind="table",
        train=train,
        val=val,
        test=test,
        num_classes=len(class_names),
        class_names=class_names,
        input_shape=(encoder.num_features,),
        preparation=encoder,
    )


def _same_names(read: Sequence[_Rows]) -> list[str]:
    names: list[str] = read[0].table.column_names
    for rows in read[1:]:
        if rows.table.column_names != names:
            raise ValueError(
                f"{rows.path}: the columns are {', '.join(rows.table.column_names)!s:.200}, and in "
                f"{read[0].path.name} {', '.join(names)!s:.200}; all parts need the same, in one order"
            )
    return names


def _label_and_split(path: Path, names: Sequence[str], *, is_divided: bool) -> tuple[str, str | None]:
    """Names of the columns of labels and of parts."""
    called = {word: [name for name in names if name.lower() == word] for word in ("label", "split")}
    for word, found in called.items():
        if len(found) > 1:
            raise ValueError(f"{path}: the columns {' and '.join(map(repr, found))} mean the same; keep one {word}")
    if called["split"] and is_divided:
        raise ValueError(
            f"{path}: there is a column {called['split'][0]!r}, and the parts are files of their own; leave one out"
        )
    others = [name for name in names if name not in called["split"]]
    if not others:
        raise ValueError(f"{path}: there is no column of labels")
    return (called["label"] or others[-1:])[0], called["split"][0] if called["split"] else None


def _joined(name: str, read: Sequence[_Rows]) -> pa.ChunkedArray:
    """A column of all parts, without blanks around its cells."""
    import pyarrow as pa
    import pyarrow.compute as pc

    chunks = [chunk for rows in read for chunk in rows.table[name].chunks]
    return pc.utf8_trim_whitespace(pa.chunked_array(chunks, pa.string()))


def _listed_division(
    column: pa.ChunkedArray, name: str, place: Callable[[int], str], fractions: tuple[float | None, float | None]
) -> Division:
    if fractions != (None, None):
        raise ValueError(f"{place(0)}: the column {name!r} divides the rows; leave the fractions of val and test out")
    cells = column.to_pylist()
    parts = [PART_NAMES.get(cell.lower()) for cell in cells]
    if None in parts:
        row = parts.index(None)
        raise ValueError(f"{place(row)}, column {name!r} is {cells[row]!r:.80}; allowed are train, val and test")
    found = np.array(parts)
    if "train" not in parts:
        raise ValueError(f"{place(0)}: no row has 'train' in the column {name!r}; there is nothing to learn from")
    return Division(*(np.flatnonzero(found == part) for part in ("train", "val", "test")))


def _values(name: str, column: pa.ChunkedArray, place: Callable[[int], str]) -> np.ndarray:
    """The cells as float64, or as words when none is a number."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_missing = np.asarray(pc.is_in(pc.utf8_lower(column), value_set=pa.array(_MISSING)))
    if is_missing.any():
        row = int(np.argmax(is_missing))
        cell = column[row].as_py()
        found = f"is {cell!r}, which stands for a missing value" if cell else "is empty"
        raise ValueError(
            f"{place(row)}, column {name!r} {found}; fill it, remove the row, or begin the column's name with _ to "
            "leave it out"
        )
    try:
        values = to_array(pc.cast(column, pa.float64()))
    except pa.ArrowInvalid:
        values = _words_or_odd_numbers(name, column, place)
    if values.dtype == np.float64 and not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values)))
        raise ValueError(f"{place(row)}, column {name!r} is {column[row].as_py()!r:.80}; give a finite number")
    return values


def _words_or_odd_numbers(name: str, column: pa.ChunkedArray, place: Callable[[int], str]) -> np.ndarray:
    """The cells of a column that Arrow did not take for numbers; it does not know ``+1``, for one."""
    coded = column.combine_chunks().dictionary_encode()
    words = coded.dictionary.to_pylist()
    numbers = np.asarray(coded.indices)
    is_number = np.array([is_number_text(word) for word in words])[numbers]
    if is_number.all():
        return np.array([float(word) for word in words])[numbers]
    if is_number.any():
        mostly_numbers = is_number.mean() >= 0.5
        row = int(np.argmin(is_number) if mostly_numbers else np.argmax(is_number))
        raise ValueError(
            f"{place(row)}, column {name!r} is {words[numbers[row]]!r:.80}, and other rows have "
            f"{'numbers' if mostly_numbers else 'words'} there; a column holds one or the other"
        )
    if len(words) > _MOST_WORDS:
        raise ValueError(
            f"{place(0)}, column {name!r} is {words[0]!r:.80}, one of {len(words)} words; at most {_MOST_WORDS} become "
            "features. Begin the column's name with _ to leave it out, or join rare words"
        )
    return np.array(words, dtype=object)[numbers]
