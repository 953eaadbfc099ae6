"""One file from a web server to a path: resumed, checked, then renamed, and once however many processes ask."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nugnn.datasets.archive import BrokenFileError, check_complete, looks_like_html
from nugnn.datasets.unpacking import UnpacksTooFarError

if TYPE_CHECKING:
    import requests

Progress = Callable[[int, int | None], None]
"""Called with the bytes so far and the total, None while the server has not named one."""

_CHUNK = 1 << 14  # what has arrived of a chunk is lost when the connection breaks
_SPARE_BYTES = 64 << 20
_WORTH_ANOTHER_ROUND = 1 << 20
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_LONGEST_WAIT_SECONDS = 60.0

_log = logging.getLogger("nugnn.datasets")


class DownloadError(ValueError):
    """A file could not be fetched; the message says which file, from where, and where to put it by hand.

    Args:
        message: All of it.
        what: Its beginning: which file, and why not; all of it when left out.
    """

    def __init__(self, message: str, what: str = "") -> None:
        super().__init__(message)
        self.what = what or message


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFile:
    """A file on a web server and what is known about it."""

    url: str
    """http or https."""
    name: str = ""
    """What to call it here; empty takes the last part of the URL."""
    num_bytes: int | None = None
    """Exact size, checked."""
    about_bytes: int | None = None
    """Rough size for display and for the free-space check, where the exact one is not known."""
    sha256: str | None = None
    """64 hexadecimal digits, checked."""

    @property
    def file_name(self) -> str:
        return self.name or urlsplit(self.url).path.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long to wait, and how often to try again without getting further."""

    connect_seconds: float = 10.0
    read_seconds: float = 60.0
    attempts: int = 5
    backoff_seconds: float = 1.0
    """Before the second attempt; doubled for each further one."""


class _PassingError(Exception):
    """A reason to try again."""

    def __init__(self, reason: str, wait_seconds: float = 0.0, most: int = 1 << 30) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds
        self.most = most


class _LastingError(Exception):
    """A reason not to."""


