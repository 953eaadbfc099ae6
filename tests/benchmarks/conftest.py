"""The benchmarks are scripts beside each other, no package: their folder is put on the path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # behind tests/support: names may meet


@pytest.fixture
def lab_here() -> None:
    """Skips where there can be no links of limited rate."""
    import link_lab

    if (problem := link_lab.why_not()) is not None:
        pytest.skip(problem)
    try:
        with link_lab.Lab(2):
            inside = ["ip", "netns", "exec", link_lab.namespaces(os.getpid(), 2)[0]]
            subprocess.run([*inside, *link_lab.rate_command(1)], check=True, capture_output=True)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        pytest.skip(f"links of limited rate cannot be made here: {error}")
