"""Delimited text as an Arrow table, with errors that name the file, the row, the column and the value."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np

from nugnn._regular_file import require_file
from nugnn.datasets.unpacking import check_fits_memory, limited

if TYPE_CHECKING:
    import pyarrow as pa

_CONVERSION = re.compile(
    r"In CSV column #(\d+): (?:Row #(\d+): )?CSV conversion error to (\w+): invalid value '(.*)'", re.S
)
_WIDTH = re.compile(r"(?:Row #(\d+): )?Expected (\d+) columns, got (\d+): (.*)", re.S)
_KINDS = {"int64": "a whole number", "double": "a number"}
_LONGEST_HEADER = 16 * 2**20
_OTHER_SEPARATORS = (";", "\t", "|")
_CHUNK_BYTES = 1 << 23


class CellTypeError(ValueError):
    """A cell of ``column`` is not of the type asked for; the text names it."""

    def __init__(self, message: str, column: str) -> None:
        super().__init__(message)
        self.column = column


def open_binary(path: Path) -> BinaryIO:
    """The file's bytes, decompressed where its name ends in ``.gz``, to be read into memory.

    Raises:
        ValueError: no such file, or one that does not fit into memory; reading it raises `UnpacksTooFarError` as soon
            as more has come out than `nugnn.datasets.unpacking` allows.
    """
    require_file(path)
    if path.suffix != ".gz":
        check_fits_memory(path, path.stat().st_size, is_text=True)
        return path.open("rb")
    from isal import igzip

    return limited(path, igzip.open(path, "rb"), is_held=True)


def read_bytes(path: Path) -> bytes:
    """All bytes of the file, decompressed where its name ends in ``.gz``.

    Raises:
        ValueError: no such file, or the compressed file is damaged, cut off or unpacks too far.
    """
    try:
        with open_binary(path) as file:
            return b"".join(iter(lambda: file.read(_CHUNK_BYTES), b""))
    except _gzip_errors() as error:
        raise ValueError(_damaged(path, error)) from error


def read_header(path: Path) -> list[str]:
    """The names in the first row of a comma-separated file, stripped of blanks and a byte-order mark.

    Raises:
        ValueError: no such file, an empty one, not UTF-8, parted by something else than commas, or a column that has
            no name or the name of another.
    """
    try:
        with open_binary(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
            names = [name.strip() for name in next(csv.reader([file.readline(_LONGEST_HEADER)]), [])]
    except _gzip_errors() as error:
        raise ValueError(_damaged(path, error)) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: the header cannot be read ({error}); save the file as UTF-8 CSV") from error
    if not any(names):
        raise ValueError(f"{path}: the first row is empty; it has to name the columns")
    if len(names) == 1 and (other := next((mark for mark in _OTHER_SEPARATORS if mark in names[0]), None)):
        raise ValueError(
            f"{path}: the header is {names[0]!r:.200}: the separator looks like {other!r}; save the file with commas"
        )
    if "" in names:
        raise ValueError(f"{path}: column {names.index('') + 1} has no name; the header is {', '.join(names)!r:.300}")
    repeated = (
        [name for number, name in enumerate(names) if name in names[:number]] if len(set(names)) < len(names) else []
    )
    if repeated:
        raise ValueError(f"{path}: two columns are called {repeated[0]!r}; rename one")
    return names


def read_table(
    source: Path | bytes,
    where: str,
    names: Sequence[str],
    *,
    types: Mapping[str, str],
    delimiter: str = ",",
    header_rows: int = 1,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Read the rows below the header.

    Args:
        source: A file, or the bytes of one.
        where: How errors begin.
        names: All columns of the file, in order.
        types: ``"int64"``, ``"float64"`` or ``"string"`` per column; the type of others follows from their values.
            Empty cells are null, except in string columns.
        delimiter: One character. Quotes mean something only where it is a comma.
        header_rows: Rows to skip.
        columns: Which to return; None for all.

    Raises:
        CellTypeError: a cell is not of its column's type.
        ValueError: a row has too many or too few cells, the text is not UTF-8, or the compressed file is damaged.
    """
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    arrow_types = {"int64": pa.int64(), "float64": pa.float64(), "string": pa.string()}
    parse = arrow_csv.ParseOptions(delimiter=delimiter, quote_char='"' if delimiter == "," else False)
    convert = arrow_csv.ConvertOptions(
        column_types={name: arrow_types[kind] for name, kind in types.items()},
        include_columns=list(columns) if columns is not None else None,
        strings_can_be_null=False,
        timestamp_parsers=[],
    )

    def attempt(use_threads: bool) -> pa.Table:
        read = arrow_csv.ReadOptions(
            column_names=list(names), skip_rows=header_rows, use_threads=use_threads, block_size=8 * 2**20
        )
        with open_binary(source) if isinstance(source, Path) else io.BytesIO(source) as file:
            return arrow_csv.read_csv(file, read_options=read, parse_options=parse, convert_options=convert)

    try:
        return attempt(True)
    except pa.ArrowInvalid as first:
        if "Empty CSV file" in str(first):
            return _no_rows(list(columns if columns is not None else names), types)
        try:  # again on one thread: only then does Arrow know the number of the row
            attempt(False)
        except pa.ArrowInvalid as second:
            _refuse(where, names, str(second))
        _refuse(where, names, str(first))
    except _gzip_errors() as error:
        raise ValueError(_damaged(Path(where), error)) from error


def to_array(column: pa.ChunkedArray) -> np.ndarray:
    """A column as a NumPy array that may be written to, as torch wants it; nulls of numbers become NaN."""
    values = column.to_numpy()
    return values if values.flags.writeable else values.copy()


def _no_rows(columns: Sequence[str], types: Mapping[str, str]) -> pa.Table:
    import pyarrow as pa

    arrow_types: dict[str, Any] = {"int64": pa.int64(), "float64": pa.float64(), "string": pa.string()}
    return pa.table({name: pa.array([], arrow_types[types.get(name, "float64")]) for name in columns})


def _refuse(where: str, names: Sequence[str], problem: str) -> NoReturn:
    if match := _CONVERSION.search(problem):
        column, row, kind, value = match.groups()
        name = names[int(column)] if int(column) < len(names) else f"number {column}"
        place = f"row {row}, " if row else ""
        raise CellTypeError(f"{where}: {place}column {name!r} holds {value!r:.80}, not {_KINDS.get(kind, kind)}", name)
    if match := _WIDTH.search(problem):
        row, expected, found, text = match.groups()
        place = f"row {row}" if row else "a row"
        raise ValueError(
            f"{where}: {place} has {found} cells, the header has {expected} "
            f"({', '.join(names)!s:.200}); the row is {text!r:.80}"
        )
    raise ValueError(f"{where}: it cannot be read as text in columns: {problem!s:.300}")


def _gzip_errors() -> tuple[type[BaseException], ...]:
    from isal import isal_zlib

    return OSError, EOFError, isal_zlib.error  # type: ignore[return-value]  # its types say object


def _damaged(path: Path, error: BaseException) -> str:
    what = "is not a complete gzip file" if path.suffix == ".gz" else "cannot be read"
    return f"{path} {what} ({error}). Get the file again"
