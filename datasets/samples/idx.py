"""IDX, the format of MNIST: a magic number, the sizes of the axes, and bytes.

    0x00 0x00  type  number of axes  |  one big-endian uint32 per axis  |  values, last axis fastest

Only type 0x08, unsigned bytes, is read; MNIST's families use no other.
Source: LeCun, Cortes and Burges, "The MNIST Database of Handwritten Digits", description of the file formats.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nugnn.datasets.archive import BrokenFileError, looks_like_html
from nugnn.datasets.text_table import open_binary

_UNSIGNED_BYTE = 0x08
_CHUNK = 1 << 20
_DEFLATE_RATIO = 1032  # no deflate stream inflates by more
_OTHER_TYPES = {0x09: "signed bytes", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}


def read_idx(path: Path, num_axes: int) -> np.ndarray:
    """Read unsigned bytes from an IDX file, plain or gzip (told by ``.gz``).

    Args:
        path: The file.
        num_axes: How many axes it has to have: 1 for labels, 3 for images.

    Returns:
        uint8, of the shape that the header says.

    Raises:
        ValueError: no such file, another magic number, type or number of axes, fewer or more bytes than the header
            says, or a damaged gzip file; names the file and what it holds instead. No memory is taken for values that
            are not there.
    """
    try:
        with open_binary(path) as file:
            shape = _shape(path, file.read(4 + 4 * num_axes), num_axes)
            return _values(path, file, shape)
    except _gzip_damage() as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise BrokenFileError(f"{path} cannot be read: {error.strerror}; see to that first") from error
        raise BrokenFileError(f"{path} is not a complete gzip file ({error}); get the file again") from error


def _shape(path: Path, head: bytes, num_axes: int) -> tuple[int, ...]:
    what = {1: "labels (magic number 0x00000801)", 3: "images (magic number 0x00000803)"}.get(num_axes, "an IDX file")
    if len(head) < 4:
        raise BrokenFileError(f"{path} has {len(head)} bytes, no {what}; get the file again")
    zeros, kind, axes = struct.unpack(">HBB", head[:4])
    if looks_like_html(head):
        raise BrokenFileError(f"{path} is a web page, as from a failed download; get the file again")
    if head[:2] == b"\x1f\x8b":
        raise ValueError(f"{path} is compressed; name it {path.name}.gz, or decompress it")
    if zeros != 0 or kind != _UNSIGNED_BYTE or axes != num_axes:
        found = f"it begins with 0x{head[:4].hex()}"
        if zeros == 0 and kind in _OTHER_TYPES:
            found += f", {_OTHER_TYPES[kind]}"
        if zeros == 0 and kind == _UNSIGNED_BYTE:
            found += {1: ", labels", 3: ", images"}.get(axes, f", {axes} axes")
        raise BrokenFileError(f"{path} is no IDX file of {what}: {found}; put the right file there")
    if len(head) < 4 + 4 * num_axes:
        raise BrokenFileError(f"{path} ends within its header, after {len(head)} bytes; get the file again")
    return struct.unpack(f">{num_axes}I", head[4:])


def _values(path: Path, file: BinaryIO, shape: tuple[int, ...]) -> np.ndarray:
    """What follows the header, in steps, so that a header alone cannot ask for memory."""
    promised = math.prod(shape)
    on_disk = path.stat().st_size
    most = on_disk if path.suffix != ".gz" else _DEFLATE_RATIO * on_disk
    size = " x ".join(map(str, shape))
    if promised > most:
        raise BrokenFileError(
            f"{path} announces {size} bytes, and a file of {on_disk} cannot hold so many; get the file again"
        )
    content = bytearray()
    while len(content) <= promised and (chunk := file.read(min(_CHUNK, promised + 1 - len(content)))):
        content += chunk
    if len(content) != promised:
        found = "more" if len(content) > promised else f"{len(content)}"
        raise BrokenFileError(f"{path} announces {size} bytes and holds {found}; get the file again")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _gzip_damage() -> tuple[type[BaseException], ...]:
    from isal import isal_zlib

    return OSError, EOFError, isal_zlib.error  # type: ignore[return-value]  # its types say object
