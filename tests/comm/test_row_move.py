"""Rows follow their nodes: nothing is lost, nothing comes twice, and each value stands where its id stands."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.comm.row_move import RowMove, starts_of
from nugnn.datasets.sparse import csr_matrix


def values_of(ids: Tensor) -> Tensor:
    """Two values for each id, which it decides."""
    return torch.stack([ids * 3 + 1, ids * ids], 1)


def runs_of(ids: Tensor) -> tuple[Tensor, Tensor]:
    """A run of 0 to 3 values for each id, and where they start."""
    lengths = ids % 4
    starts = starts_of(lengths)
    inside = torch.arange(int(starts[-1])) - torch.repeat_interleave(starts[:-1], lengths)
    return torch.repeat_interleave(ids, lengths) * 10 + inside, starts


def sparse_of(ids: Tensor) -> Tensor:
    values, starts = runs_of(ids)
    return csr_matrix(starts, values % 5, values.double(), (len(ids), 5))


@st.composite
def moves(draw: st.DrawFn) -> tuple[int, Tensor, Tensor]:
    """Ranks, and for each of some nodes the rank before and after; ranks may have none, or lose all."""
    size, num_nodes = draw(st.integers(1, 4)), draw(st.integers(0, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    before, after = (torch.from_numpy(rng.integers(0, size, num_nodes)) for _ in range(2))
    return size, before, torch.where(torch.from_numpy(rng.random(num_nodes) < draw(st.floats(0, 1))), after, before)


@given(moves())
@settings(max_examples=40)
def test_rows_runs_and_sparse_rows_stand_where_their_ids_stand(move: tuple[int, Tensor, Tensor]) -> None:
    size, before, after = move
    shuffled = torch.randperm(len(before), generator=torch.Generator().manual_seed(0))

    def check(ranks: Ranks) -> Tensor:
        ids = shuffled[before[shuffled] == ranks.rank]
        made = RowMove(ids, after[ids], ranks)
        new = made.new_ids
        assert torch.equal(new.sort().values, (after == ranks.rank).nonzero().flatten())
        stayed = ids[after[ids] == ranks.rank]
        assert torch.equal(new[: len(stayed)], stayed), "rows that stay keep their order, in front"
        assert torch.equal(made.rows(values_of(ids)), values_of(new))
        flags = made.rows(ids % 2 == 0)
        assert flags.dtype is torch.bool and torch.equal(flags, new % 2 == 0)
        values, starts = runs_of(ids)
        wanted, new_starts = runs_of(new)
        assert torch.equal(starts_of(made.rows(starts.diff())), new_starts)
        assert torch.equal(made.runs(values, starts, new_starts), wanted)
        assert torch.equal(made.rows(sparse_of(ids)).to_dense(), sparse_of(new).to_dense())
        by_id = RowMove(ids, after[ids], ranks, by_id=True)
        assert torch.equal(by_id.new_ids, new.sort().values)
        assert torch.equal(by_id.rows(values_of(ids)), values_of(by_id.new_ids))
        turned = RowMove(ids, after[ids], ranks, arranged_as=new.flip(0))
        assert torch.equal(turned.rows(ids), new.flip(0))
        assert made.num_moved == int((before != after).sum())
        return new

    assert len(torch.cat(run_local_ranks(size, check))) == len(before)


def test_runs_longer_than_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nugnn.comm.row_move._VALUES_PER_PASS", 4)
    before, after = torch.arange(40) % 2, torch.arange(40) % 3 % 2

    def check(ranks: Ranks) -> None:
        ids = (before == ranks.rank).nonzero().flatten()
        made = RowMove(ids, after[ids], ranks, by_id=True)
        values, starts = runs_of(ids)
        wanted, new_starts = runs_of(made.new_ids)
        assert torch.equal(made.runs(values, starts, new_starts), wanted)
        assert torch.equal(made.rows(values_of(ids)), values_of(made.new_ids))

    run_local_ranks(2, check)


def test_what_does_not_fit_is_refused() -> None:
    ids = torch.arange(4)
    with pytest.raises(ValueError, match="destination 1 is no rank; they are 0 to 0"):
        RowMove(ids, torch.tensor([0, 1, 0, 0]), Ranks())
    with pytest.raises(ValueError, match="there are 3 destinations for 4 rows"):
        RowMove(ids, torch.zeros(3), Ranks())
    with pytest.raises(ValueError, match="cannot be arranged as asked"):
        RowMove(ids, torch.zeros(4), Ranks(), arranged_as=torch.tensor([0, 1, 2, 9]))
    with pytest.raises(ValueError, match="expected 4 rows, one for each node of this rank, got 5"):
        RowMove(ids, torch.zeros(4), Ranks()).rows(torch.zeros(5))
