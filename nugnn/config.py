"""The settings of a training run: one frozen value, checked when it is made, readable from and writable to YAML."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Self

import yaml

from nugnn._regular_file import no_file, shown
from nugnn.comm.halo_mode import HALO_MODES, HaloMode, why_not_with
from nugnn.comm.halo_target import HALO_TARGETS, HaloTarget, why_not_target
from nugnn.options import ConfigError, OptionSpec, check, closest, option, refusal
from nugnn.planning.limits import format_limits, parse_limits
from nugnn.sample_sets import names_samples
from nugnn.schedules import SCHEDULES, check_schedule

BUILT_IN_MODELS = ("gcn", "sage", "gat", "gatv2", "gin")
_ONLY_FOR = {"heads": ("gat", "gatv2"), "attention_dropout": ("gat", "gatv2"), "aggregator": ("sage", "gin")}
_AGGREGATORS = {"sage": ("mean", "gcn", "pool", "lstm"), "gin": ("sum", "mean", "max")}
_NO_SUMS = ("gat", "gatv2", "pool", "lstm", "max")
"""Models and aggregators that make something else of neighbours than a sum or mean of their rows."""
FREE_ON_RESUME = (
    *("epochs", "patience", "workers", "shares", "partitioner", "order", "timeout", "out", "predictions"),
    *(
        "tensorboard",
        "timeline",
        "resume",
        "checkpoint_every",
        "partition_cache",
        "dataset",
        "data_dir",
        "num_nodes",
        "recompute_inputs",
        "check_replicas",
        "grad_sync_hosts",
        "overlap",
        "cuda_graphs",
        "activations",
        "rebalance",
        "device",
        "limits",
        "cluster",
        "plan",
    ),
)
"""Options a resumed run may change. The graph itself is compared, not where it was found."""
SHARES_BY_DEVICE = ("auto", "flops", "bandwidth")
"""Words for shares that follow from what devices can do."""
_MODEL_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
_DEVICE = r"(cpu|cuda(:\d+)?|(GPU|MIG)-[0-9A-Za-z/-]+)"
_DEVICES = re.compile(rf"auto|{_DEVICE}(,{_DEVICE})*")
_RATE: dict[str, Any] = {"least": 0.0, "below": 1.0}


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
        for flag, value in (("--plan", self.plan), ("--cluster", self.cluster)):
            for other, given in (("--device", self.device != "auto"), ("--limits", self.limits is not None)):
                if value is not None and given:
                    raise ConfigError(f"{flag} {value} says the devices and their limits; leave {other} out")
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

    def _check_shares(self) -> None:
        object.__setattr__(self, "shares", _checked_shares(self.shares, self.workers))
        if self.plan is not None and self.shares != "even":
            raise ConfigError(f"--plan {self.plan} says the shares; leave --shares out")
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
        match = _MODEL_FILE.fullmatch(self.model)
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
            ConfigError: The file cannot be read, is not a mapping, has an unknown option or a wrong value.
        """
        values = read_settings(path)
        try:
            return cls(**values)
        except ConfigError as error:  # values that do not fit each other
            raise ConfigError(f"{path}: {error}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(Settings):
    """Everything ``nugnn train`` can be told, checked and normalised in ``__post_init__``.

    Numbers given as text (``lr: 5e-4`` is text to YAML) are converted; ``shares`` becomes ``"even"`` or a tuple of
    ``workers`` positive fractions that add up to 1, or stays ``"auto"``, ``"flops"`` or ``"bandwidth"``.

    Raises:
        ConfigError: A value is wrong, or its feature has not landed.

    >>> TrainConfig(dataset="digits", workers=2, shares="0.7,0.3").shares
    (0.7, 0.3)
    >>> TrainConfig(dataset="digits", dropout=1.5)
    Traceback (most recent call last):
    nugnn.options.ConfigError: --dropout 1.5 is not allowed; allowed: a number from 0 up to, but not including, 1
    """

    dataset: str | None = option(
        None, str,
        "Graph: a name such as cora or ogbn-products, or a path. Samples: digits-images, mnist, fashion-mnist, "
        "cifar10, imagefolder:PATH, text:PATH.tsv, csv:PATH.",
        optional=True,
    )  # fmt: skip
    data_dir: str | None = option(None, str, "Folder to look for data sets in.", optional=True)
    num_nodes: int | None = option(
        None,
        int,
        "Number of nodes, for a path to a list of edges whose ids are rows: 0 up to, but not including, N.",
        least=1,
        below=2**31,
        optional=True,
    )
    undirected: bool = option(False, bool, "Add the reverse of every edge that has none.")
    self_loops: str = option("add", str, "What to do with self-loops.", choices=("keep", "add", "remove"))
    feature_norm: str = option("none", str, "Scaling of the input features.", choices=("none", "row", "standard"))
    split: int = option(0, int, "Which of the data set's splits to use.", least=0)

    model: str = option("gcn", str, f"{', '.join(BUILT_IN_MODELS)}, or FILE.py:Class for your own.")
    layers: int = option(2, int, "Number of layers.", least=1)
    hidden: int = option(64, int, "Width of the hidden layers (of each head for gat, gatv2).", least=1)
    heads: int = option(8, int, "Attention heads of the hidden layers (gat, gatv2).", least=1)
    aggregator: str | None = option(
        None,
        str,
        "Aggregator: mean (usual), gcn, pool or lstm for sage; sum (usual), mean or max for gin.",
        choices=("mean", "gcn", "pool", "lstm", "sum", "max"),
        optional=True,
    )
    norm: str = option("none", str, "Normalisation after each hidden layer.", choices=("none", "layer", "batch"))
    residual: bool = option(False, bool, "Add a layer's input to its output.")
    activation: str = option(
        "relu", str, "Activation of the hidden layers.", choices=("relu", "elu", "leaky_relu", "gelu", "tanh")
    )
    dropout: float = option(0.5, float, "Dropout between layers.", **_RATE)
    input_dropout: float = option(0.0, float, "Dropout of the input features.", **_RATE)
    attention_dropout: float = option(0.0, float, "Dropout of attention weights (gat, gatv2).", **_RATE)

    lr: float = option(0.01, float, "Learning rate of Adam.", above=0.0)
    weight_decay: float = option(5e-4, float, "L2 penalty.", least=0.0)
    weight_decay_first_layer_only: bool = option(False, bool, "Apply the penalty to the first layer only.")
    schedule: str = option(
        "constant", str, "Learning rate over the epochs: constant, cosine to zero, or step.", choices=SCHEDULES
    )
    warmup_epochs: float = option(0.0, float, "Epochs in which the learning rate grows from near zero.", least=0.0)
    decay_epochs: int | None = option(
        None,
        int,
        "Of --schedule step: epochs after which the rate is a tenth (default: a third of all).",
        least=1,
        optional=True,
    )
    label_smoothing: float = option(0.0, float, "Part of a label that is spread over all classes.", **_RATE)
    epochs: int = option(200, int, "Number of epochs.", least=1)
    patience: int | None = option(
        None, int, "Stop after so many epochs without a better validation metric.", least=1, optional=True
    )
    evaluate_every: int = option(1, int, "Epochs between evaluations; the last is always evaluated.", least=1)
    inductive: bool = option(
        False, bool, "Train on the training nodes and the edges between them alone; evaluate on the whole graph."
    )
    seed: int = option(0, int, "Seed of weights and dropout.", least=0, below=2**63)

    workers: int = option(1, int, "Number of worker processes.", least=1)
    shares: str | tuple[float, ...] = option(
        "even",
        str,
        "Part of the graph each worker gets: even; fractions such as 0.6,0.3,0.1; auto: the slowest worker as fast as "
        "memories allow, by prediction; flops or bandwidth: by a single number from each device's specification.",
    )
    partitioner: str = option(
        "auto",
        str,
        "How the graph is split; auto: metis, but clusters for --shares auto of a large graph, which needs many cuts.",
        choices=("auto", "metis", "clusters", "kaminpar", "random"),
    )
    order: str = option(
        "auto",
        str,
        "Order of the nodes inside a part: for locality where that pays, or by id. Results are the same.",
        choices=("auto", "none"),
    )
    partition_cache: str | None = option(
        None, str, "Folder to keep partitions in and find them again, as nugnn partition makes it.", optional=True
    )
    device: str = option(
        "auto",
        str,
        "Where to compute: auto (GPUs where there is one for each worker), cpu, cuda, or cuda:0,cpu; GPUs "
        "by number or by uuid.",
    )
    limits: str | None = option(
        None,
        str,
        "What of its device each worker may use, with semicolons between workers: sms=32 (multiprocessors of a GPU), "
        "memory_fraction=0.5, threads=2, several with commas, or none.",
        optional=True,
    )
    cluster: str | None = option(
        None,
        str,
        "Description of the hardware, cluster.yaml: its devices of this host are used, within its limits.",
        optional=True,
    )
    precision: str = option(
        "fp32",
        str,
        "Number format of the arithmetic.",
        choices=("fp32", "tf32", "bf16", "fp16", "amp"),
        later=("int8", "fp8", "auto", "FILE"),
        later_what="precision by operator",
    )
    recompute_inputs: bool = option(
        False, bool, "Aggregate the input features anew in every epoch; what was aggregated once is kept otherwise."
    )
    overlap: str = option(
        "auto",
        str,
        "Sum over edges while halo rows travel: on, in backward alone, or off; auto: on where each worker has a GPU of "
        "its own, in backward alone where these read each other's memory.",
        choices=("auto", "on", "backward", "off"),
    )
    cuda_graphs: str = option(
        "auto",
        str,
        "Let a GPU repeat a recorded step, not told each operation; auto: of built-in networks, ResNets and VGGs on "
        "samples.",
        choices=("auto", "on", "off"),
    )
    activations: str = option(
        "keep",
        str,
        "What a step keeps for backward: keep all; recompute the insides of layers (less memory, a third to a half "
        "more time); offload to the host's memory and back (GPUs, as slow as their bus).",
        choices=("keep", "recompute", "offload"),
    )
    halo_wire: str = option(
        "fp32",
        str,
        "How halo rows and their gradients travel in training: fp32 (as they are, in the type of the arithmetic), in "
        "16 bits, or in 8, 4 or 2 with stochastic rounding; auto: by layer, direction and worker, within "
        "--halo-target; evaluation is exact.",
        choices=("fp32", "bf16", "fp16", "int8", "int4", "int2", "auto"),
    )
    halo_feedback: bool = option(
        False,
        bool,
        "Add what compressed halo rows have left out to the same rows in the next step (--halo-wire int8, int4, int2).",
    )
    halo_mode: str = option(
        "exact",
        str,
        "Which halo rows and gradients an epoch reads: exact, all of its own; approximate: stale, those of the epoch "
        "before, which travel meanwhile, or sampled:P, a random share P of its own; evaluation is exact.",
    )
    halo_target: str | None = option(
        None,
        str,
        "How long the halo exchanges of an epoch may take under --halo-wire auto: a share of the computation (default: "
        "10%), or seconds such as 0.05s.",
        optional=True,
    )
    rebalance: str = option(
        "auto",
        str,
        "Move nodes between workers in mid-run where these end an epoch at different times and it pays: auto, or off.",
        choices=("auto", "off"),
    )
    grad_sync: str = option(
        "fp32",
        str,
        "How gradients travel between workers; adaptive: bits by tensor; powersgd: matrices of rank 2; auto: what is "
        "fastest here of fp32, bf16, 8bit and 4bit.",
        choices=("fp32", "bf16", "fp16", *(f"{bits}bit" for bits in range(8, 0, -1)), "adaptive", "powersgd", "auto"),
    )
    grad_sync_hosts: str = option(
        "auto",
        str,
        "Sum compressed gradients inside each host first, where all hosts have as many workers (auto), or not (flat).",
        choices=("auto", "flat"),
    )
    check_replicas: int = option(
        100, int, "Optimizer steps between comparisons of all parameters over workers; 0: few.", least=0
    )

    out: str | None = option(
        None,
        str,
        "Folder for results (default: runs/DATASET-MODEL); earlier results in it are replaced.",
        optional=True,
    )
    predictions: bool = option(
        False,
        bool,
        "Write predictions.npy: the class of every node in input order (multi-label: a row of 0 and 1).",
    )
    timeout: float = option(300.0, float, "Seconds after which a silent peer counts as lost.", above=0.0)
    plan: str | None = option(None, str, "Plan of nugnn plan to run: its shares, devices and limits.", optional=True)
    resume: bool = option(
        False, bool, "Go on from the newest checkpoint in the folder for results; start anew if there is none."
    )
    checkpoint_every: int | None = option(
        None,
        int,
        "Epochs between checkpoints (default: one every five minutes); there is always one at the end.",
        least=1,
        optional=True,
    )
    tensorboard: bool = option(False, bool, "Write TensorBoard files to tensorboard/ in the folder of results.")
    timeline: bool = option(
        False, bool, "Write timeline.json, for Perfetto: when each worker computes, exchanges and waits in a step."
    )

    def __post_init__(self) -> None:
        self._check_each()
        if self.dataset is not None and names_samples(self.dataset):
            raise ConfigError(f"--dataset {self.dataset} names samples, and this needs a graph; samples are for train")
        if self.model not in BUILT_IN_MODELS and not _MODEL_FILE.fullmatch(self.model):
            raise ConfigError(refusal("--model", self.model, f"{', '.join(BUILT_IN_MODELS)} or FILE.py:Class"))
        self._check_device()
        self._check_limits()
        self._check_schedule()
        self._check_grad_sync()
        if self.activations == "offload" and set(self.device.split(",")) == {"cpu"}:
            allowed = "keep, recompute: with --device cpu everything is in the host's memory already"
            raise ConfigError(refusal("--activations", "offload", allowed))
        if self.halo_feedback and not self.halo_wire.startswith("int"):
            raise ConfigError(
                f"--halo-feedback has no effect on --halo-wire {self.halo_wire}, only on int8, int4, int2; leave it out"
            )
        self._check_halo_mode()
        for name, models in _ONLY_FOR.items():
            default = type(self).__dataclass_fields__[name].default
            if self.model in BUILT_IN_MODELS and self.model not in models and getattr(self, name) != default:
                raise ConfigError(
                    f"{flag_of(name)} {getattr(self, name)} has no effect on --model {self.model}, only on "
                    f"{', '.join(models)}; leave it out"
                )
        aggregators = _AGGREGATORS.get(self.model)
        if self.aggregator is not None and aggregators is not None and self.aggregator not in aggregators:
            raise ConfigError(refusal("--aggregator", self.aggregator, f"{', '.join(aggregators)} for {self.model}"))
        self._check_shares()
        if self.shares == "auto" and self.partitioner == "random":
            raise ConfigError(
                "--shares auto fits the cut to the devices, and --partitioner random makes none to fit; use auto, "
                "metis, clusters or kaminpar"
            )

    def _check_halo_mode(self) -> None:
        try:
            mode = HaloMode.parse(self.halo_mode)
        except ValueError:
            raise ConfigError(refusal("--halo-mode", self.halo_mode, HALO_MODES)) from None
        object.__setattr__(self, "halo_mode", str(mode))  # one spelling for each mode
        reason = why_not_with(mode, halo_feedback=self.halo_feedback, precision=self.precision)
        if reason is None and mode.kind == "sampled":
            chosen = {"--model": self.model, "--aggregator": self.aggregator}
            wrong = [f"{flag} {value}" for flag, value in chosen.items() if value in _NO_SUMS]
            if wrong:
                reason = (
                    f"sums and means over neighbours are right in the mean then, and {wrong[0]} makes something else "
                    "of them; use exact or stale"
                )
        if reason is not None:
            raise ConfigError(f"--halo-mode {mode}: {reason}")
        self._check_halo_target(mode)

    def _check_halo_target(self, mode: HaloMode) -> None:
        if self.halo_target is not None:
            try:
                target = HaloTarget.parse(self.halo_target)
            except ValueError:
                raise ConfigError(refusal("--halo-target", self.halo_target, HALO_TARGETS)) from None
            object.__setattr__(self, "halo_target", str(target))
        reason = why_not_target(self.halo_target, halo_wire=self.halo_wire, mode=mode)
        if reason is not None:
            flag, value = ("halo-wire", "auto") if self.halo_wire == "auto" else ("halo-target", self.halo_target)
            raise ConfigError(f"--{flag} {value}: {reason}")


def option_spec(entry: Field[Any]) -> OptionSpec:
    """The `OptionSpec` of a field of `TrainConfig`."""
    spec: OptionSpec = entry.metadata["option"]
    return spec


def option_default(entry: Field[Any]) -> Any:
    """The default of a field of `TrainConfig`."""
    assert entry.default is not MISSING, entry.name
    return entry.default


def flag_of(name: str) -> str:
    """Command-line spelling of an option: ``weight_decay`` -> ``--weight-decay``."""
    return "--" + name.replace("_", "-")


def read_settings(path: str | Path, dataset: str | None = None) -> dict[str, Any]:
    """The options a YAML file sets, names checked, values as written.

    Args:
        path: The file.
        dataset: The data set that is trained on, when it is not the one in the file.

    Raises:
        ConfigError: The file cannot be read, is not a mapping, or names an unknown option.
    """
    if (problem := no_file(Path(path))) is not None:
        raise ConfigError(f"{shown(Path(path))}: {problem}; --config takes a YAML file of options")
    try:
        text = Path(path).read_text(encoding="utf-8")
        loaded = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return _settings_from(loaded, str(path), dataset)


def recipe_names() -> list[str]:
    """Names that ``--recipe`` accepts."""
    entries = (resources.files("nugnn") / "recipes").iterdir()
    return sorted(entry.name.removesuffix(".yaml") for entry in entries if entry.name.endswith(".yaml"))


def read_recipe(name: str) -> dict[str, Any]:
    """The options a recipe sets.

    Raises:
        ConfigError: There is no such recipe.
    """
    known = recipe_names()
    if name not in known:
        raise ConfigError(f"--recipe {name} is not known{closest(name, known)}; known: {', '.join(known)}")
    text = (resources.files("nugnn") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    return _settings_from(yaml.safe_load(text), f"recipe {name}")


def _settings_from(loaded: Any, source: str, dataset: str | None = None) -> dict[str, Any]:
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{source}: expected lines of 'option: value', found {type(loaded).__name__}")
    specs = _known_options(dataset or loaded.get("dataset"))
    known = list(specs)
    settings: dict[str, Any] = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{source}: unknown option {key!r}{closest(name, known)}")
        if name in settings:
            raise ConfigError(f"{source}: option {name!r} is set twice")
        try:
            settings[name] = check(flag_of(name), value, specs[name])
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
    return settings


def _known_options(dataset: object) -> dict[str, OptionSpec]:
    """The options of both families; where they share a name, as the family of ``dataset`` has it."""
    from nugnn.sample_config import SampleConfig, config_kind  # which takes over options from here

    specs: dict[str, OptionSpec] = {}
    for kind in (TrainConfig, SampleConfig, config_kind(dataset)):
        specs |= {entry.name: option_spec(entry) for entry in fields(kind)}
    return specs


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
            f"--shares {shares}: {len(fractions)} shares for --workers {workers}; give one for each worker"
        )
    total = math.fsum(fractions)
    # Fractions written with two decimals are each off by at most 0.005: 0.33,0.33,0.33 is a fair way to write thirds.
    if abs(total - 1) > 0.005 * workers:
        raise ConfigError(f"--shares {shares}: they add up to {total:g}, not 1")
    exact = abs(total - 1) <= workers * 2**-52  # rounding of the sum alone: 0.7,0.2,0.1
    return tuple(fractions) if exact else tuple(part / total for part in fractions)
