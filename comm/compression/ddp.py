"""Compressed gradients for any script with DistributedDataParallel, in one line."""

from __future__ import annotations

import atexit
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nugnn.comm.buckets import memory_order
from nugnn.comm.clock import Stopwatch
from nugnn.comm.compression.choice import Choice, choose
from nugnn.comm.compression.compressor import Compressor
from nugnn.comm.compression.earlier_buckets import Bucket
from nugnn.comm.compression.lane import Lane
from nugnn.comm.compression.link import Link
from nugnn.comm.compression.low_rank import make_compressor
from nugnn.comm.compression.plain import PlainGradients
from nugnn.comm.compression.residuals import Order
from nugnn.comm.compression.settings import AUTO, LEAST_SIZE, RANK, TYPES, Compression, check_types, wire_names
from nugnn.comm.compression.step_buckets import StepBuckets
from nugnn.comm.compression.wire import BUCKET
from nugnn.comm.groups import Ranks, number_of
from nugnn.comm.hosts import (
    HostGroups,
    checked_hosts,
    host_grid,
    host_name,
    make_host_groups,
    numbered,
    why_no_grid,
)
from nugnn.comm.replicas import STEPS_BETWEEN_CHECKS, first_difference


class CompressedGradients:
    """What `compress` returns.

    Attributes:
        weight: This rank's share of the mean, from 0 to 1; those of all ranks add up to 1. One P-th each at first. Set
            it before backward where batches are unequal: samples of this rank by samples of all ranks.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        settings: Compression,
        scaler: Any | None,
        check_every: int,
        group: dist.ProcessGroup | None,
        hosts: str | HostGroups,
    ) -> None:
        members = dist.get_process_group_ranks(model.process_group)
        if group is not None and dist.get_process_group_ranks(group) != members:
            raise ValueError(
                f"group has the ranks {dist.get_process_group_ranks(group)}, and the model is on the ranks {members}"
            )
        if isinstance(hosts, HostGroups) and len(hosts.grid.hosts()) != len(members):
            raise ValueError(f"hosts has {len(hosts.grid.hosts())} ranks, and the model is on {len(members)}")
        left_alone = model.parameters_to_ignore  # by DDP, as the user asked: each rank may have others
        self._named = {  # one that was frozen after DDP was made travels, too, as zeros
            name: p
            for name, p in model.module.named_parameters()
            if name not in left_alone and (p.requires_grad or p.dtype in TYPES)
        }
        self._names = {id(p): name for name, p in self._named.items()}
        settings = settings.on(model.module)
        settings.check_names(self._named)
        for name, module in model.module.named_modules():
            weight = f"{name}.weight".removeprefix(".")
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and weight in self._named:
                raise ValueError(_of_sparse(weight))
        if settings.wire != "fp32":
            check_types(self._named)
        self._settings = settings
        self._scaler, self._check_every = scaler, check_every
        self._device = next(iter(self._named.values())).device if self._named else torch.device("cpu")
        backend = dist.get_backend(model.process_group if group is None else group)
        is_part, is_given = len(members) < dist.get_world_size(), group is not None
        if group is None:
            group = dist.new_group(members, backend=backend, use_local_synchronization=is_part)
        self._link = Link(
            dist.get_rank(model.process_group), len(members), group, carries_cuda="nccl" in str(backend).lower()
        )
        host_numbers = self._agree(f"{settings}, check_every={check_every}, hosts={_kind_of(hosts)}")
        self._link.hosts = hosts.grid.hosts() if isinstance(hosts, HostGroups) else numbered(host_numbers)
        groups: HostGroups | None
        if isinstance(hosts, HostGroups):
            groups = hosts
        else:
            groups = self._groups_of_hosts(hosts, members, backend, is_part=is_part, is_given=is_given)
        if groups is not None:
            self._link.go_by_host(groups)
        self._ranks = _OfOneGroup(
            self._link.rank, len(members), control=group, device=self._device, hosts=self._link.hosts,
            carries_cuda=self._link.carries_cuda,
        )  # fmt: skip
        self._choice: Choice | None = None
        if settings.wire == AUTO:
            named = {name: p for name, p in self._named.items() if not settings.is_exact(name)}
            self._choice = choose(named, self._ranks, groups)
        self._compressor = self._made()
        self._lane = Lane(self._device)
        weakref.finalize(self, self._lane.close)
        self._exposed = Stopwatch(self._device)
        self._error: BaseException | None = None
        """Of this backward, on its way to the user; what is still to come of it does nothing then."""
        num_gradients = int(model._get_ddp_logging_data()["num_parameter_tensors"])
        self._buckets = StepBuckets(num_gradients, steps_to_lay_out=2 if model.static_graph else 1)
        self._held: list[Callable[[], None]] = []
        """What gives DDP its sums, where they are there only when the last bucket has come."""
        self.weight = 1 / len(members)
        self._own_groups = [] if is_given else [group]
        if groups is not None and not isinstance(hosts, HostGroups):
            self._own_groups += [groups.inside, groups.across]
        atexit.register(_leave, weakref.ref(self))

    def state_dict(self) -> dict[str, Any]:
        """What this rank has to remember: each rank saves its own, beside the model's and the optimizer's.

        A script that goes on from it makes the bits that this one would have made, but where it was taken after the
        first step of all, or the second one with ``static_graph``: DDP has not laid its buckets out for good then.
        """
        state = {**self._compressor.shared_state(), "world_size": self._link.world_size, "rank": self._link.rank}
        chosen = {} if self._choice is None else {"choice": asdict(self._choice)}
        return {**state, "residuals": self._compressor.residuals, "buckets": [*self._buckets.names], **chosen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where this rank's `state_dict` was taken, in the way that ``auto`` chose there.

        Raises:
            ValueError: It is of other parameters, of other settings, of another number of ranks, or has what another
                rank owes.
        """
        if state["world_size"] != self._link.world_size:
            raise ValueError(
                f"the state is of {state['world_size']} ranks, and there are {self._link.world_size}: load the sum of "
                "the residuals of all ranks, divided by their number now, or go on without it"
            )
        saved_by = state.get("rank", self._link.rank)
        if saved_by != self._link.rank and state["residuals"]:
            raise ValueError(
                f"the state is of rank {saved_by}, and this is rank {self._link.rank}: what rounding has left out is "
                "owed by the rank that saved it; save and load a file for each rank"
            )
        if self._settings.wire == AUTO and "choice" in state:
            self._choice = Choice(**state["choice"])
            self._compressor = self._made()
        self._compressor.load(state, state["residuals"])
        self._buckets.load(state.get("buckets", ()))

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A whole model can be saved as it could be before; groups of processes do not travel."""
        return _left_behind, ()

    def report(self) -> dict[str, Any]:
        """Bytes, seconds and errors so far, see `nugnn.comm.compression.compressor.Compressor.report`.

        ``exposed_seconds`` are those that backward passes waited for sums, after the last gradient was made; the
        first pass of a model with ``static_graph`` is not seen. ``choice`` is what ``auto`` has found.
        """
        report = self._compressor.report() | {"exposed_seconds": self._exposed.seconds()} | self._link.placement()
        return report | ({} if self._choice is None else {"choice": asdict(self._choice)})

    def _made(self) -> Compressor | PlainGradients:
        """What sums, in the way that was asked for or chosen."""
        wire = self._settings.wire if self._choice is None else self._choice.name
        if wire == "fp32":
            return PlainGradients(self._ranks)
        return make_compressor(self._named, replace(self._settings, wire=wire), self._link.world_size)

    def _agree(self, asked: str) -> list[int]:
        """A number for the host of each rank; a collective call.

        Raises:
            ValueError: Ranks ask for different things, which would make them wait for each other.
        """
        own = torch.tensor([number_of(host_name()), number_of(asked)], device=self._device)
        rows = self._link.gather(own.view(torch.uint8)).cpu().view(torch.int64).view(-1, 2)
        others = [rank for rank, number in enumerate(rows[:, 1].tolist()) if number != number_of(asked)]
        if others:
            raise ValueError(
                f"compress was called with {asked} on rank {self._link.rank}, and with something else on rank "
                f"{', '.join(map(str, others))}; call it alike on all"
            )
        found: list[int] = rows[:, 0].tolist()
        return found

    def _groups_of_hosts(
        self, hosts: str, members: Sequence[int], backend: str, *, is_part: bool, is_given: bool
    ) -> HostGroups | None:
        """Groups by host where sums are to be made inside hosts first; a collective call then."""
        grid = host_grid(self._link.hosts) if checked_hosts(hosts) == "auto" else None
        why = why_no_grid(self._link.hosts) if hosts == "auto" else None
        if grid is not None and is_part and is_given:
            grid = None  # the names of groups made here would not be sure to agree
            why = (
                "gradients are not summed inside each host first, since a model on some of the ranks was given a "
                "group; give the groups of hosts too, hosts=nugnn.comm.hosts.HostGroups(...), or hosts='flat'"
            )
        if why is not None and self._link.rank == 0:
            warnings.warn(why, stacklevel=4)
        if grid is None:
            return None

        def new_group(ranks: Sequence[int]) -> Any:
            in_all = [members[rank] for rank in ranks]
            return dist.new_group(in_all, backend=backend, use_local_synchronization=is_part)

        return make_host_groups(grid, self._link.rank, new_group)

    def _begin(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Called by DDP with buckets in the same order on every rank, while backward makes the next one."""
        if not (isinstance(self.weight, (int, float)) and math.isfinite(self.weight) and 0 <= self.weight <= 1):
            raise ValueError(f"weight is {self.weight!r}, must be this rank's share of the mean, from 0 to 1")
        buffer, parameters = bucket.buffer(), bucket.parameters()
        names = [self._names[id(p)] for p in parameters]
        if buffer.is_sparse:
            raise ValueError(_of_sparse(names[0]))
        orders = [_order_of(p) for p in parameters]
        is_first, is_last = self._buckets.hand_over(names, is_at_front=bucket.index() == 0)
        weight = float(self.weight)
        is_cuda = buffer.device.type == "cuda"
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if is_cuda else None)

        if is_first:
            self._error = None
        in_backward = torch._C._current_graph_task_id() != -1
        if is_last and in_backward:
            _around_ddp(self._exposed.start, self._end)

        def work() -> None:
            if self._error is not None:
                return
            if is_first:
                self._check()
                self._compressor.open(1.0 if self._scaler is None else self._scaler.get_scale())
            is_plain = isinstance(self._compressor, PlainGradients)
            values = (buffer if is_plain else buffer.float()).mul_(weight)  # the buffer itself, where it is float32
            given = Bucket(values, names, orders, [p.numel() for p in parameters], buffer)
            self._buckets.sum_(given, sum_, is_first=is_first, is_last=is_last)
            if is_last:
                self._compressor.settle(self._link)

        def sum_(values: Tensor, names: Sequence[str], orders: Sequence[Order]) -> None:
            self._compressor.sum_(values, names, orders, 0, self._link)

        def then(error: BaseException | None) -> None:
            if error is not None:
                self._error = error

            def give() -> None:
                if self._error is not None and not in_backward:  # of `Join`, which asks the future itself
                    future.set_exception(self._error)  # type: ignore[arg-type]
                else:  # DDP knows no other: an exception, it says, is no tensor
                    future.set_result(buffer)

            self._held = [give] if is_first else [*self._held, give]
            if is_last or not self._buckets.holds_back:
                held, self._held = self._held, []
                for each in held:
                    each()

        self._lane.submit(work, then)
        return future

    def _end(self) -> None:
        """What went wrong is raised as it was said, out of the user's own ``backward``."""
        self._exposed.stop()
        if (error := self._error) is not None:
            self._error = None
            raise error

    def _check(self) -> None:
        step = self._compressor.step
        if not self._check_every or step % self._check_every:
            return
        parameters = {name: p.detach() for name, p in self._named.items()}
        if (name := first_difference(parameters, self._largest)) is not None:
            raise RuntimeError(f"{name} is no longer the same on all ranks after {step} steps: replicas have diverged")

    def _largest(self, x: Tensor) -> Tensor:
        rows = self._link.gather(x.view(torch.uint8).flatten().to(self._device)).cpu()
        return rows.view(torch.int64).view(-1, *x.shape).amax(0)

    def _leave(self) -> None:
        """Let go of gloo's groups while the interpreter still stands, as `nugnn.comm.groups.leave_ranks` says why.

        The script may have destroyed them and hold this object in a global; their threads end with the last reference.
        """
        self._lane.close()
        if self._link.carries_cuda:
            return
        if dist.is_initialized():
            for group in self._own_groups:
                with suppress(ValueError):  # of groups that were destroyed, and others made since
                    dist.destroy_process_group(group)
        self._own_groups.clear()
        self._link.group = self._link.by_host = None
        object.__setattr__(self._ranks, "control", None)


