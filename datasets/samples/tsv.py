"""Tab-separated text: a header with ``label`` and ``text``, a sample a line, and quotes that mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from nugnn.datasets.archive import looks_like_html
from nugnn.datasets.text_table import read_bytes

_COLUMNS = ("label", "text")
_OTHER_SEPARATORS = {",": "commas", ";": "semicolons", "|": "bars", " ": "blanks"}


class Texts(NamedTuple):
    """The samples of a file, in its order."""

    path: Path
    labels: list[str]
    texts: list[str]

    def place(self, sample: int) -> str:
        """File and line of a sample, for errors; blank lines are refused, so they count alike."""
        return f"{self.path}: line {sample + 2}"


def read_tsv(path: Path) -> Texts:
    """Read a file in UTF-8, with or without a byte-order mark, lines ending in LF or CRLF; ``.gz`` is decompressed.

    ``label`` and ``text`` may stand in either order, and columns whose names begin with ``_`` are left out.

    Raises:
        ValueError: no such file, an empty one, no UTF-8, another separator, a column that is missing, repeated or
            unknown, a line with too few or many cells, or an empty label or text; names file and line.
    """
    content = read_bytes(path).removeprefix(b"\xef\xbb\xbf")
    if not content.strip():
        raise ValueError(f"{path} is empty; it begins with a line 'label<TAB>text'")
    if looks_like_html(content[:512]):
        raise ValueError(f"{path} is a web page, as from a failed download; get the file again")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(f"{path} is UTF-16; save it as UTF-8")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}: line {line} is not UTF-8 ({error.reason}); save the file as UTF-8") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(f"{path}: line {line} holds a zero byte; it is no text file, or is damaged")
    lines = text.split("\n")  # not splitlines: U+2028 and others may stand inside a text
    while lines and not lines[-1].strip("\r"):
        del lines[-1]
    return _parsed(path, [line.removesuffix("\r") for line in lines])


def _parsed(path: Path, lines: list[str]) -> Texts:
    label, text, num_cells = _columns(path, lines[0])
    samples = Texts(path, [], [])
    for number, line in enumerate(lines[1:]):
        cells = line.split("\t")
        if len(cells) != num_cells:
            what = "is blank" if not line.strip() else f"has {len(cells)} cells, the header has {num_cells}"
            raise ValueError(
                f"{samples.place(number)} {what} ({line!r:.80}); a sample is one line, and a tab stands between its "
                "label and its text only"
            )
        samples.labels.append(cells[label].strip())
        samples.texts.append(cells[text])
        if not samples.labels[-1]:
            raise ValueError(f"{samples.place(number)}: the label is empty; every sample needs one")
        if not cells[text].strip():
            raise ValueError(f"{samples.place(number)}: the text is empty; remove the line")
    if not samples.texts:
        raise ValueError(f"{path} has a header and no samples below it")
    return samples


def _columns(path: Path, header: str) -> tuple[int, int, int]:
    """Places of label and text, and the number of columns."""
    names = [name.strip().lower() for name in header.split("\t")]
    if "\r" in header:
        raise ValueError(f"{path}: lines end in a carriage return alone, as on old Macs; save it with line feeds")
    if len(names) == 1:
        used = next((word for mark, word in _OTHER_SEPARATORS.items() if mark in header.strip()), None)
        hint = f"; it seems to be separated by {used}" if used else ""
        raise ValueError(f"{path}: line 1 is {header!r:.80}, expected 'label<TAB>text'{hint}; separate cells with tabs")
    for name in _COLUMNS:
        if names.count(name) != 1:
            how = "no column" if name not in names else "more than one column"
            raise ValueError(
                f"{path}: {how} {name!r} in line 1, {header!r:.80}; the first line names the columns, 'label<TAB>text'"
            )
    unknown = [name for name in names if name not in _COLUMNS and not name.startswith("_")]
    if unknown:
        raise ValueError(f"{path}: the column {unknown[0]!r:.80} has no meaning; begin its name with _ to leave it out")
    return names.index("label"), names.index("text"), len(names)
