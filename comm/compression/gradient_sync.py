"""How the gradients of a run travel: as they are, or compressed; what `nugnn.comm.backward_sums` sends them through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from nugnn.comm.backward_sums import PlainSums
from nugnn.comm.buckets import Bucket
from nugnn.comm.compression.choice import Choice, choose
from nugnn.comm.compression.compressor import Compressor
from nugnn.comm.compression.lane import Lane
from nugnn.comm.compression.link import Link
from nugnn.comm.compression.low_rank import make_compressor
from nugnn.comm.compression.settings import AUTO, Compression, check_types, wire_names
from nugnn.comm.compression.step_trial import Timed, tried
from nugnn.comm.groups import Ranks, groups_by_host, number_of
from nugnn.comm.hosts import checked_hosts, why_no_grid

GRAD_SYNCS = (*wire_names(), AUTO)
"""Values of the option ``grad_sync``."""


def as_compression(grad_sync: str | Compression) -> Compression:
    """The settings that the option ``grad_sync`` stands for.

    Raises:
        ValueError: There is no such choice.
    """
    if isinstance(grad_sync, Compression):
        return grad_sync
    if grad_sync not in GRAD_SYNCS:
        known = f"{', '.join(GRAD_SYNCS)}, or a nugnn.comm.Compression"
        raise ValueError(f"grad_sync {grad_sync!r} is not known; choose one of {known}")
    return Compression(wire=grad_sync)


class GradientSync:
    """Sums gradients of replicated parameters over the ranks of a run.

    Args:
        grad_sync: One of `GRAD_SYNCS`, or settings; the same on every rank.
        named: Parameters by name, in the same order on every rank.
        ranks: Who takes part.
        hosts: One of `nugnn.comm.hosts.HOSTS`: whether compressed sums are made inside hosts first, where these have
            as many ranks each. The first object of a run that does so makes process groups, on all ranks.

    Raises:
        ValueError: There is no such choice; parameters are of a type that cannot be compressed, or ``exact`` names one
            that is not there; or ranks were given other settings than others.
    """

    def __init__(
        self, grad_sync: str | Compression, named: Mapping[str, nn.Parameter], ranks: Ranks, hosts: str = "auto"
    ) -> None:
        self.settings, self._ranks, self._hosts = as_compression(grad_sync), ranks, checked_hosts(hosts)
        self.name = name = self.settings.wire
        self._refuse_others()
        self._names = {id(p): key for key, p in named.items()}
        self._named = dict(named)
        self._plain = PlainSums(ranks, self._names)
        self._num_steps, self._exposed_seconds = 0, 0.0
        self._compressor: Compressor | None = None
        self._lane = Lane(ranks.device)
        self._groups = groups_by_host(ranks) if hosts == "auto" and name != "fp32" and ranks.is_split else None
        self._link, self._link_aside = (Link.of(ranks, aside=aside, groups=self._groups) for aside in (False, True))
        self._choice: Choice | None = None
        self._is_open_to_steps, self._has_news = name == AUTO and ranks.is_split, False
        self.settings.check_names(self._named)
        if name == AUTO:
            check_types(self._named)
        else:
            self._use(name)

    def _use(self, wire: str) -> None:
        if wire != "fp32":
            self._compressor = make_compressor(self._named, replace(self.settings, wire=wire), self._ranks.world_size)

    def _refuse_others(self) -> None:
        """A collective call, since ranks that send other bytes than their peers expect would wait for ever."""
        if not self._ranks.is_split:
            return
        number = number_of(f"{self.settings}")
        largest, smallest = self._ranks.max_(torch.tensor([number, -number])).tolist()
        if largest != -smallest:
            raise ValueError(f"grad_sync is {self.settings} on worker {self._ranks.rank}, and another one elsewhere")

    def prepare(self) -> str | None:
        """Decide what was left open (``auto``), unless a checkpoint says it; a collective call.

        Returns:
            What there is to say about the choice, or about hosts; None for nothing.
        """
        if not self._ranks.is_split:
            return None
        said = []
        if self.name == AUTO:
            if self._choice is None:
                named = {name: p for name, p in self._named.items() if not self.settings.is_exact(name)}
                self._choice = choose(named, self._ranks, self._groups)
                self._use(self._choice.name)
            said.append(self._choice.as_text())
        if self._hosts == "auto" and self._compressor is not None and (why := why_no_grid(self._ranks.hosts)):
            said.append(why)
        return ". ".join(said) or None

    @property
    def is_undecided(self) -> bool:
        """Whether `prepare` is still to decide what ``auto`` takes; the same on every rank."""
        return self.name == AUTO and self._ranks.is_split and self._choice is None

    @property
    def compresses(self) -> bool:
        """Whether gradients travel in another way than as they are; the same on every rank, known once decided."""
        return self._compressor is not None and self._ranks.is_split

    @property
    def is_open_to_steps(self) -> bool:
        """Whether steps may still decide what ``auto`` takes: before the first one of a run; the same on every rank."""
        return self._is_open_to_steps

    def in_way(self, name: str) -> GradientSync:
        """Sums of the same parameters in the way ``name``, which are of no run; a collective call."""
        way = name if name == "fp32" else replace(self.settings, wire=name)
        return GradientSync(way, self._named, self._ranks, self._hosts)

    def try_in_steps(self, timed: Timed) -> None:
        """Hold what sums alone have chosen against other ways in steps that leave nothing behind; a collective call,
        before the first `open`.
        """
        self.prepare()
        assert self._choice is not None and self._is_open_to_steps
        choice = tried(self._choice, timed, self._ranks)
        self._is_open_to_steps, self._has_news = False, bool(choice.step_seconds)
        if choice.name != self._choice.name:
            self._compressor = None
            self._use(choice.name)
        self._choice = choice

    def news(self) -> str | None:
        """What steps have decided, once, in a sentence."""
        if not self._has_news or self._choice is None:
            return None
        self._has_news = False
        return self._choice.as_text()

    def open(self, scale: float) -> None:
        """Begin a step whose loss was multiplied by ``scale``."""
        self._is_open_to_steps = False
        if self._ranks.is_split:
            self.prepare()
        if self._compressor is not None and self._ranks.is_split:
            self._compressor.open(scale)

    def sum_(self, bucket: Bucket) -> Tensor:
        """The sum over ranks of what ``bucket`` holds, flags and riders too; a collective call."""
        if self._compressor is None:
            return self._plain.sum_(bucket)
        packed = bucket.packed()
        self._compress(packed, bucket, self._link)
        return packed

    def begin(self, bucket: Bucket) -> tuple[Tensor, Callable[[], None]]:
        """Begin the same while backward runs: where the sum will be, and what waits until it is there."""
        if self._compressor is None:
            return self._plain.begin(bucket)
        packed = bucket.packed()
        done = self._lane.submit(lambda: self._compress(packed, bucket, self._link_aside))

        def wait() -> None:
            with self._ranks.pulse.waiting("gradients of all workers"):
                done()

        return packed, wait

    def settle(self, *, is_good: bool) -> None:
        """End a step; ``is_good`` says whether the optimizer took it. A collective call."""
        self._num_steps += 1
        if self._compressor is not None and self._ranks.is_split:
            self._compressor.settle(self._link, is_good=is_good)

    def waited(self, seconds: float) -> None:
        """For so long a step's sums were exposed: a `Note` for `nugnn.comm.backward_sums.BackwardSums`."""
        self._exposed_seconds += seconds

    def _compress(self, packed: Tensor, bucket: Bucket, link: Link) -> None:
        assert self._compressor is not None
        names = [self._names[id(p)] for p in bucket.parameters]
        with torch.no_grad(), torch._C.DisableTorchFunction():
            values = packed.float()  # itself, where it is float32
            self._compressor.sum_(values, names, bucket.orders, bucket.num_plain, link)
            packed.copy_(values)

    def close(self) -> None:
        """End the thread that sums beside backward, which else ends with the process."""
        self._lane.close()

    # -- state ---------------------------------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, Any] | None:
        """What is the same on every rank, for a checkpoint."""
        state = {} if self._compressor is None else self._compressor.shared_state()
        if self._choice is not None:
            state["choice"] = asdict(self._choice)
        return state or None

    @property
    def residuals(self) -> dict[str, Tensor]:
        """What this rank has kept, by name of the parameter."""
        return {} if self._compressor is None else self._compressor.residuals

    def load(self, shared: Mapping[str, Any] | None, residuals: Mapping[str, Tensor]) -> None:
        """Go on where a checkpoint was written; what was chosen there stays, also between other ranks."""
        if shared is not None and "choice" in shared:
            self._compressor, self._choice = None, Choice(**shared["choice"])
            self._is_open_to_steps = False
            self._use(self._choice.name)
        if self._compressor is not None and shared is not None:
            self._compressor.load(shared, residuals)

    def report(self) -> dict[str, Any] | None:
        """What has travelled since this object was made, and what ``auto`` chose; None where nothing travels.

        On a GPU this waits until it has got there.
        """
        if not self._ranks.is_split:
            return None
        self._ranks.clock.catch_up()
        if self._compressor is None:
            report = self._plain.counts.report(self._num_steps, len(set(self._ranks.hosts)))
        else:
            report = self._compressor.report()
        report |= {"exposed_seconds": self._exposed_seconds} | self._link.placement()
        return report | ({} if self._choice is None else {"choice": asdict(self._choice)})


def add_residuals(total: dict[str, Tensor], residuals: Mapping[str, Tensor]) -> None:
    """Add what one rank has kept to ``total``, in float64."""
    for name, kept in residuals.items():
        total[name] = total[name] + kept.double() if name in total else kept.double()


def even_share(total: Mapping[str, Tensor], world_size: int) -> dict[str, Tensor]:
    """What each rank keeps of what other ranks have kept in all, so that nothing is lost when their number changes."""
    return {name: (kept / world_size).float() for name, kept in total.items()}
