"""What has travelled of gradients: steps, bytes, seconds and the error of rounding, by groups that travel together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nugnn.comm.compression.link import Sent


@dataclass
class Traffic:
    """Of one group of gradients that travel together, summed over steps.

    Args:
        num_values: In it.
        steps: It has travelled in.
        sent_bytes: Handed to torch.distributed by this rank for others; ``across_bytes`` of them for other hosts. See
            `nugnn.comm.compression.link.Sent`.
        seconds: Of the host, from gradients to their sums; ``exchange_seconds`` of them in exchanges.
        error: Norm of what this rank's roundings left out, relative to what it had to send; as measured last. None
            where it was not measured, or something was not finite.
    """

    num_values: int = 0
    steps: int = 0
    sent_bytes: int = 0
    across_bytes: int = 0
    seconds: float = 0.0
    exchange_seconds: float = 0.0
    error: float | None = None

    def count(self, before: Sent, after: Sent) -> None:
        """Add what a link has sent between two counts of it."""
        self.sent_bytes += after.num_bytes - before.num_bytes
        self.across_bytes += after.across_bytes - before.across_bytes
        self.exchange_seconds += after.seconds - before.seconds


def sums_of(traffic: Mapping[str, Traffic], plans: Traffic) -> dict[str, Any]:
    """As plain numbers: all bytes, those of plans included, and the seconds of gradients."""
    return {
        "sent_bytes": sum(t.sent_bytes for t in (*traffic.values(), plans)),
        "sent_bytes_across_hosts": sum(t.across_bytes for t in (*traffic.values(), plans)),
        "exchange_seconds": sum(t.exchange_seconds for t in traffic.values()),
        "codec_seconds": sum(t.seconds - t.exchange_seconds for t in traffic.values()),
    }


def by_group(traffic: Mapping[str, Traffic]) -> dict[str, Any]:
    """The same of each group."""
    return {
        name: {
            "values": t.num_values,
            "sent_bytes": t.sent_bytes,
            "seconds": t.seconds,
            "exchange_seconds": t.exchange_seconds,
            "error": t.error,
        }
        for name, t in traffic.items()
    }


class PlainCounts:
    """Sums of gradients that travel as they are, by the process group's own all-reduce, counted."""

    def __init__(self) -> None:
        self.traffic: dict[str, Traffic] = {}

    def count(self, group: str, num_values: int, sent_bytes: int) -> None:
        """One sum of ``num_values`` gradients, for which this rank sends ``sent_bytes``."""
        of_group = self.traffic.setdefault(group, Traffic(error=0.0))
        of_group.num_values, of_group.steps = num_values, of_group.steps + 1
        of_group.sent_bytes += sent_bytes

    def wait(self, group: str, seconds: float) -> None:
        """So long the host was in a sum, or waited for one that had begun before."""
        of_group = self.traffic.setdefault(group, Traffic(error=0.0))
        of_group.seconds += seconds
        of_group.exchange_seconds += seconds

    def report(self, steps: int, num_hosts: int) -> dict[str, Any]:
        """Under the names of `nugnn.comm.compression.compressor.Compressor.report`.

        What crosses between hosts is None where there are several: a process group does not say which way it takes.
        """
        return {
            "wire": "fp32",
            "error_feedback": False,
            "steps": steps,
            "compressed_values": 0,
            **sums_of(self.traffic, Traffic()),
            "sent_bytes_across_hosts": None if num_hosts > 1 else 0,
            "buckets": by_group(self.traffic),
        }
