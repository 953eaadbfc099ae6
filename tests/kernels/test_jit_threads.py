"""Starting numba's thread pool leaves the number of OpenMP threads, which torch and DGL share, as it was."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import numpy as np, torch
from nugnn.kernels.dropout import dropout_rows
from nugnn.kernels.philox import RandomKey
dropout_rows(torch.ones(500, 64), 0.5, RandomKey(0, 0, 1), torch.arange(500))
print(torch.get_num_threads())
"""


def test_worker_with_one_thread_keeps_one_thread() -> None:
    # NUMBA_NUM_THREADS: a pool larger than torch's, as numba makes one on any machine with several cores
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]
