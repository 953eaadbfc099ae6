"""What a script defines arrives at its workers with the name of the script's file and its lines."""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable
from pathlib import Path

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
