"""The benchmarks are scripts beside each other, no package: their folder is put on the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # behind tests/support: names may meet
