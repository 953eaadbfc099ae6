"""One rank of the test pool: runs pickled functions that arrive on a socket. Started by `rank_pool.RankPool`."""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import without  # before anything of nugnn

MAX_RANKS = 5


def serve(rank: int, port: int, pipe: Connection) -> None:
    import cloudpickle
    import torch
    import torch.distributed as dist

    import nugnn  # noqa: F401
    from nugnn.comm.groups import Ranks

    torch.set_num_threads(1)
    if "nugnn.seam" not in without.NAMES:
        from nugnn.seam import install

        install()
    store = dist.TCPStore("127.0.0.1", port, MAX_RANKS, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=MAX_RANKS)
    groups: dict[int, Ranks] = {1: Ranks()}
    for size in range(2, MAX_RANKS + 1):
        members = list(range(size))
        made = Ranks(rank, size, dist.new_group(members), dist.new_group(members))
        if rank < size:
            groups[size] = made
    pipe.send_bytes(b"ready")
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            return
        try:
            size, function, args, kwargs = cloudpickle.loads(job)
            answer: tuple[str, Any] = ("result", function(groups[size], *args, **kwargs))
        except BaseException as error:
            answer = ("error", (type(error).__name__, str(error), traceback.format_exc()))
        pipe.send_bytes(cloudpickle.dumps(answer))


if __name__ == "__main__":
    sys.path.pop(0)  # this folder comes back with PYTHONPATH, at the end
    serve(int(sys.argv[1]), int(sys.argv[2]), Connection(int(sys.argv[3])))
    os._exit(0)
