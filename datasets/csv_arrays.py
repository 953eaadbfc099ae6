"""Numbers from a CSV file, plain or gzip, block by block: memory is bounded by a block whatever the file's size.

isal inflates in a thread of its own while pyarrow parses the blocks before in others. Each block ends at a line's end
and is parsed on its own, so the reader can say at which line of the file an error lies.
"""

from __future__ import annotations

import collections
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from nugnn._regular_file import no_file
from nugnn.datasets.unpacking import UnpacksTooFarError, limited

_BLOCK_BYTES = 1 << 20
_SMALL_FILE_BYTES = 1 << 16
_MOST_THREADS = 4
_LONGEST_LINE_BYTES = 1 << 28
_MOST_COLUMNS = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_MISSING = ("", "nan", "NaN", "NAN", "NA", "null", "NULL")


class CsvError(ValueError):
    """A CSV file that cannot be read as numbers: cut, damaged, or with a line that does not fit."""


def csv_blocks(
    path: str | os.PathLike[str], dtype: np.typing.DTypeLike, num_columns: int | None = None, *, missing: bool = False
) -> Iterator[np.ndarray]:
    """The rows of a CSV file without header, comma-separated, in blocks; empty lines are skipped.

    Args:
        path: Plain or gzip, told apart by content, not by name.
        dtype: Integer or floating type of every value.
        num_columns: How many values each line must have; None takes the number of the first line.
        missing: Whether an empty value, NA, null or nan is allowed; it becomes NaN, so ``dtype`` has to be floating.

    Yields:
        ``(rows, num_columns)`` arrays of ``dtype``, column after column in memory, in file order.

    Raises:
        CsvError: the file is missing, cut, damaged or no text; a line has another number of values, or a value is
            no number of that type. Names the file and the line, from 1.
    """
    path, dtype = Path(path), np.dtype(dtype)
    if missing and dtype.kind != "f":
        raise TypeError(f"missing values need a floating type, not {dtype}")
    blocks = _whole_lines(path)
    if num_columns is None:
        first = next((block for block in blocks if block.strip(b"\r\n")), b"")
        num_columns = first.strip(b"\r\n").split(b"\n", 1)[0].count(b",") + 1
        if num_columns > _MOST_COLUMNS:
            raise CsvError(f"{path} has {num_columns} values in its first line, at most {_MOST_COLUMNS} are read")
        blocks = _whole_lines(path)
    parse = functools.partial(_parse, dtype=dtype, num_columns=num_columns, missing=missing)
    for number, rows in enumerate(_in_order(parse, blocks)):
        if isinstance(rows, _BadBlock):
            line = 1 + sum(block.count(b"\n") for block in itertools.islice(_whole_lines(path), number))
            where = _first_bad_line(rows.block, line, dtype, num_columns, missing)
            last = line + rows.block.count(b"\n")
            reason = where or f"between lines {line} and {last}: {rows.reason}"
            raise CsvError(f"{path}, {reason}; correct the file or get it again")
        if len(rows):
            yield rows


def read_csv_array(
    path: str | os.PathLike[str], dtype: np.typing.DTypeLike, num_columns: int, *, most_rows: int
) -> np.ndarray:
    """The whole file as one ``(rows, num_columns)`` array.

    Args:
        path: As for ``csv_blocks``.
        dtype: As for ``csv_blocks``.
        num_columns: As for ``csv_blocks``.
        most_rows: How many the file can have; reading ends at more, so that a small file of very many lines, as a
            compressed one can be, takes no memory.

    Raises:
        CsvError: as ``csv_blocks``, or the file has more rows.
    """
    blocks: list[np.ndarray] = []
    num_rows = 0
    for block in csv_blocks(path, dtype, num_columns):
        num_rows += len(block)
        if num_rows > most_rows:
            raise CsvError(f"{path} has more than {most_rows} lines; get the file again")
        blocks.append(block)
    return np.concatenate(blocks) if blocks else np.empty((0, num_columns), dtype)


