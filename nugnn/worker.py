"""What a worker process does: join the others, load its shard, train, leave its outcome in the job folder."""

from __future__ import annotations

from dataclasses import asdict

import torch

from nugnn.comm.groups import join_ranks
from nugnn.fit import FitOptions, train_shard
from nugnn.job import read_job
from nugnn.partition.store import load_shard
from nugnn.seam import install
from nugnn.worker_process import WorkerContext


def main(context: WorkerContext) -> None:
    """Entry point; `nugnn.worker_process` calls it with who this worker is."""
    install()
    work = read_job(context.job_folder)
    context.init_process_group()
    ranks = join_ranks(context.timeout)
    shard = load_shard(work["shards"], context.rank)
    options: FitOptions = work["options"]
    context.emit(kind="stage", name="train")
    outcome = train_shard(
        shard,
        ranks,
        work["model"],
        options,
        on_epoch=lambda epoch: context.emit(kind="epoch", epoch=asdict(epoch)),
    )
    torch.save(outcome, context.job_folder / f"outcome-{context.rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
