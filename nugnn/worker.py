"""What a worker process does: join the others, load its shard, train, leave its outcome in the job folder."""

from __future__ import annotations

import importlib
from dataclasses import asdict

import torch

from nugnn.comm.groups import join_ranks
from nugnn.fit_options import FitOptions
from nugnn.job import STOP, read_job
from nugnn.kernels.dropout import dropout_rows
from nugnn.kernels.philox import RandomKey
from nugnn.partition.store import load_shard
from nugnn.seam import install
from nugnn.train_shard import train_shard
from nugnn.worker_process import WorkerContext


def main(context: WorkerContext) -> None:
    """Entry point; `nugnn.worker_process` calls it with who this worker is."""
    install()
    _warm_up()
    work = read_job(context.job_folder)
    context.init_process_group()
    ranks = join_ranks(context.timeout, context.pulse, work["devices"][context.rank])
    options: FitOptions = work["options"]
    whole = work.get("evaluation_shards")
    context.emit(kind="stage", name="train")
    outcome = train_shard(
        lambda: load_shard(work["shards"], context.rank),
        ranks,
        work["model"],
        options,
        on_epoch=lambda epoch: context.emit(kind="epoch", epoch=asdict(epoch)),
        checkpoints=work["checkpoints"],
        asked_to_stop=(context.job_folder / STOP).exists,
        make_evaluation_shard=None if whole is None else lambda: load_shard(whole, context.rank),
    )
    torch.save(outcome, context.job_folder / f"outcome-{context.rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _warm_up() -> None:
    """Spend the time in which the launching process prepares the job on what the first epoch would wait for."""
    dropout_rows(torch.ones(1, 1), 0.5, RandomKey(0, 0, 0), torch.zeros(1, dtype=torch.int64))  # loads numba
    importlib.import_module("torch._dynamo")  # an optimizer imports it in its first step, 1 s
