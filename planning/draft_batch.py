"""How a batch of samples is divided."""

from __future__ import annotations

from collections.abc import Sequence

from nugnn.planning.baselines import baseline_shares
from nugnn.planning.batch_shares import fastest_split, split_by_shares
from nugnn.planning.cluster import Cluster
from nugnn.planning.draft import Draft, all_fit, as_baseline, asked_shares, by_kind, check_fits, usable_bytes
from nugnn.planning.forecast import Forecast, StepModel
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import BASELINES, SharesBy


def draft_of_batch(
    model: StepModel,
    batch: int,
    cluster: Cluster,
    *,
    shares_by: SharesBy = "auto",
    shares: Sequence[float] | None = None,
    precision: str = "fp32",
) -> Draft:
    """How a batch of samples is divided.

    Args:
        model: What a step costs; parts have ``batch`` alone.
        batch: Samples of all together.
        cluster: The devices.
        shares_by: ``auto`` for the fastest step; never slower, by the forecast, than any baseline that fits.
        shares: For ``given``.
        precision: For the baseline by FLOP/s.

    Raises:
        DoesNotFitError: The memories do not hold the batch.
        ValueError: There are fewer samples than devices.
    """
    work, limits, kinds = model.work, usable_bytes(cluster), cluster.kinds

    def tried(split: Sequence[int]) -> tuple[Forecast, bool]:
        parts = [PartSizes(batch=count) for count in split]
        held = by_kind(work.bytes, parts, kinds)
        return model.forecast(parts), all_fit(held, limits)

    splits = {n: split_by_shares(batch, baseline_shares(n, cluster.profiles, precision)) for n in BASELINES}
    known = {split: tried(split) for split in dict.fromkeys(splits.values())}
    if shares_by == "auto":
        fastest = fastest_split(work, batch, limits, kinds, list(splits.values()))
        known.setdefault(fastest, tried(fastest))
        split = min((s for s, (_, fits) in known.items() if fits), key=lambda s: known[s][0].step_seconds)
    else:
        split = split_by_shares(batch, asked_shares(shares_by, shares, cluster, precision))
        held = [work.bytes(rank, PartSizes(batch=count)) for rank, count in enumerate(split)]
        check_fits(
            held, limits, shares_by, cluster, remedy=", and so may a smaller --batch-size or more --micro-batches"
        )
        known.setdefault(split, tried(split))
    sizes = tuple(PartSizes(batch=count) for count in split)
    return Draft(
        shares_by=shares_by,
        sizes=sizes,
        bytes=tuple(int(x) for x in by_kind(work.bytes, sizes, kinds)),
        forecast=known[split][0],
        baselines=tuple(
            as_baseline(name, [n / batch for n in each], known[each][0].step_seconds, fits=known[each][1])
            for name, each in splits.items()
        ),
    )
