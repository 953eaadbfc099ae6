"""Laws of sums beside the exchange on the code of a GPU, run by `test_overlap_triton.py` in Triton's interpreter.

Ranks are threads here, and a launch is one rank's at a time: the interpreter replaces Triton's functions meanwhile.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / folder) for folder in ("benchmarks", "tests/support")]

from live_bytes import gpu_path_on_cpu  # noqa: E402
from triton_laws import run_laws  # noqa: E402

from exactness import NUM_CLASSES, NUM_FEATURES, Run, largest_difference, make_graph, make_parts, run_steps  # noqa: E402
from nugnn import seam  # noqa: E402
from nugnn.comm import overlap  # noqa: E402
from nugnn.comm.groups import Ranks  # noqa: E402
from nugnn.comm.local_ranks import run_local_ranks  # noqa: E402
from nugnn.kernels import products, row_schedule  # noqa: E402
from nugnn.models import GNN  # noqa: E402

FLOAT64_BOUND = 1e-10  # see test_exactness.py


@contextmanager
def the_path_of_a_gpu() -> Iterator[None]:
    """Launches one after the other, and rows of more than 8 edges in pieces."""
    from triton.runtime import interpreter

    lock, before, launch = threading.RLock(), row_schedule._sizes, interpreter.GridExecutor.__call__
    with gpu_path_on_cpu():

        def launched(self: Any, *args: Any, **kwargs: Any) -> None:
            with lock:
                launch(self, *args, **kwargs)

        interpreter.GridExecutor.__call__ = launched
        row_schedule._sizes = lambda indptr: (8, 32)
        try:
            yield
        finally:
            row_schedule._sizes = before


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-5)


def make_model(name: str) -> nn.Module:
    """Layers of equal widths, which SAGE multiplies first, and a last one whose two products are one; odd widths."""
    torch.manual_seed(0)
    return GNN(name, NUM_FEATURES, NUM_CLASSES, layers=3, hidden=11, dropout=0.4, aggregator=_AGGREGATORS.get(name))


_AGGREGATORS = {"sage": "mean"}


def train(
    name: str,
    how: str,
    overlap: str,
    precision: str = "fp32",
    dtype: torch.dtype = torch.float32,
    num_steps: int = 2,
    **more: Any,
) -> list[Run]:
    data, model = make_graph(dtype=dtype), make_model(name).to(dtype)
    parts = make_parts(data, 2, how)
    options: dict[str, Any] = {"overlap": overlap, "precision": precision, "recompute_inputs": True, **more}
    with the_path_of_a_gpu():
        return run_local_ranks(2, lambda ranks: run_steps(ranks, data, parts, model, adam, num_steps, **options))


def equal(one: Run, other: Run) -> bool:
    pairs = [(one.gradients, other.gradients), (one.parameters, other.parameters)]
    same = all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)
    return same and one.losses == other.losses and torch.equal(one.logits, other.logits)


@contextmanager
def noted_calls() -> Iterator[dict[str, list[str]]]:
    """What each thread calls, in order."""
    order: dict[str, list[str]] = {}

    def note(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            part = {None: "", True: " to halo", False: " to inner"}[kwargs.get("of_rest")]
            order.setdefault(threading.current_thread().name, []).append(what + part)
            return function(*args, **kwargs)

        return noted

    watched = {
        (products, "_product"): "product", (overlap, "begin_fetch"): "fetch", (overlap, "sum_of_both"): "sum",
        (overlap, "begin_return"): "return", (overlap, "sum_to_sources"): "back", (overlap, "add_returned_"): "add",
    }  # fmt: skip
    before = {place: getattr(*place) for place in watched}
    for (module, name), what in watched.items():
        setattr(module, name, note(what, before[module, name]))
    try:
        yield order
    finally:
        for place, value in before.items():
            setattr(*place, value)


def check_sage_sends_first_and_changes_no_bit() -> None:
    with noted_calls() as order:
        mine = train("sage", "unequal", "backward", "bf16", num_steps=1)
    first, last = ["fetch", "sum", "product"], ["product", "fetch", "sum"]
    middle = ["product", "fetch", "product", "sum"]
    back = ["back to halo", "return", "back to inner", "add"]
    for calls in order.values():
        assert calls[:18] == [*first, *middle, *last, *back, *back], calls
    assert all(map(equal, train("sage", "unequal", "off", "bf16", num_steps=1), mine))


def check_other_layers_and_steps_keep_their_bits() -> None:
    for name, how, precision in (("sage", "no_train", "fp32"), ("gcn", "unequal", "bf16"), ("gin", "random", "fp32")):
        plain, mine = (train(name, how, overlap, precision) for overlap in ("off", "backward"))
        assert all(map(equal, plain, mine)), name


def check_approximate_rows_are_the_same_whenever_they_leave() -> None:
    """Rows that a fused layer sends early have the name, so the rounding and the past, of the sum that reads them."""
    stale = {"halo_wire": "int2", "halo_mode": "stale"}
    for how in ({"halo_wire": "int2"}, {"halo_wire": "int2", "halo_feedback": True}, stale):
        plain, mine = (train("sage", "unequal", overlap, "bf16", **how) for overlap in ("off", "backward"))
        assert all(map(equal, plain, mine))
        assert not equal(train("sage", "unequal", "off", "bf16")[0], plain[0])


def check_parts_are_one_device() -> None:
    """Where all rows of a sum begin early, some of them, or none."""
    for name, overlap_, num_early in (
        ("sage", "backward", 0),
        ("sage", "on", None),
        ("sage", "on", 7),
        ("gcn", "on", 7),
    ):
        data = make_graph()
        alone = run_steps(Ranks(), data, make_parts(data, 1, "random"), make_model(name).double(), adam, num_steps=2)
        with mock.patch.object(overlap, "rows_begun_early", return_value=num_early) if num_early else nullcontext():
            runs = train(name, "unequal", overlap_, dtype=torch.float64)
        for run in runs:
            worst, where = largest_difference(alone, run)
            assert worst <= FLOAT64_BOUND, (name, overlap_, num_early, where)


if __name__ == "__main__":
    seam.install()
    run_laws(globals())
