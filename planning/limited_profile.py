"""What a device does under limits, or shared by several workers: its profile, each rate scaled by its own law.

A part of a GPU's multiprocessors takes more of the memory's bandwidth than of the arithmetic. How much was measured on
H200s with 16, 32 and 64 of 132: products and copies, medians of cards (``benchmarks/rows/unequal``). Sums over
neighbours were measured with 32 alone, once, 2.7 times as slow: about a quarter of the way from products to copies,
where they are taken to lie throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nugnn._counted import counted
from nugnn.planning import derates
from nugnn.planning.apportioned import apportioned
from nugnn.planning.limits import DeviceLimits, check_threads
from nugnn.planning.profiles import DeviceProfile

_PART = (0.0, 16 / 132, 32 / 132, 64 / 132, 1.0)
_PRODUCTS = (0.0, 0.155, 0.306, 0.596, 1.0)
_COPIES = (0.0, 0.292, 0.542, 0.854, 1.0)
_WAY_OF_SUMS = 0.27


def limited(profile: DeviceProfile, limits: DeviceLimits) -> DeviceProfile:
    """The profile of a device of which a worker may use only a part.

    Args:
        profile: Of the whole device.
        limits: What may be used.

    Raises:
        ValueError: A limit is of the other kind of device, or is more than there is.
    """
    if limits.is_none:
        return profile
    cores = profile.multiprocessors
    if limits.sms is not None:
        if profile.kind != "cuda":
            raise ValueError(f"sms is {limits.sms}, and {profile.name} is a CPU; limit its threads")
        if limits.sms > cores:
            raise ValueError(f"sms is {limits.sms}, and {profile.name} has {counted(cores, 'multiprocessor')}")
        profile = _fewer_multiprocessors(profile, limits.sms)
    if limits.threads is not None and profile.kind == "cpu":  # a GPU's worker computes hardly anything on the host
        check_threads(limits.threads, cores, profile.name)
        profile = _fewer_threads(profile, limits.threads)
    if limits.memory_fraction is not None:
        memory = max(1, round(profile.memory_bytes * limits.memory_fraction))
        profile = profile.model_copy(update={"memory_bytes": memory})
    return profile


def shared(
    profile: DeviceProfile, limits: Sequence[DeviceLimits], threads: Sequence[int] | None = None
) -> tuple[DeviceProfile, ...]:
    """What each of several workers has of one device that all of them use at the same time.

    Workers on a CPU that are not limited divide the threads that are left evenly, the first ones with one more where
    there is a rest, and all together have the bandwidth of the threads in use. Workers that share a GPU have it in
    turns. Memory that no limit gives away is divided evenly.

    Args:
        profile: Of the whole device.
        limits: Of each worker.
        threads: That each worker on a CPU has, where that is known.

    Raises:
        ValueError: As `limited`; or the limits together are more than there is.
    """
    if len(limits) == 1:
        only = limits[0]
        if profile.kind == "cpu" and threads is not None and threads[0] < profile.multiprocessors:
            only = replace(only, threads=threads[0])
        return (limited(profile, only),)
    memory = _memory_of_each(profile, limits)
    if profile.kind == "cuda":
        each = [limited(profile, DeviceLimits(sms=limit.sms)) for limit in limits]
        return tuple(_part(one, 1 / len(limits), size) for one, size in zip(each, memory, strict=True))
    threads = _threads_of_each(profile, limits) if threads is None else threads
    used = _fewer_threads(profile, min(sum(threads), profile.multiprocessors))
    return tuple(
        _part(used, count / sum(threads), size).model_copy(update={"multiprocessors": count})
        for count, size in zip(threads, memory, strict=True)
    )


def _part(profile: DeviceProfile, share: float, memory: int) -> DeviceProfile:
    """All rates times ``share``."""
    rates = ("stream_bytes", "gather_bytes", "cached_gather_bytes", "pack_bytes")
    changed: dict[str, object] = {name: getattr(profile, name) * share for name in rates}
    changed["gemm_flops"] = {form: rate * share for form, rate in profile.gemm_flops.items()}
    return profile.model_copy(update={**changed, "memory_bytes": memory})


def _fewer_multiprocessors(profile: DeviceProfile, count: int) -> DeviceProfile:
    part = count / profile.multiprocessors
    products, copies = (float(np.interp(part, _PART, each)) for each in (_PRODUCTS, _COPIES))
    rate = {"products": products, "copies": copies, "sums": products + _WAY_OF_SUMS * (copies - products)}
    return profile.model_copy(
        update={
            "gemm_flops": {form: flops * rate["products"] for form, flops in profile.gemm_flops.items()},
            "gather_bytes": profile.gather_bytes * rate["sums"],
            "cached_gather_bytes": profile.cached_gather_bytes
            * part,  # the multiprocessors' own loads are what limits it
            "stream_bytes": profile.stream_bytes * rate["copies"],
            "pack_bytes": profile.pack_bytes * rate["copies"],
            "multiprocessors": count,
        }
    )


def _fewer_threads(profile: DeviceProfile, count: int) -> DeviceProfile:
    """Arithmetic and caches in proportion; memory as long as the threads in use can fill its channels."""
    part = count / profile.multiprocessors
    fills = min(1.0, max(part, count * derates.CPU_CORE_BYTES / profile.stream_bytes))
    return profile.model_copy(
        update={
            "gemm_flops": {form: flops * part for form, flops in profile.gemm_flops.items()},
            "cached_gather_bytes": profile.cached_gather_bytes * part,
            "gather_bytes": profile.gather_bytes * part,  # a sum waits for its loads, thread by thread
            "stream_bytes": profile.stream_bytes * fills,
            "pack_bytes": profile.pack_bytes * fills,
            "multiprocessors": count,
        }
    )


def _threads_of_each(profile: DeviceProfile, limits: Sequence[DeviceLimits]) -> list[int]:
    """As the launcher gives them: those that are asked for, and what is left divided among the others."""
    asked = [limit.threads for limit in limits]
    others = sum(count is None for count in asked)
    left = profile.multiprocessors - sum(count for count in asked if count is not None)
    if left < others:
        return [max(1, profile.multiprocessors // len(limits)) if count is None else count for count in asked]
    usual = iter(apportioned(left, [1] * others) if others else ())
    return [next(usual) if count is None else count for count in asked]


def _memory_of_each(profile: DeviceProfile, limits: Sequence[DeviceLimits]) -> list[int]:
    asked = [limit.memory_fraction for limit in limits]
    given = sum(fraction for fraction in asked if fraction is not None)
    if given > 1 + 1e-9:
        raise ValueError(f"memory_fraction of workers on one {profile.name} adds up to {given:g}, more than all of it")
    free = [number for number, fraction in enumerate(asked) if fraction is None]
    rest = (1 - given) / len(free) if free else 0.0
    if free and rest <= 0:
        raise ValueError(f"memory_fraction of workers on one {profile.name} leaves nothing for worker {free[0]} there")
    return [max(1, int(profile.memory_bytes * (rest if fraction is None else fraction))) for fraction in asked]
