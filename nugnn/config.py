"""The settings of a training run on a graph: one frozen value, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nugnn.comm.halo_mode import HALO_MODES, HaloMode, why_not_with
from nugnn.comm.halo_target import HALO_TARGETS, HaloTarget, why_not_target
from nugnn.options import ConfigError, flag_of, option, refusal
from nugnn.sample_sets import names_samples
from nugnn.schedules import SCHEDULES
from nugnn.settings import MODEL_FILE, Settings, model_refusal

BUILT_IN_MODELS = ("gcn", "sage", "gat", "gatv2", "gin")
MODEL_OPTIONS = (
    *("layers", "hidden", "heads", "aggregator", "norm", "residual", "activation"),
    *("dropout", "input_dropout", "attention_dropout"),
)
"""Settings that a model is made with: a class of the user's own gets those that it names."""
_ONLY_FOR = {"heads": ("gat", "gatv2"), "attention_dropout": ("gat", "gatv2"), "aggregator": ("sage", "gin")}
_AGGREGATORS = {"sage": ("mean", "gcn", "pool", "lstm"), "gin": ("sum", "mean", "max")}
_NO_SUMS = ("gat", "gatv2", "pool", "lstm", "max")
"""Models and aggregators that make something else of neighbours than a sum or mean of their rows."""
_RATE: dict[str, Any] = {"least": 0.0, "below": 1.0}


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

    workers: int = option(
        1, int, "Number of worker processes; with --cluster its devices on this host, unless given.", least=1
    )
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
        "its own.",
        choices=("auto", "on", "backward", "off"),
    )
    cuda_graphs: str = option(
        "auto",
        str,
        "Let a GPU repeat a recorded step, not told each operation; auto: of built-in models, ResNets and VGGs, but "
        "where halo rows travel.",
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
    grad_sync_rank: int | None = option(
        None, int, "Rank of the matrices of --grad-sync powersgd (default: 2).", least=1, optional=True
    )
    grad_sync_feedback: str = option(
        "auto",
        str,
        "Add what rounding left out of gradients in the next step: on, off, or auto: not with 16 bits, with fewer.",
        choices=("auto", "on", "off"),
    )
    grad_sync_exact: str | None = option(
        None,
        str,
        "Parameters whose gradients travel as float32 beside others: names or patterns, such as 'head.*,*.norm.*'.",
        optional=True,
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
        if self.model not in BUILT_IN_MODELS and not MODEL_FILE.fullmatch(self.model):
            raise ConfigError(model_refusal("--model", self.model, f"{', '.join(BUILT_IN_MODELS)} or FILE.py:Class"))
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
