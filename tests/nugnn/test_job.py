"""What a script defines arrives at its workers, with the name of the script's file and its lines."""

from __future__ import annotations

import re
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from nugnn import job

SCRIPT = """
def scaled(factor):
    def apply(x):
        parts = [factor * each for each in x]
        return parts[0] / (parts[1] - parts[1])
    return apply

class Model:
    def forward(self, x):
        return scaled(2)(x)
"""


def test_functions_and_classes_of_a_script_keep_its_file(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    script = types.ModuleType("__main__")
    exec(compile(SCRIPT, str(file), "exec"), vars(script))
    job.write_job(tmp_path, {"model": script.Model(), "apply": script.scaled(2), "class": script.Model})
    work = job.read_job(tmp_path)
    calls: list[tuple[Callable[[list[int]], float], list[tuple[int, str]]]] = [
        (work["model"].forward, [(10, "return scaled(2)(x)"), (5, "return parts[0] / (parts[1] - parts[1])")]),
        (work["apply"], [(5, "return parts[0] / (parts[1] - parts[1])")]),
        (work["class"]().forward, [(10, "return scaled(2)(x)"), (5, "return parts[0] / (parts[1] - parts[1])")]),
    ]
    for call, lines in calls:
        try:
            call([1, 2])
        except ZeroDivisionError as error:
            frames = traceback.extract_tb(error.__traceback__)[1:]
        assert {frame.filename for frame in frames} == {str(file)}
        assert [(frame.lineno, frame.line) for frame in frames] == lines


CACHED = """
import functools

@functools.lru_cache(maxsize=7)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

class Model:
    @functools.cached_property
    def width(self):
        return fib(9)

    @staticmethod
    @functools.cache
    def doubled(x):
        return 2 * x
"""


def test_cached_functions_and_properties_of_a_script_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    script = types.ModuleType("__main__")
    exec(CACHED, vars(script))
    monkeypatch.setitem(sys.modules, "__main__", script)
    job.write_job(tmp_path, {"model": script.Model(), "fib": script.fib, "of_library": re._compile_repl})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # the worker's own
    work = job.read_job(tmp_path)
    assert (work["model"].width, vars(work["model"])) == (34, {"width": 34})
    assert (work["model"].doubled(3), work["fib"].cache_parameters()["maxsize"]) == (6, 7)
    assert work["of_library"] is re._compile_repl  # type: ignore[attr-defined]