def download(
    remote: RemoteFile,
    target: Path,
    *,
    progress: Progress | None = None,
    patience: Patience | None = None,
    lock: bool = True,
) -> Path:
    """Fetch a file unless it is there already.

    Bytes go to ``.NAME.part`` beside ``target``; a later call goes on from there when the server still offers the same
    file (its ETag or Last-Modified says so) and starts anew otherwise. Only a file that has the announced and the known
    size, the known sha256, and, for archives, is readable to its end gets the name ``target``. Two processes that ask
    at once fetch it once.

    Args:
        remote: What to fetch.
        target: Path to make; its folder is made when missing. An existing file is left as it is.
        progress: Called as bytes arrive.
        patience: Time limits and retries; default :class:`Patience`.
        lock: Whether to take the lock of ``target``; False when the caller holds one that covers it.

    Returns:
        ``target``.

    Raises:
        DownloadError: in one sentence: no network, no such file, a web page in its place, wrong size or hash, a damaged
            archive, no space; and what to put where instead.
    """
    if target.is_file():
        return target
    if urlsplit(remote.url).scheme not in ("http", "https"):
        raise DownloadError(f"{remote.url}: only http and https addresses are downloaded")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target) if lock else nullcontext():
            if not target.is_file():
                _download_locked(remote, target, progress, patience or Patience())
    except _LastingError as error:
        _log.debug("%s", remote.url, exc_info=error)
        # not from it: the sentence says all, and would stand below pages of the network's own tracebacks
        raise _refused(remote, target, str(error)) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise _refused(remote, target, f"writing to {target.parent} fails: {reason}") from error
    return target


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that stands for ``path``, waiting for another process that has it; freed when a holder dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _log.info("another process is preparing %s; waiting for it", path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _download_locked(remote: RemoteFile, target: Path, progress: Progress | None, patience: Patience) -> None:
    part = _Part(target, remote.url)
    try:
        _try_until_complete(remote, part, progress, patience)
        part.finish()
    finally:
        if not part.num_bytes:
            part.discard()


def _try_until_complete(remote: RemoteFile, part: _Part, progress: Progress | None, patience: Patience) -> None:
    import requests

    furthest, failures, wait = part.num_bytes, 0, patience.backoff_seconds
    with requests.Session() as session:
        while True:
            try:
                _fetch(session, remote, part, progress, patience)
                _check_content(remote, part)
                return
            except _PassingError as error:
                if part.num_bytes >= furthest + _WORTH_ANOTHER_ROUND:
                    failures, wait = 0, patience.backoff_seconds
                furthest = max(furthest, part.num_bytes)
                failures += 1
                if failures >= min(patience.attempts, error.most):
                    raise _LastingError(str(error)) from error
                _log.info("%s: %s; trying again", remote.url, error)
                time.sleep(min(max(wait, error.wait_seconds), _LONGEST_WAIT_SECONDS))
                wait *= 2


class _Part:
    """The unfinished file, with what the server said about it: enough to ask for the rest."""

    def __init__(self, target: Path, url: str) -> None:
        self.target = target
        self.path = target.with_name(f".{target.name}.part")
        self._about = target.with_name(f".{target.name}.part.json")
        self.validator = ""
        self.total: int | None = None
        try:
            about = json.loads(self._about.read_text(encoding="utf-8"))
            if about["url"] == url:
                self.validator, self.total = str(about["validator"]), about["total"]
        except (OSError, ValueError, KeyError, TypeError):
            pass
        if not self.validator:
            self.discard()
        self._url = url

    @property
    def num_bytes(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def begin(self, validator: str, total: int | None) -> None:
        """Note which version of the file the bytes are from; what was there is dropped."""
        self.discard()
        self.validator, self.total = validator, total
        self._about.write_text(json.dumps({"url": self._url, "validator": validator, "total": total}), encoding="utf-8")

    def discard(self) -> None:
        self.validator, self.total = "", None
        self.path.unlink(missing_ok=True)
        self._about.unlink(missing_ok=True)

    def finish(self) -> None:
        self.path.replace(self.target)
        self._about.unlink(missing_ok=True)


def _fetch(
    session: requests.Session, remote: RemoteFile, part: _Part, progress: Progress | None, patience: Patience
) -> None:
    """One request; what arrives is appended to ``part``."""
    if part.num_bytes and part.num_bytes == part.total:
        return
    if not part.validator:
        part.discard()  # nothing would tell whether the rest belongs to the same file
    with _as_reasons(remote, part, patience):
        headers = {"Accept-Encoding": "identity"}
        if part.num_bytes:
            headers |= {"Range": f"bytes={part.num_bytes}-", "If-Range": part.validator}
        limits = (patience.connect_seconds, patience.read_seconds)
        with session.get(remote.url, headers=headers, stream=True, timeout=limits) as response:
            if remote.url.startswith("https:") and not response.url.startswith("https:"):
                raise _LastingError(f"the server sends on to {response.url}, which is not encrypted")
            _position(response, remote, part)
            _check_space(part, remote)
            _receive(response, remote, part, progress)
    size = part.num_bytes
    if part.total is not None and size != part.total:
        if size > part.total:
            part.discard()
        raise _PassingError(f"the connection ended after {size:,} of {part.total:,} bytes")


def _position(response: requests.Response, remote: RemoteFile, part: _Part) -> None:
    """Check the answer's head, and empty ``part`` unless the answer continues it."""
    status = response.status_code
    if status in _PASSING:
        raise _PassingError(f"the server answers {status} {response.reason}", _retry_after(response))
    if status == 416:
        part.discard()
        raise _PassingError("the server does not have the rest of the part that was fetched before")
    if status not in (200, 206):
        raise _LastingError(f"the server answers {status} {response.reason}")
    if status == 206:
        expected = f"bytes {part.num_bytes}-"
        given = response.headers.get("Content-Range", "")
        same = _validator(response) in ("", part.validator) and given.rpartition("/")[2] in ("*", str(part.total))
        if not part.num_bytes or not given.startswith(expected) or not same:
            part.discard()
            raise _PassingError(f"the server answers with another part ({given or 'unnamed'}) than asked for")
        return
    if "html" in response.headers.get("Content-Type", "") and not remote.file_name.endswith((".html", ".htm")):
        raise _LastingError("it is a web page in place of the file, as a log-in page or proxy sends")
    encoded = response.headers.get("Content-Encoding", "identity") != "identity"
    length = "" if encoded else response.headers.get("Content-Length", "")
    total = int(length) if length.isdigit() else None
    if remote.num_bytes is not None and total not in (None, remote.num_bytes):
        raise _LastingError(f"the server offers {total:,} bytes where {remote.num_bytes:,} are known to be right")
    part.begin("" if encoded or total is None else _validator(response), total)


def _receive(response: requests.Response, remote: RemoteFile, part: _Part, progress: Progress | None) -> None:
    size = part.num_bytes
    with part.path.open("ab") as file:
        for chunk in response.iter_content(_CHUNK):
            if size == 0 and looks_like_html(chunk[:512]):
                file.close()
                part.discard()
                raise _LastingError("it is a web page in place of the file, as a log-in page or proxy sends")
            file.write(chunk)
            size += len(chunk)
            if size > (part.total if part.total is not None else remote.num_bytes or size):
                break
            if progress is not None:
                progress(size, part.total)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _as_reasons(remote: RemoteFile, part: _Part, patience: Patience) -> Iterator[None]:
    """Turn what requests raises into a reason in plain words."""
    import requests

    host = urlsplit(remote.url).netloc
    try:
        yield
    except requests.exceptions.SSLError as error:
        raise _LastingError(f"the certificate of {host} is not accepted") from error
    except requests.exceptions.ConnectTimeout as error:
        raise _PassingError(f"{host} does not answer within {patience.connect_seconds:g} s", most=2) from error
    except requests.exceptions.ProxyError as error:
        raise _PassingError(f"the proxy does not lead to {host}", most=2) from error
    except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema) as error:
        raise _LastingError(f"the server sends on to an address that is not http or https ({error})") from error
    except requests.exceptions.TooManyRedirects as error:
        raise _LastingError("the server sends on and on") from error
    except (requests.exceptions.Timeout, requests.exceptions.ConnectionError) as error:
        text = repr(error)
        if isinstance(error, requests.exceptions.Timeout) or "timed out" in text:
            raise _PassingError(
                f"{host} sent nothing for {patience.read_seconds:g} s after {part.num_bytes:,} bytes"
            ) from error
        if "NameResolution" in text or "getaddrinfo" in text:
            raise _PassingError(f"the name {host} is not found, as without a network", most=2) from error
        if "NewConnection" in text:
            raise _PassingError(f"{host} cannot be reached", most=2) from error
        raise _PassingError(f"the connection to {host} broke after {part.num_bytes:,} bytes") from error
    except requests.exceptions.RequestException as error:
        raise _PassingError(f"the connection to {host} broke after {part.num_bytes:,} bytes") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _LastingError(f"the disk of {part.path.parent} is full after {part.num_bytes:,} bytes") from error
        raise


def _check_content(remote: RemoteFile, part: _Part) -> None:
    """Accept the complete file or drop it."""
    size = part.num_bytes
    if remote.num_bytes is not None and size != remote.num_bytes:
        part.discard()
        raise _LastingError(f"it has {size:,} bytes where {remote.num_bytes:,} are known to be right")
    if remote.sha256 is not None and (found := _sha256(part.path)) != remote.sha256:
        part.discard()
        raise _LastingError(f"its sha256 is {found} where {remote.sha256} is known to be right")
    try:
        check_complete(part.path, remote.file_name)
    except UnpacksTooFarError as error:
        part.discard()
        raise _LastingError(str(error).replace(str(part.path), "what arrived")) from error
    except BrokenFileError as error:
        reason = str(error).replace(str(part.path), "what arrived").removesuffix("; get the file again")
        part.discard()
        raise _PassingError(reason, most=2) from error


def _check_space(part: _Part, remote: RemoteFile) -> None:
    total = part.total or remote.num_bytes or remote.about_bytes or 0
    missing = total - part.num_bytes
    free = shutil.disk_usage(part.path.parent).free
    if missing + _SPARE_BYTES > free:
        raise _LastingError(f"{missing:,} more bytes are needed and {part.path.parent} has {free:,} free")


def _validator(response: requests.Response) -> str:
    """A strong ETag, else Last-Modified: what If-Range accepts. Empty when there is neither."""
    etag: Any = response.headers.get("ETag", "")
    return str(etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified", ""))


def _retry_after(response: requests.Response) -> float:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else 0.0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refused(remote: RemoteFile, target: Path, reason: str) -> DownloadError:
    what = f"cannot download {remote.url} ({reason})"
    by_hand = f"fetch that file some other way, e.g. on another machine, and put it here as {target}"
    return DownloadError(f"{what}; {by_hand}", what)
