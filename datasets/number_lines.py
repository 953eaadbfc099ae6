"""Lines of numbers, parted by blanks or tabs, as one array per column; errors name the line and its text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from nugnn.datasets.text_table import read_table, to_array

_WHOLE = re.compile(rb"[0-9]{1,18}")
_WHOLE_OR_NEGATIVE = re.compile(rb"[-+]?[0-9]{1,18}")
_NUMBER = re.compile(rb"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?(nan|inf|infinity)", re.I)


class NumberLines:
    """A text file in memory, from the byte on where its lines of numbers begin.

    Args:
        where: How errors begin.
        content: The whole file.
        start: Where the first line of numbers begins.
        comments: What a line begins with that is not read; empty lines are not read either.
        columns: Of each line: ``"id"`` (a whole number from 0), ``"int64"`` or ``"float64"``.
        expected: What every line has to be, for errors.
    """

    def __init__(
        self,
        where: str,
        content: bytes,
        start: int,
        *,
        comments: tuple[bytes, ...],
        columns: Mapping[str, str],
        expected: str,
    ) -> None:
        self._where = where
        self._content = content
        self._start = start
        self._comments = comments
        self._columns = columns
        self._expected = expected

    def read(self) -> dict[str, np.ndarray]:
        """The columns, int64 or float64.

        Raises:
            ValueError: a line is not as ``columns`` says; names the first such line.
        """
        body = self._content[self._start :]
        if b"x" not in body and b"X" not in body:  # Arrow would read 0x10 as 16
            first_line = body[: body.find(b"\n") if b"\n" in body else None]
            found = self._by_arrow(body, "\t" if b"\t" in first_line else " ")
            if found is None:
                alike = b"\n".join(b" ".join(line.split()) for _, line in self._lines())
                found = self._by_arrow(alike, " ")
            if found is not None:
                return found
        return self._by_line()

    def line_of(self, row: int) -> tuple[int, str]:
        """Number, from 1, and text of the line that became row ``row``."""
        number, line = next(item for place, item in enumerate(self._lines()) if place == row)
        return number, _text(line)

    def _by_arrow(self, body: bytes, delimiter: str) -> dict[str, np.ndarray] | None:
        """None when a line is not as it should be, or parted in another way."""
        types = {name: "int64" if kind == "id" else kind for name, kind in self._columns.items()}
        try:
            table = read_table(body, self._where, list(types), types=types, delimiter=delimiter, header_rows=0)
        except ValueError:
            return None
        if any(table[name].null_count for name in types):
            return None
        found = {name: to_array(table[name]) for name in types}
        if any(kind == "id" and len(found[name]) and found[name].min() < 0 for name, kind in self._columns.items()):
            return None
        return found

    def _by_line(self) -> dict[str, np.ndarray]:
        patterns = {"id": _WHOLE, "int64": _WHOLE_OR_NEGATIVE, "float64": _NUMBER}
        rules = [patterns[kind] for kind in self._columns.values()]
        rows: list[list[bytes]] = []
        for number, line in self._lines():
            words = line.split()
            if len(words) != len(rules) or not all(
                rule.fullmatch(word) for rule, word in zip(rules, words, strict=True)
            ):
                raise ValueError(f"{self._where}: line {number} is {_text(line)!r:.80}; expected {self._expected}")
            rows.append(words)
        parse: dict[str, Callable[[bytes], int | float]] = {"id": int, "int64": int, "float64": float}
        return {
            name: np.array([parse[kind](words[place]) for words in rows], np.float64 if kind == "float64" else np.int64)
            for place, (name, kind) in enumerate(self._columns.items())
        }

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        first = self._content.count(b"\n", 0, self._start) + 1
        for number, line in enumerate(self._content[self._start :].split(b"\n"), first):
            stripped = line.strip()
            if stripped and not stripped.startswith(self._comments):
                yield number, line


def first_data_line(content: bytes, start: int, comments: tuple[bytes, ...]) -> tuple[int, bytes]:
    """Where the first line that is neither empty nor a comment begins, and the line; the end and b"" without one."""
    place = start
    while place < len(content):
        end = content.find(b"\n", place)
        end = len(content) if end < 0 else end
        line = content[place:end].strip()
        if line and not line.startswith(comments):
            return place, line
        place = end + 1
    return len(content), b""


def _text(line: bytes) -> str:
    return line.decode(errors="replace").strip()
