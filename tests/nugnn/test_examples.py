"""The examples do what their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nugnn.check import ModelDiffers, run_check

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_own_model_gives_the_same_on_one_worker_and_on_two(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "own_model.py"), "3"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", done.stdout)]
    # Three steps in float32: sums of up to 1797 terms in another order are off by at most 1797 * 6e-8 = 1e-4 relative.
    assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_own_model_and_the_global_norm_pass_the_check() -> None:
    for name in ("own_model.py:Net", "global_norm.py:Global"):
        run_check(f"{EXAMPLES / name}")


def test_the_local_norm_is_named() -> None:
    with pytest.raises(ModelDiffers, match=r"^norm \(LocalPairNorm\)"):
        run_check(f"{EXAMPLES / 'global_norm.py:Local'}")
