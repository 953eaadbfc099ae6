"""What is to be trained on, checked: what a family of data brings to `nugnn.fit` before the ranks begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from nugnn.comm.groups import Ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.samples.sample_data import SampleData
from nugnn.sample_sets import names_samples
from nugnn.train_options import TrainOptions
from nugnn.train_rank import Part

if TYPE_CHECKING:
    from nugnn.plan_training import TrainingPlan

OF_ONE_FAMILY: Mapping[str, Any] = {
    **{"partitioner": "auto", "order": "auto", "check": True, "cache_folder": None, "inductive": False},
    **{"val": None, "test": None},
}
"""Arguments of `nugnn.fit` that not every family has a use for; with their defaults."""

Stage = Callable[[str], Any]


class Task(Protocol):
    """A model, data and options that were found to fit each other.

    Attributes:
        model: Before training.
        options: How to train.
        worker: Module whose ``main`` a worker process runs.
        said: Sentences for the user, before anything is started.
        plan: Where one was asked for.
    """

    worker: str
    said: list[str]
    plan: TrainingPlan | None

    @property
    def model(self) -> nn.Module: ...

    @property
    def options(self) -> TrainOptions: ...

    def identity(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What makes two runs the same run, see `nugnn.fingerprint.run_identity`."""
        ...

    def check_devices(self, devices: Sequence[torch.device]) -> None:
        """Refuse options that do not fit the devices."""
        ...

    def use_plan(self, plan: TrainingPlan) -> None:
        """Prepare ``plan``, which says how the data are divided; before ranks begin.

        Raises:
            ValueError: It is of something else, or the model cannot be foreseen.
        """
        ...

    def stored(self, folder: Path, stage: Stage) -> tuple[Part, list[str]]:
        """For worker processes: what they train on, picklable, large things in ``folder``; and notes for the user."""
        ...

    def here(self, stage: Stage) -> tuple[Part, list[str]]:
        """For this process alone; notes may still be added to the list when the part is opened."""
        ...

    def joined(self, ranks: Ranks, stage: Stage) -> tuple[Part, list[str]]:
        """For ranks that all have the data already; a collective call."""
        ...


def task_of(
    model: Any,
    data: Any,
    *,
    workers: int,
    shares: Sequence[float] | None,
    given: Mapping[str, Any],
    options: Mapping[str, Any],
    others: Sequence[str] = (),
) -> Task:
    """The task of the family that ``data`` belongs to.

    Args:
        model: To be trained.
        data: A graph or samples, as `nugnn.fit` takes them.
        workers: Number of ranks.
        shares: Part of the data each of them gets.
        given: A value for each name in `OF_ONE_FAMILY`.
        options: Options by name.
        others: Names that a wrong one among them may have meant.

    Raises:
        TypeError: ``model`` or ``data`` is something else, or there is no option of a name.
        ValueError: Options or data do not fit, an option belongs to the other family, or one names a parameter that
            ``model`` has not.
    """
    kind: Callable[..., Task]
    if is_samples(data):
        from nugnn.sample_task import SampleTask

        kind, own = SampleTask, given_to("samples", ("check", "val", "test"), given)
    else:
        from nugnn.graph_task import GraphTask

        names = ("partitioner", "order", "check", "cache_folder", "inductive")
        kind, own = GraphTask, given_to("graphs", names, given)
    task = kind(model, data, workers=workers, shares=shares, options=options, others=others, **own)
    task.options.check_gradients(model)
    return task


def given_to(family: str, names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given of ``names``; anything else has to be the default.

    Raises:
        ValueError: It is not.
    """
    for name, value in given.items():
        if name not in names and value is not OF_ONE_FAMILY[name] and value != OF_ONE_FAMILY[name]:
            other = "graphs" if family == "samples" else "samples"
            raise ValueError(f"{name} belongs to {other}, not to {family}; leave it out")
    return {name: given[name] for name in names}


def is_samples(data: Any) -> bool:
    """Whether ``data`` is samples: prepared ones or their name, or a map-style data set of pairs."""
    if isinstance(data, str):
        return names_samples(data)
    if isinstance(data, (SampleData, Dataset)):
        return True
    if isinstance(data, (GraphData, Tensor, nn.Module, dict)) or type(data).__module__.partition(".")[0] == "dgl":
        return False
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or len(data) == 0:
        return False
    try:
        first = data[0]
    except Exception:  # of a type that is no data set, such as a table
        return False
    return isinstance(first, (tuple, list)) and len(first) == 2
