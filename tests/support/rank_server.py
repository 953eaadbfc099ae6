"""A rank of the test pool: runs pickled functions that arrive on its socket. Forked by `fork_server`.

Ranks have what `nugnn.comm.groups.join_ranks` gives to workers on one host's CPUs, direct sums of few values, too.
"""

from __future__ import annotations

import traceback
from multiprocessing.connection import Connection
from typing import Any

MAX_RANKS = 5


def serve(rank: int, port: int, descriptor: int) -> None:
    """Answer jobs until the other end of the socket is closed."""
    import cloudpickle
    import torch.distributed as dist

    from nugnn.comm.direct_sums import connect_directly
    from nugnn.comm.groups import Ranks

    pipe = Connection(descriptor)
    store = dist.TCPStore("127.0.0.1", port, MAX_RANKS, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=MAX_RANKS)
    groups: dict[int, Ranks] = {1: Ranks()}
    for size in range(2, MAX_RANKS + 1):
        members = list(range(size))
        halo, control = dist.new_group(members), dist.new_group(members)
        if rank < size:
            direct = connect_directly(rank, size, 600.0, control)
            assert direct is not None
            groups[size] = Ranks(rank, size, halo, control, direct=direct)
    pipe.send_bytes(b"ready")
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            return
        size = 1
        try:
            size, function, args, kwargs = cloudpickle.loads(job)
            answer: tuple[str, Any] = ("result", function(groups[size], *args, **kwargs))
        except BaseException as error:
            answer = ("error", (type(error).__name__, str(error), traceback.format_exc()))
        direct = groups[size].direct
        was_left = direct is not None and direct._between.locked()  # a sum that has no successor
        pipe.send_bytes(cloudpickle.dumps((*answer, was_left)))