def csv_lines(path: str | os.PathLike[str]) -> Iterator[list[str]]:
    """The lines of a small CSV file of words, split at commas; empty lines are skipped.

    Raises:
        CsvError: as ``csv_blocks``, or the text is not UTF-8.
    """
    path = Path(path)
    for block in _whole_lines(path):
        try:
            text = block.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CsvError(f"{path} is not UTF-8 text ({error}); get the file again") from error
        for line in text.splitlines():
            if line.strip():
                yield [word.strip() for word in line.split(",")]


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Blocks of about a megabyte, more for longer lines, that end with a line; the byte-order mark is dropped."""
    pieces: list[bytes] = []
    held = 0
    for number, block in enumerate(_content(path)):
        if number == 0 and block.startswith(_BOM):
            block = block[len(_BOM) :]
        cut = block.rfind(b"\n") + 1
        if not cut:
            pieces.append(block)
            held += len(block)
            if held > _LONGEST_LINE_BYTES:
                raise CsvError(f"{path} has no line end in {held} bytes: it is no CSV file; get the file again")
            continue
        yield b"".join([*pieces, block[:cut]])
        pieces, held = [block[cut:]], len(block) - cut
    if held:
        yield b"".join(pieces)


def _content(path: Path) -> Iterator[bytes]:
    """The file's bytes, inflated."""
    import zlib

    from isal import igzip_lib

    try:
        with _open(path) as file:
            block = file.read(_BLOCK_BYTES)
            if path.stat().st_size < _SMALL_FILE_BYTES:
                while block:
                    yield block
                    block = file.read(_BLOCK_BYTES)
                return
            # one block ahead, in a thread of its own; igzip_threaded was seen to hang on small files
            with ThreadPoolExecutor(1) as pool:
                while block:
                    ahead = pool.submit(file.read, _BLOCK_BYTES)
                    yield block
                    block = ahead.result()
    except EOFError as error:
        size = path.stat().st_size
        raise CsvError(
            f"{path} is not a complete gzip file: it is cut off after {size} bytes; get the file again"
        ) from error
    except (OSError, zlib.error, igzip_lib.IsalError, ValueError) as error:  # type: ignore[misc]  # isal's stub
        if isinstance(error, (CsvError, UnpacksTooFarError)):
            raise
        raise CsvError(f"{path} is damaged or cannot be read ({error}); get the file again") from error


def _open(path: Path) -> IO[bytes]:
    if (problem := no_file(path)) is not None:
        if problem == "no such file":
            problem = "is missing: the download or copy is incomplete; get the file again"
        raise CsvError(f"{path} {problem}")
    with path.open("rb") as file:
        head = file.read(512)
    if head[:2] == _GZIP_MAGIC:
        from isal import igzip

        return limited(path, igzip.open(path, "rb"), is_held=False)
    if not head and path.suffix == ".gz":
        raise CsvError(f"{path} is not a complete gzip file: it is empty; get the file again")
    if path.suffix == ".gz":
        what = "a web page, as from a failed download" if head.lstrip()[:1] == b"<" else f"no gzip ({head[:8]!r})"
        raise CsvError(f"{path} is not a complete gzip file: it is {what}; get the file again")
    return path.open("rb")


@dataclass(frozen=True)
class _BadBlock:
    block: bytes
    reason: str


def _in_order(
    parse: Callable[[bytes], np.ndarray | _BadBlock], blocks: Iterator[bytes]
) -> Iterator[np.ndarray | _BadBlock]:
    """What ``parse`` makes of each block, in order; from the second block on in threads, as pyarrow frees the GIL."""
    for block in itertools.islice(blocks, 1):
        yield parse(block)
    num_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    waiting: collections.deque[Future[np.ndarray | _BadBlock]] = collections.deque()
    pool = None
    try:
        for block in blocks:
            pool = pool or ThreadPoolExecutor(num_threads)
            waiting.append(pool.submit(parse, block))
            if len(waiting) > num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _parse(block: bytes, dtype: np.dtype[Any], num_columns: int, missing: bool) -> np.ndarray | _BadBlock:
    import pyarrow as pa
    from pyarrow import csv

    kind = pa.from_numpy_dtype(dtype)
    names = [str(column) for column in range(num_columns)]
    try:
        table = csv.read_csv(
            pa.BufferReader(block),
            csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=names),
            csv.ParseOptions(),
            csv.ConvertOptions(column_types=dict.fromkeys(names, kind), check_utf8=False, null_values=list(_MISSING)),
        )
    except (pa.ArrowException, ValueError) as error:  # ArrowInvalid is a ValueError, other failures are not
        return _BadBlock(block, str(error).split("\n", 1)[0][:200])
    if not missing and any(column.null_count for column in table.columns):
        return _BadBlock(block, "a value is missing")
    columns = np.empty((num_columns, table.num_rows), dtype)
    for number, column in enumerate(table.columns):
        columns[number] = column.to_numpy()
    return columns.T


def _first_bad_line(block: bytes, line: int, dtype: np.dtype[Any], num_columns: int, missing: bool) -> str | None:
    """What is wrong with the first line that plain Python would refuse too; None when it finds none."""
    text = block.decode("utf-8", errors="replace")
    number: Callable[[str], Any] = int if dtype.kind in "iu" else float
    low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (0, 0)
    wanted = "whole number" if dtype.kind in "iu" else "number"
    for content, place in zip(text.split("\n"), itertools.count(line), strict=False):
        content = content.rstrip("\r")
        if not content:
            continue
        values = content.split(",")
        if len(values) != num_columns:
            return f"line {place} has {len(values)} values, expected {num_columns}: {content[:60]!r}"
        for column, value in enumerate(values, start=1):
            value = value.strip().strip('"')
            if value in _MISSING:
                if missing:
                    continue
                found = f"{value!r}, which stands for a missing one" if value else "missing"
                return f"line {place}, value {column} is {found}; expected a {wanted}"
            try:
                parsed = number(value)
            except ValueError:
                return f"line {place}, value {column} is {value[:40]!r}; expected a {wanted}"
            if dtype.kind in "iu" and not low <= parsed <= high:
                return f"line {place}, value {column} is {value[:40]}; allowed are {low} to {high}"
    return None
