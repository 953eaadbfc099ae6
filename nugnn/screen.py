"""What commands write for people: messages, one line each but on a terminal; tables in which no number is cut.

A message in a pipe or file stays one line, so that ``grep`` finds it whole. On a terminal it is broken between words,
at the terminal's width and at 80 columns at most; a word that is longer, such as a path, stays whole for the terminal
to fold, so that it can be copied.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

MOST_COLUMNS = 80
_LEAST_OF_WORDS = 8
"""Columns that a column of words needs at least, before columns of numbers are left out for it."""


def screen(*, quiet: bool = False, stderr: bool = False) -> Console:
    """Where a command writes: as wide as the terminal, 80 columns at most; what it is given is text, never markup."""
    width = min(MOST_COLUMNS, Console(stderr=stderr).width)
    return Console(width=width, quiet=quiet, stderr=stderr, markup=False, emoji=False, highlight=False)


def say(console: Console, message: object) -> None:
    """Write one message, see the head of this module; lines that it has already stay lines."""
    text = str(message)
    if console.file.isatty():
        text = wrapped(text, console.width)
    console.print(Text(text), soft_wrap=True)


def complain(message: object) -> None:
    """One message on standard error."""
    say(screen(stderr=True), message)


def wrapped(text: str, width: int) -> str:
    """``text`` in lines of at most ``width`` columns, longer words apart; lines go on two columns further in.

    >>> print(wrapped("  known: cora, pubmed", 16))
      known: cora,
        pubmed
    """
    return "\n".join(piece for line in text.split("\n") for piece in _wrapped_line(line, width))


def _wrapped_line(line: str, width: int) -> list[str]:
    if cell_len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip(" "))]
    pieces, current = [], indent
    for gap, word in re.findall(r"( *)([^ ]+)", line[len(indent) :]):
        if current.strip() and cell_len(current + gap + word) > width:
            pieces.append(current)
            current, gap = f"{indent}  ", ""
        current += gap + word
    return [*pieces, current]


def show_table(console: Console, table: Table, least_first: Sequence[str] = ()) -> None:
    """Print a table in which no number is cut: words fold first, then whole columns are left out, and it is said.

    Args:
        console: Of `screen`.
        table: Columns that are justified to the right, or do not wrap, stay whole; all others are of words.
        least_first: Headers of columns that may be left out, the least important one first.
    """
    for column in table.columns:
        widest = max(cell_len(line) for cell in (column.header, *column.cells) for line in str(cell).split("\n"))
        if column.justify == "right" or column.no_wrap:
            column.no_wrap, column.min_width = True, min(widest, column.max_width or widest)
        else:
            column.overflow, column.min_width = "fold", min(_LEAST_OF_WORDS, widest)
    left_out = []
    for header in least_first:
        if _fits(console, table):
            break
        table.columns = [column for column in table.columns if column.header != header]
        for place, column in enumerate(table.columns):
            column._index = place
        left_out.append(header)
    if left_out:
        table.caption = f"left out, for want of columns: {', '.join(left_out)}; --json has all"
        table.caption_justify = "left"
    console.print(table, crop=False)


def _fits(console: Console, table: Table) -> bool:
    lines = Segment.split_lines(console.render(table))
    return all(Segment.get_line_length(line) <= console.width for line in lines)
