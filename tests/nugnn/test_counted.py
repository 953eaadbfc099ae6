"""Counted nouns: the helper, and that messages do not go around it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nugnn._counted import counted

_ROOT = Path(__file__).resolve().parents[2]
_NOUNS = "workers|threads|nodes|edges|parts|devices|rows|samples|hosts|batches|multiprocessors|halo rows"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ((1, "worker"), "1 worker"),
        ((0, "worker"), "0 workers"),
        ((2, "worker"), "2 workers"),
        ((1, "batch", "batches"), "1 batch"),
        ((3, "batch", "batches"), "3 batches"),
        (("1", "node"), "1 node"),
        (("1,000", "node"), "1,000 nodes"),
    ],
)
def test_one_has_its_singular(how: tuple[str, ...], said: str) -> None:
    assert counted(*how) == said


@pytest.mark.parametrize("folder", ["nugnn", "planning", "partition"])
def test_numbers_of_things_are_written_by_the_helper(folder: str) -> None:
    """A whole number that may be 1 right before a noun; means such as ``2.50 halo rows`` always have more."""
    found = []
    for path in sorted((_ROOT / folder).rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(rf'f".*\{{[a-z][^{{}}]*(?<!\.[0-9]f)\}} (?:{_NOUNS})\b(?!/)', line) and not _is_ours_alone(
                line
            ):
                found.append(f"{path.relative_to(_ROOT)}:{number}: {line.strip()}")
    assert found == []


def _is_ours_alone(line: str) -> bool:
    """Assertions and texts for debugging; ``{kind} nodes``, a word and no number; the last of several."""
    return bool(re.search(r"assert |AssertionError|in parts of |\{(?:rows\.)?(?:kind|which|whose|what)\} ", line))
