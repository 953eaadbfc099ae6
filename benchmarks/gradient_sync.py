"""Sums of gradients between processes of this machine: milliseconds, bytes handed over, bytes an interface counts.

    python benchmarks/gradient_sync.py
    python benchmarks/gradient_sync.py --ranks 4 --values 1000000
    python benchmarks/gradient_sync.py --ranks 4 --hosts 2   # which the processes pretend to be on; --flat beside it
    python benchmarks/gradient_sync.py --device cuda        # NCCL where each rank has a GPU
    python benchmarks/gradient_sync.py --device cuda --sockets      # which goes through sockets then
    python benchmarks/gradient_sync.py --device cuda --values 33554432 --out benchmarks/rows/communication

One matrix of Gaussian values, each way in turns: the median of the slowest rank. Bytes are those of one rank for one
sum, counted from the buffers handed to torch.distributed; for fp32 what a ring of all-reduce sends. Processor's
milliseconds are those of all threads of a rank, the median of five sums and the most of all ranks. Beside them the
bytes that the interface sent meanwhile, of all ranks, with what TCP and others add: gloo's traffic between processes of
a machine goes through the loopback interface.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Recorder, link_between_gpus

import nugnn  # noqa: F401
from nugnn.comm.compression.choice import measured
from nugnn.comm.compression.link import Link
from nugnn.comm.compression.low_rank import make_compressor
from nugnn.comm.compression.settings import Compression
from nugnn.comm.groups import Ranks, groups_by_host, join_ranks
from nugnn.comm.hosts import HostGroups

WAYS = ("fp32", "bf16", "fp16", "8bit", "4bit", "2bit", "1bit", "powersgd")
ONLY_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
_SUMS = 5


def interface_bytes(name: str) -> int | None:
    """Sent so far; None where the system does not say."""
    path = Path("/sys/class/net") / name / "statistics" / "tx_bytes"
    return int(path.read_text()) if path.exists() else None


def counted(
    name: str, num_values: int, ranks: Ranks, interface: str, groups: HostGroups | None
) -> tuple[float, float | None, float | None, float]:
    """Of one sum: bytes handed over by this rank, those for other hosts, what the interface sent; processor seconds."""
    parameter = torch.empty(num_values // 1024, 1024, device=ranks.device)
    values = torch.randn(parameter.numel(), device=ranks.device)
    link = Link.of(ranks, groups=groups)
    compressor = make_compressor({"": parameter}, Compression(wire=name), ranks.world_size)
    ranks.sum_(torch.zeros(1))
    before = interface_bytes(interface)
    seconds = []
    for _ in range(_SUMS):
        summand = values.clone()
        used = time.process_time()
        if name == "fp32":
            ranks.sum_(summand)
        else:
            compressor.open()
            compressor.sum_(summand, [""], [None], 0, link)
            compressor.settle(link)
        seconds.append(time.process_time() - used)
    ranks.synchronize()
    ranks.sum_(torch.zeros(1))
    after = interface_bytes(interface)
    ring = 2 * (ranks.world_size - 1) / ranks.world_size * 4 * len(values)
    sent = ring if name == "fp32" else link.sent_bytes / _SUMS
    across = None if name == "fp32" else link.sent.across_bytes / _SUMS
    processor = float(ranks.max_(torch.tensor(statistics.median(seconds), dtype=torch.float64)))
    return sent, across, None if before is None or after is None else (after - before) / _SUMS, processor


def run_rank(rank: int, port: int, arguments: argparse.Namespace, out: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = arguments.interface
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, arguments.ranks, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
    os.environ["NUGNN_HOST"] = f"host-{rank * arguments.hosts // arguments.ranks}"
    ranks = join_ranks(device=device)
    groups = None if arguments.flat else groups_by_host(ranks)
    num_values = arguments.values // 1024 * 1024
    seconds = measured(num_values, ranks, tuple(arguments.ways), rounds=arguments.rounds, groups=groups)
    rows = {}
    for name in arguments.ways:
        sent, across, seen, processor = counted(name, num_values, ranks, arguments.interface, groups)
        rows[name] = {
            "ms": 1000 * seconds[name],
            "processor_ms": 1000 * processor,
            "sent_bytes": sent,
            "sent_bytes_across_hosts": across,
            "interface_bytes": seen,
        }
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def link_of(arguments: argparse.Namespace) -> str:
    """What the bytes travel over, in a word."""
    if arguments.device == "cpu" or torch.cuda.device_count() < arguments.ranks:
        return "gloo"
    return "sockets" if arguments.sockets else link_between_gpus()


def line_of(row: dict[str, Any]) -> str:
    """A row for people."""
    sent, seen = row["sent_bytes"] or 0.0, row["interface_bytes"]
    across, shown = ("-" if x is None else f"{x / 1e6:.3f}" for x in (row["sent_bytes_across_hosts"], seen))
    whole = 2 * (row["num_ranks"] - 1) / row["num_ranks"] * 4 * row["num_values"]
    return (
        f"{row['way']:9} {row['ms']:8.2f} {row['processor_ms']:9.2f} {sent / 1e6:13.3f} {whole / sent:11.2f}x "
        f"{across:>10} {shown:>10}"
    )


def main(given: list[str] | None = None) -> dict[str, dict[str, float | None]]:
    """Print the table; returns its rows by way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1, help="names of hosts that the processes pretend to be on")
    parser.add_argument("--flat", action="store_true", help="do not sum inside hosts first")
    parser.add_argument("--values", type=int, default=4 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sockets", action="store_true", help="NCCL neither over NVLink nor through shared memory")
    parser.add_argument("--interface", default="lo")
    parser.add_argument("--out", type=Path, help="add rows to gradient_sync.jsonl in this folder")
    arguments = parser.parse_args(given)
    if arguments.sockets:
        if arguments.device != "cuda":
            parser.error("--sockets is about NCCL: it needs --device cuda")
        os.environ.update(ONLY_SOCKETS)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "rows.json")
        mp.start_processes(run_rank, (port, arguments, out), nprocs=arguments.ranks, start_method="spawn")
        rows: dict[str, dict[str, float | None]] = json.loads(Path(out).read_text())
    num_values = arguments.values // 1024 * 1024
    facts = {"kind": "gradient_sync", "system": "nugnn", "num_ranks": arguments.ranks, "num_hosts": arguments.hosts}
    facts |= {"is_flat": arguments.flat, "num_values": num_values, "link": link_of(arguments)}
    print(f"{arguments.ranks} ranks, {num_values} values, {arguments.device}, {facts['link']}")
    print(
        f"{'way':9} {'ms':>8} {'processor':>9} {'MB of a rank':>13} {'beside fp32':>12} {'for others':>10} "
        f"{'MB of ' + arguments.interface:>10}"
    )
    out = None if arguments.out is None else arguments.out / "gradient_sync.jsonl"
    recorder = Recorder(out, torch.device(arguments.device), line_of)
    for name, row in rows.items():
        recorder.add(facts | {"way": name} | row)
    return rows


if __name__ == "__main__":
    main()
