"""What pydantic finds wrong with a file, in one line for people."""

from __future__ import annotations

from pydantic import ValidationError


def first_problem(error: ValidationError) -> tuple[tuple[int | str, ...], str]:
    """Where the first problem is, and ``field: what is wrong (and so many more)``."""
    all_found = error.errors()  # of a tuple with a wrong member, that it is too short is said as well
    found = [each for each in all_found if each["type"] != "too_short"] or all_found
    place, more = found[0]["loc"], f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    field = ".".join(str(part) for part in place)
    return place, f"{field + ': ' if field else ''}{found[0]['msg']}{more}"
