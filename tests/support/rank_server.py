"""The ranks of the test pool: each runs pickled functions that arrive on its socket. Started by `rank_pool.RankPool`.

One process imports what all need and becomes five.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import without  # before anything of nugnn

MAX_RANKS = 5


def prepare() -> None:
    """Import what ranks use, before there are several."""
    import torch

    import nugnn  # noqa: F401

    torch.set_num_threads(1)
    if "nugnn.seam" not in without.NAMES:
        from nugnn.seam import install

        install()
    for name in ("cloudpickle", "torch._dynamo", "torch.distributed", "nugnn.comm.groups", "nugnn.train_rank"):
        if name not in without.NAMES:
            importlib.import_module(name)


def serve(rank: int, port: int, pipe: Connection) -> None:
    import cloudpickle
    import torch.distributed as dist

    from nugnn.comm.groups import Ranks

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


def main(port: int, descriptors: list[int]) -> None:
    prepare()
    gc.freeze()
    assert threading.active_count() == 1  # only the thread that forks goes on in a child
    children = []
    for rank, descriptor in enumerate(descriptors):
        child = os.fork()
        if child == 0:
            for other in descriptors[rank + 1 :]:
                os.close(other)
            serve(rank, port, Connection(descriptor))
            os._exit(0)
        os.close(descriptor)  # so that a rank's end is seen at the other end
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder comes back with PYTHONPATH, at the end
    main(int(sys.argv[1]), [int(descriptor) for descriptor in sys.argv[2:]])
