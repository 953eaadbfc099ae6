"""A plan: who gets how much of a graph or batch, what is expected of it, and what it was made from; as JSON.

A plan is made for a graph (or samples), a model and devices; `Plan.check` refuses it for others. Devices are known by
their uuid, or by name and size, never by the number that a driver gives them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Protocol, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nugnn._counted import counted
from nugnn._regular_file import no_file
from nugnn.planning.calibration import Calibration, StandsOn
from nugnn.planning.in_words import seconds_text
from nugnn.planning.limits import DeviceLimits
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.profiles import Count, DeviceKind, Seconds
from nugnn.planning.validation import what_is_wrong

SCHEMA: Literal["nugnn.plan/1"] = "nugnn.plan/1"
BASELINES = ("even", "flops", "bandwidth")

Whole = Annotated[int, Field(ge=0)]
Plain = str | int | float | bool | None
SharesBy = Literal["auto", "even", "flops", "bandwidth", "given"]
SecondsKind = Literal["compute", "halo", "sync", "wait"]
"""Of a step: at operators; at exchanges of rows, and at sums of gradients, as far as nothing runs beside them; and what
is left until the slowest device is done."""
_MOST_LINES = 16
"""Devices that `Plan.__str__` has a line for."""


class KnownDevice(Protocol):
    """A device as far as it can be told from others, such as a `nugnn.planning.profiles.DeviceProfile`."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def uuid(self) -> str | None: ...


