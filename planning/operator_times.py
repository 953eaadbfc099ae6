"""Seconds of one operator of a trace on a device: the seam to any table or formula, and one from rates alone.

`ProfileTimes` needs nothing but a `DeviceProfile`, so it also speaks for hardware that nobody here has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nugnn.planning.after_rest import AfterRest
from nugnn.planning.operator_costs import bytes_of, flops_of, item_bytes, number, storage_bytes, tensor_bytes
from nugnn.planning.profiles import DeviceProfile, Format
from nugnn.planning.trace_records import OperatorRecord, Storage, TensorRecord

_FORMAT_OF: dict[str, Format] = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "int8": "int8",
    "uint8": "int8",
}
_INSTEAD: dict[Format, tuple[Format, ...]] = {
    "fp64": ("fp32",),
    "fp32": ("fp64",),
    "tf32": ("fp32", "fp64"),
    "bf16": ("fp32", "fp64"),
    "fp16": ("fp32", "fp64"),
    "fp8": ("bf16", "fp16", "fp32", "fp64"),
    "int8": ("fp16", "bf16", "fp32", "fp64"),
}
"""Formats in whose time a product is counted where the device lacks its own, the first that is there."""
_FP64_OVER_FP32 = 2.0
"""Of a product in fp64 on a device of which only fp32 is known: what vector units of CPUs have."""


class OperatorTimes(Protocol):
    """How long one device is busy with each operator.

    Attributes:
        launch_seconds: The host's time to put one more operator into a GPU's queue, with the views that stand between
            two; 0 for a CPU, where it is a part of `seconds`.
        captured_launch_seconds: The same in steps that run as CUDA graphs, for the graph and for each operator that
            follows; None where no such step was measured.
        multiprocessors: Of a GPU; threads in use of a CPU.
        after_rest: What steps take longer after a rest; None where it is not known, and of a GPU.
    """

    launch_seconds: float
    captured_launch_seconds: float | None
    after_rest: AfterRest | None
    multiprocessors: int

    def seconds(self, record: OperatorRecord, storages: Sequence[Storage]) -> float:
        """Seconds that the device is busy with ``record``.

        Args:
            record: Its dimensions are numbers. One of kind ``metadata`` takes none. Of an ``exchange`` the device's own
                part counts alone: picking and adding rows, casts, coding; not the wire, and not waiting.
            storages: Of its trace, at the same sizes.
        """
        ...


def host_seconds_of_launch(times: OperatorTimes, *, is_captured: bool) -> float:
    """Of one launch, in steps that run as CUDA graphs or not."""
    captured = times.captured_launch_seconds if is_captured else None
    return times.launch_seconds if captured is None else captured


class ProfileTimes:
    """Times from a device's rates: what an operator computes and moves, each at the rate of its kind.

    A product takes the longer one of its operations and its bytes. Rows that are gathered come from the cache as far as
    it holds their source, and from memory otherwise; everything else is a pass over memory. On a CPU each operator
    takes ``launch_seconds`` besides.

    Args:
        profile: Measured, or made of a data sheet.
        tf32: Whether products of float32 are rounded to TF32, as under ``precision tf32``.

    Attributes:
        launch_seconds: See `OperatorTimes`.
        captured_launch_seconds: Likewise; not known from rates.
        multiprocessors: Likewise.
        fallbacks: Formats that the device lacks and that were asked for, with what was counted in their place.
    """

    def __init__(self, profile: DeviceProfile, *, tf32: bool = False) -> None:
        self.profile, self._tf32 = profile, tf32
        is_gpu = profile.kind == "cuda"
        self.launch_seconds = profile.launch_seconds if is_gpu else 0.0
        self.captured_launch_seconds: float | None = None
        self.after_rest: AfterRest | None = None
        self.multiprocessors = profile.multiprocessors
        self._each_operator = 0.0 if is_gpu else profile.launch_seconds
        self.fallbacks: dict[Format, str] = {}

    def seconds(self, record: OperatorRecord, storages: Sequence[Storage]) -> float:
        """See `OperatorTimes`."""
        if record.kind == "metadata":
            return 0.0
        return self._each_operator + self._busy(record, storages)

    def _busy(self, record: OperatorRecord, storages: Sequence[Storage]) -> float:
        profile = self.profile
        match record.kind:
            case "spmm" | "sddmm":
                return self._on_graph(record, storages)
            case "attention" if "edges" in record.sizes:
                return self._on_graph(record, storages)
            case "product" | "attention":
                operations = flops_of(record) / self._flops_rate(record.inputs[0].dtype)
                return max(operations, bytes_of(record, storages) / profile.stream_bytes)
            case "sparse_product":
                return self._on_stored(record, storages)
            case "rows":
                return bytes_of(record, storages) / profile.pack_bytes
            case "exchange":
                return self._own_part(record)
            case _:
                return bytes_of(record, storages) / profile.stream_bytes

    def _flops_rate(self, dtype: str) -> float:
        rates = self.profile.gemm_flops
        wanted = _FORMAT_OF.get(dtype, "fp32")
        if wanted == "fp32" and self._tf32:
            wanted = "tf32"
        if wanted in rates:
            return rates[wanted]
        narrower = next(iter(rates))  # where no other format is known
        instead = next((other for other in _INSTEAD[wanted] if other in rates), narrower)
        slower = _FP64_OVER_FP32 if wanted == "fp64" else 1.0
        why = f"{self.profile.name} has no rate of products in {wanted}: counted as {instead}"
        self.fallbacks[wanted] = why + (f", {slower:g} times as long" if slower != 1 else "")
        return rates[instead] / slower

    def _on_graph(self, record: OperatorRecord, storages: Sequence[Storage]) -> float:
        """Rows gathered once an edge; what else is read and written is one pass."""
        edges = number(record.sizes["edges"])
        gathered, source = 0.0, 0.0
        for x in _gathered(record):
            row = tensor_bytes(x) / max(number(x.shape[0]), 1)
            gathered += edges * row
            source += tensor_bytes(x) if x.storage < 0 else min(tensor_bytes(x), storage_bytes(storages[x.storage]))
        streamed = max(bytes_of(record, storages) - gathered, 0)
        operations = flops_of(record) / self._vector_rate()
        return max(gathered * self._per_gathered_byte(source) + streamed / self.profile.stream_bytes, operations)

    def _on_stored(self, record: OperatorRecord, storages: Sequence[Storage]) -> float:
        """A row of the dense factor gathered for each stored value: of the weight, in backward of the gradient."""
        sizes = {key: number(dim) for key, dim in record.sizes.items()}
        row = sizes["width"] * item_bytes(record.outputs[0].dtype)
        is_backward = record.attrs.get("direction") == "backward"
        gathered, source = sizes["stored"] * row, row * sizes["rows" if is_backward else "columns"]
        streamed = max(bytes_of(record, storages) - gathered, 0)
        operations = flops_of(record) / self._vector_rate()
        return max(gathered * self._per_gathered_byte(source) + streamed / self.profile.stream_bytes, operations)

    def _per_gathered_byte(self, source: float) -> float:
        """Seconds; from the cache as far as it holds the ``source``'s bytes."""
        profile = self.profile
        from_cache = min(1.0, profile.cache_bytes / source) if source else 1.0
        return from_cache / profile.cached_gather_bytes + (1 - from_cache) / profile.gather_bytes

    def _vector_rate(self) -> float:
        """Operations a second outside of matrix units."""
        rates = self.profile.gemm_flops
        return rates.get("fp32") or rates.get("fp64") or max(rates.values())

    def _own_part(self, record: OperatorRecord) -> float:
        """Of halo rows: those sent are picked or copied, those that come home are added, the device's own are copied.

        A sum over ranks has none: what adds is a part of the link's time.
        """
        if record.attrs.get("what") != "halo":
            return 0.0
        sizes = {key: number(dim) for key, dim in record.sizes.items()}
        dense = item_bytes(record.inputs[0].dtype) * sizes["width"]
        fetches = is_fetch(record)
        inner = number((record.inputs if fetches else record.outputs)[0].shape[0])
        # read and written: rows picked; or read twice and written once: rows added
        moved = 2 * sizes["sent"] * dense if fetches else 3 * sizes["received"] * dense
        seconds = moved / self.profile.pack_bytes + 2 * inner * dense / self.profile.stream_bytes
        if sizes["row_bytes"] < dense:  # coded before, decoded behind
            seconds += (sizes["sent"] + sizes["received"]) * (dense + sizes["row_bytes"]) / self.profile.stream_bytes
        return seconds


def is_fetch(record: OperatorRecord) -> bool:
    """Whether a halo exchange brings rows of others here, rather than shares of their gradients home."""
    direction = record.attrs.get("direction")
    return direction == "fetch" or (direction == "backward" and record.op.startswith("_AddHome"))


def _gathered(record: OperatorRecord) -> list[TensorRecord]:
    """Inputs of which an operator on a graph takes in a row for each edge, in the order of the edges' sources."""
    edges = record.sizes["edges"]
    nodes = [x for x in record.inputs if len(x.shape) > 1 and x.shape[0] != edges and "int" not in x.dtype]
    if record.kind == "spmm":
        return [] if record.attrs.get("op") == "copy_rhs" else nodes[:1]
    if record.kind == "attention":
        return nodes[-1:]
    targets = [record.attrs.get(side) for side in ("lhs_target", "rhs_target")]
    if None not in targets and len(record.inputs) == len(targets):
        return [x for x, target in zip(record.inputs, targets, strict=True) if target == "u"]
    return nodes
