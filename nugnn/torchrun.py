"""A run whose processes ``torchrun`` started: they meet, watch each other and train."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nugnn.addresses import advertised_interface
from nugnn.comm.groups import Ranks, join_ranks, leave_ranks
from nugnn.comm.pulse import SIZE, Pulse
from nugnn.failure import EXIT_WORKER_LOST
from nugnn.member import Member, host_name
from nugnn.mutual_watch import MutualWatch, Note
from nugnn.sample_config import RunConfig

_COLLECTIVE_SECONDS = 7 * 24 * 3600.0


@contextlib.contextmanager
def joined(
    member: Member, timeout: float = 300.0
) -> Iterator[tuple[Ranks, Callable[[float, Callable[[], str]], None]]]:
    """Join the other processes; whatever is raised inside, in whichever process, ends all of them.

    Args:
        member: This process, from `nugnn.member.member_from`.
        timeout: Seconds until the others have to be there; afterwards as ``timeout`` of `nugnn.launch.launch`.

    Yields:
        The ranks, and a function that sets another timeout, and what to tell the user when the run ends early.

    Raises:
        ValueError: No network interface leads to the others.
        TimeoutError: The store did not answer in time.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = advertised_interface(
        member.address, is_one_host=member.is_one_host, given=os.environ.get("GLOO_SOCKET_IFNAME")
    )
    memory = bytearray(SIZE)
    pulse = Pulse(memory)
    watch = MutualWatch(member, _connect(member, timeout, hosts=member.hosts_store), memory, timeout)
    watch.outlive_sigterm()
    watch.start()
    try:
        with pulse.waiting("the start of all workers"):
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("groups", _connect(member, _COLLECTIVE_SECONDS, hosts=False)),
                rank=member.rank,
                world_size=member.world_size,
                timeout=timedelta(seconds=_COLLECTIVE_SECONDS),
            )
        ranks = join_ranks(_COLLECTIVE_SECONDS, pulse)

        def set_timeout(seconds: float, how_to_go_on: Callable[[], str]) -> None:
            watch.timeout, watch.how_to_go_on = seconds, how_to_go_on

        yield ranks, set_timeout
        watch.finish()
    except KeyboardInterrupt:
        os._exit(130)  # every process gets the signal; torchrun says so
    except SystemExit as error:
        if error.code not in (None, 0):
            watch.leave(Note(rank=member.rank, exit_code=EXIT_WORKER_LOST, text=f"{watch.who} left: {error.code}"))
        raise
    except Exception as error:
        watch.fail(error)
    leave_ranks(ranks)


def _connect(member: Member, timeout: float, *, hosts: bool) -> dist.Store:
    try:
        store = dist.TCPStore(
            member.address,
            member.port,
            is_master=hosts,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except Exception as error:
        raise TimeoutError(
            f"worker {member.rank} on {host_name()} cannot reach {member.address}:{member.port} (MASTER_ADDR and "
            f"MASTER_PORT) within {timeout:g} s: {type(error).__name__}"
        ) from error
    return dist.PrefixStore(f"nugnn/{member.attempt}", store)


def train_as_member(
    member: Member,
    gather_settings: Callable[[], RunConfig],
    show_run: Callable[[RunConfig, Callable[..., Any]], None],
) -> None:
    """``nugnn train`` in a process that ``torchrun`` started; leaves through SystemExit or ends the process.

    Args:
        member: This process.
        gather_settings: Reads and checks the settings.
        show_run: Trains with the function it is given, shows and writes; called on rank 0 only.
    """
    with joined(member) as (ranks, set_timeout):
        from nugnn.fit_joined import fit_joined  # here, so that a failing import ends all processes
        from nugnn.options import ConfigError
        from nugnn.run import family_of, how_to_go_on, take_part

        config = gather_settings()
        if config.workers != member.world_size:
            raise ConfigError(f"--workers {config.workers}: torchrun started {member.world_size}; leave --workers out")
        family_of(config)  # what it imports takes longer than a short timeout
        set_timeout(config.timeout, lambda: how_to_go_on(config.out_dir))

        def train(model: Any, data: Any, **options: Any) -> Any:
            return fit_joined(model, data, ranks, **options)

        show_run(config, train) if ranks.rank == 0 else take_part(config, train)
