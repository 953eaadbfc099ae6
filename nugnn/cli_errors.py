"""What a user can cause, as one message and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from nugnn.launch import WorkerFailed
from nugnn.worker_process import is_user_error


@contextlib.contextmanager
def errors_reported() -> Iterator[None]:
    """Turns what a user can cause into one message and an exit code; anything else keeps its traceback.

    NUGNN_TRACEBACK=1 keeps all tracebacks.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        print(f"nugnn: {str(error) or 'interrupted'}", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get("NUGNN_TRACEBACK") or not (isinstance(error, WorkerFailed) or is_user_error(error)):
            raise
        print(f"nugnn: error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code if isinstance(error, WorkerFailed) else 2) from None
