"""Few bits a value for the wire: size and error of one row of each setting, and of a mean over ranks; no network.

    python benchmarks/codec.py
    python benchmarks/codec.py --speed cuda     # instead: how fast, beside a copy; cpu for this machine's processor
    python benchmarks/codec.py --speed cuda --out benchmarks/rows/communication     # and keep the rows

Unit Gaussian data, as a gradient at its worst. Above: bytes beside float32, the ends of each bucket included, and the
relative error of what comes back, rounded to nearest and stochastically. Below: the error of a mean of independent
vectors that is made in two ways from 4 bits in buckets of 1,024: each rank sums a part of all vectors and sends it on
(scatter, reduce, gather: two roundings whatever the ranks), or partial sums go round in a ring, rounded at each hop.

``--speed``: bytes read and written in a second by the encoder and the decoder, buckets of 1,024 float32, beside those
of a copy of as many float32 in the same run. What comes out is checked against the definition before it is timed.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
from harness import Recorder, time_ms
from torch import Tensor

from nugnn.kernels.philox import RandomKey, random_words
from nugnn.kernels.quantize import bucket_bytes, decode_buckets, encode_buckets
from nugnn.kernels.quantize.reference import decode_reference, encode_reference

BITS, BUCKETS, RANKS = (8, 4, 2), (128, 512, 1024), (2, 4, 8)


def there_and_back(x: Tensor, bits: int, bucket: int, key: RandomKey | None) -> Tensor:
    return decode_buckets(encode_buckets(x, bits, bucket, key), len(x), bits, bucket)


def relative(error: Tensor, x: Tensor) -> float:
    return float(error.double().norm() / x.double().norm())


def mean_over_ranks(vectors: list[Tensor], scheme: str, is_stochastic: bool) -> Tensor:
    """The mean as one rank ends with it, 4 bits in buckets of 1,024."""
    keys = iter(RandomKey(0, step, 1) for step in range(1000))

    def rounded(x: Tensor) -> Tensor:
        key = next(keys)
        return there_and_back(x, 4, 1024, key if is_stochastic else None)

    count = len(vectors)
    parts = []
    for owner, pieces in enumerate(zip(*(x.chunk(count) for x in vectors), strict=True)):
        if scheme == "SRA":  # the owner's own piece is not rounded before the sum
            total = sum((x if rank == owner else rounded(x) for rank, x in enumerate(pieces)), torch.zeros(()))
        else:
            total = pieces[(owner + 1) % count]
            for hop in range(2, count + 1):
                total = rounded(total) + pieces[(owner + hop) % count]
        parts.append(rounded(total) / count)
    return torch.cat(parts)


WORKS = ("encode, nearest", "encode, stochastic", "decode")
_BUCKET = 1024
_CHECKED = 32
"""Buckets whose bytes and values are held against the definition's."""
_KEY = RandomKey(0, 0, 0)


def work_of(what: str, x: Tensor, wire: Tensor, bits: int) -> Tensor:
    """One of `WORKS` on all of ``x``, of which ``wire`` are the bytes to nearest."""
    if what == "decode":
        return decode_buckets(wire, len(x), bits, _BUCKET)
    return encode_buckets(x, bits, _BUCKET, _KEY if what == "encode, stochastic" else None)


