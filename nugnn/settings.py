"""What the settings of all families of data have in common: checks, results' folder, and the way to YAML."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

import yaml

from nugnn._counted import counted
from nugnn._regular_file import no_file
from nugnn.options import ConfigError, check, flag_of, option_spec, refusal
from nugnn.planning.limits import format_limits, parse_limits
from nugnn.schedules import check_schedule

FREE_ON_RESUME = (
    "epochs", "patience", "workers", "shares", "partitioner", "order", "timeout", "out", "predictions", "tensorboard",
    "timeline", "resume", "checkpoint_every", "partition_cache", "dataset", "data_dir", "num_nodes", "recompute_inputs",
    "check_replicas", "grad_sync_hosts", "overlap", "cuda_graphs", "activations", "rebalance", "device", "limits",
    "cluster", "plan",
)  # fmt: skip
"""Options a resumed run may change. The graph itself is compared, not where it was found."""
SHARES_BY_DEVICE = ("auto", "flops", "bandwidth")
"""Words for shares that follow from what devices can do."""
MODEL_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
_DEVICE = r"(cpu|cuda(:\d+)?|(GPU|MIG)-[0-9A-Za-z/-]+)"
_DEVICES = re.compile(rf"auto|{_DEVICE}(,{_DEVICE})*")


class Settings:
    """What the settings of graphs (`TrainConfig`) and of samples (`nugnn.sample_config.SampleConfig`) have in common.

    Subclasses are frozen dataclasses whose fields are options.
    """

    __slots__ = ()

    dataset: str | None
    model: str
    device: str
    cuda_graphs: str
    grad_sync: str
    grad_sync_rank: int | None
    grad_sync_feedback: str
    grad_sync_exact: str | None
    grad_sync_hosts: str
    epochs: int
    schedule: str
    warmup_epochs: float | None
    decay_epochs: int | None
    workers: int
    limits: str | None
    shares: str | tuple[float, ...]
    plan: str | None
    cluster: str | None
    out: str | None

    def _check_each(self) -> None:
        """Each value for itself, and in the type of its option."""
        for entry in fields(self):  # type: ignore[arg-type]
            value = check(flag_of(entry.name), getattr(self, entry.name), option_spec(entry))
            object.__setattr__(self, entry.name, value)

    def _check_device(self) -> None:
        if not _DEVICES.fullmatch(self.device) or self.device.count(",") not in (0, self.workers - 1):
            allowed = "auto, cpu, cuda, a GPU's uuid, or one for each of --workers, such as cuda:0,cpu"
            raise ConfigError(refusal("--device", self.device, allowed))
        if self.cuda_graphs == "on" and "cpu" in self.device.split(","):
            raise ConfigError(
                f"--cuda-graphs on needs a GPU for each worker, and --device is {self.device}; leave it at auto or off"
            )

    def _check_limits(self) -> None:
        if self.limits is None:
            return
        try:
            limits = parse_limits(self.limits)
        except ValueError as error:
            raise ConfigError(f"--limits {shlex.quote(self.limits)}: {error}") from None
        if len(limits) != self.workers:
            raise ConfigError(
                f"--limits {self.limits}: {len(limits)} for --workers {self.workers}; give one for each, with "
                "semicolons between them, such as 'none;sms=32'"
            )
        devices = self.device.split(",")
        for worker, each in enumerate(limits):
            if each.sms is not None and devices[worker % len(devices)] == "cpu":
                raise ConfigError(
                    f"--limits {self.limits}: worker {worker} computes on the CPU, which has no multiprocessors; give "
                    "threads, or a GPU with --device"
                )
        object.__setattr__(self, "limits", format_limits(limits))  # one spelling of each

    def _check_schedule(self) -> None:
        try:
            check_schedule(self.schedule, self.epochs, self.warmup_epochs or 0.0, self.decay_epochs)
        except ValueError as error:
            text = str(error)
            for name in ("warmup_epochs", "decay_epochs"):
                text = text.replace(name, flag_of(name))
            raise ConfigError(text.replace("schedule step", "--schedule step")) from None

    def _check_grad_sync(self) -> None:
        if self.grad_sync_hosts != "auto" and self.grad_sync == "fp32":
            raise ConfigError(
                f"--grad-sync-hosts {self.grad_sync_hosts} has no effect on --grad-sync fp32, whose sums are the "
                "process group's own; leave it out"
            )
        rounds, feedback = "those that round", None if self.grad_sync_feedback == "auto" else self.grad_sync_feedback
        for flag, value, has_effect, others in (
            ("--grad-sync-rank", self.grad_sync_rank, self.grad_sync == "powersgd", "powersgd"),
            ("--grad-sync-exact", self.grad_sync_exact, self.grad_sync != "fp32", rounds),
            ("--grad-sync-feedback", feedback, self.grad_sync not in ("fp32", "auto"), rounds),
        ):
            if value is not None and not has_effect:
                raise ConfigError(
                    f"{flag} {value} has no effect on --grad-sync {self.grad_sync}, only on {others}; leave it out"
                )
        if self.grad_sync_exact is not None and not all(self._exact):
            raise ConfigError(refusal("--grad-sync-exact", self.grad_sync_exact, "names or patterns with commas"))

    @property
    def _exact(self) -> tuple[str, ...]:
        return () if self.grad_sync_exact is None else tuple(map(str.strip, self.grad_sync_exact.split(",")))

    @property
    def gradients(self) -> Any:
        """``grad_sync`` as `nugnn.fit.fit` takes it: a name, or settings where more was said."""
        feedback = {"auto": None, "on": True, "off": False}[self.grad_sync_feedback]
        given: dict[str, Any] = {"rank": self.grad_sync_rank, "error_feedback": feedback, "exact": self._exact or None}
        given = {name: value for name, value in given.items() if value is not None}
        if not given:
            return self.grad_sync
        from nugnn.comm.compression.settings import Compression  # which loads torch

        return Compression(wire=self.grad_sync, **given)

    def _check_shares(self) -> None:
        object.__setattr__(self, "shares", _checked_shares(self.shares, self.workers))
        if self.plan is not None and self.cluster is not None:
            raise ConfigError(f"--plan {self.plan} says the devices; leave --cluster out")

    @property
    def fractions(self) -> tuple[float, ...]:
        """Part of the graph of each worker, ``workers`` numbers that add up to 1.

        Raises:
            ConfigError: They are to be planned, which takes a model and devices.
        """
        if self.shares in SHARES_BY_DEVICE:
            raise ConfigError(
                f"--shares {self.shares} takes a model and devices to plan for: give them to nugnn train or nugnn "
                "plan, and even or fractions here"
            )
        return self.shares if isinstance(self.shares, tuple) else (1 / self.workers,) * self.workers

    @property
    def model_file(self) -> tuple[Path, str] | None:
        """``(file, class name)`` of a user's model; None for a built-in one."""
        match = MODEL_FILE.fullmatch(self.model)
        return (Path(match["file"]), match["name"]) if match else None

    @property
    def out_dir(self) -> Path:
        """Folder for results."""
        if self.out is not None:
            return Path(self.out)
        model = self.model_file[1].lower() if self.model_file else self.model
        return Path("runs") / f"{Path(self.dataset or 'data').stem}-{model}"

    def replaced(self, **changes: Any) -> Self:
        """A copy with ``changes``, checked again."""
        return replace(self, **changes)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """Plain types only; ``type(config)(**config.to_dict()) == config``."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def fixed_settings(self) -> dict[str, Any]:
        """The settings that a resumed run has to share with its checkpoint; a model file counts by its class."""
        values = {name: value for name, value in self.to_dict().items() if name not in self.free_on_resume()}
        return values | ({"model": self.model_file[1]} if self.model_file else {})

    def to_yaml(self) -> str:
        """Every setting, in declaration order; `from_file` reads it back to an equal value."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    @classmethod
    def free_on_resume(cls) -> frozenset[str]:
        """Options that a resumed run may change."""
        return frozenset(FREE_ON_RESUME)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a YAML file of option names and values.

        Raises:
            ConfigError: The file cannot be read, is not a mapping, has an unknown option or one of the other family,
                or a wrong value.
        """
        from nugnn.settings_file import read_as  # which knows all kinds of settings

        return read_as(cls, path)


def model_refusal(flag: str, model: str, allowed: str) -> str:
    """The sentence for a wrong model; where it is a Python file, the classes in it, for which the file is imported.

    Args:
        flag: Before the model; empty where it is an argument.
        model: As the user wrote it.
        allowed: What it may be.

    Raises:
        ValueError: It is a file that cannot be imported.
    """
    path = model.removesuffix(":")
    if not path.endswith(".py") or no_file(Path(path)) is not None:
        return refusal(flag, model, allowed).lstrip()
    from nugnn.models import said_of_file  # with torch, which a refusal alone may wait for

    return f"{flag} {said_of_file(path)}".lstrip()


def _checked_shares(shares: Any, workers: int) -> str | tuple[float, ...]:
    """A word, or one positive fraction for each worker, scaled to add up to 1."""
    if shares == "even" or shares in SHARES_BY_DEVICE:
        return str(shares)
    allowed = f"even, {', '.join(SHARES_BY_DEVICE)}, or {workers} positive fractions that add up to 1, such as 0.6,0.4"
    parts = shares.split(",") if isinstance(shares, str) else shares
    try:
        fractions = [float(part) for part in parts if not isinstance(part, bool)]
        if len(fractions) != len(parts) or not all(0 < part <= 1 for part in fractions):
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError(refusal("--shares", shares, allowed)) from None
    if len(fractions) != workers:
        raise ConfigError(
            f"--shares {shares}: {counted(len(fractions), 'share')} for --workers {workers}; give one for each worker"
        )
    total = math.fsum(fractions)
    # Fractions written with two decimals are each off by at most 0.005: 0.33,0.33,0.33 is a fair way to write thirds.
    if abs(total - 1) > 0.005 * workers:
        raise ConfigError(f"--shares {shares}: they add up to {total:g}, not 1")
    exact = abs(total - 1) <= workers * 2**-52  # rounding of the sum alone: 0.7,0.2,0.1
    return tuple(fractions) if exact else tuple(part / total for part in fractions)
