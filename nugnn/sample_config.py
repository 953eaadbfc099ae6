"""The settings of a training run on samples; its options are written once, those of graphs are taken over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from nugnn.batch_split import USUAL_BATCH_SIZE, batch_sizes
from nugnn.config import TrainConfig
from nugnn.options import ConfigError, flag_of, option, option_default, option_spec, refusal
from nugnn.sample_sets import KNOWN, names_samples
from nugnn.schedules import usual_warmup
from nugnn.settings import FREE_ON_RESUME, SHARES_BY_DEVICE, Settings, model_refusal

BUILT_IN_NETWORKS = ("mlp", "cnn", "transformer")
TORCHVISION_MODELS = ("resnet18", "resnet50", "vgg16")
_ONLY_FOR = {
    "hidden": ("mlp", "cnn", "transformer"),
    "layers": ("mlp", "cnn", "transformer"),
    "heads": ("transformer",),
    "norm": ("mlp",),
    "dropout": ("mlp", "cnn", "transformer"),
}
_USUAL_RATE = {"cnn": 3e-3}
_FRACTION: dict[str, Any] = {"least": 0.0, "below": 1.0, "optional": True}


def _as_for_graphs(name: str, **changes: Any) -> Any:
    """The option of `TrainConfig`, with another ``default`` or other parts of its `OptionSpec`."""
    entry = TrainConfig.__dataclass_fields__[name]
    spec = option_spec(entry)
    default = changes.pop("default", option_default(entry))
    spec = replace(spec, **changes)
    return option(default, **{each.name: getattr(spec, each.name) for each in fields(spec)})


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig(Settings):
    """Everything ``nugnn train`` can be told when ``dataset`` names samples; as `TrainConfig` is for graphs.

    ``batch_size``, ``batch_split``, ``lr`` and ``warmup_epochs`` become the numbers they stand for.

    Raises:
        ConfigError: A value is wrong.

    >>> SampleConfig(dataset="mnist", workers=2, batch_split="18,6").batch_size
    24
    """

    dataset: str | None = _as_for_graphs("dataset")
    data_dir: str | None = _as_for_graphs("data_dir")
    val_fraction: float | None = option(
        None, float, "Part of the samples that val is drawn from, where it is not given (default: 0.1).", **_FRACTION
    )
    test_fraction: float | None = option(
        None, float, "Part of all samples drawn for test, where no parts are given (default: 0.2).", **_FRACTION
    )
    image_size: int | None = option(
        None, int, "Pixels of a side that images of imagefolder:PATH are scaled to.", least=1, optional=True
    )
    tokens: str | None = option(
        None,
        str,
        "Tokens of text:PATH: words, byte pairs, or auto: words unless many would be unknown (default: auto).",
        choices=("auto", "words", "pairs"),
        optional=True,
    )
    vocabulary_size: int | None = option(
        None,
        int,
        "Tokens that text:PATH learns, at most (default: 30000 words or 8000 pairs).",
        least=2,
        optional=True,
    )
    max_length: int | None = option(
        None, int, "Tokens of a text (default: of the longest, at most 128).", least=1, optional=True
    )

    model: str = option(
        "auto",
        str,
        f"{', '.join(BUILT_IN_NETWORKS)}; {', '.join(TORCHVISION_MODELS)} where torchvision is installed; "
        "FILE.py:Class; auto: cnn for images, transformer for text, mlp for tables.",
    )
    layers: int | None = option(None, int, "Number of layers (cnn: pairs of them). Default: 2.", least=1, optional=True)
    hidden: int | None = option(
        None,
        int,
        "Width of hidden layers or tokens (default 128); of cnn's first pair (32), doubled by each next one.",
        least=1,
        optional=True,
    )
    heads: int | None = option(None, int, "Attention heads of transformer. Default: 4.", least=1, optional=True)
    norm: str | None = option(
        None, str, "Normalisation after each hidden layer of mlp.", choices=("none", "batch"), optional=True
    )
    dropout: float | None = option(None, float, "Dropout. Default: mlp 0, cnn 0.25, transformer 0.1.", **_FRACTION)

    optimizer: str = option("adamw", str, "Optimizer.", choices=("adamw", "adam", "sgd"))
    momentum: float = option(0.9, float, "Momentum of sgd.", least=0.0, below=1.0)
    lr: float | None = _as_for_graphs(
        "lr", default=None, optional=True, help="Learning rate (default: 0.003 of cnn, 0.001 of others)."
    )
    weight_decay: float = _as_for_graphs("weight_decay", default=0.01)
    schedule: str = _as_for_graphs("schedule", default="cosine")
    warmup_epochs: float | None = _as_for_graphs(
        "warmup_epochs",
        default=None,
        optional=True,
        help="Epochs in which the learning rate grows from near zero (default of cosine: a tenth of all, one at most).",
    )
    decay_epochs: int | None = _as_for_graphs("decay_epochs")
    label_smoothing: float = _as_for_graphs("label_smoothing")
    batch_norm: str = option(
        "all",
        str,
        "Statistics of batch norm: over all workers, or local to each, approximate.",
        choices=("all", "local"),
    )
    shift: int = option(0, int, "Augmentation of images: moved by at most so many pixels.", least=0)
    flip: bool = option(False, bool, "Augmentation of images: mirrored half of the time.")
    clip_norm: float | None = option(None, float, "Largest norm of the gradient.", above=0.0, optional=True)
    batch_size: int | None = option(
        None, int, f"Samples of a batch, of all workers together (default: {USUAL_BATCH_SIZE}).", least=1, optional=True
    )
    batch_split: str | tuple[int, ...] = option(
        "auto",
        str,
        "How a batch is divided: auto (by --shares if given, else evenly), even, or samples of each worker as 18,6.",
    )
    micro_batches: int = option(1, int, "Parts of a batch that run one after the other, for less memory.", least=1)
    drop_last: bool = option(False, bool, "Leave out the last batch of an epoch when it is smaller.")
    data_workers: int = option(0, int, "Processes that read samples ahead, for each worker.", least=0)
    epochs: int = _as_for_graphs("epochs", default=20)
    patience: int | None = _as_for_graphs("patience")
    evaluate_every: int = _as_for_graphs("evaluate_every")
    seed: int = _as_for_graphs("seed", help="Seed of weights, order, dropout and of parts that are drawn.", below=2**31)

    workers: int = _as_for_graphs("workers")
    shares: str | tuple[float, ...] = _as_for_graphs("shares")
    device: str = _as_for_graphs("device")
    limits: str | None = _as_for_graphs("limits")
    cluster: str | None = _as_for_graphs("cluster")
    plan: str | None = _as_for_graphs("plan")
    precision: str = _as_for_graphs("precision")
    cuda_graphs: str = _as_for_graphs("cuda_graphs")
    grad_sync: str = _as_for_graphs("grad_sync")
    grad_sync_rank: int | None = _as_for_graphs("grad_sync_rank")
    grad_sync_feedback: str = _as_for_graphs("grad_sync_feedback")
    grad_sync_exact: str | None = _as_for_graphs("grad_sync_exact")
    grad_sync_hosts: str = _as_for_graphs("grad_sync_hosts")
    check_replicas: int = _as_for_graphs("check_replicas")
    out: str | None = _as_for_graphs("out")
    predictions: bool = _as_for_graphs("predictions")
    timeout: float = _as_for_graphs("timeout")
    resume: bool = _as_for_graphs("resume")
    checkpoint_every: int | None = _as_for_graphs("checkpoint_every")
    checkpoint_steps: int | None = option(
        None, int, "Optimizer steps between checkpoints, also in mid-epoch.", least=1, optional=True
    )
    tensorboard: bool = _as_for_graphs("tensorboard")
    timeline: bool = _as_for_graphs("timeline")

    def __post_init__(self) -> None:
        self._check_each()
        if self.dataset is not None and not names_samples(self.dataset):
            raise ConfigError(refusal("--dataset", self.dataset, ", ".join(KNOWN)))
        known_models = ("auto", *BUILT_IN_NETWORKS, *TORCHVISION_MODELS)
        if self.model not in known_models and self.model_file is None:
            raise ConfigError(model_refusal("--model", self.model, f"{', '.join(known_models)} or FILE.py:Class"))
        self._check_device()
        self._check_limits()
        if self.lr is None:
            object.__setattr__(self, "lr", _USUAL_RATE.get(self.network, 1e-3))
        if self.warmup_epochs is None:
            object.__setattr__(self, "warmup_epochs", usual_warmup(self.schedule, self.epochs))
        self._check_schedule()
        self._check_grad_sync()
        for name, models in _ONLY_FOR.items():
            if getattr(self, name) is not None and self.network not in models and self.model_file is None:
                raise ConfigError(
                    f"{flag_of(name)} {getattr(self, name)} has no effect on --model {self.network}, only on "
                    f"{', '.join(models)}; leave it out"
                )
        if self.optimizer != "sgd" and self.momentum != option_default(self.__dataclass_fields__["momentum"]):
            raise ConfigError(
                f"--momentum {self.momentum:g} has no effect on --optimizer {self.optimizer}; leave it out"
            )
        self._check_shares()
        self._check_split_is_said_once()
        try:
            sizes, _ = batch_sizes(self.batch_split, self.batch_size, self.workers, self.given_shares, USUAL_BATCH_SIZE)
        except ValueError as error:
            text = str(error)
            for name in ("batch_split", "batch_size"):
                text = text.replace(name, flag_of(name))
            raise ConfigError(text) from None
        object.__setattr__(self, "batch_size", sum(sizes))
        if self.batch_split not in ("auto", "even"):
            object.__setattr__(self, "batch_split", sizes)

    def _check_split_is_said_once(self) -> None:
        if self.plan is None and self.shares in SHARES_BY_DEVICE and self.batch_split != "auto":
            raise ConfigError(f"--shares {self.shares} says how batches are divided; leave --batch-split out")

    @property
    def network(self) -> str:
        """The model, with ``auto`` resolved."""
        if self.model != "auto" or self.dataset is None:
            return self.model
        kind = self.dataset.partition(":")[0].strip().lower()
        return {"text": "transformer", "csv": "mlp"}.get(kind, "cnn")

    @property
    def given_shares(self) -> tuple[float, ...] | None:
        """Part of each batch that each worker gets; None when nothing was said."""
        return self.shares if isinstance(self.shares, tuple) else None

    @property
    def fit_shares(self) -> tuple[float, ...] | str | None:
        """The same, or a word for shares that are planned."""
        return self.shares if self.shares in SHARES_BY_DEVICE else self.given_shares

    @property
    def out_dir(self) -> Path:
        """Folder for results."""
        if self.out is not None:
            return Path(self.out)
        model = self.model_file[1].lower() if self.model_file else self.network
        return Path("runs") / f"{Path((self.dataset or 'data').rpartition(':')[2]).stem}-{model}"

    @classmethod
    def free_on_resume(cls) -> frozenset[str]:
        """How a batch is divided is free; its size is compared by what it comes to."""
        return frozenset({*FREE_ON_RESUME, "batch_size", "batch_split", "data_workers", "checkpoint_steps"})


RunConfig = TrainConfig | SampleConfig


BY_COUNTS = "a-graph-by-its-counts"
"""Stands where a data set is named, for a graph that ``--graph-stats`` describes; never shown."""


def config_kind(dataset: object) -> type[TrainConfig] | type[SampleConfig]:
    """The settings that go with a data set."""
    return SampleConfig if isinstance(dataset, str) and names_samples(dataset) else TrainConfig


def refuse_others(kind: type[Settings], settings: Mapping[str, Any]) -> None:
    """Refuse options of the other family of data.

    Raises:
        ConfigError: There is one in ``settings``.
    """
    for name in sorted(settings.keys() - {entry.name for entry in fields(kind)}):  # type: ignore[arg-type]
        if settings.get("dataset") == BY_COUNTS:
            raise ConfigError(
                f"{flag_of(name)} belongs to samples, and --graph-stats gives the counts of a graph; leave it out, or "
                "name samples by --dataset in place of --graph-stats"
            )
        whose, here = ("graphs", "samples") if kind is SampleConfig else ("samples", "a graph")
        named = f"--dataset {settings['dataset']} names {here}" if settings.get("dataset") else "no --dataset is given"
        raise ConfigError(f"{flag_of(name)} belongs to {whose}, and {named}; leave it out")
