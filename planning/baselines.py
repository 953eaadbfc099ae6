"""Shares by one number of each device's specification: what a plan is held against."""

from __future__ import annotations

from collections.abc import Sequence

from nugnn.partition.balance import normalise_shares
from nugnn.planning.plan import BASELINES
from nugnn.planning.profiles import DeviceProfile, Format

_FORMAT_OF: dict[str, tuple[Format, ...]] = {
    "tf32": ("tf32", "fp32"),
    "bf16": ("bf16", "fp32"),
    "fp16": ("fp16", "fp32"),
    "amp": ("bf16", "fp16", "fp32"),
}
"""Of dense products under a ``--precision``, the first that a device has."""


def baseline_shares(name: str, profiles: Sequence[DeviceProfile], precision: str = "fp32") -> tuple[float, ...]:
    """One share for each device, summing to 1.

    Args:
        name: ``even``; ``flops``: by the rate of dense products; ``bandwidth``: by the rate of a copy.
        profiles: Of the devices.
        precision: As ``--precision``: of which products.

    Raises:
        ValueError: There is no baseline of that name.
    """
    if name not in BASELINES:
        raise ValueError(f"shares by {name!r} are not known; there are {', '.join(BASELINES)}")
    if name == "even":
        return (1 / len(profiles),) * len(profiles)
    if name == "bandwidth":
        return normalise_shares([profile.stream_bytes for profile in profiles])
    return normalise_shares([_products(profile, precision) for profile in profiles])


def _products(profile: DeviceProfile, precision: str) -> float:
    for form in _FORMAT_OF.get(precision, ("fp32",)):
        if form in profile.gemm_flops:
            return profile.gemm_flops[form]
    return max(profile.gemm_flops.values())
