"""The buckets of DistributedDataParallel's steps: where one begins and ends, and in which its gradients are summed.

A bucket is handed over by the thread of backward, and summed by the lane's.
"""

from __future__ import annotations

from collections.abc import Sequence

from nugnn.comm.compression.earlier_buckets import Bucket, EarlierBuckets, Sum


class StepBuckets:
    """Tells the first and the last bucket of a step, and sums in those of an earlier run while they count.

    Args:
        num_gradients: Of a step.
        steps_to_lay_out: Of a process, until DDP has laid out its buckets for good.
    """

    def __init__(self, num_gradients: int, steps_to_lay_out: int) -> None:
        self._num_gradients, self._steps_to_lay_out = num_gradients, steps_to_lay_out
        self.names: Sequence[Sequence[str]] = ()
        """Of the gradients in each bucket of the last step that came to its end."""
        self._coming: list[list[str]] = []
        """Of this step so far, as DDP hands them over."""
        self._earlier: EarlierBuckets | None = None

    def load(self, names: Sequence[Sequence[str]]) -> None:
        """Sum in these, which `names` gave in another process, until DDP has laid out its own; in DDP's if empty."""
        self.names = [[*each] for each in names]
        self._earlier = EarlierBuckets(self.names, self._steps_to_lay_out) if names else None

    @property
    def holds_back(self) -> bool:
        """Whether there are sums when a step's last bucket has come, and none before."""
        return self._earlier is not None

    def hand_over(self, names: list[str], *, is_at_front: bool) -> tuple[bool, bool]:
        """Whether gradients of these parameters are the first ones of a step, and the last ones.

        In the first step of a model whose graph is static DDP says of each bucket that it is at the front.
        """
        is_first = is_at_front and (self._is_whole or any(names[0] in before for before in self._coming))
        self._coming = [names] if is_first else [*self._coming, names]
        return is_first, self._is_whole

    @property
    def _is_whole(self) -> bool:
        return not self._coming or sum(map(len, self._coming)) == self._num_gradients

    def sum_(self, bucket: Bucket, sum_: Sum, *, is_first: bool, is_last: bool) -> None:
        """Now; or, where it `holds_back`, all of the step when the last bucket has come."""
        if self._earlier is None:
            sum_(bucket.values, bucket.names, bucket.orders)
            bucket.put()
            if is_last:
                self.names = self._coming
            return
        if is_first:
            self._earlier.forget()
        self._earlier.hold(bucket)
        if is_last:
            self.names = self._earlier.sum_(sum_)  # DDP goes on in these, and not in those of its first steps
            if self._earlier.is_done:
                self._earlier = None
