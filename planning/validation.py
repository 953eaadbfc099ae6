"""What pydantic finds wrong with a file, in words for people: where, what stands there, and what it must be."""

from __future__ import annotations

import difflib
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Place = tuple[int | str, ...]
Model = TypeVar("Model", bound=BaseModel)
_MOST_SHOWN = 3
_LONGEST_VALUE = 40
_MUST_BE = {
    "greater_than": "above {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "below {lt:g}",
    "less_than_equal": "up to {le:g}",
    "finite_number": "finite",
    "float_type": "a number",
    "float_parsing": "a number",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "string_type": "text",
    "bool_type": "true or false",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "text like {pattern}",
    "tuple_type": "a list",
    "list_type": "a list",
}
"""By pydantic's kinds of errors."""


def read_json(path: Path | str, kind: type[Model], error: type[ValueError], hint: str = "") -> Model:
    """What is in a file, checked.

    Args:
        path: Of JSON, with or without the mark that some editors begin UTF-8 with.
        kind: What it has to be.
        error: Raised where it is none.
        hint: Said behind it where the first problem is one of the outermost fields: how such a file is made.

    Raises:
        ValueError: ``error``; the file cannot be read, is no JSON, is of another version, or has a field that is
            missing, unknown or out of range.
    """
    path = Path(path)
    try:
        return kind.model_validate_json(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), strict=True)
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}") from problem
    except ValidationError as problem:
        raise error(f"{path}: {what_is_wrong(problem, kind, hint)}") from problem


@dataclass(frozen=True)
class Problem:
    """One of those of a file.

    Args:
        place: Names of fields and numbers in lists, from the outside in.
        text: A sentence that begins with the field.
    """

    place: Place
    text: str


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """All that was found, in the order of the file's fields; one at least.

    Args:
        error: Of validating ``model``.
        model: Whose fields are known.
    """
    found: list[dict[str, Any]] = [
        {**each, "loc": tuple(step for step in each["loc"] if step != "[key]")} for each in error.errors()
    ]
    told = [each for each in found if not _follows(each, found)]  # of a list with a wrong member, that it is too short
    return [Problem(each["loc"], _sentence(each, model)) for each in told or found]


def in_one_line(texts: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = [f"and {len(texts) - _MOST_SHOWN} more"] if len(texts) > _MOST_SHOWN else []
    return "; ".join([*texts[:_MOST_SHOWN], *more])


def what_is_wrong(error: ValidationError, model: type[BaseModel], hint: str = "") -> str:
    """All problems in one line; with ``hint`` where the first is one of the outermost fields."""
    found = problems_of(error, model)
    return in_one_line([each.text for each in found]) + (hint if len(found[0].place) < 2 else "")


def _follows(one: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> bool:
    depth = len(one["loc"])
    return one["type"] == "too_short" and any(
        len(each["loc"]) > depth and each["loc"][:depth] == one["loc"] for each in found
    )


def _sentence(found: Mapping[str, Any], model: type[BaseModel]) -> str:
    place, kind, value = found["loc"], found["type"], found["input"]
    where, context = ".".join(map(str, place)), found.get("ctx", {})
    if kind == "extra_forbidden":
        holder = ".".join(map(str, place[:-1]))
        return f"{holder}: {_unknown(place, model)}" if holder else _unknown(place, model)
    if kind == "missing":
        return f"{where} is missing"
    if kind == "value_error":
        return f"{where}: {context['error']}" if where else str(context["error"])
    if kind == "too_short" and not context["actual_length"]:
        return f"{where} is empty: give one {str(place[-1]).removesuffix('s')} at least"
    if kind == "string_too_short":
        return f"{where} is empty"
    if kind == "model_type":
        of = _fields_at(place, model)
        return f"{where or 'it'} is {_shown(value)}, must have fields" + (f": {', '.join(of)}" if of else "")
    if kind not in _MUST_BE:
        return f"{where}: {found['msg']}" if where else str(found["msg"])
    must = _MUST_BE[kind].format(**context)
    if must == "a whole number" and str(place[-1]).endswith("_bytes"):
        must += " of bytes, such as 16000000000"
    return f"{where} is {_shown(value)}, must be {must}"


def _unknown(place: Place, model: type[BaseModel]) -> str:
    name, known = str(place[-1]), _fields_at(place[:-1], model)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown field {name!r}" + (f"; {hint}known: {', '.join(known)}" if known else "")


def _fields_at(place: Place, model: type[BaseModel]) -> list[str]:
    """Names of the fields of what stands at ``place``; none where that has no fields, or is one of several things."""
    kind: Any = model
    for step in place:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            named = {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
            kind = named.get(str(step))
        else:  # of a list the first kind of member, of names with values that of values
            inner = [each for each in typing.get_args(kind) if each is not Ellipsis]
            kind = inner[-1 if typing.get_origin(kind) is dict else 0] if inner else None
        if type(None) in typing.get_args(kind):
            kind = next(each for each in typing.get_args(kind) if each is not type(None))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [field.alias or name for name, field in kind.model_fields.items()]
    return []


def _shown(value: Any) -> str:
    """As in the file, but text in single quotes; shortened."""
    if isinstance(value, (dict, list, tuple)):
        return "a list" if not isinstance(value, dict) else "names with values"
    text = repr(value) if isinstance(value, (str, float)) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
