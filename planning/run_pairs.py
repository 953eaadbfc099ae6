"""A planned run's predicted and measured seconds, and the kind of prediction that they belong to; as checked JSON."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from nugnn._counted import counted
from nugnn.planning.calibration import StandsOn
from nugnn.planning.plan import Plan, PlannedDevice
from nugnn.planning.profiles import Count
from nugnn.planning.timed_operators import Quantity
from nugnn.planning.trace_records import Strict
from nugnn.planning.validation import read_json

SCHEMA: Literal["nugnn.run_pair/1"] = "nugnn.run_pair/1"
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e9
"""Of an epoch; what is beyond is no measurement, and its ratios might be no numbers."""
_Epoch = Annotated[float, Field(ge=LEAST_SECONDS, le=MOST_SECONDS, allow_inf_nan=False)]
_Key = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


class PairError(ValueError):
    """A file is no pair of predicted and measured seconds."""


class PredictionKind(Strict):
    """Predictions that may be held against each other.

    Args:
        family: Of the data.
        precision: As ``--precision``.
        stands_on: See `nugnn.planning.calibration.StandsOn`.
        rates: Digest of the rates that it stands on; None for operators.
        devices: Of each host: who they are (uuid of a GPU; name of a CPU), how much of them there is, and their limits.
        versions: Of nugnn and torch, and of the code that predicts.
    """

    family: Literal["graph", "samples"]
    precision: str
    stands_on: StandsOn
    rates: str | None
    devices: tuple[tuple[str, ...], ...]
    versions: dict[str, str]

    @property
    def key(self) -> str:
        return _digest(self.model_dump())

    def is_but_for_versions(self, other: PredictionKind) -> bool:
        """Whether nothing but versions may differ."""
        return self == other.model_copy(update={"versions": self.versions})


class RankPair(Strict):
    """Seconds of an epoch on one rank.

    Args:
        device: As in `PredictionKind.devices`.
        predicted_compute_seconds, measured_compute_seconds: At operators.
        predicted_exchange_seconds, measured_exchange_seconds: Standing still for rows, sums and slower devices.
    """

    device: str
    predicted_compute_seconds: Quantity
    measured_compute_seconds: Quantity
    predicted_exchange_seconds: Quantity
    measured_exchange_seconds: Quantity


class RunPair(Strict):
    """A run that was predicted and measured.

    Args:
        schema_name: What kind of file this is; ``schema`` in JSON.
        kind: Of the prediction.
        subject: Key of model, data and settings.
        name: Of these, for people.
        predicted_seconds: Of an epoch, without any factor.
        measured_seconds: Of an epoch of the slowest rank, in the median, without evaluation.
        epochs: That were trained.
        ranks: In their order.
        made: ISO 8601 date and time, UTC.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=())

    schema_name: Literal["nugnn.run_pair/1"] = Field(SCHEMA, alias="schema")
    kind: PredictionKind
    subject: _Key
    name: str
    predicted_seconds: _Epoch
    measured_seconds: _Epoch
    epochs: Count
    ranks: tuple[RankPair, ...] = Field(min_length=1)
    made: str

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds."""
        return self.measured_seconds / self.predicted_seconds

    def to_json(self) -> str:
        """Indented, with a newline at its end."""
        return self.model_dump_json(indent=1, by_alias=True) + "\n"


def kind_of(plan: Plan) -> PredictionKind | None:
    """The kind of a plan's prediction; None where the plan does not say what it stands on."""
    if plan.stands_on is None:
        return None
    hosts: dict[str, list[str]] = {}
    for device in plan.devices:
        hosts.setdefault(device.host, []).append(device_text(device))
    return PredictionKind(
        family=plan.family,
        precision=str(plan.settings.get("precision", "")),
        stands_on=plan.stands_on,
        rates=plan.rates,
        devices=tuple(sorted(tuple(sorted(each)) for each in hosts.values())),
        versions=plan.versions,
    )


def subject_of(plan: Plan) -> str:
    """Key of what a plan is for: model, data and settings, whatever its devices and shares."""
    return _digest([plan.data.model_dump(exclude={"name"}), plan.model, plan.settings])


def device_text(device: PlannedDevice) -> str:
    """Who a device is, and how much of it is used: a part of keys of files, so that no word of it may change."""
    what = "threads" if device.kind == "cpu" else "multiprocessors"
    limits = "" if device.limits.is_none else f", {device.limits}"
    return f"{device.uuid or device.name}, {device.multiprocessors} {what}{limits}"


def devices_in_words(hosts: Sequence[Sequence[str]]) -> str:
    """For people, `device_text` of each host's devices: what is there several times is counted.

    >>> devices_in_words([["a CPU, 1 threads", "a CPU, 1 threads"], ["a GPU, 132 multiprocessors"]])
    '2 x a CPU, 1 thread; and a GPU, 132 multiprocessors'
    >>> devices_in_words([["a CPU, 1 threads", "b, 2 threads"]] * 2)
    '2 hosts with a CPU, 1 thread and b, 2 threads each'
    """
    alike = Counter(
        " and ".join(_times(count, _device_in_words(text)) for text, count in Counter(host).items()) for host in hosts
    )
    return "; and ".join(
        f"{counted(count, 'host')} with {host} each" if count > 1 else host for host, count in alike.items()
    )


def _times(count: int, what: str) -> str:
    return f"{count} x {what}" if count > 1 else what


def _device_in_words(text: str) -> str:
    return re.sub(r", 1 (thread|multiprocessor)s\b", r", 1 \1", text)


def read_pair(path: Path | str) -> RunPair:
    """The pair in a file.

    Raises:
        PairError: It cannot be read, is no JSON, is of another version, or has a field that is missing, unknown or out
            of range.
    """
    return read_json(path, RunPair, PairError)


def _digest(of: Any) -> str:
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]
