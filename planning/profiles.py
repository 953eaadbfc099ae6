"""What a device, a link and a machine can do: the JSON that ``nugnn profile`` writes and that predictions read.

Rates are separate because devices differ in each by another factor: between two cards products of matrices can be seven
times as fast and sums over neighbours three times. A profile is either measured or made of a data sheet
(:mod:`nugnn.planning.datasheet`); both have the same fields, so that whoever predicts need not know which it is.
Files come from other people's machines: they are checked when they are read, and unknown fields are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nugnn.planning.validation import read_json

SCHEMA: Literal["nugnn.machine/1"] = "nugnn.machine/1"

DeviceKind = Literal["cuda", "cpu"]
"""How torch reaches a device."""
Format = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"]
"""Of numbers in a dense product; sums are in float32 or wider (int32 for int8)."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]


class ProfileError(ValueError):
    """A file is no profile: says which field of which file is wrong."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class DeviceProfile(_Record):
    """What a device can do, limits included under which it was measured.

    Args:
        name: Of the product, such as ``NVIDIA H200``.
        kind: How torch reaches it.
        source: Where the rates come from.
        uuid: Who it is, wherever it is plugged in; None on paper and for a CPU.
        memory_bytes: For tensors; of a CPU the machine's.
        cache_bytes: The last cache that all its cores share.
        gemm_flops: Operations a second of large dense products, a multiplication and an addition being two, by format.
            What the device cannot do is left out.
        stream_bytes: Bytes a second, read and written, of a copy too large for any cache.
        gather_bytes: Bytes of source rows a second that a sum over neighbours takes in where rows come from memory.
        cached_gather_bytes: The same where all rows lie in the cache.
        pack_bytes: Bytes a second, read and written, of picking rows by number into a buffer, as a halo exchange does.
        launch_seconds: The host's time for one more operator.
        multiprocessors: Of a GPU, those in use; cores of a CPU, threads in use.
        spread: Of measured rates, by field and format (``gemm_flops.bf16``): (80th - 20th percentile) / median.
        note: What speaks against its rates: that others used it when they were measured. None for nothing.
    """

    name: str
    kind: DeviceKind
    source: Literal["measured", "sheet"]
    uuid: str | None = None
    memory_bytes: Count
    cache_bytes: Count
    gemm_flops: dict[Format, Positive] = Field(min_length=1)
    stream_bytes: Positive
    gather_bytes: Positive
    cached_gather_bytes: Positive
    pack_bytes: Positive
    launch_seconds: Seconds
    multiprocessors: Count
    spread: dict[str, Seconds] = {}
    note: str | None = None


class LinkProfile(_Record):
    """How bytes get from one end to the other.

    Args:
        between: ``devices`` of one host, a device and its ``host``'s memory, or ``hosts``.
        ends: Names or uuids of both; empty for every pair of this kind.
        via: ``nccl``, ``gloo``, ``copy`` (host and device), or ``sheet``.
        bytes_per_second: One way, while the other way is as busy.
        latency_seconds: Of an exchange without bytes.
        sum_bytes_per_second: That each rank passes on in the ring in which gloo adds up, all of these ends taking part;
            None where that was not measured.
        sum_latency_seconds: Of a message of that ring; likewise.
        few_seconds: Of a sum of few values, which ranks send each other directly (`nugnn.comm.direct_sums`); None where
            they do not, or it was not measured.
        sum_core_seconds_per_byte: That gloo's threads take from a rank's cores for each byte that it passes on in that
            ring; None where it was not measured.
        burst_seconds: What a link that has rested for so long saves of an exchange: it lets some bytes pass at once,
            as the token bucket of a limited link does. None where none was seen.
    """

    between: Literal["devices", "host", "hosts"]
    ends: tuple[()] | tuple[str, str] = ()
    via: Literal["nccl", "gloo", "copy", "sheet"]
    bytes_per_second: Positive
    latency_seconds: Seconds
    sum_bytes_per_second: Positive | None = None
    sum_latency_seconds: Seconds | None = None
    few_seconds: Seconds | None = None
    sum_core_seconds_per_byte: Seconds | None = None
    burst_seconds: Seconds | None = None

    @model_validator(mode="after")
    def _sums_are_whole(self) -> Self:
        if (self.sum_bytes_per_second is None) is not (self.sum_latency_seconds is None):
            raise ValueError("sum_bytes_per_second and sum_latency_seconds are known together or not at all")
        for name in ("few_seconds", "sum_core_seconds_per_byte"):
            if getattr(self, name) is not None and self.sum_latency_seconds is None:
                raise ValueError(f"{name} is known with sum_latency_seconds alone")
        return self


class MachineProfile(_Record):
    """A host: its devices, the links between them, and with what they were measured.

    Args:
        schema_name: What kind of file this is; ``schema`` in JSON.
        devices: GPUs in the order of their uuids, then the CPU.
        links: Between them.
        versions: ``torch``, ``cuda``, ``driver``, ``triton``, ``nugnn``, as far as there are such.
        made: ISO 8601 date and time, UTC; None on paper.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_name: Literal["nugnn.machine/1"] = Field(SCHEMA, alias="schema")
    devices: tuple[DeviceProfile, ...] = Field(min_length=1)
    links: tuple[LinkProfile, ...] = ()
    versions: dict[str, str] = {}
    made: str | None = None

    def to_json(self) -> str:
        """Indented, in the order of the fields, with a newline at its end."""
        return self.model_dump_json(indent=2, by_alias=True) + "\n"


def read_profile(path: Path | str) -> MachineProfile:
    """The profile in a file.

    Raises:
        ProfileError: It cannot be read, is no JSON, is of another version, or has a field that is missing, unknown or
            out of range.
    """
    return read_json(path, MachineProfile, ProfileError, "; make it with: nugnn profile --out FILE")
