"""An error in the user's own code: whose it is, and the user's lines of its traceback."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from nugnn.error_place import place_of_error
from nugnn.worker_process import classify

_MOST_LINES = 8
_PLUMBING = ("nugnn.kernels.interceptor", "nugnn.kernels.operator_call", "nugnn.kernels.operator", "nugnn.user_code")
"""Frames of ours that stand between a model and torch: an error that comes through them is not theirs."""
_STANDARD = sysconfig.get_paths()["stdlib"]


class UserCodeError(ValueError):
    """The user's data set, model or function failed; the text says which, why, and in which of its lines."""


@contextmanager
def whose(what: str, where: str = "") -> Iterator[None]:
    """Errors that come out of the user's code inside become `UserCodeError`; those of nuGNN's own stay as they are.

    So do lack of memory, a full disk and a lost peer, which are nobody's code.

    Args:
        what: Whose code runs, such as ``the model``.
        where: On what, such as ``sample 17``.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserCodeError) or not is_of_users_code(error):
            raise
        raise UserCodeError(described(error, what, where)) from error


def is_of_users_code(error: Exception) -> bool:
    """Whether ``error`` came from code that runs inside `whose` and is not nuGNN's."""
    if classify(error) in ("memory", "disk", "peer"):
        return False
    inner = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if _module(frame) not in _PLUMBING]
    last = _module(inner[-1]) if inner else ""
    return last == "nugnn.networks" or not last.startswith("nugnn.") or last == __name__


def described(error: Exception, what: str, where: str) -> str:
    """``the model failed on ...: KeyError: 'x'``, then lines of the traceback that are neither torch's nor nuGNN's."""
    found = traceback.StackSummary.extract(
        (frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_users(frame)
    )
    lines = [line.rstrip() for entry in found.format()[-_MOST_LINES:] for line in entry.splitlines()]
    kind = "".join(traceback.format_exception_only(error)).strip()
    return "\n".join([f"{what} failed{f' on {where}' if where else ''}: {kind}", *lines])


def describe_error(error: BaseException) -> str:
    """Kind and text of an error, and the innermost place in code that is not a library's."""
    kind = type(error).__name__
    return (f"{kind}: {error}" if str(error) else kind) + place_of_error(error)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_users(frame: FrameType) -> bool:
    package = _module(frame).partition(".")[0]
    is_standard = frame.f_code.co_filename.startswith(_STANDARD) and "site-packages" not in frame.f_code.co_filename
    return package not in ("torch", "nugnn", "dgl") and not is_standard
