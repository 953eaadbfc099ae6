"""A web server on loopback that misbehaves as told, one behaviour per request, and keeps what it was asked."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Range"), self.headers.get("If-Range")))
        with self.server.lock:
            answers = self.server.answers
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
        answer(self)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def head(self, status: int, length: int | None, **headers: str) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()

    def hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *answers: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = list(answers)
        self.requests: list[tuple[str, str | None, str | None]] = []
        self.lock = threading.Lock()
        self.closing = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client may leave when it has seen enough
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # both as they came

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serve(*answers: Answer) -> Iterator[Server]:
    """Answer the first request with the first behaviour, and so on; the last one is repeated."""
    server = Server(*answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def whole(content: bytes, etag: str | None = '"v1"', content_type: str = "application/octet-stream") -> Answer:
    """The file, or the part of it that is asked for when If-Range names its version."""

    def answer(handler: Handler) -> None:
        wanted, version = handler.headers.get("Range"), handler.headers.get("If-Range")
        about = {"Content_Type": content_type, **({"ETag": etag} if etag else {})}
        if wanted and etag and version == etag:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            place = f"bytes {start}-{len(content) - 1}/{len(content)}"
            handler.head(206, len(content) - start, Content_Range=place, **about)
            handler.wfile.write(content[start:])
        else:
            handler.head(200, len(content), **about)
            handler.wfile.write(content)

    return answer


def cut(content: bytes, after: int, etag: str | None = '"v1"', declared: bool = True) -> Answer:
    """The head of the whole file, then ``after`` of its bytes, then the end of the connection."""

    def answer(handler: Handler) -> None:
        length = len(content) if declared else None
        about = {"ETag": etag} if etag else {}
        handler.head(200, length, **about, **({} if declared else {"Connection": "close"}))
        handler.wfile.write(content[:after])
        handler.hang_up()

    return answer


def stall(content: bytes, after: int, etag: str = '"v1"') -> Answer:
    """The head of the whole file, ``after`` of its bytes, and then nothing for as long as the server is there."""

    def answer(handler: Handler) -> None:
        handler.head(200, len(content), ETag=etag)
        handler.wfile.write(content[:after])
        handler.wfile.flush()
        handler.server.closing.wait()
        handler.hang_up()

    return answer


def status(code: int, **headers: str) -> Answer:
    def answer(handler: Handler) -> None:
        handler.head(code, 0, **headers)

    return answer
