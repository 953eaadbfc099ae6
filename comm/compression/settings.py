"""What is asked of compressed gradient sums, checked."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from nugnn.comm.compression.wire import BUCKET, WIRES, Wire

ADAPTIVE, POWERSGD, AUTO = "adaptive", "powersgd", "auto"
LEAST_SIZE = 1024
RANK = 2
TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of parameters whose gradients may be compressed: no precision is lost before they are rounded."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How gradients travel.

    Args:
        wire: One of `nugnn.comm.compression.wire.WIRES`, or ``adaptive``: bits by tensor, chosen from time to time so
            that the squared error of all together is at most that of 4 bits for each; or ``powersgd``, see
            `nugnn.comm.compression.low_rank`; or ``auto``: what `nugnn.comm.compression.choice` finds the fastest, and
            nothing but ``exact`` beside it.
        bucket: Values that share their ends, or a quarter as many where levels then pay for the ends, see
            `nugnn.comm.compression.arrangement`.
        rounding: ``nearest``, or ``stochastic``: the mean of many roundings is the value, and none is fed back.
        error_feedback: Whether what rounding left out is added in the next step; with levels that are rounded to
            nearest when None. It takes a copy of the gradients, and a second one: on a GPU within a step, on a CPU
            from step to step.
        seed: Of stochastic rounding, and of the first products of ``powersgd``.
        least_size: Tensors of fewer values, and those of fewer than two axes (biases, norms), travel as float32.
        exact: Names of parameters, or patterns of `fnmatch` (``*`` for any text), whose gradients travel as float32; of
            those that have several names in a model any one, see `on`.
        rank: Of the products of ``powersgd``.

    Raises:
        TypeError: A value is of another type.
        ValueError: A value is not allowed, or has no effect.

    >>> print(Compression(wire="8bit", exact=["head.*"]))
    8bit(exact=('head.*',))
    """

    wire: str = "4bit"
    bucket: int = BUCKET
    rounding: str = "nearest"
    error_feedback: bool | None = None
    seed: int = 0
    least_size: int = LEAST_SIZE
    exact: Sequence[str] = ()
    rank: int = RANK

    def __post_init__(self) -> None:
        object.__setattr__(self, "exact", (self.exact,) if isinstance(self.exact, str) else tuple(self.exact))
        if self.wire not in (*wire_names(), AUTO):
            raise ValueError(
                f"gradients cannot travel as {self.wire!r}; choose one of {', '.join(wire_names())}, {AUTO}"
            )
        self._check_types()
        if self.wire == AUTO and (others := [name for name in self._changed() if name not in ("wire", "exact")]):
            raise ValueError(f"{others[0]} has no effect on auto, which chooses a way as it usually is; name the way")
        for name, least in (("bucket", 1), ("least_size", 0), ("rank", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, must be {least} or more")
        if self.rank != RANK and self.wire != POWERSGD:
            raise ValueError(f"rank {self.rank} has no effect on {self.wire}, only on powersgd; leave it out")
        if self.exact and self.wire == "fp32":
            raise ValueError(f"exact {', '.join(self.exact)} has no effect on fp32, as which all gradients travel then")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding {self.rounding!r} is not known; choose nearest or stochastic")
        if self.rounding == "stochastic" and not self.is_quantized:
            raise ValueError(f"rounding stochastic has no effect on {self.wire}, only on 8bit to 1bit and {ADAPTIVE}")
        if self.rounding == "stochastic" and self.error_feedback:
            raise ValueError("error_feedback would add what stochastic rounding evens out by itself; choose one")
        if self.bucket != BUCKET and not (self.is_quantized or self.wire == "fp16"):
            raise ValueError(f"bucket {self.bucket} has no effect on {self.wire}; leave it out")
        if self.seed and self.rounding != "stochastic" and self.wire != POWERSGD:
            raise ValueError(f"seed {self.seed} has no effect on rounding to nearest; leave it out")
        if self.error_feedback and self.wire == "fp32":
            raise ValueError("error_feedback has no effect on fp32, which leaves nothing out")

    def _check_types(self) -> None:
        if not all(isinstance(pattern, str) and pattern for pattern in self.exact):
            raise TypeError(f"exact is {self.exact!r}, must be names or patterns of parameters")
        for name in ("bucket", "seed", "least_size", "rank"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}, must be a whole number")
        if self.error_feedback not in (None, True, False):
            raise TypeError(f"error_feedback is {self.error_feedback!r}, must be True, False or None")

    def _changed(self) -> list[str]:
        """Names of what is not as usual."""
        return [entry.name for entry in fields(self) if getattr(self, entry.name) != entry.default]

    def __str__(self) -> str:
        """The wire, and what is not as usual: one text for each way, and another one for another."""
        others = [f"{name}={getattr(self, name)!r}" for name in self._changed() if name != "wire"]
        return self.wire + (f"({', '.join(others)})" if others else "")

    @property
    def is_quantized(self) -> bool:
        """Whether tensors travel as levels."""
        return self.wire not in ("fp32", "bf16", "fp16", POWERSGD, AUTO)

    @property
    def feeds_back(self) -> bool:
        """Whether what rounding left out is added in the next step."""
        if self.error_feedback is not None:
            return self.error_feedback
        return self.wire == POWERSGD or (self.is_quantized and self.rounding == "nearest")

    @property
    def first_wire(self) -> Wire:
        """Of tensors that are compressed, before anything was measured; ``powersgd`` has a way of its own."""
        return Wire({ADAPTIVE: "4bit", POWERSGD: "fp32"}.get(self.wire, self.wire), self.bucket)

    def takes(self, parameter: Tensor) -> bool:
        """Whether the gradient of ``parameter`` is compressed, rather than sent as float32; ``exact`` apart."""
        return self.wire != "fp32" and parameter.dim() > 1 and parameter.numel() >= max(self.least_size, 1)

    def is_exact(self, name: str) -> bool:
        """Whether ``exact`` has the parameter of this name."""
        return any(fnmatchcase(name, pattern) for pattern in self.exact)

    def on(self, model: nn.Module) -> Compression:
        """With the first name of each parameter that ``exact`` has by another one, as of weights that are tied.

        A pattern that has others' second names alone gives way to the first ones; settings for other models stay.

        >>> tied = nn.ModuleDict({"first": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
        >>> tied["head"].weight = tied["first"].weight
        >>> Compression(exact=["head.*"]).on(tied).exact, Compression(exact=["head.weight"]).on(tied).exact
        (('head.*', 'first.weight'), ('first.weight',))
        """
        first = {id(p): name for name, p in model.named_parameters()}
        second = {
            name: first[id(p)]
            for name, p in model.named_parameters(remove_duplicate=False)
            if name != first[id(p)] and self.is_exact(name) and not self.is_exact(first[id(p)])
        }
        if not second:
            return self
        kept = [
            pattern
            for pattern in self.exact
            if any(fnmatchcase(name, pattern) for name in first.values())
            or not any(fnmatchcase(name, pattern) for name in second)
        ]
        return replace(self, exact=(*kept, *dict.fromkeys(second.values())))

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse what ``exact`` has and no parameter does.

        Args:
            names: Of all parameters whose gradients travel.

        Raises:
            ValueError: A pattern matches nothing; says which names are near.
        """
        known = list(names)
        for pattern in self.exact:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise ValueError(f"exact {pattern} matches no parameter whose gradients travel{_near(pattern, known)}")


def check_types(named: Mapping[str, Tensor]) -> None:
    """Refuse parameters of other types than `TYPES`.

    Raises:
        ValueError: One is neither float32 nor of 16 bits.
    """
    for name, parameter in named.items():
        if parameter.dtype not in TYPES:
            raise ValueError(
                f"{name} is {parameter.dtype}, and compressed gradients are summed in float32; leave compression out"
            )


def _near(pattern: str, known: Sequence[str]) -> str:
    """Names like a pattern that matches none; a few of all where there is none like it."""
    plain = pattern.strip("*?.")
    near = difflib.get_close_matches(plain, known, n=3, cutoff=0.5)
    near = near or [name for name in known if plain and plain.lower() in name.lower()][:3]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; there are {', '.join(known[:5])}{', ...' if len(known) > 5 else ''}" if known else ""


def wire_names() -> tuple[str, ...]:
    """All that ``wire`` may be but ``auto``."""
    return (*WIRES, ADAPTIVE, POWERSGD)
