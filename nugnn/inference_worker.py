"""What a worker process of `nugnn.inference.infer` does: join the others, load its shard, predict."""

from __future__ import annotations

import torch

from nugnn.comm.groups import join_ranks
from nugnn.inference import infer_shard
from nugnn.job import read_job
from nugnn.partition.store import load_shard
from nugnn.seam import install
from nugnn.worker_process import WorkerContext


def main(context: WorkerContext) -> None:
    """Entry point; `nugnn.worker_process` calls it with who this worker is."""
    install()
    work = read_job(context.job_folder)
    context.init_process_group()
    ranks = join_ranks(context.timeout, context.pulse, work["devices"][context.rank])
    logits = infer_shard(load_shard(work["shards"], context.rank), ranks, work["model"], work["precision"])
    if context.rank == 0:
        torch.save({"logits": logits}, context.job_folder / "logits.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
