"""Which tensors with a row for each node are alive when a training epoch holds most: the GPU's code, without a GPU.

    TRITON_INTERPRET=1 python benchmarks/live_bytes.py --models sage gcn gat           # the peak, tensor by tensor
    TRITON_INTERPRET=1 python benchmarks/live_bytes.py --models sage --timeline        # every allocation

The epochs of `gpu_epoch.py` (same widths, dropout, loss over all nodes) run on a few nodes through the kernels and the
layers of the GPU, in Triton's interpreter. Storages are seen when they are made, by torch's dispatch mode, and when
they die, by a weak reference. They are counted in **blocks**: one block is ``(N, 256)`` bfloat16, 1.17 GiB at the full
size of the benchmark. The number of nodes is a prime above all widths, so what has rows of nodes is told by its size;
weights and the structure do not count. Times mean nothing here, and where torch adds two gradients in place, here it
makes a third, because a dispatch mode is on.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK_BYTES = 2 * 256
"""Of one row of a block."""
NUM_NODES = 271
"""A prime above every width but that of attention's four heads of 64, with which it has no factor in common."""
NUM_ARCS = 1_200
_HERE = Path(__file__).resolve()
_ROOT = _HERE.parents[1]
_PASSED_THROUGH = {_HERE, *(_ROOT / "kernels" / name for name in ("interceptor.py", "operator_call.py", "backward.py"))}


@dataclass(frozen=True)
class Held:
    """A storage.

    Args:
        number: In the order of making.
        maker: The innermost line of the project that made it.
        what: The operator of torch that made it.
        shape: Of the first tensor on it.
        dtype: Likewise.
        blocks: Its size.
    """

    number: int
    maker: str
    what: str
    shape: tuple[int, ...]
    dtype: str
    blocks: float

    def __str__(self) -> str:
        return f"{self.blocks:6.3f}  {self.dtype:9}{tuple(self.shape)!s:18} {self.maker}  ({self.what})"


class LiveBytes(TorchDispatchMode):
    """While open, follows every storage that has ``num_rows`` rows.

    Args:
        num_rows: N.
        on_change: Called with the blocks alive, a sign and the storage that came or went.
    """

    def __init__(self, num_rows: int, on_change: Callable[[float, str, Held], None] | None = None) -> None:
        super().__init__()
        self._num_rows, self._on_change = num_rows, on_change
        self._numbers = itertools.count()
        self.held: dict[int, Held] = {}
        self.peak: list[Held] = []
        """What was alive when most was."""

    @staticmethod
    def blocks(held: Any) -> float:
        return sum(each.blocks for each in held)

    def forget_peak(self) -> None:
        """The next peak is that from now on."""
        self.peak = list(self.held.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.layout is torch.strided:
                self._see(x, str(func).removeprefix("aten."))
        return out

    def _see(self, x: Tensor, what: str) -> None:
        storage = x.untyped_storage()
        count = storage.nbytes() // x.element_size()
        if hasattr(storage, "_live_bytes_number") or count == 0 or count % self._num_rows:
            return
        number = next(self._numbers)
        storage._live_bytes_number = number  # type: ignore[attr-defined]
        blocks = storage.nbytes() / self._num_rows / BLOCK_BYTES
        held = Held(number, _maker(), what, tuple(x.shape), str(x.dtype).removeprefix("torch."), blocks)
        self.held[number] = held
        weakref.finalize(storage, self._dies, number)
        if self.blocks(self.held.values()) >= self.blocks(self.peak):
            self.peak = list(self.held.values())
        if self._on_change is not None:
            self._on_change(self.blocks(self.held.values()), "+", held)

    def _dies(self, number: int) -> None:
        held = self.held.pop(number)
        if self._on_change is not None:
            self._on_change(self.blocks(self.held.values()), "-", held)


def _maker() -> str:
    """The innermost line of the project that is not on every call's way."""
    for frame, line in traceback.walk_stack(None):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT) and path not in _PASSED_THROUGH and ".venv" not in path.parts:
            return f"{path.relative_to(_ROOT)}:{line} {frame.f_code.co_name}"
    return "elsewhere"