class PlanError(ValueError):
    """A file is no plan, or the plan is of something else: says what."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class PlannedSizes(_Record):
    """As `nugnn.planning.part_sizes.PartSizes`."""

    inner: Whole = 0
    edges: Whole = 0
    halo: Whole = 0
    sent: Whole = 0
    train: Whole = 0
    batch: Whole = 0

    @classmethod
    def of(cls, sizes: PartSizes) -> PlannedSizes:
        return cls(**{name: getattr(sizes, name) for name in cls.model_fields})

    @property
    def sizes(self) -> PartSizes:
        return PartSizes(**self.model_dump())


class PlannedDevice(_Record):
    """One rank's device, its part, and what is expected.

    Args:
        host: Where it is.
        name: Of the product.
        kind: How torch reaches it.
        uuid: Who it is; None on paper and for a CPU.
        multiprocessors: In use; threads of a CPU.
        source: Where its rates come from.
        sms, memory_fraction, threads: Limits, see `nugnn.planning.limits.DeviceLimits`.
        share: Of the nodes, or of a batch.
        sizes: Its part.
        seconds: Expected of a step (of a graph, a step is an epoch).
        memory_bytes: Expected at the peak.
        memory_limit_bytes: What the device has.
    """

    host: str
    name: str
    kind: DeviceKind
    uuid: str | None = None
    multiprocessors: Count
    source: Literal["measured", "sheet"]
    sms: Count | None = None
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    threads: Count | None = None
    share: Annotated[float, Field(ge=0, le=1)]
    sizes: PlannedSizes
    seconds: dict[SecondsKind, Seconds]
    memory_bytes: Whole
    memory_limit_bytes: Count

    @property
    def limits(self) -> DeviceLimits:
        return DeviceLimits(sms=self.sms, memory_fraction=self.memory_fraction, threads=self.threads)

    @property
    def busy_seconds(self) -> float:
        """Of a step, without waiting for slower devices."""
        return math.fsum(seconds for kind, seconds in self.seconds.items() if kind != "wait")


class Baseline(_Record):
    """Shares by one number of each device's specification, and what they would come to.

    Args:
        name: ``even``, ``flops`` or ``bandwidth``.
        shares: Of each device, summing to 1.
        step_seconds: Expected, of the slowest device.
        fits: Whether every part fits its memory.
        is_ideal: Whether its parts were not cut, where those of the plan were: ideal ones are of exactly these shares
            of nodes and edges alike, which no cut is.
    """

    name: Literal["even", "flops", "bandwidth"]
    shares: tuple[Annotated[float, Field(ge=0, le=1)], ...]
    step_seconds: Seconds
    fits: bool
    is_ideal: bool = False


class DataFacts(_Record):
    """What a plan knows of its data.

    Args:
        name: For people.
        content: Digest of a graph's structure, features and labels; None where only its counts were known.
        nodes, edges, train: Counts of a graph; edges after self-loops were added or taken away.
        samples: Training samples.
        features: Width of a row of features; 0 without any.
        input_shape: Of a sample.
        classes: Of the labels.
    """

    name: str
    content: str | None = None
    nodes: Whole = 0
    edges: Whole = 0
    train: Whole = 0
    samples: Whole = 0
    features: Whole = 0
    input_shape: tuple[Whole, ...] = ()
    classes: Whole = 0


CutBy: TypeAlias = Literal["metis", "clusters", "kaminpar", "random"]
"""What made the parts; for ``auto`` shares not ``random``."""


class CutFacts(_Record):
    """How a graph was cut.

    Args:
        partitioner: As ``--partitioner`` names it.
        seed: Of it.
        sha256: Of the parts' file, which lies beside the plan under its name with ``.parts.npy``.
    """

    partitioner: CutBy
    seed: Whole
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Plan(_Record):
    """Who does how much.

    Args:
        schema_name: What kind of file this is; ``schema`` in JSON.
        family: Of the data.
        shares_by: What asked for these shares: ``auto``, a baseline, or ``given``.
        devices: In the order of ranks.
        step_seconds: Expected of a step: of its slowest device, exchanges included.
        steps_per_epoch: 1 for a graph.
        baselines: Beside it.
        halo: Whether halo rows were ``counted`` in a cut, or are ``expected``; ``none`` without any.
        data: What it was made for.
        model: Likewise: names and plain values.
        settings: Of the run, as far as seconds depend on them.
        cut: How the graph was cut; None where it was not.
        notes: What had to be assumed.
        stands_on: What seconds were predicted from; None of plans that were made before this was kept.
        rates: Digest of the rates and links that they were predicted from; None for operators that were timed.
        calibration: How far such predictions have been off on these devices, when the plan was made or trained with.
            Seconds in here are those of the replay all the same: see `corrected`.
        versions: Of nugnn and torch, and of the code that predicts.
        made: ISO 8601 date and time, UTC.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=())

    schema_name: Literal["nugnn.plan/1"] = Field(SCHEMA, alias="schema")
    family: Literal["graph", "samples"]
    shares_by: SharesBy
    devices: tuple[PlannedDevice, ...] = Field(min_length=1)
    step_seconds: Seconds
    steps_per_epoch: Count = 1
    baselines: tuple[Baseline, ...] = ()
    halo: Literal["counted", "expected", "none"]
    data: DataFacts
    model: dict[str, Plain] = {}
    settings: dict[str, Plain] = {}
    cut: CutFacts | None = None
    notes: tuple[str, ...] = ()
    stands_on: StandsOn | None = None
    rates: str | None = None
    calibration: Calibration | None = None
    versions: dict[str, str] = {}
    made: str | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Plan:
        """Numbers that say the same have to be the same."""
        total = math.fsum(device.share for device in self.devices)
        if abs(total - 1) > 1e-6:
            raise ValueError(f"shares of devices add up to {total:g}, not 1")
        other = "samples" if self.family == "graph" else "nodes"
        if others := getattr(self.data, other):
            raise ValueError(f"family is {self.family}, and data has {others} {other}")
        for baseline in self.baselines:
            if len(baseline.shares) != len(self.devices):
                raise ValueError(f"baseline {baseline.name} has {counted(len(baseline.shares), 'share')}")
        for what, whole in (("inner", self.data.nodes), ("edges", self.data.edges), ("train", self.data.train)):
            held = sum(getattr(device.sizes, what) for device in self.devices)
            if self.family == "graph" and abs(held - whole) > (0 if self.halo == "counted" else len(self.devices)):
                raise ValueError(f"devices hold {held} of {whole} ({what})")
        self._shares_agree()
        return self

    def _shares_agree(self) -> None:
        """The cut follows sizes: a share that was edited alone would change nothing."""
        of, what = ("inner", "nodes") if self.family == "graph" else ("batch", "samples")
        whole = sum(getattr(device.sizes, of) for device in self.devices)
        for rank, device in enumerate(self.devices):
            held = getattr(device.sizes, of)
            if whole and abs(device.share - held / whole) * whole > 1:
                raise ValueError(
                    f"shares and sizes of device {rank} do not agree: its share is {device.share:.4g}, and {held} of "
                    f"{whole} {what} are {held / whole:.4g}; make the plan anew, or give shares by --shares"
                )

    def __str__(self) -> str:
        """A line for the whole, and one for each device; `nugnn plan` has tables of more."""
        told = self.corrected()
        step = "an epoch" if self.family == "graph" else f"a step, {self.steps_per_epoch} an epoch"
        head = f"{self.data.name}: {seconds_text(told.step_seconds)} {step}, predicted"
        lines = [
            f"{rank:3} {device.name[:28]:28} {100 * device.share:5.1f} %  {seconds_text(device.busy_seconds):>8}  "
            f"{device.memory_bytes / 2**30:.2f} of {device.memory_limit_bytes / 2**30:.1f} GiB"
            for rank, device in enumerate(told.devices[:_MOST_LINES])
        ]
        if left_out := len(self.devices) - len(lines):
            lines.append(f"and {counted(left_out, 'device')} more")
        return "\n".join([head, *lines])

    def __repr__(self) -> str:
        return f"Plan({self.data.name}, devices={len(self.devices)}, step_seconds={self.step_seconds:.3g})"

    @property
    def epoch_seconds(self) -> float:
        return self.step_seconds * self.steps_per_epoch

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(device.share for device in self.devices)

    @property
    def batch_split(self) -> tuple[int, ...]:
        """Samples of each rank."""
        return tuple(device.sizes.batch for device in self.devices)

    @property
    def is_simulated(self) -> bool:
        """Whether any device is on paper alone: predictions for it were never compared with a run."""
        return any(device.source == "sheet" for device in self.devices)

    @property
    def model_text(self) -> str:
        """The model, for people."""
        return _model_in_words(self.model)

    def compute_and_exchanges(self, device: PlannedDevice) -> tuple[float, float]:
        """Seconds of an epoch that one of the devices computes, and those that it stands still."""
        compute = device.seconds.get("compute", 0.0)
        return compute * self.steps_per_epoch, (math.fsum(device.seconds.values()) - compute) * self.steps_per_epoch

    def corrected(self) -> Plan:
        """The plan as it is told: all seconds with the factor of measured runs, where that is applied.

        Shares, sizes and memory stay: the factor is the same for all devices.
        """
        factor = 1.0 if self.calibration is None else self.calibration.applied_factor
        if factor == 1:
            return self
        devices = tuple(
            each.model_copy(update={"seconds": {kind: factor * seconds for kind, seconds in each.seconds.items()}})
            for each in self.devices
        )
        baselines = tuple(
            each.model_copy(update={"step_seconds": factor * each.step_seconds}) for each in self.baselines
        )
        told = {"devices": devices, "baselines": baselines, "step_seconds": factor * self.step_seconds}
        return self.model_copy(update=told)

    def to_json(self) -> str:
        """Indented, in the order of the fields, with a newline at its end."""
        return self.model_dump_json(indent=2, by_alias=True) + "\n"

    def check(
        self,
        data: DataFacts,
        model: Mapping[str, Plain],
        devices: Sequence[KnownDevice | None],
    ) -> None:
        """Refuse to use the plan for something else than it was made for.

        Args:
            data: What is trained on.
            model: What is trained.
            devices: Of each rank; None for one that cannot be looked at from here.

        Raises:
            PlanError: Says what differs.
        """
        self.check_workers(len(devices))
        found = _differences(self.data, data)
        if any(self.model[name] != model[name] for name in self.model.keys() & model.keys()):
            then, now = _model_in_words(self.model), _model_in_words(model)
            but = f"and this run has {now}" if then != now else "and the weights of this run's have other shapes"
            found.append(f"it is for {then}, {but}")
        for rank, (planned, device) in enumerate(zip(self.devices, devices, strict=True)):
            if device is not None and (said := _other_device(planned, device)):
                found.append(f"worker {rank} {said}")
        if found:
            shown = "; ".join(found[:4]) + ("" if len(found) <= 4 else f"; and {len(found) - 4} more")
            raise PlanError(f"the plan is of something else: {shown}. Make one for this run with nugnn plan")

    def check_workers(self, workers: int) -> None:
        """Refuse another number of workers.

        Raises:
            PlanError: It is another one.
        """
        if workers != len(self.devices):
            raise PlanError(
                f"the plan is for {counted(len(self.devices), 'worker')}, and there are {workers}; give --workers "
                f"{len(self.devices)}"
            )


