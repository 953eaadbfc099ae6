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