def _leave(found: weakref.ref[CompressedGradients]) -> None:
    """In good order; after an uncaught exception at once instead, so that the peers hear of it."""
    sync = found()
    if sync is not None and not hasattr(sys, "last_type"):
        sync._leave()


@dataclass(frozen=True, eq=False)
class _OfOneGroup(Ranks):
    """Ranks whose group may take tensors of their GPUs alone."""

    def on_wire(self, x: Tensor) -> Tensor:
        return x.to(self.device) if self.carries_cuda else super().on_wire(x)


def compress(
    model: DistributedDataParallel,
    bits: int | str = 4,
    *,
    bucket: int = BUCKET,
    rounding: str = "nearest",
    error_feedback: bool | None = None,
    least_size: int = LEAST_SIZE,
    seed: int = 0,
    scaler: Any | None = None,
    check_every: int = STEPS_BETWEEN_CHECKS,
    group: dist.ProcessGroup | None = None,
    rank: int = RANK,
    exact: Sequence[str] = (),
    hosts: str | HostGroups = "auto",
) -> CompressedGradients:
    """Have ``model`` exchange its gradients in few bits; replicas stay the same bits. Every rank calls it, once.

    The gradient is the mean over ranks as before, or weighted by `CompressedGradients.weight`. Gradient accumulation
    with ``no_sync``, ``find_unused_parameters``, ``static_graph`` and ``gradient_as_bucket_view`` work as before.

    Args:
        model: On the CPU (gloo) or GPUs (NCCL, or gloo through the host's memory). What else travels between ranks
            (buffers, collectives of a forward pass) is left alone.
        bits: 1 to 8, ``bf16``, ``fp16``, ``adaptive``: bits by tensor, or ``powersgd``: products of thin matrices.
            ``auto``: what is fastest here of ``fp32``, ``bf16``, 8 and 4, found now by sums as large as the gradients,
            alone: what backward would hide of them, or make slower, is not seen. ``fp32``: as they are.
        bucket: Values that share their smallest and largest one, or a quarter as many where that pays, see
            `nugnn.comm.compression.arrangement`.
        rounding: ``nearest`` or ``stochastic``.
        error_feedback: Add in the next step what rounding left out; with rounding to nearest when None.
        least_size: Tensors with fewer values, and those with fewer than two axes, travel as float32.
        seed: Of stochastic rounding, and of the first products of ``powersgd``.
        scaler: The `torch.amp.GradScaler` of the run, where there is one: what is kept must not depend on its scale.
        check_every: Steps between comparisons of all parameters over ranks; 0 for none. Replicas that differ end the
            backward pass with a RuntimeError that names the tensor.
        group: A process group of the model's ranks that nothing else uses; made when None. Give one where the ranks of
            a model that is on some ranks only have made different numbers of groups before, or torch waits for ever.
        rank: Of the products of ``powersgd``.
        exact: Names of the model's parameters, or patterns such as ``head.*``, whose gradients travel as float32.
        hosts: ``auto``: sums are made inside hosts first where these have as many ranks each, two at least; a warning
            says so where they have not. ``flat``: every rank exchanges with every other one. Or the groups of hosts,
            for a model on some of the ranks that was given a ``group``.

    Raises:
        TypeError: ``model`` is no DistributedDataParallel.
        ValueError: A value is not allowed or not the same on all ranks, a parameter is neither float32 nor of 16 bits
            or has sparse gradients, ``exact`` names one that is not there, ``group`` has other ranks, or another hook
            exchanges the gradients.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"compress takes a torch.nn.parallel.DistributedDataParallel, not a {type(model).__name__}; nugnn.fit and "
            "nugnn train have the option grad_sync instead"
        )
    settings = Compression(
        wire=_wire_of(bits),
        bucket=bucket,
        rounding=rounding,
        error_feedback=error_feedback,
        least_size=least_size,
        seed=seed,
        exact=exact,
        rank=rank,
    )
    if check_every < 0:
        raise ValueError(f"check_every is {check_every}, must be 0 or more")
    if not isinstance(hosts, HostGroups):
        checked_hosts(hosts)
    gradients = CompressedGradients(model, settings, scaler, check_every, group, hosts)
    try:
        model.register_comm_hook(gradients, _hook)
    except RuntimeError as error:
        raise ValueError(
            "model exchanges its gradients by another hook already, of an earlier compress or the script; make it anew"
        ) from error
    return gradients


def _wire_of(bits: int | str) -> str:
    wire = f"{bits}bit" if isinstance(bits, int) and not isinstance(bits, bool) else bits
    if wire not in (*wire_names(), AUTO):
        words = ", ".join(name for name in wire_names() if not name.endswith("bit"))
        raise ValueError(f"bits is {bits!r}, must be 1 to 8, {words} or {AUTO}")
    return wire


def _of_sparse(name: str) -> str:
    return f"the gradients of {name} are sparse, and gradients are summed densely; make its layer with sparse=False"


def _left_behind() -> None:
    """In the place of what `compress` returned, in a model that was saved whole or copied."""
    warnings.warn(
        "this model's gradients were compressed, and are not any more: call nugnn.comm.compress on it again",
        stacklevel=2,
    )


def _kind_of(hosts: str | HostGroups) -> str:
    return hosts if isinstance(hosts, str) else "HostGroups"


def _hook(gradients, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations, and wants no text there
    return gradients._begin(bucket)


def _around_ddp(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call ``before`` when this backward has made all gradients, and ``after`` when DDP has waited for its buckets.

    DDP asks for its own turn after the last bucket has left: behind what was asked for until then, and before what is
    asked for in that.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def first() -> None:
        before()
        queue(after)

    queue(first)


def _order_of(parameter: Tensor) -> list[int] | None:
    order = memory_order(parameter)
    return None if order == sorted(order) else order
