"""Seconds of an exchange for one rank alone: its way to its peers, none of which it waits for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankLink:
    """One rank's way to its peers.

    Args:
        seconds_per_byte: One way, while the other way is as busy.
        staging_seconds_per_byte: Of each byte that comes or goes.
        latency_seconds: Of an exchange without bytes.
    """

    seconds_per_byte: float
    staging_seconds_per_byte: float
    latency_seconds: float

    def seconds(self, sent_bytes: float, received_bytes: float) -> float:
        """Of an exchange for which nobody has to be waited for."""
        if sent_bytes == 0 and received_bytes == 0:
            return 0.0
        staged = self.staging_seconds_per_byte * (sent_bytes + received_bytes)
        return self.latency_seconds + self.seconds_per_byte * max(sent_bytes, received_bytes) + staged