@contextmanager
def gpu_path_on_cpu() -> Iterator[None]:
    """While open, tensors on the CPU take the layers and kernels that are for a GPU; Triton has to be interpreted.

    Raises:
        RuntimeError: ``TRITON_INTERPRET=1`` was not set when Triton was imported.
    """
    import triton
    from triton.runtime import interpreter

    if not triton.knobs.runtime.interpret:
        raise RuntimeError("the GPU's kernels need TRITON_INTERPRET=1 to run on a CPU")
    from nugnn import loss, recognition
    from nugnn.comm import halo_exchange
    from nugnn.kernels import add_rows, attention, cross_entropy, epilogue, sddmm, spmm, take_rows

    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        """Scalars are arrays of one element, which NumPy 2.4 no longer takes for the bounds of a loop."""
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    plain_launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        """An interpreted launch leaves reference cycles behind that hold its arguments."""
        plain_launch(self, *args, **kwargs)
        gc.collect()

    always = {
        (epilogue, "runs_in_triton"): lambda x: True,
        (cross_entropy, "runs_in_triton"): lambda x: True,
        (loss, "runs_in_triton"): lambda x: True,
        (spmm, "runs_in_triton"): lambda x: True,
        (add_rows, "runs_in_triton"): lambda x: True,
        (take_rows, "runs_in_triton"): lambda x: True,
        (halo_exchange, "PADDED_DEVICES"): {"cpu"},
        (sddmm, "_on_gpu"): lambda given: True,
        (attention, "_fused"): lambda x: True,
        (recognition, "FUSED_DEVICES"): {"cpu"},
        (interpreter, "_patch_lang_tensor"): patched,
        (interpreter.GridExecutor, "__call__"): launched,
    }
    before = {(module, name): getattr(module, name) for module, name in always}
    for (module, name), value in always.items():
        setattr(module, name, value)
    gc.freeze()  # so that a collection has little to look at
    try:
        yield
    finally:
        gc.unfreeze()
        for (module, name), value in before.items():
            setattr(module, name, value)


def measure(model: str, precision: str, on_change: Callable[[float, str, Held], None] | None = None) -> dict[str, Any]:
    """Peaks of the first and of the second epoch, and what stays between epochs."""
    import gpu_epoch

    case = gpu_epoch.Case("products-like", NUM_NODES, NUM_ARCS, 0, torch.device("cpu"))
    state = gpu_epoch.first_weights(model, case, seed=0)
    peaks: list[list[Held]] = []
    with gpu_path_on_cpu(), LiveBytes(NUM_NODES) as live:
        run = gpu_epoch.ours(model, case, precision, 0.5, None, state, order="none")
        case.release()
        for number in range(2):
            live._on_change = on_change if number == 1 else None
            live.forget_peak()
            run.step()
            peaks.append(live.peak)
        live._on_change = None
        kept = list(live.held.values())
    return {"model": model, "precision": precision, "first": peaks[0], "peak": peaks[-1], "kept": kept}


def main(given: list[str] | None = None) -> None:
    """Print what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["sage", "gcn", "gat"], default=["sage", "gcn", "gat"])
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"], default="bf16")
    parser.add_argument("--timeline", action="store_true", help="every storage that comes and goes in the second epoch")
    parser.add_argument("--json", action="store_true", help="one line for each model, nothing else")
    arguments = parser.parse_args(given)

    def show(blocks: float, sign: str, held: Held) -> None:
        print(f"{blocks:7.3f} {sign} {held}")

    for model in arguments.models:
        found = measure(model, arguments.precision, show if arguments.timeline else None)
        if arguments.json:
            print(json.dumps({k: [asdict(x) for x in v] if isinstance(v, list) else v for k, v in found.items()}))
            continue
        first, peak, kept = (LiveBytes.blocks(found[key]) for key in ("first", "peak", "kept"))
        print(f"{model} {arguments.precision}: peak {peak:.3f} blocks (first epoch {first:.3f}), of it kept {kept:.3f}")
        constant = {held.number for held in found["kept"]}
        for held in found["peak"]:
            print(f"  {'kept' if held.number in constant else '    '} {held}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