def _model_in_words(facts: Mapping[str, Plain]) -> str:
    """As far as it is known.

    >>> _model_in_words({"kind": "gcn", "hidden": 64, "parameters": 4810, "shapes": "0f"})
    'gcn with hidden 64 (4,810 parameters)'
    """
    name = next((str(facts[known]) for known in ("kind", "class", "model") if known in facts), "a model")
    hidden = f" with hidden {facts['hidden']}" if "hidden" in facts else ""
    count = facts.get("parameters")
    return f"{name}{hidden}" + (f" ({count:,} parameters)" if isinstance(count, int) else "")


def _differences(planned: DataFacts, given: DataFacts) -> list[str]:
    names = {"nodes": "nodes", "edges": "edges", "train": "training nodes", "samples": "samples"}
    names |= {"features": "features", "classes": "classes"}
    planned_name, given_name = planned.name, given.name
    if planned_name == given_name:
        planned_name, given_name = f"{given.name} as it was", f"{given.name} as it is"
    counts = [(what, getattr(planned, field), getattr(given, field)) for field, what in names.items()]
    other = [(what, then, now) for what, then, now in counts if then != now]
    found = []
    if other:
        had = ", ".join(f"{then:,} {what}" for what, then, _ in other)
        has = ", ".join(f"{now:,} {what}" for what, _, now in other)
        found.append(f"it is for {planned_name} ({had}), and this run has {given_name} ({has})")
    if planned.input_shape != given.input_shape:
        found.append(
            f"it is for samples of shape {_shape(planned.input_shape)}, and this run's have {_shape(given.input_shape)}"
        )
    if not found and None not in (planned.content, given.content) and planned.content != given.content:
        found.append(f"{given_name} has as many nodes and edges as {planned_name}, but not the same")
    return found


