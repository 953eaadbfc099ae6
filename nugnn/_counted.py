"""Counted nouns, for all folders: one has its singular."""

from __future__ import annotations


def counted(count: int | str, noun: str, plural: str | None = None) -> str:
    """The number with its noun.

    Args:
        count: The number; as text where it is already written for people, such as ``1.5M``.
        noun: For one.
        plural: For any other number, where it is not the noun with an s.

    >>> counted(1, "worker"), counted(0, "worker"), counted(2, "batch", "batches"), counted("1,200", "node")
    ('1 worker', '0 workers', '2 batches', '1,200 nodes')
    """
    return f"{count} {noun if str(count) == '1' else plural or f'{noun}s'}"
