"""What a user can cause, as one message and an exit code."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from nugnn._counted import counted
from nugnn._regular_file import shown
from nugnn.failure import WorkerFailed
from nugnn.member import member_from
from nugnn.screen import complain
from nugnn.worker_process import is_user_error

_RANK_0_SPEAKS_SECONDS = 5.0
"""torchrun ends everyone as soon as one process has failed; the others leave rank 0 the time to say why."""


def refuse_torchrun(command: str, instead: str) -> None:
    """Refuse to run a command in each of several processes that torchrun started: all would write the same files.

    Args:
        command: Its name.
        instead: What to do, as a sentence.

    Raises:
        ValueError: On rank 0; the others leave with its exit code, without a word.
    """
    member = member_from(os.environ)
    if member is None:
        return
    if member.rank != 0:
        time.sleep(_RANK_0_SPEAKS_SECONDS)
        raise SystemExit(2)
    raise ValueError(
        f"nugnn {command} is one of {counted(member.world_size, 'process', 'processes')} that torchrun started, "
        f"and each would do the same "
        f"and write the same files. {instead}"
    )


@contextlib.contextmanager
def errors_reported() -> Iterator[None]:
    """Turns what a user can cause into one message and an exit code; anything else keeps its traceback.

    NUGNN_TRACEBACK=1 keeps all tracebacks.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        complain(f"nugnn: {str(error) or 'interrupted'}")
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get("NUGNN_TRACEBACK") or not (isinstance(error, WorkerFailed) or is_user_error(error)):
            raise
        complain(f"nugnn: error: {_sentence(error)}")
        raise SystemExit(error.exit_code if isinstance(error, WorkerFailed) else 2) from None


def _sentence(error: Exception) -> str:
    """What an error says; of the system's own the path, shortened where it would fill the screen, and the reason."""
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, str):
        return f"{shown(Path(error.filename))}: {error.strerror}"
    return str(error)