def _shape(shape: Sequence[int] | None) -> str:
    return "unknown" if shape is None else " x ".join(map(str, shape)) or "()"


def _other_device(planned: PlannedDevice, device: KnownDevice) -> str:
    """How ``device`` is another one; empty where it is not."""
    if planned.uuid is not None and device.uuid is not None:
        return "" if planned.uuid == device.uuid else f"has {device.uuid}, and was planned for {planned.uuid}"
    if (planned.kind, planned.name) != (device.kind, device.name):
        return f"has {device.name}, and was planned for {planned.name}"
    return ""


def read_plan(path: Path | str) -> Plan:
    """The plan in a file.

    Raises:
        PlanError: It cannot be read, is no JSON, is of another version, or has a field that is missing, unknown or out
            of range.
    """
    path = Path(path)
    content = b""
    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        return Plan.model_validate_json(content, strict=True)
    except OSError as error:
        problem = no_file(path) or f"cannot be read: {error.strerror}"
        raise PlanError(f"{path}: {problem}; make it with: nugnn plan --plan-out FILE") from error
    except ValidationError as error:
        if b"nugnn.cluster/" in content:
            raise PlanError(f"{path} is a cluster description: --cluster takes it") from None
        hint = "; make it with: nugnn plan --plan-out FILE"
        raise PlanError(f"{path}: {what_is_wrong(error, Plan, hint)}") from error
