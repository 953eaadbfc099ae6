"""What a worker process does: join the others, load its part, train, leave its outcome in the job folder."""

from __future__ import annotations

import importlib
from dataclasses import asdict

import torch

from nugnn.comm.groups import join_ranks, leave_ranks
from nugnn.job import STOP, read_job
from nugnn.limited import apply_limits
from nugnn.train_rank import train_rank
from nugnn.worker_process import WorkerContext


def main(context: WorkerContext) -> None:
    """Entry point; `nugnn.worker_process` calls it with who this worker is."""
    importlib.import_module("torch._dynamo")  # an optimizer imports it in its first step, 1 s
    work = read_job(context.job_folder)
    device = work["devices"][context.rank]
    limits = None if work["limits"] is None else apply_limits(work["limits"][context.rank], device)
    context.init_process_group()
    ranks = join_ranks(context.timeout, context.pulse, device)
    context.emit(kind="stage", name="train")
    outcome = train_rank(
        work["part"],
        ranks,
        work["model"],
        work["options"],
        on_epoch=lambda epoch: context.emit(kind="epoch", epoch=asdict(epoch)),
        checkpoints=work["checkpoints"],
        asked_to_stop=(context.job_folder / STOP).exists,
        on_note=lambda text: context.emit(kind="note", text=text),
        limits=limits,
        on_rebalance=lambda move: context.emit(kind="move", move=move),
    )
    torch.save(outcome, context.job_folder / f"outcome-{context.rank}.pt")
    torch.distributed.barrier()
    leave_ranks(ranks)
