"""What a worker process does when the data are a graph: DGL gets ready while the launching process prepares the job."""

from __future__ import annotations

import torch

from nugnn import worker
from nugnn.kernels.dropout import dropout_rows
from nugnn.kernels.philox import RandomKey
from nugnn.seam import install
from nugnn.worker_process import WorkerContext


def main(context: WorkerContext) -> None:
    """Entry point; `nugnn.worker_process` calls it with who this worker is."""
    install()
    dropout_rows(torch.ones(1, 1), 0.5, RandomKey(0, 0, 0), torch.zeros(1, dtype=torch.int64))  # loads numba
    worker.main(context)