def problem_of(what: str, x: Tensor, bits: int, result: Tensor) -> str | None:
    """None where the first buckets of ``result`` are those of the definition."""
    buckets = x[: _CHECKED * _BUCKET].view(-1, _BUCKET).cpu()
    if what == "decode":
        exact = decode_reference(encode_reference(buckets, bits, None), _BUCKET, bits).flatten()
    else:
        numbers = torch.arange(len(buckets))
        words = random_words(_KEY, numbers, _BUCKET // 2) if what == "encode, stochastic" else None
        exact = encode_reference(buckets, bits, words).flatten()
    return None if torch.equal(result[: len(exact)].cpu(), exact) else f"{what}, {bits} bits"


def rate_of(row: dict[str, Any]) -> float:
    """Bytes read and written in a second."""
    return float(row["moved_bytes"] / row["median_ms"] * 1e3)


def speed_line(row: dict[str, Any]) -> str:
    """A row of `speeds` for people."""
    head = f"{row['bits']:4d} {row['work']:<22}"
    if "error" in row:
        return f"{head} {row['error']}"
    rate, plain = rate_of(row), 4 * row["num_values"] / row["median_ms"] / 1e6
    return f"{head} {rate / 1e9:8.1f} {rate / row['copy_bytes_per_second']:10.2f} {plain:13.1f}"


def speeds(
    num_values: int, device: torch.device, widths: list[int], out: Path | None = None
) -> list[tuple[str, float]]:
    """Print bytes a second beside a copy; returns the share of the copy's, by name; rows go to ``codec.jsonl``."""
    whole = num_values // _BUCKET * _BUCKET
    x = torch.randn(whole, device=device)
    copy = functools.partial(torch.empty_like(x).copy_, x)
    copied = 8 * whole / time_ms(copy, device, budget_seconds=0.3).median_ms * 1e3
    del copy
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, {whole} values in buckets of {_BUCKET}; a copy: {copied / 1e9:.1f} GB/s read and written")
    print(f"{'bits':>4} {'what':<22} {'GB/s':>8} {'of a copy':>10} {'float32 GB/s':>13}")
    recorder = Recorder(None if out is None else out / "codec.jsonl", device, speed_line)
    for bits in widths:
        wire = encode_buckets(x, bits, _BUCKET)
        facts = {"kind": "codec", "system": "nugnn", "bits": bits, "num_values": whole, "bucket": _BUCKET}
        facts |= {"moved_bytes": 4 * whole + len(wire), "copy_bytes_per_second": copied}
        for what in WORKS:
            work = functools.partial(work_of, what, x, wire, bits)
            check = functools.partial(problem_of, what, x, bits)
            recorder.measure(facts | {"work": what}, lambda work=work: work, check, budget_seconds=0.2)
    wrong = [row["error"] for row in recorder.rows if "error" in row]
    if wrong:
        raise SystemExit("; ".join(wrong))
    return [(f"{row['bits']} {row['work']}", rate_of(row) / copied) for row in recorder.rows]


def main(given: list[str] | None = None) -> list[tuple[str, float]]:
    """Print the tables; returns what they hold, by name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=1 << 20)
    parser.add_argument("--speed", choices=("cpu", "cuda"), help="time the codec there instead")
    parser.add_argument("--bits", type=int, nargs="+", default=list(range(8, 0, -1)), help="with --speed: of a value")
    parser.add_argument("--out", type=Path, help="with --speed: add its rows to codec.jsonl in this folder")
    arguments = parser.parse_args(given)
    if arguments.speed is not None:
        num_values = arguments.values << (6 if arguments.speed == "cuda" else 2)
        return speeds(num_values, torch.device(arguments.speed), arguments.bits, arguments.out)
    if arguments.out is not None:
        parser.error("--out keeps the rows of --speed")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(arguments.values, generator=generator)
    found = []
    print(f"{'bits':>4} {'bucket':>7} {'smaller than float32':>21} {'nearest':>9} {'stochastic':>11}")
    for bits in BITS:
        for bucket in BUCKETS:
            ratio = 4 * len(x) / bucket_bytes(len(x), bits, bucket)
            errors = [relative(there_and_back(x, bits, bucket, key) - x, x) for key in (None, RandomKey(0, 0, 0))]
            found += list(zip((f"{bits} {bucket} {name}" for name in ("ratio", "nearest", "stochastic")),
                              (ratio, *errors), strict=True))  # fmt: skip
            print(f"{bits:4d} {bucket:7d} {ratio:20.2f}x {errors[0]:9.4f} {errors[1]:11.4f}")
    print(f"\n{'ranks':>5} {'SRA nearest':>12} {'stochastic':>11} {'ring nearest':>13} {'stochastic':>11}")
    for ranks in RANKS:
        vectors = [torch.randn(arguments.values // 4 // ranks * ranks, generator=generator) for _ in range(ranks)]
        exact = sum(vectors, torch.zeros(())) / ranks
        row = [
            relative(mean_over_ranks(vectors, scheme, is_stochastic) - exact, exact)
            for scheme in ("SRA", "ring")
            for is_stochastic in (False, True)
        ]
        names = ("SRA nearest", "SRA stochastic", "ring nearest", "ring stochastic")
        found += [(f"{ranks} ranks {name}", error) for name, error in zip(names, row, strict=True)]
        print(f"{ranks:5d} {row[0]:12.3f} {row[1]:11.3f} {row[2]:13.3f} {row[3]:11.3f}")
    return found


if __name__ == "__main__":
    main()
