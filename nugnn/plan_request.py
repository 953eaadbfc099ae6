"""What a training run is told of its plan: a file, a cluster, or a word for how shares are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nugnn.devices import devices_of
from nugnn.machine_profiles import Need, are_devices_alike, cluster_here, profile_of_this_machine
from nugnn.member import host_name
from nugnn.planning import device_facts
from nugnn.planning.cluster import Cluster, ThisMachine, read_cluster
from nugnn.planning.limits import DeviceLimits
from nugnn.planning.plan import BASELINES, KnownDevice, Plan, SharesBy, read_plan
from nugnn.planning.profiles import DeviceKind, MachineProfile

SHARES_BY = ("auto", *BASELINES)
"""Words for shares; numbers are the other way."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanRequest:
    """How shares of a run are found, where plain numbers do not say it.

    Args:
        shares_by: ``auto``, a baseline, or ``given``.
        shares: For ``given``; a number for each worker.
        plan: From a file; it has shares and devices.
        plan_path: That file.
        cluster: From a file; of all workers.
    """

    shares_by: SharesBy
    shares: tuple[float, ...] | None = None
    plan: Plan | None = None
    plan_path: Path | None = None
    cluster: Cluster | None = None

    @property
    def limits(self) -> tuple[DeviceLimits, ...] | None:
        """Of each worker, where plan or cluster say them."""
        if self.plan is not None:
            return tuple(device.limits for device in self.plan.devices)
        return None if self.cluster is None else tuple(device.limits for device in self.cluster.devices)

    @property
    def known_devices(self) -> tuple[KnownDevice, ...] | None:
        """Of each worker, where plan or cluster say them."""
        if self.plan is not None:
            return self.plan.devices
        return None if self.cluster is None else self.cluster.profiles

    def devices(self, device: str, workers: int) -> tuple[list[torch.device], str]:
        """As `nugnn.devices.devices_of`, but for those that a plan or cluster names.

        Raises:
            ValueError: One of them is not here.
        """
        return devices_of(device, workers) if self.known_devices is None else (found_here(self.known_devices), "")

    def cluster_for(
        self,
        devices: Sequence[torch.device | None],
        limits: Sequence[DeviceLimits] | None,
        on_stage: Callable[[str], Any],
        on_note: Callable[[str], Any],
    ) -> Cluster:
        """The workers as a cluster; where they differ and ``auto`` is to tell by how much, they are measured once."""
        if self.cluster is not None:
            return self.cluster
        own = [device for device in devices if device is not None]
        assert len(own) == len(devices), "workers of other hosts are described in a file"
        kinds: list[DeviceKind] = ["cuda" if device.type == "cuda" else "cpu" for device in own]
        is_measured = self.shares_by == "auto" and not are_devices_alike(own, limits)
        need: Need = "measured" if is_measured else "any"
        machine = profile_of_this_machine(kinds, need, limits, on_stage=on_stage, on_note=on_note)
        return cluster_here(own, limits, machine)


def plan_request(
    shares: Sequence[float] | str | None,
    plan: Plan | Path | str | None,
    cluster: Cluster | Path | str | None,
    workers: int,
    *,
    is_one_host: bool = True,
    on_stage: Callable[[str], Any] = lambda _: None,
    on_note: Callable[[str], Any] = lambda _: None,
) -> PlanRequest:
    """What is to be planned, where there is something: see `nugnn.fit_plan.request_of`.

    Args:
        shares: As for `nugnn.fit`; a word other than ``even`` where neither plan nor cluster is given.
        plan: Likewise.
        cluster: Likewise.
        workers: Number of workers.
        is_one_host: Whether all of them run on this host; of a cluster's file this host's devices count alone then.
        on_stage: Called with what is done next, where this machine is measured.
        on_note: Gets sentences for the user.

    Raises:
        ValueError: Two of them say different things; a file is none, or is of another number of workers.
    """
    if isinstance(shares, str) and shares not in SHARES_BY:
        raise ValueError(f"shares {shares!r} is not known; give {', '.join(SHARES_BY)}, or a number for each worker")
    if plan is not None:
        if shares is not None and not (isinstance(shares, str) and shares == "even"):
            raise ValueError("shares and plan both say who gets how much; give one of them")
        if cluster is not None:
            raise ValueError("plan and cluster both say which devices there are; give one of them")
        chosen = plan if isinstance(plan, Plan) else read_plan(plan)
        chosen.check_workers(workers)
        path = None if isinstance(plan, Plan) else Path(plan)
        return PlanRequest(shares_by=chosen.shares_by, plan=chosen, plan_path=path)
    described = None
    if cluster is not None:
        need: Need = (
            "measured" if isinstance(shares, str) and shares == "auto" and is_one_host else "any"
        )  # each of several processes asks
        look = this_machine_for(need, on_stage, on_note)
        own = host_name() if is_one_host else None
        described = cluster if isinstance(cluster, Cluster) else read_cluster(cluster, look, host=own)
        if len(described.devices) != workers:
            raise ValueError(
                f"the cluster has {len(described.devices)} devices, and there are {workers} workers; give --workers "
                f"{len(described.devices)}"
            )
    if shares is not None and not isinstance(shares, str):
        numbers = tuple(float(share) for share in shares)
        return PlanRequest(shares_by="given", shares=numbers, cluster=described)
    word: Any = shares or "even"
    return PlanRequest(shares_by=word, cluster=described)


def found_here(known: Sequence[KnownDevice]) -> list[torch.device]:
    """Devices of this machine that are the ones of a plan or cluster, one for each worker.

    Raises:
        ValueError: One of them is not here.
    """
    gpus = []
    if any(each.kind == "cuda" for each in known) and torch.cuda.is_available():
        gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    found, taken = [], set()
    for worker, each in enumerate(known):
        if each.kind == "cpu":
            found.append(torch.device("cpu"))
            continue
        fitting = [gpu for gpu in gpus if _is(each, gpu)]
        if not fitting:
            who = each.uuid or each.name
            has = ", ".join(dict.fromkeys(device_facts.device_name(gpu) for gpu in gpus)) or "no GPU"
            raise ValueError(f"worker {worker} is to compute on {who}, and this machine has {has}")
        free = [gpu for gpu in fitting if gpu not in taken] or fitting  # workers may share one
        found.append(free[0])
        taken.add(free[0])
    return found


def _is(known: KnownDevice, gpu: torch.device) -> bool:
    if known.uuid is not None:
        return known.uuid == device_facts.device_uuid(gpu)
    return known.name == device_facts.device_name(gpu)


def this_machine_for(need: Need, on_stage: Callable[[str], Any], on_note: Callable[[str], Any]) -> ThisMachine:
    """For `nugnn.planning.cluster.read_cluster`: this machine, as `profile_of_this_machine` has it."""

    def profile(kinds: Sequence[DeviceKind | None], limits: Sequence[DeviceLimits]) -> MachineProfile:
        usual: DeviceKind = "cuda" if torch.cuda.is_available() else "cpu"
        every = [kind or usual for kind in kinds]
        return profile_of_this_machine(every, need, limits, on_stage=on_stage, on_note=on_note)

    return profile
