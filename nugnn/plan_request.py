"""What a training run is told of its plan: a file, a cluster, or a word for how shares are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nugnn._counted import counted
from nugnn.devices import devices_of
from nugnn.machine_profiles import Need, are_devices_alike, cluster_here, profile_of_this_machine
from nugnn.member import host_name
from nugnn.planning import device_facts
from nugnn.planning.cluster import Cluster, ThisMachine, read_cluster
from nugnn.planning.limits import DeviceLimits, format_limits
from nugnn.planning.plan import BASELINES, KnownDevice, Plan, SharesBy, read_plan
from nugnn.planning.profiles import DeviceKind, MachineProfile

SHARES_BY = ("auto", *BASELINES)
"""Words for shares; numbers are the other way."""
_KINDS = ("auto", "cpu", "cuda")
"""Words for devices that leave open which ones; `PlanRequest.refuse_other_kinds` holds them against those of a plan."""
_SAME_SHARE = 0.02
"""Parts of a cut may be off by this much of the shares that it was made for, see `nugnn.partition.balance`."""


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
        if self.known_devices is None:
            return devices_of(device, workers)
        if device in _KINDS:
            return found_here(self.known_devices), ""
        chosen = devices_of(device, workers)[0]
        for worker, (known, own) in enumerate(zip(self.known_devices, chosen, strict=True)):
            if own.type != known.kind or (own.type == "cuda" and not _is(known, own)):
                raise self._otherwise(f"worker {worker} on {_named(known)}", f"--device {device}", "--device")
        return chosen, ""

    def refuse_other_kinds(self, device: str) -> None:
        """Refuse ``cpu`` or ``cuda`` where plan or cluster have others; by number or uuid `devices` refuses them.

        Raises:
            ValueError: Has both values.
        """
        kinds = [each.kind for each in self.known_devices or ()]
        if kinds and device in ("cpu", "cuda") and set(kinds) != {device}:
            raise self._otherwise(f"the devices {','.join(kinds)}", f"--device {device}", "--device")

    def refuse_other_limits(self, limits: Sequence[DeviceLimits]) -> None:
        """Refuse limits other than those of the plan or cluster.

        Raises:
            ValueError: Has both.
        """
        if self.limits is not None and tuple(limits) != self.limits:
            said = f"--limits '{format_limits(limits)}'"
            raise self._otherwise(f"the limits '{format_limits(self.limits)}'", said, "--limits")

    def _otherwise(self, own: str, said: str, option: str) -> ValueError:
        what = "the plan" if self.plan is not None else "the cluster"
        return ValueError(f"{what} has {own}, and this run was given {said}; leave {option} out to use {what}'s")

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
        if cluster is not None:
            raise ValueError("plan and cluster both say which devices there are; give one of them")
        chosen = plan if isinstance(plan, Plan) else read_plan(plan)
        chosen.check_workers(workers)
        _refuse_other_shares(chosen, shares)
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
                f"the cluster has {counted(len(described.devices), 'device')}, and there are "
                f"{counted(workers, 'worker')}; give --workers "
                f"{len(described.devices)}"
            )
    if shares is not None and not isinstance(shares, str):
        numbers = tuple(float(share) for share in shares)
        return PlanRequest(shares_by="given", shares=numbers, cluster=described)
    word: Any = shares or "even"
    return PlanRequest(shares_by=word, cluster=described)


def _refuse_other_shares(plan: Plan, shares: Sequence[float] | str | None) -> None:
    """Refuse shares other than the plan's; ``even`` is the default, and nobody may have said it."""
    if shares is None or (isinstance(shares, str) and shares in ("even", plan.shares_by)):
        return
    own = [device.share for device in plan.devices]
    if isinstance(shares, str):
        planned, said = f"shares by '{plan.shares_by}'", shares
    else:
        asked = [share / sum(shares) for share in shares]
        if len(asked) == len(own) and all(
            abs(each - part) <= max(_SAME_SHARE * part, 0.001) for each, part in zip(asked, own, strict=True)
        ):
            return
        planned, said = (",".join(f"{share:.3g}" for share in each) for each in (own, shares))
        planned = f"the shares {planned}"
    raise ValueError(
        f"the plan has {planned}, and this run was given --shares {said}; leave --shares out to use the plan's"
    )


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


def _named(known: KnownDevice) -> str:
    return "the CPU" if known.kind == "cpu" else known.uuid or known.name


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
