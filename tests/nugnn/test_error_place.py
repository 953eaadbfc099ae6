"""An error names a line of the user's, and one that a user's line raised itself is known as such."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nugnn
from nugnn.error_place import place_of_error, place_of_raise

SCRIPT = """
def raises():
    raise ValueError("row 7")

def calls(function, *arguments):
    return function(*arguments)
"""


def test_places_are_the_users(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    script: dict[str, object] = {}
    exec(compile(SCRIPT, str(file), "exec"), script)
    calls, raises = script["calls"], script["raises"]
    assert callable(calls) and callable(raises)
    with pytest.raises(ValueError, match="row 7") as own:
        raises()
    assert place_of_error(own.value) == place_of_raise(own.value) == f" ({file}, line 3)"
    for function, arguments in ((torch.mm, (torch.ones(2, 3),) * 2), (nugnn.fit, (None, None))):
        with pytest.raises((ValueError, RuntimeError, TypeError)) as of_library:
            calls(function, *arguments)
        assert place_of_error(of_library.value) == f" ({file}, line 6)"
        if function is nugnn.fit:  # torch's functions have no lines
            assert place_of_raise(of_library.value) == ""
    assert place_of_error(ValueError("never raised")) == place_of_raise(ValueError("never raised")) == ""
