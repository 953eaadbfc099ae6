"""The training loop.

Each rank trains on its part of the data; losses, gradients and metrics are those of one device that has it all.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nugnn.comm.backward_sums import BackwardSums
from nugnn.comm.compression.gradient_sync import GradientSync, as_compression
from nugnn.comm.compression.settings import Compression
from nugnn.comm.gradients import broadcast_state
from nugnn.comm.replicas import STEPS_BETWEEN_CHECKS, first_difference
from nugnn.family import Family, Work
from nugnn.history import Epoch, EpochInProgress, History
from nugnn.host_number import HostNumber
from nugnn.own_rows import sharded_parameters
from nugnn.precision.loss_scale import LossScale
from nugnn.schedules import Schedule
from nugnn.step_graphs import CudaGraphs, StepGraphs, counts_as_compressed, records_steps
from nugnn.step_trial import TrialSteps, leaving_nothing
from nugnn.trainer_state import plain_groups

T = TypeVar("T")
MakeScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class Trainer:
    """Trains the model of a family of data.

    Args:
        family: `nugnn.graph_family.GraphFamily` or `nugnn.sample_family.SampleFamily`. Parameters of its model are made
            equal to rank 0's.
        make_optimizer: Gets the model, after embeddings were split; Adam with lr 0.01 when None.
        make_scheduler: Gets the optimizer; its schedule steps once after each epoch (`ReduceLROnPlateau` on the
            training loss), or after each optimizer step.
        schedule_steps: Step the schedule after each optimizer step.
        schedule: Factor on the learning rates at each optimizer step, see `nugnn.schedules`; in place of
            ``make_scheduler``.
        regularizer: Parameter-only term, ``regularizer(model) -> scalar``; counted once over all ranks.
        clip_norm: Largest norm of the gradient of all parameters together; a larger one is scaled down to it.
        cuda_graphs: Whether steps run as CUDA graphs, see `nugnn.step_graphs`: ``auto``, ``on`` or ``off``.
        grad_sync: How gradients travel: a name, or `nugnn.comm.Compression`.
        grad_sync_hosts: Whether compressed sums are made inside hosts first, ``auto`` or ``flat``.
        check_replicas: Steps between comparisons of all replicated parameters over ranks; 0 for the first and the last
            epoch alone.

    Raises:
        ValueError: Two schedules were given; ``clip_norm`` is not positive, or would have to clip a node embedding;
            CUDA graphs were asked for where they are not to be had; gradients cannot travel as asked.
    """

    def __init__(
        self,
        family: Family,
        *,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        make_scheduler: MakeScheduler | None = None,
        schedule_steps: bool = False,
        schedule: Schedule | None = None,
        regularizer: Callable[[nn.Module], Tensor] | None = None,
        clip_norm: float | None = None,
        cuda_graphs: CudaGraphs = "auto",
        grad_sync: str | Compression = "fp32",
        grad_sync_hosts: str = "auto",
        check_replicas: int = STEPS_BETWEEN_CHECKS,
    ) -> None:
        self.family, self.model, self.ranks = family, family.model, family.ranks
        own = {id(p) for p in sharded_parameters(self.model)}
        replicated = {name: p for name, p in self.model.named_parameters() if id(p) not in own}
        self._replicated, self._named = list(replicated.values()), replicated
        how = as_compression(grad_sync).on(self.model)
        self.grad_sync = GradientSync(how, replicated, self.ranks, grad_sync_hosts)
        self._sums = BackwardSums(
            self._replicated, self.ranks, while_backward_runs=family.sums_in_backward, sums=self.grad_sync,
            riders=family.riders, note=self.grad_sync.waited,
        )  # fmt: skip
        broadcast_state([*self._replicated, *self.model.buffers()], self.ranks)
        if make_optimizer is None:
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        else:
            self.optimizer = make_optimizer(self.model)
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self._left_alone = [p for p in self.model.parameters() if id(p) not in stepped]
        names = {id(p): name for name, p in self.model.named_parameters()}
        self.first_groups = plain_groups(self.optimizer, names)  # before a schedule changes them
        if schedule is not None and (make_scheduler is not None or schedule_steps):
            raise ValueError("schedule goes by steps on its own: give either schedule, or make_scheduler")
        self.schedule = schedule
        if schedule is not None:
            make_scheduler, schedule_steps = _following(schedule), True
        self.scheduler = None if make_scheduler is None else make_scheduler(self.optimizer)
        self._schedule_steps = schedule_steps
        self.loss_scale = LossScale(is_on=family.storage.needs_loss_scale, largest=self.ranks.max_)
        self._regularizer = regularizer
        if clip_norm is not None and (not clip_norm > 0 or own):
            raise ValueError(
                "clip_norm needs the norm over all parameters, which a node embedding's rows on other ranks are part of"
                if own
                else f"clip_norm is {clip_norm:g}, must be positive"
            )
        self._clip_norm = clip_norm
        self._check_replicas = check_replicas
        compresses = counts_as_compressed(self.grad_sync.name, cuda_graphs)
        is_recorded = records_steps(cuda_graphs, family, has_regularizer=regularizer is not None, compresses=compresses)
        trained = functools.partial(_trained, self.model, self.optimizer)
        self._graphs = StepGraphs(family, trained, is_auto=cuda_graphs == "auto") if is_recorded else None
        self.num_steps = 0
        self.in_progress = self._new_epoch()
        self._loss_of_epoch: HostNumber | None = None
        self._room = HostNumber.room_for(self.ranks.device)
        self._lap_began = time.perf_counter()

    def train_epoch(self) -> float:
        """All optimizer steps of an epoch; those that are left, of one in progress.

        A GPU may still be at the last backward pass and step when this returns: the loss is known before. What is done
        next on the GPU comes after them; who looks at a clock has to wait with `torch.cuda.synchronize`.

        Returns:
            The loss over all ranks, in the mean over steps by their weight.
        """
        self._run_steps(lambda: False)
        loss = self._end_epoch()
        self.in_progress = self._new_epoch()
        return loss

    def _new_epoch(self) -> EpochInProgress:
        return EpochInProgress(torch.zeros((), dtype=torch.float64, device=self.ranks.device))

    @property
    def steps_into_epoch(self) -> int:
        """Steps of the epoch in progress that are done; 0 between two epochs."""
        return self.num_steps % self.family.steps_per_epoch

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """What happens inside does not count for the seconds of the epoch in progress."""
        self._lap()
        yield
        self._restart_lap()

    def _restart_lap(self) -> None:
        self.ranks.clock.take()
        self._lap_began = time.perf_counter()

    def _lap(self) -> None:
        """Count the time since the lap began for the epoch in progress."""
        now = time.perf_counter()
        halo, sync = self.ranks.clock.take()
        for name, seconds in {"epoch": now - self._lap_began, "halo": halo, "sync": sync}.items():
            self.in_progress.seconds[name] += seconds
        self._lap_began = now

    def _run_steps(self, between_steps: Callable[[], bool]) -> bool:
        """The steps that are left of an epoch; False when ``between_steps`` said to stop before its end."""
        self.model.train()
        self._settle_recording()
        done = self.in_progress
        done.loss = done.loss.to(self.ranks.device)  # that of a checkpoint
        epoch, first = divmod(self.num_steps, self.family.steps_per_epoch)
        with nullcontext() if self._graphs is None else self._graphs.aside():
            return self._steps_of(epoch, first, between_steps)

    def _steps_of(self, epoch: int, first: int, between_steps: Callable[[], bool]) -> bool:
        done = self.in_progress
        for works in self.family.steps(epoch, first):
            weight = self.family.weight(works[0])
            is_last = self.steps_into_epoch + 1 == self.family.steps_per_epoch
            reads = functools.partial(self._read, weight=weight) if is_last and self._reads_early else None
            self._try_ways(works)
            with self.ranks.clock.phase("step", self.ranks.device):
                share, self._loss_of_epoch = self._step(works, reads)
            done.loss += share * weight
            done.weight += weight
            if self.steps_into_epoch and between_steps():
                return False
        return True

    @property
    def _reads_early(self) -> bool:
        """Whether the epoch's loss comes to the host while the GPU is at the last backward pass; the same on all ranks.

        The host then prepares the next epoch meanwhile. Through the host's memory, ranks would have to wait for it.
        """
        return self.ranks.carries_cuda or (not self.ranks.is_split and self.ranks.device.type == "cuda")

    def _read(self, share: Tensor, weight: float | Tensor) -> HostNumber:
        """The epoch's loss, which is known with the last step's ``share``."""
        done = self.in_progress
        is_only = self.family.steps_per_epoch == 1  # of numbers of this step alone, so that it may be recorded
        mean = share.clone() if is_only else (done.loss + share * weight) / (done.weight + weight)
        return HostNumber(self.ranks.sum_(mean), self._room)

    def _end_epoch(self) -> float:
        """The epoch's loss over all ranks; the schedule steps."""
        if self._loss_of_epoch is None:
            done = self.in_progress
            self._loss_of_epoch = HostNumber(self.ranks.sum_(done.loss / done.weight), self._room)
        global_loss, self._loss_of_epoch = self._loss_of_epoch.read(), None
        if self.scheduler is not None and not self._schedule_steps:
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(global_loss)
            else:
                self.scheduler.step()
        return global_loss

    @property
    def num_recorded(self) -> int:
        """Kinds of step that are CUDA graphs by now."""
        return 0 if self._graphs is None else self._graphs.num_recorded

    def forget_recorded(self) -> None:
        """Steps that are CUDA graphs read memory that is another's now: rows have moved."""
        if self._graphs is not None:
            self._graphs.forget()

    def step(self, works: Sequence[Work], on_loss: Callable[[Tensor], Any] | None = None) -> Tensor:
        """One optimizer step.

        Args:
            works: Its parts; their gradients add up.
            on_loss: Gets what is returned as soon as it is known, before the last part's backward pass; where steps are
                CUDA graphs, after the step.

        Returns:
            This rank's share of the loss, a float64 scalar without gradient.
        """
        self._settle_recording()
        self._try_ways(works)
        with nullcontext() if self._graphs is None else self._graphs.aside():
            share, _ = self._step(works, None if self._graphs is not None else on_loss)
        if self._graphs is not None and on_loss is not None:
            on_loss(share)
        return share

    def _step(self, works: Sequence[Work], on_loss: Callable[[Tensor], T] | None) -> tuple[Tensor, T | None]:
        """As `step`; with what ``on_loss`` gave, which is a part of the step if that is recorded."""
        self.grad_sync.open(self.loss_scale.scale)
        if self._graphs is None:
            share, said = self._passes(works, on_loss)
        elif on_loss is None or self.family.steps_per_epoch == 1:
            share, said = self._graphs.run(works, self.num_steps, self._passes, on_loss)
        else:  # it is another function each time
            share, _ = self._graphs.run(works, self.num_steps, self._passes, None)
            said = on_loss(share)
        is_good = self.loss_scale.unscale_(self.model.parameters())
        self.grad_sync.settle(is_good=is_good)
        if is_good:
            with self.ranks.clock.phase("optimizer", self.ranks.device):
                if self._clip_norm is not None:  # the same everywhere: gradients are
                    nn.utils.clip_grad_norm_(self._replicated, self._clip_norm)
                self.optimizer.step()
        self.family.settle(is_good=is_good)
        self.num_steps += 1
        if self._check_replicas and self.num_steps % self._check_replicas == 0:
            self._verify_replicas(with_buffers=False)
        if self.scheduler is not None and self._schedule_steps:
            self.scheduler.step()
        return share, said

    def _settle_recording(self) -> None:
        """Before steps run, give up recording them where ``grad_sync auto`` has come to compressed gradients; a
        collective call where that is still to be decided.
        """
        if self._graphs is None:
            return
        if self.grad_sync.is_undecided:
            self.grad_sync.prepare()
        if self.grad_sync.compresses:
            self._graphs = None

    def _try_ways(self, works: Sequence[Work]) -> None:
        """Before the first step begins, have ways of gradients tried with its work where ``grad_sync auto`` asks for
        that; a collective call then. On GPUs, and where no sum begins in backward, sums alone decide.
        """
        if not self.grad_sync.is_open_to_steps or self.ranks.device.type != "cpu" or not self._sums.may_begin:
            return

        def passes(sums: BackwardSums) -> None:
            self._passes([self.family.copy_of(work) for work in works], None, sums)  # a model may write into its input

        steps = TrialSteps(passes, self._named, self.ranks, self.grad_sync.in_way, self.family.riders)
        with closing(steps), self.off_the_clock(), leaving_nothing(self.model):
            self.grad_sync.try_in_steps(steps.timed)

    def _passes(
        self,
        works: Sequence[Work],
        on_loss: Callable[[Tensor], T] | None,
        sums: BackwardSums | None = None,
    ) -> tuple[Tensor, T | None]:
        """Forward and backward of all parts, and the sums of gradients over ranks, by ``sums`` if they are given; gives
        what `_step` does.
        """
        sums = self._sums if sums is None else sums
        said = None
        share = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self._left_alone:  # by the optimizer: sums and norms would grow
            parameter.grad = None
        for part, work in enumerate(works):
            with self.family.around(self.num_steps, work if self._regularizer is None else None):
                with self.ranks.clock.phase("forward", self.ranks.device):
                    loss = self.family.loss(work)
                    if self._regularizer is not None and self.ranks.rank == 0 and part == 0:
                        loss = loss + self._regularizer(self.model)
                share += loss.detach()
                if on_loss is not None and part == len(works) - 1:
                    said = on_loss(share)
                is_last = part == len(works) - 1
                with (
                    self.ranks.clock.phase("backward", self.ranks.device),
                    sums.last_backward() if is_last else nullcontext(),
                ):
                    (loss * self.loss_scale.scale if self.loss_scale.is_on else loss).backward()
        sums.finish()
        return share, said

    def evaluate(self) -> dict[str, float]:
        """Metric on each split over all ranks; a collective call."""
        return self.family.evaluate(self.num_steps)

    def predict_all(self) -> Tensor:
        """Logits of all rows in their original order, on every rank; a collective call."""
        return self.family.predict_all(self.num_steps)

    def fit(
        self,
        epochs: int,
        *,
        patience: int | None = None,
        evaluate_every: int = 1,
        on_epoch: Callable[[Epoch], Any] | None = None,
        history: History | None = None,
        between_epochs: Callable[[History], bool] | None = None,
        between_steps: Callable[[History], bool] | None = None,
    ) -> History:
        """Train until ``epochs`` are done, or until the validation metric has not improved for ``patience`` epochs.

        Every decision is taken from values that are equal on all ranks.

        Args:
            epochs: Upper bound, those in ``history`` included.
            patience: None to train all epochs.
            evaluate_every: Epochs between evaluations; the last one is always evaluated.
            on_epoch: Gets each `Epoch` (plain numbers, nothing attached to the graph).
            history: Epochs this trainer has behind it, to go on from; extended in place.
            between_epochs: Called after each epoch but the last; what it returns, equal on all ranks, says whether to
                stop here.
            between_steps: Likewise after each step of an epoch but the last one; `train_epoch` goes on from there.
        """
        history = History() if history is None else history
        first = len(history.epochs) + 1
        while not history.is_finished(epochs, patience):
            self._restart_lap()
            number = len(history.epochs) + 1
            if not self._run_steps(lambda: between_steps is not None and between_steps(history)):
                break
            loss = self._end_epoch()
            self.ranks.synchronize()  # what is left of the epoch is its time
            self._lap()
            spent, self.in_progress = self.in_progress.seconds, self._new_epoch()
            begin = time.perf_counter()
            scores = dict.fromkeys(("train", "val", "test"), math.nan)
            is_evaluated = number % evaluate_every == 0 or number == epochs
            if is_evaluated:
                scores |= self.evaluate()
            seconds = {
                "epoch": spent["epoch"],
                "compute": spent["epoch"] - spent["halo"] - spent["sync"],
                "halo": spent["halo"],
                "sync": spent["sync"],
                "evaluate": time.perf_counter() - begin,
            }
            epoch = Epoch(number, loss, scores["train"], scores["val"], scores["test"], seconds)
            history.epochs.append(epoch)
            history.elapsed_seconds += seconds["epoch"] + seconds["evaluate"]
            if is_evaluated:
                history.keep_best(epoch, self.model)
            if on_epoch is not None:
                on_epoch(epoch)
            if not math.isfinite(loss):
                raise FloatingPointError(f"the training loss became {loss} in epoch {number}; lower the learning rate")
            is_last = history.is_finished(epochs, patience)
            if is_last:  # nobody computes a loss with these weights any more
                self._verify_finite(number)
            if number == first or is_last:
                self._verify_replicas()
            if not is_last and between_epochs is not None and between_epochs(history):
                break
        return history

    def _verify_replicas(self, *, with_buffers: bool = True) -> None:
        """Parameters and buffers are the same bits on all ranks, or the model updates one from a rank's own rows."""
        if not self.ranks.is_split:
            return
        own = {id(p) for p in sharded_parameters(self.model)}
        named = dict(self.model.named_buffers()) if with_buffers else {}
        named |= {name: p for name, p in self.model.named_parameters() if id(p) not in own}
        if (name := first_difference(named, self.ranks.max_)) is not None:
            raise ValueError(
                f"{name} is no longer the same on all ranks after step {self.num_steps}: the model updates it from a "
                f"rank's own rows. {self.family.remedy}"
            )

    def _verify_finite(self, number: int) -> None:
        """The last step of a run left numbers; a collective call."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        wrong = [name for name, p in trained.items() if not bool(torch.isfinite(p.detach()).all())]
        if float(self.ranks.max_(torch.tensor([float(bool(wrong))]))) > 0:  # rows of an embedding are one rank's own
            where = wrong[0] if wrong else "a parameter of another worker"
            raise FloatingPointError(
                f"{where} is no longer finite after the last step, in epoch {number}; lower the learning rate"
            )


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Parameters of the model and whatever else the optimizer takes, each once."""
    of_optimizer = (p for group in optimizer.param_groups for p in group["params"])
    return list({id(p): p for p in (*model.parameters(), *of_optimizer)}.values())


def _following(schedule: Schedule) -> MakeScheduler:
    def factor(step: int) -> float:  # of a function torch keeps no state, of an object it would bring back its own
        return schedule(step)

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
