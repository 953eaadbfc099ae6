"""What a worker process does when the data are a graph: DGL gets ready while the launching process prepares the job."""

from __future__ import annotations

import importlib

import torch

from nugnn import worker
from nugnn.kernels.dropout import dropout_rows
from nugnn.kernels.philox import RandomKey
from nugnn.seam import install
from nugnn.worker_process import WorkerContext


def main(context: WorkerContext) -> None:
    """Entry point; `nugnn.worker_process` calls it with who this worker is."""
    install()
    importlib.import_module("nugnn.graph_part")  # what the job is made of
    dropout_rows(torch.ones(1, 1), 0.5, RandomKey(0, 0, 0), torch.zeros(1, dtype=torch.int64))  # loads numba
    worker.main(context)
