"""Streams that reach only some of a GPU's multiprocessors: CUDA's green contexts, asked of the driver itself.

Whatever is put into such a stream stays within them, from whichever thread, so that backward passes (a thread of
autograd's), recorded steps and Triton's launches are limited as well. Making a green context the current one of a
thread, as ``torch.cuda.GreenContext.set_context`` does, would reach that thread alone; and newer versions of that class
need a package of their own.

A context is never destroyed: its streams may be in use until the process ends, which frees it.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_MULTIPROCESSORS = 1
"""CU_DEV_RESOURCE_TYPE_SM, of a resource."""
_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING, the one kind of stream that a green context has."""
_WITH_DEFAULT_STREAM = 1
"""CU_GREEN_CTX_DEFAULT_STREAM, which the driver demands."""


class _Resource(ctypes.Structure):
    """``CUdevResource_v1`` of cuda.h: 144 bytes, the number of multiprocessors at 96."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 92),
        ("multiprocessors", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 44),
    )


def limit_multiprocessors(device: torch.device, count: int) -> int:
    """Make a stream with ``count`` of the GPU's multiprocessors the current one of this thread.

    To be called before anything is computed on the GPU. Streams made by `new_stream` from then on have the same limit;
    NCCL's own do not.

    Args:
        device: A GPU.
        count: From 1 to all it has.

    Returns:
        How many the stream has: the driver rounds up to what it can set apart (8 on compute capability 9 and up).

    Raises:
        ValueError: The GPU has fewer, or the driver or the GPU cannot do it.
    """
    properties = torch.cuda.get_device_properties(device)
    total = properties.multi_processor_count
    if not 1 <= count <= total:
        raise ValueError(f"{count} multiprocessors of {properties.name}, which has {total}; give 1 to {total}")
    if count == total:
        return total
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)  # the primary context, of which the other one is a part, has to be there
    context = _new_context(device, count)
    stream = _stream_in(context, device)
    granted, found = _count_of(context), _context_of(stream)
    if found is None or _count_of(found) != granted or not count <= granted < total:
        raise ValueError(
            f"the driver gave {granted} of {total} multiprocessors where {count} were asked for, or no stream with "
            "them; the GPU cannot be limited in this way"
        )
    torch.cuda.set_stream(stream)
    return granted


def usable_multiprocessors(device: torch.device) -> int:
    """Multiprocessors that work in the current stream of this thread reaches; all of the GPU's without a limit."""
    context = _context_of(torch.cuda.current_stream(device))
    return torch.cuda.get_device_properties(device).multi_processor_count if context is None else _count_of(context)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A further stream that reaches as many multiprocessors as the current one of this thread."""
    context = _context_of(torch.cuda.current_stream(device))
    return torch.cuda.Stream(device) if context is None else _stream_in(ctypes.c_void_p(context), device)


def _new_context(device: torch.device, count: int) -> ctypes.c_void_p:
    number, whole, part = ctypes.c_int(), _Resource(), _Resource()
    _call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(torch.cuda.current_device()))
    _call("cuDeviceGetDevResource", number, ctypes.byref(whole), ctypes.c_int(_MULTIPROCESSORS))
    groups = ctypes.c_uint(1)
    _call(
        "cuDevSmResourceSplitByCount",
        *(ctypes.byref(part), ctypes.byref(groups), ctypes.byref(whole), None),
        *(ctypes.c_uint(0), ctypes.c_uint(count)),
    )
    if groups.value != 1:
        raise ValueError(f"{device} has no group of {count} multiprocessors that can be set apart; give fewer")
    description, context = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuDevResourceGenerateDesc", ctypes.byref(description), ctypes.byref(part), ctypes.c_uint(1))
    _call("cuGreenCtxCreate", ctypes.byref(context), description, number, ctypes.c_uint(_WITH_DEFAULT_STREAM))
    return context


def _stream_in(context: ctypes.c_void_p, device: torch.device) -> torch.cuda.Stream:
    handle = ctypes.c_void_p()
    _call("cuGreenCtxStreamCreate", ctypes.byref(handle), context, ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(0))
    assert handle.value is not None
    return torch.cuda.ExternalStream(handle.value, device=device)


def _context_of(stream: torch.cuda.Stream) -> int | None:
    """The green context of a stream; None where it has none."""
    if stream.cuda_stream == 0 or _library() is None or not hasattr(_library(), "cuStreamGetGreenCtx"):
        return None
    context = ctypes.c_void_p()
    _call("cuStreamGetGreenCtx", ctypes.c_void_p(stream.cuda_stream), ctypes.byref(context))
    return context.value


def _count_of(context: ctypes.c_void_p | int) -> int:
    resource = _Resource()
    handle = context if isinstance(context, ctypes.c_void_p) else ctypes.c_void_p(context)
    _call("cuGreenCtxGetDevResource", handle, ctypes.byref(resource), ctypes.c_int(_MULTIPROCESSORS))
    return int(resource.multiprocessors)


@functools.cache
def _library() -> Any:
    """The driver; None where there is none, or another maker's."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _call(name: str, *arguments: Any) -> None:
    """A function of the driver.

    Raises:
        ValueError: There is no driver or no such function, or it fails.
    """
    function = getattr(_library(), name, None)
    if function is None:
        raise ValueError(
            "multiprocessors cannot be limited here: it takes CUDA's green contexts, which NVIDIA's drivers have from "
            "550 (CUDA 12.4) on, on Linux; leave sms out"
        )
    code = function(*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        known = _library().cuGetErrorName(ctypes.c_int(code), ctypes.byref(text)) == 0 and text.value is not None
        what = text.value.decode() if known and text.value else f"error {code}"
        raise ValueError(f"multiprocessors cannot be limited: the driver's {name} says {what}; leave sms out")
