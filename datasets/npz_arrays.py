"""The arrays one asks for out of another project's ``.npz`` file: plain numbers and text, each header checked first."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import numpy as np

from nugnn._regular_file import no_file
from nugnn.datasets.archive import BrokenFileError, check_complete
from nugnn.datasets.unpacking import UnpacksTooFarError, check_fits_memory, check_unpacked


def npz_keys(path: Path) -> frozenset[str]:
    """Names of the arrays in a zip of ``.npy`` files; empty when the file cannot be read as one."""
    try:
        with zipfile.ZipFile(path) as archive:
            return frozenset(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))
    except Exception:  # broken in any of many ways: reading it says how
        return frozenset()


def npz_arrays(path: Path, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Read the named arrays; any others, pickled ones among them, stay unread.

    Args:
        path: The file.
        required: Keys that have to be there.
        optional: Keys that may be.

    Raises:
        ValueError: the file is incomplete, lacks a key, an array asked for holds Python objects (pickled, so reading
            would run code), or its header promises more than the file holds; names file and key. Or they unpack to
            more than `nugnn.datasets.unpacking` allows.
    """
    if (problem := no_file(path)) is not None:
        raise ValueError(
            f"{path} is missing; get the file again" if problem == "no such file" else f"{path}: {problem}"
        )
    missing = sorted(set(required) - npz_keys(path))
    if missing:
        check_complete(path, f"{path.name}.npz")
        raise ValueError(
            f"{path} lacks {', '.join(missing)}; it holds {', '.join(sorted(npz_keys(path))) or 'nothing'}"
        )
    wanted = [*required, *(key for key in optional if key in npz_keys(path))]
    try:
        with zipfile.ZipFile(path) as archive:
            num_bytes = sum(archive.getinfo(f"{key}.npy").file_size for key in wanted)
            check_unpacked(path, num_bytes)
            check_fits_memory(path, num_bytes)
            return {key: _array(path, archive, key) for key in wanted}
    except (BrokenFileError, UnpacksTooFarError):
        raise
    except Exception as error:  # one damaged byte can raise nearly anything in zipfile, zlib and numpy
        raise BrokenFileError(f"{path} is damaged ({error}); get the file again") from error


def _array(path: Path, archive: zipfile.ZipFile, key: str) -> np.ndarray:
    info = archive.getinfo(f"{key}.npy")
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in read_header:
            raise BrokenFileError(f"{path}: {key} is in version {version} of the .npy format, which is not read")
        shape, _, dtype = read_header[version](file)
        if dtype.hasobject:
            raise BrokenFileError(f"{path}: {key} holds pickled Python objects; reading them would run code; refused")
        promised = file.tell() + math.prod(shape) * dtype.itemsize
        if promised != info.file_size:
            raise BrokenFileError(
                f"{path}: {key} is {dtype} {shape}, {promised} bytes, where {info.file_size} are stored"
            )
    with archive.open(info) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def integers(path: Path, arrays: dict[str, np.ndarray], key: str, dims: int = 1) -> np.ndarray:
    """``arrays[key]`` as int64, refused when it is no integer array of that many dimensions."""
    array = arrays[key]
    if array.dtype.kind not in "iu" or array.ndim != dims:
        raise ValueError(f"{path}: {key} is {array.dtype} {array.shape}; expected integers in {dims} dimensions")
    return array.astype(np.int64)


def floats(path: Path, arrays: dict[str, np.ndarray], key: str, dims: int = 1) -> np.ndarray:
    """``arrays[key]`` as contiguous float32, refused when it is no array of numbers of that many dimensions."""
    array = arrays[key]
    if array.dtype.kind not in "fiub" or array.ndim != dims:
        raise ValueError(f"{path}: {key} is {array.dtype} {array.shape}; expected numbers in {dims} dimensions")
    return np.ascontiguousarray(array, dtype=np.float32)
